"""`AsyncSaves`: the saves of a run, written in the background by all ranks together. Only the last few are kept.

A save that fails (a disk that is full) is reported and the run goes on; the saves before it stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from tllm.comm.collectives.group import Group, solo
from tllm.core.errors import ConfigError, WeightsError, counted, decoded
from tllm.training.checkpoint import save_folders as folders
from tllm.training.checkpoint.checkpoint import Checkpoint, open_folder
from tllm.training.checkpoint.commit import SaveCommit, SaveResult
from tllm.training.checkpoint.disk_room import RANK_ROOM, missing_room, room_of, to_come
from tllm.training.checkpoint.durable_disk import DurableDisk
from tllm.training.checkpoint.fetch_files import bring_files, bring_list
from tllm.training.checkpoint.manifest import LIMIT, decode
from tllm.training.checkpoint.retention import Retention, Worth, unknown
from tllm.training.checkpoint.shard_assignment import HELD_BOXES, ShardAssignment, assign_shards, shapes_of
from tllm.training.checkpoint.shard_writer import ShardSnapshot, held_boxes
from tllm.training.state.optimizer_offload import OnDevice, StatePlacement
from tllm.training.state.tensor_blocks import TensorBlock
from tllm.weights.boxes import Shape
from tllm.weights.load import Progress

KEEP = 2
"""Complete saves that stay, at least."""


class AsyncSaves:
    """The saves under `root`, which is one folder for all ranks or a folder of each node's own.

    `group` holds every rank of the run and is used for nothing else, as a thread of this object talks over it; give it
    a deadline that a slow disk can meet. Every rank makes the same calls in the same order.

    Unless a save `is_needed`, there may be none that is complete. Copies wait in `place` until they are written. Of the
    saves that are kept the best by their `worth` is one, if that is given.
    """

    def __init__(
        self,
        root: Path | str,
        group: Group | None = None,
        keep: int = KEEP,
        disk: DurableDisk | None = None,
        is_needed: bool = True,
        place: StatePlacement | None = None,
        worth: Worth = unknown,
    ) -> None:
        if keep < KEEP:
            raise ConfigError(
                f"{counted(keep, 'save is', 'saves are')} to be kept",
                f"keep {KEEP} or more: one is there if the other is torn",
            )
        self.root = Path(root)
        self._group = group or solo()
        self._disk = disk or DurableDisk()
        self._place = place or OnDevice()
        self._retention = Retention(keep, worth)
        self._saving = SaveCommit(self.root, self._group, self._disk, self._retention)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="save")
        self._running: Future[SaveResult] | None = None
        self._results: list[SaveResult] = []
        self._assignment: ShardAssignment | None = None  # who writes what, agreed on once for all saves
        self._snapshot: ShardSnapshot | None = None
        self.complete = self._complete_saves(is_needed)
        """The steps of the saves that are whole, oldest first."""

    @property
    def latest(self) -> int | None:
        """The step of the last complete save."""
        return self.complete[-1] if self.complete else None

    @property
    def best(self) -> int | None:
        """The step of the best complete save; None where none was compared. Ask when no save runs."""
        return self._retention.best(self.complete)

    def missing_room(self, blocks: Sequence[TensorBlock], left: int) -> str:
        """What to tell of disks that lack room for the `left` saves that are still to come and for the finished model;
        "" where none does. Every rank calls it, between saves, and is told the same."""
        mine = room_of(self.root, self._disk, self._assign(blocks))
        gathered = self._group.all_gather_bytes(msgspec.msgpack.encode(mine))
        more = to_come(len(self.complete), left, self._retention.limit)
        return missing_room([decoded(one, RANK_ROOM) for one in gathered], more)

    def save(self, step: int, blocks: Sequence[TensorBlock], facts: Mapping[str, Any]) -> None:
        """Copy what the blocks hold and write it in the background; an earlier save that still runs is waited for.

        `blocks` are all that this rank holds, whatever others hold too; each element is written once. `facts` of rank 0
        are kept, as JSON. A step that is saved already is not saved again.
        """
        self._wait()
        if step in self.complete:
            return
        assignment = self._assign(blocks)
        if self._snapshot is None:
            self._snapshot = ShardSnapshot(self._group.rank, blocks, assignment.shares, assignment.shapes, self._place)
        self._snapshot.take(blocks)
        kept = dict(facts) if self._group.rank == 0 else {}
        self._running = self._thread.submit(self._write, step, self._snapshot, assignment.shapes, kept)

    def finished(self) -> list[SaveResult]:
        """The saves that ended since the last call. A link that failed, or a fault of ours, is raised here."""
        if self._running is not None and self._running.done():
            self._wait()
        results, self._results = self._results, []
        return results

    def wait(self) -> list[SaveResult]:
        """The same, once the save that runs has ended."""
        self._wait()
        return self.finished()

    def close(self) -> None:
        """End the thread, after the save that runs."""
        self._thread.shutdown()

    def open(self, step: int | None = None) -> Checkpoint:
        """A complete save, the last if none is named; its files may be on other nodes yet."""
        self._wait()
        wanted = self.latest if step is None else step
        if wanted not in self.complete:
            there = ", ".join(map(str, self.complete)) or "none"
            which = "" if step is None else f" of step {step}"
            raise WeightsError(f"{self.root} holds no complete save{which}", f"complete are: {there}")
        assert wanted is not None
        bring_list(self._disk, self.root, wanted, self._group)
        return open_folder(folders.folder_of(self.root, wanted))

    def open_model(self, is_here: bool, step: int | None = None) -> Checkpoint:
        """A save, the last if none is named, with all files of the model's own tensors on those ranks that want it."""
        opened = self.open(step)
        return self._fetched(opened, opened.files_of(opened.model_names) if is_here else set())

    def restore(
        self,
        blocks: Sequence[TensorBlock],
        step: int | None = None,
        progress: Progress | None = None,
    ) -> Checkpoint:
        """Fill all that this rank holds, under any plan, and go on from there: saves of later steps are removed.

        Files that this node lacks come from the others.

        WeightsError, with nothing filled, where the run and the save do not hold the same tensors in the same shapes.
        """
        opened = self.open(step)
        _check_same(opened, self._assign(blocks).shapes)
        opened = self._fetched(opened, opened.files_for(blocks))
        opened.fill(blocks, progress)
        later = [known for known in self.complete if known > opened.step]
        if later:
            self._in_turn(lambda: self._discard(later))
            self.complete = [known for known in self.complete if known <= opened.step]
        return opened

    def _fetched(self, opened: Checkpoint, wanted: set[str]) -> Checkpoint:
        """The same save, once the files that are wanted here have come from other nodes."""
        bring_files(self.root, opened.step, wanted, self._group)
        return open_folder(folders.folder_of(self.root, opened.step))

    def _complete_saves(self, is_needed: bool) -> list[int]:
        """Find the saves that are complete over all nodes, and remove what is left of others; their steps."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot make {self.root}: {error.strerror}", "give another output_dir") from error
        listings = self._group.all_gather_bytes(msgspec.msgpack.encode(folders.look(self.root)))
        found = [decoded(listing, folders.FOUND_SAVES) for listing in listings]
        chosen = folders.choose(found)
        if not chosen and is_needed:
            folders.check_found(found)
        lists = {save.step: self._told_list(save) for save in chosen}
        for step, text in lists.items():
            self._retention.found(step, decode(text).facts)
        self._in_turn(lambda: folders.keep_complete(self._disk, self.root, lists))
        return [save.step for save in chosen]

    def _told_list(self, save: folders.Chosen) -> bytes:
        """The list of a save, which its owner tells all others: each by itself, as it may be long."""
        mine = folders.list_text(self.root, save) if save.owner == self._group.rank else None
        return self._group.broadcast_bytes(mine, save.owner, LIMIT)

    def _discard(self, known: Sequence[int]) -> None:
        for step in known:
            folders.discard(self._disk, self.root, step)

    def _in_turn(self, work: Callable[[], None]) -> None:
        """One rank after the other, as ranks may share a folder."""
        for rank in range(self._group.size):
            if rank == self._group.rank:
                work()
            self._group.barrier()

    def _assign(self, blocks: Sequence[TensorBlock]) -> ShardAssignment:
        """Tell all ranks what each holds, and decide who writes what; once, as that does not change in a run."""
        held = held_boxes(blocks)
        if self._assignment is None:
            gathered = self._group.all_gather_bytes(msgspec.msgpack.encode(held))
            of_ranks = [decoded(content, HELD_BOXES) for content in gathered]
            self._assignment = ShardAssignment(held, shapes_of(of_ranks), assign_shards(of_ranks)[self._group.rank])
        assert held == self._assignment.held, "a run holds the same blocks at every save"
        return self._assignment

    def _wait(self) -> None:
        if self._running is not None:
            running, self._running = self._running, None
            self._results.append(running.result())

    def _write(self, step: int, snapshot: ShardSnapshot, shapes: dict[str, Shape], facts: dict[str, Any]) -> SaveResult:
        result, self.complete = self._saving.run(step, snapshot, shapes, facts, self.complete)
        return result


def _check_same(opened: Checkpoint, shapes: Mapping[str, Shape]) -> None:
    for name, shape in shapes.items():
        if name not in opened.shapes:
            raise WeightsError(
                f"this run needs {name!r} and the save of step {opened.step} has none",
                "resume with the model and the optimizer that the run began with",
            )
        if tuple(opened.shapes[name]) != shape:
            raise WeightsError(
                f"{name} has shape {tuple(opened.shapes[name])} in the save of step {opened.step} and here {shape}",
                "resume with the config.json that the run began with",
            )
    placeless = sorted(set(opened.shapes) - set(shapes))
    if placeless:
        raise WeightsError(
            f"the save of step {opened.step} holds {counted(len(placeless), 'tensor')} that this run has no place for, "
            f"{placeless[0]!r} the first",
            "resume with the model and the optimizer that the run began with",
        )
