"""Write a Hugging Face folder from the shards of one rank or of all: safetensors, config.json and a manifest."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import torch
from torch import Tensor, nn

from tllm.core.errors import WeightsError
from tllm.parallel.shard import Shard, ShardPiece, shard_of
from tllm.spec.gguf.gguf_codings import TYPES
from tllm.weights.boxes import Box, Shape, widths
from tllm.weights.coverage import HeldBlock, check_coverage
from tllm.weights.dtypes import memory
from tllm.weights.header_tables import INDEX, SINGLE
from tllm.weights.manifest import MANIFEST, make_manifest
from tllm.weights.safetensors_header import make_header

MAX_SHARD_BYTES = 5 * 1000**3

ONLY_STACKED = ("gemma4_text",)
"""Families whose experts other programs read in stacks alone; those of others are read apart too."""

EXPERT = re.compile(r"(?P<block>.*\.experts)\.(?P<expert>\d+)\.(?P<part>gate|up|down)_proj\.weight$")


class ParameterPart(NamedTuple):
    """A rank's parameter and how it is cut."""

    shard: Shard
    tensor: Tensor


def parts_of(model: nn.Module) -> list[ParameterPart]:
    """The parts that a rank's model holds, as `export_folder` takes them."""
    return [ParameterPart(shard_of(parameter), parameter.detach()) for parameter in model.parameters()]


