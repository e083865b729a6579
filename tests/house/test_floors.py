"""A folder imports only from floors below, at the top of the file; floors 0 to 2 and the server know no torch."""

from __future__ import annotations

import subprocess
import sys

from tests.house.tree import FLOORS, SOURCE, TORCH_FREE, folder_of, imports, name_of, sources

LATE_IMPORTS = {
    "api": "torch is loaded with an engine, so that `tllm --help`, whose options name the engine's, answers at once",
    "cli": "a command loads the engine when it runs, so that `tllm --help` and a usage error answer at once",
}
"""Folders whose functions may import our own modules, each with its reason."""

TORCH_FREE_MODULES = sorted(
    ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts)
    for path in sources()
    if folder_of(path) in TORCH_FREE | {"api", "cli", ""} and path.name not in ("__init__.py", "__main__.py")
)


def test_every_folder_has_a_floor() -> None:
    folders = {p.name for p in SOURCE.iterdir() if p.is_dir() and any(p.glob("*.py"))}
    assert folders <= set(FLOORS), f"no floor for {sorted(folders - set(FLOORS))}: add it to HOUSE.md and to tree.py"


def test_imports_go_down() -> None:
    faults = []
    for path in sources():
        here = folder_of(path)
        for imported in imports(path):
            parts = imported.module.split(".")
            there = parts[1] if parts[0] == "tllm" and len(parts) > 1 else ""
            if there in FLOORS and here in FLOORS and there != here and FLOORS[there] >= FLOORS[here]:
                faults.append(
                    f"{name_of(path)}:{imported.line}: {here} (floor {FLOORS[here]}) "
                    f"imports {there} (floor {FLOORS[there]})"
                )
            if here == "" and there in FLOORS and not imported.typing_only:
                faults.append(f"{name_of(path)}:{imported.line}: the package's root imports {there}")
    assert not faults, "\n".join(faults)


def test_own_imports_stand_at_the_top() -> None:
    faults = [
        f"{name_of(path)}:{imported.line}: {imported.module} inside {imported.inside}()"
        for path in sources()
        for imported in imports(path)
        if imported.inside and imported.module.startswith("tllm") and folder_of(path) not in LATE_IMPORTS
    ]
    assert not faults, "\n".join(faults)


def test_lower_floors_and_server_never_name_torch() -> None:
    faults = [
        f"{name_of(path)}:{imported.line}: {imported.module}"
        for path in sources()
        for imported in imports(path)
        if folder_of(path) in TORCH_FREE and imported.module.split(".")[0] in ("torch", "numpy", "safetensors")
    ]
    assert not faults, "\n".join(faults)


def test_torch_is_not_loaded() -> None:
    """One process loads them all, one after another: the first that brings torch with it is named."""
    program = (
        "import importlib, sys\n"
        f"for name in {TORCH_FREE_MODULES!r}:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, name + ' loads torch'\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
