"""Completions for people to read, as files in a run's folder: those of each step, and those of each evaluation."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tllm.core.errors import UNREADABLE, ConfigError
from tllm.training.evaluation.completion_record import CompletionRecord

COMPLETIONS, EVAL_COMPLETIONS = "completions.jsonl", "eval_completions.jsonl"

_RECORDS = msgspec.json.Decoder(CompletionRecord)


class CompletionsFile:
    """A file of a run whose first `done` steps are kept: lines of later steps, and a torn one, are cut off.

    As with `metrics.jsonl`, a disk that is full does not end the run.
    """

    def __init__(self, folder: Path, done: int, name: str = COMPLETIONS) -> None:
        self.path = folder / name
        try:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._end = _kept(self.path, done)
            os.ftruncate(self._file, self._end)
        except OSError as error:
            raise ConfigError(f"cannot write {self.path}: {error.strerror}", "give another output_dir") from error
        self.lost = 0

    def write(self, records: Sequence[CompletionRecord]) -> None:
        """Add lines."""
        lines = b"".join(msgspec.json.encode(record) + b"\n" for record in records)
        try:
            written = os.pwrite(self._file, lines, self._end)
        except OSError:
            written = 0
        if written < len(lines):
            self.lost += len(records)
            os.ftruncate(self._file, self._end)
            return
        self._end += written

    def close(self) -> None:
        os.close(self._file)


def _kept(path: Path, done: int) -> int:
    """The bytes before the first line that is torn, or of a later step."""
    end = 0
    with path.open("rb") as file:
        for line in file:
            try:
                step = _RECORDS.decode(line).step if line.endswith(b"\n") else done + 1
            except UNREADABLE:
                return end
            if step > done:
                return end
            end += len(line)
    return end
