"""Receive buffers that a group keeps from call to call, so that its hot path allocates nothing."""

from __future__ import annotations

import math

import torch

SHAPES_KEPT = 256


class Scratch:
    """One run of bytes for each peer, as long as the longest message so far, seen as whatever tensor is received."""

    def __init__(self) -> None:
        self._memory: dict[int, torch.Tensor] = {}
        self._views: dict[tuple[int, tuple[int, ...], torch.dtype], torch.Tensor] = {}

    def piece(self, peer: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor whose contents are gone at the next call for the same peer."""
        view = self._views.get((peer, shape, dtype))
        return self._make(peer, shape, dtype) if view is None else view

    def _make(self, peer: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        size = math.prod(shape) * dtype.itemsize
        # Made outside inference mode: only such tensors may be written both inside and outside it.
        with torch.inference_mode(False):
            if peer not in self._memory or self._memory[peer].numel() < size:
                self._memory[peer] = torch.empty(size, dtype=torch.uint8)
                self._views = {key: view for key, view in self._views.items() if key[0] != peer}
            if len(self._views) >= SHAPES_KEPT:
                self._views.clear()
            view = self._memory[peer][:size].view(dtype).view(shape)
        self._views[peer, shape, dtype] = view
        return view
