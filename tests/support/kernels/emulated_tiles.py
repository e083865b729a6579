"""The kernels for Intel's AMX on a processor that has AVX-512 and no tiles: the same sources, with those in plain C."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from tests.support.kernels.emulated_kernels import SETUP
from tllm.kernels.instruction_sets import BF16, INSTRUCTION_SETS, flags_of_processor
from tllm.kernels.library import Library

AMX, WITHOUT_TILES = (next(one for one in INSTRUCTION_SETS if one.name == f"avx512{name}") for name in ("amx", "bf16"))
SOURCE = Path(__file__).with_suffix(".c")
HEADER = SOURCE.with_suffix(".h")


class EmulatedTiles(NamedTuple):
    """`functions` are those of emulated_tiles.c, too."""

    kernels: Library
    functions: ctypes.CDLL

    def fault(self) -> str:
        """What a processor would have refused since the last call, if anything: see emulated_tiles.c."""
        said: bytes | None = self.functions.emulated_fault()
        return (said or b"").decode()


def why_not() -> str:
    """What this machine lacks to run them, if anything."""
    if BF16 - flags_of_processor():
        return "this processor has no AVX-512 with products of bfloat16"
    return "" if find_spec("ziglang") else "there is no ziglang to compile the kernels"


def emulated_tiles() -> EmulatedTiles:
    path = _compiled()
    functions = ctypes.CDLL(str(path))
    functions.emulated_fault.restype = ctypes.c_char_p
    return EmulatedTiles(Library(AMX, path), functions)


def _compiled() -> Path:
    """The library, from the user's cache if these sources have been compiled before, in a quarter of a minute."""
    kernels = sorted((SETUP["KERNELS"] / "csrc").iterdir())
    made_of = SETUP["_digest"]([*kernels, SOURCE, HEADER, Path(__file__), Path(SETUP["__file__"])])
    kept: Path = SETUP["KEPT"] / made_of / SOURCE.with_suffix(".so").name
    if kept.is_file():
        return kept
    kept.parent.mkdir(parents=True, exist_ok=True)
    zig = [sys.executable, "-m", "ziglang", "cc", "-fPIC", "-target", f"{AMX.machine}-linux-gnu.2.17"]
    flags = [*SETUP["FLAGS"], f"-mcpu={WITHOUT_TILES.compiled_for}", "-include", str(HEADER), "-c"]
    with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
        sources = {"-O1": [path for path in kernels if path.suffix == ".c"], "-O2": [SOURCE]}
        objects = [f"{folder}/{level}.o" for level in sources]
        for (level, files), compiled in zip(sources.items(), objects, strict=True):
            subprocess.run([*zig, level, *flags, *map(str, files), "-o", compiled], check=True)
        subprocess.run([*zig, "-shared", *objects, "-o", f"{folder}/whole.so"], check=True)
        Path(folder, "whole.so").replace(kept)
    SETUP["_forget_oldest"]()
    return kept
