"""Costs of a small model against numbers worked out by hand, and of a step's parts against simple laws."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.planning.problems import B7, SMALL, roles, shape
from verl.core.errors import ConfigError
from verl.parallel.layout import Layout
from verl.planning import cost
from verl.planning.hardware import Hardware
from verl.planning.shape import activation_bytes, cache_bytes, share, state_bytes
from verl.planning.workload import Workload

ACTOR, REF, CRITIC = roles(SMALL)
LAYER = 64 * 64 * 2 + 2 * 64 * 32 + 3 * 64 * 96 + 2 * 64
TABLE = 100 * 64
HW = Hardware(8, gpus_per_node=4, tflops=1, hbm_gbps=1, link_gbps=1, network_gbps=0.5, host_gbps=0.25)
WORK = Workload(prompts=4, samples=2, prompt_tokens=10, response_tokens=6, mini_batches=2, epochs=3, micro_tokens=26)


def test_parameters_are_those_of_the_model() -> None:
    hf = LlamaConfig(
        vocab_size=100, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        count = sum(p.numel() for p in LlamaForCausalLM(hf).parameters())
    assert share(ACTOR, 1, 1).params == count == 4 * LAYER + 2 * TABLE + 64
    assert share(CRITIC, 1, 1).params == count - TABLE


def test_largest_part_of_a_rank_by_hand() -> None:
    cut = share(ACTOR, 2, 1)
    assert (cut.layers, cut.layer, cut.ends) == (4, (LAYER - 2 * 64) // 2 + 2 * 64, TABLE + 64)
    staged = share(ACTOR, 1, 3)  # 2 of 4 layers, and the head with its norm
    assert (staged.layers, staged.ends, staged.products) == (2, TABLE + 64, 2 * LAYER + TABLE)
    four = share(ACTOR, 4, 1)  # 2 key heads on 4 ranks: each holds a whole one
    assert four.layer == 64 * 16 * 2 + 2 * 64 * 16 + 3 * 64 * 24 + 2 * 64


def test_state_and_cache_by_hand() -> None:
    n = 4 * LAYER + 2 * TABLE + 64
    assert state_bytes(ACTOR) == 18 * n and state_bytes(REF) == 2 * n
    assert state_bytes(ACTOR, fsdp=4) == 16 * n / 4 and state_bytes(REF, fsdp=4) == 2 * n / 4
    assert cache_bytes(ACTOR, 1) == 2 * 4 * 2 * 16 * 2 and cache_bytes(ACTOR, 2) == cache_bytes(ACTOR, 4) == 256
    layer = 4 * 64 + 3 * 64 + 4 * 32 + 4 * 96
    assert activation_bytes(SMALL, 2, False) == 4 * layer * 2
    assert activation_bytes(SMALL, 2, True) == (4 * 64 + layer) * 2
    assert activation_bytes(SMALL, 2, False, tp=2, layers=1) == (4 * 64 + (3 * 64 + 4 * 32 + 4 * 96) / 2) * 2


def test_scoring_by_hand() -> None:
    tokens = 2 * 10 + 4 * 6  # of 2 of 4 prompts, on each of 2 replicas; a prompt once for its samples
    assert WORK.computed(4) == tokens
    flops = tokens * (2 * (4 * LAYER + TABLE) + 4 * (64 * 4) * 8)
    found = cost.scoring(REF, WORK, Layout(dp=2), HW)
    assert found[cost.COMPUTE] == pytest.approx(flops / 1e12)
    assert sum(found.values()) == pytest.approx(flops / 1e12)


def test_training_in_stages_by_hand() -> None:
    """2 replicas of 2 stages: 4 sequences an update, 2 a replica: 10 + 12 tokens, one micro-batch."""
    found = cost.training(ACTOR, WORK, Layout(dp=2, pp=2), HW)
    part = 2 * LAYER + TABLE
    compute = 3 * 22 * (2 * part + 4 * (64 * 2) * 8) / 1e12
    updates = 3 * 2
    assert found[cost.COMPUTE] == pytest.approx(updates * compute)
    assert found[cost.BUBBLE] == pytest.approx(updates * compute)  # one turn more
    assert found[cost.STAGES] == pytest.approx(updates * 2 * 22 * 64 * 2 / 1e9)
    params = part + 64
    assert found[cost.DP] == pytest.approx(updates * (4 * params / 1e9 + cost.LATENCY))  # 2 (n-1)/n = 1
    assert found[cost.OPTIMIZER] == pytest.approx(updates * 32 * params / 1e9)
    assert found[cost.TP] == found[cost.FSDP] == found[cost.HOST] == 0


def test_sums_and_gathers_by_hand() -> None:
    """tp 2 x fsdp 4 on two nodes of 4: tp stays within a node, fsdp crosses."""
    found = cost.training(ACTOR, WORK, Layout(dp=4, tp=2, fsdp=4), HW)
    tokens = 10 + 6  # one sequence, one micro-batch
    reduce = 2 * 1 / 2 * tokens * 64 * 2 / 1e9 + cost.LATENCY
    assert found[cost.TP] == pytest.approx(6 * 2 * 4 * 2 * reduce)  # updates x sums a layer x layers x both passes
    params = 4 * ((LAYER - 128) // 2 + 128) + TABLE + 64
    gather = 3 / 4 * params * 2 / 0.5e9 + cost.LATENCY
    scatter = 3 / 4 * params * 4 / 0.5e9 + cost.LATENCY
    assert found[cost.FSDP] == pytest.approx(6 * (2 * gather + scatter))
    assert found[cost.DP] == 0


def test_generation_by_hand() -> None:
    """8 sequences on 2 replicas of tp 1: 4 each; the cache holds 3, so two waves of 2."""
    a_slot = 16 * 2 * 4 * 2 * 16 * 2
    assert cost.slot(ACTOR, WORK, 1) == a_slot
    made = cost.generation(ACTOR, WORK, Layout(dp=2), 1, 3.5 * a_slot, HW)
    assert made is not None
    assert (made.at_once, made.waves, made.cache, made.weights, made.reshard) == (2, 2, 2 * a_slot, 0, 0)
    products = 4 * LAYER + TABLE
    prefill = 20 * (2 * products + 4 * 256 * 5) / 1e12
    reads = (6 * 2 * products * 2 + 4 * 6 * 13 * 2 * 4 * 2 * 16 * 2) / 1e9
    assert made.parts == pytest.approx({cost.PREFILL: prefill, cost.DECODE_READS: reads, cost.TP: 0})
    assert cost.generation(ACTOR, WORK, Layout(dp=2), 1, 0.9 * a_slot, HW) is None
    with pytest.raises(ConfigError, match="parallel.generation_tp: 3 does not divide"):
        cost.generation(ACTOR, WORK, Layout(dp=2), 3, 1e9, HW)


def test_resharding_is_the_volume_of_the_paper() -> None:
    for tp, pp, tg in ((4, 2, 2), (8, 1, 1), (2, 4, 2), (4, 4, 4), (1, 8, 1)):
        assert cost.resharded(720.0, Layout(tp=tp, pp=pp), tg) == pytest.approx(720 * (tp * pp - tg) / (tg * tp * pp))
    assert cost.resharded(720.0, Layout(dp=8, fsdp=8), 1) == pytest.approx(720 * 7 / 8)
    assert cost.resharded(720.0, Layout(dp=8), 4) == 0  # a rank already holds what it needs


def test_a_group_leaves_its_node_where_it_does_not_divide_it() -> None:
    assert HW.bandwidth(4, 8) == 1e9 and HW.bandwidth(8, 8) == 0.5e9 and HW.bandwidth(3, 3) == 1e9
    assert HW.bandwidth(3, 12) == 0.5e9


def test_offload_takes_the_state_off_the_gpu_and_costs_time() -> None:
    layout, off = Layout(dp=4, fsdp=4), Workload(4, 2, 10, 6, offload=True)
    plain = Workload(4, 2, 10, 6)
    assert cost.kept(ACTOR, off, layout) == 0 < cost.kept(ACTOR, plain, layout)
    assert cost.kept(REF, off, layout) == cost.kept(REF, plain, layout)
    assert sum(cost.training(ACTOR, off, layout, HW).values()) > sum(cost.training(ACTOR, plain, layout, HW).values())


def test_passing_memory_by_hand() -> None:
    tokens, width = 26, 2  # a micro-batch
    logits = 2 * 100 * tokens * width
    assert cost.passing(ACTOR, WORK, Layout()) == tokens * activation_bytes(SMALL, width, False) + logits
    sharded = cost.passing(ACTOR, WORK, Layout(dp=2, fsdp=2))
    gathered = (2 * TABLE + 64 + 2 * LAYER) * width * 2
    here = WORK.computed(2)
    assert sharded == here * activation_bytes(SMALL, width, False) + 2 * 100 * here * width + gathered


def test_7b_state_is_what_is_known_of_it() -> None:
    actor = roles(B7)[0]
    assert share(actor, 1, 1).params == 6_738_415_616
    assert state_bytes(actor) / 1e9 == pytest.approx(121.3, abs=0.1)


@pytest.mark.parametrize("name", ["gpus", "tflops", "gpu_memory_gb"])
def test_hardware_is_checked(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--{name}: 0 must be above 0"):
        Hardware(**{"gpus": 8, name: 0})


def test_uneven_layers_count_the_longest_stage() -> None:
    actor = roles(shape(layers=5, hidden=64, inner=96, heads=4, kv=2, vocab=100))[0]
    assert share(actor, 1, 2).layers == 3
