"""What a model is called by the path that it lies at."""

from __future__ import annotations

from pathlib import Path

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
