"""`locate`: from what a user calls a model to its files on this disk, fetched where they are not there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from tllm.core.errors import ConfigError, TllmError
from tllm.core.gguf_files import SUFFIX
from tllm.core.memory import amount
from tllm.hub.folders import (
    commit_of,
    keep_reference,
    keep_repository,
    kept_listing,
    missing_files,
    snapshot_folder,
    snapshot_listing,
)
from tllm.hub.hub_client import download, list_repository
from tllm.hub.hub_errors import HubOffline, hub_host
from tllm.hub.lm_studio import find_lm_studio, lm_studio_file
from tllm.hub.model_name import ModelName, is_commit, meant, parse_name
from tllm.hub.ollama_store import find_ollama
from tllm.hub.part_files import remove_left_parts
from tllm.hub.partial_gguf import fetch_partial_gguf
from tllm.hub.repository import (
    INDEX,
    MANIFEST,
    Repository,
    gguf_files_of,
    no_weights,
    safetensors_files,
    small_files,
)

SAFETENSORS = ".safetensors"

Need = Literal["config", "ranges", "whole"]
"""What of a model must be on this disk: config and tokenizer; these, with weights that each node fetches its own ranges
of; or all of it. A GGUF file has config and tokenizer inside: of one that is not all here, its header is kept."""


@dataclass(frozen=True)
class LocatedModel:
    """`path` is what every reader takes: a folder or a GGUF file. `weights` are the files that are not all there, and
    of which each node fetches what it needs; None where they are all there. `said` tells in one line what was found,
    "" of a path that was given."""

    path: Path
    weights: Repository | None = None
    said: str = ""


Reuse = Callable[[Repository], None]
"""Puts into the Hugging Face cache what this machine has elsewhere of these files."""


def locate(text: str, need: Need, revision: str | None = None, reuse: Reuse = lambda repository: None) -> LocatedModel:
    """A path that exists wins; else the model of that name: in the Hugging Face cache, of ollama or of LM Studio, or
    fetched from the hub, but for what can be reused. ConfigError where it is nowhere, and what hinders fetching it as
    an error of its own."""
    try:
        path = Path(text).expanduser()
        is_there = path.exists()
    except (OSError, RuntimeError) as error:  # a folder that may not be looked into; a user who has no home
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"{text[:200]} cannot be looked for: {reason}", "give a path that this user may read"
        ) from error
    if is_there:
        if revision:
            raise ConfigError(f"{text} is a path here and has no revision {revision}", "leave --revision out")
        return LocatedModel(path)
    name = parse_name(text, revision)
    if name is None:
        raise ConfigError(
            f"{text} is not a folder or a GGUF file, nor a name that a model can have", nearby(path) + meant(text)
        )
    if name.store == "ollama":
        found = find_ollama(name.repo, name.tag)
        return LocatedModel(found, said=f"{name}: {found.resolve()}")
    if name.store == "lmstudio":
        return _in_lm_studio(name, lm_studio_file(name.repo, name.tag))
    remove_left_parts()
    commit = commit_of(name.repo, name.revision)
    if (file := _only_in_lm_studio(name, commit)) is not None:
        return _in_lm_studio(name, file)
    try:
        repository, where = _listing(name, commit)
    except TllmError as error:
        error.hint = nearby(path) + error.hint
        raise
    return _files(repository, name, need, where, reuse)


def nearby(path: Path) -> str:
    """The beginning of a hint where a model with nearly the name of a path lies beside it, else ""."""
    try:
        beside = [one.name for one in path.parent.iterdir() if one.suffix == SUFFIX or one.is_dir()]
    except OSError:
        return ""
    close = get_close_matches(path.name, beside, n=1)
    return f"did you mean {path.parent / close[0]}? " if close else ""


def _in_lm_studio(name: ModelName, path: Path) -> LocatedModel:
    return LocatedModel(path, said=f"{name}: {path} of LM Studio")


def _only_in_lm_studio(name: ModelName, commit: str) -> Path | None:
    """The file of LM Studio, where the hub was never asked for the model."""
    if name.revision or commit:
        return None
    return find_lm_studio(name.repo, name.tag)


def _listing(name: ModelName, commit: str) -> tuple[Repository, str]:
    """What the repository holds at the revision, which stood for `commit` when it was last fetched, and how that is
    known."""
    kept = kept_listing(name.repo, commit) if commit else None
    if kept is not None and is_commit(name.revision):
        return kept, "which never changes"
    try:
        found = list_repository(name.repo, name.revision)
    except TllmError as error:
        kept = kept or (snapshot_listing(name.repo, commit) if commit else None)
        if kept is None or not any(file.name.endswith((SAFETENSORS, SUFFIX)) for file in kept.files):
            raise
        why = "HF_HUB_OFFLINE is set" if isinstance(error, HubOffline) else error.message
        return kept, f"as it was last seen ({why})"
    keep_repository(found)
    keep_reference(name.repo, name.revision, found.commit)
    return found, f"as {hub_host()} has it"


def _files(repository: Repository, name: ModelName, need: Need, where: str, reuse: Reuse) -> LocatedModel:
    folder = snapshot_folder(repository.repo, repository.commit)
    has_safetensors = any(file.name.endswith(SAFETENSORS) and "/" not in file.name for file in repository.files)
    if not has_safetensors and not any(file.name.endswith(SUFFIX) for file in repository.files):
        raise no_weights(repository)
    if name.tag or not has_safetensors:
        return _gguf(gguf_files_of(repository, name.tag), name, need, where, reuse)
    small = small_files(repository)
    download(small)
    index = folder / INDEX
    weights = safetensors_files(repository, index.read_bytes() if small.file(INDEX) else None)
    if need == "whole":
        reuse(weights)
    said = f"{name}: commit {repository.commit[:12]}, {where}; {_fetched(weights)}"
    is_whole = not missing_files(weights).files
    if need == "whole":
        download(weights)
    elif need == "ranges" and not is_whole:
        lists = [file.name for file in small.files if file.name in (INDEX, MANIFEST)]
        shared = repository.of([*lists, *(file.name for file in weights.files)])
        return LocatedModel(folder, shared, f"{said}, each node its own part of them")
    elif not is_whole:
        said = f"{name}: commit {repository.commit[:12]}, {where}; of its weights nothing is needed"
    return LocatedModel(folder, said=said)


def _gguf(chosen: Repository, name: ModelName, need: Need, where: str, reuse: Reuse) -> LocatedModel:
    said = f"{name}: {chosen.files[0].name} at commit {chosen.commit[:12]}, {where}"
    if need == "whole" or not missing_files(chosen).files:
        reuse(chosen)
        fetched = _fetched(chosen)
        download(chosen)
        path = snapshot_folder(chosen.repo, chosen.commit) / chosen.files[0].name
        return LocatedModel(path, said=f"{said}; {fetched}")
    path = fetch_partial_gguf(chosen)
    if need == "config":
        return LocatedModel(path, said=f"{said}; of its weights nothing is needed")
    return LocatedModel(path, chosen, f"{said}; {_fetched(chosen)}, each node its own part of them")


def _fetched(weights: Repository) -> str:
    """How much of the weights is here, in words."""
    missing = missing_files(weights).nbytes
    if not missing:
        return f"its {amount(weights.nbytes)} of weights are in the Hugging Face cache"
    return f"{amount(missing)} of {amount(weights.nbytes)} of weights are to be fetched"
