"""The coordinator of up to 16,384 nodes, in virtual time: `python -m benchmarks.cluster.coordinator_scale`.

Nodes are simulated, the coordinator is not (`simulated_run`). Every size has a process of its own, whose memory is
that of the coordinator and of the simulated nodes. With `--ranks` one size runs and nothing is written.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.cluster.simulated_run import SimulatedRun
from benchmarks.emulation.virtual_loop import VirtualLoop, run_virtually
from benchmarks.processes.python_module import environment, module_command
from benchmarks.report.markdown import percent, table
from benchmarks.report.results import Page, write
from tllm.core.memory import rss_bytes

SIZES = (16, 64, 256, 1024, 4096, 10_000, 16_384)
CHURNED = 10_000
JOIN_SECONDS = 10.0
STAY_SECONDS = 5.0
CHURN_SECONDS = 90.0
DEATHS = 0.01
"""Part of the nodes that dies in an hour."""

REPLACED_AFTER = 20.0
FITTED = 256
"""Exponents are fitted to this size and all above: below, what does not depend on the size counts too."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=0, help="only so many, a multiple of 16; prints JSON")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="ranks, ascending (%(default)s)")
    args = parser.parse_args()
    if args.ranks:
        print(json.dumps(measured(args.ranks)))
        return
    rows = [of_process(size) for size in args.sizes]
    write(page(rows), rows)


def of_process(ranks: int) -> dict[str, Any]:
    words = module_command("cluster.coordinator_scale", "--ranks", str(ranks))
    done = subprocess.run(words, env=environment(), stdout=subprocess.PIPE, text=True, check=True)
    print(done.stdout, file=sys.stderr, flush=True)
    row: dict[str, Any] = json.loads(done.stdout)
    return row


def measured(ranks: int) -> dict[str, Any]:
    """One cluster: how it forms, goes on, loses a node twice, and has them replaced."""
    logging.disable(logging.WARNING)
    gc.disable()  # what is made here lives until the end, and a collection looks at all of it
    row: dict[str, Any] = {"ranks": ranks}

    async def scene() -> None:
        with tempfile.TemporaryDirectory() as folder:
            before = rss_bytes()
            run = SimulatedRun(ranks, Path(folder))
            row["form"] = asdict(await run.form(JOIN_SECONDS))
            gc.collect()
            row["memory"] = rss_bytes() - before
            row["stay"] = asdict(await run.stay(STAY_SECONDS))
            row["killed"] = asdict(await run.lose(is_silent=False))
            row["silent"] = asdict(await run.lose(is_silent=True))
            row["restored"] = asdict(await run.restore(2))
            if ranks == CHURNED:
                row["churn"] = asdict(await run.churn(CHURN_SECONDS, DEATHS, REPLACED_AFTER))
            row["traffic"] = vars(run.cluster.traffic)
            await run.end()

    run_virtually(VirtualLoop(), scene())
    return row


def exponent(rows: Sequence[dict[str, Any]], *path: str, smallest: int = FITTED) -> float:
    """The slope of log(figure) over log(ranks), by least squares over the sizes from the `smallest` on."""
    points = [(row["ranks"], _at(row, *path)) for row in rows if row["ranks"] >= smallest]
    slope, _ = statistics.linear_regression([math.log(x) for x, _ in points], [math.log(y) for _, y in points])
    return slope


def _at(row: dict[str, Any], *path: str) -> float:
    value: Any = row
    for name in path:
        value = value[name]
    return float(value)


