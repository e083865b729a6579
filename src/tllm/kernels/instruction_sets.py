"""The instruction sets that the kernels are compiled for, best first, and which of them this processor has. No torch.

`setup.py` reads this file for what to compile, `library.py` for what to load.
"""

from __future__ import annotations

import ctypes
import functools
import platform
from dataclasses import dataclass
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
FOLDER = "lib"
"""Beside this file: where the compiled kernels lie."""


@dataclass(frozen=True)
class InstructionSet:
    """One compilation of the kernels.

    `machine` is what `platform.machine` calls the processor's family, `compiled_for` what the compiler is told, and
    `needs` are the flags of /proc/cpuinfo without which the result cannot run. `registers`: Linux's number of a set of
    registers that a process may use only after it has asked.
    """

    name: str
    machine: str
    compiled_for: str
    needs: frozenset[str]
    registers: int | None = None

    @property
    def file(self) -> str:
        return f"tllm_kernels_{self.machine}_{self.name}.so"


V3 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe"})
V4 = frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"})

VNNI = V3 | V4 | {"avx512_vnni"}
BF16 = VNNI | {"avx512_bf16"}
AMX = BF16 | {"amx_tile", "amx_int8", "amx_bf16"}

TILES = 18
"""XFEATURE_XTILEDATA (Linux, Documentation/arch/x86/xstate.rst)."""

ARCH_PRCTL, ARCH_REQ_XCOMP_PERM = 158, 0x1023

INSTRUCTION_SETS = (
    InstructionSet(
        name="avx512amx",
        machine="x86_64",
        compiled_for="x86_64_v4+avx512vnni+avx512bf16+amx_tile+amx_int8+amx_bf16",
        needs=AMX,
        registers=TILES,
    ),
    InstructionSet("avx512bf16", "x86_64", "x86_64_v4+avx512vnni+avx512bf16", BF16),
    InstructionSet("avx512vnni", "x86_64", "x86_64_v4+avx512vnni", VNNI),
    InstructionSet("avxvnni", "x86_64", "x86_64_v3+avxvnni", V3 | {"avx_vnni"}),
    InstructionSet("avx2", "x86_64", "x86_64_v3", V3),
    InstructionSet("generic", "x86_64", "x86_64", frozenset()),
    InstructionSet("dotprod", "aarch64", "generic+dotprod", frozenset({"asimddp"})),
    InstructionSet("generic", "aarch64", "generic", frozenset()),
)


def flags_of_processor(cpuinfo: Path = CPUINFO) -> frozenset[str]:
    """What the processor can do, by the kernel's names; empty where the system does not say."""
    try:
        lines = cpuinfo.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


@functools.cache
def may_use(registers: int | None) -> bool:
    """Ask Linux for registers that are large, for all threads of this process. Older kernels, and those that a sandbox
    keeps from us, say no."""
    return registers is None or ctypes.CDLL(None).syscall(ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, registers) == 0


def supported(machine: str = platform.machine(), flags: frozenset[str] | None = None) -> tuple[InstructionSet, ...]:
    """The instruction sets that this processor has and this process may use, best first."""
    flags = flags_of_processor() if flags is None else flags
    had = [one for one in INSTRUCTION_SETS if one.machine == machine and one.needs <= flags]
    return tuple(one for one in had if may_use(one.registers))
