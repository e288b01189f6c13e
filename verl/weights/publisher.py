"""Publishing: the rollout engine gets the trainer's weights under a new version number."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from verl.core.errors import WeightsError
from verl.core.protocols import RolloutEngine


class InProcessPublisher:
    """Engine and trainer in one process. An engine that reads the trainer's own storage wants nothing sent, so
    publishing to it is one number and the end of its caches; another gets the weights that it names, one at a time.
    """

    def __init__(self, engine: RolloutEngine, shards: Callable[[], Mapping[str, Tensor]]):
        self.engine, self.shards = engine, shards

    def publish(self, version: int) -> None:
        wanted = self.engine.wanted()
        if wanted:
            have = self.shards()
            for name in wanted:
                self.engine.receive(name, have[name])
        self.engine.commit(version)


class Receives(Protocol):
    """The weight side of a rollout engine."""

    def wanted(self) -> Sequence[str]: ...

    def receive(self, name: str, tensor: Tensor) -> None: ...

    def commit(self, version: int) -> None: ...


class Publishes(Protocol):
    """What makes the weights of now those that generate."""

    def publish(self, version: int) -> None: ...


class Carrier(Protocol):
    """What brings a rank the shards that it generates with: `Transport`, or `AllGather` to compare with."""

    def names(self) -> set[str]:
        """Names of the shards of this rank."""

    def stream(self, have: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """(name, shard), each as soon as it is complete. have: name -> training shard of this rank."""


class RankPublisher:
    """One rank's side of a model that lies on several. Every rank publishes at the same time: its training shards go to
    whoever generates with them, and its own engine receives the shards of its place in the layout that generates.

    What the engine receives may be a view of a training shard: it must copy it, or read it only until the next update.
    shards: this rank's training shards by name, as `Route.holds` says.
    """

    def __init__(self, engine: Receives, shards: Callable[[], Mapping[str, Tensor]], carrier: Carrier):
        self.engine, self.shards, self.carrier = engine, shards, carrier

    def publish(self, version: int) -> None:
        """WeightsError: the engine wants other names than its place in the layout gives, or a rank is late."""
        wanted, given = set(self.engine.wanted()), self.carrier.names()
        if wanted != given:
            odd = ", ".join(sorted(wanted ^ given)[:3])
            raise WeightsError(
                f"the rollout engine wants {len(wanted)} weights and the generation layout gives {len(given)}; "
                f"in one of them only: {odd}"
            )
        for name, tensor in self.carrier.stream(self.shards()):
            self.engine.receive(name, tensor)
        self.engine.commit(version)
