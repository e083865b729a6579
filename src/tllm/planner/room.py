"""How many pages of keys and values a plan's ranks can hold: the same number on each, so the fullest rank decides."""

from __future__ import annotations

from collections.abc import Sequence

from tllm.ground.errors import CapacityError
from tllm.planner.cost import RankBytes

DEFAULT_CACHE_BYTES = 1 << 30
"""For keys and values on each rank, where the user names no other number."""


def cache_pages(
    ranks: Sequence[RankBytes], page_size: int, max_model_len: int, max_num_seqs: int, memory: int | None = None
) -> int:
    """Pages that `memory` bytes hold on the rank with the most bytes for a token.

    Without `memory`: room for every sequence at its longest, as far as DEFAULT_CACHE_BYTES go.
    """
    page_bytes = max(rank.kv_per_token for rank in ranks) * page_size
    budget = DEFAULT_CACHE_BYTES if memory is None else memory
    pages = budget // page_bytes
    if pages < 1:
        raise CapacityError(
            f"{budget} bytes of cache hold no page: one of {page_size} tokens takes {page_bytes} bytes",
            "give --kv-cache-memory more, or cut the model over more ranks",
        )
    most = max_num_seqs * -(-max_model_len // page_size)
    return min(pages, most) if memory is None else pages
