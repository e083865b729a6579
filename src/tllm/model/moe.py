"""The mixture-of-experts MLP of one layer: a router, its experts, and a shared expert if there is one."""

from __future__ import annotations

from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tllm.kernels.batch_invariant import sigmoid, softmax
from tllm.kernels.rows.row_operations import row_operations
from tllm.kernels.rows.torch_steps import clamped_swiglu_in_steps, widen
from tllm.model.mlp import Mlp, between
from tllm.parallel.experts import Act, Experts, ExpertSum, StackedExperts
from tllm.parallel.linear import Adapt, RouterLinear, unadapted
from tllm.parallel.load_balance import LoadBalance
from tllm.parallel.mesh import CutLayers, Mesh
from tllm.parallel.shard import Shard, ShardPiece, cut_parameter
from tllm.spec.model_spec import ModelSpec, MoeSpec


class MoeNames(NamedTuple):
    """What a checkpoint calls the parts of a layer's experts."""

    block: str
    router: str
    gate: str
    up: str
    down: str
    shared: str = ""
    correction: str = ""


NAMES = {
    "mixtral": MoeNames("block_sparse_moe", "gate", "w1", "w3", "w2"),
    "qwen": MoeNames("mlp", "gate", "gate_proj", "up_proj", "down_proj", "shared_expert"),
    "glm": MoeNames(
        "mlp", "gate", "gate_proj", "up_proj", "down_proj", "shared_experts", "gate.e_score_correction_bias"
    ),
    "minimax": MoeNames("block_sparse_moe", "gate", "w1", "w3", "w2", correction="e_score_correction_bias"),
    "gpt_oss": MoeNames("mlp", "router", "", "", ""),
    "gemma4": MoeNames("", "router.proj", "gate_proj", "up_proj", "down_proj", "mlp"),
}

SCORES: dict[str, Act] = {
    "softmax": softmax,
    "sigmoid": sigmoid,
    "chosen_softmax": lambda logits_TE: logits_TE,
}
"""What the logits of all experts become before some are chosen."""


def clamped_swiglu(limit: float, alpha: float) -> Act:
    """gate sigmoid(alpha gate) (up + 1) of gates and ups by turns, the gate at most `limit` and up within it."""

    def act(gate_up_TF: Tensor) -> Tensor:
        if fused := row_operations(gate_up_TF):
            return fused.clamped_swiglu(gate_up_TF, limit, alpha)
        return clamped_swiglu_in_steps(gate_up_TF, limit, alpha)

    return act


