"""Fill a model from weight files: each parameter asks for its own pieces and reads no other bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tllm.core.errors import WeightsError
from tllm.parallel.shard import ShardPiece, held_dtype, shard_of
from tllm.weights.boxes import Box, chunks, is_inside, regions, show, whole, widths
from tllm.weights.byte_source import ByteSource
from tllm.weights.coverage import HeldBlock
from tllm.weights.safetensors_index import Index
from tllm.weights.weight_reuse import Kept, key_of

CHUNK_BYTES = 4 * 1024 * 1024
"""Bytes read at once at most: all the memory that loading takes besides the parameters, and the step of progress."""

Progress = Callable[[int, int], None]
"""progress(bytes done, bytes in all)"""


@dataclass(frozen=True)
class LoadReport:
    """What loading took. `bytes_read` came from the source; `bytes_used` of them are this rank's pieces.

    The two differ where a manifest is checked by the chunk or a remote read takes neighbours along. `unused` are the
    tensors of the files that no piece of this rank names.
    """

    bytes_read: int
    bytes_used: int
    parameters: int
    unused: tuple[str, ...]


@dataclass(frozen=True)
class ReadTask:
    """Reads one box of a tensor from the files into a tensor of the box's shape, such as a view of a parameter."""

    name: str
    box: Box
    into: Tensor


def load(
    model: nn.Module,
    index: Index,
    source: ByteSource,
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
    kept: Kept | None = None,
) -> LoadReport:
    """Fill every parameter of `model`, converted to `dtype` (to its own if None); what is `kept` is not read again.

    A parameter on the meta device is given memory first. Everything is checked before the first byte is read, so a
    WeightsError about names or shapes leaves the model as it was.
    """
    before = source.bytes_read
    parameters = list(model.parameters())
    for parameter in parameters:
        _check(parameter, index)
    unread = _with_memory(model, parameters, dtype, kept or {})
    jobs = [job for parameter in unread for job in _jobs(parameter, index)]
    # In the order of the files, so that a disk reads forward.
    jobs.sort(key=lambda job: (index.entry(job.name).file, index.entry(job.name).start, job.box))
    total = sum(math.prod(widths(job.box)) * index.entry(job.name).dtype.itemsize for job in jobs)
    source.expect((index.entry(job.name).file, spans) for job in jobs for spans in index.spans(job.name, job.box))
    done, staging = 0, torch.empty(CHUNK_BYTES, dtype=torch.uint8)
    with torch.no_grad():
        for job in jobs:
            for read in fill(job, index, source, staging):
                done += read
                if progress is not None:
                    progress(done, total)
    assert done == total
    used = {job.name for job in jobs}
    unused = tuple(sorted(name for name in index.entries if name not in used))
    return LoadReport(source.bytes_read - before, done, len(parameters), unused)


def held_of(model: nn.Module) -> list[HeldBlock]:
    """What a rank's model holds, or would hold if it is on the meta device: what `check_coverage` takes."""
    shards = [shard_of(parameter) for parameter in model.parameters()]
    return [HeldBlock(piece.name, piece.source, shard.replicated) for shard in shards for piece in shard.pieces]


def _check(parameter: nn.Parameter, index: Index) -> None:
    """The files have what the pieces say, and the pieces write each element of the parameter exactly once."""
    shape = tuple(parameter.shape)
    pieces = shard_of(parameter).pieces
    for piece in pieces:
        entry = index.entry(piece.name)
        source, target = piece.source or whole(entry.shape), piece.target or whole(shape)
        assert is_inside(target, shape), f"{piece} does not fit a parameter of {shape}"
        if not is_inside(source, entry.shape):
            wanted = f"at least {tuple(stop for _, stop in source)}"
            raise _unlike(piece, entry.shape, wanted)
        if _thick(source) != _thick(target):
            assert not piece.source, f"{piece} has unequal source and target"
            raise _unlike(piece, entry.shape, str(widths(target)))
        if not entry.dtype.is_floating_point:
            raise WeightsError(
                f"{entry.file}: tensor {piece.name!r} holds {entry.dtype} and a weight is a floating-point number",
                "quantised weights are not read; give the folder of the model before it was quantised",
            )
    for box, holders in regions(shape, [piece.target or whole(shape) for piece in pieces]):
        assert len(holders) == 1, f"{pieces[0].name}: {show(box)} of a parameter is written {len(holders)} times"


def _thick(box: Box) -> tuple[int, ...]:
    return tuple(width for width in widths(box) if width != 1)


def _unlike(piece: ShardPiece, shape: tuple[int, ...], wanted: str) -> WeightsError:
    return WeightsError(
        f"tensor {piece.name!r} has shape {shape} in the files and the model needs {wanted}",
        "does config.json belong to these weights?",
    )


def _with_memory(
    model: nn.Module, parameters: list[nn.Parameter], dtype: torch.dtype | None, kept: Kept
) -> list[nn.Parameter]:
    """Put kept weights in their places. Returns the other parameters, with memory of their dtype, which are to be read.

    Modules that shared one share it still.
    """
    made: dict[int, nn.Parameter] = {}
    for old in parameters:
        wanted = held_dtype(old, dtype or old.dtype)
        found = kept.get((*key_of(old)[:2], wanted))
        if found is not None:
            made[id(old)] = found
        elif old.is_meta or old.dtype != wanted:
            device = "cpu" if old.is_meta else old.device
            made[id(old)] = nn.Parameter(
                torch.empty(old.shape, dtype=wanted, device=device), requires_grad=old.requires_grad
            )
        if id(old) in made:
            made[id(old)].shard = shard_of(old)  # type: ignore[attr-defined]
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(parameter) in made:
                setattr(module, name, made[id(parameter)])
    now = [made.get(id(old), old) for old in parameters]
    return [parameter for parameter in now if kept.get(key_of(parameter)) is not parameter]


def _jobs(parameter: nn.Parameter, index: Index) -> Iterator[ReadTask]:
    for piece in shard_of(parameter).pieces:
        box = piece.source or whole(index.entry(piece.name).shape)
        if math.prod(widths(box)) > 0:
            # Their shapes differ in dims of width 1 at most, so this is a view of the parameter.
            yield ReadTask(piece.name, box, part(parameter.detach(), piece.target).view(widths(box)))


def part(tensor: Tensor, box: Box) -> Tensor:
    """The view of a box of a tensor; `()` is all of it."""
    for dim, (start, stop) in enumerate(box):
        tensor = tensor.narrow(dim, start, stop - start)
    return tensor


def fill(job: ReadTask, index: Index, source: ByteSource, staging: Tensor) -> Iterator[int]:
    """Read one piece in chunks, directly to its place where neither dtype nor layout has to be converted.

    Yields the bytes of each chunk. `staging` is a uint8 tensor of CHUNK_BYTES to pass through otherwise.
    """
    dtype = index.entry(job.name).dtype
    for box in chunks(job.box, CHUNK_BYTES // dtype.itemsize):
        here = tuple((a - first, b - first) for (a, b), (first, _) in zip(box, job.box, strict=True))
        into = part(job.into, here)
        nbytes = math.prod(widths(box)) * dtype.itemsize
        if into.dtype == dtype and into.is_contiguous() and into.device.type == "cpu":
            index.slice_into(source, job.name, box, into)
        else:
            block = staging[:nbytes].view(dtype).view(widths(box))
            index.slice_into(source, job.name, box, block)
            into.copy_(block)
        yield nbytes
