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

from benchmarks.cluster.simulated_nodes import Machines
from benchmarks.cluster.simulated_run import SimulatedRun
from benchmarks.emulation.virtual_loop import VirtualLoop, run_virtually
from benchmarks.processes.python_module import environment, module_command
from benchmarks.report.markdown import percent, table
from benchmarks.report.results import Page, write
from tllm.cluster.heartbeat import ASKED_BEATS, BEAT_SECONDS, NODES_AT_ONCE, SILENCE_SECONDS, HeartbeatInterval
from tllm.core.memory import rss_bytes

SIZES = (256, 1024, 3008, 10_000, 16_384)
CHURNED = (1024, 3008, 10_000)
"""Sizes of which nodes then die again and again."""

JOIN_SECONDS = 10.0
STAY_SECONDS = 9.0
DEATHS_EVERY = 36.0
"""Seconds from one death to the next, on an average: of 10,000 nodes 1 % die in an hour."""

CHURN_SECONDS = 180.0
BACK_AFTER = 20.0
FITTED = 1024
"""Exponents are fitted to this size and all above: below, what does not depend on the size counts too."""

MANY = f"{NODES_AT_ONCE:,}"
LAW_OF_SILENCE = f"O(1), O(n) from {SILENCE_SECONDS / (ASKED_BEATS * BEAT_SECONDS) * NODES_AT_ONCE:,.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=0, help="only so many, a multiple of 16; prints JSON")
    parser.add_argument(
        "--keep", type=float, default=Machines().keep, help="with --ranks, `Machines.keep` (%(default)s)"
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="ranks, ascending (%(default)s)")
    args = parser.parse_args()
    if args.ranks:
        print(json.dumps(measured(args.ranks, args.keep)))
        return
    rows = [of_process(size) for size in args.sizes]
    write(page(rows), rows)


def of_process(ranks: int) -> dict[str, Any]:
    words = module_command("cluster.coordinator_scale", "--ranks", str(ranks))
    done = subprocess.run(words, env=environment(), stdout=subprocess.PIPE, text=True, check=True)
    print(done.stdout, file=sys.stderr, flush=True)
    row: dict[str, Any] = json.loads(done.stdout)
    return row


def measured(ranks: int, keep: float) -> dict[str, Any]:
    """One cluster: how it forms, goes on, and loses a node twice; of some sizes how it computes with deaths."""
    logging.disable(logging.WARNING)
    gc.disable()  # what is made here lives until the end, and a collection looks at all of it
    row: dict[str, Any] = {"ranks": ranks}

    async def scene() -> None:
        with tempfile.TemporaryDirectory() as folder:
            before = rss_bytes()
            run = SimulatedRun(ranks, Path(folder), Machines(keep=keep))
            row["form"] = asdict(await run.form(JOIN_SECONDS))
            gc.collect()
            row["memory"] = rss_bytes() - before
            row["stay"] = asdict(await run.stay(STAY_SECONDS))
            row["killed"] = asdict(await run.lose(is_silent=False))
            row["silent"] = asdict(await run.lose(is_silent=True))
            if ranks in CHURNED:
                run.cluster.arrive(2, 1.0)  # in the place of those that died
                row["churn"] = asdict(await run.churn(CHURN_SECONDS, DEATHS_EVERY, BACK_AFTER))
                row["recovery"] = of_recoveries(row["churn"]["recoveries"])
            row["traffic"] = vars(run.cluster.traffic)
            await run.end()

    run_virtually(VirtualLoop(), scene())
    return row


def of_recoveries(seconds: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(seconds), "worst": max(seconds)}


def exponent(rows: Sequence[dict[str, Any]], *path: str, smallest: int = FITTED) -> float:
    """The slope of log(figure) over log(ranks), by least squares over the sizes from the `smallest` on."""
    points = [(row["ranks"], _at(row, *path)) for row in rows if row["ranks"] >= smallest and path[0] in row]
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
    ("MB to form", ("form", "nbytes"), 1e-6, "{:,.1f}", "O(n^2)"),
    ("processor s to form", ("form", "processor"), 1.0, "{:.1f}", "O(n log n)"),
    ("seconds after a kill", ("killed", "seconds"), 1.0, "{:.0f}", "O(1)"),
    ("seconds after silence", ("silent", "seconds"), 1.0, "{:.0f}", LAW_OF_SILENCE),
    ("messages after a kill", ("killed", "messages"), 1.0, "{:,.0f}", "O(n)"),
    ("MB after a kill", ("killed", "nbytes"), 1e-6, "{:,.2f}", "O(n)"),
    ("processor s after a kill", ("killed", "processor"), 1.0, "{:.1f}", "O(n log n)"),
    (f"heartbeats in {STAY_SECONDS:g} s, both ways", ("stay", "beats"), 1.0, "{:,.0f}", f"O(n), O(1) from {MANY}"),
    (f"processor s of {STAY_SECONDS:g} s", ("stay", "processor"), 1.0, "{:.2f}", f"O(n), O(log n) from {MANY}"),
    ("MiB of memory, formed", ("memory",), 2**-20, "{:,.0f}", "O(n)"),
    ("with deaths: median s until all compute", ("recovery", "median"), 1.0, "{:.0f}", LAW_OF_SILENCE),
    ("with deaths: worst", ("recovery", "worst"), 1.0, "{:.0f}", "the same, for each that dies meanwhile"),
    ("with deaths: messages", ("churn", "cost", "messages"), 1.0, "{:,.0f}", "O(n) for each epoch"),
)


