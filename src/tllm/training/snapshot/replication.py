"""`SnapshotReplicator`: an in-memory checkpoint of each step on two ranks (`training.snapshot.placement`), from which a
run goes on when any one rank is lost.

A step's snapshot is taken when its weights are updated, and travels while the next step is computed. Of each pair of
snapshots one is always complete on every rank: the other is written again only when all ranks have flushed it. They
know this of each other by meeting between `flush` and the next `take`, for example in the norm of the gradient.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import msgspec

from tllm.comm.collectives.group import Group
from tllm.comm.links.link import Link
from tllm.core.errors import FrameError, decoded
from tllm.spec.plan import Wire
from tllm.spec.process_groups import snapshot_holders
from tllm.training.checkpoint.manifest import LIMIT
from tllm.training.checkpoint.shard_assignment import HeldBox
from tllm.training.snapshot.memory_snapshot import (
    NEVER,
    LiveState,
    MemorySnapshots,
    SnapshotLabel,
    SnapshotPair,
    StepSnapshot,
)
from tllm.training.snapshot.placement import SNAPSHOTS, PlacedBox, place_copies
from tllm.training.snapshot.restore import RankOffer, SnapshotRestore, has_copy
from tllm.training.state.replica_local import read_replica_local
from tllm.training.state.train_state import FlatMemory, TrainState, immediately
from tllm.weights.boxes import within
from tllm.weights.load import Progress, part


class SnapshotHead(NamedTuple):
    """What is sent before a snapshot's tensors: of what it is, and where the data goes on, where the rank knows."""

    label: SnapshotLabel
    data_position: bytes


_HEADS = msgspec.msgpack.Decoder(SnapshotHead)


class SnapshotLinks(NamedTuple):
    """The link to the rank that holds this rank's snapshots, and those from the ranks whose snapshots it holds."""

    to: Link | None = None
    back: Mapping[int, Link] = {}


def snapshot_links(rank: int, links: Mapping[Wire, Link]) -> SnapshotLinks:
    """Those of all links of a rank that snapshots travel by."""
    named = {wire: link for wire, link in links.items() if wire.name == SNAPSHOTS}
    to = next((link for wire, link in named.items() if wire.source == rank), None)
    return SnapshotLinks(to, {wire.source: link for wire, link in sorted(named.items()) if wire.target == rank})


