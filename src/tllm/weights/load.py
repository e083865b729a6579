"""Fill a model from weight files: each parameter asks for its own pieces and reads no other bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tllm.core.errors import WeightsError
from tllm.devices.choose import CPU
from tllm.kernels.batch_invariant import is_batch_invariant, make_batch_invariant
from tllm.parallel.quantized_weight import empty_parameter, is_empty
from tllm.parallel.shard import ShardPiece, held_dtype, shard_of
from tllm.parallel.weight_reuse import Kept, Key, key_of
from tllm.quantization.blocks import Blocks, plain_numbers
from tllm.quantization.stored_tensor import StoredTensor
from tllm.weights.boxes import Box, chunks, is_inside, regions, show, whole, widths, within
from tllm.weights.byte_source import ByteSource
from tllm.weights.byte_spans import Spans
from tllm.weights.coverage import HeldBlock
from tllm.weights.load_packed import PackedTask, assemble, is_packed, packed_tasks
from tllm.weights.safetensors_index import Index

CHUNK_BYTES = 4 * 1024 * 1024
"""Bytes read at once at most: all the memory that loading takes besides the parameters, and the step of progress."""

Progress = Callable[[int, int], None]
"""progress(bytes done, bytes in all)"""


class HeldAs(NamedTuple):
    """How and where parameters are held that have no memory yet: on a `device`, and where the files keep them in few
    bits as plain numbers, or `packed`, for products only."""

    packed: bool = False
    device: torch.device = CPU


PLAIN = HeldAs()


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
    held: HeldAs = PLAIN,
) -> None:
    """Fill every parameter of `model`, converted to `dtype` (to its own if None); what is `kept` is not read again.

    A parameter on the meta device is given memory first, on the device and in the form that `held` says. Everything is
    checked before the first byte is loaded, so a WeightsError about names, shapes or ties leaves the model as it was.
    """
    parameters = list(model.parameters())
    for parameter in parameters:
        _check(parameter, index)
    unkept = [x for x in parameters if _held_key(x, dtype) not in (kept or {})]
    check_tied((piece for parameter in unkept for piece in shard_of(parameter).pieces), index, source)
    few_bits = {id(parameter) for parameter in parameters if held.packed and is_packed(parameter, index)}
    made = _memory_for(parameters, dtype, kept or {}, few_bits, held.device)
    unread = _with_memory(model, parameters, made, kept or {})
    to_pack = [(parameter, packed_tasks(parameter, index)) for parameter in unread if is_empty(parameter)]
    jobs: list[ReadTask | PackedTask] = [task for _, tasks in to_pack for task in tasks]
    jobs += [job for parameter in unread if not is_empty(parameter) for job in _jobs(parameter, index)]
    jobs.sort(key=lambda job: file_order(job, index))
    wanted = [found for job in jobs for found in job_spans(job, index)]
    total = sum(spans.nbytes for _, spans in wanted)
    source.expect(wanted)
    done, staging = 0, torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=held.device.type == "cuda")
    with torch.no_grad():
        for job in jobs:
            reads = job.fill(index, source) if isinstance(job, PackedTask) else fill(job, index, source, staging)
            for read in reads:
                done += read
                if progress is not None:
                    progress(done, total)
    assert done == total
    for parameter, tasks in to_pack:
        assemble(parameter, tasks)


def held_of(model: nn.Module) -> list[HeldBlock]:
    """What a rank's model holds, or would hold if it is on the meta device: what `check_coverage` takes."""
    shards = [shard_of(parameter) for parameter in model.parameters()]
    return [HeldBlock(piece.name, piece.source, shard.replicated) for shard in shards for piece in shard.pieces]


def file_order(job: ReadTask | PackedTask, index: Index) -> tuple[str, int, Box]:
    """By what jobs are sorted, so that a disk reads forward."""
    first = index.entry(next(iter(index.planes(job.name, job.box))))
    return first.file, first.start, job.box


def job_spans(job: ReadTask | PackedTask, index: Index) -> Iterator[tuple[str, Spans]]:
    """The bytes that a job reads, in the order in which it reads them."""
    for box in job.boxes() if isinstance(job, PackedTask) else _parts(job, index):
        yield from _box_spans(job.name, box, index)


