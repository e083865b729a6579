"""What a model is called by the path that it lies at, and the tables in the files of its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tllm.core.disk import LFS_HINT, LFS_POINTER, is_lfs_pointer
from tllm.core.errors import TllmError
from tllm.core.gguf_files import is_gguf


def model_name(path: Path) -> str:
    """A GGUF file is called by its own name, even where that is a link; a snapshot of the Hugging Face cache by its
    repository, `org/name`; any other folder by its name."""
    if is_gguf(path):
        return path.stem
    return repo_of(path) or path.resolve().name


def folder_of_repo(repo: str) -> str:
    """The name of the folder of `org/name` in the Hugging Face cache."""
    return f"models--{repo.replace('/', '--')}"


def repo_of(snapshot: Path) -> str:
    """`org/name` of a folder `models--org--name/snapshots/COMMIT`; "" of any other folder."""
    folder = snapshot.parent.parent.name
    if snapshot.parent.name != "snapshots" or not folder.startswith("models--"):
        return ""
    return folder.removeprefix("models--").replace("--", "/")


def json_table(file: Path, error: type[TllmError]) -> dict[str, Any]:
    """The object that a JSON file of a model holds. Raises an `error` for a file that holds none."""
    try:
        content = file.read_bytes()
        if is_lfs_pointer(content):
            raise error(f"{file} {LFS_POINTER}", LFS_HINT)
        found = json.loads(content)
    except (OSError, ValueError, RecursionError) as fault:
        raise error(f"{file} cannot be read: {fault}", "copy the file again") from fault
    if not isinstance(found, dict):
        raise error(f"{file} is not a JSON object", "copy the file again")
    return found
