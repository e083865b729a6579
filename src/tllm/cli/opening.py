"""From options to a running engine: the one place where commands meet the floors that hold one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tllm.cli.arguments.options import EngineOptions
from tllm.cli.display.progress import progress
from tllm.core.errors import PlanError

if TYPE_CHECKING:
    from tllm.engine.schedule.limits import EngineConfig
    from tllm.node.coordinator.plan_selection import PlanChoice
    from tllm.server.openai.engine_client import EngineClient


Invite = Callable[[str, str], None]
"""invite(HOST:PORT, token): what other machines need to join"""

LOOPBACK = ("127.0.0.1", 0)


@asynccontextmanager
async def open_engine(options: EngineOptions, quiet: bool) -> AsyncIterator[EngineClient]:
    """An engine on this machine, ended with the block: in this process for one rank, else a process for each."""
    if options.plan.world_size > 1:
        async with open_nodes(options, quiet) as client:
            yield client
        return
    import torch

    from tllm.core.memory import keep_freed_memory
    from tllm.engine.engine import Engine
    from tllm.node.serve.embedded import Embedded

    keep_freed_memory()
    if options.threads:
        torch.set_num_threads(options.threads)
    with progress(quiet) as tell:
        engine = Engine.load(
            options.folder,
            options.plan,
            config_of(options),
            lambda rank, done, total: tell(f"rank {rank}", done, total),
        )
    with engine:
        yield Embedded(engine, options.folder.resolve().name)


@asynccontextmanager
async def open_nodes(
    options: EngineOptions,
    quiet: bool,
    joining: int = 0,
    address: tuple[str, int] = LOOPBACK,
    invite: Invite | None = None,
    policy: Literal["replan", "wait"] = "replan",
    authority: Path | None = None,
    choice: PlanChoice | None = None,
) -> AsyncIterator[EngineClient]:
    """A cluster: workers of this machine, and `joining` nodes more, which come by what `invite` is told.

    `policy` is for nodes that are lost; `authority` is the folder in which nodes find the cluster again. With a
    `choice` the options' plan only says how many nodes there are.
    """
    from tllm.node.coordinator.cluster_options import ClusterOptions
    from tllm.node.serve.open_cluster import open_cluster

    here = options.plan.world_size - joining
    if here < 0:
        raise PlanError(
            f"the plan {options.plan} has {options.plan.world_size} ranks and {joining} other nodes are to join",
            "give a plan with a rank for each node, or fewer --nodes",
        )
    with ExitStack() as shown:
        asked = ClusterOptions(
            local=here,
            threads=options.threads or 0,
            address=address,
            authority=authority,
            allow_mixed=options.allow_mixed,
            invite=invite,
            on_progress=shown.enter_context(progress(quiet)),
            lost_after=options.lost_after,
            memory=options.memory,
        )
        cluster = open_cluster(options.folder, options.plan, config_of(options), asked, policy=policy, choice=choice)
        async with cluster as client:
            shown.close()  # all is loaded: the terminal is the command's again
            yield client


def config_of(options: EngineOptions) -> EngineConfig:
    """The engine's sizes."""
    from tllm.engine.schedule.limits import EngineConfig

    return EngineConfig(
        dtype=options.dtype,
        max_model_len=options.asked_model_len,
        cache_bytes=options.kv_cache_memory,
        page_size=options.page_size,
        max_num_seqs=options.max_num_seqs,
        num_speculative_tokens=options.num_speculative_tokens,
        narrow_wire=options.narrow_wire,
        wiring=options.wiring,
    )
