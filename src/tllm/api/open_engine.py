"""From options to a running engine: in this process for one rank, else a process or a node for each."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Literal

from tllm.api.engine_options import EngineOptions, engine_config
from tllm.core.errors import ClusterError, PlanError, counted
from tllm.core.model_folders import model_name
from tllm.spec.lora.lora_config import ServedLoras

if TYPE_CHECKING:
    from tllm.engine.engine import Engine
    from tllm.node.coordinator.cluster_options import ClusterOptions
    from tllm.node.coordinator.plan_selection import PlanChoice
    from tllm.node.serve.serving import Serving
    from tllm.server.openai.engine_client import EngineClient

OnProgress = Callable[[str, int, int], None]
"""on_progress(what, bytes done, bytes in all)"""


@asynccontextmanager
async def open_engine(
    options: EngineOptions, on_progress: OnProgress | None = None, adapters: ServedLoras | None = None
) -> AsyncIterator[EngineClient]:
    """An engine on this machine alone, ended with the block. With `adapters` its ranks are nodes, which load them."""
    if options.plan.world_size > 1 or adapters is not None:
        async with open_nodes(options, cluster_options(options, on_progress=on_progress, adapters=adapters)) as client:
            yield client
        return
    from tllm.node.serve.dense_layers import DenseLayers
    from tllm.node.serve.embedded import Embedded

    dense = DenseLayers(options.folder)
    with await _loaded(options, on_progress or (lambda what, done, total: None)) as engine:
        yield Embedded(engine, model_name(options.folder), dense)


async def _loaded(options: EngineOptions, on_progress: OnProgress) -> Engine:
    """The engine of one rank. Where this is cancelled, it is given up at its next piece of weights."""
    given_up = threading.Event()

    def tell(rank: int, done: int, total: int) -> None:
        if given_up.is_set():
            raise ClusterError("the engine was given up while it was loaded")
        on_progress(f"rank {rank}", done, total)

    loading = asyncio.ensure_future(asyncio.to_thread(_load, options, tell))
    try:
        return await asyncio.shield(loading)
    except asyncio.CancelledError:
        given_up.set()
        loading.add_done_callback(_close_unwanted)  # which a second cancellation leaves to it
        await asyncio.wait((loading,))
        raise


def _close_unwanted(loading: asyncio.Future[Engine]) -> None:
    if not loading.cancelled() and loading.exception() is None:
        loading.result().close()


def _load(options: EngineOptions, tell: Callable[[int, int, int], None]) -> Engine:
    import torch

    from tllm.core.memory import keep_freed_memory
    from tllm.devices.choose import choose_device
    from tllm.engine.engine import Engine

    device = choose_device(options.device)
    keep_freed_memory()
    if options.threads:
        torch.set_num_threads(options.threads)
    return Engine.load(options.folder, options.plan, engine_config(options), tell, devices=(device,))


@asynccontextmanager
async def open_nodes(
    options: EngineOptions,
    cluster: ClusterOptions,
    *,
    policy: Literal["replan", "wait"] = "replan",
    choice: PlanChoice | None = None,
) -> AsyncIterator[Serving]:
    """An engine over the nodes of a cluster, ended with the block, once the adapters that `cluster` names are loaded.

    `policy` is for nodes that are lost: go on with what is left, or wait for another. With a `choice` the options'
    plan only says how many nodes there are.
    """
    from tllm.node.serve.open_cluster import open_cluster

    sizes = engine_config(options)
    opening = open_cluster(options.folder, options.plan, sizes, cluster, policy=policy, choice=choice, hub=options.hub)
    async with opening as serving:
        await serving.adapters.load_first()
        yield serving


def cluster_options(options: EngineOptions, joining: int = 0, **more: Any) -> ClusterOptions:
    """The cluster that an engine wants: workers here, and `joining` nodes that come from elsewhere.

    `more` are other fields of `ClusterOptions`. PlanError where the plan has fewer ranks than nodes are to join.
    """
    from tllm.node.coordinator.cluster_options import ClusterOptions

    here = options.plan.world_size - joining
    if here < 0:
        raise PlanError(
            f"the plan {options.plan} has {options.plan.world_size} ranks, with "
            f"{counted(joining, 'other node')} to join",
            "give a plan with a rank for each node, or fewer --nodes",
        )
    return ClusterOptions(
        local=here,
        threads=options.threads or 0,
        allow_mixed=options.allow_mixed,
        lost_after=options.lost_after,
        memory=options.memory,
        numa_binding=options.numa_binding,
        device=options.device,
        **more,
    )
