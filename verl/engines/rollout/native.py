"""Continuous batching on the native decoder, with the policy's own parameters: the weights exist once.

A request's life: `submit` checks and queues it; `poll` either prefills waiting prompts into free slots and draws their
first token, or draws one more token for every running sequence; an end token or the length limit frees its slot, which
the last running sequence moves into; the Completion leaves with that poll.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from verl.core import Completion, GenRequest, RolloutError
from verl.core.protocols import Place
from verl.engines.rollout import kernels
from verl.engines.rollout.attend import DecodeAttention, PrefillAttention
from verl.engines.rollout.base import Engine, Limits, SharedWeights, context_of, positive
from verl.engines.rollout.cache import Prefix, SlotCache
from verl.engines.rollout.cpu_decoder import CPUDecoder, supported
from verl.engines.rollout.prefill import plan_prefill
from verl.engines.rollout.sampling import Draw, sample, sample_whole
from verl.engines.rollout.scheduler import Unit, Waiting
from verl.engines.rollout.sequence import Sequence as Running
from verl.models.attention import PackedAttention
from verl.models.decoder import Decoder
from verl.models.plan import Plan
from verl.models.policy import Policy

_BURST = 8
"""Tokens still to come for which packing the weights pays."""
_LOGITS = 6 << 20
"""Logits held at one time. 24 MB in fp32: small enough that the C allocator keeps the block for the next step."""


class NativeEngine(SharedWeights, Engine):
    """RolloutEngine on a native Policy. Up to `max_sequences` decode together; more wait, and none is lost.

    prefill_tokens: prompt tokens computed in one step (a longer prompt goes alone).
    max_model_len: longest prompt and response together; None: the model's own limit.
    compile: "on", "off" or "auto": the kernels of cached decoding (CPU, bf16), auto where there is a compiler.
    """

    def __init__(
        self,
        policy: Policy,
        eos_token_ids: Iterable[int],
        *,
        max_sequences: int = 256,
        prefill_tokens: int = 4096,
        max_model_len: int | None = None,
        compile: str = "auto",
        version: int = 0,
    ):
        config = policy.decoder.config
        self.policy = policy
        self.version = version
        context = context_of(config.max_positions, max_model_len)
        self.limits = Limits(config.vocab_size, context, tuple(eos_token_ids))
        self._max_sequences = positive("max_sequences", max_sequences)
        self._prefill_tokens = positive("prefill_tokens", prefill_tokens)
        weight = next(policy.parameters())
        self._device = weight.device
        heads = (config.num_kv_heads, config.head_dim)
        self._cache = SlotCache(config.num_layers, *heads, max_sequences, weight.dtype, weight.device)
        self._waiting = Waiting()
        self._running: list[Running] = []
        self._prefix: Prefix | None = None
        self._fast = self._fast_decoder(compile)
        self._packed: CPUDecoder | None = None

    def _fast_decoder(self, compile: str) -> CPUDecoder | None:
        if not supported(self.policy):
            if compile == "on":
                raise RolloutError(
                    "rollout.compile=on: the kernels are for bfloat16 on a CPU that has it; set auto or off"
                )
            return None
        wanted = compile == "on" or (compile == "auto" and kernels.compiler() is not None)
        return CPUDecoder(self.policy, kernels.load() if wanted else None, pack=False)

    @property
    def described(self) -> str:
        """Which code decodes."""
        if self._fast is None:
            return "verl's decoder"
        return "compiled kernels" if self._fast.kernels else "without compiled kernels (see rollout.compile)"

    @property
    def pending(self) -> int:
        return len(self._waiting) + len(self._running)

    @property
    def cache_bytes(self) -> int:
        """Bytes that the KV cache holds now."""
        return self._cache.num_bytes

    def submit(self, requests: Sequence[GenRequest]) -> None:
        present = (s.request.id for s in (*self._waiting, *self._running))
        self._admit(requests, present)
        self._waiting.add(Running.of(r, self.limits) for r in requests)

    @torch.no_grad()
    def poll(self) -> list[Completion]:
        free = self._max_sequences - len(self._running)
        computed = self._prefix.tokens if self._prefix else None
        units = self._waiting.take(free, self._prefill_tokens, computed)
        try:
            done = self._prefill(units) if units else self._decode() if self._running else []
            if not self.pending:
                self._packed = None
            return done
        except BaseException:
            # No request is lost, and keys of a diverged model do not stay behind a mask: 0 x NaN is NaN.
            self._preempt()
            self._cache.release()
            raise

    def abort(self, request_ids: Iterable[str]) -> list[Completion]:
        ids = set(request_ids)
        gone = self._waiting.remove(ids)
        slots = [i for i, s in enumerate(self._running) if s.request.id in ids]
        gone += [self._running[i] for i in slots]
        self._free(slots)
        if self._prefix is not None and self._prefix.tokens not in self._waiting:
            self._prefix = None
        return [s.completion("abort") for s in gone]

    def commit(self, version: int) -> None:
        """Name the weights in shared storage `version`. Running sequences keep their tokens and are prefilled anew."""
        self._preempt()
        self.version = version

    def place(self, where: Place) -> None:
        if where != "device":
            self._preempt()
            self._cache.release()

    def _preempt(self) -> None:
        """Forget every key and value; running sequences go to the front of the queue with the tokens they have."""
        self._packed = None
        self._waiting.add_front(self._running)
        self._running = []
        self._prefix = None

    def _prefill(self, units: list[Unit]) -> list[Completion]:
        """Compute the units' prompts in one packed forward, fan them out to their members' slots, draw first tokens."""
        first = len(self._running)
        members = [s for u in units for s in u.members]
        self._running += members
        self._reserve(max(len(u.tokens) for u in units), first)
        ends = torch.tensor([first, *(len(u.members) for u in units)]).cumsum(0).tolist()
        slots = [slice(a, b) for a, b in pairwise(ends)]
        features_UF = self._features(units, slots)
        self._keep_prefix(units[-1], slots[-1].start, features_UF[-1])
        unit_of = [i for i, u in enumerate(units) for _ in u.members]
        return self._advance(features_UF, unit_of, first)

    def _features(self, units: list[Unit], slots: list[slice]) -> Tensor:
        """[U, F] features of each unit's last token, its keys and values written to its slots."""
        rows: dict[int, Tensor] = {}
        new = []
        for i, unit in enumerate(units):
            if self._prefix is not None and unit.tokens == self._prefix.tokens:
                self._cache.start_from(self._prefix, slots[i])
                rows[i] = self._prefix.features
            else:
                new.append(i)
        if new:
            features = self._forward([units[i].tokens for i in new], [slots[i] for i in new])
            rows.update(zip(new, features, strict=True))
        return torch.stack([rows[i] for i in range(len(units))])

    def _forward(self, prompts: list[tuple[int, ...]], slots: list[slice]) -> Tensor:
        """[U, F] features of the last token of each prompt, computed in one packed forward."""
        plan = plan_prefill(prompts, slots)
        inner = PackedAttention(Plan.of(plan.blocks, self._device), self.policy.decoder.config.window)
        hidden = self._body()(
            torch.tensor(plan.token_ids, device=self._device),
            torch.tensor(plan.positions, device=self._device),
            PrefillAttention(inner, self._cache, plan.writes),
        )
        return hidden[torch.tensor(plan.last, device=self._device)]

    def _keep_prefix(self, last: Unit, slot: int, features: Tensor) -> None:
        """Only the last unit of a prefill can have members left over: they will start from a copy of its keys."""
        if not last.more:
            self._prefix = None
        elif self._prefix is None or self._prefix.tokens != last.tokens:
            self._prefix = self._cache.prefix(slot, last.tokens, features.clone())

    def _decode(self) -> list[Completion]:
        """One token for every running sequence."""
        lengths = [s.length for s in self._running]
        self._reserve(max(lengths), len(lengths))
        positions_B = torch.tensor(lengths, device=self._device) - 1
        tokens_B = torch.tensor([s.tokens[-1] for s in self._running], device=self._device)
        attend = DecodeAttention(self._cache, positions_B, max(lengths), self.policy.decoder.config.window)
        hidden_BF = self._body()(tokens_B, positions_B, attend)
        return self._advance(hidden_BF, list(range(len(lengths))), 0)

    def _body(self) -> CPUDecoder | Decoder:
        """What decodes: packed weights where enough tokens are to come for it to pay."""
        if self._fast is None:
            return self.policy.decoder
        if self._packed is None and max(s.room - len(s.tokens) for s in self._running) > _BURST:
            self._packed = CPUDecoder(self.policy, self._fast.kernels, pack=True)
        return self._packed or self._fast

    def _reserve(self, tokens: int, used_slots: int) -> None:
        longest = max(s.longest for s in self._running)
        # The token drawn last has no keys yet: it is the input of the step that asks.
        used_tokens = max((s.length - 1 for s in self._running[:used_slots]), default=0)
        self._cache.reserve(len(self._running), tokens, longest, used_slots, used_tokens)

    def _advance(self, features: Tensor, row_of: list[int], first: int) -> list[Completion]:
        """Draw one token for each running sequence from slot `first` on, and let those that are done leave."""
        sequences = self._running[first:]
        tokens, logprobs = self._sample(features, row_of, [s.draw() for s in sequences])
        done, slots = [], []
        for i, (s, token, logprob) in enumerate(zip(sequences, tokens, logprobs, strict=True)):
            finish = s.append(token, logprob, self.version)
            if finish is not None:
                done.append(s.completion(finish))
                slots.append(first + i)
        self._free(slots)
        return done

    def _sample(self, features: Tensor, row_of: list[int], draws: list[Draw]) -> tuple[list[int], list[float]]:
        """One token and log-prob a draw; logits are made for a chunk of rows at a time."""
        chunk = max(1, _LOGITS // self.limits.vocab_size)
        rows = torch.tensor(row_of, device=features.device)
        tokens: list[int] = []
        logprobs: list[float] = []
        for i in range(0, len(draws), chunk):
            some, where = rows[i : i + chunk].unique(return_inverse=True)
            logits = (self._packed or self.policy).logits(features[some])
            ids, logps = self._draw(logits if len(some) == len(where) else logits[where], draws[i : i + chunk])
            tokens += ids
            logprobs += logps
        return tokens, logprobs

    def _draw(self, logits: Tensor, draws: list[Draw]) -> tuple[list[int], list[float]]:
        compiled = self._fast.kernels if self._fast is not None else None
        if compiled is not None and logits.dtype == torch.bfloat16 and all(d.whole for d in draws):
            return sample_whole(logits, draws, compiled)
        return sample(logits, draws)

    def _free(self, slots: list[int]) -> None:
        """Let go of these slots; sequences at the end move into the holes, so that the running ones stay in front."""
        count = len(self._running) - len(slots)
        gone = set(slots)
        holes = [i for i in slots if i < count]
        movers = [i for i in range(count, len(self._running)) if i not in gone]
        if movers:
            self._cache.move(movers, holes, max(self._running[i].length for i in movers))
        for hole, mover in zip(holes, movers, strict=True):
            self._running[hole] = self._running[mover]
        del self._running[count:]
