"""`put_together`: whole files in the Hugging Face cache, made of ranges of them that came to this machine. No torch.

Nodes fetch what they need of a model, and keep it in chunks. Whoever needs all of it on the same machine later, such as
`tllm generate` or a program of somebody else, finds the file here, and the hub is asked for the rest alone.
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import BinaryIO

from tllm.core.cache_folder import cache_folder
from tllm.core.disk import PART
from tllm.core.errors import TllmError
from tllm.core.memory import amount
from tllm.core.model_folders import folder_of_repo
from tllm.hub.folders import hub_cache, missing_files, snapshot_folder
from tllm.hub.hub_client import check_room, partial_bytes
from tllm.hub.part_files import held_part, part_bytes, part_of
from tllm.hub.repository import HubFile, Repository
from tllm.node.weights.hub_chunks import TABLES, HubChunks
from tllm.node.weights.hub_fetch import RUN_BYTES
from tllm.weights.chunk_cache import ChunkCache
from tllm.weights.file_chunks import FileChunk, bounds, runs

log = logging.getLogger("tllm.weights")


def put_together(repository: Repository, cache: Path | None = None) -> None:
    """Put those files of a commit into the Hugging Face cache of which chunks are in the folder `cache`, by default the
    one that nodes keep theirs in; the chunks stay there.

    What a program had written that was killed at it is taken up. One that puts the same file together at the same time
    is waited for.

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
            if max(kept, part_bytes(_blob(repository, file))) > _had_by_library(repository, file):
                _put_together(chunks, file)
        except (OSError, TllmError) as error:
            text = "%s of %s is not put together of the ranges that are here: %s"
            log.warning(text, file.name, repository, _why(error))


def _had_by_library(repository: Repository, file: HubFile) -> int:
    """Bytes of a file that the hub's library has: all of them where another commit has the same file."""
    return file.size if _is_whole(repository, file) else partial_bytes(repository, file)


def _is_whole(repository: Repository, file: HubFile) -> bool:
    blob = _blob(repository, file)
    return blob.is_file() and blob.stat().st_size == file.size


def _blob(repository: Repository, file: HubFile) -> Path:
    return hub_cache() / folder_of_repo(repository.repo) / "blobs" / file.etag


def _why(error: OSError | TllmError) -> str:
    return error.message if isinstance(error, TllmError) else error.strerror or str(error)


def _chunks_of(chunks: HubChunks, file: HubFile, first: int = 0) -> list[FileChunk]:
    return [FileChunk(file.name, number) for number in range(first, chunks.count(file.name))]


def _put_together(chunks: HubChunks, file: HubFile) -> None:
    repository = chunks.repository
    blob = _blob(repository, file)
    place = snapshot_folder(repository.repo, repository.commit) / file.name
    blob.parent.mkdir(parents=True, exist_ok=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    with held_part(part_of(blob)) as part:
        if not _is_whole(repository, file):  # else another program was first
            check_room(hub_cache(), file.size - part_bytes(blob), f"{file.name} of {repository}")
            if not _fill(part, chunks, file):
                text = "%s of %s, put together of ranges, does not have the hash that the hub gives: it is fetched anew"
                log.warning(text, file.name, repository)
                return
            part_of(blob).replace(blob)
    _link(place, blob)


def _fill(part: BinaryIO, chunks: HubChunks, file: HubFile) -> bool:
    """Write what a part of a file lacks, and see to it that all is on the disk; whether the whole has the right hash.

    If it has not, a machine that lost power may have left what was never written, so that all is written once more.
    """
    size = part.seek(0, os.SEEK_END)
    whole = size // chunks.chunk_bytes if size <= file.size else 0
    for first in dict.fromkeys((whole, 0)):
        digest, fetched = file.hasher(), chunks.ranges.fetched
        part.seek(0)
        for _ in range(first):
            digest.update(part.read(chunks.chunk_bytes))
        part.truncate(part.seek(first * chunks.chunk_bytes))
        for data in _pieces(chunks, file, first):
            digest.update(data)
            part.write(data)
        if digest.hexdigest() == file.etag:
            part.flush()
            os.fsync(part.fileno())
            text = (
                "%s of %s was put together of ranges: %s were here, of these %s in a part of it; %s came from the hub"
            )
            came, taken = chunks.ranges.fetched - fetched, first * chunks.chunk_bytes
            log.info(text, file.name, chunks.repository, amount(file.size - came), amount(taken), amount(came))
            return True
    return False


def _link(place: Path, blob: Path) -> None:
    """Let the place be a link to the blob, in one step: another program may do the same, or read it meanwhile."""
    beside = place.with_name(f"{place.name}.{secrets.token_hex(4)}{PART}")
    try:
        beside.symlink_to(os.path.relpath(blob, place.parent))
        beside.replace(place)
    finally:
        beside.unlink(missing_ok=True)


def _pieces(chunks: HubChunks, file: HubFile, first: int) -> Iterator[bytes]:
    """The file's bytes in order from a chunk on, what is missing from the hub."""
    longest = max(1, RUN_BYTES // chunks.chunk_bytes)
    for is_kept, group in groupby(_chunks_of(chunks, file, first), chunks.is_kept):
        for run in runs(list(group), 1 if is_kept else longest):
            kept = chunks.kept(run[0]) if is_kept else None
            start, stop = run[0].number * chunks.chunk_bytes, bounds(run[-1].number, chunks.chunk_bytes, file.size)[1]
            yield chunks.ranges.read(file, start, stop) if kept is None else kept
