"""What a kept reply takes in memory, as objects of Python: several times the bytes that it has when it is encoded."""

from __future__ import annotations

import sys

import msgspec

from tllm.spec.request import Output, TokenLogprobs

NUMBER_BYTES = sys.getsizeof(1 << 31)
"""Of a token id or any other number of an output, at most."""

SLOT_BYTES = sys.getsizeof((0,)) - sys.getsizeof(())
"""Of an entry of a tuple, beside what it refers to."""

OUTPUT_BYTES = SLOT_BYTES + sys.getsizeof(Output(request_id=""))
"""Of an output without anything, and its place among those of a reply."""

LOGPROB_BYTES = SLOT_BYTES + sys.getsizeof(TokenLogprobs(0, 0.0)) + sys.getsizeof(()) + 3 * NUMBER_BYTES
LIKELY_BYTES = SLOT_BYTES + sys.getsizeof((0, 0.0)) + 2 * NUMBER_BYTES
"""Of a token's log-probability, and of each of the likeliest ones beside it."""


def output_bytes(output: Output) -> int:
    """Bytes of an output, by how many numbers and log-probabilities it has: one comes for every token."""
    size = OUTPUT_BYTES + sys.getsizeof(output.request_id)
    if output.error:
        size += sys.getsizeof(output.error)
    for numbers in (output.token_ids, output.pooled):
        if numbers:
            size += sys.getsizeof(numbers) + len(numbers) * NUMBER_BYTES
    for places in (output.logprobs, output.prompt_logprobs):
        if places:
            likely = sum([len(place.top) for place in places if place is not None])
            size += sys.getsizeof(()) + len(places) * LOGPROB_BYTES + likely * LIKELY_BYTES
    return size


def kept_bytes(value: object) -> int:
    """Bytes of what was asked, a structure of `spec.request`; what it holds in several places counts once.

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
