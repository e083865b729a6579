"""The cluster's state as plain data, for `tllm status`, the page and the metrics."""

from __future__ import annotations

from typing import Any

from tllm.cluster.state import ClusterState, Member
from tllm.node.roles.compressed_ring import NARROW_ERROR
from tllm.node.sources.node_source import Invitation
from tllm.spec.plan import Plan
from tllm.spec.process_groups import computing, server_ranks

REFUSED = ("refused_links", "refused_frames")
"""What a node counts: links that nobody expected, and frames on a link that were not what the plan says."""


def report(state: ClusterState, invitation: Invitation | None = None) -> dict[str, Any]:
    """What the coordinator knows, as JSON takes it, and what the nodes' source calls them."""
    labels = invitation.source.nodes() if invitation is not None else {}
    return {
        "cluster": state.cluster,
        "epoch": state.epoch,
        "ready": state.is_ready,
        "plan": str(state.plan) if state.plan is not None else "",
        "nodes": [
            {**_node(member, state.plan), "labels": dict(labels.get(member.node, {}))} for member in state.members
        ],
    }


def engine_stats(state: ClusterState) -> dict[str, float]:
    """The driver's numbers, how many nodes there are, what all of them refused, and how far off narrow hops are.

    Of each node the memory that it has for the cluster, holds, and held at the most.
    """
    driver = state.ranks[0].beat.stats if state.ranks else {}
    refused = {key: sum(member.beat.stats.get(key, 0.0) for member in state.living) for key in REFUSED}
    errors = [member.beat.stats[NARROW_ERROR] for member in state.ranks if NARROW_ERROR in member.beat.stats]
    off = {NARROW_ERROR: max(errors)} if errors else {}
    memory = {
        f"{name}/{member.node}": float(count)
        for member in state.living
        for name, count in (
            ("memory_bytes", member.facts.memory_bytes),
            ("rss_bytes", member.beat.rss_bytes),
            ("peak_bytes", member.beat.peak_bytes),
        )
    }
    return {**driver, **off, **refused, **memory, "nodes": float(len(state.living))}


def _node(member: Member, plan: Plan | None) -> dict[str, Any]:
    facts, loaded = member.facts, member.loaded
    return {
        "node": facts.node,
        "host_name": facts.host_name,
        "address": f"{facts.host}:{facts.port}",
        "pid": facts.pid,
        "cores": facts.cores,
        "memory_bytes": facts.memory_bytes,
        "memory_given": facts.is_given,
        "device": facts.device,
        "versions": facts.versions,
        "phase": member.phase,
        "reason": member.reason,
        "role": member.role or _role_in(plan, member.rank),
        **_place(member, plan),
        "parameter_bytes": member.parameter_bytes,
        "cache_bytes": member.cache_bytes,
        "loading": {"done": member.progress.done, "total": member.progress.total},
        "bytes_read": loaded.bytes_read if loaded else 0,
        "bytes_fetched": loaded.fetched if loaded else 0,
        "load_seconds": loaded.seconds if loaded else 0.0,
        "network": loaded.network if loaded else "",
        "rss_bytes": member.beat.rss_bytes,
        "peak_bytes": member.beat.peak_bytes,
        "links": member.beat.links,
        "stats": member.beat.stats,
    }


def _place(member: Member, plan: Plan | None) -> dict[str, Any]:
    if member.rank is None or plan is None or member.rank not in computing(plan):
        return {"rank": None, "stage": None, "tp_rank": None, "layers": None, "share": None}
    stage, tp_rank = plan.place(member.rank)
    held = plan.stages[stage]
    return {
        "rank": member.rank,
        "stage": stage,
        "tp_rank": tp_rank,
        "layers": [held.start, held.stop],
        "share": held.shares[tp_rank] / sum(held.shares),
    }


def _role_in(plan: Plan | None, rank: int | None) -> str:
    """What a rank without layers does that others wait for."""
    return "server" if plan is not None and rank in server_ranks(plan) else ""
