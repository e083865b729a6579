"""`HeldWeights`: the weights of a rollout server, chunk by chunk, which are replaced by those of a run.

Where several ranks hold a part each, the first knows the hashes of all chunks, and sends each rank those of which it
has a part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tllm.comm.collectives.group import Group
from tllm.core.errors import FrameError
from tllm.training.rollout_servers.gathered_weights import GatheredWeights
from tllm.training.rollout_servers.weight_chunks import HASH_BYTES, ChunkTable, chunk_hashes, sha256
from tllm.training.state.tensor_blocks import TensorBlock
from tllm.weights.boxes import Box, overlap, runs, widths
from tllm.weights.dtypes import memory
from tllm.weights.load import part


class HeldWeights:
    """What `modules` of the ranks of a `group` hold, as a run names it; they are made together, by all of them.

    `is_filled`: whether the modules have values yet. Where one rank's have none, no chunk counts as held: parts that
    several ranks have alike would be told by one of them. A chunk is written once its bytes have its hash.
    """

    def __init__(self, modules: Sequence[nn.Module], group: Group, is_filled: bool = True) -> None:
        gathered = GatheredWeights(group, modules)
        self._boxes = [defaultdict[str, list[Box]](list) for _ in gathered.held]
        for boxes, held in zip(self._boxes, gathered.held, strict=True):
            for one in held:
                boxes[one.name].append(one.box)
        self._blocks: dict[str, list[TensorBlock]] = defaultdict(list)
        for block in gathered.blocks():
            self._blocks[block.name].append(block)
        self._whole = gathered.room("meta")
        self.table = ChunkTable.of(self._whole)
        self._hashes = bytes(HASH_BYTES * len(self.table.places))  # of the first rank, as is what is wanted
        if group.size == 1 or all(content == _FILLED for content in group.all_gather_bytes(_FILLED * is_filled)):
            self._hashes = b"".join(chunk_hashes(tensor) for tensor in gathered.each())
        self._wanted = b""

    @property
    def root(self) -> bytes:
        """What names the weights as they are (`ChunkTable.root`)."""
        return self.table.root(self._hashes)

    def check_hashes(self, table: bytes, hashes: bytes) -> None:
        """FrameError for hashes of another model."""
        if table != self.table.digest or len(hashes) != HASH_BYTES * len(self.table.places):
            raise FrameError(
                f"the weights of the run are {len(hashes) // HASH_BYTES} chunks and those of this server "
                f"{len(self.table.places)}, or their tensors have other names, shapes or types"
            )

    def want(self, table: bytes, hashes: bytes) -> list[int]:
        """The numbers of the chunks that are to become others. FrameError for hashes of another model."""
        self.check_hashes(table, hashes)
        self._wanted = hashes
        return self.lacking

    @property
    def lacking(self) -> list[int]:
        """The chunks that are wanted and not here."""
        return self.table.unlike(self._hashes, self._wanted)

    def check(self, numbers: Sequence[int], contents: Sequence[bytes]) -> None:
        """FrameError for chunks that are not wanted, or for bytes that do not have their hashes."""
        table = self.table
        if len(numbers) != len(contents) or not self._wanted:
            raise FrameError(f"{len(contents)} chunks of weights with {len(numbers)} numbers, or without hashes")
        for number, content in zip(numbers, contents, strict=True):
            if not 0 <= number < len(table.places):
                raise FrameError(f"chunk {number} of weights, of which there are {len(table.places)}")
            place = table.places[number]
            if len(content) != place.stop - place.start or sha256(content) != table.hash_of(self._wanted, number):
                raise FrameError(
                    f"the {len(content)} bytes of {place.name} from byte {place.start} on do not have their SHA-256"
                )

    def of_rank(self, numbers: Sequence[int], rank: int) -> list[int]:
        """Those of some chunks of which a rank holds something."""
        return [number for number in numbers if self._is_of_rank(number, rank)]

    def put(self, numbers: Sequence[int], contents: Sequence[bytes]) -> None:
        """Write what this rank holds of chunks that were checked."""
        table, by_name = self.table, defaultdict[str, list[tuple[int, bytes]]](list)
        for number, content in zip(numbers, contents, strict=True):
            by_name[table.places[number].name].append((number, content))
        for name in by_name.keys() & self._blocks.keys():
            tensor = self._read(name)
            held = memory(tensor)
            for number, content in by_name[name]:
                place = table.places[number]
                held[place.start : place.stop] = content
            self._write(name, tensor)

    def confirm(self, numbers: Sequence[int]) -> None:
        """On the first rank: these chunks are as they were wanted, wherever they lie."""
        hashes = bytearray(self._hashes)
        for number in numbers:
            hashes[number * HASH_BYTES : (number + 1) * HASH_BYTES] = self.table.hash_of(self._wanted, number)
        self._hashes = bytes(hashes)

    def _is_of_rank(self, number: int, rank: int) -> bool:
        name, start, stop = self.table.places[number]
        size, shape = self._whole[name].dtype.itemsize, tuple(self._whole[name].shape)
        chunk, held = list(runs(shape, start // size, stop // size)), self._boxes[rank].get(name, ())
        return any(overlap(one, box) is not None for one in held for box in chunk)

    def _read(self, name: str) -> Tensor:
        """A tensor of the whole's shape with a copy of what this rank has of it."""
        tensor = torch.empty_like(self._whole[name], device="cpu")
        for block in self._blocks[name]:
            part(tensor, block.box).copy_(block.tensor)
        return tensor

    @torch.no_grad()
    def _write(self, name: str, tensor: Tensor) -> None:
        for block in self._blocks[name]:
            block.tensor.copy_(part(tensor, block.box).view(widths(block.box)))


_FILLED = b"filled"
