"""Which sequence lies in which slot of the cache."""

from __future__ import annotations

from dataclasses import replace

from verl.engines.rollout.admission import Admission, Budget
from verl.engines.rollout.cache import SlotCache
from verl.engines.rollout.scheduler import Filling
from verl.engines.rollout.sequence import Sequence


class Slots:
    """Sequence i of `running` lies in slot i; a prompt that is being filled in lies behind them all."""

    def __init__(self, cache: SlotCache, budget: Budget):
        self.cache = cache
        self.running: list[Sequence] = []
        self.filling: Filling | None = None
        self._budget = budget

    @property
    def count(self) -> int:
        """Slots in use."""
        return len(self.running) + (self.filling is not None)

    @property
    def used(self) -> int:
        """Slots that hold keys."""
        return len(self.running) + (self.filling is not None and self.filling.at > 0)

    @property
    def tallest(self) -> int:
        """Tokens that the longest sequence has, or will have once it is filled in."""
        filling = len(self.filling.unit.tokens) if self.filling else 0
        return max([filling, *(s.length for s in self.running)])

    def admission(self) -> Admission:
        """Who may join those that run now."""
        return Admission(self._budget, self.running)

    def fitting(self, more: int) -> int:
        """How many slots, up to `more`, may be added for sequences as long as those that are here."""
        return next((n for n in range(more, 0, -1) if self._budget.fits(self.count + n, self.tallest)), 0)

    def reserve(self, used_slots: int, more: int = 0) -> None:
        """Room for every token so far, in `more` slots more; the first `used_slots` hold keys that stay."""
        filled = [self.filling.at] if self.filling and used_slots > len(self.running) else []
        # The token drawn last has no keys yet: it is the input of the step that asks.
        used_tokens = max([*(s.length - 1 for s in self.running[:used_slots]), *filled], default=0)
        members = self.filling.unit.members if self.filling else ()
        longest = max(s.longest for s in (*self.running, *members))
        self.cache.reserve(self.count + more, self.tallest, longest, used_slots, used_tokens)

    def make_room(self) -> list[Sequence]:
        """Sequences, oldest first, that must leave so that the others can have one more token each.

        A prompt that is being filled in goes first, then the youngest. The oldest always stays, so someone gets done.
        """
        gone: list[Sequence] = []
        if not self._budget.fits(self.count, self.tallest):
            gone += self.drop_filling()
        while not self._budget.fits(self.count, self.tallest):
            youngest = max(range(len(self.running)), key=lambda i: self.running[i].arrival)
            gone.insert(0, self.running[youngest])
            self.free([youngest])
        return gone

    def drop_filling(self) -> list[Sequence]:
        """Forget the prompt that is being filled in; the sequences that waited for it."""
        gone = list(self.filling.unit.members) if self.filling else []
        self.filling = None
        return gone

    def leave_filling(self, ids: set[str]) -> list[Sequence]:
        """Take these requests out of the prompt that is being filled in, which goes on for those that are left."""
        if self.filling is None:
            return []
        unit = self.filling.unit
        gone = [s for s in unit.members if s.request.id in ids]
        self.filling.unit = replace(unit, members=tuple(s for s in unit.members if s.request.id not in ids))
        if not self.filling.unit.members:
            self.filling = None
        return gone

    def free(self, slots: list[int]) -> None:
        """Let go of these slots; sequences at the end move into the holes, so that the running ones stay in front."""
        before, count = len(self.running), len(self.running) - len(slots)
        gone = set(slots)
        holes = [i for i in slots if i < count]
        movers = [i for i in range(count, before) if i not in gone]
        if movers:
            self.cache.move(movers, holes, max(self.running[i].length for i in movers))
        for hole, mover in zip(holes, movers, strict=True):
            self.running[hole] = self.running[mover]
        del self.running[count:]
        if self.filling and slots:
            self.cache.move([before], [count], self.filling.at)

    def clear(self) -> list[Sequence]:
        """Let go of everything; the sequences that were here, oldest first. Those of a prompt that was being filled
        in lose what it had.
        """
        if self.filling and self.filling.at > 0:
            for s in self.filling.unit.members:
                s.setbacks += 1
        gone = sorted(self.running + self.drop_filling(), key=lambda s: s.arrival)
        self.running = []
        return gone
