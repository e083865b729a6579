"""Layers whose forward pass has the bits of the engine's, where a run learns from what the engine samples.

Each layer is computed twice: as the engine computes it, without gradients, by products and attention of which a row
does not depend on the others; and as it always is, for the gradient. The numbers are those of the first, also what the
next layer is given, so a gradient is that of the same layer at the same input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tllm.kernels.batch_invariant import make_batch_invariant, with_value
from tllm.model.transformer import Transformer


def make_layers_invariant(chunks: Sequence[Transformer]) -> None:
    """Let these chunks be computed so."""
    for model in chunks:
        make_batch_invariant(model.parameters())
        for layer in model.layers.values():
            layer.forward = partial(invariantly, layer.forward)


def invariantly(function: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """`function(*inputs)` as it is without gradients, with a gradient where one is wanted."""
    if not torch.is_grad_enabled():
        return function(*inputs)
    with torch.no_grad():
        value = function(*inputs)
    return with_value(function(*inputs), value)
