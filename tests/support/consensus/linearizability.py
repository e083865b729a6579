"""Whether what clients saw of one register could have happened one operation after another.

Wing and Gong, "Testing and Verifying Concurrent Objects" (1993), with the memory of states of Lowe, "Testing for
Linearizability" (2017). It takes all orders that the times allow, and so is for short histories.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Operation:
    """A write of a value that nobody else writes, or a read with what came of it. `end` is infinite where nobody knows
    whether the write happened."""

    is_write: bool
    value: bytes
    start: float
    end: float = math.inf


def is_linearizable(history: Sequence[Operation], initial: bytes = b"") -> bool:
    """Whether some order explains every read: each operation at a moment between its start and its end."""
    operations = sorted(history, key=lambda operation: operation.start)
    needed = sum(1 << at for at, operation in enumerate(operations) if operation.end < math.inf)
    seen = set[tuple[int, bytes]]()
    todo = [(0, initial)]
    while todo:
        done, value = todo.pop()
        if done & needed == needed:
            return True
        if (done, value) in seen:
            continue
        seen.add((done, value))
        left = [at for at in range(len(operations)) if not done >> at & 1]
        first_end = min(operations[at].end for at in left)
        for at in left:
            operation = operations[at]
            if operation.start > first_end:  # another one had ended before it began
                break
            if operation.is_write:
                todo.append((done | 1 << at, operation.value))
            elif operation.value == value:
                todo.append((done | 1 << at, value))
    return False
