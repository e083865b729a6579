"""`LoraJob`: the table `[lora]` of a job, which trains an adapter while the model's own weights are frozen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, cast

from tllm.core.errors import ConfigError
from tllm.spec.lora.lora_config import MAX_RANK, LoraConfig
from tllm.spec.quantized.weight_form import Quantize
from tllm.training.job.key_limits import KeyLimits

ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class LoraJob:
    """Train LoRA (2106.09685): beside W of each adapted linear scale B A is learned, and W is not.

    Keys have PEFT's names.
    """

    r: int = 8
    """Rank of the updates: the rows of A and the columns of B."""
    lora_alpha: float = 8.0
    """The update is multiplied by `lora_alpha / r`."""
    use_rslora: bool = False
    """Multiply by `lora_alpha / sqrt(r)` in its place (rsLoRA, 2312.03732)."""
    lora_dropout: float = 0.0
    """Part of an update's inputs that is set to 0 in training, drawn anew for each token, step and linear."""
    target_modules: tuple[str, ...] = (ALL_LINEAR,)
    """Names of the linears to adapt, or ends of them ("q_proj"); "all-linear": every one but those of experts, routers,
    the logits, and `kv_b_proj` of latent attention."""
    exclude_modules: tuple[str, ...] = ()
    """Names of linears, or ends of them, that are not adapted though `target_modules` names them."""
    layers_to_transform: tuple[int, ...] = ()
    """The layers whose linears are adapted, by their numbers from 0; none: those of all layers."""
    use_dora: bool = False
    """Learn the magnitude of each output apart from its direction, which A and B change (DoRA, 2402.09353)."""
    init_lora_weights: bool | str = True
    """First values of A: true (uniform, as PEFT begins) or "gaussian"; B begins as 0."""
    quantize: str = "none"
    """Hold the model beside the adapter in few bits (QLoRA): "int8" or "int4", as `--quantize` of `tllm serve`."""

    LIMITS: ClassVar[KeyLimits] = KeyLimits(
        at_least={"r": 1, "lora_dropout": 0, "lora_alpha": 0},
        below={"r": MAX_RANK + 1, "lora_dropout": 1},
        choices={"quantize": ("none", "int8", "int4")},
    )

    def __post_init__(self) -> None:
        self.LIMITS.check(self, "lora")
        if self.lora_alpha == 0:
            raise ConfigError("lora.lora_alpha is 0, and the update would be 0 for ever", "r or twice r is usual")
        if not self.target_modules or not all(self.target_modules):
            raise ConfigError("lora.target_modules names nothing", f'give names of linears, or "{ALL_LINEAR}"')
        if ALL_LINEAR in self.target_modules and len(self.target_modules) > 1:
            raise ConfigError(f'lora.target_modules has "{ALL_LINEAR}" beside other names', "give one or the other")
        if self.init_lora_weights is not True and self.init_lora_weights != "gaussian":
            raise ConfigError(
                f"lora.init_lora_weights is {self.init_lora_weights!r}",
                'give true or "gaussian": others change the model itself, or begin with an update that is not 0',
            )

    @property
    def few_bits(self) -> Quantize | None:
        """To what plain weights of the model are rounded, if at all."""
        return None if self.quantize == "none" else cast(Quantize, self.quantize)

    @property
    def config(self) -> LoraConfig:
        """The same as an adapter says it of itself."""
        targets: tuple[str, ...] | str = ALL_LINEAR if self.target_modules == (ALL_LINEAR,) else self.target_modules
        return LoraConfig(
            r=self.r,
            lora_alpha=self.lora_alpha,
            use_rslora=self.use_rslora,
            use_dora=self.use_dora,
            target_modules=targets,
        )
