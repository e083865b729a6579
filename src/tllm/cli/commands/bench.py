"""Measure the links and collectives of this project beside what others use, in one run.

    tllm bench links                       two processes of this machine
    tllm bench links --listen HOST:PORT    two machines; prints the other's line
    tllm bench collectives --ranks 4

Others are measured where they are installed: gloo and torch RPC come with torch; grpcio, pyzmq and ray are packages.
Two machines use the 30 ports from the given one on; gloo, torch RPC and links of other kinds take free ones beside.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from tllm.cli.arguments.node_sources import TOKEN_VARIABLE, given_token
from tllm.cli.arguments.parser import address, positive, size, whole
from tllm.cli.display.tables import indented_json, table
from tllm.core.errors import ConfigError, nearest
from tllm.core.memory import amount

if TYPE_CHECKING:
    from tllm.recipes.bench.collectives import CollectiveTimes
    from tllm.recipes.bench.links import LinkTimes
    from tllm.recipes.bench.processes import Seat


LINKS, COLLECTIVES = "links", "collectives"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = (LINKS, COLLECTIVES)
    parser.add_argument("what", choices=what, metavar="|".join(what), help="what to measure")
    parser.add_argument("--ways", default="", metavar="WAY,…", help="only these (all)")
    parser.add_argument("--sizes", type=_sizes, default=(), metavar="SIZE,…", help="of messages: 64,8K,1M")
    parser.add_argument("--turns", type=whole, default=3, metavar="N", help="of each way at each size (%(default)s)")
    parser.add_argument("--seconds", type=positive, default=0.3, metavar="S", help="of one turn (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    two = parser.add_argument_group("links between two machines")
    side = two.add_mutually_exclusive_group()
    side.add_argument("--listen", type=address, metavar="HOST:PORT", help="wait here for the other side")
    side.add_argument("--connect", type=address, metavar="HOST:PORT", help="where the other side waits")
    two.add_argument("--token", metavar="TOKEN", help=f"that it showed (or the variable {TOKEN_VARIABLE})")
    two.add_argument("--trusted-network", action="store_true", help="measure what is not encrypted too")
    several = parser.add_argument_group("collectives")
    several.add_argument("--ranks", type=whole, default=2, metavar="N", help="processes of this machine (%(default)s)")
    several.add_argument("--kinds", default="", metavar="KIND,…", help="only these (all)")
    several.add_argument("--tuned", action="store_true", help="choose algorithms by what the links measured first")
    for file in ("--seat", "--asked", "--result"):  # of one of this command's own processes
        parser.add_argument(file, type=Path, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    if args.seat is not None:
        _run_seat(args)
        return 0
    times = _measure(args)
    if times is not None:
        print(indented_json(times) if args.json else _as_text(args.what, times))
    return 0


def _measure(args: argparse.Namespace) -> Any:
    """The times; None on that one of two machines which does not have them."""
    from tllm.recipes.bench.processes import LOOPBACK, free_ports, run_seats, seats_at

    settings, benchmark = _settings(args), _benchmark(args.what)
    if args.listen or args.connect:
        return _measure_at(_seat_of_two_machines(args), args.what, settings)
    ranks = args.ranks if args.what == COLLECTIVES else 2
    if ranks < 2:
        raise ConfigError("one rank alone sends nothing", "give --ranks 2 or more")
    return msgspec.json.decode(
        run_seats(seats_at([LOOPBACK] * ranks, free_ports(ranks)), args.what, settings), type=benchmark.times
    )


def _run_seat(args: argparse.Namespace) -> None:
    """Measure as one of the processes that `run_seats` started; rank 0 writes the times to a file."""
    from tllm.recipes.bench.processes import Seat

    threading.Thread(target=_end_with_parent, daemon=True).start()
    seat = msgspec.json.decode(args.seat.read_bytes(), type=Seat)
    settings = msgspec.json.decode(args.asked.read_bytes(), type=_benchmark(args.what).settings)
    times = _measure_at(seat, args.what, settings)
    if times is not None:
        args.result.write_bytes(msgspec.json.encode(times))


def _end_with_parent() -> None:
    """End this process with the command that started it, which holds this stdin open as long as it lives."""
    sys.stdin.read()
    os._exit(1)


def _seat_of_two_machines(args: argparse.Namespace) -> Seat:
    """This machine's seat, once the two machines have found each other."""
    from tllm.recipes.bench.two_machines import connect_to_first_machine, wait_for_second_machine

    if args.what != LINKS:
        raise ConfigError("collectives are measured on one machine", "give --ranks; `tllm bench links` takes two")
    if args.listen:
        host, port = args.listen
        where = f"{host}:{port}"
        return wait_for_second_machine(
            args.listen, lambda token: print(f"tllm bench links --connect {where} --token {token}", flush=True)
        )
    token = given_token(args)
    if not token:
        raise ConfigError("there is no token", "copy the whole line that the other side printed")
    return connect_to_first_machine(args.connect, token)


