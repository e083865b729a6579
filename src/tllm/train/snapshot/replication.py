"""`SnapshotReplicator`: a copy in memory of each step, in two places (`train.snapshot.placement`), so that a run
goes on without any one rank.

A step's copy is taken when its weights are there, and travels while the next step is computed. Of two copies one is
always whole on every rank: the other is written again only when all ranks have flushed it, which they know of each
other by meeting between `flush` and the next `take`, as the norm of a gradient lets them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec
import torch

from tllm.comm.collectives.group import Group
from tllm.comm.links.link import Link
from tllm.core.errors import UNREADABLE, FrameError
from tllm.train.checkpoint.shard_assignment import HeldBox
from tllm.train.snapshot.memory_snapshot import NEVER, MemorySnapshots, Pair, SnapshotLabel, StepSnapshot
from tllm.train.snapshot.placement import PlacedCopies, deal_copies
from tllm.train.snapshot.restore import (
    BoxTransfer,
    SnapshotOffer,
    carry,
    last_whole,
    offers_of,
    place_in,
    turns_of,
    ways_of,
)
from tllm.train.state.tensor_blocks import TensorBlock
from tllm.train.state.train_state import Later, TrainState, at_once
from tllm.weights.boxes import within
from tllm.weights.load import Progress, part

LABEL_LIMIT = 64
"""Bytes that are sent before a copy's tensors, at most."""