def _box_spans(name: str, box: Box, index: Index) -> Iterator[tuple[str, Spans]]:
    """The bytes of a box of a tensor, each with its file."""
    for plane, plane_box in index.planes(name, box).items():
        for spans in index.spans(plane, plane_box):
            yield index.entry(plane).file, spans


def _check(parameter: nn.Parameter, index: Index) -> None:
    """The files have what the pieces say, and the pieces write each element of the parameter exactly once."""
    shape = tuple(parameter.shape)
    pieces = shard_of(parameter).pieces
    for piece in pieces:
        held = index.shape(piece.name)
        source, target = piece.source or whole(held), piece.target or whole(shape)
        assert is_inside(target, shape), f"{piece} does not fit a parameter of {shape}"
        if not is_inside(source, held):
            wanted = f"at least {tuple(stop for _, stop in source)}"
            raise _unlike(piece, held, wanted)
        if _thick(source) != _thick(target):
            assert not piece.source, f"{piece} has unequal source and target"
            raise _unlike(piece, held, str(widths(target)))
        if piece.name not in index.stored and not index.entry(piece.name).dtype.is_floating_point:
            entry = index.entry(piece.name)
            raise WeightsError(
                f"{entry.file}: tensor {piece.name!r} holds {entry.dtype} and a weight is a floating-point number",
                "config.json has no quantization_config that says how these are to be read",
            )
    for box, holders in regions(shape, [piece.target or whole(shape) for piece in pieces]):
        assert len(holders) == 1, f"{pieces[0].name}: {show(box)} of a parameter is written {len(holders)} times"


def check_tied(pieces: Iterable[ShardPiece], index: Index, source: ByteSource) -> None:
    """WeightsError for a head that the files have beside the table which is said to be the head, if it has other
    numbers in the rows of these pieces."""
    for piece in pieces:
        head = index.tied.get(piece.name)
        if head is not None and not _is_same(piece, head, index, source):
            raise WeightsError(
                f"{head} of the files is not {piece.name}, and config.json says that one table is both",
                "if the model has a head of its own, set tie_word_embeddings to false in config.json",
            )


