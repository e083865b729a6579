"""Show a running cluster: its nodes, which layers each holds, memory, bytes read, links."""

from __future__ import annotations

import argparse
import json
from typing import Any

from tllm.cli.arguments.running_cluster import add_running_cluster, fetch
from tllm.cli.display.tables import span, table
from tllm.core.errors import counted
from tllm.core.memory import amount
from tllm.server.live.samples import bytes_of_links

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
    add_running_cluster(parser)
    parser.add_argument("--json", action="store_true", help="print what the server says as JSON")


def run(args: argparse.Namespace) -> int:
    status = fetch(args)
    print(json.dumps(status, indent=2) if args.json else as_text(status))
    return 0


def as_text(status: dict[str, Any]) -> str:
    """The report for people."""
    state = "ready" if status["ready"] else "not ready"
    lines = [f"{status['model']}: {state}, plan {status['plan'] or 'none yet'}"]
    if status["losses"] or not status["ready"]:
        lost = counted(status["losses"], "node")
        lines.append(f"{status['doing']}; {lost} lost so far")
    if status["plan"] not in ("", status["wanted"]):
        lines.append(f"the whole plan is {status['wanted']}")
    if status["fault"]:
        lines.append(f"fault: {status['fault']}")
    elif status["trouble"]:
        lines.append(f"trouble: {status['trouble']}")
    if status.get("advice"):
        lines.append(f"advice: {status['advice']}")
    lines += ["", nodes_table(status)]
    lines += [f"{node['node']} {_what(node['phase'])}: {node['reason']}" for node in status["nodes"] if node["reason"]]
    lines += [f"{node['node']} computes on {node['device']}" for node in status["nodes"] if node.get("device")]
    lines += ["", links_line(status), *network_lines(status), *prefixes_lines(status), weights_line(status)]
    lines += replicas_lines(status)
    lines += [f"{node} gave wrong bytes of weights, and is asked for none" for node in status["weights"]["liars"]]
    return "\n".join(lines).rstrip()


def nodes_table(status: dict[str, Any]) -> str:
    """A row for each node, by rank; those without a rank come last, with the role that they have in its place.

    Memory that was given is shown where any node was given some.
    """
    nodes = sorted(status["nodes"], key=lambda node: (node["rank"] is None, node["rank"]))
    rows = [_row(node) for node in nodes]
    shown = [place for place, title in enumerate(TITLES) if title != "given" or any(row[place] for row in rows)]
    return table([[row[place] for place in shown] for row in (TITLES, *rows)])


def links_line(status: dict[str, Any]) -> str:
    """Bytes that crossed each link so far, as its two ends last reported them; "" where there is no link."""
    moved = sorted(bytes_of_links(status["nodes"]).items())
    wires = ", ".join(f"{wire} {amount(count)}" for wire, count in moved)
    return f"links: {wires}" if wires else ""


def network_lines(status: dict[str, Any]) -> list[str]:
    """The measured links between machines and the algorithms chosen for them; once for ranks with the same text."""
    texts = dict.fromkeys(node.get("network", "") for node in status["nodes"])
    return [f"network: {text}" for text in texts if text]


def prefixes_lines(status: dict[str, Any]) -> list[str]:
    """How many tokens were found in the prefix cache in this epoch; nothing where it is switched off or unused."""
    drivers = [node["stats"] for node in status["nodes"] if node["rank"] == 0 and "stats" in node]
    return [
        f"prefix cache: {int(stats['prefix_hits']):,} of {int(stats['prefix_queries']):,} tokens were found "
        f"({100 * stats['prefix_hits'] / stats['prefix_queries']:.0f} %)" + from_disk(stats)
        for stats in drivers
        if stats.get("prefix_queries")
    ]


def from_disk(stats: dict[str, float]) -> str:
    """How many of the others were read from disk, where pages are kept there."""
    if "external_prefix_hits" not in stats:
        return ""
    return f", and {int(stats['external_prefix_hits']):,} were read from disk"


def weights_line(status: dict[str, Any]) -> str:
    """Which node fetched how many bytes of weights from which; "" where all had the model."""
    transfers = ", ".join(
        f"{transfer['node']} {amount(transfer['bytes'])} from {transfer['source']}"
        for transfer in status["weights"]["brought"]
    )
    return f"weights passed on: {transfers}" if transfers else ""


def replicas_lines(status: dict[str, Any]) -> list[str]:
    """Who could coordinate if the coordinator's process died."""
    replicas = status.get("replicas")
    if replicas is None:
        return []
    held, eligible = replicas["nodes"], replicas["eligible"]
    if len(held) == 1:
        return [f"only {held[0]} knows the cluster's state, and it ends with it; {_eligible(eligible)}"]
    lost = (len(held) - 1) // 2
    return [f"the cluster's state is on {', '.join(held)}: any {lost} of these may be lost; {_eligible(eligible)}"]


def _eligible(nodes: list[str]) -> str:
    return f"{', '.join(nodes) or 'no node'} could coordinate"


def _what(phase: str) -> str:
    return {"broken": "computes no more", "refused": "could not take its part"}.get(phase, "is lost")


def _row(node: dict[str, Any]) -> list[str]:
    loading = node["loading"]
    phase = node["phase"]
    if phase == "loading" and loading["total"]:
        phase += f" {100 * loading['done'] // loading['total']} %"
    placed = node["rank"] is not None
    return [
        str(node["rank"]) if placed else node.get("role", ""),
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
