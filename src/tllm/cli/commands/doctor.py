"""Look for what is wrong with this machine, or with several and the network between them, and say what to do.

Alone it looks at this machine. With --nodes N this machine is one of N: it prints the line that each other one runs,
and then measures every node and every way between two. Exit code 0: nothing is wrong; 1: something is.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import TYPE_CHECKING

import msgspec

from tllm.cli.arguments.node_sources import TOKEN_VARIABLE, given_token, join_text
from tllm.cli.arguments.options import add_cluster_address, add_local
from tllm.cli.arguments.parser import address, whole
from tllm.cli.commands.profile import products_table
from tllm.cli.display.logs import start_log
from tllm.cli.display.machine_topology import topologies_text
from tllm.cli.display.progress import progress
from tllm.cli.display.tables import indented_json, table, terminal_width, wrapped
from tllm.core.errors import ConfigError
from tllm.core.memory import amount
from tllm.node.coordinator.cluster_options import LOOPBACK
from tllm.node.doctor.machine_rules import diagnose
from tllm.node.doctor.network_rules import MEGABIT
from tllm.node.machine.machine_facts import ClusterProbe, Diagnosis, NetworkPath, NodeProbe

if TYPE_CHECKING:
    from tllm.cluster.connection import Address


WRONG = 1
HERE = "this machine"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "coordinator", nargs="?", type=address, metavar="HOST:PORT", help="be examined by the doctor that listens there"
    )
    parser.add_argument(
        "--token", metavar="TOKEN", help=f"with HOST:PORT (- reads stdin; or the variable {TOKEN_VARIABLE})"
    )
    count = parser.add_mutually_exclusive_group()
    count.add_argument("--nodes", type=whole, metavar="N", help="examine N machines, this one included")
    add_local(count)
    add_cluster_address(parser)
    parser.add_argument("--seconds", type=whole, default=6, metavar="S", help="each node measures itself (%(default)s)")
    parser.add_argument("--threads", type=whole, default=0, metavar="N", help="to compute with (all cores)")
    parser.add_argument("--json", action="store_true", help="print what was found as JSON")
    parser.add_argument("--quiet", action="store_true", help="only warnings and errors on stderr")


def run(args: argparse.Namespace) -> int:
    if args.coordinator is not None:
        return be_examined(args)
    start_log(args.debug, True)
    is_cluster = args.nodes or args.local
    probe = asyncio.run(_probe_cluster(args)) if is_cluster else probe_this_machine(args.seconds, args.threads)
    diagnoses = diagnose(probe)
    print(as_json(probe, diagnoses) if args.json else as_text(probe, diagnoses))
    return WRONG if any(diagnosis.wrong for diagnosis in diagnoses) else 0


def be_examined(args: argparse.Namespace) -> int:
    """Let the doctor on another machine examine this one, until it has ended."""
    if args.nodes or args.local:
        raise ConfigError(
            "HOST:PORT is of another machine's doctor, and --nodes and --local begin one here", "give one"
        )
    token = given_token(args)
    if not token:
        raise ConfigError("there is no join token", "copy the whole line that the doctor printed")
    start_log(args.debug, args.quiet)
    from tllm.node.worker import WorkerSettings, work

    work(WorkerSettings(host=args.coordinator[0], port=args.coordinator[1], token=token, threads=args.threads))
    return 0


def probe_this_machine(seconds: float, threads: int) -> ClusterProbe:
    """Measure this machine by itself."""
    import torch

    from tllm.node.roles.doctor_rank import examine

    if threads:
        torch.set_num_threads(threads)
    return ClusterProbe((examine(HERE, "", seconds),))


async def _probe_cluster(args: argparse.Namespace) -> ClusterProbe:
    from tllm.node.coordinator.cluster_options import ClusterOptions
    from tllm.node.doctor.doctor import open_doctor
    from tllm.node.sources.node_source import JoinLine

    joining = args.nodes - 1 if args.nodes else 0
    where: Address = (args.cluster_host, args.cluster_port) if joining else LOOPBACK
    opened = open_doctor(
        args.nodes or args.local,
        ClusterOptions(
            local=1 if args.nodes else args.local,
            threads=args.threads,
            numa_binding="none",  # so that each worker sees the whole machine
            address=where,
            source=JoinLine(print_join_line),
        ),
        measure_seconds=args.seconds,
    )
    async with opened as doctor:
        with progress(args.quiet) as on_progress:
            return await doctor.probe(on_progress)


def print_join_line(joining: int, address: str, token: str) -> None:
    """Print the line to run on the other machines; on stderr, as stdout is for the results."""
    print(join_text(joining, address, token, "doctor"), file=sys.stderr, flush=True)


def as_json(probe: ClusterProbe, diagnoses: list[Diagnosis]) -> str:
    """All that was measured, and the diagnoses, as JSON."""
    report = {**msgspec.to_builtins(probe), "findings": [vars(diagnosis) for diagnosis in diagnoses]}
    return indented_json(report)


def as_text(probe: ClusterProbe, diagnoses: list[Diagnosis]) -> str:
    """Tables, what each machine is made of, and below them the diagnoses in words."""
    parts = [nodes_table(probe.nodes), topologies_text(probe.nodes)]
    if len(probe.nodes) == 1:
        parts.append(products_table(probe.nodes[0].products))
    if probe.ways:
        parts.append(paths_table(probe.ways))
    for title, wrong in (("wrong:", True), ("advice:", False)):
        lines = [f"  {diagnosis}" for diagnosis in diagnoses if diagnosis.wrong is wrong]
        if lines:
            parts.append(wrapped("\n".join([title, *lines]), terminal_width()))
    if not any(diagnosis.wrong for diagnosis in diagnoses):
        parts.append("nothing is wrong")
    return "\n\n".join(parts)


def nodes_table(nodes: tuple[NodeProbe, ...]) -> str:
    """A row for each node."""
    rows = [
        ["node", "host", "cores", "threads", "memory", "free", "GFLOP/s", "reads", "operation", "torch", "processor"]
    ]
    for node in nodes:
        best = max((product.flops_per_second for product in node.products), default=0.0)
        rows.append(
            [
                node.node,
                node.host_name,
                str(node.machine.cores),
                str(node.torch.threads),
                amount(node.machine.memory_bytes),
                amount(node.machine.memory_free_bytes),
                f"{best / 1e9:.1f}",
                f"{node.memory.read / 1e9:.1f} GB/s",
                f"{node.operation * 1e6:.2f} µs",
                f"{node.torch.version} {node.torch.capability}",
                node.machine.processor,
            ]
        )
    return table(rows)


def paths_table(paths: tuple[NetworkPath, ...]) -> str:
    """A row for each directed network path."""
    rows = [["from", "to", "round trip", "jitter", "bandwidth", "resent", "packet", "clock"]]
    for path in paths:
        measured = path.measured
        if measured is None:
            rows.append([path.source, path.target, "no way", "", "", "", "", ""])
            continue
        rows.append(
            [
                path.source,
                path.target,
                f"{measured.round_trip * 1e3:.3f} ms",
                f"{measured.jitter * 1e3:.3f} ms",
                f"{measured.bandwidth / MEGABIT:.0f} Mbit/s",
                "" if measured.resent is None else f"{measured.resent:.2%}",
                "" if measured.mtu is None else str(measured.mtu),
                f"{measured.offset * 1e3:+.1f} ms",
            ]
        )
    return table(rows)