def as_table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [["ranks", *(f"{row['ranks']:,}" for row in rows), "law", "measured"]]
    for name, path, scale, words, law in FIGURES:
        values = [words.format(scale * _at(row, *path)) if path[0] in row else "" for row in rows]
        fitted = sum(row["ranks"] >= FITTED and path[0] in row for row in rows) > 1
        lines.append([name, *values, law, f"n^{exponent(rows, *path):.2f}" if fitted else ""])
    return table(lines)


def page(rows: list[dict[str, Any]]) -> Page:
    largest = rows[-1]
    share = largest["stay"]["processor"] / STAY_SECONDS
    longest = HeartbeatInterval()
    longest.grow(largest["ranks"])
    return Page(
        "cluster",
        "coordinator-scale",
        f"The coordinator of up to {largest['ranks']:,} nodes, simulated",
        "How what one coordinator does grows with its nodes. The coordinator is the code that `tllm train` runs, with "
        "recovery by replanning; nodes, machines and network are simulated, on a virtual clock. All nodes join within "
        f"{JOIN_SECONDS:g} s; every hundredth takes five times as long as others to prepare (0.2 to 1 s) and to load "
        f"(0.5 to 3 s, {percent(Machines().keep)} of it for a node that goes on with its own weights). Then a node is "
        "killed and all others see their links break, a second one falls silent, and two "
        f"join in their place. Then, of some sizes, for {CHURN_SECONDS:g} s a node dies every {DEATHS_EVERY:g} s on an "
        "average, as of 10,000 nodes of which 1 % die in an hour, every other one silently, and all come back by their "
        f"old names: after {BACK_AFTER:g} s, the silent ones after 1 s, when nobody has missed them yet, so that they "
        "are turned away and knock again.",
        as_table(rows),
        "- Seconds, messages and bytes are exact: of the virtual clock, and of the frames that were sent. Seconds are "
        "what nodes, network and limits take, without the coordinator's own work. After a loss it is about as long as "
        "the slowest node prepares and loads.\n"
        f"- A node beats every {BEAT_SECONDS:g} s, with more than {MANY} nodes less often, so that the coordinator "
        f"reads and sends 4,000 a second at the most: of {largest['ranks']:,} nodes each beats every "
        f"{longest.seconds:g} s and is lost after {longest.asked_after:g} s of silence if nothing answers on its "
        f"machine, as here, else after {longest.lost_after:g} s, where {SILENCE_SECONDS:g} s was asked for. That "
        f"is why it takes longer to go on after silence. Heartbeats took {percent(share)} of a "
        "processor.\n"
        "- Messages are as many as their law says: about ten for each node and epoch.\n"
        "- To form, every node is told of every rank: n tables of n places. Packed, and once for all, a place takes "
        f"{largest['traffic']['bytes_to_nodes']['RankAddresses'] / largest['ranks'] ** 2:.1f} bytes or less. Later "
        "epochs send what has changed, and are O(n).\n" + "\n".join(_churned(row) for row in rows if "churn" in row),
        "Processor seconds are of a machine that others used too, with the simulated nodes' own part, and only show "
        "how they grow. Not simulated: TLS, joining by token (three handshakes for each node), weights that nodes "
        "fetch from each other, replicas of the coordinator, and the ranks themselves, which open links to all others "
        f"of their groups. Laws are for the sizes from {FITTED:,} on; `measured` is fitted over them. What a node with "
        "its own weights takes of a load is of three real ranks on one machine (`faults.recovery_timeline`): most of "
        "it is their copy for the next loss, which shrinks with the number of replicas." + _left_out(rows),
    )


def _left_out(rows: Sequence[dict[str, Any]]) -> str:
    """Sizes that were not played."""
    missing = [f"{size:,}" for size in SIZES if size not in {row["ranks"] for row in rows}]
    return f" Not played in this run: {' and '.join(missing)} nodes." if missing else ""


def _churned(row: dict[str, Any]) -> str:
    """What a time with deaths was like."""
    churn = row["churn"]
    return (
        f"- {row['ranks']:,} nodes: {churn['deaths']} died, {churn['returned']} were back at the end, after "
        f"{churn['refused']} refusals; {churn['epochs']} epochs began, and the ranks computed for "
        f"{percent(churn['computing'])} of the time."
    )


if __name__ == "__main__":
    main()
