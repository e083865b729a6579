"""Copies of steps in the memory of ranks that are threads: taken, sent, and found again when ranks are lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, cast

import msgspec
import pytest
import torch

from tests.support.models.layouts import in_threads
from tests.support.selection import covering
from tests.unit.training.saves import Cut, Truth, held, world
from tllm.comm.collectives.group import local_groups, solo
from tllm.comm.links.link import LocalLink
from tllm.core.errors import FrameError
from tllm.training.checkpoint.shard_assignment import HeldBox
from tllm.training.snapshot.memory_snapshot import NEVER, LiveState, MemorySnapshots, SnapshotLabel, SnapshotPair
from tllm.training.snapshot.placement import snapshot_wires
from tllm.training.snapshot.replication import SnapshotHead, SnapshotLinks, SnapshotReplicator, snapshot_links
from tllm.training.snapshot.restore import OfferedSnapshot, RankOffer, last_complete
from tllm.training.state.replica_local import SUMMED, TAKEN, replica_local_state
from tllm.training.state.tensor_blocks import TensorBlock
from tllm.training.state.train_state import FlatMemory, TrainState

PLACE = b"the place in the data"


class Node:
    """One rank of an epoch, with blocks that a step sets to the truth of its seed."""

    def __init__(self, cut: Cut, rank: int, memory: MemorySnapshots, mirror: SnapshotReplicator) -> None:
        self.rank, self.memory, self.mirror = rank, memory, mirror
        self.blocks: list[TensorBlock] = held(Truth(), cut, rank)[1]
        self.kept: FlatMemory | None = None

    def find(self) -> int | None:
        return self.mirror.find(TrainState(self.blocks, memory=self.kept))

    def step(self, number: int) -> None:
        self.mirror.flush()
        if self.kept is not None:
            self.kept.begun += 1
        Truth(number).fill(self.blocks)
        self.mirror.take(number, b"" if self.rank else PLACE)  # rank 0 alone knows it

    def restore(self, step: int) -> bytes:
        for block in self.blocks:
            block.tensor.fill_(torch.nan)
        place = self.mirror.restore()
        self.mirror.begin(step, place, is_restored=True)
        return place


def epoch(cut: Cut, number: int, memories: Sequence[MemorySnapshots]) -> list[Node]:
    size = world(Truth(), cut)
    hosts = ["here"] * size
    links = {wire: LocalLink(wire.source, wire.target, 10.0) for wire in snapshot_wires(hosts)}
    groups = local_groups(size, 20.0, "save")
    return [
        Node(cut, rank, memory, SnapshotReplicator(memory, number, groups[rank], hosts, snapshot_links(rank, links)))
        for rank, memory in enumerate(memories)
    ]


def every(nodes: Sequence[Node], name: str, *arguments: object) -> list[object]:
    return in_threads([partial(getattr(node, name), *arguments) for node in nodes])


def first_epoch(cut: Cut, steps: int, is_live: bool = False) -> list[Node]:
    nodes = epoch(cut, 1, [MemorySnapshots() for _ in range(world(Truth(), cut))])
    for node in nodes:
        node.kept = FlatMemory(None) if is_live else None
    assert every(nodes, "find") == [None] * len(nodes)
    in_threads([partial(node.mirror.begin, 0, b"", False) for node in nodes])
    for number in range(1, steps + 1):
        every(nodes, "step", number)
    for node in nodes:
        node.mirror.flush()
        node.mirror.close()
    return nodes


CUTS = (Cut("pp=2"), Cut("tp=3"), Cut("pp=1", 2), Cut("pp=1", 3, (0.3, 0.6)), Cut("pp=2", 2, (0.4,)))


@pytest.mark.parametrize(("cut", "after"), covering(CUTS, [None, Cut("pp=1"), Cut("tp=2", 2, (0.7,))]))
def test_any_rank_may_be_lost_and_any_plan_go_on(cut: Cut, after: Cut | None) -> None:
    for lost in range(world(Truth(), cut)):
        nodes = first_epoch(cut, 3)
        left = [node.memory for node in nodes if node.rank != lost]
        memories = [*left[:lost], MemorySnapshots(), *left[lost:]]
        then = after or cut
        size = world(Truth(), then)
        again = epoch(
            then, 2, (memories if after is None else [*left, *(MemorySnapshots() for _ in range(size))])[:size]
        )
        if len(again) < len(left):
            continue  # who is not in the new plan keeps what the others lack
        assert every(again, "find") == [3] * len(again)
        assert every(again, "restore", 3) == [PLACE] * len(again)
        truth = Truth(3)
        assert all(truth.holds(block) for node in again for block in node.blocks)
        assert {copy.label for node in again for copy in node.memory.complete()} <= {
            SnapshotLabel(3, 1),
            SnapshotLabel(3, 2),
        }
        for node in again:
            node.mirror.close()


@pytest.mark.slow
@pytest.mark.parametrize("changed", [False, True])
def test_ranks_that_are_left_go_on_from_what_they_compute_with(changed: bool) -> None:
    """Until they update it again: then it is of no step, and the copies count, of which here there are none."""
    cut = Cut("pp=1", 3)
    nodes = first_epoch(cut, 2, is_live=True)
    for node in nodes:
        assert node.memory.live is not None and node.kept is not None
        for copy in node.memory.complete():
            copy.label = node.memory.live.label if copy is node.memory.live else NEVER
        node.kept.begun += changed
    again = epoch(cut, 2, [nodes[0].memory, MemorySnapshots(), nodes[2].memory])
    if changed:
        assert every(again, "find") == [None] * 3
    else:
        assert every(again, "find") == [2] * 3
        assert every(again, "restore", 2) == [PLACE] * 3
        assert all(Truth(2).holds(block) for node in again for block in node.blocks)
        assert all(node.memory.live is None for node in again), "what they compute with now says nothing of its changes"
    for node in again:
        node.mirror.close()


@pytest.mark.slow
@pytest.mark.parametrize("cut", [Cut("tp=3"), Cut("pp=1", 3)])
def test_only_what_is_missing_is_copied_and_sent(cut: Cut, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 is lost, which held what rank 0 sends; ranks 0 and 2 have their own, and rank 2 has what rank 1 sent."""
    nodes = first_epoch(cut, 3)
    again = epoch(cut, 2, [nodes[0].memory, MemorySnapshots(), nodes[2].memory])
    copied, sent = list[int](), list[int]()
    copy, send = SnapshotReplicator._copied, SnapshotReplicator._send

    def copying(mirror: SnapshotReplicator, *args: Any) -> Any:
        copied.append(mirror._group.rank)
        return copy(mirror, *args)

    def sending(mirror: SnapshotReplicator, *args: Any) -> None:
        sent.append(mirror._group.rank)
        send(mirror, *args)

    monkeypatch.setattr(SnapshotReplicator, "_copied", copying)
    monkeypatch.setattr(SnapshotReplicator, "_send", sending)
    assert every(again, "find") == [3] * 3
    assert every(again, "restore", 3) == [PLACE] * 3
    assert copied == [1] and sent == ([0] if cut.plan == "tp=3" else [])
    assert {copy.label for node in again for copy in node.memory.complete()} == {SnapshotLabel(3, 1)}
    every(again, "step", 4)
    for node in again:
        node.mirror.flush()
        node.mirror.close()
    left = [again[0].memory, again[1].memory, MemorySnapshots()]
    third = epoch(cut, 3, left)  # what was left alone is whole
    assert every(third, "find") == [4] * 3
    assert every(third, "restore", 4) == [PLACE] * 3
    assert all(Truth(4).holds(block) for node in third for block in node.blocks)
    for node in third:
        node.mirror.close()


