"""A million malformed frames: `python -m benchmarks.fuzz.malformed_frames [--frames 1000000] [--seconds 60]`.

First, damaged copies of good frames, hellos, messages and tokens go to every function that reads bytes of others, in a
process whose address space is limited. Then they go to the ports of a node and of a coordinator, over TLS. If `atheris`
is installed (the extra `fuzz`, which the lock files do not have), it then searches for such bytes guided by coverage,
`--seconds` for each reader.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import importlib.util
import logging
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.processes.python_module import environment, module_command
from benchmarks.report import markdown
from benchmarks.report.results import Page, write
from tests.support.cluster.fuzz_ports import NodePort, control_port
from tests.support.cluster.fuzz_readers import Target, close_loops, corpora, twisted

MORE_BYTES = 512 << 20
"""Address space that a reader may add; a length that lies may claim 16 EiB."""
CONNECTIONS = 3000
LINK_MODULES = ("frame", "handshake", "framed_link", "tcp_link")
GUIDED_MODULES = (
    *(f"tllm.comm.links.{name}" for name in LINK_MODULES),
    "tllm.cluster.channel",
    "tllm.cluster.join_token",
    "tllm.engine.schedule.batch",
    "tllm.engine.schedule.limits",
)
"""Modules in whose functions atheris sees which lines are reached."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--connections", type=int, default=CONNECTIONS, help="to each port")
    parser.add_argument("--seconds", type=int, default=30, help="of atheris, for each reader")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--guided", help=argparse.SUPPRESS)
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    if options.guided:
        guided(options.guided, options.seconds)
        return
    raw = {target.__name__: damaged(target, options.frames // len(corpora), options.seed) for target in corpora}
    close_loops()
    raw.update(ports(options.connections, options.seed))
    missing = importlib.util.find_spec("atheris") is None
    for target in () if missing else corpora:
        raw[f"{target.__name__}, guided"] = found_by_atheris(target.__name__, options.seconds)
    found = {"seed": options.seed, "atheris": not missing, "readers": raw}
    write(page(found), found)


PURPOSE = """Whether bytes that nobody should send can crash, hang or fill the memory of a process. Every function that
reads bytes of others gets damaged copies of good inputs, in a process that may take only 512 MiB of further address
space; two ports get them over TLS; and atheris, guided by coverage, searches for inputs by itself. An error ends the
run."""
READING = """{total:,} inputs, none of which ended the run. `damaged` inputs were tried in that many seconds; `refused`
of the connections to a port were answered with a refusal or cut off, the others were valid by chance or harmless, and
the ports served a good client afterwards. `guided` inputs were found by atheris. Seed {seed}. {atheris}"""
LIMITS = """- Random damage and some seconds of search show that errors are rare, not that there are none.
- Only bytes that come over a network: readers of files are no part of this run."""


def page(raw: dict[str, Any]) -> Page:
    """The page of raw figures: the `readers` with what was tried on each, `NAME, guided` for atheris."""
    readers: dict[str, dict[str, float]] = raw["readers"]
    total = sum(row["tried"] for row in readers.values())
    atheris = "" if raw["atheris"] else "atheris was not installed."
    reading = READING.format(total=total, seed=raw["seed"], atheris=atheris)
    return Page("fuzz", "fuzz", f"Malformed input: {total:,} tries", PURPOSE, table(readers), reading, LIMITS)


def damaged(target: Target, count: int, seed: int) -> dict[str, float]:
    """Give a reader `count` damaged inputs; an error, or a refused allocation, ends the run and prints the input."""
    dice = random.Random(f"{target.__name__} {seed}")
    data = b""
    limits, size = resource.getrlimit(resource.RLIMIT_AS), _address_space()
    resource.setrlimit(resource.RLIMIT_AS, (size + MORE_BYTES, limits[1]))
    before, start = _peak(), time.monotonic()
    try:
        for _ in range(count):
            data = twisted(dice, corpora[target])
            target(data)
    except BaseException:
        print(f"{target.__name__} fails on {data.hex()}", file=sys.stderr)
        raise
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    return {"tried": count, "seconds": round(time.monotonic() - start, 1), "more KiB at the peak": _peak() - before}


def ports(connections: int, seed: int) -> dict[str, dict[str, float]]:
    """Counts of what came of connections to both ports."""
    dice = random.Random(seed)
    start, before = time.monotonic(), _peak()
    with NodePort() as port:
        for _ in range(connections):
            port.attack(dice)
        port.check_unharmed()
    found = {"a node's port": _row(port.counts, start, before)}
    start, before = time.monotonic(), _peak()

    async def scene() -> Counter[str]:
        async with control_port() as opened:
            for _ in range(connections):
                await opened.attack(dice)
            await opened.check_unharmed()
        return opened.counts

    return {**found, "the coordinator's port": _row(asyncio.run(scene()), start, before)}


def found_by_atheris(name: str, seconds: int) -> dict[str, float]:
    """What atheris has tried in a process of its own; SystemExit where it found an error."""
    words = module_command("fuzz.malformed_frames", "--guided", name, "--seconds", str(seconds))
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"atheris on {name}:\n{done.stdout[-2000:]}{done.stderr[-6000:]}")
    stats = dict(line.removeprefix("stat::").split(":") for line in done.stderr.splitlines() if line.startswith("stat"))
    return {
        "tried": int(stats["number_of_executed_units"]),
        "seconds": seconds,
        "more KiB at the peak": 1024 * int(stats["peak_rss_mb"]) - _peak(),
    }


def guided(name: str, seconds: int) -> None:
    """Let atheris search inputs for one reader, beginning with its good ones."""
    import atheris  # type: ignore[import-untyped] # not at the top: it need not be installed

    target = next(one for one in corpora if one.__name__ == name)
    for module in GUIDED_MODULES:
        instrument(module, atheris)
    with tempfile.TemporaryDirectory() as folder:
        for number, good in enumerate(corpora[target]):
            Path(folder, str(number)).write_bytes(good)
        flags = [f"-max_total_time={seconds}", "-max_len=2048", "-rss_limit_mb=2048", "-print_final_stats=1"]
        atheris.Setup([sys.argv[0], folder, *flags], atheris.instrument_func(target))
        atheris.Fuzz()


def instrument(module: str, atheris: object) -> None:
    """Let atheris see which lines of a module are reached, in its functions and in the methods of its classes."""
    found = importlib.import_module(module)
    for holder in (found, *(one for one in vars(found).values() if isinstance(one, type) and one.__module__ == module)):
        for name, function in list(vars(holder).items()):
            if callable(function) and hasattr(function, "__code__") and function.__module__ == module:
                setattr(holder, name, atheris.instrument_func(function))  # type: ignore[attr-defined]


def table(readers: dict[str, dict[str, float]]) -> str:
    rows = [["reader", "damaged", "refused", "s", "more KiB at the peak", "guided"]]
    for name, row in readers.items():
        if not name.endswith(", guided"):
            refused = f"{row['refused']:,}" if "refused" in row else ""
            more = readers.get(f"{name}, guided")
            guided = f"{more['tried']:,}" if more else ""
            numbers = [f"{row['tried']:,}", refused, f"{row['seconds']:g}", f"{row['more KiB at the peak']:,}"]
            rows.append([name, *numbers, guided])
    return markdown.table(rows)


def _row(counts: Counter[str], start: float, before: int) -> dict[str, float]:
    refused = sum(count for what, count in counts.items() if "refused" in what or "torn" in what)
    seconds = round(time.monotonic() - start, 1)
    tried = refused + counts["taken"]
    return {**counts, "tried": tried, "refused": refused, "seconds": seconds, "more KiB at the peak": _peak() - before}


def _peak() -> int:
    """The most memory that this process has held, in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main()
