"""`tllm bench` in processes: what is counted is what was sent, and two sides find each other by a token."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest

from tests.support.cluster.commands import running, tllm
from tllm.recipes.bench import collectives as bench_collectives
from tllm.recipes.bench import links as bench_links
from tllm.recipes.bench.collectives import measure_collectives
from tllm.recipes.bench.links import measure_links
from tllm.recipes.bench.processes import LOOPBACK, SERVICES, Seat, free_ports, free_row, seats_at

T = TypeVar("T")

QUICK = ["--turns", "1", "--seconds", "0.01", "--json"]


def in_threads(ranks: int, work: Callable[[Seat], T]) -> T:
    """What rank 0 measures, with all ranks in this process."""
    with ThreadPoolExecutor(ranks) as pool:
        first, *_ = pool.map(work, seats_at([LOOPBACK] * ranks, free_ports(ranks)))
    return first


def test_bytes_are_counted_and_are_those_of_the_formulas() -> None:
    asked = bench_collectives.CollectiveBench(
        ways=("tllm TLS", "tllm plain"), sizes=(12000, 300000), turns=2, seconds=1e-6
    )
    times = in_threads(3, lambda seat: measure_collectives(seat, asked))
    assert times.ranks == 3
    assert len(times.figures) == 6 * 2 * 2
    for one in times.figures:
        part = 2 / 3  # that crosses a rank's wire, as a mean over ranks
        if one.kind == "all_reduce":  # one_shot up to 96 KiB for three ranks, then two_step
            part = 2 if one.size == 12000 else 2 * 2 / 3
        assert one.payload == pytest.approx(part * one.size), one.kind
        assert one.count == 2 * bench_collectives.LEAST
        assert 0 < one.p10 <= one.median


def test_ranks_of_a_machine_sum_in_memory_and_send_nothing() -> None:
    asked = bench_collectives.CollectiveBench(
        ("all_reduce", "reduce"), ("tllm TLS", bench_collectives.IN_MEMORY), (12000, 300000), turns=1, seconds=1e-6
    )
    times = in_threads(2, lambda seat: measure_collectives(seat, asked))
    assert [(one.kind, one.size, one.payload) for one in times.figures if one.way == bench_collectives.IN_MEMORY] == [
        ("all_reduce", 12000, 0.0),
        ("all_reduce", 300000, 0.0),
    ]


def test_groups_that_are_tuned_measure_first() -> None:
    asked = bench_collectives.CollectiveBench(("reduce",), ("tllm plain",), (4000,), turns=1, seconds=1e-6, tuned=True)
    times = in_threads(2, lambda seat: measure_collectives(seat, asked))
    assert [one.kind for one in times.figures] == ["reduce"]


@pytest.mark.parametrize("ways", [("tllm TLS", "tllm plain"), ("tllm torch p2p",), ("tllm gRPC",), ("gRPC",)])
def test_links_bring_back_what_they_were_given(ways: tuple[str, ...]) -> None:
    if any("gRPC" in way for way in ways):
        pytest.importorskip("grpc")
    asked = bench_links.LinkBench(ways, (64, 200_000), turns=2, seconds=1e-6)
    times = in_threads(2, lambda seat: measure_links(seat, asked))
    assert times.count == {way: {64: 6, 200_000: 6} for way in asked.ways}
    assert all(seconds > 0 for by_size in times.seconds.values() for seconds in by_size.values())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_processes_measure_gloo_in_the_same_run() -> None:
    words = ["collectives", "--sizes", "8K", "--ways", "tllm TLS,gloo", "--kinds", "all_reduce"]
    done = tllm("bench", *words, *QUICK)
    assert done.returncode == 0, done.stderr
    ours, gloo = json.loads(done.stdout)["figures"]
    assert (ours["way"], ours["payload"]) == ("tllm TLS", 8192)
    assert (gloo["way"], gloo["payload"]) == ("gloo", None)
    assert min(ours["median"], gloo["median"]) > 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_sides_meet_by_a_token_and_stay_encrypted() -> None:
    port = free_row(3 * SERVICES)  # for the rendezvous, and for each rank
    words = ["links", "--sizes", "64,100000", *QUICK]
    with running("bench", *words, "--listen", f"127.0.0.1:{port}") as command:
        first = command.process
        assert first.stdout is not None
        line = first.stdout.readline().split()
        assert line[:4] == ["tllm", "bench", "links", "--connect"]
        refused = tllm("bench", *line[2:6], "tllm1-" + "A" * 86)
        assert refused.returncode == 5, "a token of another cluster is refused"
        second = tllm("bench", *line[2:])
        out, said = first.communicate(timeout=150)
    assert (second.returncode, second.stdout, first.returncode) == (0, "", 0), second.stderr + said
    found = json.loads(out)
    assert set(found["seconds"]) <= {"tllm TLS", "tllm gRPC"}, (
        "nothing crosses a network in clear unless it is asked for"
    )
    assert "--trusted-network" in said
    assert all(seconds > 0 for seconds in found["seconds"]["tllm TLS"].values())
