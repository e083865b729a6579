"""`put_together`: whole files in the Hugging Face cache, made of ranges of them that came to this machine. No torch.

Nodes fetch what they need of a model, and keep it in chunks. Whoever needs all of it on the same machine later, such as
`tllm generate` or a program of somebody else, finds the file here, and the hub is asked for the rest alone.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from tllm.core.cache_folder import cache_folder
from tllm.core.disk import PART, whole_file
from tllm.core.errors import TllmError
from tllm.core.memory import amount
from tllm.core.model_folders import folder_of_repo
from tllm.hub.folders import hub_cache, missing_files, snapshot_folder
from tllm.hub.hub_client import check_room, partial_bytes
from tllm.hub.repository import HubFile, Repository
from tllm.node.weights.hub_chunks import TABLES, HubChunks
from tllm.node.weights.hub_fetch import RUN_BYTES
from tllm.weights.chunk_cache import ChunkCache
from tllm.weights.file_chunks import FileChunk, bounds, runs

log = logging.getLogger("tllm.weights")


def put_together(repository: Repository, cache: Path | None = None) -> None:
    """Put those files of a commit into the Hugging Face cache of which chunks are in the folder `cache`, by default the
    one that nodes keep theirs in; the chunks stay there.

    A file is left to `download` where that has more of it already, and where it does not come about: the disk takes no
    more, the hub gives no ranges, or what was made does not have the hash that the hub gives. The log says why.
    """
    folder = cache or cache_folder()
    try:
        if not (folder / TABLES).is_dir():
            return
        chunks = HubChunks(repository, ChunkCache(folder, sys.maxsize))  # nothing is evicted for what is only read
    except (OSError, TllmError) as error:
        log.warning("weights that are kept in %s cannot be looked for: %s", folder, _why(error))
        return
    for file in (file for file in missing_files(repository).files if file.is_large):
        try:
            kept = sum(chunks.size_of(chunk) for chunk in _chunks_of(chunks, file) if chunks.is_kept(chunk))
            if kept > _had_by_library(repository, file):
                _put_together(chunks, file)
        except (OSError, TllmError) as error:
            text = "%s of %s is not put together of the ranges that are here: %s"
            log.warning(text, file.name, repository, _why(error))


def _had_by_library(repository: Repository, file: HubFile) -> int:
    """Bytes of a file that the hub's library has: all of them where another commit has the same file."""
    blob = _blob(repository, file)
    return file.size if blob.is_file() and blob.stat().st_size == file.size else partial_bytes(repository, file)


def _blob(repository: Repository, file: HubFile) -> Path:
    return hub_cache() / folder_of_repo(repository.repo) / "blobs" / file.etag


def _why(error: OSError | TllmError) -> str:
    return error.message if isinstance(error, TllmError) else error.strerror or str(error)


def _chunks_of(chunks: HubChunks, file: HubFile) -> list[FileChunk]:
    return [FileChunk(file.name, number) for number in range(-(-file.size // chunks.chunk_bytes))]


def _put_together(chunks: HubChunks, file: HubFile) -> None:
    repository = chunks.repository
    check_room(hub_cache(), file.size, f"{file.name} of {repository}")
    blob = _blob(repository, file)
    place = snapshot_folder(repository.repo, repository.commit) / file.name
    blob.parent.mkdir(parents=True, exist_ok=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    try:
        with whole_file(blob) as whole:
            for data in _pieces(chunks, file):
                digest.update(data)
                whole.write(data)
            if digest.hexdigest() != file.etag:
                raise _WrongHash
    except _WrongHash:
        text = "%s of %s, put together of ranges, does not have the hash that the hub gives: it is fetched anew"
        log.warning(text, file.name, repository)
        return
    _link(place, blob)
    text = "%s of %s was put together of ranges: %s were here, %s came from the hub"
    fetched = chunks.ranges.fetched
    log.info(text, file.name, repository, amount(file.size - fetched), amount(fetched))


def _link(place: Path, blob: Path) -> None:
    """Let the place be a link to the blob, in one step: another program may do the same, or read it meanwhile."""
    beside = place.with_name(f"{place.name}.{secrets.token_hex(4)}{PART}")
    try:
        beside.symlink_to(os.path.relpath(blob, place.parent))
        beside.replace(place)
    finally:
        beside.unlink(missing_ok=True)


def _pieces(chunks: HubChunks, file: HubFile) -> Iterator[bytes]:
    """The file's bytes in order, what is missing from the hub."""
    chunks.ranges.fetched = 0
    longest = max(1, RUN_BYTES // chunks.chunk_bytes)
    for is_kept, group in groupby(_chunks_of(chunks, file), chunks.is_kept):
        for run in runs(list(group), 1 if is_kept else longest):
            kept = chunks.kept(run[0]) if is_kept else None
            start, stop = run[0].number * chunks.chunk_bytes, bounds(run[-1].number, chunks.chunk_bytes, file.size)[1]
            yield chunks.ranges.read(file, start, stop) if kept is None else kept


class _WrongHash(Exception):
    """What was written is not the file, and gets no name."""
