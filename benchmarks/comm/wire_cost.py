"""What TLS, deadlines and health checks cost together: `python -m benchmarks.comm.wire_cost [SIZE …]` (as root).

Compares the cluster as users have it (`guarded`: TLS, deadlines, heartbeats, a coordinator that every token goes to)
with the same ranks over plain sockets without deadlines and without a coordinator (`bare`), which exist in this file
alone. Two processes of one thread each, with tensor parallelism and as a pipeline, on loopback and between two network
namespaces joined at 1 Gbit/s (these need root). Both are up at once and take turns at the same greedy request. Tokens
per second count from the first token to the last; the tokens must be the same.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import msgspec
import torch

from benchmarks.models.random_llama import SHAPES, model_folder
from benchmarks.processes.python_module import environment, module_command
from benchmarks.report import markdown
from benchmarks.report.markdown import percent
from benchmarks.report.results import Page, write
from tests.support.cluster.hosts import Hosts, why_not
from tllm.cluster.certificates import Identity
from tllm.cluster.messages import Assign, RankAddress
from tllm.cluster.settings import Wiring
from tllm.comm.links.connect import LinkOptions, Listener, open_links
from tllm.comm.links.link import Link
from tllm.engine.driver import CloseRing
from tllm.engine.schedule.limits import EngineConfig
from tllm.node.coordinator.cluster_options import ClusterOptions
from tllm.node.roles import serving_rank
from tllm.node.roles.control import Control
from tllm.node.roles.serving_rank import ServingRank
from tllm.node.serve.open_cluster import open_cluster, serving_workload
from tllm.node.sources.node_source import JoinLine
from tllm.node.weights.model_folder import ModelFolder
from tllm.recipes.bench.processes import LOOPBACK, Seat, free_ports, seats_at
from tllm.spec.plan import Wire
from tllm.spec.request import Output, Request, SamplingParams
from tllm.weights.file_chunks import FileChunk

PLANS = ("tp=2", "pp=2")
GUARDED, BARE = "guarded", "bare"
PORT = 21000
PROMPT = tuple(range(3, 35))
CONFIG = EngineConfig(cache_tokens=1024, max_model_len=512, max_num_seqs=4, wiring=Wiring(intra_host="links"))
NOBODY = Identity("bare", b"", b"", b"")
Process = subprocess.Popen[str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sizes", nargs="*", default=["0.3b"], metavar="SIZE", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--tokens", type=int, default=128, help="of a turn (%(default)s)")
    parser.add_argument("--turns", type=int, default=9, help="of each (%(default)s)")
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir(), "tllm-models"))
    parser.add_argument("--be", choices=(GUARDED, BARE), help=argparse.SUPPRESS)
    for name in ("--folder", "--seat"):
        parser.add_argument(name, type=Path, help=argparse.SUPPRESS)
    for name in ("--plan", "--host"):
        parser.add_argument(name, default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.be:
        torch.set_num_threads(1)
        be_guarded(options) if options.be == GUARDED else be_bare(options)
        return
    missing = why_not()
    found: list[dict[str, Any]] = []
    for size in options.sizes:
        folder = model_folder(size, options.models)
        for plan in PLANS:
            found.append({"size": size, "plan": plan, "link": "loopback", **compare(folder, plan, options)})
            if not missing:
                with Hosts(2, rate="1gbit") as hosts:
                    found.append(
                        {"size": size, "plan": plan, "link": "1 Gbit/s", **compare(folder, plan, options, hosts)}
                    )
    raw = {"runs": found}
    write(page(raw, missing), raw)


PURPOSE = """What users pay for TLS, deadlines, heartbeats and a coordinator that every token goes to, in tokens per
second of decoding. The same two ranks also run over plain sockets without any of these (`bare`), which no user can ask
for. bfloat16, random weights, one thread a rank, one greedy request at a time."""
READING = """Both are up at once and take turns. `cost`: by how much guarded tokens/s are below bare ones in the same
turn; the median of the turns, and the least and the most, which show the noise of this machine. The tokens are the
same. Costs are between {least} and {most}."""
LIMITS = """- Two ranks and the coordinator share two cores, so encryption has no core of its own.
- Only decoding of one request: no training, no large messages."""


def page(raw: dict[str, Any], missing: str = "") -> Page:
    """The page of raw figures: tokens/s of every turn of each of the `runs`."""
    costs = [statistics.median(costs_of(one)) for one in raw["runs"]]
    reading = READING.format(least=percent(min(costs)), most=percent(max(costs)))
    title = "What TLS, deadlines and health checks cost together"
    return Page("comm", "wire-cost", title, PURPOSE, table(raw["runs"]), f"{reading} {missing}".strip(), LIMITS)


def costs_of(one: dict[str, Any]) -> list[float]:
    """The cost in each turn, the least first."""
    return sorted(1 - g / b for g, b in zip(one[GUARDED], one[BARE], strict=True))


def table(found: list[dict[str, Any]]) -> str:
    rows = [["model", "plan", "link", "bare, tok/s", "guarded, tok/s", "cost", "least and most"]]
    for one in found:
        bare, guarded = (statistics.median(one[way]) for way in (BARE, GUARDED))
        costs = costs_of(one)
        spread = f"{percent(costs[0])}, {percent(costs[-1])}"
        speeds = [f"{bare:.1f}", f"{guarded:.1f}", percent(statistics.median(costs))]
        rows.append([one["size"], one["plan"], one["link"], *speeds, spread])
    return markdown.table(rows, left=3)


def compare(folder: Path, plan: str, options: argparse.Namespace, hosts: Hosts | None = None) -> dict[str, list[float]]:
    """Tokens/s of each turn, guarded and bare."""
    with ExitStack() as stack:
        ways = {
            GUARDED: stack.enter_context(guarded(folder, plan, hosts)),
            BARE: stack.enter_context(bare(folder, plan, hosts)),
        }
        said = {way: ask(process, options.tokens) for way, process in ways.items()}  # warms up, and is not counted
        assert said[GUARDED]["ids"] == said[BARE]["ids"], "both ways must have the same tokens"
        rates: dict[str, list[float]] = {way: [] for way in ways}
        for turn in range(options.turns):
            for way in sorted(ways, reverse=bool(turn % 2)):
                rates[way].append(ask(ways[way], options.tokens)["rate"])
        return rates


@contextmanager
def started(words: list[str], hosts: Hosts | None, host: int) -> Iterator[Process]:
    """A process on one of the hosts, or here; it ends when its stdin does."""
    command = words if hosts is None else hosts.command(host, *words)
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(OMP_NUM_THREADS="1")
    ) as process:
        try:
            yield process
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def role(be: str, folder: Path, plan: str, *more: str) -> list[str]:
    return module_command("comm.wire_cost", "--be", be, "--folder", str(folder), "--plan", plan, *more)


def heard(process: Process) -> Any:
    """The next line of a process's output, decoded from JSON."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"{process.args!r} ended without a word"
    return json.loads(line)


