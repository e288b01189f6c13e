"""KL to the reference: estimators on log-prob differences, and the coefficient's controller."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from verl.config.algorithm import KLConfig
from verl.core.errors import ConfigError
from verl.core.registry import Registry

KL_ESTIMATORS: Registry[Callable[[Tensor], Tensor]] = Registry("algorithm.kl.estimator")


@KL_ESTIMATORS.register("k1")
def k1(d: Tensor) -> Tensor:
    """d = log p - log p_ref. Unbiased, of either sign (Schulman, "Approximating KL divergence")."""
    return d


@KL_ESTIMATORS.register("abs")
def absolute(d: Tensor) -> Tensor:
    """|d|."""
    return d.abs()


@KL_ESTIMATORS.register("k2")
def k2(d: Tensor) -> Tensor:
    """d^2 / 2; its gradient is that of the reverse KL on policy."""
    return 0.5 * d * d


@KL_ESTIMATORS.register("k3")
def k3(d: Tensor) -> Tensor:
    """exp(-d) + d - 1, never negative; bounded so that value and gradient stay finite at any gap."""
    e = (-d).clamp(-20.0, 20.0)
    return (e.exp() - e - 1.0).clamp(-10.0, 10.0)


def kl_values(name: str, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Estimate [T] of the KL per token. `NAME+` has the value of NAME and the gradient of k2."""
    d = logprobs - ref_logprobs
    if not name.endswith("+"):
        return KL_ESTIMATORS[name].fn(d)
    slope = k2(d)
    return slope + (KL_ESTIMATORS[name[:-1]].fn(d) - slope).detach()


def check_estimator(name: str) -> None:
    """ConfigError for an unknown name."""
    KL_ESTIMATORS[name.removesuffix("+")]


class KLController:
    """The coefficient of the KL in the reward: fixed, or steered to a target (arXiv:1909.08593, section 2.2)."""

    def __init__(self, cfg: KLConfig):
        if cfg.adaptive_target is not None and cfg.place != "reward":
            raise ConfigError(
                "algorithm.kl.adaptive_target: works with algorithm.kl.place=reward; set that, or null here"
            )
        self.target, self.horizon = cfg.adaptive_target, cfg.adaptive_horizon
        self.coef = cfg.coef

    def update(self, kl: float, num_seqs: int) -> None:
        """kl: mean over counted sequences of their mean per token, as measured with the coefficient now in force."""
        if self.target is not None:
            error = min(max(kl / self.target - 1.0, -0.2), 0.2)
            self.coef *= 1.0 + error * num_seqs / self.horizon

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.coef = float(state["coef"])
