"""`Attend`: how queries meet keys and values. The model calls it; the engine and the trainer each bring their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class AttentionSpec:
    """One layer's attention: scale of the scores, how many keys back it sees, soft cap, uneven sharing of kv heads.

    `kv_index`: for each local query head its local kv head, given only where they do not divide evenly.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    kv_index: tuple[int, ...] | None = None


class Attend(Protocol):
    """(layer number, q [T, N, H], k [T, K, H], v [T, K, H]) -> [T, N, H] for the tokens of one batch, packed."""

    def __call__(self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor: ...


class PackedCausal:
    """Causal attention over whole sequences packed one after another, with no cache; in plain steps.

    `lengths` are the sequences' token counts. Used for prompts scored in one go and, being plain, as the truth.
    """

    def __init__(self, specs: dict[int, AttentionSpec], lengths: list[int]) -> None:
        self.specs = specs
        sequence_T = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        place_T = torch.cat([torch.arange(n) for n in lengths])
        self.distance_TT = place_T[:, None] - place_T[None, :]
        self.visible_TT = (sequence_T[:, None] == sequence_T[None, :]) & (self.distance_TT >= 0)

    def __call__(self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
        spec = self.specs[layer]
        heads = q_TNH.shape[1]
        index = spec.kv_index or [n // (heads // k_TKH.shape[1]) for n in range(heads)]
        scores_NTT = torch.einsum("tnh,snh->nts", q_TNH, k_TKH[:, index]) * spec.scale
        if spec.softcap is not None:
            scores_NTT = torch.tanh(scores_NTT / spec.softcap) * spec.softcap
        visible = self.visible_TT if spec.window is None else self.visible_TT & (self.distance_TT < spec.window)
        chance_NTT = scores_NTT.masked_fill(~visible, float("-inf")).softmax(-1)
        return torch.einsum("nts,snh->tnh", chance_NTT, v_TKH[:, index])