def test_a_snapshot_is_of_no_step_before_all_of_it_is_copied() -> None:
    """A delayed sum may still be on its way when the weights are there."""
    waiting: list[Callable[[], None]] = []

    def when_ready(work: Callable[[], None]) -> Future[None]:
        waiting.append(work)
        return Future()

    memory, w, late = MemorySnapshots(), *(TensorBlock(name, ((0, 4),), torch.zeros(4)) for name in ("w", "late"))
    mirror = SnapshotReplicator(memory, 1, solo(), ["here"])
    mirror.find(TrainState([w], [late], when_ready=when_ready))
    mirror.begin(0, b"", is_restored=False)
    mirror.take(1, PLACE)
    assert memory.complete() == []
    late.tensor.fill_(5)
    waiting.pop()()
    (copy,) = memory.complete()
    assert copy.label == SnapshotLabel(1, 1)
    assert {block.name: block.tensor[0].item() for block in copy.blocks} == {"w": 0, "late": 5}
    mirror.close()


def test_what_a_run_did_after_the_save_that_it_goes_back_to_is_of_no_step() -> None:
    nodes = first_epoch(Cut("tp=3"), 3)
    again = epoch(Cut("tp=3"), 2, [node.memory for node in nodes])
    assert every(again, "find") == [3] * 3
    in_threads([partial(node.mirror.begin, 1, PLACE, False) for node in again])
    assert not any(node.memory.complete() for node in again)
    for node in again:
        node.mirror.close()


