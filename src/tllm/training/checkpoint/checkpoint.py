"""`Checkpoint`: one complete save, which a rank of any plan can read, and which can be exported as a model's folder.

`final/`: the trained model as a Hugging Face folder, made from the last save.
"""

from __future__ import annotations

import math
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tllm.core.errors import WeightsError, nearest
from tllm.training.checkpoint.manifest import CHANGED, NAME, CheckpointManifest, StoredFile, read_saved
from tllm.training.state.tensor_blocks import TensorBlock, is_of_model
from tllm.weights.boxes import Shape, is_inside, overlap, show, whole, widths, within
from tllm.weights.byte_source import ByteSource, LocalFiles
from tllm.weights.dtypes import DTYPES
from tllm.weights.export import MAX_SHARD_BYTES, export_tensors
from tllm.weights.load import CHUNK_BYTES, Progress, ReadTask, file_order, fill, part
from tllm.weights.manifest import CheckedFiles
from tllm.weights.safetensors_header import TensorEntry, read_header
from tllm.weights.safetensors_index import Index


class Checkpoint:
    """Tensors by their boxes. Every chunk of a file that is read is checked against its hash.

    A rank reads the bytes of its own blocks and the rest of the chunks that they lie in.
    """

    def __init__(self, source: ByteSource, saved: CheckpointManifest) -> None:
        self.saved = saved
        self._source = CheckedFiles(source, saved.hashes, NAME, CHANGED)
        self._headers: dict[str, dict[str, TensorEntry]] = {}
        self._pieces: dict[str, list[StoredFile]] = defaultdict(list)
        for piece in saved.pieces:
            self._pieces[piece.name].append(piece)

    @classmethod
    def open(cls, source: ByteSource) -> Checkpoint:
        """The save in a source's files. WeightsError if it is not complete or not true."""
        return cls(source, read_saved(source))

    @property
    def step(self) -> int:
        """The steps that had been taken."""
        return self.saved.step

    @property
    def facts(self) -> dict[str, Any]:
        """What was saved beside the tensors."""
        return self.saved.facts

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """The whole shape of each tensor."""
        return self.saved.shapes

    @property
    def model_names(self) -> list[str]:
        """The model's own tensors, without the states of an optimizer and what is learned beside it."""
        return sorted(name for name in self.saved.shapes if is_of_model(name))

    def files_of(self, names: Iterable[str]) -> set[str]:
        """The files that hold these tensors."""
        return {piece.file for name in names for piece in self._pieces[name]}

    def files_for(self, blocks: Sequence[TensorBlock]) -> set[str]:
        """The files that hold something of these blocks."""
        return {
            piece.file
            for block in blocks
            for piece in self._pieces[block.name]
            if overlap(piece.box, block.box) is not None
        }

    def fill(self, blocks: Sequence[TensorBlock], progress: Progress | None = None) -> int:
        """Fill every block, converted to its dtype where that differs; the bytes used of the files.

        Names, boxes, sizes and headers are checked before the first tensor is touched; hashes as the bytes come.
        """
        jobs = [job for block in blocks for job in self._jobs(block)]
        index = Index({key: entry for header in self._headers.values() for key, entry in header.items()})
        # In the order of the files, so that a chunk is read and hashed once.
        jobs.sort(key=lambda job: file_order(job, index))
        total = sum(math.prod(widths(job.box)) * index.entry(job.name).dtype.itemsize for job in jobs)
        done, staging = 0, torch.empty(CHUNK_BYTES, dtype=torch.uint8)
        with torch.no_grad():
            for job in jobs:
                for read in fill(job, index, self._source, staging):
                    done += read
                    if progress is not None:
                        progress(done, total)
        return done

    def whole(self, name: str) -> Tensor:
        """One tensor, put together."""
        shape = self._shape(name)
        tensor = torch.empty(shape, dtype=self.dtype(name))
        self.fill([TensorBlock(name, whole(shape), tensor)])
        return tensor

    def dtype(self, name: str) -> torch.dtype:
        """As it was saved."""
        self._shape(name)
        code = self._pieces[name][0].dtype if self._pieces[name] else ""
        if code not in DTYPES:
            raise WeightsError(f"{NAME} gives {name} the dtype {code!r}, which is not known here", CHANGED)
        return DTYPES[code]

    def _shape(self, name: str) -> Shape:
        if name not in self.saved.shapes:
            raise WeightsError(f"the save of step {self.step} holds no {name!r}", nearest(name, self.saved.shapes))
        return self.saved.shapes[name]

    def _jobs(self, block: TensorBlock) -> Iterator[ReadTask]:
        """The way of a block from each stored piece that it meets."""
        shape = self._shape(block.name)
        assert tuple(block.tensor.shape) == widths(block.box)
        if not is_inside(block.box, shape):
            raise WeightsError(
                f"{block.name}{show(block.box)} is asked for and the save of step {self.step} has shape {shape}",
                "resume with the config.json that the run began with",
            )
        for piece in self._pieces[block.name]:
            met = overlap(piece.box, block.box)
            if met is not None:
                key = self._entry(piece, shape)
                yield ReadTask(key, within(met, piece.box), part(block.tensor, within(met, block.box)))

    def _entry(self, piece: StoredFile, shape: Shape) -> str:
        """The piece's name in its file, whose header says the same as the list."""
        if piece.file not in self._headers:
            self._headers[piece.file] = read_header(self._source, piece.file)
        key = piece.key(shape)
        entry = self._headers[piece.file].get(key)
        if entry is None or entry.shape != widths(piece.box) or entry.dtype != self.dtype(piece.name):
            raise WeightsError(f"{piece.file} does not hold {key} as {NAME} says", CHANGED)
        return key


@dataclass(frozen=True)
class CheckpointTensor:
    """A tensor of a checkpoint that is put together when it is written."""

    name: str
    shape: Shape
    dtype: torch.dtype
    checkpoint: Checkpoint

    def make(self) -> Tensor:
        return self.checkpoint.whole(self.name).to(self.dtype)


def export_checkpoint(
    checkpoint: Checkpoint,
    folder: Path | str,
    config: Mapping[str, Any],
    dtype: torch.dtype | None = None,
    others: Iterable[Path] = (),
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """The model of a save as a new Hugging Face folder, one tensor at a time; `others` are files to copy along."""
    names = checkpoint.model_names
    tensors = [
        CheckpointTensor(name, tuple(checkpoint.shapes[name]), dtype or checkpoint.dtype(name), checkpoint)
        for name in names
    ]
    export_tensors(folder, config, tensors, max_shard_bytes, others)


def open_folder(folder: Path | str) -> Checkpoint:
    """The save in a folder, `RUN/step-N`."""
    return Checkpoint.open(LocalFiles(folder))


FOLDER = "final"


def write_final(run: Path, write: Callable[[Path], None]) -> Path:
    """Have `write` make the run's `final/`, in the place of an earlier one, which stays until the new one is there.

    Should the machine fail between the two renames, the new model lies complete in `final.new`.
    """
    final, new, old = run / FOLDER, run / f"{FOLDER}.new", run / f"{FOLDER}.old"
    try:
        for left in (new, old):
            shutil.rmtree(left, ignore_errors=True)
        write(new)
        if final.exists():
            final.rename(old)
        new.rename(final)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise WeightsError(f"cannot write {final}: {error.strerror or error}", "see that the disk has room") from error
    return final
