"""What `tllm verify` compares: the outputs of a model's parts, taken by hooks, and digests of its weights."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor, nn

from tllm.model.transformer import Transformer
from tllm.parallel.shard import shard_of
from tllm.spec.cut import Range
from tllm.weights.boxes import Box
from tllm.weights.dtypes import memory
from tllm.weights.load import part

EMBEDDING, LOGITS = "embedding", "logits"
OF_LAYER = re.compile(r"\blayers\.(\d+)\.")


class Difference(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How far what one part gives ("embedding", "layer 3", "logits") is from what it should.

    `largest` is the largest difference of an element, `scale` the largest element that there should be; a value that is
    no number differs infinitely.
    """

    what: str
    equal: bool
    largest: float
    scale: float

    @property
    def relative(self) -> float:
        return self.largest / self.scale if self.scale else self.largest


class Fingerprint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A piece of a tensor of the checkpoint, `()` for all of it, and the SHA-256 of its elements as they are held."""

    name: str
    box: Box
    digest: str


class Compared(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one rank found of itself."""

    rank: int
    differences: tuple[Difference, ...]
    fingerprints: tuple[Fingerprint, ...]


class Record:
    """Keeps what each part of a model gives, batch after batch, from now on."""

    def __init__(self, model: Transformer) -> None:
        self._seen: dict[str, list[Tensor]] = {}
        if model.is_first:
            self._watch(EMBEDDING, model.embed_tokens)
        for number, layer in model.layers.items():
            self._watch(f"layer {number}", layer)
        if model.is_last:
            self._watch(LOGITS, model.lm_head)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """(part, all its rows in the order in which they were computed)"""
        return iter((what, torch.cat(rows)) for what, rows in self._seen.items())

    def _watch(self, what: str, module: nn.Module) -> None:
        def keep(_: nn.Module, __: object, rows: Tensor) -> None:
            self._seen.setdefault(what, []).append(rows.detach().to("cpu", copy=True))

        module.register_forward_hook(keep)


def write_rows(folder: Path, what: str, rows: Tensor) -> None:
    """Leave what a part should give for `compare`, in a folder of this machine."""
    kept = rows.contiguous()  # by this name, for as long as its memory is read
    (folder / _file(what)).write_bytes(memory(kept))


class HeldPart(NamedTuple):
    """What a rank has of the prompt's `tokens`: these `rows` and `columns` of hidden states, this `vocab` of logits."""

    tokens: int
    rows: list[int]
    columns: Range
    vocab: Range


def compare(record: Record, folder: Path, held: HeldPart) -> tuple[Difference, ...]:
    """Hold a record against what was written."""
    found = []
    for what, rows in record:
        expected = torch.frombuffer(bytearray((folder / _file(what)).read_bytes()), dtype=rows.dtype)
        if what == LOGITS:
            expected = expected.view(len(rows), -1)[:, slice(*held.vocab)]
        else:
            expected = expected.view(held.tokens, -1)[held.rows, slice(*held.columns)]
        found.append(difference(what, rows, expected))
    return tuple(found)


def difference(what: str, rows: Tensor, expected: Tensor) -> Difference:
    """How far `rows` are from what they should be."""
    assert rows.shape == expected.shape, f"{what}: {tuple(rows.shape)} beside {tuple(expected.shape)}"
    largest = float((rows.double() - expected.double()).abs().nan_to_num(nan=torch.inf).max())
    return Difference(what, largest == 0, largest, float(expected.double().abs().max()))


def fingerprints(model: nn.Module) -> tuple[Fingerprint, ...]:
    """Of every piece that a model holds, in the dtype of its weights."""
    dtype = next(model.parameters()).dtype
    return tuple(
        Fingerprint(piece.name, piece.source, digest(part(parameter.detach().to(dtype), piece.target)))
        for parameter in model.parameters()
        for piece in shard_of(parameter).pieces
    )


def digest(values: Tensor) -> str:
    """SHA-256, in hex, of a tensor's elements, row by row."""
    kept = values.cpu().contiguous()  # by this name, for as long as its memory is read
    return hashlib.sha256(memory(kept)).hexdigest()


def part_of(name: str) -> str:
    """The part that a tensor of the checkpoint belongs to: that of `model.layers.3.mlp.up_proj.weight` is layer 3."""
    found = OF_LAYER.search(name)
    if found:
        return f"layer {found[1]}"
    return EMBEDDING if "embed_tokens" in name else LOGITS


def place_of(what: str, num_layers: int) -> int:
    """Where a part stands in the model's order: the embedding first, the logits last."""
    ends = {EMBEDDING: 0, LOGITS: num_layers + 1}
    return ends[what] if what in ends else 1 + int(what.removeprefix("layer "))


def _file(what: str) -> str:
    return f"{what.replace(' ', '-')}.bin"