class SnapshotReplicator:
    """One rank's copies in one epoch. Every rank makes the same calls; `find` to `begin` have `group` to themselves.

    `hosts` are the machines of all ranks; `to` leads to this rank's mirror, `back` from the ranks that it mirrors. In
    `group` there may be more than these ranks: nodes without one, which lend what they have in memory.
    """

    def __init__(
        self,
        copies: MemorySnapshots,
        epoch: int,
        group: Group,
        hosts: Sequence[str],
        to: Link | None = None,
        back: Mapping[int, Link] | None = None,
    ) -> None:
        self._copies, self._epoch, self._group, self._hosts = copies, epoch, group, hosts
        self._to, self._back = to, dict(back or {})
        self._whole: list[StepSnapshot] = []
        self._offers: list[SnapshotOffer] = []
        self._found: SnapshotLabel | None = None
        self._is_recalled = False
        self._blocks: list[TensorBlock] = []
        self._late = 0  # from this number on blocks are copied later
        self._later: Later = at_once
        self._shares: list[PlacedCopies] = []
        self._own = Pair([])
        self._mirrored: dict[int, Pair] = {}
        self._under_way: list[Future[None]] = []
        self._threads = ThreadPoolExecutor(1 + len(self._back), "tllm-mirror")

    def find(self, standing: TrainState) -> int | None:
        """The last step that all ranks' copies hold together, of all that this and other ranks' `standing` needs."""
        needed = [*standing.moved, *standing.kept]
        self._blocks, self._whole = [*needed, *standing.bound], self._copies.whole()
        self._late, self._later = len(standing.moved), standing.later
        self._offers = offers_of(self._group, self._whole, needed, standing.bound)
        self._found = last_whole(self._offers)
        return None if self._found is None else self._found.step

    def agree(self, recalls: bool = False) -> bool:
        """Whether to go back to the step that was found: as rank 0 says, who unlike those that lend knows of saves."""
        return self._group.broadcast_bytes(b"1" if recalls else b"0") == b"1"

    def restore(self, progress: Progress | None = None) -> bytes:
        """Fill the blocks from the step that was found; where the data goes on. What is of other steps goes."""
        assert self._found is not None, "there is a step to go back to"
        self._copies.keep_only(self._found)
        self._is_recalled = True
        carry(self._group, ways_of(self._offers, self._found), self._whole, self._blocks, progress)
        for turn in range(1, turns_of(self._offers, self._found)):
            self._add(ways_of(self._offers, self._found, turn))
        return place_in(self._offers, self._found)

    def begin(self, step: int, place: bytes) -> None:
        """Deal out the copies of this epoch, which begins after `step`. What is left of another goes when it may."""
        held = [[*offer.wanted, *offer.bound] for offer in self._offers[: len(self._hosts)]]
        dealt = deal_copies(held, self._hosts)
        self._shares = dealt[self._group.rank]
        mine, sent = self._group.rank, [_boxes(held[rank], dealt[rank], sent=True) for rank in self._back]
        self._own, *others = self._copies.begin([_boxes(held[mine], dealt[mine]), *sent])
        self._mirrored = dict(zip(self._back, others, strict=True))
        if not self._is_recalled:  # a save, or the beginning, can be gone back to as well
            self._copies.keep_only(NEVER)
        else:
            self.take(step, place)
            self.flush()
            self._group.barrier()
        self._copies.forget()
        self._whole, self._offers = [], []

    def lend(self, progress: Progress | None = None) -> int:
        """On a node without a rank: give what the ranks lack, then keep nothing. The step gone back to, or 0."""
        found = self.find(TrainState())
        recalls = found is not None and self.agree()
        if recalls:
            self.restore(progress)
            self._group.barrier()
        self._copies.begin([])
        self._copies.forget()
        return found if found is not None and recalls else 0

    def take(self, step: int, place: bytes) -> None:
        """Copy what is held after this step, and let what is sent travel. `place`: where the data goes on."""
        assert not self._under_way, "the copy before has settled"
        label, own = SnapshotLabel(step, self._epoch), self._own.older()
        own.place = place
        self._copy(own, range(self._late))

        def rest() -> None:
            self._copy(own, range(self._late, len(self._blocks)))
            own.label = label

        copied = self._later(rest)
        self._under_way = [copied]
        if self._to is not None:
            self._under_way.append(self._threads.submit(self._send, self._to, own, copied))
        self._under_way += [self._threads.submit(self._receive, source, label) for source in self._back]

    def flush(self) -> None:
        """Return when what was taken has gone and what is mirrored here has come."""
        under_way, self._under_way = self._under_way, []
        for one in under_way:
            one.result()

    def close(self) -> None:
        """End the threads; the links are closed before, should they wait on one."""
        self._threads.shutdown(cancel_futures=True)

    def _add(self, ways: Sequence[BoxTransfer]) -> None:
        """To blocks that are filled, what other replicas had of the same."""
        targets = {way.there for way in ways if way.target == self._group.rank}
        more = [
            b._replace(tensor=torch.zeros_like(b.tensor)) if n in targets else b for n, b in enumerate(self._blocks)
        ]
        carry(self._group, ways, self._whole, more)
        for number in targets:
            self._blocks[number].tensor.add_(more[number].tensor)

    def _copy(self, own: StepSnapshot, numbers: range) -> None:
        """Blocks of these numbers, as far as they are dealt to this rank."""
        for share, copy in zip(self._shares, own.blocks, strict=True):
            if share.block in numbers:
                block = self._blocks[share.block]
                copy.tensor.copy_(part(block.tensor, within(share.box, block.box)))

    def _send(self, link: Link, copy: StepSnapshot, copied: Future[None]) -> None:
        copied.result()
        link.send_bytes(msgspec.msgpack.encode(copy.label))
        for share, block in zip(self._shares, copy.blocks, strict=True):
            if share.sent:
                link.send(block.tensor)

    def _receive(self, source: int, label: SnapshotLabel) -> None:
        link, copy = self._back[source], self._mirrored[source].older()
        came = _label(link.recv_bytes(LABEL_LIMIT))
        if came != label:
            raise FrameError(f"rank {source} sent its copy of {came} and that of {label} is due")
        for block in copy.blocks:
            link.recv(tuple(block.tensor.shape), block.tensor.dtype, block.tensor)
        copy.label = label


def _boxes(held: Sequence[HeldBox], shares: Sequence[PlacedCopies], sent: bool = False) -> list[HeldBox]:
    """The boxes of a rank's copies, or of those only that it sends."""
    return [held[share.block]._replace(box=share.box) for share in shares if share.sent or not sent]


def _label(content: bytes) -> SnapshotLabel:
    try:
        return msgspec.msgpack.decode(content, type=SnapshotLabel)
    except UNREADABLE as error:
        raise FrameError(f"what comes before a copy is no label: {error}") from error
