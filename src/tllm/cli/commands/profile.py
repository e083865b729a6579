"""Measure this machine: products, memory, one operation, one link with TLS, and which ways to compute are the fastest.

With --device all but the link is of that device, and no ways are compared, as it has one for each product.

Prints tables; --out writes the file that plans are made from. Let the machine be idle meanwhile. It takes about a
minute. Which ways are the fastest is kept for commands that serve and train, and measured only once.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import os
import sys
from typing import TYPE_CHECKING

import msgspec

from tllm import __version__
from tllm.cli.arguments.options import add_device
from tllm.cli.arguments.parser import new_file, whole
from tllm.cli.display.logs import start_log
from tllm.cli.display.tables import table
from tllm.core.errors import counted
from tllm.core.memory import amount
from tllm.node.doctor.machine_rules import said_of_load
from tllm.planner.cluster.profile import Hardware, LoopbackWire, ProductSpeed, Profile, ShapeChoice

if TYPE_CHECKING:
    import torch

    from tllm.node.machine.machine_facts import NodeProbe


COMPUTING = 0.7
"""The part of the time for measuring computation; in the rest two processes start and measure a link between them."""

WAY_SECONDS = 3.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=new_file, metavar="FILE", help="write the profile here, as JSON")
    parser.add_argument("--seconds", type=whole, default=60, metavar="S", help="at most about so long (%(default)s)")
    parser.add_argument("--threads", type=whole, metavar="N", help="to compute with (all cores)")
    add_device(parser)
    parser.add_argument(
        "--measure-again", action="store_true", help="which ways are the fastest too, though it is known from before"
    )
    parser.add_argument("--json", action="store_true", help="print the profile instead of a table")
    parser.add_argument("--quiet", action="store_true", help="only warnings and errors on stderr")


def run(args: argparse.Namespace) -> int:
    start_log(args.debug, True)
    if not args.quiet:
        print(f"measuring for up to {args.seconds} s; let this machine be idle", file=sys.stderr)
    if args.measure_again:
        from tllm.kernels.autotune import VARIABLE

        os.environ[VARIABLE] = "again"
    profile, kept = measured(args.seconds, args.threads, args.device)
    if args.out is not None:
        profile.save(args.out)
    print(profile.text() if args.json else as_text(profile, kept), end="")
    return 0


def measured(seconds: float, threads: int | None, asked: str = "cpu") -> tuple[Profile, str]:
    """Measure this machine in about `seconds`, on the device that is asked for. With where choices are kept."""
    import torch

    from tllm.devices.choose import CPU, choose_device, compute_on
    from tllm.node.machine.autotuned_shapes import autotuned_shapes, kept_in
    from tllm.node.roles.doctor_rank import examine

    device = choose_device(asked)
    compute_on(device)
    if threads:
        torch.set_num_threads(threads)
    wire = asyncio.run(_wire(seconds))
    probe = examine("here", "", COMPUTING * seconds, device)
    if device == CPU:
        return profile_of(probe, wire, autotuned_shapes()), kept_in()
    return of_device(profile_of(probe, wire), device), ""


def of_device(profile: Profile, device: torch.device) -> Profile:
    """The profile with the name and the memory of the device that was measured."""
    from tllm.devices.memory import available_memory, device_name, total_memory

    memory = dict(memory_bytes=total_memory(device), memory_free_bytes=available_memory(device))
    hardware = msgspec.structs.replace(profile.hardware, device=device_name(device), **memory)
    return msgspec.structs.replace(profile, hardware=hardware)


def profile_of(probe: NodeProbe, wire: LoopbackWire | None, choices: tuple[ShapeChoice, ...] = ()) -> Profile:
    """What was measured of a node, as a profile."""
    machine = probe.machine
    return Profile(
        date=datetime.datetime.fromtimestamp(machine.clock, datetime.UTC).isoformat(timespec="seconds"),
        tllm=__version__,
        torch=probe.torch.version,
        hardware=Hardware(
            processor=machine.processor,
            instructions=machine.instructions,
            cores=machine.cores,
            threads=probe.torch.threads,
            load=machine.load,
            memory_bytes=machine.memory_bytes,
            memory_free_bytes=machine.memory_free_bytes,
            system=machine.system,
        ),
        products=probe.products,
        memory=probe.memory,
        operation=probe.operation,
        wire=wire,
        choices=choices,
    )


def as_text(profile: Profile, kept: str = "") -> str:
    """The profile for people. `kept`: where choices are kept, in words."""
    hardware, memory, wire = profile.hardware, profile.memory, profile.wire
    lines = [
        f"{hardware.processor}: {counted(hardware.cores, 'core')}, {counted(hardware.threads, 'thread')} used",
        *([f"measured on {hardware.device}"] if hardware.device else []),
        f"instructions: {' '.join(hardware.instructions) or 'none that we look for'}",
        f"memory: {amount(hardware.memory_bytes)}, {amount(hardware.memory_free_bytes)} free; "
        f"read at {memory.read / 1e9:.1f} GB/s, copied at {memory.copy / 1e9:.1f} GB/s",
        f"one operation: {profile.operation * 1e6:.2f} µs",
    ]
    if hardware.load > hardware.cores / 2:
        lines.append(f"{said_of_load(hardware.load, hardware.cores)}: these speeds are too low")
    if wire is not None:
        lines.append(
            f"link inside this machine, TLS on: {wire.latency * 1e6:.0f} µs one way, {wire.bandwidth / 1e6:.0f} MB/s"
        )
    tables = [products_table(profile.products), "", *reading_table(profile), *choices_tables(profile.choices)]
    return "\n".join([*lines, "", *tables, *([kept, ""] if kept else [])])


WEIGHT_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 8.5 / 8, "int4": 4.5 / 8}
"""Of one weight, scales included."""


def reading_table(profile: Profile) -> list[str]:
    """Which product was the fastest for a batch of one row, and how near it comes to reading weights from memory."""
    rows = [["one row", "width", "fastest product", "GB/s of weights", "of memory's"]]
    for one in profile.products:
        if one.rows == 1 and one.dtype in WEIGHT_BYTES and one.product:
            read = one.flops_per_second / 2 * WEIGHT_BYTES[one.dtype]
            share = f"{100 * read / profile.memory.read:.0f} %"
            rows.append([one.dtype, str(one.width), one.product, f"{read / 1e9:.1f}", share])
    return [table(rows), ""] if len(rows) > 1 else []


def choices_tables(choices: tuple[ShapeChoice, ...]) -> list[str]:
    """A table for each area, of which way is taken for each shape and what every way took at its best."""
    lines = []
    for area in dict.fromkeys(choice.what for choice in choices):
        of_area = [choice for choice in choices if choice.what == area]
        ways = list(dict.fromkeys(way for choice in of_area for way in choice.seconds))
        rows = [[area, "taken", *(f"{way}, ms" for way in ways)]]
        for choice in of_area:
            times = [choice.seconds.get(way) for way in ways]
            rows.append([choice.shape, choice.taken, *("" if t is None else f"{t * 1e3:.2f}" for t in times)])
        lines += [table(rows), ""]
    return lines


def products_table(products: tuple[ProductSpeed, ...]) -> str:
    """GFLOP/s by dtype and width, a column for each number of rows."""
    columns = sorted({product.rows for product in products})
    rates = {(product.dtype, product.width, product.rows): product.flops_per_second for product in products}
    rows = [["GFLOP/s", "width", *(counted(count, "row") for count in columns)]]
    for dtype, width in dict.fromkeys((product.dtype, product.width) for product in products):
        cells = [rates.get((dtype, width, count)) for count in columns]
        rows.append([dtype, str(width), *("" if rate is None else f"{rate / 1e9:.1f}" for rate in cells)])
    return table(rows)


async def _wire(seconds: float) -> LoopbackWire | None:
    """Measure a link between two processes of this machine; None where it could not be."""
    from tllm.node.doctor.doctor import open_doctor

    async with open_doctor(2, way_seconds=min(WAY_SECONDS, seconds / 10)) as doctor:
        path = await doctor.probe_path(0, 1)
    if path.measured is None:
        return None
    return LoopbackWire(path.measured.round_trip / 2, path.measured.jitter, path.measured.bandwidth)
