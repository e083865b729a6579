"""What is asked of the Hugging Face hub for whole files: what a repository holds, and its files into the cache that all
programs share. The library of the hub does both; it is loaded when it is needed."""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from pathlib import Path

from tllm.core.errors import CapacityError, WeightsError
from tllm.core.memory import amount
from tllm.core.model_folders import folder_of_repo
from tllm.hub.folders import hub_cache, local_file, missing_files
from tllm.hub.hub_errors import HubUnreachable, endpoint, hub_errors
from tllm.hub.model_name import is_commit
from tllm.hub.repository import HubFile, Repository, usable_files

LIST_SECONDS = 20.0
ATTEMPTS, RETRY_SECONDS = 3, 1.0
"""Of a file, beside those of the library itself, and the pause after each: the next goes on where that broke off."""
HASHED_BYTES = 1 << 20


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
    check_room(hub_cache(), sum(file.size - partial_bytes(repository, file) for file in missing.files), str(repository))
    for file in missing.files:
        _download(repository, file)


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


def partial_bytes(repository: Repository, file: HubFile) -> int:
    """How much of a file has come so far."""
    blobs, most = hub_cache() / folder_of_repo(repository.repo) / "blobs", 0
    for path in blobs.glob(f"{file.etag}*.incomplete"):
        with contextlib.suppress(OSError):  # another program has fetched it to its end meanwhile
            most = max(most, path.stat().st_size)
    return most


def _download(repository: Repository, file: HubFile) -> None:
    from huggingface_hub import hf_hub_download

    for attempt in range(1, ATTEMPTS + 1):
        try:
            with hub_errors(repository.repo, repository.commit):
                path = Path(
                    hf_hub_download(
                        repository.repo,
                        file.name,
                        revision=repository.commit,
                        endpoint=endpoint(),
                        cache_dir=hub_cache(),
                        library_name="tllm",
                    )
                )
            break
        except (HubUnreachable, OSError) as error:
            if attempt == ATTEMPTS or (isinstance(error, HubUnreachable) and not partial_bytes(repository, file)):
                raise _broken_off(repository, file, attempt, error) from error
            time.sleep(RETRY_SECONDS)
    if local_file(repository, file) is None:
        raise WeightsError(
            f"{file.name} of {repository} came with {path.stat().st_size} bytes, and the hub lists {file.size}",
            "the repository has changed or the hub is at fault: try again",
        )
    if _hash(path, file) != file.etag:
        path.resolve().unlink()
        path.unlink(missing_ok=True)
        raise WeightsError(
            f"{file.name} of {repository} does not have the hash that the hub gives, and is thrown away",
            "fetch it again; if that is so every time, something between here and the hub changes bytes",
        )


def _broken_off(repository: Repository, file: HubFile, attempts: int, error: Exception) -> WeightsError:
    come = partial_bytes(repository, file)
    if isinstance(error, HubUnreachable) and not come:
        return error
    reason = str(error).partition("\n")[0]
    return WeightsError(
        f"{file.name} of {repository} broke off {attempts} times; {come} of {file.size} bytes have come: {reason}",
        "run the same command again: it goes on from there",
    )


def _hash(path: Path, file: HubFile) -> str:
    """What the etag should be."""
    digest = file.hasher()
    with path.open("rb") as stream:
        while content := stream.read(HASHED_BYTES):
            digest.update(content)
    return digest.hexdigest()
