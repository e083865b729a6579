"""Commits one save: every rank writes its files, all agree, and only then the save gets its name and older ones go."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tllm.comm.collectives.group import Group
from tllm.core.errors import decoded
from tllm.training.checkpoint import save_folders as folders
from tllm.training.checkpoint.durable_disk import DurableDisk
from tllm.training.checkpoint.manifest import LIMIT, NAME, VERSION, CheckpointManifest, encode
from tllm.training.checkpoint.retention import Retention
from tllm.training.checkpoint.shard_writer import CHUNK_BYTES, ShardSnapshot, Written
from tllm.weights.boxes import Shape
from tllm.weights.manifest import Manifest

DONE, NOTHING = "done", ""
"""What a rank says of its part, if it did it or had none; else what went wrong."""


@dataclass(frozen=True)
class SaveResult:
    """How a save ended, the same on every rank. `error` says what went wrong, and where; "" if nothing did."""

    step: int
    seconds: float
    nbytes: int
    error: str


class _Report(msgspec.Struct, frozen=True):
    """What one rank tells the others when its files are written, or cannot be."""

    written: Written
    facts: dict[str, Any]
    error: str


_REPORTS = msgspec.msgpack.Decoder(_Report)


class SaveCommit:
    """Writes saves under `root`, which ranks may share or not. A failing disk is a result, a failing link is raised."""

    def __init__(self, root: Path, group: Group, disk: DurableDisk, retention: Retention) -> None:
        self._root = root
        self._group = group
        self._disk = disk
        self._retention = retention

    def run(
        self,
        step: int,
        snapshot: ShardSnapshot,
        shapes: Mapping[str, Shape],
        facts: dict[str, Any],
        complete: Sequence[int],
    ) -> tuple[SaveResult, list[int]]:
        """Files, then agreement, then the list and the name; returns the steps that are complete after it."""
        start = time.monotonic()
        report = self._write_files(step, snapshot, facts)
        every = self._group.all_gather_bytes(msgspec.msgpack.encode(report), LIMIT)
        reports = [decoded(one, _REPORTS) for one in every]
        nbytes = sum(file.size for report in reports for file in report.written.files.values())
        kept = list(complete)
        error = "; ".join(report.error for report in reports if report.error)
        if error:
            self._drop(step, snapshot)
        else:
            leads = self._leads(step, reports)
            error, done = self._together(self._finish(step, reports, shapes) if leads else NOTHING)
            if not error:
                self._retention.found(step, reports[0].facts)
                kept = self._retention.kept([*complete, step])
                error, _ = self._together(self._prune(kept) if leads else NOTHING)
            elif not done:
                self._drop(step, snapshot)
        return SaveResult(step, time.monotonic() - start, nbytes, error), kept

    def _write_files(self, step: int, snapshot: ShardSnapshot, facts: dict[str, Any]) -> _Report:
        folder = folders.unfinished(self._root, step)
        nothing = Written((), {})
        if not snapshot.files:
            return _Report(nothing, facts, "")
        try:
            self._disk.make_folder(folder)
            written = snapshot.write(self._disk, folder)
            self._disk.sync_folder(folder)
            self._disk.sync_folder(self._root)
        except OSError as error:
            return _Report(nothing, {}, self._said(error))
        return _Report(written, facts, "")

    def _leads(self, step: int, reports: Sequence[_Report]) -> bool:
        """Whether this rank is the first of those whose files lie in this folder."""
        folder = folders.unfinished(self._root, step)
        here = (rank for rank, report in enumerate(reports) if any((folder / f).exists() for f in report.written.files))
        return next(here, None) == self._group.rank

    def _finish(self, step: int, reports: Sequence[_Report], shapes: Mapping[str, Shape]) -> str:
        files = {name: hashes for report in reports for name, hashes in sorted(report.written.files.items())}
        pieces = tuple(piece for report in reports for piece in report.written.pieces)
        hashes = Manifest(1, CHUNK_BYTES, files)
        text = encode(CheckpointManifest(VERSION, step, dict(sorted(shapes.items())), pieces, hashes, reports[0].facts))
        try:
            folders.finish(self._disk, self._root, step, text)
        except OSError as error:
            return self._said(error)
        return DONE

    def _prune(self, kept: Sequence[int]) -> str:
        """Remove what is older than the last save and does not stay."""
        try:
            for step in folders.steps_here(self._root):
                if step < kept[-1] and step not in kept:
                    folders.discard(self._disk, self._root, step)
        except OSError as error:
            return self._said(error)
        return DONE

    def _drop(self, step: int, snapshot: ShardSnapshot) -> None:
        """Give back the room that this rank's part of a failed save takes; what is stuck goes at the next start."""
        folder = folders.unfinished(self._root, step)
        with contextlib.suppress(OSError):
            for file in (NAME, *snapshot.files):
                self._disk.remove(folder / file)
        with contextlib.suppress(OSError):  # the last rank of those that share the folder finds it empty
            folder.rmdir()

    def _together(self, outcome: str) -> tuple[str, bool]:
        """What went wrong on any rank, and whether any has done it."""
        outcomes = [one.decode() for one in self._group.all_gather_bytes(outcome.encode())]
        return "; ".join(one for one in outcomes if one not in (DONE, NOTHING)), DONE in outcomes

    def _said(self, error: OSError) -> str:
        where = error.filename or self._root
        return f"rank {self._group.rank} cannot write {where}: {error.strerror or error}"
