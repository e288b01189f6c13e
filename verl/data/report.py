"""What happened to the rows on their way to prompts: every row that is not trained on is counted here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from verl.core import Prompt


@dataclass
class DataReport:
    """Counts of one loaded data set.

    rows: read. prompts: made of them. empty: without any text, dropped. dropped, truncated: over the limit, and left
    out or cut on the left. held_out: not trained on, as their question is evaluated.
    """

    name: str
    form: str = ""
    rows: int = 0
    prompts: int = 0
    empty: int = 0
    dropped: int = 0
    truncated: int = 0
    held_out: int = 0
    train: int = 0
    eval: int = 0
    limit: int = 0
    tokens: tuple[int, float, int] = (0, 0.0, 0)
    sources: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)

    def count_train(self, prompts: Sequence[Prompt]) -> None:
        """Sizes and sources of the training prompts."""
        lengths = [len(p.token_ids) for p in prompts]
        self.train = len(prompts)
        self.tokens = (min(lengths), sum(lengths) / len(lengths), max(lengths))
        self.sources = Counter(p.source for p in prompts if p.source is not None)

    def lines(self) -> list[str]:
        """Lines to print, the most important first; a line appears only if its count is not 0."""
        low, mean, high = self.tokens
        out = [
            f"Data: {self.name}, form {self.form}: {self.rows} rows, {self.prompts} prompts; "
            f"{self.train} to train on, {self.eval} to evaluate",
            f"Data: prompt tokens {low} to {high}, mean {mean:.1f}; limit {self.limit}",
        ]
        counts = (
            (self.dropped, f"dropped, longer than {self.limit} tokens"),
            (self.truncated, f"cut on the left, longer than {self.limit} tokens"),
            (self.empty, "dropped, without text"),
            (self.held_out, "not trained on, as their question is held out for evaluation"),
        )
        out += [f"Data: prompts {what}: {number}" for number, what in counts if number]
        if self.sources:
            out.append("Data: sources " + ", ".join(f"{name} ({n})" for name, n in self.sources.most_common()))
        return out + [f"Data: {note}" for note in self.notes]