class WholeTensor(Protocol):
    """A tensor of the checkpoint that can be made when it is written."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> Shape: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def make(self) -> Tensor: ...


def export_folder(
    folder: Path | str,
    config: Mapping[str, Any],
    ranks: Mapping[int, Sequence[ParameterPart]],
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    others: Iterable[Path] = (),
) -> None:
    """Write a new folder that any reader of the format loads: whole tensors under the checkpoint's names.

    `ranks` holds the parts of every rank, all ranks of the plan together; `dtype` converts (None keeps each one's own);
    `others` are files to copy along, such as a tokenizer's. One tensor at a time is made whole. The folder is written
    beside its place, synced and renamed last: it is there complete or not at all.
    """
    export_tensors(folder, config, _tensors(ranks, dtype), max_shard_bytes, others)


def export_tensors(
    folder: Path | str,
    config: Mapping[str, Any],
    tensors: Iterable[WholeTensor],
    max_shard_bytes: int = MAX_SHARD_BYTES,
    others: Iterable[Path] = (),
) -> None:
    """The same from tensors that are whole, wherever they come from; each is made when its turn comes."""
    # Largest dtype first, so that each lies at a multiple of its item's size.
    whole = with_experts_stacked(tensors, config)
    ordered = sorted(whole, key=lambda tensor: (-tensor.dtype.itemsize, tensor.name))
    with new_folder(Path(folder)) as beside:
        _write(beside, config, ordered, max_shard_bytes, others)


def with_dtype(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """The config of a model whose numbers have this dtype, in which programs load it that are not told another one."""
    keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["torch_dtype"]
    return dict(config) | dict.fromkeys(keys, dtype)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to write to, which is synced and has its name when the block ends. WeightsError where one is there."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise WeightsError(f"{folder} exists already", "give a new folder, or an empty one")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            yield beside
            for path in beside.iterdir():
                _sync(path)
            _sync(beside)
            beside.chmod(0o755)
            beside.rename(folder)
            _sync(folder.parent)
        finally:
            # Still there only if something failed before the rename.
            shutil.rmtree(beside, ignore_errors=True)
    except OSError as error:
        raise WeightsError(
            f"cannot write {folder}: {error.strerror or error}",
            "see that this user may write there, and that the disk has room",
        ) from error


class _Stack(NamedTuple):
    """[experts, rows, columns]; the rows of an expert are those of its `parts` tensors, one above another."""

    name: str
    parts: int
    tensors: list[WholeTensor]

    @property
    def shape(self) -> Shape:
        rows, columns = self.tensors[0].shape
        return len(self.tensors) // self.parts, self.parts * rows, columns

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors[0].dtype

    def make(self) -> Tensor:
        out = torch.empty(self.shape, dtype=self.dtype)
        for place, tensor in zip(out.flatten(0, 1).chunk(len(self.tensors)), self.tensors, strict=True):
            place.copy_(tensor.make())
        return out


def with_experts_stacked(tensors: Iterable[WholeTensor], config: Mapping[str, Any]) -> list[WholeTensor]:
    """The tensors of a folder, with stacks in the place of each expert's, for a family whose folders have them so.

    It undoes `with_experts_apart`: gates lie above ups in `experts.gate_up_proj`.
    """
    if config.get("model_type") not in ONLY_STACKED:
        return list(tensors)
    others: list[WholeTensor] = []
    stacks: dict[str, dict[tuple[int, int], WholeTensor]] = defaultdict(dict)
    for tensor in tensors:
        match = EXPERT.fullmatch(tensor.name)
        if match is None:
            others.append(tensor)
            continue
        name = f"{match['block']}.{'down' if match['part'] == 'down' else 'gate_up'}_proj"
        stacks[name][int(match["expert"]), match["part"] == "up"] = tensor
    for name, found in stacks.items():
        ordered = [found[key] for key in sorted(found)]
        others.append(_Stack(name, 1 if name.endswith(".down_proj") else 2, ordered))
    return others


class _Whole(NamedTuple):
    """A tensor to be written, and the parts it is made of."""

    name: str
    shape: Shape
    dtype: torch.dtype
    parts: list[tuple[ShardPiece, Tensor]]

    def make(self) -> Tensor:
        out = torch.empty(self.shape, dtype=self.dtype)
        for piece, tensor in self.parts:
            block = tensor[_at(piece.target)]
            place = out[_at(piece.source)]
            place.copy_(block.reshape(place.shape))
        return out


def _at(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def _tensors(ranks: Mapping[int, Sequence[ParameterPart]], dtype: torch.dtype | None) -> list[_Whole]:
    """Every tensor of the checkpoint."""
    found: dict[str, _Whole] = {}
    for parts in ranks.values():
        for shard, tensor in parts:
            for piece in shard.pieces:
                shape = tuple(stop for _, stop in piece.source) or widths(piece.target) or tuple(tensor.shape)
                known = found.get(piece.name, _Whole(piece.name, shape, dtype or tensor.dtype, []))
                assert len(shape) == len(known.shape), f"{piece.name} has {len(shape)} dims and {len(known.shape)}"
                known.parts.append((piece, tensor))
                reach = tuple(max(a, b) for a, b in zip(shape, known.shape, strict=True))
                found[piece.name] = known._replace(shape=reach)
    held = {
        rank: [HeldBlock(piece.name, piece.source, shard.replicated) for shard, _ in parts for piece in shard.pieces]
        for rank, parts in ranks.items()
    }
    check_coverage(held, {name: tensor.shape for name, tensor in found.items()})
    return list(found.values())


def _nbytes(tensor: WholeTensor) -> int:
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def _write(
    folder: Path, config: Mapping[str, Any], tensors: list[WholeTensor], max_shard_bytes: int, others: Iterable[Path]
) -> None:
    groups = _groups(tensors, max_shard_bytes)
    if len(groups) == 1:
        write_safetensors(folder / SINGLE, groups[0])
    else:
        weight_map: dict[str, str] = {}
        for number, group in enumerate(groups, 1):
            file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
            write_safetensors(folder / file, group)
            weight_map.update((tensor.name, file) for tensor in group)
        total = sum(map(_nbytes, tensors))
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})
    # What is written is plain numbers, also where the model was trained from a quantised folder.
    plain = {key: value for key, value in config.items() if key not in ("quantization_config", "quantization", TYPES)}
    write_json(folder / "config.json", plain)
    for other in others:
        shutil.copyfile(other, folder / other.name)
    manifest = make_manifest(folder, [path.name for path in folder.iterdir()])
    (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1))


def _groups(tensors: list[WholeTensor], limit: int) -> list[list[WholeTensor]]:
    """The tensors in order, in groups of at most `limit` bytes; a tensor larger than that is a group by itself."""
    groups: list[list[WholeTensor]] = [[]]
    room = limit
    for tensor in tensors:
        if groups[-1] and _nbytes(tensor) > room:
            groups.append([])
            room = limit
        groups[-1].append(tensor)
        room -= _nbytes(tensor)
    return groups


def write_safetensors(path: Path, tensors: Sequence[WholeTensor], **metadata: str) -> None:
    """A file of these tensors in this order; each is made when its turn comes. `metadata` is what it says beside."""
    with path.open("wb") as file:
        file.write(make_header(((tensor.name, tensor.dtype, tensor.shape) for tensor in tensors), metadata))
        for tensor in tensors:
            content = tensor.make()
            file.write(memory(content))


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """A table as people read it."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
