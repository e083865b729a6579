"""Where models lie on a disk: the Hugging Face cache in its standard layout, and what this program keeps beside it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from tllm.core.cache_folder import cache_folder
from tllm.core.disk import write_whole
from tllm.core.errors import UNREADABLE
from tllm.core.model_folders import folder_of_repo, repo_of
from tllm.hub.model_name import is_commit
from tllm.hub.repository import HubFile, Repository, usable_files

HOME = "HF_HOME"


def hub_cache() -> Path:
    """The Hugging Face cache: HF_HUB_CACHE, else HF_HOME/hub, else where its library puts it."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def snapshot_folder(repo: str, commit: str) -> Path:
    """Where the files of a commit are, or would be, as links to blobs."""
    return _repo_folder(repo) / "snapshots" / commit


def commit_of(repo: str, revision: str) -> str:
    """The commit that a revision stood for when it was last fetched; "" if it never was."""
    if is_commit(revision):
        return revision
    try:
        found = (_repo_folder(repo) / "refs" / (revision or "main")).read_text("ascii").strip()
    except (OSError, ValueError):
        return ""
    return found if is_commit(found) else ""


def keep_reference(repo: str, revision: str, commit: str) -> None:
    """Write down which commit a revision stands for now, as the Hugging Face library does, unless it is there: a cache
    that others share may be read by those who may not write it."""
    if commit_of(repo, revision) != commit:
        write_whole(_repo_folder(repo) / "refs" / (revision or "main"), commit.encode(), HOME)


def kept_listing(repo: str, commit: str) -> Repository | None:
    """All files of a commit, as the hub once listed them; None if that was not kept."""
    try:
        known = msgspec.json.decode(_listing(repo, commit).read_bytes(), type=Repository)
    except (OSError, *UNREADABLE):
        return None
    if (known.repo, known.commit) != (repo, commit):
        return None
    return msgspec.structs.replace(known, files=usable_files(known.files))


def snapshot_listing(repo: str, commit: str) -> Repository:
    """The files of a commit that the Hugging Face cache has, be they all or not."""
    return Repository(repo, commit, usable_files(_snapshot_files(snapshot_folder(repo, commit))))


def keep_repository(repository: Repository) -> None:
    """Keep a listing, so that a start without the hub knows which bytes there are."""
    path = _listing(repository.repo, repository.commit)
    if not path.is_file():
        write_whole(path, msgspec.json.encode(repository), HOME)


def local_file(repository: Repository, file: HubFile) -> Path | None:
    """A file of a commit that the Hugging Face cache has whole; None where it has not. Its library gives a file its
    place only when it has come to its end."""
    path = snapshot_folder(repository.repo, repository.commit) / file.name
    try:
        return path if path.stat().st_size == file.size else None
    except OSError:
        return None


def missing_files(repository: Repository) -> Repository:
    """Those that the Hugging Face cache lacks."""
    return repository.of(file.name for file in repository.files if local_file(repository, file) is None)


def cached_repositories() -> Iterator[tuple[str, str, Path]]:
    """(org/name, commit, snapshot) of every model in the Hugging Face cache, by name."""
    try:
        folders = sorted(hub_cache().glob("models--*--*/snapshots/*"))
    except OSError:
        return
    for snapshot in folders:
        repo = repo_of(snapshot)
        if repo and snapshot.is_dir():
            yield repo, snapshot.name, snapshot


def _repo_folder(repo: str) -> Path:
    return hub_cache() / folder_of_repo(repo)


def _listing(repo: str, commit: str) -> Path:
    assert is_commit(commit)
    return cache_folder("hub") / folder_of_repo(repo) / f"{commit}.json"


def _snapshot_files(snapshot: Path) -> Iterator[HubFile]:
    """The files of a snapshot. The name of the blob that each is a link to is its etag."""
    for path in snapshot.rglob("*"):
        if path.is_symlink() and path.is_file():
            yield HubFile(str(path.relative_to(snapshot)), path.stat().st_size, path.resolve().name)
