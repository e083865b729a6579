"""Opens a cluster that serves requests for the length of a `with` block, and tells each rank what it is to serve."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from tllm.cluster.settings import EngineSettings
from tllm.core.disk import given_path
from tllm.engine.page_store.page_folder import make_private
from tllm.engine.page_store.page_model import page_disk
from tllm.engine.schedule.limits import EngineConfig, limits_of
from tllm.hub.repository import HubWeights
from tllm.node.coordinator.cluster_options import DEFAULTS, ClusterOptions
from tllm.node.coordinator.forming import forming, local_names, open_authority
from tllm.node.coordinator.plan_selection import PlanChoice
from tllm.node.coordinator.workload import Workload
from tllm.node.machine.process_facts import reachable
from tllm.node.recovery.recovery import Policy
from tllm.node.replication.first_replica import replicated
from tllm.node.serve.dense_layers import dense_files
from tllm.node.serve.serving import Serving
from tllm.spec.families import spec_from_config
from tllm.spec.hf_config import read_config
from tllm.spec.plan import Plan
from tllm.spec.quantized.weight_form import with_weight_form

LINK_SECONDS = 30.0
"""How long a rank that serves waits for a message of another one, unless the options say it."""


@contextlib.asynccontextmanager
async def open_cluster(
    folder: Path,
    plan: str | Plan,
    config: EngineConfig | None = None,
    options: ClusterOptions = DEFAULTS,
    *,
    policy: Policy = "replan",
    choice: PlanChoice | None = None,
    hub: HubWeights | None = None,
) -> AsyncIterator[Serving]:
    """A cluster that is ready to serve the model in a folder, ended with the block.

    `config` sets the engine's sizes. `policy` is for nodes that are lost: go on with those that are left, or wait for
    others. With a `choice` the plan only says for how many nodes to wait; theirs is chosen when they are here. Weights
    on the `hub` need not be in the folder.
    """
    work = serving_workload(folder, plan, config or EngineConfig(), options, hub=hub)
    nodes = local_names(work.plan, options.local)
    authority = await open_authority(options.authority, options.secret)
    serving = Serving(work, authority, options.address, nodes, policy)
    coordinator = serving.coordinator
    coordinator.selection.choice = choice
    async with (
        replicated(serving, authority, options),
        forming(serving, nodes, reachable(options.address[0]), options),
    ):
        if coordinator.local is not None:
            coordinator.local.renew()
        yield serving


def serving_workload(
    folder: Path,
    plan: str | Plan,
    config: EngineConfig,
    options: ClusterOptions = DEFAULTS,
    threads: int = 0,
    hub: HubWeights | None = None,
) -> Workload:
    """What to serve, checked as far as it can be before anything is started.

    `threads` is what each rank computes with; 0 leaves it to the rank's node.
    """
    raw = with_weight_form(read_config(folder), config.quantize, config.dequantize)
    spec = spec_from_config(raw)
    plan = Plan.parse(plan, spec.num_layers) if isinstance(plan, str) else plan
    plan.check(spec.num_layers)
    limits = limits_of(spec, plan, config)
    if config.cache_dir:
        make_private(given_path(config.cache_dir))
    settings = EngineSettings(
        dtype=config.dtype or spec.dtype,
        num_pages=limits.num_pages,
        page_size=limits.page_size,
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        num_speculative_tokens=limits.num_speculative_tokens,
        speculative_config=config.speculative_config,
        enable_prefix_caching=limits.enable_prefix_caching,
        kv_cache_dtype=limits.kv_cache_dtype,
        page_disk=page_disk(folder, raw, config, config.dtype or spec.dtype, hub),
        threads=threads,
        link_seconds=options.links_wait(LINK_SECONDS),
        narrow_wire=config.narrow_wire,
        wiring=config.wiring,
    )
    served = options.served
    if served is not None:
        served = msgspec.structs.replace(served, max_model_len=limits.max_model_len)
    return Workload(
        folder,
        json.dumps(raw),
        plan,
        settings,
        allow_mixed=options.allow_mixed,
        lost_after=options.lost_after,
        hub=hub,
        served=served,  # known from the first moment on to whoever takes this process's place
        adapters=options.adapters,
        reads=dense_files(folder),
    )
