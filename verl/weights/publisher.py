"""Publishing: the rollout engine gets the trainer's weights under a new version number."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

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
