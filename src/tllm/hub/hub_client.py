"""What is asked of the Hugging Face hub for whole files: what a repository holds, and its files into the cache that all
programs share.

Small files come by the library of the hub, which is loaded when it is needed. Large ones come by ranges into parts that
stay (`part_files`): the library throws away what has come of a file when its transfer ends early.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from tllm.core.errors import CapacityError, WeightsError
from tllm.core.memory import amount
from tllm.hub.byte_ranges import RETRY_SECONDS, HubRanges, NoRanges
from tllm.hub.folders import hub_cache, local_file, missing_files, snapshot_folder
from tllm.hub.hub_errors import endpoint, hub_errors
from tllm.hub.model_name import is_commit
from tllm.hub.part_files import blob_of, fill_part, held_part, is_whole, link_blob, part_bytes, part_of
from tllm.hub.repository import HubFile, Repository, usable_files

log = logging.getLogger("tllm.weights")

LIST_SECONDS = 20.0
RANGE_BYTES = 256 << 20
"""Of a large file that are asked for at once; what breaks off is asked for again from its byte on."""


def list_repository(repo: str, revision: str) -> Repository:
    """What a repository holds at a revision, as the hub says. HubUnreachable, AuthError or ConfigError if it does not
    say."""
    from huggingface_hub import HfApi

    with hub_errors(repo, revision):
        info = HfApi(endpoint=endpoint(), library_name="tllm").model_info(
            repo, revision=revision or None, files_metadata=True, timeout=LIST_SECONDS
        )
    files = [
        HubFile(one.rfilename, one.lfs.size if one.lfs else one.size or 0, one.lfs.sha256 if one.lfs else one.blob_id)
        for one in info.siblings or ()
        if one.blob_id is not None
    ]
    if info.sha is None or not is_commit(info.sha):
        raise WeightsError(f"the hub gives no commit of {repo}", "is HF_ENDPOINT a Hugging Face hub?")
    return Repository(repo, info.sha, usable_files(files))


def download(repository: Repository) -> None:
    """Bring these files into the Hugging Face cache, those that are there already left out.

    Each is checked: its size, and its SHA-256 or, of a small one, the hash that git has of it. What breaks off is gone
    on with, also by the next run. CapacityError before anything is fetched if the disk has no room for it.
    """
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]  # it is documented there

    if not sys.stderr.isatty():
        disable_progress_bars()
    missing = missing_files(repository)
    come = sum(part_bytes(blob_of(repository, file)) for file in missing.files)
    check_room(hub_cache(), missing.nbytes - come, str(repository))
    for file in missing.files:
        try:
            if not (file.is_large and _come_by_ranges(repository, file)):
                _download(repository, file)
        except OSError as error:
            raise WeightsError(
                f"{file.name} of {repository} cannot be put into {hub_cache()}: {str(error).partition(chr(10))[0]}",
                "see that its disk has room, and that this user may write there; HF_HOME names another place",
            ) from error


def check_room(folder: Path, wanted: int, what: str) -> None:
    """CapacityError if the disk of a folder, which need not be there yet, has less room."""
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    if free < wanted:
        raise CapacityError(
            f"{what} takes {amount(wanted)} more on the disk of {folder}, and {amount(free)} are free, "
            f"{amount(wanted - free)} too little",
            "free some space, set HF_HOME to a larger disk, or let other machines hold a part (--nodes)",
        )


def _come_by_ranges(repository: Repository, file: HubFile) -> bool:
    """Let a large file come; whether it has, as the hub may give no ranges, and the disk no lock for a part or no link
    to the whole."""
    blob = blob_of(repository, file)
    with ExitStack() as stack:
        try:
            blob.parent.mkdir(parents=True, exist_ok=True)
            part = stack.enter_context(held_part(part_of(blob)))
        except OSError as error:
            log.warning("no part of %s can be kept in %s: %s", file.name, blob.parent, error.strerror or error)
            return False
        try:
            if not is_whole(blob, file):  # as it is where another commit has it, or another program was first
                if fill_part(part, file, 1, partial(_shown, repository, file)) is None:
                    raise _changed(repository, file)
                part_of(blob).replace(blob)
        except NoRanges as error:
            log.warning("%s", error.message)
            part.truncate(0)
            return False
    try:
        link_blob(repository, file)
    except OSError as error:
        log.warning("%s cannot be a link to %s: %s", file.name, blob, error.strerror or error)
        return False
    return True


def _shown(repository: Repository, file: HubFile, first: int) -> Iterator[bytes]:
    """The file's bytes from one on, with a bar on a terminal."""
    utils: Any = importlib.import_module("huggingface_hub.utils")
    ranges = HubRanges(repository, RETRY_SECONDS)
    with utils.tqdm(total=file.size, initial=first, desc=file.name, unit="B", unit_scale=True) as bar:
        for start in range(first, file.size, RANGE_BYTES):
            for piece in ranges.stream(file, start, min(start + RANGE_BYTES, file.size)):
                bar.update(len(piece))
                yield piece


def _download(repository: Repository, file: HubFile) -> None:
    """Let the library fetch a file. It takes whatever lies at the file's place for the file itself."""
    from huggingface_hub import hf_hub_download

    place = snapshot_folder(repository.repo, repository.commit) / file.name
    if place.exists():  # of another size, or it would not be missing
        _throw_away(place)
    with hub_errors(repository.repo, repository.commit):
        hf_hub_download(
            repository.repo,
            file.name,
            revision=repository.commit,
            endpoint=endpoint(),
            cache_dir=hub_cache(),
            library_name="tllm",
        )
    if local_file(repository, file) is None or _hash(place, file) != file.etag:
        _throw_away(place)
        raise _changed(repository, file)


def _throw_away(place: Path) -> None:
    place.resolve().unlink()
    place.unlink(missing_ok=True)


def _changed(repository: Repository, file: HubFile) -> WeightsError:
    return WeightsError(
        f"{file.name} of {repository} does not have the hash that the hub gives, and is thrown away",
        "fetch it again; if that is so every time, something between here and the hub changes bytes",
    )


def _hash(path: Path, file: HubFile) -> str:
    """What the etag should be."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, file.hasher).hexdigest()
