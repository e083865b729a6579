"""The first weights of a run. Random ones depend on the seed and the tensor's name, never on the layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tllm.devices.choose import CPU
from tllm.model.transformer import build
from tllm.parallel.mesh import whole
from tllm.parallel.shard import shard_of
from tllm.spec.model_spec import ModelSpec
from tllm.spec.quantized.weight_form import Quantize, with_weight_form
from tllm.training.data.seeds import key_for
from tllm.weights.boxes import Shape
from tllm.weights.boxes import whole as whole_box
from tllm.weights.byte_source import ByteSource
from tllm.weights.dtypes import torch_dtype
from tllm.weights.formats.open_index import open_index
from tllm.weights.load import HeldAs, Progress, load
from tllm.weights.manifest import checked

HEAD = "score.weight"
"""The head of a model with labels."""
STD = 0.02
"""Where the model's config gives no `initializer_range`."""


@dataclass(frozen=True)
class InitialWeights:
    """The values that a new run starts from: the checkpoint in `source`, else random ones of this `std`.

    `config` is the checkpoint's `config.json`: weights that are quantised are trained from what they stand for.
    """

    source: ByteSource | None = None
    std: float = STD
    config: Mapping[str, Any] = field(default_factory=dict)

    def filler(
        self, spec: ModelSpec, seed: int, dtype: str, progress: Progress | None = None
    ) -> Callable[[nn.Module], object]:
        """A function that gives a module's parameters their first values.

        A head for scores that the checkpoint of a causal language model does not have is drawn at random.
        """
        if self.source is None:
            return lambda module: fill_randomly(module.parameters(), spec, seed, self.std)
        source = checked(self.source)
        index = open_index(source, self.config)
        if not spec.num_labels or HEAD in index:
            return lambda module: load(module, index, source, torch_dtype(dtype), progress)

        def fill(module: nn.Module) -> None:
            heads = [one for one in module.parameters() if shard_of(one).pieces[0].name == HEAD]
            fill_randomly(heads, spec, seed, self.std)
            rest = [one for one in module.parameters() if shard_of(one).pieces[0].name != HEAD]
            load(nn.ParameterList(rest), index, source, torch_dtype(dtype), progress)

        return fill

    def fill_frozen(
        self,
        chunks: Sequence[nn.Module],
        dtype: str,
        quantize: Quantize | None,
        progress: Progress | None = None,
        device: torch.device = CPU,
    ) -> None:
        """Fill a model that is not trained, on a device. Weights that the files keep in few bits stay so, but in
        float64.

        `quantize` rounds plain ones to few bits while they are read.
        """
        assert self.source is not None, "what is not trained has a checkpoint"
        source = checked(self.source)
        index = open_index(source, with_weight_form(dict(self.config), quantize))
        is_packed = dtype != "float64"  # products of weights in few bits are made in float32
        load(nn.ModuleList(chunks), index, source, torch_dtype(dtype), progress, held=HeldAs(is_packed, device))


def parameter_count(spec: ModelSpec) -> int:
    """Of the uncut model; a tied table counts once."""
    return sum(math.prod(shape) for shape in shapes_of(spec).values())


def shapes_of(spec: ModelSpec) -> dict[str, Shape]:
    """The shape of every tensor of the uncut model, by the checkpoint's name."""
    shapes: dict[str, Shape] = {}
    for parameter in build(spec, whole(spec), torch.float32, "meta").parameters():
        for piece in shard_of(parameter).pieces:
            box = piece.source or whole_box(tuple(parameter.shape))
            known = shapes.get(piece.name, (0,) * len(box))
            shapes[piece.name] = tuple(max(stop, width) for (_, stop), width in zip(box, known, strict=True))
    return shapes


@torch.no_grad()
def fill_randomly(parameters: Iterable[nn.Parameter], spec: ModelSpec, seed: int, std: float = STD) -> None:
    """Matrices are drawn from N(0, std²), scales of norms are 1 and biases 0, as transformers begins a model.

    Of gated delta nets `A_log` is the logarithm of a number between 0 and 16, and the bias of the time step is 1.
    """
    shapes = shapes_of(spec)
    for parameter in parameters:
        drawn: dict[str, Tensor] = {}
        for piece in shard_of(parameter).pieces:
            target = parameter[tuple(slice(a, b) for a, b in piece.target)]
            if piece.name not in drawn:
                drawn = {piece.name: _drawn(piece.name, shapes[piece.name], spec, seed, std)}
            part = drawn[piece.name][tuple(slice(a, b) for a, b in piece.source)]
            target.copy_(part.reshape(target.shape))


def _drawn(name: str, shape: Shape, spec: ModelSpec, seed: int, std: float) -> Tensor:
    if len(shape) > 1 and not name.endswith("bias"):
        dice = torch.Generator().manual_seed(key_for("weights", seed, name) >> 1)
        return torch.empty(shape).normal_(std=std, generator=dice)
    if name.endswith("A_log"):
        dice = torch.Generator().manual_seed(key_for("weights", seed, name) >> 1)
        return torch.empty(shape).uniform_(0.01, 16, generator=dice).log()
    is_scale = name.endswith("norm.weight") and (not spec.norm_offset or name.endswith("linear_attn.norm.weight"))
    return torch.full(shape, float(is_scale or name.endswith("dt_bias")))
