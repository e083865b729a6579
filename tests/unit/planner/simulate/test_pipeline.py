"""The simulator against closed forms, against a slow relaxation of the same rules, and against common sense."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.properties import examples
from tllm.core.errors import PlanError
from tllm.planner.cluster.device import LinkSpeed
from tllm.planner.simulate.pipeline import SchedulePlayer, StageWork, StepTimeline
from tllm.spec.pipeline_schedule import DEEP, ORDERS, Op, Schedule, build

counts = st.integers(1, 8)
microbatch_counts = st.integers(1, 20)
seconds = st.integers(1, 6)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    name = draw(st.sampled_from(sorted(ORDERS)))
    depth = draw(st.integers(0, 3)) if name in DEEP else 1
    chunks = draw(st.integers(2, 3)) if name == "interleaved" else 1
    return build(name, draw(st.integers(1, 6)), draw(st.integers(1, 10)), depth, chunks)


def uneven(data: st.DataObject, schedule: Schedule) -> list[list[StageWork]]:
    one = st.builds(StageWork, seconds, seconds, seconds)
    row = st.lists(one, min_size=schedule.chunks, max_size=schedule.chunks)
    return data.draw(st.lists(row, min_size=schedule.stages, max_size=schedule.stages))


def stages_of(schedule: Schedule) -> st.SearchStrategy[set[int]]:
    """Some of them."""
    return st.sets(st.integers(0, schedule.stages - 1))


@given(counts, microbatch_counts, seconds, seconds)
def test_gpipe_and_1f1b_bubble(p: int, m: int, forward: int, backward: int) -> None:
    for name in ("gpipe", "1f1b"):
        timeline = SchedulePlayer(build(name, p, m)).play(StageWork(forward, backward, 0))
        assert timeline.total == (m + p - 1) * (forward + backward)
        assert timeline.bubble == pytest.approx((p - 1) / (m + p - 1))


@given(counts, microbatch_counts, st.integers(2, 4), seconds, seconds)
def test_interleaved_bubble(p: int, m: int, v: int, forward: int, backward: int) -> None:
    """(p-1) / (v*m + p-1) for any m of p or more, divisible or not; with fewer, each chunk waits for p stages."""
    timeline = SchedulePlayer(build("interleaved", p, m, chunks=v)).play(StageWork(forward, backward, 0))
    assert timeline.total == (v * max(m, p) + min(m, p) - 1) * (forward + backward)
    if m >= p:
        assert timeline.bubble == pytest.approx((p - 1) / (v * m + p - 1))


@given(counts, microbatch_counts, seconds, seconds, seconds)
def test_zero_bubble(p: int, m: int, forward: int, inputs: int, weights: int) -> None:
    """(p-1) (F + I - W) as in Qi et al., 2023, table 1, while W is the shortest; else that takes its place."""
    work = StageWork(forward, inputs, weights)
    timeline = SchedulePlayer(build("zero_bubble", p, m)).play(work)
    waits = timeline.total - m * (forward + inputs + weights)
    if m >= p:
        assert waits == (p - 1) * (forward + inputs - min(forward, inputs, weights))
    classic = SchedulePlayer(build("1f1b", p, m)).play(work)
    assert timeline.total < classic.total if p > 1 else timeline.total == classic.total
    assert max(timeline.peak_live) == max(classic.peak_live)


@pytest.mark.parametrize("p", [2, 4, 6])
def test_zero_bubble_of_depth_2_leaves_no_stage_idle_once_it_began(p: int) -> None:
    timeline = SchedulePlayer(build("zero_bubble", p, 3 * p, depth=2)).play(StageWork(1, 1, 1))
    assert [row[-1].stop - row[0].start for row in timeline.spans] == [9 * p] * p
    assert timeline.peak_live == (2 * p - 1,) * p


@pytest.mark.parametrize(
    ("name", "depth", "total", "peak"), [("gpipe", 1, 117, 32), ("1f1b", 1, 209, 4), ("1f1b", 3, 117, 10)]
)
def test_slow_links_want_a_longer_warm_up(name: str, depth: int, total: int, peak: int) -> None:
    """The table in the house's map: four stages, 32 microbatches, forward 1, backward 2, one hop 2."""
    timeline = SchedulePlayer(build(name, 4, 32, depth)).play(StageWork(1, 1, 1), LinkSpeed(latency=2))
    assert (timeline.total, max(timeline.peak_live)) == (total, peak)


