"""`Index`: where each tensor of a model lies in its files, and reading any part of one."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from tllm.core.errors import WeightsError
from tllm.quantization.stored_tensor import StoredTensor
from tllm.spec.quantized.quantization_config import text_name
from tllm.weights.boxes import Box, Shape, is_inside, show, whole, widths
from tllm.weights.byte_source import ByteSource
from tllm.weights.byte_spans import Spans, spans_of
from tllm.weights.dtypes import memory
from tllm.weights.header_tables import INDEX, SINGLE, weight_map
from tllm.weights.safetensors_header import TensorEntry, read_header

T = TypeVar("T")

PICKLED = (".bin", ".pt", ".pth", ".ckpt")
HALVES = (".incomplete", ".part", ".crdownload", ".aria2", ".tmp")
"""How programs call what they have not fetched to its end."""

NO_HEAD = (
    "if they are of a model that embeds and was saved without its head, name it by its kind in config.json: "
    '"architectures": ["Qwen3Model"] (in text_config, if it also sees)'
)

OTHER_PARTS = (
    *("visual", "vision_tower", "vision_model", "embed_vision", "multi_modal_projector"),
    *("audio_tower", "embed_audio", "mtp"),
)
"""Encoders of images and sound with their projectors, and heads that predict several tokens: none of them is read."""


@dataclass(frozen=True)
class Index:
    """Every tensor of a text model's files by name. It holds no bytes: reading takes the source as well.

    `stored` are the weights that the files keep in another form, by the name that the model has for them; the tensors
    that they are made of are among `entries`. `tied` are weights of which `config.json` says that they are another
    one, which the files have too: table -> head.
    """

    entries: dict[str, TensorEntry]
    stored: Mapping[str, StoredTensor] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, source: ByteSource) -> Index:
        """Read and check the headers of `model.safetensors`, or of the files that its `.index.json` names."""
        names = source.names()
        if SINGLE in names:
            return cls(text_tensors(read_header(source, SINGLE)))
        if INDEX in names:
            return cls(text_tensors(dict(_from_weight_map(source))))
        raise _nothing_to_read(names)

    def __contains__(self, name: str) -> bool:
        return name in self.stored or name in self.entries

    def shape(self, name: str) -> Shape:
        """The shape of a weight as the model has it; WeightsError with the nearest name if there is none."""
        return self.stored[name].shape if name in self.stored else self.entry(name).shape

    def planes(self, name: str, box: Box) -> dict[str, Box]:
        """The tensors of the files, and the box of each, that hold a box of a weight."""
        if name in self.stored:
            weight = self.stored[name]
            return weight.plane_boxes(weight.aligned(box))
        return {name: box}

    def read_planes(self, source: ByteSource, name: str, box: Box) -> dict[str, Tensor]:
        """What `planes` names, read."""
        return {plane: self.slice(source, plane, at) for plane, at in self.planes(name, box).items()}

    def entry(self, name: str) -> TensorEntry:
        """Where a tensor lies; WeightsError with the nearest name if there is none."""
        if name not in self.entries:
            close = difflib.get_close_matches(name, self.entries, n=1, cutoff=0.0)
            hint = f"the nearest is {close[0]!r}; does config.json belong to these weights?" if close else ""
            raise WeightsError(
                f"the weight files have no tensor {name!r} among their {len(self.entries)}",
                NO_HEAD if name == "lm_head.weight" else hint,
            )
        return self.entries[name]

    def slice(self, source: ByteSource, name: str, box: Box = ()) -> Tensor:
        """A new tensor of the file's dtype with one [start, stop) taken from each dim; `()` takes all."""
        out = torch.empty(widths(self._box(name, box)), dtype=self.entry(name).dtype)
        self.slice_into(source, name, box, out)
        return out

    def slice_into(self, source: ByteSource, name: str, box: Box, out: Tensor) -> None:
        """The same into a contiguous tensor of just this shape and the file's dtype; it reads only the box's bytes."""
        entry, box = self.entry(name), self._box(name, box)
        assert (tuple(out.shape), out.dtype) == (widths(box), entry.dtype)
        view, at = memory(out), 0
        for spans in self.spans(name, box):
            source.read_spans(entry.file, spans, view[at : at + spans.nbytes])
            at += spans.nbytes
        assert at == out.nbytes

    def spans(self, name: str, box: Box) -> Iterator[Spans]:
        """Where in its file a box of a tensor lies."""
        entry = self.entry(name)
        return spans_of(entry.shape, box, entry.dtype.itemsize, entry.start)

    def _box(self, name: str, box: Box) -> Box:
        shape = self.entry(name).shape
        if box and not is_inside(box, shape):
            raise WeightsError(f"{name}{show(box)} is not inside the files' tensor of shape {shape}")
        return box or whole(shape)


def _from_weight_map(source: ByteSource) -> Iterator[tuple[str, TensorEntry]]:
    """The index says in which file each tensor is; a file or tensor that is not where it says is an error."""
    file_of = weight_map(source)
    known = set(source.names())
    for file in sorted(set(file_of.values()) - known):
        raise WeightsError(f"{INDEX} names {file!r} and it is missing", "copy the whole model folder, every file of it")
    headers = {file: read_header(source, file) for file in sorted(set(file_of.values()))}
    for name, file in file_of.items():
        if name not in headers[file]:
            elsewhere = [other for other, header in headers.items() if name in header]
            found = f"it is in {elsewhere[0]}" if elsewhere else "it is in no file"
            raise WeightsError(f"{INDEX} says that {name!r} is in {file} and {found}", "the index is of other files")
        yield name, headers[file][name]


def _nothing_to_read(names: list[str]) -> WeightsError:
    pickled = [name for name in names if name.endswith(PICKLED)]
    if pickled:
        return WeightsError(
            f"the weights are in {pickled[0]}, a pickle, which can run code when it is read; only safetensors are read",
            "convert them: in Python, AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(OTHER_FOLDER)",
        )
    pieces = [name for name in names if name.endswith(".safetensors")]
    if pieces:
        return WeightsError(f"there is {pieces[0]} and no {INDEX} that says what is in it", "copy that file too")
    if halves := [name for name in names if name.endswith(HALVES)]:
        return WeightsError(
            f"{halves[0]} was not fetched to its end, and is all there is of the weights", "fetch it again"
        )
    return WeightsError(
        f"the model's folder has no weights: neither {SINGLE} nor {INDEX} is there",
        "copy them too, or give the folder that holds config.json and the weights",
    )


def text_tensors(entries: Mapping[str, T]) -> dict[str, T]:
    """The text model's tensors under the names that a text model's checkpoint gives them.

    A model saved without its head, as embedding models are, has the same names without the first part.
    """
    found: dict[str, T] = {}
    is_headless = "embed_tokens.weight" in entries
    for name, entry in entries.items():
        if is_headless:
            name = f"model.{name}"
        if name.removeprefix("model.").partition(".")[0] in OTHER_PARTS:
            continue
        plain = text_name(name)
        if plain in found:
            raise WeightsError(f"the weight files have {plain!r} twice, once as {name!r}", "take one of them out")
        found[plain] = entry
    return found
