"""Our collectives beside gloo's: `python -m benchmarks.comm.collectives [--quick]` (as root for the shaped links).

On loopback with 2 and 4 ranks, and between 2 and 4 network namespaces joined at 1 Gbit/s with a delay of 1 ms one way
and at 100 Mbit/s with 5 ms. In each of these runs the implementations take turns, as in `tllm bench collectives`. On
the shaped links our groups first choose their algorithms by measuring (tuning).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Any

import msgspec

from benchmarks.report.markdown import table
from benchmarks.report.results import Page, write
from tests.support.cluster.hosts import Hosts, why_not
from tllm.core.memory import amount
from tllm.recipes.bench.collectives import CollectiveBench, CollectiveTimes, Figures
from tllm.recipes.bench.processes import LOOPBACK, free_ports, run_seats, seats_at

PORT = 20000
SHAPED = (("1 Gbit/s, 1 ms", "1gbit", 1.0), ("100 Mbit/s, 5 ms", "100mbit", 5.0))
SHORT, LONG = (8 << 10, 64 << 10, 1 << 20, 16 << 20), (8 << 10, 64 << 10, 1 << 20)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short turn of each")
    options = parser.parse_args()
    turns, seconds = (1, 0.1) if options.quick else (5, 0.5)
    runs: dict[str, CollectiveTimes] = {}
    for ranks in (2, 4):
        seats = seats_at([LOOPBACK] * ranks, free_ports(ranks))
        asked = CollectiveBench(sizes=SHORT, turns=turns, seconds=seconds)
        runs[f"loopback, {ranks} ranks"] = _read(run_seats(seats, "collectives", asked))
    missing = why_not()
    for name, rate, delay in SHAPED if not missing else ():
        for ranks in (2, 4):
            with Hosts(ranks, rate=rate, delay_ms=delay) as hosts:
                seats = seats_at(hosts.addresses, [PORT] * ranks)
                asked = CollectiveBench(sizes=LONG, turns=turns, seconds=seconds, tuned=True)
                at = lambda rank, words, hosts=hosts: hosts.command(rank, *words)  # noqa: E731
                runs[f"{name}, {ranks} hosts"] = _read(run_seats(seats, "collectives", asked, at))
    raw: dict[str, Any] = {name: msgspec.to_builtins(times) for name, times in runs.items()}
    write(page(runs, missing), raw)
    return 0


ONE_SIZE = 1 << 20
"""Bytes; the page shows collectives other than all-reduce at this size alone, with the most ranks."""

PURPOSE = """Microseconds of all-reduce and other collectives between CPU processes: ours over plain TCP, over mutual
TLS and, for sums of ranks of one machine, in memory that they share, as a server makes them; and gloo's, which is not
encrypted. Tensor parallelism calls an all-reduce twice in each layer of a token, so small ones decide how fast it
decodes; training sums large ones. Each cell is median (p10): the p10 is nearest to what the machine can do, the median
is what other work on it left."""
READING = """A setting is loopback, or that many network namespaces joined at a rate and a delay one way. All run in
turns in one run. Sizes are bytes of the tensor on each rank. All sizes of the other collectives, and the bytes sent,
are in the JSON."""
LIMITS = "Collectives of ours that take longer than gloo's (medians, all kinds and sizes):"


def page(runs: dict[str, CollectiveTimes], missing: str = "") -> Page:
    """The page: a row for each setting, kind and size, a column for each implementation."""
    ways = list(dict.fromkeys(one.way for times in runs.values() for one in times.figures))
    most = max(times.ranks for times in runs.values())
    lines, behind = [["setting", "kind", "size", *(f"{way}, us" for way in ways)]], list[str]()
    for setting, times in runs.items():
        found = {(one.kind, one.size, one.way): one for one in times.figures}
        for kind, size in sorted({key[:2] for key in found}):
            if kind == "all_reduce" or (size == ONE_SIZE and times.ranks == most):
                cells = (found.get((kind, size, way)) for way in ways)
                lines.append([setting, kind, amount(size), *(cell(one) if one else "" for one in cells)])
        behind += slower(setting, times)
    reading = f"{READING} {missing}".strip()
    limits = "\n".join([LIMITS, "", *behind]) if behind else "No collective of ours takes longer than gloo's."
    return Page("comm", "collectives", "Collectives beside gloo's", PURPOSE, table(lines, left=3), reading, limits)


def cell(one: Figures) -> str:
    return f"{one.median * 1e6:.0f} ({one.p10 * 1e6:.0f})"


def slower(setting: str, times: CollectiveTimes) -> Iterator[str]:
    """For each of our implementations how many collectives take longer than gloo's, and the worst of them."""
    gloo = {(one.kind, one.size): one.median for one in times.figures if one.way == "gloo"}
    for way in dict.fromkeys(one.way for one in times.figures if one.way != "gloo"):
        some = [one for one in times.figures if one.way == way and (one.kind, one.size) in gloo]
        ratios = {(one.kind, one.size): one.median / gloo[one.kind, one.size] for one in some}
        if behind := [ratio for ratio in ratios.values() if ratio > 1]:
            kind, size = max(ratios, key=lambda key: ratios[key])
            worst = f"{max(behind):.1f} times for {kind} of {amount(size)} at worst"
            yield f"- {setting}, {way}: {len(behind)} of {len(ratios)}, {worst}."


def _read(raw: bytes) -> CollectiveTimes:
    return msgspec.json.decode(raw, type=CollectiveTimes)


if __name__ == "__main__":
    sys.exit(main())
