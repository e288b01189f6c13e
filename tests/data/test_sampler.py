"""Order of prompts: a pure function, without repetition in an episode."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.core import DataError
from verl.data import PromptSampler

sizes = st.integers(1, 60).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n)))


def episode_of(sampler, episode):
    return [i for step in range(sampler.steps_per_episode) for i in sampler.indices(episode, step)]


@given(sizes, st.integers(0, 5), st.integers(0, 3), st.booleans())
def test_an_episode_visits_each_prompt_at_most_once(size, seed, episode, shuffle):
    num, per_step = size
    sampler = PromptSampler(num, per_step, seed, shuffle)
    seen = episode_of(sampler, episode)
    assert len(seen) == len(set(seen)) == num // per_step * per_step
    assert set(seen) <= set(range(num))
    if not shuffle:
        assert seen == list(range(len(seen)))


@given(sizes, st.integers(0, 5))
def test_any_step_is_known_without_those_before(size, seed):
    num, per_step = size
    whole = [PromptSampler(num, per_step, seed).indices(1, s) for s in range(num // per_step)]
    last = num // per_step - 1
    assert PromptSampler(num, per_step, seed).indices(1, last) == whole[last]


def test_orders_differ_between_episodes_and_seeds_and_reproduce():
    def order(seed, episode):
        return episode_of(PromptSampler(50, 5, seed), episode)

    assert order(0, 0) == order(0, 0)
    assert order(0, 0) != order(0, 1) and order(0, 0) != order(1, 0)
    assert sorted(order(0, 0)) == list(range(50))


def test_the_order_is_the_same_in_another_process():
    code = "from verl.data.sampler import PromptSampler; print(PromptSampler(20, 20, 7).indices(2, 0))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(PromptSampler(20, 20, 7).indices(2, 0))


def test_prompts_at_the_end_of_one_order_come_up_in_others():
    sampler = PromptSampler(10, 4, 0)
    assert set().union(*(episode_of(sampler, e) for e in range(6))) == set(range(10))


def test_data_smaller_than_a_step():
    with pytest.raises(DataError, match=r"3 training prompts, fewer than trainer\.prompts_per_step=4"):
        PromptSampler(3, 4, 0)


def test_step_out_of_range():
    with pytest.raises(AssertionError):
        PromptSampler(8, 4, 0).indices(0, 2)