class SnapshotReplicator:
    """One rank's snapshots in one epoch. Every rank makes the same calls; `find` to `begin` have `group` to themselves.

    `hosts` are the machines of all ranks. In `group` there may be more than these ranks: spare nodes without a rank,
    which `lend` the snapshots in their memory.
    """

    def __init__(
        self,
        snapshots: MemorySnapshots,
        epoch: int,
        group: Group,
        hosts: Sequence[str],
        links: SnapshotLinks | None = None,
    ) -> None:
        self._snapshots, self._epoch, self._group, self._hosts = snapshots, epoch, group, hosts
        self._links = links or SnapshotLinks()
        self._state = TrainState()
        self._restore: SnapshotRestore | None = None
        self._placed: list[PlacedBox] = []
        self._own = SnapshotPair([])
        self._replicas: dict[int, SnapshotPair] = {}  # of other ranks' snapshots, by rank
        self._under_way: list[Future[None]] = []
        self._threads = ThreadPoolExecutor(1 + len(self._links.back), "tllm-mirror")

    def find(self, state: TrainState) -> int | None:
        """The last step that all ranks' snapshots hold together, of all that this and other ranks' `state` needs."""
        self._state = state
        self._restore = SnapshotRestore(self._group, self._snapshots.complete(), state)
        label = self._restore.label
        return None if label is None else label.step

    @property
    def kept_memory(self) -> FlatMemory | None:
        """The memory of what this rank computed with in its part before."""
        return None if self._snapshots.live is None else self._snapshots.live.memory

    def lose_live(self) -> None:
        """The state is about to be filled from elsewhere, perhaps in the memory of the part before."""
        self._snapshots.live = None

    def agree(self, restores: bool = False) -> bool:
        """Whether to go back to the step that was found, as rank 0 says: it knows of saves, spare nodes do not."""
        return self._group.broadcast_bytes(b"1" if restores else b"0") == b"1"

    def restore(self, progress: Progress | None = None) -> bytes:
        """Fill the state from the step that was found; where the data goes on. Snapshots of other steps are dropped."""
        assert self._restore is not None and self._restore.label is not None, "there is a step to go back to"
        self._snapshots.keep_only(self._restore.label)
        return self._restore.run(progress)

    def begin(self, step: int, data_position: bytes, is_restored: bool) -> None:
        """Place the snapshots of this epoch, which begins after `step`. Those of other epochs are freed when they may.

        After a restore each rank has at once what it is to have of the restored step: it copies what it lacks, and is
        sent what it lacks of others. A save, or the start, can be gone back to as well.
        """
        assert self._restore is not None, "find comes before begin"
        found, offers = self._restore.label, self._restore.offers[: len(self._hosts)]
        held = [[*offer.needed, *offer.layout_bound] for offer in offers]
        placed = place_copies(held, self._hosts)
        self._placed = placed[self._group.rank]
        mine, sources = self._group.rank, self._links.back
        sent = {rank: _boxes(held[rank], placed[rank], sent=True) for rank in (mine, *sources)}
        wanted = [_boxes(held[mine], placed[mine]), *(sent[rank] for rank in sources)]
        self._own, *others = self._snapshots.allocate(wanted)
        self._replicas = dict(zip(sources, others, strict=True))
        label = SnapshotLabel(step, self._epoch)
        if is_restored:
            assert found is not None, "a step was restored"
            label = found if is_the_same_for_all(offers) else label
            holders = {mine: snapshot_holders(tuple(self._hosts))[mine], **dict.fromkeys(sources, mine)}
            lacking = {rank for rank in sent if not has_copy(offers[holders[rank]], label, sent[rank])}
            self._complete(label, data_position, lacking)
            self.flush()
            self._group.barrier()
        else:
            self._snapshots.keep_only(NEVER)
        self._snapshots.free_old()
        if self._state.memory is not None:
            self._snapshots.live = LiveState(self._state.updated, self._state.memory)
            if is_restored:
                self._snapshots.live.set(label, data_position)
        self._restore = None

    def lend(self, progress: Progress | None = None) -> int:
        """On a spare node: give the ranks what they lack, then keep nothing. The step gone back to, or 0."""
        found = self.find(TrainState())
        restores = found is not None and self.agree()
        if restores:
            self.restore(progress)
            self._group.barrier()
        self._snapshots.allocate([])
        self._snapshots.free_old()
        return found if found is not None and restores else 0

    def take(self, step: int, data_position: bytes) -> None:
        """Copy the state after this step, and let what is sent travel. `data_position`: where the data goes on."""
        assert not self._under_way, "the snapshot before has been flushed"
        label = SnapshotLabel(step, self._epoch)
        if self._snapshots.live is not None:
            self._snapshots.live.set(label, data_position)
        own, copied = self._copied(label, data_position)
        self._under_way = [copied]
        self._exchange(label, own, copied, {self._group.rank, *self._links.back})

    def flush(self) -> None:
        """Return when the last snapshot has been sent, and those of other ranks have come."""
        under_way, self._under_way = self._under_way, []
        for transfer in under_way:
            transfer.result()

    def close(self) -> None:
        """End the threads; the links are closed before, should they wait on one."""
        self._threads.shutdown(cancel_futures=True)

    def _complete(self, label: SnapshotLabel, data_position: bytes, lacking: Collection[int]) -> None:
        """Have all that this rank is to have of the restored step, beside what is there. `lacking`: of this rank and of
        those whose snapshots it holds those that the holder lacks."""
        own = next((snapshot for snapshot in self._own.snapshots if snapshot.label == label), None)
        if own is None:
            own, copied = self._copied(label, data_position)
        else:
            own.data_position = data_position
            copied = immediately(lambda: None)
        self._under_way = [copied]
        self._exchange(label, own, copied, lacking)

    def _copied(self, label: SnapshotLabel, data_position: bytes) -> tuple[StepSnapshot, Future[None]]:
        """A copy of the state as it is now, whole when the future is done."""
        own = self._own.next_to_write()
        own.data_position = data_position
        updated, every = len(self._state.updated), len(self._state.blocks)
        self._copy(own, range(updated))

        def copy_rest() -> None:
            self._copy(own, range(updated, every))
            own.label = label

        return own, self._state.when_ready(copy_rest)

    def _exchange(self, label: SnapshotLabel, own: StepSnapshot, copied: Future[None], whose: Collection[int]) -> None:
        """Let snapshots travel: this rank's own, if it is among them, and of those that it holds for others."""
        if self._links.to is not None and self._group.rank in whose:
            self._under_way.append(self._threads.submit(self._send, self._links.to, own, copied))
        sources = [source for source in self._links.back if source in whose]
        self._under_way += [self._threads.submit(self._receive, source, label) for source in sources]

    def _copy(self, own: StepSnapshot, numbers: range) -> None:
        """Copy the blocks of these numbers, as far as they are placed on this rank."""
        blocks = self._state.blocks
        for placed, copy in zip(self._placed, own.blocks, strict=True):
            if placed.block in numbers:
                block = blocks[placed.block]
                copy.tensor.copy_(part(block.tensor, within(placed.box, block.box)))

    def _send(self, link: Link, own: StepSnapshot, copied: Future[None]) -> None:
        copied.result()
        link.send_bytes(msgspec.msgpack.encode(SnapshotHead(own.label, own.data_position)))
        for placed, block in zip(self._placed, own.blocks, strict=True):
            if placed.sent:
                link.send(block.tensor)

    def _receive(self, source: int, label: SnapshotLabel) -> None:
        link, snapshot = self._links.back[source], self._replicas[source].next_to_write()
        came = decoded(link.recv_bytes(LIMIT), _HEADS, "what comes before a copy does not say of what it is")
        if came.label != label:
            raise FrameError(f"rank {source} sent its copy of {came.label} and that of {label} is due")
        snapshot.data_position = came.data_position
        for block in snapshot.blocks:
            link.recv(tuple(block.tensor.shape), block.tensor.dtype, block.tensor)
        snapshot.label = label


def _boxes(held: Sequence[HeldBox], placed: Sequence[PlacedBox], sent: bool = False) -> list[HeldBox]:
    """The boxes that a rank copies, or of those only that it sends."""
    return [held[one.block]._replace(box=one.box) for one in placed if one.sent or not sent]


def is_the_same_for_all(offers: Sequence[RankOffer]) -> bool:
    """Whether ranks have the very state that they restore, and nothing was dealt out anew or dropped."""
    own = (read_replica_local(held.name) for offer in offers for held in offer.needed)
    return not any(own) and not any(offer.layout_bound for offer in offers)
