"""Our links beside what others use: `python benchmarks/links.py [--quick]` (as root for the shaped links).

Two processes on loopback, then on two hosts of their own (network namespaces): joined by a bridge at 1 Gbit/s, and at
1 Gbit/s with 1 ms and 100 Mbit/s with 5 ms one way. What is not installed is listed. As `tllm bench links` does.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import msgspec
from collectives import markdown
from report import write

from tllm.cli.commands.bench import link_rows
from tllm.recipes.bench.links import LinkBench, LinkTimes, between_machines
from tllm.recipes.bench.processes import LOOPBACK, free_ports, run_seats, seats_at

sys.path.append(str(Path(__file__).parents[1]))
from tests.support.hosts import Hosts, why_not

PORT = 20000
SHAPED = (("1 Gbit/s", "1gbit", 0.0), ("1 Gbit/s, 1 ms", "1gbit", 1.0), ("100 Mbit/s, 5 ms", "100mbit", 5.0))

SLOW_MOST = 2 << 20
"""The largest message over 100 Mbit/s: 64 MiB would go there and back in 11 s, for each of some ways and turns."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short turn of each, up to 2 MiB")
    parser.add_argument("--turns", type=int, default=3, help="of each way at each size (%(default)s)")
    options = parser.parse_args()
    plan: dict[str, Any] = {"turns": 1, "seconds": 0.1} if options.quick else {"turns": options.turns, "seconds": 0.5}
    sizes = tuple(size for size in LinkBench().sizes if not options.quick or size <= SLOW_MOST)
    seats = seats_at([LOOPBACK] * 2, free_ports(2))
    runs = {"loopback": _read(run_seats(seats, "links", LinkBench(sizes=sizes, **plan)))}
    missing = why_not()
    for name, rate, delay in SHAPED if not missing else ():
        with Hosts(2, rate=rate, delay_ms=delay) as hosts:
            some = tuple(size for size in sizes if rate == "1gbit" or size <= SLOW_MOST)
            asked = LinkBench(between_machines(trusted=True), some, **plan)
            at = lambda rank, words, hosts=hosts: hosts.command(rank, *words)  # noqa: E731
            runs[name] = _read(run_seats(seats_at(hosts.addresses, [PORT] * 2), "links", asked, at))
    tables = "\n\n".join(f"## {name}\n\n{markdown(link_rows(times))}" for name, times in runs.items())
    absent = ", ".join(runs["loopback"].missing) or "none"
    encrypted = "Only `tllm TLS` and `tllm gRPC` are encrypted; torch RPC finds that both hosts are one machine."
    notes = f"{encrypted} One way is half a round trip of as many bytes. Not installed: {absent}."
    raw: dict[str, Any] = {name: msgspec.to_builtins(times) for name, times in runs.items()}
    write("links", "Links beside what others use", tables, raw, f"{notes} {missing}".strip())
    return 0


def _read(raw: bytes) -> LinkTimes:
    return msgspec.json.decode(raw, type=LinkTimes)


if __name__ == "__main__":
    sys.exit(main())
