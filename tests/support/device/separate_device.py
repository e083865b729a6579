"""Devices that every machine has: `SEPARATE`, eight of torch's private-use kind, built from `separate_device.cpp`.

Their memory cannot be read by the host, an operation on tensors of two devices is refused, and numbers are the CPU's to
the bit. Backward passes run in a thread of each device's own, as on GPUs. Import this module where a test file begins:
autograd starts its threads with the first backward pass of a process, and a device that comes later has none.

It is built by g++ once for each torch, in seconds, into `.separate_device` beside the tests; a test file that imports
this is skipped where there is none. `make test-devices` runs these files in processes of their own.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import types
from pathlib import Path

import pytest
import torch

SOURCE = Path(__file__).with_suffix(".cpp")
BUILT = Path(__file__).parents[2] / ".separate_device"
NAME = "separate"
DEVICES = 8
MEMORY = 2**30
OPTIONS = ("-O1", "-std=c++20", "-fPIC", "-shared")


def _built() -> Path:
    """The library, compiled if this source and this torch have none yet."""
    content = SOURCE.read_bytes() + str(torch.__version__).encode()
    library = BUILT / f"{hashlib.sha256(content).hexdigest()[:16]}.so"
    BUILT.mkdir(exist_ok=True)
    with (BUILT / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            torch_folder, made = Path(torch.__file__).parent, library.with_suffix(".part")
            libraries = ("-L", torch_folder / "lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch_folder / 'lib'}")
            includes = ("-I", torch_folder / "include")
            subprocess.run(["g++", *OPTIONS, *includes, SOURCE, "-o", made, *libraries], check=True)
            made.rename(library)
    return library


class _Module(types.ModuleType):
    """What `torch.separate` has, by the names that torch asks every device's module for."""

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def device_count() -> int:
        return DEVICES

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        """Nothing: what is drawn here is drawn by the processor."""

    @staticmethod
    def synchronize(device: object = None) -> None:
        """Nothing: all that was told is done."""

    @staticmethod
    def get_device_name(device: object = None) -> str:
        return "Separate"

    @staticmethod
    def mem_get_info(device: object = None) -> tuple[int, int]:
        """What is free, and all there is."""
        return MEMORY - int(torch.ops.separate_device.held()), MEMORY

    @staticmethod
    def memory_reserved(device: object = None) -> int:
        return int(torch.ops.separate_device.held())

    @staticmethod
    def empty_cache() -> None:
        """Nothing: what is let go of is given back at once."""

    @staticmethod
    def memory_allocated(device: object = None) -> int:
        return int(torch.ops.separate_device.held())

    @staticmethod
    def max_memory_allocated(device: object = None) -> int:
        return int(torch.ops.separate_device.peak())

    @staticmethod
    def reset_peak_memory_stats(device: object = None) -> None:
        torch.ops.separate_device.forget_peak()


if shutil.which("g++") is None:
    pytest.skip("there is no g++ to build the second device with", allow_module_level=True)
torch.ops.load_library(str(_built()))
torch.utils.rename_privateuse1_backend(NAME)
torch._register_device_module(NAME, _Module(f"torch.{NAME}"))
SEPARATE = tuple(torch.device(NAME, index) for index in range(DEVICES))
