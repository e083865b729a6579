"""The links of a plan whose ranks are threads of one process."""

from __future__ import annotations

from tllm.comm.links.link import DEADLINE, Link, LocalLink
from tllm.spec.plan import Plan, Wire
from tllm.spec.process_groups import wires


def local_links(plan: Plan, deadline: float = DEADLINE) -> dict[Wire, Link]:
    """Every wire of a plan whose ranks are threads of one process."""
    return {wire: LocalLink(wire.source, wire.target, deadline) for wire in wires(plan)}
