"""`open_index`: the index of a model's files, whatever form they keep its weights in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tllm.core.errors import ModelError
from tllm.core.gguf_files import gguf_files
from tllm.quantization.stored_tensor import StoredTensor
from tllm.weights.byte_source import ByteSource
from tllm.weights.formats.gguf_index import gguf_index
from tllm.weights.safetensors_index import Index

Reader = Callable[[Index, Mapping[str, Any]], dict[str, StoredTensor]]
"""reader(index of the files, the config's quantization_config) -> the weights that are kept in few bits, by name."""

READERS: dict[str, Reader] = {}
"""Of each `quant_method` of a `config.json`."""


def open_index(source: ByteSource, config: Mapping[str, Any]) -> Index:
    """Read the headers of a model's files; `config` is its `config.json`, which says how weights are quantised."""
    if gguf_files(source.names()):
        return gguf_index(source)
    index = Index.read(source)
    quantization = config.get("quantization_config")
    if not quantization:
        return index
    method = str(quantization.get("quant_method"))
    if method not in READERS:
        raise ModelError(
            f"quantization_config: quant_method {method!r} is not one that is read",
            "known: " + ", ".join(sorted(READERS))
            if READERS
            else "give the folder of the model before it was quantised",
        )
    return Index(index.entries, READERS[method](index, quantization))
