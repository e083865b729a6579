"""open_cluster."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

from tllm.cluster.connection import Address
from tllm.cluster.heartbeat import SILENCE_SECONDS
from tllm.cluster.settings import EngineSettings
from tllm.engine.schedule.limits import EngineConfig, limits_of
from tllm.node.coordinator.coordinator import PlanChoice, Tell, Workload
from tllm.node.coordinator.forming import LINK_SECONDS, LOOPBACK, Invite, forming, local_names, open_authority
from tllm.node.coordinator.recovery import Policy
from tllm.node.machine.process_facts import reachable
from tllm.node.serve.serving import Serving
from tllm.spec.families import spec_from_config
from tllm.spec.hf_config import read_config
from tllm.spec.plan import Plan


@contextlib.asynccontextmanager
async def open_cluster(
    folder: Path,
    plan: str | Plan,
    config: EngineConfig | None = None,
    *,
    local: int | None = None,
    threads: int = 0,
    address: Address = LOOPBACK,
    authority: Path | None = None,
    allow_mixed: bool = False,
    invite: Invite | None = None,
    tell: Tell | None = None,
    join_seconds: float | None = None,
    link_seconds: float = LINK_SECONDS,
    policy: Policy = "replan",
    choice: PlanChoice | None = None,
    lost_after: float = SILENCE_SECONDS,
    memory: int | None = None,
) -> AsyncIterator[Serving]:
    """A cluster that is ready to serve, ended with the block. Nodes run the same program as we do, or `allow_mixed`.

    `local` workers are started here, by default one for each rank; the plan's other ranks wait for nodes that join by
    what `invite` is told, for `join_seconds` (None: for ever). `address` is the control port's: other machines can
    join only if it is not a loopback one. `authority`: the folder that keeps the cluster's authority, else in memory.
    `policy` is for nodes that are lost: go on with what is left, or wait for others; `invite` is then called again.
    With a `choice` the plan only says for how many nodes to wait, and theirs is chosen when they are here. A node that
    is silent for `lost_after` seconds is lost. The workers here may together use `memory` bytes, all if None.
    """
    work = work_of(folder, plan, config or EngineConfig(), 0, link_seconds, allow_mixed, lost_after)
    nodes = local_names(work.plan, local)
    coordinator = Serving(work, await open_authority(authority), address, nodes, policy)
    coordinator.choice = choice
    async with forming(coordinator, nodes, reachable(address[0]), threads, invite, tell, join_seconds, memory):
        if coordinator.local is not None:
            coordinator.local.renew()
        yield coordinator


def work_of(
    folder: Path,
    plan: str | Plan,
    config: EngineConfig,
    threads: int,
    link_seconds: float,
    allow_mixed: bool = False,
    lost_after: float = SILENCE_SECONDS,
) -> Workload:
    """What to serve, checked as far as it can be before anything is started.

    A link waits for longer than a silent node is waited for, so that the node is named and not its neighbour.
    """
    raw = read_config(folder)
    spec = spec_from_config(raw)
    plan = Plan.parse(plan, spec.num_layers) if isinstance(plan, str) else plan
    plan.check(spec.num_layers)
    limits = limits_of(spec, plan, config)
    settings = EngineSettings(
        dtype=config.dtype or spec.dtype,
        num_pages=limits.num_pages,
        page_size=limits.page_size,
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        num_speculative_tokens=limits.num_speculative_tokens,
        threads=threads,
        link_seconds=max(link_seconds, 2 * lost_after),
        narrow_wire=config.narrow_wire,
        wiring=config.wiring,
    )
    return Workload(folder, json.dumps(raw), plan, settings, allow_mixed=allow_mixed, lost_after=lost_after)
