"""A plan that is cut: every sequence once, by its number there, under the counts of the whole."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from verl.config.algorithm import UpdateConfig
from verl.controller.partition import partition
from verl.core.batch import Batch, cumulative
from verl.workers.update_plan import UpdatePlan


@given(
    st.lists(st.tuples(st.integers(2, 9), st.integers(0, 4)), min_size=1, max_size=16),
    st.integers(1, 4),
    st.integers(1, 3),
    st.booleans(),
)
def test_split(rows: list[tuple[int, int]], ranks: int, minis: int, together: bool) -> None:
    lengths, groups = [n for n, _ in rows], [g for _, g in rows]
    mask = torch.cat([torch.tensor([False] + [True] * (n - 1)) for n in lengths])
    batch = Batch(cumulative(torch.tensor(lengths)), {"loss_mask": mask, "group_id": torch.tensor(groups)})
    plan = UpdatePlan.of(batch, UpdateConfig(epochs=2, mini_batches=minis), 0, 1)
    parts = partition(lengths, ranks, groups if together else None)
    split = plan.split(parts)
    assert len(split) == ranks and all(len(p.minibatches) == len(plan.minibatches) for p in split)
    for number, whole in enumerate(plan.minibatches):
        mine = [p.minibatches[number] for p in split]
        found = [parts[r][k] for r, mini in enumerate(mine) for k in mini.index]
        assert sorted(found) == list(whole.index)
        assert whole.places == tuple(range(whole.count))
        for r, mini in enumerate(mine):
            assert [whole.index[place] for place in mini.places] == [parts[r][k] for k in mini.index]
        assert all(mini.total == whole.total and mini.seed == whole.seed for mini in mine)
        assert all(list(mini.index) == sorted(mini.index) for mini in mine)
