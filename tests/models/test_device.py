"""Nothing of a model's body is read back to the host: on the meta device, which has no values, any such read raises."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.models.helpers import BF16, family_batch
from tests.tiny import make_model
from verl.algos.segments import Segments
from verl.models.load import load_policy, load_value_model
from verl.models.packed import PackedInput


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
@pytest.mark.parametrize("share", [False, True])
def test_forward_and_backward_wait_for_no_value(tmp_path: Path, family: str, share: bool, recompute: bool) -> None:
    folder = make_model(tmp_path / "model", family)
    policy = load_policy(folder, BF16).to("meta")
    critic = load_value_model(folder, BF16).to("meta")
    packed = PackedInput.of(family_batch(), share, "meta")
    assert {packed.token_ids.device.type, packed.pred.device.type, packed.plan.place.device.type} == {"meta"}
    if recompute:
        policy.recompute_layers()
        critic.recompute_layers()
    policy.logits(policy.features(packed)).float().sum().backward()
    assert all(p.grad is not None and p.grad.is_meta for p in policy.parameters())
    assert critic.values(packed).is_meta


def test_what_says_where_sequences_begin_stays_on_the_host() -> None:
    batch = family_batch()
    moved = batch.to("meta")
    assert moved["token_ids"].is_meta and moved.cu_seqlens.device.type == "cpu"
    assert torch.equal(moved.lengths, batch.lengths)
    assert Segments.of(moved.cu_seqlens, moved["loss_mask"]).counts.is_meta
