"""`put_together`: whole files in the Hugging Face cache, made of ranges of them that came to this machine. No torch.

Nodes fetch what they need of a model, and keep it in chunks. Whoever needs all of it on the same machine later, such as
`tllm generate` or a program of somebody else, finds the file here, and the hub is asked for the rest alone.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from functools import partial
from itertools import groupby
from pathlib import Path

from tllm.core.cache_folder import cache_folder
from tllm.core.errors import TllmError
from tllm.core.memory import amount
from tllm.hub.folders import hub_cache, missing_files
from tllm.hub.hub_client import check_room
from tllm.hub.part_files import blob_of, fill_part, held_part, is_whole, link_blob, part_bytes, part_of
from tllm.hub.repository import HubFile, Repository
from tllm.node.weights.hub_chunks import TABLES, HubChunks
from tllm.node.weights.hub_fetch import RUN_BYTES
from tllm.weights.chunk_cache import ChunkCache
from tllm.weights.file_chunks import FileChunk, bounds, runs

log = logging.getLogger("tllm.weights")


def put_together(repository: Repository, cache: Path | None = None) -> None:
    """Put those files of a commit into the Hugging Face cache of which chunks are in the folder `cache`, by default the
    one that nodes keep theirs in; the chunks stay there.

    What was written of it before is taken up. A program that writes the same file at the same time is waited for.

    A file is left to `download` where another commit has it, and where it does not come about: the disk takes no more,
    the hub gives no ranges, or what was made does not have the hash that the hub gives. The log says why.
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
            blob = blob_of(repository, file)
            if (kept or part_bytes(blob)) and not is_whole(blob, file):
                _put_together(chunks, file)
        except (OSError, TllmError) as error:
            text = "%s of %s is not put together of the ranges that are here: %s"
            log.warning(text, file.name, repository, _why(error))


def _why(error: OSError | TllmError) -> str:
    return error.message if isinstance(error, TllmError) else error.strerror or str(error)


def _chunks_of(chunks: HubChunks, file: HubFile, first: int = 0) -> list[FileChunk]:
    return [FileChunk(file.name, number) for number in range(first, chunks.count(file.name))]


def _put_together(chunks: HubChunks, file: HubFile) -> None:
    repository = chunks.repository
    blob = blob_of(repository, file)
    blob.parent.mkdir(parents=True, exist_ok=True)
    with held_part(part_of(blob)) as part:
        if not is_whole(blob, file):  # else another program was first
            check_room(hub_cache(), file.size - part_bytes(blob), f"{file.name} of {repository}")
            fetched = chunks.ranges.fetched
            taken = fill_part(part, file, chunks.chunk_bytes, partial(_pieces, chunks, file))
            if taken is None:
                text = "%s of %s, put together of ranges, does not have the hash that the hub gives: it is fetched anew"
                log.warning(text, file.name, repository)
                return
            came = chunks.ranges.fetched - fetched
            text = (
                "%s of %s was put together of ranges: %s were here, of these %s in a part of it; %s came from the hub"
            )
            log.info(text, file.name, repository, amount(file.size - came), amount(taken), amount(came))
            part_of(blob).replace(blob)
    link_blob(repository, file)


def _pieces(chunks: HubChunks, file: HubFile, first: int) -> Iterator[bytes]:
    """The file's bytes in order from the beginning of a chunk on, what is missing from the hub."""
    longest = max(1, RUN_BYTES // chunks.chunk_bytes)
    wanted = _chunks_of(chunks, file, first // chunks.chunk_bytes)
    for is_kept, group in groupby(wanted, chunks.is_kept):
        for run in runs(list(group), 1 if is_kept else longest):
            kept = chunks.kept(run[0]) if is_kept else None
            start, stop = run[0].number * chunks.chunk_bytes, bounds(run[-1].number, chunks.chunk_bytes, file.size)[1]
            yield chunks.ranges.read(file, start, stop) if kept is None else kept
