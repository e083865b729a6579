"""From options to a running engine: the one place where a command meets the floors that load torch."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from tllm.cli.options import EngineOptions
from tllm.cli.progress import progress

if TYPE_CHECKING:
    from tllm.server.router import EngineClient


@asynccontextmanager
async def open_engine(options: EngineOptions, quiet: bool) -> AsyncIterator[EngineClient]:
    """A running engine for these options, ended with the block. Shows how loading goes, unless `quiet`."""
    import torch

    from tllm.cli.embedded import Embedded
    from tllm.engine.engine import Engine
    from tllm.engine.size import EngineConfig

    if options.threads:
        torch.set_num_threads(options.threads)
    config = EngineConfig(
        dtype=options.dtype,
        max_model_len=options.asked_model_len,
        cache_bytes=options.kv_cache_memory,
        page_size=options.page_size,
        max_num_seqs=options.max_num_seqs,
    )
    with progress(quiet) as tell:
        engine = Engine.load(
            options.folder, options.plan, config, lambda rank, done, total: tell(f"rank {rank}", done, total)
        )
    with engine:
        yield Embedded(engine, options.folder.resolve().name)
