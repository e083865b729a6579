"""What may stand nowhere: unsafe loaders, broad catches, vague names, open ends, one machine's paths."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.house.tree import ROOT, SOURCE, name_of, nodes, project_files, sources

UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
UNSAFE_CALLS = {"eval", "exec", "torch.load", "torch.save", "yaml.load", "yaml.unsafe_load", "os.system"}
VAGUE_NAMES = {"utils", "util", "common", "helpers", "helper", "misc", "stuff"}
PARALLEL_WORDS = re.compile(r"(^|_)(rank|ranks|world|dist|distributed|environ|cuda|nccl|gloo)($|_)")
DEVICE_NAMES = re.compile(r"^(cpu|cuda|mps|xpu|npu)(:\d+)?$")
PACKAGES_OF_RANKS = ("core", "comm", "devices", "quantization", "parallel", "model", "weights", "engine", "training")
OPEN_ENDS = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
# Built from pieces, so that this file does not hold what it looks for.
ONE_MACHINE = re.compile(
    "|".join(["/" + "work/", "/" + "farm/", "/" + "home/[a-z]", "/" + "root/", "/" + "opt/[a-z]", "python" + "hosted"])
)


def test_nothing_unsafe() -> None:
    faults = []
    for path in sources():
        for node in nodes(path):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
                faults += [f"{name_of(path)}:{node.lineno}: {n}" for n in names if n.split(".")[0] in UNSAFE_MODULES]
            elif isinstance(node, ast.Call) and _dotted(node.func) in UNSAFE_CALLS:
                faults.append(f"{name_of(path)}:{node.lineno}: {_dotted(node.func)}(…)")
            elif isinstance(node, ast.keyword) and node.arg == "shell" and ast.unparse(node.value) == "True":
                faults.append(f"{name_of(path)}:{node.value.lineno}: shell=True")
    assert not faults, "\n".join(faults)


def test_no_broad_except() -> None:
    faults = []
    for path in sources():
        for node in nodes(path):
            if isinstance(node, ast.ExceptHandler):
                caught = "everything" if node.type is None else ast.unparse(node.type)
                if re.search(r"\b(everything|Exception|BaseException)\b", caught) and not _raises_again(node):
                    faults.append(f"{name_of(path)}:{node.lineno}: catches {caught} and does not raise it again")
    assert not faults, "\n".join(faults)


def test_no_vague_names() -> None:
    faults = [name_of(p) for p in project_files() if VAGUE_NAMES & {part.split(".")[0] for part in _parts(p)}]
    assert not faults, faults


def test_no_open_ends() -> None:
    faults = [
        f"{name_of(path)}:{number}: {line.strip()}"
        for path in project_files()
        if path.suffix in (".py", ".js", ".html", ".css", ".sh", ".toml") and path != Path(__file__)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if OPEN_ENDS.search(line)
    ]
    assert not faults, "\n".join(faults)


def test_no_path_of_one_machine() -> None:
    faults = [
        f"{name_of(path)}:{number}: {line.strip()[:120]}"
        for path in project_files()
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if ONE_MACHINE.search(line)
    ]
    assert not faults, "\n".join(faults)


def test_model_knows_no_parallelism() -> None:
    """Rule 1: the model never learns where it runs. `x.device` of a tensor it was given is no knowledge; "cuda" is."""
    faults = []
    for path in sorted((SOURCE / "model").glob("*.py")):
        for node in nodes(path):
            word = _identifier(node)
            if PARALLEL_WORDS.search(word) or DEVICE_NAMES.search(word):
                faults.append(f"{name_of(path)}:{getattr(node, 'lineno', 0)}: {word}")
    assert not faults, "\n".join(faults)


def test_decoders_are_made_with_their_module() -> None:
    """Where ranks are threads of a process: two of them that have msgspec look at a type for the first time at once can
    crash it, as its C code takes what the other has half made."""
    faults = [
        f"{name_of(path)}:{node.lineno}: {ast.unparse(node)[:100]}"
        for package in PACKAGES_OF_RANKS
        for path in sorted((SOURCE / package).rglob("*.py"))
        for function in nodes(path)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and _looks_at_a_type(node)
    ]
    assert not faults, "\n".join(faults)


def _looks_at_a_type(call: ast.Call) -> bool:
    name = _dotted(call.func)
    is_typed = len(call.args) > 1 or any(keyword.arg == "type" for keyword in call.keywords)
    return name.startswith("msgspec.") and (name.endswith(".Decoder") or (name.endswith(".decode") and is_typed))


def _dotted(node: ast.expr) -> str:
    return ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""


def _raises_again(handler: ast.ExceptHandler) -> bool:
    return any(isinstance(node, ast.Raise) for statement in handler.body for node in ast.walk(statement))


def _identifier(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.arg):
        return node.arg
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return node.name
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value if DEVICE_NAMES.search(node.value) else ""
    return ""


def _parts(path: Path) -> tuple[str, ...]:
    return path.relative_to(ROOT).parts
