"""Experts beside a dense MLP, each with norms of its own (gemma4 of 26B parameters)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tllm.model.mlp import Mlp
from tllm.model.moe import NAMES, ExpertRouter, experts_of, moe_block
from tllm.model.norm import RMSNorm
from tllm.parallel.linear import Adapt, unadapted
from tllm.parallel.load_balance import LoadBalance
from tllm.parallel.mesh import CutLayers, Mesh
from tllm.parallel.shard import Shard, ShardPiece, cut_parameter
from tllm.spec.model_spec import ModelSpec, MoeSpec


class NormedRouter(ExpertRouter):
    """A router of rows that it norms itself and divides by sqrt(D); each expert's weight is multiplied by a number of
    the checkpoint's."""

    def __init__(self, moe: MoeSpec, spec: ModelSpec, name: str, balance: LoadBalance | None) -> None:
        super().__init__(moe, spec.hidden_size, name, balance)
        self.norm = RMSNorm(f"{name}.router", spec.hidden_size, spec.norm_eps, "partial", tensor="scale")
        self.scale = spec.hidden_size**-0.5
        piece = ShardPiece(f"{name}.router.per_expert_scale")
        self.expert_scale_E = cut_parameter((moe.num_experts,), Shard((piece,), True, "partial"))

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        weights_TK, experts_TK = super().forward(self.norm(x_TD) * self.scale)
        return weights_TK * self.expert_scale_E[experts_TK], experts_TK


class ExpertsBesideMlp(nn.Module):
    """x_TD -> after_mlp(mlp(before_mlp(x))) + after_experts(experts(before_experts(x), router(x))).

    x_TD is the layer's hidden state before any norm, of all tokens. Both partial sums go between ranks as one message.
    """

    def __init__(self, spec: ModelSpec, mesh: Mesh, layer: str, moe: MoeSpec) -> None:
        super().__init__()
        width, eps, offset = spec.hidden_size, spec.norm_eps, spec.norm_offset
        name = moe_block(layer, moe)

        def norm(part: str, is_cut: bool) -> RMSNorm:
            gradient = "partial" if is_cut else mesh.seam.gradient
            return RMSNorm(f"{layer}.{part}", width, eps, gradient, offset)

        self.before_mlp = norm("pre_feedforward_layernorm", is_cut=True)
        of_mlp = f"{name}.{NAMES[moe.style].shared}"
        self.mlp = Mlp(spec, of_mlp, moe.shared_width, mesh.cut.shared_width, CutLayers(None))
        self.router = NormedRouter(moe, spec, name, mesh.balance)
        self.before_experts = norm("pre_feedforward_layernorm_2", is_cut=True)
        self.experts = experts_of(spec, mesh, name, moe)
        self.after_mlp = norm("post_feedforward_layernorm_1", is_cut=False)
        self.after_experts = norm("post_feedforward_layernorm_2", is_cut=False)
        self.seam = mesh.seam

    def forward(self, x_TD: Tensor, adapt: Adapt = unadapted) -> Tensor:
        mlp_TD = self.mlp(self.before_mlp(x_TD), adapt)
        experts_TD = self.experts(self.before_experts(x_TD), *self.router(x_TD), adapt)
        both_T2D = self.seam.leave(torch.cat([mlp_TD, experts_TD], dim=-1)).to(x_TD.dtype)
        mlp_TD, experts_TD = both_T2D.chunk(2, dim=-1)
        y_TD: Tensor = self.after_mlp(mlp_TD) + self.after_experts(experts_TD)
        return y_TD
