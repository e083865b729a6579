"""`DiskTrouble`: says once that a disk takes no more of something, and once that it does again."""

from __future__ import annotations

import logging
import math
import threading
import time


class DiskTrouble:
    """For what is gone without where it cannot be written. `what` goes before "cannot be written" in the log.

    `is_there`: whether the last write was refused. `count`: how many were. Any thread may call it.
    """

    def __init__(self, log: logging.Logger, what: str) -> None:
        self.is_there, self.count = False, 0
        self._log, self._what = log, what
        self._last = -math.inf
        self._lock = threading.Lock()

    def refused(self, error: OSError) -> None:
        """A write was refused."""
        with self._lock:
            is_new, self.is_there = not self.is_there, True
            self.count += 1
            self._last = time.monotonic()
        if is_new:
            self._log.warning("%s cannot be written: %s", self._what, error.strerror or error)

    def was_within(self, seconds: float) -> bool:
        """Whether a write was refused so short a time ago that another one is not worth a try."""
        return self.is_there and time.monotonic() - self._last < seconds

    def accepted(self) -> None:
        """A write went well."""
        if not self.is_there:
            return
        with self._lock:
            was_there, self.is_there = self.is_there, False
        if was_there:
            self._log.warning("%s can be written again", self._what)
