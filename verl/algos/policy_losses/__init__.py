"""Policy losses: per token, before any reduction. Each has a numpy twin in tests/reference."""

from verl.algos.policy_losses.cispo import CISPO, cispo
from verl.algos.policy_losses.covariance import ClipCov, KLCov, choose_clip_cov, choose_kl_cov, clip_cov, kl_cov
from verl.algos.policy_losses.dppo import DPPOKL, DPPOTV, dppo_kl, dppo_tv
from verl.algos.policy_losses.dro import DRO, dro
from verl.algos.policy_losses.geo_mean import GeoMean, geo_mean
from verl.algos.policy_losses.gspo import GSPO, gspo
from verl.algos.policy_losses.inputs import POLICY_LOSSES, PolicyInputs, PolicyLoss, log_ratio
from verl.algos.policy_losses.ppo_clip import PPOClip, ppo_clip
from verl.algos.policy_losses.reinforce import gpg, reinforce
from verl.algos.policy_losses.sapo import SAPO, sapo

__all__ = [
    "CISPO",
    "DPPOKL",
    "DPPOTV",
    "DRO",
    "GSPO",
    "POLICY_LOSSES",
    "SAPO",
    "ClipCov",
    "GeoMean",
    "KLCov",
    "PPOClip",
    "PolicyInputs",
    "PolicyLoss",
    "choose_clip_cov",
    "choose_kl_cov",
    "cispo",
    "clip_cov",
    "dppo_kl",
    "dppo_tv",
    "dro",
    "geo_mean",
    "gpg",
    "gspo",
    "kl_cov",
    "log_ratio",
    "ppo_clip",
    "reinforce",
    "sapo",
]
