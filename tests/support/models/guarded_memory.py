"""Tensors behind whose last byte nothing may be read or written: a process that tries ends at once (SIGSEGV)."""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor

PRIVATE_ANONYMOUS = 0x22
READ_AND_WRITE, NOTHING = 3, 0

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class GuardedMemory:
    """Makes such tensors, which are gone when it is left."""

    def __init__(self) -> None:
        self._mapped: list[tuple[int, int]] = []

    def __enter__(self) -> GuardedMemory:
        return self

    def __exit__(self, *error: object) -> None:
        for start, size in self._mapped:
            _libc.munmap(start, size)

    def copy(self, x: Tensor) -> Tensor:
        """x, with a page after it that nobody may touch."""
        page = mmap.PAGESIZE
        room = -(-x.nbytes // page) * page
        start = _libc.mmap(None, room + page, READ_AND_WRITE, PRIVATE_ANONYMOUS, -1, 0)
        assert _libc.mprotect(start + room, page, NOTHING) == 0
        self._mapped.append((start, room + page))
        held = (ctypes.c_uint8 * x.nbytes).from_address(start + room - x.nbytes)
        guarded = torch.frombuffer(held, dtype=torch.uint8).view(x.dtype).view(x.shape)
        return guarded.copy_(x)
