"""`write_merged`: a model as a new folder of plain numbers, with adapters merged into it."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from tllm.core.errors import ConfigError, WeightsError
from tllm.core.gguf_files import open_gguf
from tllm.model.transformer import build
from tllm.parallel.lora.adapted_model import module_shapes
from tllm.parallel.mesh import whole
from tllm.parallel.shard import ShardPiece
from tllm.spec.families import spec_from_config
from tllm.spec.hf_config import read_config
from tllm.spec.model_spec import ModelSpec
from tllm.text.companions import copy_companions
from tllm.training.state.initial_weights import shapes_of
from tllm.weights.byte_source import ByteSource, LocalFiles
from tllm.weights.dtypes import torch_dtype
from tllm.weights.export import export_tensors, with_dtype
from tllm.weights.formats.open_index import open_index
from tllm.weights.load import check_tied
from tllm.weights.lora.adapter_files import read_adapter
from tllm.weights.lora.held_adapter import HeldFiles
from tllm.weights.lora.merge import AdapterSource, merged_tensors
from tllm.weights.lora.sampled_digest import ANOTHER_BASE, is_another, sampled_digest
from tllm.weights.lora.stacked_experts import taken_apart
from tllm.weights.manifest import checked

log = logging.getLogger("tllm.model")


def write_merged(folder: Path, out: Path, adapters: Sequence[Path] = (), dtype: str | None = None) -> None:
    """Write the model of a folder, or of a GGUF file, into a new folder, `out`, with adapters merged into it.

    ConfigError or WeightsError, before anything is written, for an adapter that is not of this model, and for a head in
    the files that is not the table which config.json says it is.
    """
    config = read_config(folder)
    if dtype is None and open_gguf(folder) is not None:
        dtype = config["dtype"]  # of its matrices as they were; in the file, they have few bits and norms float32
    spec, source = spec_from_config(config), checked(LocalFiles(folder))
    found = [_adapter(path, spec) for path in adapters]
    digest = sampled_digest(source) if found else ""
    for path, one in zip(adapters, found, strict=True):
        if is_another(one.adapter.base, digest):
            log.warning("%s %s", path, ANOTHER_BASE)
    if len(found) > 1 and any(one.adapter.config.use_dora for one in found):
        raise ConfigError(
            f"{len(found)} adapters are to be merged, and one has use_dora, whose norms go by the model without others",
            "merge such an adapter alone",
        )
    wanted = None if dtype is None else torch_dtype(dtype)
    shapes, index = shapes_of(spec), open_index(source, config)
    check_tied(map(ShardPiece, shapes), index, source)
    tensors = merged_tensors(shapes, index, source, found, wanted)
    with tempfile.TemporaryDirectory() as beside:
        copy_companions(folder, Path(beside))
        others = list(Path(beside).iterdir())
        export_tensors(out, config if dtype is None else with_dtype(config, dtype), tensors, others=others)


def _adapter(path: Path, spec: ModelSpec) -> AdapterSource:
    source: ByteSource = LocalFiles(path)
    shapes = module_shapes(build(spec, whole(spec), torch.float32, "meta"))
    try:
        if contents := taken_apart(source, shapes):
            source = HeldFiles(contents)
        adapter = read_adapter(source)
        adapter.check(shapes)
    except WeightsError as error:
        raise WeightsError(f"{path}: {error.message}", error.hint) from error
    return AdapterSource(adapter, source)
