"""`put_together`: whole files in the Hugging Face cache, made of ranges of them that came to this machine. No torch.

Nodes fetch what they need of a model, and keep it in chunks. Whoever needs all of it on the same machine later, such as
`tllm generate` or a program of somebody else, finds the file here, and the hub is asked for the rest alone.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from tllm.core.cache_folder import cache_folder
from tllm.core.disk import whole_file
from tllm.core.memory import amount
from tllm.core.model_folders import folder_of_repo
from tllm.hub.folders import hub_cache, missing_files, snapshot_folder
from tllm.hub.hub_client import check_room
from tllm.hub.repository import HubFile, Repository
from tllm.node.weights.hub_chunks import TABLES, HubChunks
from tllm.node.weights.hub_fetch import RUN_BYTES
from tllm.weights.chunk_cache import ChunkCache
from tllm.weights.file_chunks import FileChunk, bounds, runs

log = logging.getLogger("tllm.weights")


def put_together(repository: Repository, cache: Path | None = None) -> None:
    """Put those files of a commit into the Hugging Face cache of which chunks are in the folder `cache`, by default the
    one that nodes keep theirs in; the chunks stay there. A file of which there is none is left to others.

    Raises what `HubRanges` raises where chunks are missing, and CapacityError where the disk has no room. A file that
    does not have the hash that the hub gives is thrown away, and left to others too.
    """
    folder = cache or cache_folder()
    if not (folder / TABLES).is_dir():
        return
    chunks = HubChunks(repository, ChunkCache(folder, sys.maxsize))  # nothing is evicted for what is only read
    for file in missing_files(repository).files:
        if file.is_large and any(chunks.is_kept(chunk) for chunk in _chunks_of(chunks, file)):
            _put_together(chunks, file)


def _chunks_of(chunks: HubChunks, file: HubFile) -> list[FileChunk]:
    return [FileChunk(file.name, number) for number in range(-(-file.size // chunks.chunk_bytes))]


def _put_together(chunks: HubChunks, file: HubFile) -> None:
    repository = chunks.repository
    check_room(hub_cache(), file.size, f"{file.name} of {repository}")
    blob = hub_cache() / folder_of_repo(repository.repo) / "blobs" / file.etag
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
    place.unlink(missing_ok=True)
    place.symlink_to(os.path.relpath(blob, place.parent))
    text = "%s of %s was put together of ranges: %s were here, %s came from the hub"
    fetched = chunks.ranges.fetched
    log.info(text, file.name, repository, amount(file.size - fetched), amount(fetched))


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
