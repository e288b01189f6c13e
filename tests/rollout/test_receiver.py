"""Weights of an engine's own: what comes is there, what was freed takes no memory."""

import torch
from torch import nn

from verl.engines.rollout.receiver import Receiver


class Counts:
    """An engine of which only the version matters here."""

    version = 0

    def commit(self, version: int) -> None:
        self.version = version


def test_weights_come_go_and_come_again() -> None:
    policy = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2, bias=False)).to(torch.bfloat16)
    engine = Counts()
    receiver = Receiver(engine, policy)  # type: ignore[arg-type]
    assert list(receiver.wanted()) == ["0.weight", "0.bias", "1.weight"]
    for version in (1, 2):
        new = {name: torch.randn(p.shape) for name, p in policy.named_parameters()}
        for name, tensor in new.items():
            receiver.receive(name, tensor)
        receiver.commit(version)
        assert engine.version == version
        assert all(torch.equal(p, new[name].to(torch.bfloat16)) for name, p in policy.named_parameters())
        receiver.free()
        assert all(p.untyped_storage().nbytes() == 0 for p in policy.parameters())