def test_a_depth_for_the_slow_hop_alone_holds_less() -> None:
    links = {pair: LinkSpeed(latency=2 if 1 in pair and 2 in pair else 0) for pair in pairs_of(4)}
    timeline = SchedulePlayer(build("1f1b", 4, 32, depth=(1, 3, 1))).play(StageWork(1, 1, 1), links)
    assert timeline.total == (32 + 3) * 3 + 2 * 2
    assert timeline.peak_live == (6, 5, 2, 1)


@settings(max_examples=examples(20))
@given(st.integers(2, 7), microbatch_counts, seconds, seconds, st.integers(0, 12))
def test_the_depth_that_hides_a_hop(p: int, m: int, forward: int, backward: int, hop: int) -> None:
    """1 + 2 hop / (forward + backward), rounded up, makes 1F1B as fast as GPipe; one less does not, if m is large."""
    depth = 1 + math.ceil(2 * hop / (forward + backward))
    work, link = StageWork(forward, backward, 0), LinkSpeed(latency=hop)
    ideal = m * (forward + backward) + (p - 1) * (forward + backward + 2 * hop)
    assert SchedulePlayer(build("gpipe", p, m)).play(work, link).total == ideal
    assert SchedulePlayer(build("1f1b", p, m, depth)).play(work, link).total == ideal
    if hop:
        many = 20 * p
        shallow = SchedulePlayer(build("1f1b", p, many, depth - 1)).play(work, link).total
        assert shallow > SchedulePlayer(build("1f1b", p, many, depth)).play(work, link).total


@settings(max_examples=examples(15))
@given(st.lists(st.builds(StageWork, seconds, seconds, seconds), min_size=1, max_size=7), st.integers(1, 12))
def test_unequal_stages_are_paced_by_the_slowest(works: list[StageWork], m: int) -> None:
    p, rows = len(works), [[work] for work in works]
    forward = [work.forward for work in works]
    backward = [work.backward_input + work.backward_weight for work in works]
    gpipe = sum(forward) + sum(backward) + (m - 1) * (max(forward) + max(backward))
    assert SchedulePlayer(build("gpipe", p, m)).play(rows).total == gpipe
    slowest = max(f + b for f, b in zip(forward, backward, strict=True))
    for name in ("1f1b", "zero_bubble"):
        # It may begin a little slower.
        some, more = (SchedulePlayer(build(name, p, n)).play(rows).total for n in (150, 160))
        assert more - some == 10 * slowest


stages_and_hops = st.integers(1, 5).flatmap(
    lambda p: st.tuples(
        st.lists(st.builds(StageWork, seconds, seconds, seconds), min_size=p, max_size=p),
        st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=p - 1, max_size=p - 1),
    )
)


def links_of(hops: list[tuple[int, int]]) -> dict[tuple[int, int], LinkSpeed]:
    """Forward and backward latency of each hop."""
    up = {(i, i + 1): LinkSpeed(ahead) for i, (ahead, _) in enumerate(hops)}
    return up | {(i + 1, i): LinkSpeed(back) for i, (_, back) in enumerate(hops)}


@given(stages_and_hops, st.integers(1, 12))
def test_gpipe_over_unequal_stages_and_hops(given_: tuple[list[StageWork], list[tuple[int, int]]], m: int) -> None:
    """Twice a flow shop of equal jobs: the way through all stages, and m - 1 times the slowest of them."""
    works, hops = given_
    forward = [work.forward for work in works]
    backward = [work.backward_input + work.backward_weight for work in works]
    way = sum(forward) + sum(backward) + sum(map(sum, hops))
    total = SchedulePlayer(build("gpipe", len(works), m)).play([[work] for work in works], links_of(hops)).total
    assert total == way + (m - 1) * (max(forward) + max(backward))


def around(works: list[StageWork], hops: list[tuple[int, int]], last: bool) -> float:
    """The largest mean over a cycle of what waits for what: from stage s to t and back are t - s + 1 microbatches."""
    ways = [work.forward + work.backward_input + last * work.backward_weight for work in works]
    return max(
        (sum(ways[s : t + 1]) + sum(map(sum, hops[s:t]))) / (t - s + 1)
        for s in range(len(works))
        for t in range(s, len(works))
    )


def pace(name: str, works: list[StageWork], hops: list[tuple[int, int]]) -> float:
    """Seconds of a microbatch once begun: 60 more of them, which all numbers of stages divide."""
    rows, links = [[work] for work in works], links_of(hops)
    some, more = (SchedulePlayer(build(name, len(works), m)).play(rows, links).total for m in (90, 150))
    return (more - some) / 60


