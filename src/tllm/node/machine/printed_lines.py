"""What functions of the user's print in a worker: lines of its stderr with a mark, which its command prints as its own.

A worker has no stdout of its own. Whoever looks for a fault in a reward function prints something in it.
"""

from __future__ import annotations

import io
import threading
from typing import TextIO

MARK = "PRINTED"
"""The first word of such a line, where others have the level of a line of the log."""


class PrintedLines(io.TextIOBase):
    """Takes the place of `sys.stdout`: whole lines go on to `target`, each behind the mark, and so does what is flushed
    of a line, as it is at the end."""

    def __init__(self, target: TextIO, number: int) -> None:
        """`number`: the file that a program which is started gets as its stdout."""
        self._target, self._number, self._rest = target, number, ""
        self._lock = threading.Lock()

    def fileno(self) -> int:
        return self._number

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        with self._lock:
            *lines, self._rest = (self._rest + text).split("\n")
            self._target.write("".join(f"{MARK} {line}\n" for line in lines))
        self._target.flush()
        return len(text)

    def flush(self) -> None:
        with self._lock:
            rest, self._rest = self._rest, ""
            if rest:
                self._target.write(f"{MARK} {rest}\n")
        self._target.flush()
