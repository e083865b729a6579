"""`found_models`: the models that are on this machine, wherever programs keep them. No file of weights is read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from tllm.core.errors import TllmError
from tllm.hub.folders import cached_repositories, commit_of
from tllm.hub.lm_studio import lm_studio_models
from tllm.hub.ollama_store import find_ollama, ollama_models
from tllm.hub.repository import INDEX, PICKLES, gguf_choices, index_names

DEPTH = 3
"""Folders that are looked into below a given one."""


@dataclass(frozen=True)
class FoundModel:
    """`name` is what commands take; `path` a folder or a GGUF file, None where there is none that could be read.
    `nbytes`: of weights on this disk; `lacks`: what is not there or not readable, in words."""

    name: str
    place: str
    path: Path | None
    format: str
    nbytes: int
    lacks: str = ""


def found_models(folders: Iterable[Path]) -> list[FoundModel]:
    """Those of the Hugging Face cache, of ollama, of LM Studio, and below the given folders."""
    return [*_of_hub(), *_of_ollama(), *_of_lm_studio(), *(one for folder in folders for one in _below(folder, DEPTH))]


def _of_hub() -> Iterator[FoundModel]:
    for repo, commit, snapshot in cached_repositories():
        for found in _of_folder(snapshot, repo, "hub"):
            # The name alone is the newest commit; an older one needs its own.
            is_newest = commit == commit_of(repo, "")
            yield replace(found, name=found.name if is_newest else found.name.replace(repo, f"{repo}@{commit}", 1))


def _of_ollama() -> Iterator[FoundModel]:
    for name in ollama_models():
        try:
            path = find_ollama(*name.rsplit(":", 1))
        except TllmError as error:
            yield FoundModel(f"ollama:{name}", "ollama", None, "gguf", 0, error.message)
            continue
        yield FoundModel(f"ollama:{name}", "ollama", path, "gguf", path.stat().st_size)


def _of_lm_studio() -> Iterator[FoundModel]:
    for name, path in lm_studio_models():
        yield FoundModel(f"lmstudio:{name}", "LM Studio", path, "gguf", _size(path.parent, gguf_pieces(path)))


def gguf_pieces(path: Path) -> list[str]:
    """The names of all files of the model that a GGUF file belongs to."""
    return next(iter(gguf_choices([path.name]).values()), [path.name])


def _below(folder: Path, depth: int) -> Iterator[FoundModel]:
    yield from _of_folder(folder, str(folder), "folder")
    if depth > 0:
        try:
            inside = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
        except OSError:
            return
        for path in inside:
            yield from _below(path, depth - 1)


def _of_folder(folder: Path, name: str, place: str) -> Iterator[FoundModel]:
    """The model in safetensors that a folder holds, or its GGUF files; of the hub's snapshots also parts of a model."""
    try:
        names = sorted(path.name for path in folder.iterdir() if path.is_file())
    except OSError:
        return
    weights = [one for one in names if one.endswith(".safetensors")]
    wanted = _named(folder) if INDEX in names else set(weights)
    if "config.json" in names and (weights or INDEX in names or not gguf_choices(names)):
        missing, lacks = sorted(wanted - set(weights)), ""
        pickles = [one for one in names if one.endswith(PICKLES)]
        if missing:
            lacks = f"{len(missing)} of {len(wanted)} files of weights are not on this disk"
        elif not weights:
            lacks = (
                "its weights are pickle files, which are never read" if pickles else "no weights are whole on this disk"
            )
        if weights or pickles or INDEX in names or place == "hub":
            yield FoundModel(name, place, folder, "safetensors", _size(folder, weights), lacks)
        return
    for label, files in gguf_choices(names).items():
        whole = [one for one in files if one in names]
        lacks = "" if whole == files else f"{len(files) - len(whole)} of {len(files)} pieces are not on this disk"
        called = f"{name}:{label}" if place == "hub" else str(folder / files[0])
        yield FoundModel(called, place, folder / files[0], "gguf", _size(folder, whole), lacks)


def _named(folder: Path) -> set[str]:
    try:
        return index_names((folder / INDEX).read_bytes())
    except (OSError, TllmError):
        return set()


def _size(folder: Path, names: Iterable[str]) -> int:
    return sum((folder / name).stat().st_size for name in names if (folder / name).is_file())
