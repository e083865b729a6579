"""Bytes of tensors that live, counted as they come and go: by their memory, so that views count once."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Live(TorchDispatchMode):
    """Memory that operations of this thread made since it was entered: `now`, and at most (`peak`)."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id(x.untyped_storage()) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and id(x.untyped_storage()) not in given:
                self._count(x.untyped_storage())
        return out

    def _count(self, memory: torch.UntypedStorage) -> None:
        if memory not in self._seen:
            self._seen.add(memory)
            self.now += memory.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(memory, self._end, memory.nbytes())

    def _end(self, nbytes: int) -> None:
        self.now -= nbytes
