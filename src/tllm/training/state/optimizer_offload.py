"""Where an optimizer's states, and copies for a save, are kept between two steps: in device memory, in host memory or
on disk."""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from tllm.core.disk import open_files
from tllm.core.errors import CapacityError, ConfigError
from tllm.core.memory import amount


class OffloadedStates(Protocol):
    """The states of one bucket, by name. Between `__enter__` and `__exit__` they are where the weights are."""

    tensors: Mapping[str, Tensor]

    def __enter__(self) -> Mapping[str, Tensor]: ...

    def __exit__(self, *_: object) -> None: ...


class StatePlacement(Protocol):
    """Makes room for states; each place keeps the same bits."""

    def keep(self, names: Sequence[str], count: int, dtype: torch.dtype, device: torch.device) -> OffloadedStates:
        """A tensor of `count` zeros for each name; the weights are on `device`."""


class OnDevice:
    """Beside the weights."""

    def keep(self, names: Sequence[str], count: int, dtype: torch.dtype, device: torch.device) -> OffloadedStates:
        return _Near({name: torch.zeros(count, dtype=dtype, device=device) for name in names})


class OnHost:
    """In the host's memory, pinned for a device that copies from it. Beside the weights if these are there already."""

    def keep(self, names: Sequence[str], count: int, dtype: torch.dtype, device: torch.device) -> OffloadedStates:
        if device.type == "cpu":
            return OnDevice().keep(names, count, dtype, device)
        return _Far({name: torch.zeros(count, dtype=dtype, pin_memory=device.type == "cuda") for name in names}, device)


MAPPED_FILES = 65_536
"""A mapped file keeps a descriptor, and a rank with 8 billion parameters has 3,600: usually 1,024 files may be open.
Linux maps about as many into a process as this."""


class OnDisk:
    """In files of `folder`, mapped into memory and written in place; no memory is theirs outside an update.

    The files have no name: their room is free again when the states are let go, and also if the process is killed.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        open_files(MAPPED_FILES)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._unusable(error) from error

    def keep(self, names: Sequence[str], count: int, dtype: torch.dtype, device: torch.device) -> OffloadedStates:
        if not names or not count:
            return OnDevice().keep(names, count, dtype, device)
        stride = -(-count * dtype.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE
        file = self._file(stride * len(names))
        tensors = {
            name: torch.frombuffer(file, dtype=dtype, count=count, offset=stride * i) for i, name in enumerate(names)
        }
        return _Mapped(file, self.folder, tensors, device)

    def _file(self, size: int) -> mmap.mmap:
        """A new file of zeros. Its room is taken at once, as a page that finds none later kills the process."""
        try:
            with tempfile.TemporaryFile(dir=self.folder) as file:
                self._take(file.fileno(), size)
                return mmap.mmap(file.fileno(), size)
        except OSError as error:
            raise self._unusable(error) from error

    def _take(self, descriptor: int, size: int) -> None:
        try:
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            free = shutil.disk_usage(self.folder).free
            raise CapacityError(
                f"{self.folder} has {amount(free)} free and the optimizer's states need {amount(size)} more: "
                f"{error.strerror}",
                "free some, name a folder of another disk, or spread the states over more ranks (zero=1 or more)",
            ) from error

    def _unusable(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"cannot keep the optimizer's states in {self.folder}: {error.strerror}", "name a folder to write in"
        )


def in_memory(tensors: Mapping[str, Tensor]) -> OffloadedStates:
    """States that lie beside the weights already."""
    return _Near(tensors)


class _Near:
    """States that stay where they are."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def __enter__(self) -> Mapping[str, Tensor]:
        return self.tensors

    def __exit__(self, *_: object) -> None:
        return


class _Far:
    """States that come to the device, if they are not on it, and go back."""

    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        self.tensors, self.device = tensors, device
        self._there: Mapping[str, Tensor] = {}

    def __enter__(self) -> Mapping[str, Tensor]:
        self._there = {name: tensor.to(self.device) for name, tensor in self.tensors.items()}
        return self._there

    def __exit__(self, *_: object) -> None:
        for name, tensor in self._there.items():
            if tensor is not self.tensors[name]:
                self.tensors[name].copy_(tensor)
        self._there = {}


class _Mapped(_Far):
    """States of a mapped file, which is written back and out of memory when they go."""

    def __init__(self, file: mmap.mmap, folder: Path, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        super().__init__(tensors, device)
        self._file, self._folder = file, folder

    def __enter__(self) -> Mapping[str, Tensor]:
        self._file.madvise(mmap.MADV_WILLNEED)
        return super().__enter__()

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        try:
            self._file.flush()
        except OSError as error:
            raise CapacityError(
                f"{self._folder} did not take the optimizer's states: {error.strerror}",
                "name a folder of another disk and go on from the last save",
            ) from error
        self._file.madvise(mmap.MADV_DONTNEED)
