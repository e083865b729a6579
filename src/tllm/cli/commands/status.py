"""Show a running cluster: its nodes, which layers each holds, memory, bytes read, links."""

from __future__ import annotations

import argparse
import json
from typing import Any

from tllm.cli.arguments.options import add_api_key, api_key
from tllm.cli.arguments.parser import port
from tllm.cli.arguments.running_cluster import fetch
from tllm.cli.display.tables import amount, span, table

TITLES = [
    "rank",
    "node",
    "phase",
    "stage",
    "layers",
    "share",
    "weights",
    "cache",
    "memory",
    "peak",
    "given",
    "read",
    "address",
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", default="127.0.0.1", metavar="HOST", help="of the server (%(default)s)")
    parser.add_argument("--port", type=port, default=8000, metavar="PORT", help="of the server (%(default)s)")
    add_api_key(parser)
    parser.add_argument("--json", action="store_true", help="print what the server says as JSON")


def run(args: argparse.Namespace) -> int:
    found = fetch(args.host, args.port, api_key(args))
    print(json.dumps(found, indent=2) if args.json else as_text(found))
    return 0


def as_text(found: dict[str, Any]) -> str:
    """The report for people."""
    state = "ready" if found["ready"] else "not ready"
    lines = [f"{found['model']}: {state}, plan {found['plan'] or 'none yet'}"]
    if found["losses"] or not found["ready"]:
        lines.append(f"{found['doing']}; {found['losses']} nodes lost so far")
    if found["plan"] not in ("", found["wanted"]):
        lines.append(f"the whole plan is {found['wanted']}")
    if found["fault"]:
        lines.append(f"fault: {found['fault']}")
    elif found["trouble"]:
        lines.append(f"trouble: {found['trouble']}")
    if found.get("advice"):
        lines.append(f"advice: {found['advice']}")
    lines += ["", nodes_table(found)]
    lines += [f"{node['node']} is lost: {node['reason']}" for node in found["nodes"] if node["reason"]]
    lines += ["", links_line(found), *network_lines(found), weights_line(found)]
    lines += [f"{node} gave wrong bytes of weights, and is asked for none" for node in found["weights"]["liars"]]
    return "\n".join(lines).rstrip()


def nodes_table(found: dict[str, Any]) -> str:
    """A row for each node, by rank; those without a rank come last."""
    nodes = sorted(found["nodes"], key=lambda node: (node["rank"] is None, node["rank"]))
    return table([TITLES, *(_row(node) for node in nodes)])


def links_line(found: dict[str, Any]) -> str:
    """What has crossed each wire so far, as its ends last said; "" where there is none."""
    moved: dict[str, int] = {}
    for node in found["nodes"]:
        for wire, count in node["links"].items():
            moved[wire] = max(count, moved.get(wire, 0))
    wires = ", ".join(f"{wire} {amount(count)}" for wire, count in sorted(moved.items()))
    return f"links: {wires}" if wires else ""


def network_lines(found: dict[str, Any]) -> list[str]:
    """What the links between machines measured, and how sums go over them; once for the ranks that say the same."""
    said = dict.fromkeys(node.get("network", "") for node in found["nodes"])
    return [f"network: {words}" for words in said if words]


def weights_line(found: dict[str, Any]) -> str:
    """Which node took how many bytes of weights from whom; "" where all had the model."""
    ways = ", ".join(
        f"{way['node']} {amount(way['bytes'])} from {way['source']}" for way in found["weights"]["brought"]
    )
    return f"weights passed on: {ways}" if ways else ""


def _row(node: dict[str, Any]) -> list[str]:
    loading = node["loading"]
    phase = node["phase"]
    if phase == "loading" and loading["total"]:
        phase += f" {100 * loading['done'] // loading['total']} %"
    placed = node["rank"] is not None
    return [
        str(node["rank"]) if placed else "",
        node["node"],
        phase,
        str(node["stage"]) if placed else "",
        span(*node["layers"]) if placed else "",
        f"{100 * node['share']:.0f} %" if placed else "",
        amount(node["parameter_bytes"]),
        amount(node["cache_bytes"]),
        amount(node["rss_bytes"]),
        amount(node["peak_bytes"]),
        amount(node["memory_bytes"]) if node["memory_given"] else "",
        amount(node["bytes_read"]),
        node["address"],
    ]
