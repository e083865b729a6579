"""Our links beside other libraries: `python -m benchmarks.comm.links [--quick]` (as root for the shaped links).

Two processes on loopback, then in two network namespaces joined by a bridge at 1 Gbit/s, and by a relay at 1 Gbit/s
with a delay of 1 ms one way and at 100 Mbit/s with 5 ms. Libraries that are not installed are listed. The measurement
is that of `tllm bench links`.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import msgspec

from benchmarks.report.markdown import table
from benchmarks.report.results import Page, write
from tests.support.cluster.hosts import Hosts, why_not
from tllm.core.memory import amount
from tllm.recipes.bench.links import LinkBench, LinkTimes, between_machines
from tllm.recipes.bench.processes import LOOPBACK, free_ports, run_seats, seats_at

PORT = 20000
SHAPED = (("1 Gbit/s", "1gbit", 0.0), ("1 Gbit/s, 1 ms", "1gbit", 1.0), ("100 Mbit/s, 5 ms", "100mbit", 5.0))

SLOW_MOST = 2 << 20
"""The largest message over 100 Mbit/s: 64 MiB would take 11 s there and back, for each library and turn."""


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
    raw: dict[str, Any] = {name: msgspec.to_builtins(times) for name, times in runs.items()}
    write(page(runs, missing), raw)
    return 0


LARGE = 128 << 10
"""Bytes; from here on a message is shown by its rate and not by its time."""

PURPOSE = """How long a message takes from one process to another over each kind of link of tllm, beside the libraries
that others send tensors with. Pipeline stages send a hidden state of some KiB with each token; training sends MiB."""
READING = """One way is half a round trip of as many bytes. Up to 32 KiB the cells are microseconds (us), above it MB/s,
medians over turns in which all take part. Only `tllm TLS` and `tllm gRPC` are encrypted. Between the namespaces torch
RPC is no comparison: it finds that both are one machine and sends large messages through shared memory."""
LIMITS = """- `tllm TLS` sends large messages over {first} at {least:.2f} to {most:.2f} of the rate of `tllm plain`:
  there the processor is the limit, and it encrypts. Over slower links the link is the limit.
- Faster than `tllm TLS` over {first}: {faster}.
- gRPC and torch.distributed as carriers of our links are mostly slower than our own TCP and TLS. They are there for
  networks that ask for them.
- Both ends share two cores here. Not installed: {missing}."""
OURS = "tllm TLS", "tllm plain"


def page(runs: dict[str, LinkTimes], missing: str = "") -> Page:
    """The page: a table for each network, a row for each library, a column for each size."""
    tables = list[str]()
    for network, times in runs.items():
        sizes = list(next(iter(times.seconds.values()), {}))
        rows = [[network, *(f"{amount(size)}, {'us' if size < LARGE else 'MB/s'}" for size in sizes)]]
        for way, seconds in times.seconds.items():
            cells = (
                f"{seconds[size] * 1e6:.0f}" if size < LARGE else f"{times.rate(way, size) / 1e6:.1f}" for size in sizes
            )
            rows.append([way, *cells])
        tables.append(table(rows))
    absent = ", ".join(next(iter(runs.values())).missing) or "none"
    body, reading = "\n\n".join(tables), f"{READING} {missing}".strip()
    return Page("comm", "links", "Links beside other libraries", PURPOSE, body, reading, limits(runs, absent))


def limits(runs: dict[str, LinkTimes], absent: str) -> str:
    """Where our encrypted link is behind, on the first network."""
    first, times = next(iter(runs.items()))
    encrypted, plain = (times.seconds[way] for way in OURS)
    shares = [plain[size] / encrypted[size] for size in plain if size >= LARGE]
    faster = []
    for way, seconds in times.seconds.items():
        sizes = [amount(size) for size in seconds if way not in OURS and seconds[size] < encrypted[size]]
        faster += [f"{way} ({', '.join(sizes)})"] if sizes else []
    behind = "; ".join(faster) or "none"
    return LIMITS.format(first=first, least=min(shares), most=max(shares), faster=behind, missing=absent)


def _read(raw: bytes) -> LinkTimes:
    return msgspec.json.decode(raw, type=LinkTimes)


if __name__ == "__main__":
    sys.exit(main())
