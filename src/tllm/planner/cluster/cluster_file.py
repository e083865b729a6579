"""Reads a `Cluster` from TOML, strictly: an unknown or missing key is an error of one line.

[link]                          # between any two nodes, unless a group or a pair says otherwise
latency = "0.2 ms"
bandwidth = "1 Gbit/s"

[[node]]
name = "box"                    # with count = 3: box0, box1, box2
memory = "16 GB"
memory_bandwidth = "40 GB/s"
flops = { bfloat16 = "300 Gflop/s", float32 = "150 Gflop/s" }
efficiency = [[1, 0.1], [256, 0.7]]   # the share of these that so many rows reach; or one number

[[node]]
name = "pi"
profile = "pi.json"             # of `tllm profile`, in the place of speeds

[[group]]                       # nodes that reach each other otherwise: `nodes`, or each `size` nodes in a row
nodes = ["box0", "box1"]
latency = "5 us"
bandwidth = "10 Gbit/s"

[[pair]]
between = ["box2", "pi"]        # both ways, unless `back` is another link
latency = "20 ms"
bandwidth = "50 Mbit/s"

[execution]                     # how a step is done, for `tllm simulate`; left out, as tllm does it
collectives = "levels"          # inside nodes first, then between them
beside = { tp = 0.5 }           # share of these messages that travels while products are computed
slowdown = 1.1                  # of products meanwhile
touches = 5                     # of what a layer keeps, by elementwise operations, forward and backward
loss_touches = 8                # of logits, by the operations of the loss
scores = "softmax"              # attention's scores go through memory for softmax, with "dropout" for dropout too
early_stop = false              # a layer that is computed again makes the sum at its very end too
fused_accumulation = false      # gradients of a microbatch are added to the sum by an operation of its own
overlap_gradients = false       # their all-reduces begin when the last backward pass is done
waits_for_hops = true           # a stage computes nothing while hidden states travel to the next, or to it
gradient_passes = 7             # reads and writes of gradients between that and the optimizer

[failures]                      # for `tllm simulate`
between = "1000 d"              # of one node, on an average
save = "30 s"                   # that a save keeps the run waiting
restart = "10 min"
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from tllm.core.errors import UNREADABLE_TOML, ConfigError, toml_fault
from tllm.planner.cluster.device import Cluster, Device, LinkSpeed, Points, Tier
from tllm.planner.cluster.execution import Execution
from tllm.planner.cluster.failures import Failures
from tllm.planner.cluster.profile import read_profile
from tllm.planner.cluster.quantity import BYTES, BYTES_PER_SECOND, FLOPS, SECONDS, positive, quantity, shown
from tllm.spec.plan_text import MAX_RANKS

Number = float | str
Efficiency = float | tuple[tuple[float, float], ...]


class _Link(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    latency: Number
    bandwidth: Number


class _Node(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    count: int = 1
    devices: int = 1
    memory: Number | None = None
    memory_bandwidth: Number | None = None
    memory_efficiency: float = 1.0
    flops: dict[str, Number] = {}
    efficiency: Efficiency = 1.0
    operation: Number = 0.0
    disk: Number | None = None
    inside: _Link | None = None
    profile: str | None = None


UNSAID = _Node("")
SPEEDS = ("memory_bandwidth", "memory_efficiency", "flops", "efficiency", "operation")
"""What a profile says of a node."""


class _Group(_Link, frozen=True, forbid_unknown_fields=True):
    name: str = "group"
    nodes: tuple[str, ...] = ()
    size: int = 0


class _Pair(_Link, frozen=True, forbid_unknown_fields=True):
    between: tuple[str, str]
    back: _Link | None = None


class _Execution(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    collectives: Literal["flat", "levels"] = "flat"
    beside: dict[str, float] = {}
    slowdown: float = 1.0
    touches: float = 5.0
    loss_touches: float | None = None
    attention: float = 1.0
    again: float | None = None
    scores: Literal["fused", "softmax", "dropout"] = "fused"
    early_stop: bool = True
    fused_accumulation: bool = True
    overlap_gradients: bool = True
    waits_for_hops: bool = False
    gradient_passes: float = 3.0


class _Failures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    between: Number
    save: Number
    restart: Number


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    node: tuple[_Node, ...] = ()
    link: _Link | None = None
    group: tuple[_Group, ...] = ()
    pair: tuple[_Pair, ...] = ()
    execution: _Execution = _Execution()
    failures: _Failures | None = None


def read_cluster(path: Path) -> Cluster:
    """Read a cluster file. ConfigError, in one line, for what is wrong in it."""
    try:
        text = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"cannot read the cluster {path}: {why}", "give a TOML file") from error
    return parse_cluster(text, path)


def parse_cluster(text: str, path: Path) -> Cluster:
    """The cluster that a file's text describes."""
    try:
        return cluster_from(tomllib.loads(text), path)
    except UNREADABLE_TOML as error:
        raise ConfigError(f"{path} is not a cluster: {toml_fault(error)}", _hint(str(error))) from error


