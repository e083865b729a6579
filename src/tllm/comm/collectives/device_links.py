"""`DeviceLinks`: how a group sends tensors of a device when some of its ranks are on the same machine.

Tensors go to those ranks from device to device (`DeviceChannel`), and to the others by their links and through the
host's memory. Algorithms and the order of their sums are those of `GroupLinks`, and so are the bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from tllm.comm.collectives.group_links import GroupLinks, TensorsByRank
from tllm.comm.links.frame import is_plain
from tllm.comm.nccl.device_channel import DeviceChannel


@dataclass(frozen=True, slots=True)
class DeviceLinks(GroupLinks):
    """One rank of a group; `places` has the ranks whose devices `channel` leads to: by index here, the number there."""

    channel: DeviceChannel
    places: Mapping[int, int]

    @property
    def device(self) -> torch.device:
        return self.buffers.device

    def exchange(self, sends: TensorsByRank, recvs: TensorsByRank) -> None:
        near_sends = {place: x.contiguous() for place, x in self._near(sends).items()}
        near_recvs = self._near(recvs)
        far = partial(
            self._exchange_far, *({p: x for p, x in one.items() if p not in self.places} for one in (sends, recvs))
        )
        if near_sends or near_recvs:
            self.channel.exchange(near_sends, near_recvs, far)
        else:
            far()

    def among(self, ranks: Sequence[int]) -> DeviceLinks:
        part = GroupLinks.among(self, ranks)
        places = {index: self.places[rank] for index, rank in enumerate(ranks) if rank in self.places}
        return DeviceLinks(part.rank, part.send, part.recv, part.buffers, self.channel, places)

    def _near(self, tensors: TensorsByRank) -> dict[int, torch.Tensor]:
        return {self.places[peer]: x for peer, x in tensors.items() if peer in self.places}

    def _exchange_far(self, sends: TensorsByRank, recvs: TensorsByRank) -> None:
        """By links. What goes to several ranks is copied to the host once; a link copies what it receives itself."""
        copies = {id(x): x if is_plain(x) else x.cpu() for x in sends.values()}
        GroupLinks.exchange(self, {peer: copies[id(x)] for peer, x in sends.items()}, recvs)
