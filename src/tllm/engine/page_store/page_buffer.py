"""`PageBuffer`: pages of one rank in memory beside its cache, on their way to disk or from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np
import torch
from torch import Tensor

from tllm.engine.compute.kv_cache import KVCache
from tllm.engine.page_store.page_file import TensorForm
from tllm.engine.pages.page_table import Run
from tllm.spec.cut import Cut, Range, as_layer, size
from tllm.spec.model_spec import ModelSpec


@dataclass(frozen=True)
class HeldLayer:
    """One layer of a rank's cache: its tensors, [kv heads, slots, ...], and which kv heads of the model they are."""

    tensors: tuple[Tensor, ...]
    heads: Range

    @cached_property
    def forms(self) -> tuple[TensorForm, ...]:
        """The tensors as files name them."""
        return tuple(TensorForm(str(x.dtype).removeprefix("torch."), tuple(x.shape[2:])) for x in self.tensors)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token and one kv head."""
        return sum(prod(x.shape[2:]) * x.dtype.itemsize for x in self.tensors)


def held_layers(cache: KVCache, spec: ModelSpec, cut: Cut) -> dict[int, HeldLayer] | None:
    """The layers of a rank's cache by their global numbers, where it is known which kv heads they hold; else None.

    A layer with a single head that is not cut, such as that of latent attention, is the same on every rank.
    """
    held = {}
    for number, layer in cache.layers.items():
        tensors = layer.tensors()
        heads = tensors[0].shape[0]
        _, of_layer = as_layer(spec, spec.layers[number], cut)
        if heads != size(of_layer.kv_heads) and heads != 1:
            return None
        held[number] = HeldLayer(tensors, of_layer.kv_heads if heads == size(of_layer.kv_heads) else (0, 1))
    return held


class PageBuffer:
    """`count` pages, in the form of the cache: for each tensor of each layer [kv heads, count * page_size, ...].

    `bytes_of` are the same bytes by page: [kv heads, count, bytes of a page].
    """

    def __init__(self, layers: Mapping[int, HeldLayer], page_size: int, count: int) -> None:
        self.page_size, self.count = page_size, count
        self._layers = layers
        self._tensors = {
            number: tuple(_empty_like(x, count * page_size) for x in layer.tensors) for number, layer in layers.items()
        }
        self._bytes = {
            number: [x.view(torch.uint8).numpy().reshape(x.shape[0], count, -1) for x in tensors]
            for number, tensors in self._tensors.items()
        }

    def copy_out(self, page_table: tuple[Run, ...]) -> None:
        """Take the pages out of the cache."""
        for ours, cached in self._runs(page_table, self.count):
            ours.copy_(cached)

    def copy_in(self, page_table: tuple[Run, ...], count: int) -> None:
        """Put the first `count` pages into pages of the cache."""
        for ours, cached in self._runs(page_table, count):
            cached.copy_(ours)

    def page(self, number: int, place: int) -> list[memoryview]:
        """The bytes of one layer of a page: all kv heads of each tensor."""
        return [memoryview(x[:, place].tobytes()) for x in self._bytes[number]]

    def fill(self, number: int, place: int, content: bytes, heads: Range) -> None:
        """Take over those kv heads of one layer of a page that are held here, from bytes of the model's `heads`."""
        own = self._layers[number].heads
        first, stop = max(own[0], heads[0]), min(own[1], heads[1])
        if first >= stop:  # they have heads in common in other layers alone
            return
        at = 0
        for x in self._bytes[number]:
            rows = np.frombuffer(content, np.uint8, size(heads) * x.shape[2], at).reshape(size(heads), -1)
            x[first - own[0] : stop - own[0], place] = rows[first - heads[0] : stop - heads[0]]
            at += rows.size

    def _runs(self, page_table: tuple[Run, ...], count: int) -> list[tuple[Tensor, Tensor]]:
        """The slots of each tensor here beside those of the cache, run by run, for the first `count` pages."""
        pairs, at = [], 0
        for first, pages in page_table:
            pages = min(pages, count - at)
            start, stop = at * self.page_size, (at + pages) * self.page_size
            place = first * self.page_size
            for number, layer in self._layers.items():
                for ours, cached in zip(self._tensors[number], layer.tensors, strict=True):
                    pairs.append((ours[:, start:stop], cached[:, place : place + stop - start]))
            at += pages
        return pairs


def _empty_like(cached: Tensor, slots: int) -> Tensor:
    return torch.empty((cached.shape[0], slots, *cached.shape[2:]), dtype=cached.dtype)
