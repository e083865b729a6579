"""Layers whose forward pass gives the engine's numbers to the bit, for runs that learn from what the engine samples.

Each layer is computed twice: without gradients as the engine computes it, by batch-invariant products and attention;
and as usual, for the gradient. Both use the same input, and the numbers of the first go on to the next layer. So a
gradient is that of the same layer at the same input.
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