def cluster_from(raw: Mapping[str, object], path: Path) -> Cluster:
    """The same of what was read; profiles lie beside the file."""
    try:
        file = msgspec.convert(raw, type=_File)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path} is not a cluster: {error}", _hint(str(error))) from error
    devices = sum(_devices(node) for node in file.node)
    if devices > MAX_RANKS:
        given = f"{devices:,}" if devices < 10**40 else "10^40 or more"
        raise ConfigError(f"{path} has {given} devices, and at most {MAX_RANKS:,} are planned", "give fewer")
    nodes = [(name, node) for node in file.node for name in _names(node)]
    names = [name for name, _ in nodes]
    if not names:
        raise ConfigError(f"{path} has no node", "add a table [[node]] with name, memory and speeds")
    twice = next((name for name in names if names.count(name) > 1), None) if len(set(names)) < len(names) else None
    if twice is not None:
        raise ConfigError(f"{path} has two nodes {twice!r}", "give each node another name")
    kinds = {id(node): _device(node, path) for node in file.node}
    cluster = Cluster(
        names=tuple(names),
        devices=tuple(kinds[id(node)] for _, node in nodes for _ in range(node.devices)),
        node_of=tuple(index for index, (_, node) in enumerate(nodes) for _ in range(node.devices)),
        inside=tuple(_speed(node.inside, f"inside of {name}") if node.inside else None for name, node in nodes),
        default=_speed(file.link, "link") if file.link else None,
        tiers=_tiers(file.group, names),
        pairs=tuple(link for pair in file.pair for link in _both_directions(pair, names)),
        execution=_execution(file.execution),
        failures=_failures(file.failures) if file.failures else None,
    )
    cluster.check()
    return cluster


def _execution(given: _Execution) -> Execution:
    fields = msgspec.structs.asdict(given)
    return Execution(overlap=tuple(fields.pop("beside").items()), recompute_share=fields.pop("again"), **fields)


def _failures(given: _Failures) -> Failures:
    keys = ("between", "save", "restart")
    return Failures(*(quantity(getattr(given, key), SECONDS, f"{key} of [failures]") for key in keys))


def _devices(node: _Node) -> int:
    """How many devices a table of the file stands for."""
    for key in ("count", "devices"):
        if getattr(node, key) < 1:
            raise ConfigError(f"node {node.name!r} has {key} = {getattr(node, key)}", f"give {key} of 1 or more")
    return node.count * node.devices


def _names(node: _Node) -> list[str]:
    return [node.name] if node.count == 1 else [f"{node.name}{i}" for i in range(node.count)]


def _device(node: _Node, path: Path) -> Device:
    of = f"of node {node.name!r}"
    disk = positive(node.disk, BYTES_PER_SECOND, f"disk {of}") if node.disk is not None else 0.0
    memory = int(positive(node.memory, BYTES, f"memory {of}")) if node.memory is not None else None
    if node.profile is not None:
        if own := [key for key in SPEEDS if getattr(node, key) != getattr(UNSAID, key)]:
            raise ConfigError(
                f"node {node.name!r} has a profile and a speed of its own, {own[0]}", "leave out profile, or the speeds"
            )
        return _profiled(path.parent / node.profile, memory, disk)
    missing = [key for key in ("memory", "memory_bandwidth", "flops") if getattr(node, key) in (None, {})]
    if missing or memory is None or node.memory_bandwidth is None:
        raise ConfigError(
            f"node {node.name!r} lacks {', '.join(missing)}", "give them, or profile = FILE of `tllm profile`"
        )
    peaks = tuple((dtype, positive(speed, FLOPS, f"flops.{dtype} {of}")) for dtype, speed in node.flops.items())
    rates = tuple((dtype, tuple((rows, share * peak) for rows, share in _efficiency(node))) for dtype, peak in peaks)
    if not 0 < node.memory_efficiency <= 1:
        raise ConfigError(f"memory_efficiency {of} is {node.memory_efficiency}", "give a share above 0 and up to 1")
    read = node.memory_efficiency * positive(node.memory_bandwidth, BYTES_PER_SECOND, f"memory_bandwidth {of}")
    return Device(memory, rates, read, _not_negative(node.operation, f"operation {of}"), disk, peaks)


