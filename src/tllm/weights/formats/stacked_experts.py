"""Experts that the files keep as one tensor of a layer, [experts, rows, columns], read as a tensor of each expert.

So qwen3_5_moe is published: `experts.gate_up_proj` has an expert's gate above its up, `experts.down_proj` its down. An
expert's rows lie together in the file, so that each is a tensor there by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tllm.core.errors import WeightsError
from tllm.weights.safetensors_header import TensorEntry
from tllm.weights.safetensors_index import Index

STACKING = ("qwen3_5_moe_text",)
"""Families whose files may have experts so."""

PARTS = {".mlp.experts.gate_up_proj": ("gate_proj", "up_proj"), ".mlp.experts.down_proj": ("down_proj",)}


def with_experts_apart(index: Index, config: Mapping[str, Any]) -> Index:
    """The index with a tensor of each expert in the place of stacks, for a family that has stacks."""
    if config.get("model_type") not in STACKING:
        return index
    entries: dict[str, TensorEntry] = {}
    for name, entry in index.entries.items():
        end = next((end for end in PARTS if name.endswith(end)), None)
        entries.update({name: entry} if end is None else dict(_experts(name.removesuffix(end), entry, PARTS[end])))
    return Index(entries, index.stored)


def _experts(layer: str, entry: TensorEntry, parts: tuple[str, ...]) -> Iterator[tuple[str, TensorEntry]]:
    """Each expert's tensors, in the order in which they lie in the file."""
    if len(entry.shape) != 3 or entry.shape[1] % len(parts) or not all(entry.shape):
        raise WeightsError(
            f"{entry.file}: the experts of {layer} have shape {entry.shape} and should be [experts, rows, columns] "
            f"with rows of {' and '.join(parts)}",
            "does config.json belong to these weights?",
        )
    experts, rows, columns = entry.shape
    shape = (rows // len(parts), columns)
    each, at = entry.nbytes // (experts * len(parts)), entry.start
    for expert in range(experts):
        for part in parts:
            found = TensorEntry(entry.file, entry.dtype, shape, at, at + each)
            yield f"{layer}.mlp.experts.{expert}.{part}.weight", found
            at += each
