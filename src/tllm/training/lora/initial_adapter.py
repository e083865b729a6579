"""The first values of an adapter. They depend on the seed and the tensor's name, never on the layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from tllm.parallel.shard import shard_of
from tllm.spec.model_spec import ModelSpec
from tllm.training.data.seeds import key_for
from tllm.training.job.lora_job import LoraJob
from tllm.training.job.target_modules import adapter_shapes
from tllm.training.lora.trained_adapter import TrainedAdapter


def adapter_filler(
    lora: LoraJob, spec: ModelSpec, seed: int, adapters: Iterable[TrainedAdapter] = ()
) -> Callable[[nn.Module], None]:
    """A function that gives a module's parameters, which are those of updates, their first values.

    A is drawn as PEFT draws it, B is 0, so that the model is at first what it was; DoRA's magnitudes, of
    this rank's `adapters`, are norms of the model's rows, which must have their values.

    A of n inputs is uniform within 1 / sqrt(n) (He et al., 1502.01852, with a of sqrt(5)), or normal of the standard
    deviation 1 / r with "gaussian".
    """
    shapes = adapter_shapes(lora, spec)
    magnitudes = {m: norm for adapter in adapters for m, norm in adapter.first_magnitudes().items()}

    @torch.no_grad()
    def fill(module: nn.Module) -> None:
        for parameter in module.parameters():
            if parameter in magnitudes:
                parameter.copy_(magnitudes[parameter])
                continue
            for piece in shard_of(parameter).pieces:
                place = parameter[tuple(slice(a, b) for a, b in piece.target)]
                whole = _drawn(piece.name, shapes[piece.name], lora, seed)
                place.copy_(whole[tuple(slice(a, b) for a, b in piece.source)])

    return fill


def _drawn(name: str, shape: tuple[int, int], lora: LoraJob, seed: int) -> Tensor:
    if ".lora_B." in name:
        return torch.zeros(()).expand(shape)
    dice = torch.Generator().manual_seed(key_for("lora", seed, name) >> 1)
    rank, inputs = shape
    if lora.init_lora_weights == "gaussian":
        return torch.empty(shape).normal_(std=1 / rank, generator=dice)
    bound = inputs**-0.5
    return torch.empty(shape).uniform_(-bound, bound, generator=dice)
