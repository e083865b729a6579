"""`LayerScale`: the number of the checkpoint's that all a layer gives is multiplied by (gemma4)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tllm.parallel.shard import Shard, ShardPiece, cut_parameter


class LayerScale(nn.Module):
    """x_TD -> s x_TD. It is not learned: whoever trains expects a gradient of every parameter, and this one's is 0."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.weight = cut_parameter((1,), Shard((ShardPiece(name),), True))

    def forward(self, x_TD: Tensor) -> Tensor:
        y_TD: Tensor = _Scaled.apply(x_TD, self.weight)  # type: ignore[no-untyped-call]
        return y_TD


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        return x_TD * scale

    @staticmethod
    def backward(ctx: Any, gradient_TD: Tensor) -> tuple[Tensor, Tensor]:
        (scale,) = ctx.saved_tensors
        return gradient_TD * scale, torch.zeros_like(scale)