def _profiled(path: Path, memory: int | None, disk: float) -> Device:
    profile = read_profile(path)
    rates = []
    for dtype in profile.dtypes:
        rows = sorted({product.rows for product in profile.products if product.dtype == dtype})
        rates.append((dtype, tuple((float(count), profile.matrix_rate(dtype, count)) for count in rows)))
    memory = memory if memory is not None else profile.hardware.memory_bytes
    return Device(memory, tuple(rates), profile.memory.read, profile.operation, disk)


def _efficiency(node: _Node) -> Points:
    points = node.efficiency if isinstance(node.efficiency, tuple) else ((1.0, node.efficiency),)
    rows = [count for count, _ in points]
    if not points or rows != sorted(set(rows)) or rows[0] < 1 or not all(0 < share <= 1 for _, share in points):
        raise ConfigError(
            f"efficiency of node {node.name!r} is {node.efficiency}",
            "give a share above 0 and up to 1, or [rows, share] with more rows each",
        )
    return points


def _tiers(groups: Sequence[_Group], names: Sequence[str]) -> tuple[Tier, ...]:
    """Smallest groups first, so that the first that holds two nodes is the closest."""
    tiers: list[tuple[int, Tier]] = []
    for group in groups:
        if bool(group.nodes) == bool(group.size):
            raise ConfigError(f"group {group.name!r} needs nodes or size", "give one of them: names, or nodes in a row")
        if group.nodes:
            members = {_index(name, names, f"group {group.name!r}") for name in group.nodes}
            group_of = tuple(0 if index in members else -1 for index in range(len(names)))
            size = len(members)
        else:
            size = group.size
            if size < 0:
                raise ConfigError(f"group {group.name!r} has size = {size}", "give size of 1 or more")
            group_of = tuple(index // size for index in range(len(names)))
        link = _speed(group, f"group {group.name!r}")
        tiers.append((size, Tier(group.name, group_of, link)))
    return tuple(tier for _, tier in sorted(tiers, key=lambda sized: sized[0]))


def _both_directions(pair: _Pair, names: Sequence[str]) -> list[tuple[tuple[int, int], LinkSpeed]]:
    a, b = (_index(name, names, "pair") for name in pair.between)
    there = _speed(pair, f"pair {pair.between[0]}, {pair.between[1]}")
    back = _speed(pair.back, f"pair {pair.between[1]}, {pair.between[0]}") if pair.back else there
    return [((a, b), there), ((b, a), back)]


def _index(name: str, names: Sequence[str], where: str) -> int:
    if name not in names:
        known = ", ".join(names[:20])
        raise ConfigError(f"{where} names node {name!r}, which the cluster does not have", f"it has {known}")
    return names.index(name)


def _speed(link: _Link, of: str) -> LinkSpeed:
    latency = _not_negative(link.latency, f"latency of {of}", SECONDS)
    return LinkSpeed(latency, positive(link.bandwidth, BYTES_PER_SECOND, f"bandwidth of {of}"))


def _not_negative(given: Number, name: str, units: dict[str, float] = SECONDS) -> float:
    value = quantity(given, units, name)
    if not 0 <= value < math.inf:
        raise ConfigError(f"{name} is {shown(given)} and must be 0 or more", f"for example {name} = 0")
    return value


def _hint(error: str) -> str:
    if "unknown field" in error:
        tables = {"node": _Node, "group": _Group, "pair": _Pair, "link": _Link, "inside": _Link, "back": _Link}
        tables |= {"execution": _Execution, "failures": _Failures}
        where = next((kind for name, kind in reversed(tables.items()) if f".{name}" in error), _File)
        return f"known there: {', '.join(where.__struct_fields__)}"
    if "got `array`" in error or "got `object`" in error:
        return "[[node]], [[group]] and [[pair]] may come often, [link], [execution] and [failures] once"
    return "docs/guides/plan.md has an example"
