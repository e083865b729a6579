"""Attention with an output gate (2505.06708): each head says how much of what it found it passes on."""

from __future__ import annotations

from torch import Tensor

from tllm.kernels.batch_invariant import sigmoid
from tllm.model.attention import Attend, Attention
from tllm.model.rope import Rotation, rotate_both
from tllm.parallel.linear import Adapt, unadapted


class GatedAttention(Attention):
    """x_TD -> x_TD: o_proj(attention * sigmoid(gate)). Of a head's rows of q_proj the first half is the query."""

    def forward(self, x_TD: Tensor, rotation: Rotation | None, attend: Attend, adapt: Adapt = unadapted) -> Tensor:
        N, K, _ = self.heads
        heads_TMH = self.qkv_proj(x_TD, adapt).unflatten(-1, (-1, self.head_dim))
        q_gate_TGH, k_TKH, v_TKH = heads_TMH.split([2 * N, K, K], dim=1)
        q_TNH, gate_TNH = q_gate_TGH.unflatten(1, (N, 2)).unbind(2)
        q_TNH, k_TKH = rotate_both(self.q_norm(q_TNH), self.k_norm(k_TKH), rotation)
        o_TNH = attend(self.layer, q_TNH, k_TKH, v_TKH, self.sinks) * sigmoid(gate_TNH)
        y_TD: Tensor = self.o_proj(o_TNH.flatten(1), adapt)
        return y_TD
