"""`VarlenAttend`: on CUDA, attention over documents of unlike lengths, or within a window, in one call a layer.

torch's flash attention (2307.08691) is told where each document starts, so that many short ones are no more launches
than one. It is not the fastest of one length without a window, and has no cap on scores, no sinks and no prompts that
are shared: those are left to `TrainAttend`.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from tllm.model.attention import AttentionSpec
from tllm.training.attention.packed_attention import MakeAttend, TrainAttend
from tllm.training.data.batch_tensors import Tokens, copied

WIDEST, STEP = 256, 8
"""Heads that it takes are so wide at most, and by these steps."""

FIRST_CAPABILITY = (8, 0)
"""Of the GPUs that it is written for, Ampere's."""

flash_attention = torch.ops.aten._flash_attention_forward


def has_varlen(device: torch.device) -> bool:
    """Whether this build of torch and this device have it."""
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability(device) >= FIRST_CAPABILITY
    )


def attention_on(device: torch.device) -> MakeAttend:
    """What attends over whole microbatches on a device."""
    return VarlenAttend if has_varlen(device) else TrainAttend


class VarlenAttend(TrainAttend):
    """Causal attention inside each document, as `TrainAttend` says."""

    def __init__(self, specs: dict[int, AttentionSpec], tokens: Tokens) -> None:
        super().__init__(specs, tokens)
        starts = torch.tensor([0, *accumulate(tokens.lengths)], dtype=torch.int32)
        self.starts_D = copied(starts, tokens.ids_T.device)
        self.longest = max(tokens.lengths, default=0)

    def __call__(
        self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, sinks_N: Tensor | None = None
    ) -> Tensor:
        spec = self.specs[layer]
        if self.is_shared or sinks_N is not None or not self._is_better(spec) or not _takes(q_TNH, v_TKH):
            return super().__call__(layer, q_TNH, k_TKH, v_TKH, sinks_N)
        if spec.kv_index is not None:
            k_TKH, v_TKH = k_TKH[:, list(spec.kv_index)], v_TKH[:, list(spec.kv_index)]
        return varlen_attention(spec, q_TNH, k_TKH, v_TKH, self.starts_D, self.longest)

    def _is_better(self, spec: AttentionSpec) -> bool:
        return spec.softcap is None and (len(self.runs) > 1 or window_within(spec, self.longest) is not None)


def window_within(spec: AttentionSpec, longest: int) -> int | None:
    """A layer's window, if any document is longer."""
    return spec.window if spec.window is not None and spec.window < longest else None


def varlen_attention(
    spec: AttentionSpec, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, starts_D: Tensor, longest: int
) -> Tensor:
    """Of all documents; `starts_D` are the places of their first tokens, and the number of all."""
    window = window_within(spec, longest)
    out_TNH: Tensor = flash_attention(
        q_TNH,
        k_TKH,
        v_TKH,
        starts_D,
        starts_D,
        longest,
        longest,
        0.0,
        True,
        False,
        scale=spec.scale,
        window_size_left=None if window is None else window - 1,
        window_size_right=None if window is None else 0,
    )[0]
    return out_TNH


def _takes(q_TNH: Tensor, v_TKH: Tensor) -> bool:
    width = q_TNH.shape[-1]
    return (
        q_TNH.dtype in (torch.bfloat16, torch.float16)
        and width <= WIDEST
        and width % STEP == 0
        and width == v_TKH.shape[-1]
    )
