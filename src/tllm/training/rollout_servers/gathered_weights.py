"""`GatheredWeights`: the whole tensors that a replica's ranks train, each a part of, brought together on its first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import torch
from torch import Tensor, nn

from tllm.comm.collectives.group import Group
from tllm.training.checkpoint.shard_assignment import HeldBox, assign_shards, shapes_of
from tllm.training.state.tensor_blocks import TensorBlock, model_blocks
from tllm.weights.boxes import widths, within
from tllm.weights.dtypes import DTYPES, NAMES
from tllm.weights.load import part


class GatheredWeights:
    """Every rank of the replica, whose `group` it is, makes the same calls. The first one gives the room, in the host's
    memory: for the weights once more, or what is trained of them."""

    def __init__(self, group: Group, trained: Sequence[nn.Module]) -> None:
        self._group = group
        self._trained = trained
        held = [HeldBox(b.name, b.box, NAMES[b.tensor.dtype], b.tensor.dtype.itemsize) for b in self._blocks()]
        gathered = group.all_gather_bytes(msgspec.msgpack.encode(held))
        self._held = [msgspec.msgpack.decode(content, type=list[HeldBox]) for content in gathered]
        self._shares = assign_shards(self._held)

    def room(self) -> dict[str, Tensor]:
        """For the whole tensors, by name, without values yet."""
        types = {box.name: DTYPES[box.dtype] for boxes in self._held for box in boxes}
        return {name: torch.empty(shape, dtype=types[name]) for name, shape in shapes_of(self._held).items()}

    def gather(self, tensors: Mapping[str, Tensor]) -> None:
        """Bring the weights as they are now into `tensors`, those of a `room` on the first rank and none on the others;
        each element is sent by one of its holders."""
        blocks = self._blocks()
        if self._group.rank:
            for share in self._shares[self._group.rank]:
                block = blocks[share.block]
                mine = part(block.tensor, within(share.box, block.box))
                self._group.send_to(0, mine.detach().cpu().contiguous())
            return
        for rank, shares in enumerate(self._shares):
            for share in shares:
                held = self._held[rank][share.block]
                target = part(tensors[held.name], share.box)
                if rank == 0:
                    block = blocks[share.block]
                    target.copy_(part(block.tensor, within(share.box, block.box)))
                else:
                    target.copy_(self._group.recv_from(rank, torch.empty(widths(share.box), dtype=target.dtype)))

    def _blocks(self) -> list[TensorBlock]:
        """As they lie now: a learner moves parameters to memory of its own when it begins."""
        return [block for module in self._trained for block in model_blocks(module)]


def whole_tensors(blocks: Sequence[TensorBlock]) -> Mapping[str, Tensor]:
    """The tensors that the blocks of a whole model make up, without values."""
    held = [[HeldBox(b.name, b.box, NAMES[b.tensor.dtype], b.tensor.dtype.itemsize) for b in blocks]]
    types = {block.name: block.tensor.dtype for block in blocks}
    return {name: torch.empty(shape, dtype=types[name]) for name, shape in shapes_of(held).items()}
