"""Tables of a job that learns from preferences, one for each task: [dpo], [kto], [orpo], [simpo], [reward]."""

from __future__ import annotations

from dataclasses import dataclass

from tllm.core.errors import ConfigError
from tllm.training.job.key_limits import KeyLimits

DPO_LOSSES = (
    "sigmoid",
    "hinge",
    "ipo",
    "robust",
    "exo_pair",
    "nca_pair",
    "bco_pair",
    "sppo_hard",
    "apo_zero",
    "apo_down",
    "sigmoid_norm",
)
SMOOTHED = ("sigmoid", "robust", "exo_pair")
"""Losses of DPO that read `label_smoothing`."""


@dataclass(frozen=True)
class DPOConfig:
    """The keys of `[dpo]` (task "dpo"), by the names of TRL's DPOConfig."""

    LIMITS = KeyLimits({"label_smoothing": 0, "ld_alpha": 0}, {"label_smoothing": 0.5}, {"loss_type": DPO_LOSSES})

    beta: float = 0.1
    """How strongly the model is held to the reference; for "ipo" its τ."""
    loss_type: str = "sigmoid"
    """Loss of a pair: "sigmoid", "hinge", "ipo", "robust", "exo_pair", "nca_pair", "bco_pair", "sppo_hard", "apo_zero",
    "apo_down" or "sigmoid_norm" (lengths normalised)."""
    label_smoothing: float = 0.0
    """Probability that a pair is labelled the wrong way round; for "sigmoid", "robust" and "exo_pair"."""
    reference_free: bool = False
    """Leave the reference out, as if it found every reply equally likely."""
    ld_alpha: float = 1.0
    """Weight of those log-probabilities of the longer reply that lie beyond the length of the shorter (LD-DPO); 1: all
    count alike."""

    def __post_init__(self) -> None:
        check_table("dpo", self, self.LIMITS)
        if self.ld_alpha > 1:
            raise ConfigError(f"dpo.ld_alpha is {self.ld_alpha} and must be 1 or less")
        if self.label_smoothing and self.loss_type not in SMOOTHED:
            raise ConfigError(
                f"dpo.label_smoothing is {self.label_smoothing} and the loss {self.loss_type!r} has none",
                f"leave it out, or take one of {', '.join(SMOOTHED)}",
            )
        if self.loss_type == "exo_pair" and not self.label_smoothing:
            raise ConfigError(
                "dpo.loss_type is 'exo_pair' and dpo.label_smoothing is 0, of which it takes the logarithm",
                "give dpo.label_smoothing, 1e-3 say",
            )


@dataclass(frozen=True)
class KTOConfig:
    """The keys of `[kto]` (task "kto"), by the names of TRL's KTOConfig."""

    LIMITS = KeyLimits(
        {"desirable_weight": 0, "undesirable_weight": 0}, choices={"loss_type": ("kto", "apo_zero_unpaired")}
    )

    beta: float = 0.1
    """How strongly the model is held to the reference."""
    loss_type: str = "kto"
    """Loss of a row: "kto", or "apo_zero_unpaired", which needs no estimate of the divergence."""
    desirable_weight: float = 1.0
    """Weight of the losses of desirable replies."""
    undesirable_weight: float = 1.0
    """Weight of the losses of undesirable replies."""

    def __post_init__(self) -> None:
        check_table("kto", self, self.LIMITS)


@dataclass(frozen=True)
class ORPOConfig:
    """The keys of `[orpo]` (task "orpo"), by the names of TRL's ORPOConfig."""

    LIMITS = KeyLimits()

    beta: float = 0.1
    """Weight of the odds-ratio loss beside the chosen reply's cross-entropy (λ of the paper)."""

    def __post_init__(self) -> None:
        check_table("orpo", self, self.LIMITS)


@dataclass(frozen=True)
class SimPOConfig:
    """The keys of `[simpo]` (task "simpo"), by the names of TRL's CPOConfig."""

    LIMITS = KeyLimits({"simpo_gamma": 0, "label_smoothing": 0, "cpo_alpha": 0}, {"label_smoothing": 0.5})

    beta: float = 2.0
    """Factor on the mean log-probabilities that are compared."""
    simpo_gamma: float = 0.5
    """Margin by which the chosen reply's reward is to be the larger."""
    label_smoothing: float = 0.0
    """Probability that a pair is labelled the wrong way round."""
    cpo_alpha: float = 0.0
    """Weight of the chosen reply's cross-entropy beside the loss (CPO-SimPO); 0: SimPO alone."""

    def __post_init__(self) -> None:
        check_table("simpo", self, self.LIMITS)


@dataclass(frozen=True)
class RewardConfig:
    """The keys of `[reward]` (task "reward"), by the names of TRL's RewardConfig."""

    LIMITS = KeyLimits({"center_rewards_coefficient": 0})

    center_rewards_coefficient: float = 0.0
    """Weight of the squared sum of a pair's two scores, which holds scores near 0; 0: not held."""

    def __post_init__(self) -> None:
        check_table("reward", self, self.LIMITS)


PREFERENCE_TABLES = ("dpo", "kto", "orpo", "simpo", "reward")
"""Each table is of the task with its name."""


def check_table(
    name: str, table: DPOConfig | KTOConfig | ORPOConfig | SimPOConfig | RewardConfig, limits: KeyLimits
) -> None:
    """ConfigError for a key of a table outside its limits."""
    limits.check(table, name)
    beta = getattr(table, "beta", 1)
    if beta <= 0:
        raise ConfigError(
            f"{name}.beta is {beta} and must be more than 0", "0.1 is usual" if name != "simpo" else "try 2"
        )


def needs_reference(task: str, dpo: DPOConfig | None) -> bool:
    """Whether replies are compared with what the initial weights make of them."""
    return task == "kto" or (task == "dpo" and not (dpo or DPOConfig()).reference_free)
