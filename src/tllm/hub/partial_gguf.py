"""GGUF models of the hub that are to be read by ranges: only their headers are fetched to this disk."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from tllm.core.cache_folder import cache_folder
from tllm.core.gguf_files import read_range
from tllm.core.gguf_header import Read
from tllm.core.model_folders import folder_of_repo
from tllm.core.partial_gguf_files import keep_head
from tllm.hub.byte_ranges import HubRanges
from tllm.hub.folders import local_file
from tllm.hub.repository import HubFile, Repository


def fetch_partial_gguf(chosen: Repository) -> Path:
    """The first file of a GGUF model, and its other pieces beside it, each only up to the end of its header.

    Their folder is of the commit, which pins what is in them. Raises what `HubRanges` raises.
    """
    folder = cache_folder("gguf-heads") / folder_of_repo(chosen.repo) / chosen.commit
    ranges = HubRanges(chosen)
    paths = [folder / file.name for file in chosen.files]
    for path, file in zip(paths, chosen.files, strict=True):
        keep_head(path, file.size, _reader(chosen, file, ranges))
    return paths[0]


def _reader(chosen: Repository, file: HubFile, ranges: HubRanges) -> Read:
    """Bytes of a file, from this disk where it is there whole."""
    path = local_file(chosen, file)
    return partial(ranges.read, file) if path is None else partial(read_range, path)
