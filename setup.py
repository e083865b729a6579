"""Compiles the kernels (src/tllm/kernels/csrc) when the package is built; everything else is in pyproject.toml.

The compiler is a package, `ziglang`, so that neither the builder nor the user needs one on the machine, and so that the
kernels are the same whoever built them. It is needed to build only. A wheel has the kernels of its platform for every
instruction set and fits every version of Python.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import runpy
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

KERNELS = Path(__file__).parent / "src" / "tllm" / "kernels"
OPTIMIZED = ["-fPIC", "-O3", "-s"]
FLAGS = ["-std=c11", "-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wextra", "-Werror", "-Wno-psabi"]

KEPT = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tllm" / "compiled"
"""Libraries that were compiled in any checkout, by a digest of all that they are made of."""

MOST_KEPT = 6


def compile_kernels(machine: str = platform.machine()) -> None:
    """One library for each instruction set of this family of processors, unless it is newer than its sources; as many
    at once as there are cores. What a checkout with the same sources has compiled is taken from the user's cache: zig
    has one of its own, which knows files by their times and is of no use to another checkout."""
    if sys.platform != "linux":
        return
    known = runpy.run_path(str(KERNELS / "instruction_sets.py"))
    out = KERNELS / known["FOLDER"]
    out.mkdir(exist_ok=True)
    sources = [*sorted((KERNELS / "csrc").iterdir()), KERNELS / "instruction_sets.py", Path(__file__)]
    files = [str(path) for path in sources if path.suffix == ".c"]
    newest = max(path.stat().st_mtime for path in sources)

    def compile_for(one: Any) -> None:
        library = out / one.file
        if one.machine != machine or (library.is_file() and library.stat().st_mtime > newest):
            return
        kept = KEPT / _digest(sources) / one.file
        if kept.is_file():
            _put(kept, library)
            return
        zig = [sys.executable, "-m", "ziglang", "cc", *OPTIMIZED, "-target", f"{machine}-linux-gnu.2.17"]
        compiled, partial = library.with_suffix(".o"), library.with_suffix(".part")
        subprocess.run([*zig, *FLAGS, f"-mcpu={one.compiled_for}", "-c", *files, "-o", str(compiled)], check=True)
        # Linked for any processor, or else zig compiles its own runtime for each set of instructions.
        subprocess.run([*zig, "-shared", str(compiled), "-o", str(partial)], check=True)
        compiled.unlink()
        partial.replace(library)
        with contextlib.suppress(OSError):  # a cache that cannot be written keeps nobody from compiling
            kept.parent.mkdir(parents=True, exist_ok=True)
            _put(library, kept)
            _forget_oldest()

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_for, known["INSTRUCTION_SETS"]))


def _digest(files: list[Path]) -> str:
    """Of all that the libraries are made of; the flags are in this file."""
    made_of = hashlib.sha256(version("ziglang").encode())
    for path in files:
        made_of.update(f"\0{path.name}\0".encode() + path.read_bytes())
    return made_of.hexdigest()[:32]


def _put(source: Path, target: Path) -> None:
    """Copy a library to where others look for whole ones."""
    partial = target.with_suffix(f".{os.getpid()}.part")
    shutil.copyfile(source, partial)
    shutil.copymode(source, partial)
    partial.replace(target)


def _forget_oldest() -> None:
    for old in sorted(KEPT.iterdir(), key=lambda folder: folder.stat().st_mtime)[:-MOST_KEPT]:
        shutil.rmtree(old, ignore_errors=True)


class WithBinaries(Distribution):
    """Says that files of this package belong to one platform."""

    def has_ext_modules(self) -> bool:
        return True


class BuildWithKernels(build_py):
    """Compiles before Python files are collected, so that the libraries are collected as well."""

    def run(self) -> None:
        compile_kernels()
        super().run()


class EditableWithKernels(editable_wheel):
    """An editable installation has the libraries in the source folder."""

    def run(self) -> None:
        compile_kernels()
        super().run()


class PlatformWheel(bdist_wheel):
    """A wheel for one platform and any Python: the kernels know nothing of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", f"manylinux2014_{platform.machine()}" if sys.platform == "linux" else super().get_tag()[2]


if __name__ == "__main__":
    setup(
        distclass=WithBinaries,
        cmdclass={"build_py": BuildWithKernels, "editable_wheel": EditableWithKernels, "bdist_wheel": PlatformWheel},
    )
