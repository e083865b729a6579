"""A plan drawn as the ring that it is: stages from left to right, token ids back to the first."""

from __future__ import annotations

from tllm.cli.display.tables import span
from tllm.spec.plan import Plan

ARROW = " ── hidden state ─▶ "


def ring(plan: Plan) -> str:
    """Three lines of text, two for a plan of one stage."""
    titles = [f"stage {i}: layers {span(stage.start, stage.stop)}" for i, stage in enumerate(plan.stages)]
    holders = [" ⇄ ".join(f"rank {rank}" for rank in plan.ranks(i)) for i in range(plan.pp)]
    widths = [max(len(title), len(holder)) for title, holder in zip(titles, holders, strict=True)]
    top = ARROW.join(title.ljust(width) for title, width in zip(titles, widths, strict=True))
    middle = (" " * len(ARROW)).join(holder.ljust(width) for holder, width in zip(holders, widths, strict=True))
    lines = [top.rstrip(), middle.rstrip()]
    if plan.pp > 1:
        lines.append("▲" + " token ids ".center(len(top) - 2, "─") + "┘")
    return "\n".join(lines)