def _is_same(piece: ShardPiece, other: str, index: Index, source: ByteSource) -> bool:
    """Whether another tensor of the files has the same shape, and the same numbers in the rows of a piece."""
    held = [index.entries[name].dtype for name in (piece.name, other) if name in index.entries]
    plain = len(held) == 2 and all(dtype.is_floating_point and dtype.itemsize > 1 for dtype in held)
    files = Index(index.entries) if plain else index  # the table alone may be rounded while it is loaded
    if files.shape(piece.name) != files.shape(other):
        return False
    box = piece.source or whole(files.shape(piece.name))
    boxes = list(chunks(box, CHUNK_BYTES // torch.float64.itemsize))
    names = (piece.name, other)
    source.expect([found for box in boxes for name in names for found in _box_spans(name, box, files)])
    return all(torch.equal(*(read_piece(name, box, files, source).double() for name in names)) for box in boxes)


def _thick(box: Box) -> tuple[int, ...]:
    return tuple(width for width in widths(box) if width != 1)


def _unlike(piece: ShardPiece, shape: tuple[int, ...], wanted: str) -> WeightsError:
    return WeightsError(
        f"tensor {piece.name!r} has shape {shape} in the files and the model needs {wanted}",
        "does config.json belong to these weights?",
    )


def _held_key(parameter: nn.Parameter, dtype: torch.dtype | None) -> Key:
    """That of the parameter as it will be held, where it is asked for in a `dtype`."""
    return *key_of(parameter)[:2], held_dtype(parameter, dtype or parameter.dtype)


def _memory_for(
    parameters: list[nn.Parameter], dtype: torch.dtype | None, kept: Kept, few_bits: set[int], device: torch.device
) -> dict[int, nn.Parameter]:
    """What takes the place of parameters, by their `id`: kept weights, or memory of their dtype.

    Those of `few_bits`, by their `id`, are empty until what they stand for has been read. Those that were on the meta
    device are on `device`.
    """
    made: dict[int, nn.Parameter] = {}
    for old in parameters:
        key = _held_key(old, dtype)
        found, wanted = kept.get(key), key[-1]
        if found is not None:
            made[id(old)] = found
        elif id(old) in few_bits:
            made[id(old)] = empty_parameter(old.shape, wanted, device if old.is_meta else old.device)
        elif old.is_meta or old.dtype != wanted:
            memory = torch.empty(old.shape, dtype=wanted, device=device if old.is_meta else old.device)
            made[id(old)] = nn.Parameter(memory, requires_grad=old.requires_grad)
        if id(old) in made:
            made[id(old)].shard = shard_of(old)  # type: ignore[attr-defined]
            if is_batch_invariant(old):
                make_batch_invariant([made[id(old)]])
    return made


def _with_memory(
    model: nn.Module, parameters: list[nn.Parameter], made: dict[int, nn.Parameter], kept: Kept
) -> list[nn.Parameter]:
    """Put what was made in its places; modules that shared one share it still. Returns those that are to be read."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(parameter) in made:
                setattr(module, name, made[id(parameter)])
    now = [made.get(id(old), old) for old in parameters]
    return [parameter for parameter in now if kept.get(key_of(parameter)) is not parameter]


def _jobs(parameter: nn.Parameter, index: Index) -> Iterator[ReadTask]:
    for piece in shard_of(parameter).pieces:
        box = piece.source or whole(index.shape(piece.name))
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
    stored = index.stored.get(job.name)
    for box in _parts(job, index):
        into = part(job.into, within(box, job.box))
        if stored is not None:
            found, nbytes = read_stored(job.name, stored, box, index, source)
            into.copy_(_plain(stored, box, found))
            yield nbytes
            continue
        dtype = index.entry(job.name).dtype
        nbytes = math.prod(widths(box)) * dtype.itemsize
        if into.dtype == dtype and into.is_contiguous() and into.device.type == "cpu":
            index.slice_into(source, job.name, box, into)
        else:
            block = staging[:nbytes].view(dtype).view(widths(box))
            index.slice_into(source, job.name, box, block)
            into.copy_(block)
        yield nbytes


def _parts(job: ReadTask, index: Index) -> Iterator[Box]:
    """A job's box in parts that are read at once."""
    stored = index.stored.get(job.name)
    if stored is None:
        yield from chunks(job.box, CHUNK_BYTES // index.entry(job.name).dtype.itemsize)
        return
    # Whole words and blocks of the files, so that none is read twice: a part ends where an aligned box of it ends.
    start, stop = job.box[0]
    rest = job.box[1:]
    while start < stop:
        first = stored.aligned(((start, start + 1), *rest))
        (low, high), elements = first[0], math.prod(widths(first)) // max(1, first[0][1] - first[0][0])
        wanted = max(high, low + CHUNK_BYTES // (4 * max(1, elements)))
        end = min(stop, stored.aligned(((start, min(stop, wanted)), *rest))[0][1])
        yield ((start, end), *rest)
        start = end


def read_piece(name: str, box: Box, index: Index, source: ByteSource) -> Tensor:
    """A box of a weight as plain numbers (`()` is all of it): of the files' dtype, or float32 where they code it."""
    stored = index.stored.get(name)
    if stored is None:
        return index.slice(source, name, box)
    box = box or whole(stored.shape)
    return _plain(stored, box, read_stored(name, stored, box, index, source)[0])


def read_stored(
    name: str, stored: StoredTensor, box: Box, index: Index, source: ByteSource
) -> tuple[Blocks | Tensor, int]:
    """What the aligned box of a box of a weight holds, and the bytes that were read for it."""
    planes = index.read_planes(source, name, box)
    return stored.decode(stored.aligned(box), planes), sum(x.nbytes for x in planes.values())


def _plain(stored: StoredTensor, box: Box, found: Blocks | Tensor) -> Tensor:
    """The plain numbers of a box, of what the aligned box that holds it has."""
    return part(plain_numbers(found), within(box, stored.aligned(box)))
