"""`ArrivalBoard`: which ranks of a machine have come to which of their exchanges, in memory that they share.

Messages between devices begin only when both ends are there (`device_channel.py` says why). For each pair of ranks and
each direction the board has two words, used in turns: the number of the pair's exchange that a rank has come to, and
beside it a signature of what it will send and receive. A rank that has come to exchange n + 1 has completed n with the
other, so that two words are enough. A word is 8 aligned bytes, which only one rank writes.
"""

from __future__ import annotations

import mmap
from collections import Counter
from pathlib import Path

WORD = 8
NUMBERS = 2**31
"""Exchanges are counted modulo this: only whether two numbers are the same is ever asked."""


class ArrivalBoard:
    """One rank's view of the board of `size` ranks; `place` is its own number among them, `path` the file they share.

    Every rank opens it before any of them comes to an exchange. The file may be removed once all have opened it.
    """

    def __init__(self, path: Path, place: int, size: int) -> None:
        self._place, self._size = place, size
        self._count: Counter[int] = Counter()
        length = size * size * 2 * WORD
        with path.open("r+b") as file:
            file.truncate(length)  # to the same length by each of them: what is written stays
            self._words = memoryview(mmap.mmap(file.fileno(), length)).cast("q")

    def come(self, peer: int, signature: int) -> None:
        """Say that this rank has come to its next exchange with `peer`; the signature has 32 bits."""
        number = self._count[peer] = (self._count[peer] + 1) % NUMBERS
        self._words[self._word(self._place, peer)] = number << 32 | signature

    def has_come(self, peer: int) -> bool:
        """Whether the peer has come to the exchange with this rank that this rank has come to."""
        return self._words[self._word(peer, self._place)] >> 32 == self._count[peer]

    def signature(self, peer: int) -> int:
        """What the peer, which has come, has said of the exchange."""
        return self._words[self._word(peer, self._place)] & 0xFFFFFFFF

    def _word(self, source: int, target: int) -> int:
        """Where `source` writes for `target` in the pair's present exchange."""
        other = target if source == self._place else source
        return (source * self._size + target) * 2 + self._count[other] % 2
