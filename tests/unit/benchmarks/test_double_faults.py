"""What the suite of two faults at once draws, and what its page says of runs."""

from __future__ import annotations

from benchmarks.faults.double_faults import RUNS, page
from tests.support.double_faults.double_run import HOST_FAULTS, Drawn
from tests.support.double_faults.equal_hosts import COUNT


def test_a_seed_draws_the_same_again_and_all_seeds_draw_everything() -> None:
    drawn = [Drawn.of(seed) for seed in range(RUNS)]
    assert [one.faults for one in drawn] == [Drawn.of(seed).faults for seed in range(RUNS)]
    assert {fault.name for one in drawn for fault, _ in one.faults} == {fault.name for fault in HOST_FAULTS}
    two = [one for one in drawn if len(one.faults) == 2]
    assert RUNS / 2 < len(two) < RUNS
    assert all(one.faults[0][1] != one.faults[1][1] for one in two)
    assert sum(one.faults[0][1] == 0 for one in drawn) > RUNS / 2, "the first machine is struck most of the time"
    assert all(2 * len({host for _, host in one.faults}) < COUNT for one in drawn), "most replicas are left"


def test_the_page_counts_what_went_wrong() -> None:
    row = {
        "seed": 0,
        "faults": ["SIGKILL of host 0", "disk full of host 2"],
        "first": True,
        "recovered": 4.0,
        "answered": 6.5,
        "returned": 1.5,
        "silence": 2.5,
        "hangs": 0,
        "wrong_tokens": 0,
        "lost_replies": 0,
        "wrong": [],
    }
    bad = {**row, "seed": 1, "faults": ["SIGKILL of host 1"], "first": False, "recovered": None, "answered": None}
    del bad["returned"], bad["silence"]  # as of the runs that did not look at them
    bad |= {"hangs": 2, "wrong_tokens": 1, "lost_replies": 3, "wrong": ["stream 0 hangs"]}
    made = page({"runs": [row, bad], "minutes": 1.5, "seeds": {"Brand 1": [0], "Brand 2": [1]}})
    lines = [line.split("|")[1:-1] for line in made.table.splitlines()]
    cells = {line[0].strip(): [cell.strip() for cell in line[1:]] for line in lines}
    assert cells["SIGKILL"] == ["2", "1", "2.5 (2.5)", "4.0 (4.0)", "6.5 (6.5)", "1.5 (1.5)"]
    assert (
        cells["disk full"]
        == cells["the first machine"]
        == ["1", "0", "2.5 (2.5)", "4.0 (4.0)", "6.5 (6.5)", "1.5 (1.5)"]
    )
    assert cells["all on Brand 1"] == ["1", "0", "2.5 (2.5)", "4.0 (4.0)", "6.5 (6.5)", "1.5 (1.5)"]
    assert cells["all on Brand 2"] == ["1", "1", "", "", "", ""]
    for words in (
        "2 runs of the 300",
        "In 1 of them the first",
        "in 1 there were two",
        "2 streams",
        "3 kept replies",
        "newest 1 runs",
    ):
        assert words in " ".join(made.meaning.split())
