"""`HeldWeights`: the weights of a rollout server, chunk by chunk, and how they become those of a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tllm.core.errors import FrameError
from tllm.training.rollout_servers.gathered_weights import whole_tensors
from tllm.training.rollout_servers.weight_chunks import HASH_BYTES, ChunkTable, sha256
from tllm.training.state.tensor_blocks import TensorBlock, model_blocks
from tllm.weights.boxes import widths
from tllm.weights.dtypes import memory
from tllm.weights.load import part


class HeldWeights:
    """What `modules` of a whole model hold, as a run names it. A chunk is written once its bytes have its hash."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._blocks: dict[str, list[TensorBlock]] = defaultdict(list)
        for module in modules:
            for block in model_blocks(module):
                self._blocks[block.name].append(block)
        whole = whole_tensors([block for blocks in self._blocks.values() for block in blocks])
        self._shapes = {name: tensor.shape for name, tensor in whole.items()}
        self.table = ChunkTable.of(whole)
        del whole
        self._hashes = self.table.hashes({name: self._read(name) for name in self._blocks})
        self._wanted = b""

    @property
    def root(self) -> bytes:
        """What names the weights as they are (`ChunkTable.root`)."""
        return self.table.root(self._hashes)

    def want(self, table: bytes, hashes: bytes) -> list[int]:
        """The numbers of the chunks that are to become others. FrameError for hashes of another model."""
        if table != self.table.digest or len(hashes) != HASH_BYTES * len(self.table.places):
            raise FrameError(
                f"the weights of the run are {len(hashes) // HASH_BYTES} chunks and those of this server "
                f"{len(self.table.places)}, or their tensors have other names, shapes or types"
            )
        self._wanted = hashes
        return self.lacking

    @property
    def lacking(self) -> list[int]:
        """The chunks that are wanted and not here."""
        return self.table.unlike(self._hashes, self._wanted)

    def put(self, numbers: Sequence[int], contents: Sequence[bytes]) -> None:
        """Write chunks that are wanted. FrameError, with nothing written, for bytes that do not have their hashes."""
        table, by_name = self.table, defaultdict[str, list[tuple[int, bytes]]](list)
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
            by_name[place.name].append((number, content))
        hashes = bytearray(self._hashes)
        for name, chunks in by_name.items():
            tensor = self._read(name)
            held = memory(tensor)
            for number, content in chunks:
                place = table.places[number]
                held[place.start : place.stop] = content
                hashes[number * HASH_BYTES : (number + 1) * HASH_BYTES] = table.hash_of(self._wanted, number)
            self._write(name, tensor)
        self._hashes = bytes(hashes)

    def _read(self, name: str) -> Tensor:
        """A copy of a whole tensor."""
        blocks = self._blocks[name]
        tensor = torch.empty(self._shapes[name], dtype=blocks[0].tensor.dtype)
        for block in blocks:
            part(tensor, block.box).copy_(block.tensor)
        return tensor

    @torch.no_grad()
    def _write(self, name: str, tensor: Tensor) -> None:
        for block in self._blocks[name]:
            block.tensor.copy_(part(tensor, block.box).view(widths(block.box)))
