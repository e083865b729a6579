"""SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): a random number of 64 bits from each state, be they counted or mixed
of several numbers. Torch's signed integers hold the bits, and wrap around alike."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

AT_ONCE = 2**20
"""Elements whose numbers are drawn at once: each takes 8 bytes meanwhile."""


def signed(x: int) -> int:
    """The same 64 bits as torch's integers hold them."""
    return x - 2**64 if x >= 2**63 else x


GOLDEN_GAMMA = signed(0x9E3779B97F4A7C15)
"""Between one state and the next."""


def counter_random(draws_T: Tensor, key: int, first: int, columns: int, bits: int) -> Iterator[Tensor]:
    """A number in [0, 2**bits) for each token and each of `columns` from `first`, int64; some tokens at a time.

    It depends on a number of the token's own (`draws_T`, int64), on the column and on a `key` of 64 bits, which says
    what the numbers are for, alone: so a layer that is recomputed has them again.
    """
    columns_D = torch.arange(first, first + columns, device=draws_T.device) * GOLDEN_GAMMA
    of_token_T = splitmix64(draws_T + signed(key))
    for some_T in torch.split(of_token_T, max(1, AT_ONCE // max(1, columns))):
        yield shift_right(splitmix64(some_T[:, None] + columns_D), 64 - bits)


def splitmix64(states: Tensor) -> Tensor:
    """What the generator gives in these states (int64), in their memory."""
    mixed = most_mixed(states)
    mixed ^= shift_right(mixed, 31)
    return mixed


def most_mixed(states: Tensor) -> Tensor:
    """`splitmix64` without its last step, which changes none of the first 31 bits."""
    for bits, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        states ^= shift_right(states, bits)
        states *= signed(factor)
    return states


def shift_right(x: Tensor, bits: int) -> Tensor:
    """Shifted right with zeros coming in, where torch would repeat the sign."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)
