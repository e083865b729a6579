"""Sends a pipeline's hidden states in fewer bits, where the user has allowed it, and measures the error of that."""

from __future__ import annotations

from dataclasses import replace

import torch

from tllm.cluster.settings import EngineSettings
from tllm.comm.collectives.compressed_hop import CompressedHop, decide_compression, expected_error, format_for
from tllm.engine.ring_links import RingLinks
from tllm.spec.plan import Plan

NARROW_ERROR = "narrow_error"
"""The name, among a rank's numbers, of the relative error of the hidden states that it sends."""

ROWS = 256
"""Rows of the message, part of a prompt, for which `auto` decides whether compression pays."""


def narrowed(
    ring: RingLinks, plan: Plan, rank: int, settings: EngineSettings, width: int, dtype: torch.dtype
) -> tuple[RingLinks, str]:
    """The ring of a stage's leader, with hops compressed as `settings.narrow_wire` says, and its incoming hop in words.

    Every stage's leader calls it at the same time. The last stage sends only token ids, which are not compressed.
    """
    asked, stage = settings.narrow_wire, plan.place(rank)[0]
    form = format_for(asked, dtype)
    takes, gives, measured = stage > 0, stage < plan.pp - 1, ""
    if asked == "auto":
        rows = min(settings.max_num_batched_tokens, ROWS)
        pays, pays_next, rate = decide_compression(ring.previous, ring.next, plan.pp, rows, width, dtype)
        measured = f"{rate / 1e6:.0f} MB/s, "
        takes_narrow, gives_narrow = takes and pays, gives and pays_next
    else:
        takes_narrow, gives_narrow = takes and bool(form), gives and bool(form)
    how = f"{form}, {expected_error(form, dtype, width):.2%} off on normal numbers" if takes_narrow else "as it is"
    words = f"hop {ring.previous.source}>{rank}: {measured}{how}" if takes else ""
    hops = replace(
        ring,
        compressed_previous=CompressedHop(ring.previous, form) if takes_narrow else None,
        compressed_next=CompressedHop(ring.next, form) if gives_narrow else None,
    )
    return hops, words


def narrow_error(ring: RingLinks | None) -> dict[str, float]:
    """The relative error of the hidden states that this rank sent; empty where it sends them uncompressed."""
    return {NARROW_ERROR: ring.compressed_next.error} if ring is not None and ring.compressed_next is not None else {}