FIGURES = (
    ("seconds to form", ("form", "seconds"), 1.0, "{:.0f}", "O(1)"),
    ("messages to form", ("form", "messages"), 1.0, "{:,.0f}", "O(n)"),
    ("MB to form", ("form", "nbytes"), 1e-6, "{:,.2f}", "O(n^2)"),
    ("processor s to form", ("form", "processor"), 1.0, "{:.1f}", "O(n log n)"),
    ("seconds after a kill", ("killed", "seconds"), 1.0, "{:.0f}", "O(1)"),
    ("seconds after silence", ("silent", "seconds"), 1.0, "{:.0f}", "O(1)"),
    ("messages after a kill", ("killed", "messages"), 1.0, "{:,.0f}", "O(n)"),
    ("MB after a kill", ("killed", "nbytes"), 1e-6, "{:,.2f}", "O(n)"),
    ("processor s after a kill", ("killed", "processor"), 1.0, "{:.1f}", "O(n log n)"),
    (f"heartbeats in {STAY_SECONDS:g} s", ("stay", "beats"), 1.0, "{:,.0f}", "O(n)"),
    (f"processor s of {STAY_SECONDS:g} s", ("stay", "processor"), 1.0, "{:.2f}", "O(n log n)"),
    ("MiB of memory", ("memory",), 2**-20, "{:,.0f}", "O(n)"),
)


def as_table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [["ranks", *(f"{row['ranks']:,}" for row in rows), "law", "measured"]]
    for name, path, scale, words, law in FIGURES:
        values = [words.format(scale * _at(row, *path)) for row in rows]
        lines.append([name, *values, law, f"n^{exponent(rows, *path):.2f}"])
    return table(lines)


def page(rows: list[dict[str, Any]]) -> Page:
    largest = rows[-1]
    core = largest["stay"]["processor"] / STAY_SECONDS
    return Page(
        "cluster",
        "coordinator-scale",
        f"The coordinator of up to {largest['ranks']:,} nodes, simulated",
        "How what one coordinator does grows with its nodes. The coordinator is the code that `tllm train` runs, with "
        "recovery by replanning; nodes, machines and network are simulated, on a virtual clock. All nodes join within "
        f"{JOIN_SECONDS:g} s; every hundredth takes five times as long as others to prepare (0.2 to 1 s) and to load "
        "(0.5 to 3 s). Then a node is killed and all others see their links break, a second one falls silent, and both "
        "are replaced.",
        as_table(rows),
        f"- Seconds are virtual: what nodes, network and limits take, without the coordinator's own work. They do not "
        "grow but for the slowest of more nodes: after a loss about as long as the slowest node prepares and loads, "
        "after silence five seconds and a probe more.\n"
        "- Messages are as many as their law says: about ten for each node and epoch.\n"
        "- To form, every node is told of every rank: n tables of n places. Packed, and once for all, a place takes "
        f"{largest['traffic']['bytes_to_nodes']['Places'] / largest['ranks'] ** 2:.1f} bytes or less. Later epochs "
        "send what has changed, and are O(n)." + _churned(rows),
        f"Processor seconds are of a shared machine, with the simulated nodes' own part, and only show how they grow. "
        f"At {largest['ranks']:,} nodes heartbeats alone took {core:.1f} seconds of processor a second: one "
        "coordinator, which is one thread, does not keep up with so many on such a machine, and TLS comes on top. "
        "Not simulated: TLS, joining by token (three handshakes for each node), weights that nodes fetch from each "
        "other, replicas of the coordinator, and the ranks themselves, which open links to all others of their "
        f"groups. Laws are for the sizes from {FITTED} on." + _left_out(rows),
    )


def _left_out(rows: Sequence[dict[str, Any]]) -> str:
    """Sizes that were not played."""
    missing = [f"{size:,}" for size in SIZES if size not in {row["ranks"] for row in rows}]
    return f" Not played in this run: {' and '.join(missing)} nodes." if missing else ""


def _churned(rows: Sequence[dict[str, Any]]) -> str:
    """What a time with deaths was like, where it was played."""
    return "".join(
        f"\n- With {row['ranks']:,} nodes of which {percent(DEATHS)} die in an hour, {row['churn']['deaths']} died in "
        f"{CHURN_SECONDS:g} s, each was replaced after {REPLACED_AFTER:g} s, and the run computed for "
        f"{percent(row['churn']['computing'])} of the time: a loss stops all ranks until the slowest has loaded again."
        for row in rows
        if "churn" in row
    )


if __name__ == "__main__":
    main()