def ask(process: Process, tokens: int) -> Any:
    """One request of so many tokens: their `ids`, and the `rate` at which they came."""
    assert process.stdin is not None
    print(tokens, file=process.stdin, flush=True)
    return heard(process)


@contextmanager
def guarded(folder: Path, plan: str, hosts: Hosts | None) -> Iterator[Process]:
    """The coordinator, when its workers are up: both beside it, or one on the other host."""
    where = () if hosts is None else ("--host", hosts.addresses[0])
    with ExitStack() as stack:
        process = stack.enter_context(started(role(GUARDED, folder, plan, *where), hosts, 0))
        said = heard(process)
        if said != "ready":
            words = [sys.executable, "-m", "tllm.cli", "join", said["address"], "--token", said["token"], "--quiet"]
            stack.enter_context(started([*words, "--threads", "1"], hosts, 1))
            said = heard(process)
        assert said == "ready" and process.stdin is not None
        yield process
        process.stdin.close()  # it ends, and the worker that joined it with it


def be_guarded(options: argparse.Namespace) -> None:
    asyncio.run(_be_guarded(options))


async def _be_guarded(options: argparse.Namespace) -> None:
    def invite(count: int, address: str, token: str) -> None:
        print(json.dumps({"address": address, "token": token}), flush=True)

    nodes = ClusterOptions(threads=1)
    if options.host:
        nodes = ClusterOptions(threads=1, local=1, address=(options.host, 0), source=JoinLine(invite))
    async with open_cluster(options.folder, options.plan, CONFIG, nodes) as it:
        print(json.dumps("ready"), flush=True)
        number = 0
        while line := await asyncio.to_thread(sys.stdin.readline):
            number += 1
            came = [(time.perf_counter(), output) async for output in it.submit(request(number, int(line)))]
            print(json.dumps(figures(came)), flush=True)


