"""Opens the store of pages that a rank keeps on disk."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

from tllm.cluster.settings import PageDisk
from tllm.engine.compute.kv_cache import KVCache
from tllm.engine.page_store.page_buffer import held_layers
from tllm.engine.page_store.page_folder import PageFolder
from tllm.engine.page_store.rank_pages import RankPages
from tllm.spec.cut import Cut
from tllm.spec.model_spec import ModelSpec

log = logging.getLogger("tllm.engine")


def open_store(disk: PageDisk, cache: KVCache, spec: ModelSpec, cut: Cut) -> RankPages | None:
    """The pages of a rank with this cache, which has this cut of each layer.

    None, with a warning, where it is not known which kv heads of the model a layer's are. ConfigError for a folder
    that cannot be used.
    """
    layers = held_layers(cache, spec, cut)
    if not layers:
        log.warning("pages are not kept in %s: this model's cache is not cut by kv heads alone", disk.folder)
        return None
    # Ranks whose caches have other numbers must not take each other's pages, nor keep each other from saving theirs.
    dtypes = sorted({form.dtype for layer in layers.values() for form in layer.forms})
    model = hashlib.sha256(" ".join((disk.model, *dtypes)).encode()).hexdigest()[: len(disk.model)]
    return RankPages(layers, cache.page_size, PageFolder(Path(disk.folder), model, disk.limit), model)
