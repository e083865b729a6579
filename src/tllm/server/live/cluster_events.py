"""What has happened to a cluster between two of its reports (`EngineClient.status`), in words for people.

A loss is in every later report (`recent_losses`), so that none is missed that was mended between two looks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tllm.server.live.samples import Severity

Happening = tuple[Severity, str]


def happenings(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Happening]:
    """What differs, the causes before their consequences. A first report is compared with an empty one."""
    old, new = ({node["node"]: node for node in report.get("nodes", ())} for report in (before, now))
    for name, node in new.items():
        yield from _of_node(name, old.get(name), node)
    if (more := now.get("losses", 0) - before.get("losses", 0)) > 0:
        yield from (("error", reason) for reason in now["recent_losses"][-more:])
    for name in old.keys() - new.keys():
        yield "warning", f"{name} has left"
    if (epoch := now.get("epoch", 0)) != before.get("epoch", 0) and now.get("plan"):
        yield "info", f"epoch {epoch} begins: plan {now['plan']}"
    if now.get("ready") and not before.get("ready"):
        yield "info", "requests are served"
    elif before.get("ready") and not now.get("ready"):
        yield "warning", f"requests wait: {now.get('doing') or 'the cluster is not ready'}"
    for key, severity in _TROUBLES:
        if now.get(key) and now[key] != before.get(key):
            yield severity, now[key]


_TROUBLES: tuple[tuple[str, Severity], ...] = (("fault", "error"), ("advice", "warning"))
"""Keys of a report whose text, where there is one, is a sentence for people."""


def _of_node(name: str, old: Mapping[str, Any] | None, new: Mapping[str, Any]) -> Iterator[Happening]:
    was_lost, is_lost = (of is not None and of.get("phase") == "lost" for of in (old, new))
    if old is None or (was_lost and not is_lost):
        yield "info", f"{name} has joined" + (f" from {new['host_name']}" if new.get("host_name") else "")
    reason = new.get("reason", "")
    if reason and reason != (old or {}).get("reason", "") and not is_lost:
        yield "error", f"{name} cannot go on: {reason}"
    if is_lost and not was_lost and new.get("rank") is None:  # which is none of the losses that count
        yield "warning", reason
