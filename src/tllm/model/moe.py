"""The mixture-of-experts MLP of one layer: a router, its experts, and a shared expert if there is one."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tllm.model.mlp import Mlp, between
from tllm.parallel.experts import Experts
from tllm.parallel.linear import ColumnLinear, LinearRows
from tllm.parallel.load_balance import LoadBalance
from tllm.parallel.mesh import Mesh
from tllm.spec.model_spec import ModelSpec, MoeSpec

NAMES = {
    "qwen": {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"},
    "mixtral": {"gate": "w1", "up": "w3", "down": "w2"},
}


class ExpertRouter(nn.Module):
    """x_TD -> the weights of each token's `top_k` experts, [T, top_k], and their numbers, [T, top_k].

    The weights add up to 1 where the model says so. In training a `balance` counts what is chosen and adds the gradient
    of the load-balance loss.
    """

    def __init__(self, moe: MoeSpec, hidden: int, name: str, balance: LoadBalance | None) -> None:
        super().__init__()
        self.gate = ColumnLinear(hidden, [LinearRows(name, 0, moe.num_experts)], replicated=True)
        self.moe, self.name, self.balance = moe, name, balance

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        logits_TE = self.gate(x_TD)
        wide = logits_TE if logits_TE.dtype == torch.float64 else logits_TE.float()
        probabilities_TE = wide.softmax(-1)
        weights_TK, experts_TK = probabilities_TE.topk(self.moe.top_k, dim=-1)
        if self.balance is not None:
            weights_TK = self.balance.apply(self.name, weights_TK, probabilities_TE, experts_TK)
        if self.moe.renormalise:
            weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        return weights_TK.to(x_TD.dtype), experts_TK


class Moe(nn.Module):
    """x_TD -> weighted sum of the chosen experts, plus the shared one scaled by its own gate; one sum over ranks."""

    def __init__(self, spec: ModelSpec, mesh: Mesh, name: str, moe: MoeSpec) -> None:
        super().__init__()
        words = NAMES[moe.style]
        self.router = ExpertRouter(moe, spec.hidden_size, f"{name}.gate", mesh.balance)
        self.experts = Experts(
            mesh.cut.holders,
            mesh.cut.expert_width,
            spec.hidden_size,
            lambda expert, part: f"{name}.experts.{expert}.{words[part]}.weight",
            between(spec),
            mesh.ep,
        )
        self.shared: Mlp | None = None
        if moe.shared_width:
            self.shared = Mlp(spec, f"{name}.shared_expert", moe.shared_width, mesh.cut.shared_width, seam=None)
            self.shared_gate = ColumnLinear(
                spec.hidden_size, [LinearRows(f"{name}.shared_expert_gate", 0, 1)], replicated=True
            )
        self.seam = mesh.seam

    def forward(self, x_TD: Tensor) -> Tensor:
        y_TD = self.experts(x_TD, *self.router(x_TD))
        if self.shared is not None:
            y_TD = y_TD + torch.sigmoid(self.shared_gate(x_TD)) * self.shared(x_TD)
        return self.seam.leave(y_TD)
