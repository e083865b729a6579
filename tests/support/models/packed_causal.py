"""`PackedCausal`: the attention that those of the trainer and of the engine are compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from tllm.model.attention import AttentionSpec
from tllm.model.recurrence import Advance, recur_afresh


class PackedCausal:
    """Causal attention over whole sequences packed one after another, without a cache, in plain steps.

    `lengths` are the sequences' token counts.
    """

    def __init__(self, specs: dict[int, AttentionSpec], lengths: list[int]) -> None:
        self.specs = specs
        self.lengths = lengths
        sequence_T = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        place_T = torch.cat([torch.arange(n) for n in lengths])
        self.distance_TT = place_T[:, None] - place_T[None, :]
        self.visible_TT = (sequence_T[:, None] == sequence_T[None, :]) & (self.distance_TT >= 0)

    def __call__(
        self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, sinks_N: Tensor | None = None
    ) -> Tensor:
        spec = self.specs[layer]
        heads = q_TNH.shape[1]
        index = spec.kv_index or [n // (heads // k_TKH.shape[1]) for n in range(heads)]
        scores_NTT = torch.einsum("tnh,snh->nts", q_TNH, k_TKH[:, index]) * spec.scale
        if spec.softcap is not None:
            scores_NTT = torch.tanh(scores_NTT / spec.softcap) * spec.softcap
        visible = self.visible_TT if spec.window is None else self.visible_TT & (self.distance_TT < spec.window)
        scores_NTT = scores_NTT.masked_fill(~visible, float("-inf"))
        if sinks_N is not None:
            scores_NTT = torch.cat((scores_NTT, sinks_N[:, None, None].expand(-1, len(q_TNH), 1)), -1)
        weights_NTT = scores_NTT.softmax(-1)[..., : len(q_TNH)]
        return torch.einsum("nts,snh->tnh", weights_NTT, v_TKH[:, index])

    def recur(self, layer: int, advance: Advance, *rows: Tensor) -> Tensor:
        """Each sequence by itself, from no state."""
        return recur_afresh([(1, length) for length in self.lengths], advance, *rows)
