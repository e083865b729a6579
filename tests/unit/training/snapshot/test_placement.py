"""Each element is in memory twice, wherever a rank or a machine may be lost."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.unit.training.saves import Cut, Truth, held, world
from tllm.spec.plan import Wire
from tllm.spec.process_groups import snapshot_holders
from tllm.training.checkpoint.shard_assignment import HeldBox, shapes_of
from tllm.training.checkpoint.shard_writer import held_boxes
from tllm.training.snapshot.placement import SNAPSHOTS, place_copies, snapshot_wires
from tllm.training.state.tensor_blocks import TensorBlock
from tllm.weights.boxes import regions

CUTS = (Cut("pp=1", 2), Cut("pp=2"), Cut("tp=3"), Cut("pp=2,tp=1+2", 2, (0.3,)), Cut("pp=1", 3, (0.2, 0.9)))
HOSTS = ("aaaaaa", "ababab", "aabbcc", "abbbbb")


def boxes_of(cut: Cut) -> list[list[HeldBox]]:
    truth = Truth()
    blocks: list[list[TensorBlock]] = [held(truth, cut, rank)[1] for rank in range(world(truth, cut))]
    return [held_boxes(of_rank) for of_rank in blocks]


def kept(boxes: Sequence[Sequence[HeldBox]], hosts: Sequence[str]) -> list[list[tuple[HeldBox, int]]]:
    """What lies in each rank's memory, with the rank whose it is."""
    memory: list[list[tuple[HeldBox, int]]] = [[] for _ in boxes]
    for rank, shares in enumerate(place_copies(boxes, hosts)):
        for share in shares:
            one = boxes[rank][share.block]._replace(box=share.box)
            memory[rank].append((one, rank))
            if share.sent:
                memory[snapshot_holders(tuple(hosts))[rank]].append((one, rank))
    return memory


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("cut", CUTS)
def test_the_run_may_lose_any_machine(cut: Cut, hosts: str) -> None:
    boxes = boxes_of(cut)
    machines = list(hosts[: len(boxes)])
    memory, shapes = kept(boxes, machines), shapes_of(boxes)
    places = machines if len(set(machines)) > 1 else [str(rank) for rank in range(len(boxes))]
    for name, shape in shapes.items():
        there = [
            (place, one.box) for place, some in zip(places, memory, strict=True) for one, _ in some if one.name == name
        ]
        for box, holders in regions(shape, [box for _, box in there]):
            at = sorted(there[i][0] for i in holders)
            assert len(at) == 2 and at[0] != at[1], f"{name}{box} is at {at}"


def test_what_two_ranks_hold_is_not_sent() -> None:
    boxes = boxes_of(Cut("pp=1", 3))
    dealt = place_copies(boxes, ["a", "b", "b"])
    assert not any(share.sent for shares in dealt for share in shares)
    states = [
        share for shares in place_copies(boxes_of(Cut("pp=1", 2, (0.5,))), ["a", "b"]) for share in shares if share.sent
    ]
    assert states, "what ZeRO cuts one rank alone has"


@pytest.mark.parametrize("cut", [Cut("pp=1", 3), Cut("tp=2"), Cut("pp=1", 3, (0.3, 0.6))])
def test_ranks_keep_about_as_many_bytes(cut: Cut) -> None:
    memory = kept(boxes_of(cut), ["a"] * world(Truth(), cut))
    sizes = [sum(count(one) * one.itemsize for one, _ in some) for some in memory]
    assert max(sizes) < 1.5 * min(sizes)


def count(one: HeldBox) -> int:
    size = 1
    for start, stop in one.box:
        size *= stop - start
    return size


@pytest.mark.parametrize(
    ("hosts", "mirrors"),
    [("aaa", (1, 2, 0)), ("ab", (1, 0)), ("aabb", (2, 3, 0, 1)), ("aaab", (3, 3, 3, 0)), ("abc", (1, 2, 0))],
)
def test_mirrors_are_elsewhere_and_take_turns(hosts: str, mirrors: tuple[int, ...]) -> None:
    assert snapshot_holders(tuple(hosts)) == mirrors
    assert snapshot_wires(hosts) == [Wire(rank, other, SNAPSHOTS) for rank, other in enumerate(mirrors)]


def test_one_rank_alone_has_no_mirror() -> None:
    boxes = boxes_of(Cut("pp=1"))
    assert snapshot_wires("a") == [] and not any(share.sent for share in place_copies(boxes, ["a"])[0])