def _measure_at(seat: Seat, what: str, settings: Any) -> Any:
    """What one rank measures; None on all but rank 0."""
    import torch

    torch.set_num_threads(1)
    times = _benchmark(what).measure(seat, settings)
    return times if seat.rank == 0 else None


class _Benchmark(NamedTuple):
    """A function that measures, the type of its settings and the type of its result."""

    measure: Any
    settings: Any
    times: Any


def _benchmark(what: str) -> _Benchmark:
    from tllm.recipes.bench import collectives as bench_collectives
    from tllm.recipes.bench import links as bench_links

    if what == LINKS:
        return _Benchmark(bench_links.measure_links, bench_links.LinkBench, bench_links.LinkTimes)
    return _Benchmark(
        bench_collectives.measure_collectives, bench_collectives.CollectiveBench, bench_collectives.CollectiveTimes
    )


def _settings(args: argparse.Namespace) -> Any:
    """What is to be measured, from the command line: a `LinkBench` or a `CollectiveBench`."""
    from tllm.recipes.bench import collectives as bench_collectives
    from tllm.recipes.bench import links as bench_links

    given: dict[str, Any] = {"turns": args.turns, "seconds": args.seconds}
    if args.sizes:
        given["sizes"] = args.sizes
    if args.what == COLLECTIVES:
        given |= _picked("ways", args.ways, bench_collectives.WAYS)
        given |= _picked("kinds", args.kinds, tuple(bench_collectives.BUS))
        return msgspec.convert(given | {"tuned": args.tuned}, bench_collectives.CollectiveBench)
    remote = args.listen or args.connect
    if args.listen and not args.trusted_network:
        print("only TLS: what is not encrypted needs --trusted-network", file=sys.stderr)
    known = bench_links.LinkBench().ways if not remote else bench_links.between_machines(args.trusted_network)
    return msgspec.convert(given | _picked("ways", args.ways, known), bench_links.LinkBench)


def _picked(what: str, text: str, known: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """The names in `text`, by default all; ConfigError for one that is not known."""
    names = tuple(text.split(",")) if text else known
    for name in names:
        if name not in known:
            raise ConfigError(f"--{what} has no {name!r} here", nearest(name, known))
    return {what: names}


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(size(part) for part in text.split(","))


def _as_text(what: str, times: Any) -> str:
    return table(link_rows(times)) + _missing(times) if what == LINKS else table(collective_rows(times))


def link_rows(times: LinkTimes) -> list[list[str]]:
    """One row for each message size: the median microseconds in one direction, and MB/s, of each kind of link."""
    ways = list(times.seconds)
    rows = [["size", *(f"{way} us" for way in ways), *(f"{way} MB/s" for way in ways)]]
    for nbytes in next(iter(times.seconds.values()), {}):
        microseconds = [f"{times.seconds[way][nbytes] * 1e6:.0f}" for way in ways]
        rows.append([amount(nbytes), *microseconds, *(f"{times.rate(way, nbytes) / 1e6:.1f}" for way in ways)])
    return rows


def _missing(times: LinkTimes) -> str:
    return f"\n\nnot installed: {', '.join(times.missing)}" if times.missing else ""


def collective_rows(times: CollectiveTimes) -> list[list[str]]:
    """One row for each collective, size and implementation: times, rates as nccl-tests defines them, and bytes sent."""
    rows = [["kind", "size", "way", "p10 us", "p50 us", "alg MB/s", "bus MB/s", "payload B", "wire B"]]
    for figures in sorted(times.figures, key=lambda figures: (figures.kind, figures.size)):
        rates = [f"{rate / 1e6:.1f}" for rate in (times.algorithm_rate(figures), times.bus_rate(figures))]
        sent = ["" if number is None else f"{number:.0f}" for number in (figures.payload, figures.wire)]
        seconds = [f"{figures.p10 * 1e6:.0f}", f"{figures.median * 1e6:.0f}"]
        rows.append([figures.kind, amount(figures.size), figures.way, *seconds, *rates, *sent])
    return rows
