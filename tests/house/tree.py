"""The source tree as the house tests read it: files, their floors, their imports, their names."""

from __future__ import annotations

import ast
import functools
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "tllm"

FLOORS = {
    "cli": 10,
    "api": 9,
    "recipes": 9,
    "node": 8,
    "engine": 7,
    "training": 7,
    "model": 6,
    "weights": 6,
    "parallel": 5,
    "quantization": 4,
    "comm": 3,
    "devices": 3,
    "kernels": 3,
    "server": 3,
    "planner": 2,
    "cluster": 2,
    "spec": 1,
    "hub": 1,
    "text": 1,
    "core": 0,
}
SUB_PACKAGES = {
    "cluster": (".", "consensus"),
    "cli": ("arguments", "display", ".", "planning", "demonstration", "folders", "commands"),
    "comm": ("links", "nccl", "collectives", "c10d"),
    "engine": ("pages", "waiting", "schedule", "compute", "grid", "draft", "page_store", ".", "measure"),
    "node": (
        *(
            "topology",
            "machine",
            "weights",
            "front_end",
            "roles",
            "answering",
            ".",
            "sources",
            "coordinator",
            "recovery",
            "replication",
        ),
        *("doctor", "serve", "train"),
        "verify",
    ),
    "kernels": (".", "rows", "training", "recording", "gpu"),
    "planner": ("cluster", "cost", "measured", "memory", "bounds", "simulate", "search", "roles"),
    "recipes": (".", "bench"),
    "server": (
        *(
            "admission",
            "http",
            "tracing",
            "reply",
            "openai",
            "pooling",
            "anthropic",
            "ollama",
            "stored",
            "live",
            "page",
        ),
        ".",
    ),
    "training": (
        *("questions", "data", "state", "attention", "checkpoint", "gradients", "job", "objectives", "lora", "optim"),
        *(
            "step",
            "teachers",
            "reward_models",
            "evaluation",
            "tools",
            "policy",
            "harness",
            "rollout_servers",
            "measure",
            "report",
            "sync",
        ),
        *("parameter_server", "snapshot", "."),
    ),
    "parallel": (".", "grid", "lora"),
    "spec": ("quantized", "gguf", "lora", "grid", "."),
    "weights": (".", "formats", "lora"),
}
"""The sub-packages of each package from the ground up: one imports only those before it. "." is its own files."""

TORCH_FREE = {folder for folder, floor in FLOORS.items() if floor <= 2} | {"server"}


@dataclass(frozen=True)
class Import:
    """One module that a file imports; `inside` names the function it stands in, "" for the top of the file."""

    module: str
    line: int
    inside: str
    typing_only: bool


@functools.cache
def sources() -> tuple[Path, ...]:
    """Every Python file of the package."""
    return tuple(sorted(SOURCE.rglob("*.py")))


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def folder_of(path: Path) -> str:
    """The folder of src/tllm that holds the file, "" for the package's own files."""
    parts = path.relative_to(SOURCE).parts
    return parts[0] if len(parts) > 1 else ""


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@functools.cache
def imports(path: Path) -> tuple[Import, ...]:
    """Every import of a file with the function it stands in; relative ones are written out in full."""
    package = ["tllm", *path.relative_to(SOURCE).parent.parts]
    return tuple(_imports(parse(path), package, "", False))


def _imports(node: ast.AST, package: list[str], inside: str, typing_only: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, child.lineno, inside, typing_only)
        elif isinstance(child, ast.ImportFrom):
            base = ".".join(package[: len(package) - child.level + 1]) + "." if child.level else ""
            module = (base + (child.module or "")).rstrip(".")
            if module == "tllm":
                for alias in child.names:
                    yield Import(f"tllm.{alias.name}", child.lineno, inside, typing_only)
            else:
                yield Import(module, child.lineno, inside, typing_only)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _imports(child, package, f"{inside}.{child.name}".lstrip("."), typing_only)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            yield from _imports(child, package, inside, True)
        else:
            yield from _imports(child, package, inside, typing_only)


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Every node of a file's tree, once for all who look for some kind of them."""
    return tuple(ast.walk(parse(path)))


@functools.cache
def functions(path: Path) -> tuple[ast.FunctionDef | ast.AsyncFunctionDef, ...]:
    return tuple(n for n in nodes(path) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))


@functools.cache
def project_files() -> tuple[Path, ...]:
    """Every text file that belongs to the project: tracked, or new and not ignored."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listed.returncode != 0:  # not a checkout (an unpacked archive): take what is there
        found = [p for p in ROOT.rglob("*") if p.is_file() and ".venv" not in p.parts and ".git" not in p.parts]
    else:
        found = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    return tuple(p for p in found if p.is_file() and b"\0" not in p.read_bytes()[:4096])