@settings(max_examples=examples(15))
@given(stages_and_hops)
def test_1f1b_over_unequal_stages_and_hops(given_: tuple[list[StageWork], list[tuple[int, int]]]) -> None:
    assert pace("1f1b", *given_) == pytest.approx(around(*given_, last=True), rel=1e-12)


@settings(max_examples=examples(15))
@given(stages_and_hops)
def test_zero_bubble_over_unequal_stages_and_hops(given_: tuple[list[StageWork], list[tuple[int, int]]]) -> None:
    """Weight gradients are off the way back, so that hops cost it less than 1F1B, whose every stage is as busy."""
    works, _ = given_
    slowest = max(work.forward + work.backward_input + work.backward_weight for work in works)
    least = max(around(*given_, last=False), slowest)
    assert least * (1 - 1e-12) <= pace("zero_bubble", *given_) <= pace("1f1b", *given_) * (1 + 1e-12)


@given(counts, st.integers(2, 4), seconds, seconds, st.integers(0, 9))
def test_one_microbatch_goes_once_round_all_chunks(p: int, v: int, forward: int, backward: int, hop: int) -> None:
    timeline = SchedulePlayer(build("interleaved", p, 1, chunks=v)).play(
        StageWork(forward, backward, 0), LinkSpeed(hop)
    )
    assert timeline.total == p * v * (forward + backward) + 2 * (p * v - 1) * (hop if p > 1 else 0)


@given(schedules(), st.data())
def test_a_slower_link_or_stage_never_makes_it_faster(schedule: Schedule, data: st.DataObject) -> None:
    work, size = uneven(data, schedule), data.draw(st.integers(0, 8))
    links = {
        pair: LinkSpeed(data.draw(st.integers(0, 4)), data.draw(st.sampled_from([1, 2, 4])))
        for pair in pairs_of(schedule.stages)
    }
    one_port = data.draw(stages_of(schedule))

    def total(links: dict[tuple[int, int], LinkSpeed], work: list[list[StageWork]] = work) -> float:
        return SchedulePlayer(schedule).play(work, links, size, one_port).total

    base = total(links)
    for pair, speed in links.items():
        assert total(links | {pair: LinkSpeed(speed.latency + 3, speed.bandwidth)}) >= base
        assert total(links | {pair: LinkSpeed(speed.latency, speed.bandwidth / 2)}) >= base
    slow = StageWork(work[0][0].forward + 1, work[0][0].backward_input, work[0][0].backward_weight)
    assert total(links, [[slow, *work[0][1:]], *work[1:]]) >= base
    assert base >= SchedulePlayer(schedule).play(work, links, size).total, "what shares a port comes no sooner"


@given(schedules(), st.data())
def test_equals_the_slow_relaxation(schedule: Schedule, data: st.DataObject) -> None:
    work, size = uneven(data, schedule), data.draw(st.integers(0, 6))
    link = LinkSpeed(data.draw(st.integers(0, 5)), data.draw(st.sampled_from([1, 2])))
    one_port = data.draw(stages_of(schedule))
    timeline = SchedulePlayer(schedule).play(work, link, size, one_port)
    slow = relaxed(schedule, work, link.latency, size / link.bandwidth, one_port)
    assert [[span.stop for span in row] for row in timeline.spans] == slow
    assert timeline.total == max(map(max, slow))
    assert all(span.stop <= after.start for row in timeline.spans for span, after in pairwise(row))


def relaxed(
    schedule: Schedule, work: list[list[StageWork]], latency: float, sending: float, one_port: set[int]
) -> list[list[float]]:
    """Stop times, by applying every rule to every op again and again until nothing moves.

    Neighbours are found by counting runs of layers through the model, not by asking the schedule.
    """
    p, last = schedule.stages, schedule.stages * schedule.chunks - 1
    stops = [[0.0] * len(row) for row in schedule.lists]
    while True:
        before = [row[:] for row in stops]
        landed: dict[tuple[bool, int, int], float] = {}
        free: dict[tuple[int, ...], float] = {}
        for s, row in enumerate(schedule.lists):
            for stop, op in zip(stops[s], row, strict=True):
                ahead = op.kind == "forward"
                target = op.chunk * p + s + (1 if ahead else -1)
                if op.kind == "backward_weight" or not 0 <= target <= last:
                    continue
                wire, own = (s,) if s in one_port else (s, target % p), p == 1
                free[wire] = stop if own else max(stop, free.get(wire, 0.0)) + sending
                landed[ahead, op.microbatch, target] = free[wire] + (0 if own else latency)
        for s, row in enumerate(schedule.lists):
            for n, op in enumerate(row):
                start = stops[s][n - 1] if n else 0.0
                if op.kind != "backward_weight":
                    start = max(start, landed.get((op.kind == "forward", op.microbatch, op.chunk * p + s), 0.0))
                stops[s][n] = start + seconds_of(op, work[s][op.chunk])
        if stops == before:
            return stops


