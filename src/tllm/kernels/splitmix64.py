"""SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): a random number of 64 bits from each state, be they counted or mixed
of several numbers. Torch's signed integers hold the bits, and wrap around alike."""

from __future__ import annotations

from torch import Tensor


def signed(x: int) -> int:
    """The same 64 bits as torch's integers hold them."""
    return x - 2**64 if x >= 2**63 else x


GOLDEN_GAMMA = signed(0x9E3779B97F4A7C15)
"""Between one state and the next."""


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
