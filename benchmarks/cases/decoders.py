"""Parameter lists of well-known decoders, with the cuts of tensor parallelism. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from verl.weights.shards import Parameter


@dataclass(frozen=True)
class Decoder:
    """Sizes of a Llama-like model. kv: width of all keys of a token. tied: the head is the embedding."""

    layers: int
    width: int
    kv: int
    inner: int
    vocab: int
    tied: bool

    def parameters(self) -> tuple[Parameter, ...]:
        """In the order of a checkpoint. The embedding is of the first layer's stage, norm and head of the last's."""
        last = self.layers - 1
        out = [Parameter("embed_tokens", (self.vocab, self.width), 0, (0, last) if self.tied else (0,))]
        for i in range(self.layers):
            cuts = (
                ("input_norm", (self.width,), None),
                ("q_proj", (self.width, self.width), 0),
                ("k_proj", (self.kv, self.width), 0),
                ("v_proj", (self.kv, self.width), 0),
                ("o_proj", (self.width, self.width), 1),
                ("post_norm", (self.width,), None),
                ("gate_proj", (self.inner, self.width), 0),
                ("up_proj", (self.inner, self.width), 0),
                ("down_proj", (self.width, self.inner), 1),
            )
            out += [Parameter(f"layers.{i}.{name}", shape, cut, (i,)) for name, shape, cut in cuts]
        out.append(Parameter("norm", (self.width,), None, (last,)))
        return (*out, *(() if self.tied else (Parameter("lm_head", (self.vocab, self.width), 0, (last,)),)))


DECODERS = {
    "135m": Decoder(layers=30, width=576, kv=192, inner=1536, vocab=49152, tied=True),
    "1b": Decoder(layers=16, width=2048, kv=512, inner=8192, vocab=128256, tied=True),
    "8b": Decoder(layers=32, width=4096, kv=1024, inner=14336, vocab=128256, tied=False),
}
"""Sizes of SmolLM2-135M, Llama-3.2-1B and Llama-3.1-8B."""
