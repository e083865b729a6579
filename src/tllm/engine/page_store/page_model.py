"""What the contents of stored pages depend on: the model, and all else from which keys and values follow."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tllm.cluster.settings import PageDisk
from tllm.core.disk import given_path
from tllm.engine.schedule.limits import EngineConfig
from tllm.hub.repository import HubWeights
from tllm.weights.byte_source import LocalFiles
from tllm.weights.manifest import MANIFEST

FORMAT = "tllm pages 1"
DIGITS = 40
SAMPLE_BYTES, SAMPLES = 16 * 1024, 16


def page_disk(
    folder: Path, raw: Mapping[str, Any], config: EngineConfig, dtype: str, hub: HubWeights | None = None
) -> PageDisk | None:
    """Where the pages of a model are kept, if the config says so. `raw` is its config, with the form of its weights.
    Weights on the `hub` are known by the hashes that it gives of them."""
    if not config.cache_dir or not config.enable_prefix_caching:
        return None
    weights = weights_hash(folder) if hub is None else str([(file.name, file.etag) for file in hub.repository.files])
    facts = (FORMAT, json.dumps(raw, sort_keys=True), dtype, config.page_size, config.narrow_wire, weights)
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    return PageDisk(folder=str(given_path(config.cache_dir)), limit=config.cache_dir_size, model=digest[:DIGITS])


def weights_hash(folder: Path) -> str:
    """What changes when the weights do: their manifest, whose hashes are checked while they are loaded. Without one it
    is the size, the time of the last change and samples of each file, so that a change to the smallest tensor counts.
    """
    files, digest = LocalFiles(folder), hashlib.sha256()
    if MANIFEST in files.names():
        return hashlib.sha256(files.read(MANIFEST, 0, files.size(MANIFEST))).hexdigest()
    for name in files.names():
        if not name.endswith((".safetensors", ".gguf")):
            continue
        size = files.size(name)
        digest.update(f"{name} {size} {(files.folder / name).stat().st_mtime_ns} ".encode())
        for i in range(SAMPLES):
            start = max(size - SAMPLE_BYTES, 0) * i // (SAMPLES - 1)
            digest.update(files.read(name, start, min(start + SAMPLE_BYTES, size)))
    return digest.hexdigest()
