"""Continuous batching on the native decoder, with the policy's own parameters: the weights exist once.

A request's life: `submit` checks and queues it; `poll` either prefills waiting prompts into free slots and draws their
first token, or draws one more token for every running sequence; an end token or the length limit frees its slot, which
the last running sequence moves into; the Completion leaves with that poll. A long prompt is prefilled in chunks, by
turns with decoding. Where the cache may not grow any more, the youngest go back to the queue with what they have.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from verl.core import Completion, GenRequest, RolloutError
from verl.core.protocols import Place
from verl.engines.rollout import kernels
from verl.engines.rollout.admission import Budget
from verl.engines.rollout.attend import DecodeAttention
from verl.engines.rollout.base import Engine, Limits, SharedWeights, context_of
from verl.engines.rollout.cache import SlotCache
from verl.engines.rollout.cpu_decoder import CPUDecoder, supported
from verl.engines.rollout.memory import Grant, token_bytes
from verl.engines.rollout.options import Options
from verl.engines.rollout.prefiller import Prefiller
from verl.engines.rollout.prefix_cache import PrefixCache
from verl.engines.rollout.sampling import Draw, sample, sample_whole
from verl.engines.rollout.scheduler import Filling, Unit, Waiting
from verl.engines.rollout.sequence import Sequence as Running
from verl.engines.rollout.slots import Slots
from verl.engines.rollout.stats import Stats
from verl.models.compiler import choose
from verl.models.decoder import Decoder
from verl.models.policy import Policy
from verl.utils.monitoring import memory_total

_BURST = 8
"""Tokens still to come for which packing the weights pays."""
_LOGITS = 6 << 20
"""Logits held at one time. 24 MB in fp32: small enough that the C allocator keeps the block for the next step."""


class NativeEngine(SharedWeights, Engine):
    """RolloutEngine on a native Policy. Up to `max_sequences` decode together; more wait, and none is lost.

    prefill_tokens: prompt tokens computed in one step (a longer prompt goes alone, in chunks of so many, and of twice
    as many each time that a commit or a release came before it was done).
    kv_cache_gb: 10^9 bytes that the slots may take; None: no limit but max_sequences. While they grow, one layer more.
    prefix_cache_gb: 10^9 bytes, beside these, for keys of finished sequences: a request that begins like one of them
    (a second turn) starts from them. They last as long as the weights.
    max_model_len: longest prompt and response together; None: the model's own limit.
    compile: "on", "off" or "auto": the kernels of cached decoding (CPU, bf16), auto where there is a compiler.

    A policy that is cut over tensor-parallel ranks has an engine on each of them. They get the same calls in the same
    order, so they plan alike; the cache holds a rank's own key heads, and the first rank's draw is everyone's.
    """

    def __init__(
        self,
        policy: Policy,
        eos_token_ids: Iterable[int],
        *,
        max_sequences: int = 256,
        prefill_tokens: int = 4096,
        kv_cache_gb: float | None = None,
        prefix_cache_gb: float = 0.0,
        max_model_len: int | None = None,
        compile: str = "auto",
        version: int = 0,
    ):
        # Refuses what is wrong of its type or range.
        Options(max_sequences, prefill_tokens, kv_cache_gb, prefix_cache_gb, max_model_len, compile)
        config, weight = policy.decoder.config, next(policy.parameters())
        if policy.decoder.pp is not None:
            raise RolloutError(
                "rollout.backend=native: a pipeline stage cannot generate; generate on a layout with pp 1"
            )
        read = replace(config, num_kv_heads=policy.decoder.cached_heads)
        per_token = token_bytes(read, weight.element_size())
        Grant(kv_cache_gb, prefix_cache_gb).check(per_token, memory_total(weight.device.type))
        self.policy = policy
        self.version = version
        context = context_of(config.max_positions, max_model_len)
        self.limits = Limits(config.vocab_size, context, tuple(eos_token_ids))
        self._prefill_tokens = prefill_tokens
        self._device = weight.device
        share = policy.decoder.share
        own = config.num_kv_heads if share.cuts is None else share.cuts.heads[share.tp_rank].num_read
        heads = (own, config.head_dim)
        self._budget = Budget.of(max_sequences, per_token, kv_cache_gb)
        self._cache = SlotCache(config.num_layers, *heads, self._budget, weight.dtype, weight.device)
        self._slots = Slots(self._cache, self._budget)
        self._waiting = Waiting()
        self._arrivals = 0
        self._fill_next = True
        self.stats = Stats()
        self._prefixes = PrefixCache(self._cache, per_token, prefix_cache_gb)
        self._prefiller = Prefiller(
            self._cache, self._prefixes, config.window, self._device, self.stats, policy.kernels
        )
        self._fast = self._fast_decoder(compile)
        self._packed: CPUDecoder | None = None

    def _fast_decoder(self, compile: str) -> CPUDecoder | None:
        fits, tp = supported(self.policy), self.policy.decoder.tp
        unfit = None if fits else "the kernels are for bfloat16 on a CPU that has it"
        if tp is not None:
            unfit = f"the kernels decode on one rank, and this policy is cut over {tp.size}"
        found, self._without_kernels = choose(compile, "rollout.compile", unfit, kernels.load)
        return CPUDecoder(self.policy, found, pack=False) if fits and tp is None else None

    @property
    def described(self) -> str:
        """Which code decodes."""
        tp = self.policy.decoder.tp
        if tp is not None:
            return f"verl's decoder, tensor parallel over {tp.size} ranks, without compiled kernels"
        if self._fast is None:
            return "verl's decoder"
        why = self._without_kernels or "rollout.compile: they do not know heads of this size"
        return "compiled kernels" if self._fast.kernels else f"without compiled kernels ({why})"

    @property
    def pending(self) -> int:
        filling = self._slots.filling
        return len(self._waiting) + len(self._slots.running) + (len(filling.unit.members) if filling else 0)

    def counts(self) -> Mapping[str, int]:
        """As in Stats."""
        return asdict(self.stats)

    @property
    def cache_bytes(self) -> int:
        """Bytes that the slots hold now."""
        return self._cache.num_bytes

    @property
    def prefix_bytes(self) -> int:
        """Bytes that the prefix cache holds now."""
        return self._prefixes.num_bytes

    def submit(self, requests: Sequence[GenRequest]) -> None:
        filling = self._slots.filling
        here = (*self._waiting, *self._slots.running, *(filling.unit.members if filling else ()))
        self._admit(requests, (s.request.id for s in here))
        new = [Running.of(r, self.limits, self._arrivals + i) for i, r in enumerate(requests)]
        for sequence in new:
            self._budget.check(sequence)
        self._arrivals += len(new)
        self._waiting.add(new)

    @torch.no_grad()
    def poll(self) -> list[Completion]:
        try:
            done = self._step()
            if not self.pending:
                self._packed = None
            return done
        except BaseException:
            # No request is lost, and keys of a diverged model do not stay behind a mask: 0 x NaN is NaN.
            self._release()
            raise

    def abort(self, request_ids: Iterable[str]) -> list[Completion]:
        ids = set(request_ids)
        slots = self._slots
        gone = slots.leave_filling(ids) + self._waiting.remove(ids)
        left = [i for i, s in enumerate(slots.running) if s.request.id in ids]
        gone += [slots.running[i] for i in left]
        slots.free(left)
        self._prefiller.forget(self._waiting)
        return [s.completion("abort") for s in gone]

    def commit(self, version: int) -> None:
        """Name the weights in shared storage `version`. Running sequences keep their tokens and are prefilled anew."""
        self._preempt()
        self.version = version

    def place(self, where: Place) -> None:
        if where != "device":
            self._release()

    def _release(self) -> None:
        """Give the caches back."""
        self._preempt()
        self._cache.release()
        self._prefixes.release()

    def _preempt(self) -> None:
        """Forget every key and value; running sequences go to the front of the queue with the tokens they have."""
        self._packed = None
        self._waiting.add_front(self._slots.clear())
        self._prefiller.forget()
        self._prefixes.clear()

    def _step(self) -> list[Completion]:
        """A prefill where anyone may join, or else one more token of everyone; a long prompt's chunks in between."""
        slots, cost = self._slots, self._prefiller.cost
        if slots.filling is None:
            units = self._waiting.take(slots.admission(), self._prefill_tokens, cost)
            if units and cost(units[0].tokens) <= self._prefill_tokens:
                return self._prefill(units)
            if units:
                slots.filling = Filling(units[0], 0)
        if slots.filling and (self._fill_next or not slots.running):
            self._fill_next = False
            return self._fill(slots.filling)
        self._fill_next = True
        return self._decode() if slots.running else []

    def _fill(self, filling: Filling) -> list[Completion]:
        """One chunk of a long prompt; after the last, its members run."""
        slot, tokens = len(self._slots.running), filling.unit.tokens
        self._slots.reserve(self._slots.used)
        if filling.at == 0:
            filling.at = self._prefiller.start(tokens, slice(slot, slot + 1))
        some = filling.chunk(self._prefill_tokens)
        features_1F = self._prefiller.chunk(self._body(), some, slot, filling.at)
        filling.at += len(some)
        return self._enter(filling.unit, features_1F) if filling.at == len(tokens) else []

    def _enter(self, unit: Unit, features_1F: Tensor) -> list[Completion]:
        """Members of a filled prompt, as many as there is room for, start to run, the first in the prompt's slot."""
        slots, first = self._slots, len(self._slots.running)
        size = 1 + slots.fitting(len(unit.members) - 1)
        slots.reserve(slots.used, more=size - 1)
        slots.filling = None
        slots.running += unit.members[:size]
        self._waiting.add_front(unit.members[size:])
        self._cache.spread(slice(first, first + size), len(unit.tokens))
        self._prefiller.keep(unit.tokens, unit.tokens in self._waiting, first, features_1F[0])
        return self._advance(features_1F, [0] * size, first)

    def _prefill(self, units: list[Unit]) -> list[Completion]:
        """Compute the units' prompts in one packed forward, fan them out to their members' slots, draw first tokens."""
        first = len(self._slots.running)
        self._slots.running += [s for u in units for s in u.members]
        self._slots.reserve(first)
        ends = torch.tensor([first, *(len(u.members) for u in units)]).cumsum(0).tolist()
        slots = [slice(a, b) for a, b in pairwise(ends)]
        features_UF = self._prefiller.units(self._body(), units, slots)
        unit_of = [i for i, u in enumerate(units) for _ in u.members]
        return self._advance(features_UF, unit_of, first)

    def _decode(self) -> list[Completion]:
        """One token for every running sequence; the youngest leave first where the cache cannot take it."""
        slots = self._slots
        gone = slots.make_room()
        self.stats.preemptions += len(gone)
        self._waiting.add_front(gone)
        slots.reserve(slots.used)
        lengths = [s.length for s in slots.running]
        positions_B = torch.tensor(lengths, device=self._device) - 1
        tokens_B = torch.tensor([s.tokens[-1] for s in slots.running], device=self._device)
        attend = DecodeAttention(self._cache, positions_B, max(lengths), self.policy.decoder.config.window)
        hidden_BF = self._body()(tokens_B, positions_B, attend)
        return self._advance(hidden_BF, list(range(len(lengths))), 0)

    def _body(self) -> CPUDecoder | Decoder:
        """What decodes: packed weights where enough tokens are to come for it to pay."""
        if self._fast is None:
            return self.policy.decoder
        if self._packed is None and self._to_come() > _BURST:
            self._packed = CPUDecoder(self.policy, self._fast.kernels, pack=True)
        return self._packed or self._fast

    def _to_come(self) -> int:
        """Most tokens that any sequence here may still get."""
        filling = self._slots.filling
        return max(s.room - len(s.tokens) for s in (*self._slots.running, *(filling.unit.members if filling else ())))

    def _advance(self, features: Tensor, row_of: list[int], first: int) -> list[Completion]:
        """Draw one token for each running sequence from slot `first` on, and let those that are done leave."""
        sequences = self._slots.running[first:]
        tokens, logprobs = self._sample(features, row_of, [s.draw() for s in sequences])
        done, slots = [], []
        for i, (s, token, logprob) in enumerate(zip(sequences, tokens, logprobs, strict=True)):
            finish = s.append(token, logprob, self.version)
            if finish is not None:
                done.append(s.completion(finish))
                slots.append(first + i)
                # The token drawn last has no keys.
                self._prefixes.keep(s.all_tokens[:-1], first + i)
        self._slots.free(slots)
        return done

    def _sample(self, features: Tensor, row_of: list[int], draws: list[Draw]) -> tuple[list[int], list[float]]:
        """One token and log-prob a draw; logits are made for a chunk of rows at a time."""
        chunk = max(1, _LOGITS // self.limits.vocab_size)
        rows = torch.tensor(row_of, device=features.device)
        tokens: list[int] = []
        logprobs: list[float] = []
        for i in range(0, len(draws), chunk):
            some, where = rows[i : i + chunk].unique(return_inverse=True)
            logits = self._logits(features[some])
            ids, logps = self._draw(logits if len(some) == len(where) else logits[where], draws[i : i + chunk])
            tokens += ids
            logprobs += logps
        return self._agreed(tokens, logprobs)

    def _logits(self, features: Tensor) -> Tensor:
        """[B, F] -> [B, V]."""
        return self.policy.all_logits(features) if self._packed is None else self._packed.logits(features)

    def _agreed(self, tokens: list[int], logprobs: list[float]) -> tuple[list[int], list[float]]:
        """What the first rank drew: all have the same logits, but a GPU may sum them in another order each time."""
        tp = self.policy.decoder.tp
        if tp is None:
            return tokens, logprobs
        both = torch.tensor([tokens, logprobs], dtype=torch.float64, device=self._device)
        dist.broadcast(both, group=tp.group, group_src=0)
        ids, logps = both.tolist()
        return [int(t) for t in ids], logps

    def _draw(self, logits: Tensor, draws: list[Draw]) -> tuple[list[int], list[float]]:
        compiled = self._fast.kernels if self._fast is not None else None
        if compiled is not None and logits.dtype == torch.bfloat16 and all(d.whole for d in draws):
            return sample_whole(logits, draws, compiled)
        return sample(logits, draws)
