"""The MLP of one layer, gated (2002.05202) or not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn

from tllm.kernels.rows.row_operations import row_operations
from tllm.kernels.rows.torch_steps import ACTIVATIONS as KERNEL_ACTIVATIONS
from tllm.parallel.linear import Adapt, LinearRows, unadapted
from tllm.parallel.mesh import CutLayers
from tllm.parallel.quantized_weight import quantized
from tllm.spec.cut import Range
from tllm.spec.model_spec import ModelSpec

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


def between(spec: ModelSpec) -> Callable[[Tensor], Tensor]:
    """What stands between the two products: act(gate) * up of gate and up side by side, or act(up) where none gates."""
    return partial(gate, activation=spec.activation) if spec.gated else ACTIVATIONS[spec.activation]


def gate(gate_up_TF: Tensor, activation: str) -> Tensor:
    """act(gate) * up, for gate and up side by side."""
    if activation in KERNEL_ACTIVATIONS and (fused := row_operations(gate_up_TF)):
        return fused.gated(gate_up_TF, activation)
    gate_TF, up_TF = gate_up_TF.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate_TF) * up_TF


class Mlp(nn.Module):
    """x_TD -> down(act(gate(x)) * up(x)), or down(act(up(x))), over the widths [columns) of `width` held here.

    Without a seam of `cut_layers` the result is a partial sum over the ranks (`RowLinear`). A scale for each token is
    multiplied in before a last product in few bits, whose partial sums then stay exact, and after one of plain numbers.
    """

    def __init__(self, spec: ModelSpec, name: str, width: int, columns: Range, cut_layers: CutLayers) -> None:
        super().__init__()
        start, stop = columns
        names = [f"{name}.gate_up_proj"] * 2 if spec.fused_gate_up else [f"{name}.gate_proj", f"{name}.up_proj"]
        offset = width if spec.fused_gate_up else 0
        rows = [LinearRows(names[0], start, stop), LinearRows(names[1], offset + start, offset + stop)]
        self.gate_up_proj = cut_layers.column(spec.hidden_size, rows if spec.gated else rows[1:], spec.mlp_bias)
        self.down_proj = cut_layers.row(f"{name}.down_proj", columns, spec.hidden_size, spec.mlp_bias)
        self.act = between(spec)

    def forward(self, x_TD: Tensor, adapt: Adapt = unadapted, scale_T1: Tensor | None = None) -> Tensor:
        h_TF = self.act(self.gate_up_proj(x_TD, adapt))
        if scale_T1 is not None and quantized(cast(Tensor, self.down_proj.weight)) is not None:
            h_TF, scale_T1 = h_TF * scale_T1, None
        y_TD: Tensor = self.down_proj(h_TF, adapt)
        return y_TD if scale_T1 is None else scale_T1 * y_TD
