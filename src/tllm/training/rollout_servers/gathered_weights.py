"""`GatheredWeights`: gathers the tensors of which some ranks hold a part each, whole, on the first of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import torch
from torch import Tensor, nn

from tllm.comm.collectives.group import Group
from tllm.core.errors import decoded
from tllm.training.checkpoint.shard_assignment import HELD_BOXES, Share, assign_shards, shapes_of
from tllm.training.checkpoint.shard_writer import held_boxes
from tllm.training.state.tensor_blocks import TensorBlock, model_blocks
from tllm.weights.boxes import widths, within
from tllm.weights.dtypes import DTYPES
from tllm.weights.load import part


class GatheredWeights:
    """Of `modules` of one replica. Every rank of it, whose `group` it is, makes the same calls."""

    def __init__(self, group: Group, modules: Sequence[nn.Module]) -> None:
        self._group, self._modules = group, modules
        gathered = group.all_gather_bytes(msgspec.msgpack.encode(held_boxes(self.blocks())))
        self.held = [decoded(content, HELD_BOXES) for content in gathered]
        """The boxes that each rank holds."""
        self._shares = defaultdict[str, list[tuple[int, Share]]](list)
        for rank, shares in enumerate(assign_shards(self.held)):
            for share in shares:
                self._shares[self.held[rank][share.block].name].append((rank, share))

    def room(self, device: str = "cpu") -> dict[str, Tensor]:
        """For the whole tensors, by name, without values yet; on "meta" their shapes and types alone."""
        types = {box.name: DTYPES[box.dtype] for boxes in self.held for box in boxes}
        shapes = shapes_of(self.held)
        return {name: torch.empty(shape, dtype=types[name], device=device) for name, shape in shapes.items()}

    def gather(self, tensors: Mapping[str, Tensor]) -> None:
        """Bring the weights as they are now into `tensors`, those of a `room` on the first rank and none on the others;
        each element is sent by one of its holders."""
        blocks = self.blocks()
        for name in sorted(self._shares):
            self._gather(name, blocks, tensors.get(name))

    def each(self) -> Iterator[Tensor]:
        """The weights as they are now in the order of their names, on the first rank, which has one whole tensor in
        memory at a time; the others get nothing."""
        blocks, room = self.blocks(), self.room("meta")
        for name in sorted(self._shares):
            tensor = None if self._group.rank else torch.empty_like(room[name], device="cpu")
            self._gather(name, blocks, tensor)
            if tensor is not None:
                yield tensor

    def blocks(self) -> list[TensorBlock]:
        """Of this rank, as they lie now: a learner moves parameters to memory of its own when it begins."""
        return [block for module in self._modules for block in model_blocks(module)]

    def _gather(self, name: str, blocks: Sequence[TensorBlock], tensor: Tensor | None) -> None:
        for rank, share in self._shares[name]:
            if tensor is not None and rank:
                target = part(tensor, share.box)
                target.copy_(self._group.recv_from(rank, torch.empty(widths(share.box), dtype=target.dtype)))
            elif rank == self._group.rank:
                block = blocks[share.block]
                mine = part(block.tensor, within(share.box, block.box))
                if tensor is None:
                    self._group.send_to(0, mine.detach().cpu().contiguous())
                else:
                    part(tensor, share.box).copy_(mine)
