"""What a kept reply takes in memory, as objects of Python: several times the bytes that it has when it is encoded."""

from __future__ import annotations

import sys

import msgspec

NUMBER_BYTES = sys.getsizeof(1 << 31)
"""Of a token id or any other number of an output, at most."""


def kept_bytes(value: object) -> int:
    """Bytes of a structure of `spec.request` and of all that it holds; what it holds in several places counts once.

    Numbers in a tuple, which may be a million of a prompt, are counted by how many they are, as the largest. So it is
    a little more than is really taken, never less but for what the allocator loses between objects.
    """
    size, seen, left = 0, set[int](), [value]
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        size += sys.getsizeof(one)
        if isinstance(one, msgspec.Struct):
            left += [getattr(one, name) for name in one.__struct_fields__]
        elif isinstance(one, dict):
            left += [*one, *one.values()]
        elif isinstance(one, tuple | list) and one:
            if isinstance(one[0], int | float):
                size += len(one) * NUMBER_BYTES
            else:
                left += one
    return size