@contextmanager
def bare(folder: Path, plan: str, hosts: Hosts | None) -> Iterator[Process]:
    """Rank 0 of two, when both are up."""
    places, ports = (hosts.addresses, [PORT, PORT]) if hosts else ([LOOPBACK] * 2, free_ports(2))
    with tempfile.TemporaryDirectory() as folder_name, ExitStack() as stack:
        processes = []
        for seat in reversed(seats_at(places, ports)):  # so that rank 0 is ended first, and ends the other
            file = Path(folder_name, f"seat-{seat.rank}.json")
            file.write_bytes(msgspec.json.encode(seat))
            words = role(BARE, folder, plan, "--seat", str(file))
            processes.append(stack.enter_context(started(words, hosts, seat.rank)))
        assert [heard(process) for process in processes] == ["ready", "ready"]
        yield processes[-1]


class Bare:
    """All that a serving rank calls of its node's `Control`: it puts outputs into a queue of this process."""

    def __init__(self) -> None:
        self.outputs: queue.SimpleQueue[tuple[float, Output]] = queue.SimpleQueue()

    def deliver(self, epoch: int, outputs: Iterable[Output]) -> None:
        for output in outputs:
            self.outputs.put((time.perf_counter(), output))


class Here:
    """A `Fetch` for a node that has all files: nothing is ever fetched."""

    def __call__(self, file: str, start: int, stop: int) -> bytes:
        raise AssertionError(f"bytes {start} to {stop} of {file} are here")

    def expect(self, chunks: Sequence[FileChunk], sizes: Mapping[str, int]) -> None:
        assert not chunks, "all are here"

    def chunk(self, chunk: FileChunk) -> tuple[bytes, str]:
        raise AssertionError(f"{chunk} is here")

    def found(self, folder: Path) -> None: ...


def plain_wires(
    assign: Assign,
    wires: Iterable[Wire],
    identity: Identity,
    listener: Listener,
    link_seconds: float,
    wiring: Wiring,
    connect_seconds: float = 60.0,
) -> dict[Wire, Link]:
    """As `node.roles.role.connect_wires`, but without TLS and without a deadline."""
    addresses = {rank: (place.host, place.port) for rank, place in enumerate(assign.places)}
    plain = LinkOptions(deadline=connect_seconds)
    links = open_links(assign.rank, addresses, listener, wires, cluster="bare", epoch=1, options=plain)
    for link in links.values():
        link.set_deadline(math.inf)
    return links


def be_bare(options: argparse.Namespace) -> None:
    seat = msgspec.json.decode(options.seat.read_bytes(), type=Seat)
    work = serving_workload(options.folder, options.plan, CONFIG, ClusterOptions(link_seconds=60), threads=1)
    places = tuple(RankAddress(f"bare-{rank}", *seat.address(rank, 0)) for rank in range(seat.size))
    assign = Assign(
        cluster="bare",
        epoch=1,
        rank=seat.rank,
        plan=work.plan,
        places=places,
        config=work.config,
        settings=work.settings,
        folder=str(options.folder.resolve()),
        files=ModelFolder(options.folder).files,
    )
    listener = Listener(*seat.address(seat.rank, 0))
    control = Bare()
    with patch.object(serving_rank, "connect_wires", plain_wires):  # it opens its links when it is made
        rank = ServingRank(assign, NOBODY, listener, Here())
    rank.load(lambda done, total: None)
    print(json.dumps("ready"), flush=True)
    if seat.rank:
        rank.run(cast(Control, control))
    else:
        _drive(rank, control)
    rank.close()
    listener.close()


def _drive(rank: ServingRank, control: Bare) -> None:
    """Run a request for each line of stdin, until it ends."""
    running = threading.Thread(target=rank.run, args=(control,))
    running.start()
    for number, line in enumerate(sys.stdin):
        rank.command(request(number, int(line)))
        came = [control.outputs.get()]
        while came[-1][1].finish_reason is None:
            came.append(control.outputs.get())
        print(json.dumps(figures(came)), flush=True)
    rank.command(CloseRing())
    running.join()


def request(number: int, tokens: int) -> Request:
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, seed=0)
    return Request(id=f"turn-{number}", prompt_ids=PROMPT, params=params)


def figures(came: list[tuple[float, Output]]) -> dict[str, Any]:
    """Of outputs and when they came; one before the first token tells how much of the prompt is computed."""
    times = [at for at, output in came if output.token_ids]
    ids = [token for _, output in came for token in output.token_ids]
    return {"rate": (len(times) - 1) / (times[-1] - times[0]), "ids": ids}


if __name__ == "__main__":
    main()
