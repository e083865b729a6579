"""The keys and values of one rank's layers, in slots that pages hand out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tllm.core.errors import CapacityError
from tllm.engine.schedule.limits import Limits
from tllm.model.attention import AttentionSpec


@dataclass(frozen=True)
class HeadGroups:
    """How query heads meet kv heads in even groups: `pad` repeats a head where a group is short, `real` undoes it.

    Padding queries costs a few rows; repeating keys and values instead would copy the whole context.
    """

    size: int
    pad: Tensor | None = None
    real: Tensor | None = None


@dataclass(frozen=True)
class LayerCache:
    """One layer's slots, [kv heads, slots, head width]: a head's keys lie together, which is how they are read.

    `kind` numbers the layers' different ways to attend.
    """

    keys: Tensor
    values: Tensor
    kind: int


class KVCache:
    """Every layer's slots on this rank, and the `kinds` of attention that read them.

    All of it is written once when made, so that memory which is not there is missed now and not while serving.
    """

    def __init__(
        self, specs: dict[int, AttentionSpec], kv_shape: tuple[int, int], limits: Limits, dtype: torch.dtype
    ) -> None:
        self.page_size = limits.page_size
        self.dtype = dtype
        self.kv_heads, self.head_dim = kv_shape
        self.num_slots = limits.num_pages * limits.page_size
        self.kinds = list(dict.fromkeys(specs.values()))
        shape = (self.kv_heads, self.num_slots, self.head_dim)
        self.layers = {
            layer: LayerCache(_zeros(shape, dtype), _zeros(shape, dtype), self.kinds.index(spec))
            for layer, spec in specs.items()
        }
        self.groups = {spec.kv_index: _uneven(spec.kv_index) for spec in self.kinds if spec.kv_index is not None}

    @property
    def num_bytes(self) -> int:
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers.values())


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    try:
        # torch.zeros would leave the memory to be found later, page by page.
        return torch.empty(shape, dtype=dtype).zero_()
    except RuntimeError as error:
        wanted = shape[0] * shape[1] * shape[2] * dtype.itemsize
        raise CapacityError(
            f"no memory for {wanted / 2**20:.0f} MiB of cache ({shape[1]} tokens of one layer)",
            "give the cache fewer tokens",
        ) from error


def _uneven(kv_index: tuple[int, ...]) -> HeadGroups:
    """Even groups for `kv_index`, which names each query head's kv head."""
    groups = [[head for head, kv in enumerate(kv_index) if kv == wanted] for wanted in range(max(kv_index) + 1)]
    size = max(map(len, groups))
    padded = [group[min(place, len(group) - 1)] for group in groups for place in range(size)]
    return HeadGroups(size, torch.tensor(padded), torch.tensor([padded.index(head) for head in range(len(kv_index))]))
