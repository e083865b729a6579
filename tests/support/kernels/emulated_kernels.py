"""Kernels of a processor of another family, run by an emulator: a `Library` as of this one, for the same tests.

Every call goes to a program that has the kernels, compiled for that processor as `setup.py` does. With it goes all
memory that it may look at: tensors and arguments that are alive here and hold one of its addresses. What the kernel
has written comes back.
"""

from __future__ import annotations

import ctypes
import gc
import runpy
import shutil
import struct
import subprocess
import sys
from bisect import bisect_right
from collections.abc import Iterator
from ctypes import c_void_p
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.house.tree import ROOT
from tllm.kernels import library
from tllm.kernels.instruction_sets import InstructionSet
from tllm.kernels.library import SIGNATURES, Library

SETUP = runpy.run_path(str(ROOT / "setup.py"))
PROGRAM = Path(__file__).with_name("called_kernels.c")
REALS = (ctypes.c_float, ctypes.c_double)
Block = tuple[int, int]
"""Its address and its bytes."""


def emulator(machine: str) -> str | None:
    """Debian's qemu-user or qemu-user-static, if it is installed."""
    return shutil.which(f"qemu-{machine}-static") or shutil.which(f"qemu-{machine}")


def compile_for(instruction_set: InstructionSet, folder: Path) -> Path:
    """The program with the kernels of an instruction set. What is shipped is -O3 and takes three times as long."""
    (folder / "kernel_names.h").write_text("".join(f"KERNEL({name})\n" for name in SIGNATURES))
    program = folder / instruction_set.name
    sources = sorted(str(path) for path in (SETUP["KERNELS"] / "csrc").glob("*.c"))
    zig = [sys.executable, "-m", "ziglang", "cc", "-O1", "-static", "-target", f"{instruction_set.machine}-linux-musl"]
    flags = [*SETUP["FLAGS"], f"-mcpu={instruction_set.compiled_for}", f"-I{folder}"]
    subprocess.run([*zig, *flags, str(PROGRAM), *sources, "-o", str(program)], check=True)
    return program


def emulated(instruction_set: InstructionSet, program: Path, monkeypatch: pytest.MonkeyPatch) -> Library:
    """The library whose calls the program answers."""
    run = emulator(instruction_set.machine)
    assert run is not None, "who calls this has seen that there is an emulator"
    with monkeypatch.context() as patched:
        patched.setattr(library.ctypes, "CDLL", lambda path: _Functions([run, path]))
        patched.setattr(library, "openmp", lambda: None)  # the program has one thread
        return Library(instruction_set, program)


class _Functions:
    """In place of `ctypes.CDLL`."""

    def __init__(self, command: list[str]) -> None:
        program = _Program(command)
        for number, name in enumerate(SIGNATURES):
            setattr(self, name, _Function(number, program))


class _Program:
    """Runs as long as one of its functions is there."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def order(self, content: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(content)
        self._process.stdin.flush()

    def answer(self, size: int) -> bytes:
        assert self._process.stdout is not None
        content = self._process.stdout.read(size)
        assert len(content) == size, "the program with the kernels has ended: see what it wrote"
        return content

    def __del__(self) -> None:
        self._process.kill()
        self._process.communicate()


class _Function:
    restype: Any = None
    argtypes: tuple[Any, ...] = ()

    def __init__(self, number: int, program: _Program) -> None:
        self._number, self._program = number, program

    def __call__(self, *arguments: Any) -> Any:
        own, words, reals = list[Any](), list[tuple[int, bool]](), list[float]()
        for argument, kind in zip(arguments, self.argtypes, strict=True):
            if kind in REALS:
                reals.append(argument)
            elif kind is c_void_p or issubclass(kind, ctypes._Pointer):
                if argument is not None and not isinstance(argument, int):
                    own.append(getattr(argument, "_obj", argument))  # of `byref`
                    argument = ctypes.addressof(own[-1])
                words.append((argument or 0, True))
            else:
                words.append((int(argument), False))
        pointers = [place for one in own for place in _pointers(one)]
        wanted = [value for value, is_pointer in words if is_pointer] + [_word_at(place) for place in pointers]
        blocks = _blocks_with([address for address in wanted if address], own)
        order = [struct.pack("<5q", self._number, len(blocks), len(pointers), len(words), len(reals))]
        for address, size in blocks:
            order += [struct.pack("<2q", address, size), ctypes.string_at(address, size)]
        order.append(struct.pack(f"<{len(pointers)}q", *pointers))
        order += [struct.pack("<2q", *word) for word in words]
        order.append(struct.pack(f"<{len(reals)}d", *reals))
        self._program.order(b"".join(order))
        result = int.from_bytes(self._program.answer(8), "little", signed=True)
        for address, size in blocks:
            ctypes.memmove(address, self._program.answer(size), size)
        return None if self.restype is None else self.restype(result).value


def _word_at(address: int) -> int:
    return ctypes.c_uint64.from_address(address).value


def _pointers(argument: Any) -> Iterator[int]:
    """Where pointers lie in a structure, or in an array of structures."""
    if isinstance(argument, ctypes.Array) and issubclass(argument._type_, ctypes.Structure):
        for one in argument:
            yield from _pointers(one)
    elif isinstance(argument, ctypes.Structure):
        for name, kind, *_ in argument._fields_:
            if kind is c_void_p:
                yield ctypes.addressof(argument) + getattr(type(argument), name).offset
            elif issubclass(kind, ctypes.Structure):
                yield from _pointers(getattr(argument, name))


def _blocks_with(addresses: list[int], own: list[Any]) -> list[Block]:
    """The memory of all that is alive and holds one of these addresses, each once. AssertionError for one in none."""
    found = {(ctypes.addressof(one), ctypes.sizeof(one)) for one in own}
    alive = sorted(found | set(_alive()))
    starts = [address for address, _ in alive]
    for address in addresses:
        # The longest that holds it: views and parts of it begin there as well, or later.
        holding = [one for one in alive[: bisect_right(starts, address)] if address < sum(one)]
        assert holding, f"{address:#x} is in nothing that is alive"
        found.add(max(holding, key=lambda one: one[1]))
    return sorted(found)


def _alive() -> Iterator[Block]:
    for one in gc.get_objects():
        if issubclass(type(one), torch.Tensor) and one.device.type == "cpu" and one.layout is torch.strided:
            storage = one.untyped_storage()
            yield storage.data_ptr(), storage.nbytes()
        elif issubclass(type(one), ctypes.Array | ctypes.Structure):
            yield ctypes.addressof(one), ctypes.sizeof(one)
