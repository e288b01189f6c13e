"""A task of a few numbers on which every algorithm must learn, and on which the usual faults do not.

The policy is a table of logits [prompts, vocabulary], the same at every position. A sequence is a prompt token, then
four times: a sampled token, and two observations that the environment writes. The score is the share of sampled tokens
that are the prompt's target. Observations mislead: after a hit the environment writes a wrong token, after a miss
another one. So whoever trains on observations learns the wrong token. Some rows are aborted and come with a high reward
for a wrong token; whoever counts them is misled as well.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.algos.aggregate import Denominators
from verl.algos.algorithm import Algorithm
from verl.algos.presets import PRESETS, preset_values
from verl.algos.segments import Segments
from verl.algos.value_loss import value_loss
from verl.config import resolve
from verl.core.batch import Batch, cumulative
from verl.workers.update_plan import MiniBatch, UpdatePlan

PROMPTS, VOCAB, TURNS, SAMPLES = 4, 6, 4, 6
LENGTH = 1 + 3 * TURNS
TARGET = np.arange(PROMPTS) % VOCAB


class Toy:
    """One run. fault: `sign`, `mask` or `denominator` breaks exactly that; None is the algorithm as it is."""

    def __init__(self, preset: str, lr: float, fault: str | None = None, seed: int = 0):
        has_kl = PRESETS[preset].values["algorithm"]["kl"]["coef"] > 0  # a small one: scores here are small as well
        tree = {
            "algorithm": {"name": preset, **({"kl": {"coef": 0.01}} if has_kl else {})},
            "rollout": {"n": SAMPLES, "max_response_tokens": TURNS},
            "update": {"mini_batches": 2},
            "trainer": {"prompts_per_step": PROMPTS},
        }
        self.cfg = resolve([tree], preset_values())
        self.algorithm = Algorithm(self.cfg)
        self.lr, self.fault, self.rng = lr, fault, np.random.default_rng(seed)
        self.policy = torch.zeros(PROMPTS, VOCAB, dtype=torch.float64, requires_grad=True)
        self.critic = torch.zeros(PROMPTS, LENGTH, dtype=torch.float64, requires_grad=True)

    def accuracy(self) -> float:
        """Exact probability that a sampled token is the target, mean over prompts."""
        law = torch.softmax(self.policy.detach(), -1)
        return float(law[torch.arange(PROMPTS), torch.from_numpy(TARGET)].mean())

    def train(self, steps: int) -> float:
        for step in range(1, steps + 1):
            batch, where = self.sample()
            batch, _ = self.algorithm.credit(batch)
            if self.fault == "sign":
                batch = batch.with_(advantages=-batch["advantages"])
            for mini in UpdatePlan.of(batch, self.cfg.update, 0, step).minibatches:
                self.update(batch, where, mini)
        return self.accuracy()

    def sample(self) -> tuple[Batch, tuple[Tensor, Tensor]]:
        """A batch with every column that any algorithm may need, and (prompt, position) of each of its tokens."""
        law = torch.softmax(self.policy.detach(), -1).numpy()
        prompt = np.repeat(np.arange(PROMPTS), SAMPLES + 1)
        rows = len(prompt)
        aborted = np.arange(rows) % (SAMPLES + 1) == SAMPLES
        drawn = np.stack([self.rng.choice(VOCAB, size=TURNS, p=law[p]) for p in prompt])
        wrong = (TARGET[prompt] + 1) % VOCAB
        drawn[aborted] = wrong[aborted, None]
        hit = drawn == TARGET[prompt][:, None]
        echo = np.where(hit | aborted[:, None], wrong[:, None], (wrong[:, None] + 1) % VOCAB)
        tokens = np.concatenate([np.zeros((rows, 1), int), np.stack([drawn, echo, echo], -1).reshape(rows, -1)], 1)
        mask = np.zeros(tokens.shape, bool)
        mask[:, 1::3] = True
        if self.fault == "mask":
            mask[:, 1:], aborted = True, np.zeros(rows, bool)
        score = np.where(np.arange(rows) % (SAMPLES + 1) == SAMPLES, 10.0, hit.mean(1))
        where = torch.from_numpy(np.repeat(prompt, LENGTH)), torch.arange(LENGTH).repeat(rows)
        token_ids, flat_mask = torch.from_numpy(tokens.reshape(-1)), torch.from_numpy(mask.reshape(-1))
        logprobs = torch.where(flat_mask, self.logprobs(token_ids, where).detach().float(), torch.zeros(()))
        uniform = torch.where(flat_mask, torch.tensor(-np.log(VOCAB), dtype=torch.float32), torch.zeros(()))
        greedy = (law.argmax(1) == TARGET).astype(np.float32)
        columns: dict[str, Any] = {
            "token_ids": token_ids,
            "loss_mask": flat_mask,
            "rollout_logprobs": logprobs,
            "old_logprobs": logprobs,
            "ref_logprobs": uniform,
            "values": self.critic.detach()[where].float(),
            "sum_pi_squared": torch.from_numpy((law**2).sum(1)).float()[where[0]],
            "group_id": torch.from_numpy(prompt),
            "reward": torch.from_numpy(score).float(),
            "greedy_reward": torch.from_numpy(greedy[prompt]),
            "reward_parts": torch.from_numpy(np.stack([score, (drawn != wrong[:, None]).mean(1)], 1)).float(),
            "reward_weights": torch.tensor([[1.0, 0.5]]).repeat(rows, 1),
            "excluded": torch.from_numpy(aborted),
        }
        return Batch(cumulative(torch.full((rows,), LENGTH)), columns), where

    def logprobs(self, token_ids: Tensor, where: tuple[Tensor, Tensor]) -> Tensor:
        return torch.log_softmax(self.policy, -1)[where[0], token_ids]

    def update(self, batch: Batch, where: tuple[Tensor, Tensor], mini: MiniBatch) -> None:
        """One step of plain gradient descent for the policy and one for the critic, in parts of five rows."""
        total = mini.total
        if self.fault == "denominator":  # every slot and every row counted, on each of two ranks
            slots = 2.0 * len(mini.index) * LENGTH
            total = Denominators(slots, slots, slots)
        whole, places = self.part(batch, where, mini.index)
        if self.algorithm.policy_loss.prepare is not None:
            whole = self.algorithm.prepare(whole, self.logprobs(whole["token_ids"], places).detach().float(), 1)
        for start in range(0, len(mini.index), 5):
            rows = range(start, min(start + 5, len(mini.index)))
            part, at = self.part(whole, places, rows)
            if self.fault == "denominator" and "group_tokens" in part:
                part = part.with_(group_tokens=part["group_tokens"] * 6)
            loss, _ = self.algorithm.actor_loss(self.logprobs(part["token_ids"], at), None, part, total)
            loss.backward()
            if "values" in self.algorithm.needs:
                s = Segments.of(part.cu_seqlens, part["loss_mask"])
                error, _ = value_loss(s, self.critic[at], part["values"], part["returns"], 0.5)
                (error.sum() / mini.total.tokens).backward()
        for table, lr in ((self.policy, self.lr), (self.critic, 4.0)):
            if table.grad is not None:
                table.data -= lr * table.grad
                table.grad = None

    @staticmethod
    def part(batch: Batch, where: tuple[Tensor, Tensor], index: Any) -> tuple[Batch, tuple[Tensor, Tensor]]:
        places = torch.cat([torch.arange(i * LENGTH, (i + 1) * LENGTH) for i in index])
        return batch.take(list(index)), (where[0][places], where[1][places])
