"""A million frames that are none: `python benchmarks/fuzz.py [--frames 1000000] [--seconds 60]`.

First damaged copies of good frames, hellos, messages and tokens go to all that reads bytes of others, in a process that
may not take much more memory than it has; then to the ports of a node and of a coordinator, over TLS. If `atheris` is
installed (the extra `fuzz`; it is no part of the locks), it then looks for such bytes by itself, by the lines that they
reach, for `--seconds` each.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import logging
import random
import resource
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from report import write

sys.path.append(str(Path(__file__).parents[1]))
from tests.support.fuzz import Target, close_loops, corpora, twisted
from tests.support.fuzz_ports import NodePort, control_port

MORE_BYTES = 512 << 20
"""Address space that reading may take beyond what is taken before; a lie about a length may claim 16 EiB."""
CONNECTIONS = 3000


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
    total = sum(row["tried"] for row in raw.values())
    notes = f"Seed {options.seed}. {'atheris is not installed.' if missing else ''}".strip()
    write("fuzz", f"{total:,} frames that are none", table(raw), raw, notes)


def damaged(target: Target, count: int, seed: int) -> dict[str, float]:
    """Damage good ones so often; an error, or memory that cannot be had, ends the run with the bytes that did it."""
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
    """What came of connections to both ports."""
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
    """What a process of its own has tried; it ends with an error where atheris found one."""
    words = [sys.executable, __file__, "--guided", name, "--seconds", str(seconds)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"atheris on {name}:\n{done.stdout[-2000:]}{done.stderr[-6000:]}")
    stats = dict(line.removeprefix("stat::").split(":") for line in done.stderr.splitlines() if line.startswith("stat"))
    return {
        "tried": int(stats["number_of_executed_units"]),
        "seconds": seconds,
        "more KiB at the peak": 1024 * int(stats["peak_rss_mb"]) - _peak(),
    }


def guided(name: str, seconds: int) -> None:
    """Let atheris find bytes for one reader, beginning with its good ones."""
    import tempfile

    import atheris

    target = next(one for one in corpora if one.__name__ == name)
    for module in ("frame", "handshake", "tcp"):
        instrument(f"tllm.comm.{module}", atheris)
    for module in ("tllm.cluster.channel", "tllm.cluster.join_token", "tllm.engine.batch", "tllm.engine.limits"):
        instrument(module, atheris)
    with tempfile.TemporaryDirectory() as folder:
        for number, good in enumerate(corpora[target]):
            Path(folder, str(number)).write_bytes(good)
        flags = [f"-max_total_time={seconds}", "-max_len=2048", "-rss_limit_mb=2048", "-print_final_stats=1"]
        atheris.Setup([sys.argv[0], folder, *flags], atheris.instrument_func(target))
        atheris.Fuzz()


def instrument(module: str, atheris: object) -> None:
    """Let atheris see which lines of a module are reached, in its functions and in its classes' methods."""
    found = sys.modules[module]
    for holder in (found, *(one for one in vars(found).values() if isinstance(one, type) and one.__module__ == module)):
        for name, function in list(vars(holder).items()):
            if callable(function) and hasattr(function, "__code__") and function.__module__ == module:
                setattr(holder, name, atheris.instrument_func(function))  # type: ignore[attr-defined]


def table(raw: dict[str, dict[str, float]]) -> str:
    lines = ["| what reads | tried | refused | s | more KiB at the peak |", "|---|--:|--:|--:|--:|"]
    for name, row in raw.items():
        refused = f"{row['refused']:,}" if "refused" in row else ""
        lines.append(f"| {name} | {row['tried']:,} | {refused} | {row['seconds']} | {row['more KiB at the peak']:,} |")
    return "\n".join(lines)


def _row(counts: Counter[str], start: float, before: int) -> dict[str, float]:
    refused = sum(count for what, count in counts.items() if "refused" in what or "torn" in what)
    seconds = round(time.monotonic() - start, 1)
    tried = refused + counts["taken"]
    return {**counts, "tried": tried, "refused": refused, "seconds": seconds, "more KiB at the peak": _peak() - before}


def _peak() -> int:
    """KiB that this process has held at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main()