def test_a_live_state_is_kept_where_a_part_finds_room_beside_it() -> None:
    memory, blocks = MemorySnapshots(), [TensorBlock("a", ((0, 4),), torch.zeros(4))]
    for room, needed, stays in ((16, 16, True), (15, 0, False), (99, 100, False)):
        memory.live = LiveState(blocks, FlatMemory(None))
        memory.free_live(room, needed)
        assert (memory.live is not None) == stays


def test_where_the_data_goes_on_travels_once_and_not_from_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be long: completions that were sampled ahead."""
    monkeypatch.setattr(f"{__name__}.PLACE", bytes(1 << 20))
    cut = Cut("pp=1", 3)
    nodes = first_epoch(cut, 2)
    holding = [sum(len(copy.data_position) for copy in node.memory.complete()) for node in nodes]
    assert sorted(holding) == [0, 2 << 20, 2 << 20], "of two steps, on rank 0 and where its copies are"
    again = epoch(cut, 2, [MemorySnapshots(), nodes[1].memory, nodes[2].memory])
    assert every(again, "find") == [2] * 3
    links = [cast(LocalLink, link) for node in again for link in node.mirror._group.send.values()]
    before = sum(link.bytes_moved for link in links)
    assert before < 1 << 18, "what ranks offer says only who knows it"
    assert every(again, "restore", 2) == [PLACE] * 3
    assert 2 << 20 <= sum(link.bytes_moved for link in links) - before < 3 << 20, "to each rank once"
    for node in again:
        node.mirror.close()


def test_a_step_that_one_rank_has_not_copied_is_not_gone_back_to() -> None:
    nodes = first_epoch(Cut("pp=2"), 2)
    memories = [nodes[0].memory, MemorySnapshots()]
    again = epoch(Cut("pp=2"), 2, memories)
    Truth(3).fill(again[0].blocks)
    own = nodes[0].memory.complete()
    assert {copy.label for copy in own} == {SnapshotLabel(1, 1), SnapshotLabel(2, 1)}
    for copy in own:  # of rank 0 alone there is a third step already
        if copy.label.step == 1 and copy.data_position:
            copy.label = SnapshotLabel(3, 1)
    assert every(again, "find") == [2, 2]
    every(again, "restore", 2)
    assert SnapshotLabel(3, 1) not in {copy.label for copy in again[0].memory.complete()}, (
        "what never was is of no step"
    )
    for node in again:
        node.mirror.close()


def offer(boxes: list[tuple[int, int]], label: SnapshotLabel, knows: bool = True) -> RankOffer:
    made = [HeldBox("a", (box,), "F32", 4) for box in boxes]
    return RankOffer([OfferedSnapshot(label, knows, made)], [HeldBox("a", ((0, 10),), "F32", 4)])


@pytest.mark.parametrize(
    ("offers", "found"),
    [
        ([offer([(0, 6)], SnapshotLabel(3, 1)), offer([(5, 10)], SnapshotLabel(3, 1))], SnapshotLabel(3, 1)),
        ([offer([(0, 6)], SnapshotLabel(3, 1)), offer([(7, 10)], SnapshotLabel(3, 1))], None),
        ([offer([(0, 6)], SnapshotLabel(3, 1)), offer([(5, 10)], SnapshotLabel(3, 2))], None),
        ([offer([(0, 6)], SnapshotLabel(3, 1)), offer([(5, 10)], SnapshotLabel(4, 1))], None),
        ([offer([(0, 10)], SnapshotLabel(3, 2)), offer([(0, 10)], SnapshotLabel(4, 1))], SnapshotLabel(4, 1)),
        ([offer([(0, 10)], SnapshotLabel(4, 1)), offer([(0, 10)], SnapshotLabel(4, 2))], SnapshotLabel(4, 2)),
        ([offer([(0, 10)], SnapshotLabel(4, 1), False), offer([(0, 10)], SnapshotLabel(3, 1))], SnapshotLabel(3, 1)),
    ],
)
def test_the_last_step_that_is_whole(offers: list[RankOffer], found: SnapshotLabel | None) -> None:
    assert last_complete(offers) == found


def test_memory_of_the_same_boxes_is_used_again() -> None:
    copies = MemorySnapshots()
    boxes = [HeldBox("a", ((0, 4),), "F32", 4)]
    (pair,) = copies.allocate([boxes])
    pair.next_to_write().label = SnapshotLabel(1, 1)
    pair.next_to_write().label = SnapshotLabel(2, 1)
    assert pair.next_to_write() is pair.snapshots[0] and pair.snapshots[0].label == NEVER, "the older one is written"
    pair.snapshots[0].label = SnapshotLabel(3, 1)
    same, other = copies.allocate([boxes, boxes])
    assert same is pair and other is not pair
    copies.allocate([[HeldBox("b", ((0, 4),), "F32", 4)]])
    assert {copy.label for copy in copies.complete()} == {SnapshotLabel(2, 1), SnapshotLabel(3, 1)}, (
        "they stay until others are whole"
    )
    copies.keep_only(SnapshotLabel(2, 1))
    assert [copy.label for copy in copies.complete()] == [SnapshotLabel(2, 1)]
    copies.free_old()
    assert copies.complete() == []


def test_a_copy_of_another_step_is_refused() -> None:
    there = LocalLink(0, 1)
    mirror = SnapshotReplicator(MemorySnapshots(), 1, local_groups(2)[1], ["here"] * 2, SnapshotLinks(None, {0: there}))
    mirror._replicas = {0: SnapshotPair([])}
    there.send_bytes(msgspec.msgpack.encode(SnapshotHead(SnapshotLabel(4, 1), PLACE)))
    mirror.take(5, b"")
    with pytest.raises(FrameError, match="rank 0 sent its copy"):
        mirror.flush()
    mirror.close()


def replicas(number: int, memories: Sequence[MemorySnapshots]) -> list[tuple[SnapshotReplicator, TrainState]]:
    """Ranks that share weights and have a residual and a moment each; Q is of no use among more or fewer."""
    size = len(memories)
    hosts = ["here"] * size
    links = {wire: LocalLink(wire.source, wire.target, 10.0) for wire in snapshot_wires(hosts)}
    groups = local_groups(size, 20.0, "save")
    made = []
    for rank, memory in enumerate(memories):
        owned = [
            f"{replica_local_state('residual', SUMMED, rank, size)}/w",
            f"{replica_local_state('moment', TAKEN, rank, size)}/w",
        ]
        residual, moment = (TensorBlock(name, ((0, 4),), torch.zeros(4)) for name in owned)
        shared = TensorBlock("w", ((0, 4),), torch.zeros(4))
        bound = TensorBlock(f"columns/of {size}", ((0, 2),), torch.zeros(2))
        mirror = SnapshotReplicator(memory, number, groups[rank], hosts, snapshot_links(rank, links))
        made.append((mirror, TrainState([shared, moment], [residual], [bound])))
    return made


@pytest.mark.parametrize("after", [1, 2, 3, 5])
def test_what_replicas_had_of_their_own_is_dealt_out(after: int) -> None:
    """Residuals add up to what they did; with as many replicas each has its own; moments are somebody's."""
    memories = [MemorySnapshots() for _ in range(3)]
    first = replicas(1, memories)

    def epoch_of(rank: int, mirror: SnapshotReplicator, standing: TrainState) -> None:
        assert mirror.find(standing) is None
        mirror.begin(0, b"", is_restored=False)
        values = (7.0, 10.0 + rank, 2.0**rank, 9.0)
        for block, value in zip([*standing.updated, *standing.reduction, *standing.layout_bound], values, strict=True):
            block.tensor.fill_(value)
        mirror.take(1, PLACE)
        mirror.flush()
        mirror.close()

    in_threads([partial(epoch_of, rank, *one) for rank, one in enumerate(first)])
    left = [memories[0], MemorySnapshots(), memories[2], MemorySnapshots(), MemorySnapshots()][: max(after, 3)]
    if after < 3:  # without the rank that was lost
        left = [memories[0], memories[2]][:after]
    again = replicas(2, left)
    found = in_threads([partial(mirror.find, standing) for mirror, standing in again])
    if after == 1:
        assert found == [None], "the residual of the one that was lost is with the third"
        return
    assert found == [1] * after

    def restore(mirror: SnapshotReplicator) -> None:
        mirror.restore()
        mirror.close()

    in_threads([partial(restore, mirror) for mirror, _ in again])
    values = [[block.tensor.unique().item() for block in (*s.updated, *s.reduction, *s.layout_bound)] for _, s in again]
    assert {one[0] for one in values} == {7.0}
    assert [one[1] for one in values] == [10.0 + rank % 3 for rank in range(after)]
    assert [one[2] for one in values] == {2: [1.0 + 4.0, 2.0], 3: [1.0, 2.0, 4.0], 5: [1.0, 2.0, 4.0, 0.0, 0.0]}[after]
    assert {one[3] for one in values} == ({9.0} if after == 3 else {0.0})