def seconds_of(op: Op, work: StageWork) -> float:
    if op.kind == "backward":
        return work.backward_input + work.backward_weight
    return {"forward": work.forward, "backward_input": work.backward_input}.get(op.kind, work.backward_weight)


def pairs_of(stages: int) -> list[tuple[int, int]]:
    """Every directed pair: more than a schedule uses."""
    return [(a, b) for a in range(stages) for b in range(stages) if a != b]


def test_a_link_carries_one_tensor_at_a_time() -> None:
    """Sending takes 4, a forward 1: the second stage gets one activation every 4, whatever the latency."""
    timeline = SchedulePlayer(build("gpipe", 2, 5)).play(
        StageWork(1, 1, 1), LinkSpeed(latency=7, bandwidth=25), hop_bytes=100
    )
    assert [span.start for span in timeline.spans[1][:5]] == [12, 16, 20, 24, 28]
    assert timeline.link_busy == {(0, 1): 20, (1, 0): 20}


def test_what_leaves_by_one_port_waits_for_what_left_before() -> None:
    """The second stage has a gradient to send at 17, for 4, and an activation at 18: it lands at 25, not at 22."""
    schedule, ways = build("1f1b", 3, 4), {pair: LinkSpeed(bandwidth=1) for pair in pairs_of(3)}
    apart, shared = (SchedulePlayer(schedule).play(StageWork(1, 1, 0), ways, 4, ports) for ports in ((), {1}))
    assert [line.spans[1][2].stop for line in (apart, shared)] == [17, 17]
    assert [line.spans[1][3].stop for line in (apart, shared)] == [18, 18]
    assert [line.spans[2][4].start for line in (apart, shared)] == [22, 25]


def test_a_slow_wire_does_not_hold_up_a_fast_port() -> None:
    """Two activations are on their way until 38; the first gradient, there at 29, has left long before."""
    ways = {pair: LinkSpeed(bandwidth=1) for pair in pairs_of(3)} | {(1, 2): LinkSpeed(bandwidth=0.25)}
    timeline = SchedulePlayer(build("1f1b", 3, 4)).play(StageWork(1, 1, 0), ways, 4, {1})
    assert timeline.spans[2][2].start == 38
    assert (timeline.spans[1][2].stop, timeline.spans[0][3].start) == (29, 33)


def test_hops_inside_a_stage_are_free() -> None:
    timeline = SchedulePlayer(build("interleaved", 1, 3, chunks=2)).play(StageWork(1, 1, 1), LinkSpeed(latency=100))
    assert (timeline.total, timeline.bubble, timeline.link_busy) == (18, 0, {})


def test_many_stages_take_linear_time() -> None:
    """16,384 stages: a scan of all stages for each op would meet this test's time limit."""
    p, m = 16_384, 4
    timeline = SchedulePlayer(build("1f1b", p, m)).play(StageWork(1, 1, 1))
    assert timeline.total == (m + p - 1) * 3


def test_the_same_twice() -> None:
    def once() -> StepTimeline:
        return SchedulePlayer(build("zero_bubble", 4, 9, 2)).play(
            StageWork(0.1, 0.2, 0.3), LinkSpeed(0.05, 1e6), 12_345
        )

    assert once() == once()


def test_untrue_numbers_are_refused() -> None:
    schedule = build("1f1b", 3, 4)
    with pytest.raises(PlanError, match="work of -1 seconds"):
        StageWork(1, -1, 1)
    with pytest.raises(PlanError, match="work of nan seconds"):
        StageWork(math.nan, 1, 1)
    with pytest.raises(PlanError, match="0 bytes/s"):
        LinkSpeed(bandwidth=0)
    with pytest.raises(PlanError, match="latency of -1 s"):
        LinkSpeed(latency=-1)
    with pytest.raises(PlanError, match="from stage 1 to stage 0, and no link"):
        SchedulePlayer(schedule).play(
            StageWork(1, 1, 1), {(0, 1): LinkSpeed(), (1, 2): LinkSpeed(), (2, 1): LinkSpeed()}
        )
    with pytest.raises(PlanError, match="work for 2 stages with 1 chunks, in a schedule of 3 stages with 1"):
        SchedulePlayer(schedule).play([[StageWork(1, 1, 1)]] * 2)