class ExpertRouter(nn.Module):
    """x_TD -> the weights of each token's `top_k` experts, [T, top_k], and their numbers, [T, top_k].

    In training a `balance` counts what is chosen and adds the gradient of the load-balance loss.
    """

    def __init__(self, moe: MoeSpec, hidden: int, block: str, balance: LoadBalance | None) -> None:
        super().__init__()
        words = NAMES[moe.style]
        name = f"{block}.{words.router}"
        self.gate = RouterLinear(hidden, name, moe.num_experts, moe.router_bias)
        self.correction: nn.Parameter | None = None
        if moe.correction_bias:
            piece = ShardPiece(f"{block}.{words.correction}")
            self.correction = cut_parameter((moe.num_experts,), Shard((piece,), True, "partial", wide=True))
        self.moe, self.name, self.balance = moe, name, balance

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        logits_TE, moe = widen(self.gate(x_TD)), self.moe
        scores_TE = SCORES[moe.scores](logits_TE)
        weights_TK, experts_TK = self._choose(scores_TE)
        if moe.scores == "chosen_softmax":
            weights_TK = softmax(weights_TK)
        if self.balance is not None:
            probabilities_TE = scores_TE if moe.scores == "softmax" else logits_TE.softmax(-1)
            weights_TK = self.balance.apply(self.name, weights_TK, probabilities_TE, experts_TK)
        if moe.renormalise:
            # One after another: torch's own sum has another order on another processor.
            weights_TK = weights_TK / reduce(torch.add, weights_TK.unbind(-1)).unsqueeze(-1)
        if moe.weight_scale != 1.0:
            weights_TK = weights_TK * moe.weight_scale
        return weights_TK.to(x_TD.dtype), experts_TK

    def _choose(self, scores_TE: Tensor) -> tuple[Tensor, Tensor]:
        """The scores and numbers of the best experts: those that are it when corrected, in the best groups."""
        if self.correction is None and self.moe.groups == 1:
            return scores_TE.topk(self.moe.top_k, dim=-1)
        corrected_TE = scores_TE.detach() if self.correction is None else (scores_TE + self.correction).detach()
        experts_TK = self._in_best_groups(corrected_TE).topk(self.moe.top_k, dim=-1).indices
        weights_TK = scores_TE.gather(-1, experts_TK)
        if self.correction is not None and weights_TK.requires_grad:
            # Whoever trains expects a gradient of every parameter: the one of the correction is 0.
            weights_TK = weights_TK + 0 * self.correction[experts_TK]
        return weights_TK, experts_TK

    def _in_best_groups(self, scores_TE: Tensor) -> Tensor:
        """The scores of the experts in the best groups, and -inf for others."""
        moe = self.moe
        if moe.groups == 1:
            return scores_TE
        scores_TGE = scores_TE.unflatten(-1, (moe.groups, -1))  # type: ignore[no-untyped-call]
        best_TG = scores_TGE.topk(moe.group_best, dim=-1).values.sum(-1).topk(moe.top_groups, dim=-1).indices
        left_out_TG1 = torch.ones_like(scores_TGE[..., :1], dtype=torch.bool).scatter(1, best_TG[..., None], False)
        masked_TE: Tensor = scores_TGE.masked_fill(left_out_TG1, float("-inf")).flatten(1)
        return masked_TE


class Moe(nn.Module):
    """x_TD -> weighted sum of the chosen experts, plus the shared one, scaled by its own gate if it has one.

    Between ranks there is one sum of all, exact in float64 where weights have few bits.
    """

    def __init__(self, spec: ModelSpec, mesh: Mesh, layer: str, moe: MoeSpec) -> None:
        super().__init__()
        words = NAMES[moe.style]
        name = moe_block(layer, moe)
        self.router = ExpertRouter(moe, spec.hidden_size, name, mesh.balance)
        self.experts = experts_of(spec, mesh, name, moe)
        self.shared: Mlp | None = None
        self.shared_gate: RouterLinear | None = None
        if moe.shared_width:
            self.shared = Mlp(spec, f"{name}.{words.shared}", moe.shared_width, mesh.cut.shared_width, CutLayers(None))
        if moe.shared_width and moe.shared_gate:
            self.shared_gate = RouterLinear(spec.hidden_size, f"{name}.shared_expert_gate", 1)
        self.seam = mesh.seam

    def forward(self, x_TD: Tensor, adapt: Adapt = unadapted) -> Tensor:
        y_TD = self.experts(x_TD, *self.router(x_TD), adapt)
        if self.shared is not None:
            scale_T1 = None if self.shared_gate is None else sigmoid(self.shared_gate(x_TD)).to(x_TD.dtype)
            y_TD = y_TD + self.shared(x_TD, adapt, scale_T1)
        return self.seam.leave(y_TD).to(x_TD.dtype)


def moe_block(layer: str, moe: MoeSpec) -> str:
    """What the checkpoint's names of a layer's router and experts begin with."""
    block = NAMES[moe.style].block
    return f"{layer}.{block}" if block else layer


def experts_of(spec: ModelSpec, mesh: Mesh, name: str, moe: MoeSpec) -> ExpertSum:
    """The experts of one layer that this rank holds, whole or in part."""
    cut, hidden = mesh.cut, spec.hidden_size
    if moe.clamp is not None:
        act = clamped_swiglu(moe.clamp, moe.alpha)
        return StackedExperts(cut.holders, cut.expert_width, hidden, f"{name}.experts", act, mesh.ep)
    words = NAMES[moe.style]

    def tensor(expert: int, part: str) -> str:
        return f"{name}.experts.{expert}.{getattr(words, part)}.weight"

    return Experts(cut.holders, cut.expert_width, hidden, tensor, between(spec), mesh.ep)
