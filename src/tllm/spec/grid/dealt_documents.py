"""Which documents of a microbatch each block of a grid has: whole ones, so that attention needs no other rank."""

from __future__ import annotations

from collections.abc import Sequence


def dealt_documents(lengths: Sequence[int], blocks: int) -> list[list[int]]:
    """The numbers of the documents of each block, ascending: the longest first to the block that has the least.

    >>> dealt_documents([3, 9, 4, 2], 2)
    [[1], [0, 2, 3]]
    """
    held: list[list[int]] = [[] for _ in range(blocks)]
    loads = [0] * blocks
    for number in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
        least = loads.index(min(loads))
        held[least].append(number)
        loads[least] += lengths[number]
    return [sorted(block) for block in held]


def filled_blocks(lengths: Sequence[int], blocks: int) -> list[list[int]]:
    """The lengths of the documents of each block. All have as many tokens: a last document that is not learned fills
    those that have less.

    >>> filled_blocks([3, 9, 4, 2], 2)
    [[9], [3, 4, 2]]
    """
    each = [[lengths[number] for number in block] for block in dealt_documents(lengths, blocks)]
    room = max(map(sum, each))
    return [held + [room - sum(held)] * (sum(held) < room) for held in each]
