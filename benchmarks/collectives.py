"""Collectives of our groups beside gloo's: `python benchmarks/collectives.py [--quick]` (as root for the shaped links).

On loopback with 2 and 4 ranks, and between 2 and 4 hosts of their own (network namespaces) joined at 1 Gbit/s with
1 ms one way and at 100 Mbit/s with 5 ms. One run for each, in which the ways take turns, as `tllm bench collectives`
does; on the shaped links our groups are tuned, which takes them the time that the notes say.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import msgspec
from report import write

from tllm.cli.commands.bench import collective_rows
from tllm.recipes.bench.collectives import CollectiveBench, CollectiveTimes
from tllm.recipes.bench.processes import LOOPBACK, free_ports, run_seats, seats_at

sys.path.append(str(Path(__file__).parents[1]))
from tests.support.hosts import Hosts, why_not

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
    tables = "\n\n".join(f"## {name}\n\n{markdown(collective_rows(times))}" for name, times in runs.items())
    notes = "gloo is not encrypted. Rates as in nccl-tests; bytes are those that a rank sent for one, as a mean."
    raw: dict[str, Any] = {name: msgspec.to_builtins(times) for name, times in runs.items()}
    write("collectives", "Collectives beside gloo's", tables, raw, f"{notes} {missing}".strip())
    return 0


def markdown(rows: list[list[str]]) -> str:
    titles, *body = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([titles, "|---" * len(rows[0]) + "|", *body])


def _read(raw: bytes) -> CollectiveTimes:
    return msgspec.json.decode(raw, type=CollectiveTimes)


if __name__ == "__main__":
    sys.exit(main())
