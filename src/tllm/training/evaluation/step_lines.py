"""`StepLines`: a file of a run with JSON lines that each tell of a step, as `metrics.jsonl` is."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tllm.core.errors import UNREADABLE, ConfigError, counted

log = logging.getLogger("tllm.training")


class _Line(msgspec.Struct, frozen=True):
    """What any of the lines has."""

    step: int = 0


_LINES = msgspec.json.Decoder(_Line)


class StepLines:
    """A file of a run whose first `done` steps are kept: lines of later steps, and a torn one, are cut off.

    A disk that is full does not end the run: lines that find no room are left out, and `lost` says how many. The log
    says so at the first line of each such time, and how many there were when there is room again or the file is closed.
    """

    def __init__(self, path: Path, done: int) -> None:
        self.path = path
        self.lost = 0
        self.error = ""
        """What the system last said of a line that was lost."""
        self._lost_now = 0
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._end = _kept(path, done)
            os.ftruncate(self._file, self._end)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}", "give another output_dir") from error

    def add(self, records: Sequence[msgspec.Struct]) -> None:
        """Add a line for each, or none; they are with the system when this returns."""
        lines = b"".join(msgspec.json.encode(record) + b"\n" for record in records)
        try:
            written = os.pwrite(self._file, lines, self._end)
            if written < len(lines):  # the room ended within a line
                written += os.pwrite(self._file, lines[written:], self._end + written)
            self._end += written
        except OSError as error:
            self._lose(len(records), error.strerror or str(error))
        else:
            self._tell_lost("; there is room again" if lines else "")

    def close(self) -> None:
        self._tell_lost("")
        os.close(self._file)

    def _lose(self, count: int, error: str) -> None:
        if not self._lost_now:
            log.warning(
                "cannot write %s: %s; the run goes on, and lines are left out until there is room", self.path, error
            )
        self.lost, self._lost_now, self.error = self.lost + count, self._lost_now + count, error
        os.ftruncate(self._file, self._end)

    def _tell_lost(self, why_now: str) -> None:
        if self._lost_now:
            lines = counted(self._lost_now, "line")
            log.warning("%s lacks %s that found no room%s", self.path, lines, why_now)
        self._lost_now = 0


def step_of(line: bytes) -> int:
    """The step that a line tells of, the first being 1; 0 for a line that is torn or tells of none."""
    try:
        return _LINES.decode(line).step if line.endswith(b"\n") else 0
    except UNREADABLE:
        return 0


def _kept(path: Path, done: int) -> int:
    """The bytes up to the first line that is torn, of a later step, or of one before that of the line above it."""
    end, last = 0, 1
    with path.open("rb") as file:
        for line in file:
            step = step_of(line)
            if not last <= step <= done:
                break
            end, last = end + len(line), step
    return end
