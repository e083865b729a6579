"""A batch's tokens divided among ranks that have the same weights, as the layers of a 2.5D grid do.

Each computes some of the rows, and attends with them. Keys and values of all rows go to every rank, so that each has
the same pages, whichever rank computes a sequence's next token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tllm.comm.collectives.group import Group
from tllm.engine.compute.kv_cache import LayerCache
from tllm.engine.compute.paged_attention import PagedAttend
from tllm.engine.schedule.batch import BatchEntry
from tllm.parallel.collectives import gathered
from tllm.parallel.sequence_parallel import slice_counts


class DividedRows:
    """The rows of a batch of `tokens` that each rank of `group` computes, in order.

    A batch of fewer tokens than ranks is not divided: each computes it all, and nothing travels between them.
    """

    def __init__(self, tokens: int, group: Group) -> None:
        self.is_divided = 1 < group.size <= tokens
        self.group, self.counts = group, slice_counts(tokens, group.size)
        start = sum(self.counts[: group.rank])
        self.own = slice(start, start + self.counts[group.rank]) if self.is_divided else slice(0, tokens)

    def put_together(self, x_TD: Tensor) -> Tensor:
        """The rows of all ranks, of which `x_TD` are this one's."""
        return gathered(x_TD, self.group, self.counts) if self.is_divided else x_TD

    def attend(self, whole: PagedAttend) -> PagedAttend:
        """Attention of this rank's rows, where `whole` is that of the batch."""
        if not self.is_divided:
            return whole
        own = PagedAttend(whole.cache, own_entries(whole.entries, self.own))
        own.write = _GatheredWriter(whole, self)
        return own


class _GatheredWriter:
    """Writes the keys and values of all rows, of which each rank has made some."""

    def __init__(self, whole: PagedAttend, rows: DividedRows) -> None:
        self._whole, self._rows = whole, rows

    def __call__(self, layer_cache: LayerCache, k_TKH: Tensor, v_TKH: Tensor) -> None:
        both_TMH = self._rows.put_together(torch.cat((k_TKH, v_TKH), dim=1))
        self._whole.write(layer_cache, *both_TMH.chunk(2, dim=1))


def own_entries(entries: Sequence[BatchEntry], own: slice) -> tuple[BatchEntry, ...]:
    """The parts of a batch's entries that lie in these of its rows: where their tokens and their pages are."""
    found, row = list[BatchEntry](), 0
    for entry in entries:
        first, last = max(own.start, row), min(own.stop, row + entry.count)
        if first < last:
            start = entry.start + first - row
            found.append(BatchEntry(entry.key, start, last - first, entry.prompt_length, entry.page_table))
        row += entry.count
    return tuple(found)
