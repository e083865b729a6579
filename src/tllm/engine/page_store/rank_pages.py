"""`RankPages`: one rank's part in saving pages of the KV cache to disk and in reading them back.

The rank's thread only copies between the cache and a buffer. A thread writes what was copied, another reads what is to
be taken; hashes are made and checked there. What is copied and not yet written is bounded: more is not saved.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from tllm.core.errors import WeightsError
from tllm.engine.page_store.page_buffer import HeldLayer, PageBuffer
from tllm.engine.page_store.page_file import (
    LayerPiece,
    PageHeader,
    PageIdentity,
    file_bytes,
    held_box,
    identity_of,
    piece_of,
    read_header,
    read_pieces,
    write_page,
)
from tllm.engine.page_store.page_folder import Box, PageFolder, box_of, covers
from tllm.engine.page_store.remote_pages import RemotePages
from tllm.engine.pages.page_messages import FetchPages, PageChain, SavePages, TakePages, num_pages
from tllm.spec.cut import size

log = logging.getLogger("tllm.engine")

BUFFER_BYTES = 256 << 20
"""What waits to be written, at most."""

TAKE_SECONDS = 10.0
"""How long the ring waits for a rank's disk, at most; then the pages count as missing."""

MAX_FETCHES = 8
"""Read ahead and not taken, at most. A driver has two under way."""

CLOSE_SECONDS = 2.0
"""For what waits to be written when the rank ends."""


class Fetched(NamedTuple):
    """Pages that were read, of which the first `num_whole` have all that this rank holds."""

    buffer: PageBuffer
    num_whole: int


class RankPages:
    """Pages of the layers and kv heads `layers` in a folder. `model` says whose pages they are.

    A page is found if files in the folder have all of its layers and heads, whoever wrote them under whatever plan.
    What the folder lacks may come from `others`, the disks of other nodes.
    """

    def __init__(self, layers: Mapping[int, HeldLayer], page_size: int, folder: PageFolder, model: str) -> None:
        self._layers, self._page_size, self._model = layers, page_size, model
        self.folder = folder
        self._box = box_of({number: one.heads for number, one in layers.items()})
        self._head_bytes = {number: page_size * one.token_bytes for number, one in layers.items()}
        self.page_bytes = sum(size(one.heads) * self._head_bytes[number] for number, one in layers.items())
        self._writer = ThreadPoolExecutor(1, "tllm-page-writer")
        self._reader = ThreadPoolExecutor(1, "tllm-page-reader")
        self._fetches: dict[int, tuple[Future[Fetched], float]] = {}  # and when each was asked for
        self._writes = PendingWrites()
        self.others: RemotePages | None = None

    def keeps(self, name: bytes) -> bool:
        """Whether this rank's part of a page is on disk, or on its way."""
        return self._is_written(name) or name in self._writes

    def may_have(self, name: bytes) -> bool:
        """Whether something of a page is on disk, here or elsewhere. If it is all that is needed, reading it tells."""
        return name in self.folder or (self.others is not None and name in self.others)

    @property
    def has_room(self) -> bool:
        """Whether pages that are saved now can be held until they are written, as far as is known."""
        return self._writes.num_bytes < BUFFER_BYTES // 2

    def wait_for_room(self, seconds: float) -> None:
        """Wait until there is, or until so much time has passed."""
        if not self.has_room:
            wait(self._writes.under_way(), seconds, "FIRST_COMPLETED")

    @torch.inference_mode()
    def save(self, message: SavePages) -> None:
        """Copy pages, and let them be written."""
        chain, nbytes = message.chain, len(message.chain.names) * self.page_bytes
        if self.others is not None:
            self.others.saved(chain.names)
        if not self.folder.can_write or all(map(self.keeps, chain.names)):
            return
        if self._writes.num_bytes + nbytes > BUFFER_BYTES:
            log.debug("%d pages are not saved: the disk is behind", len(chain.names))
            return
        buffer = PageBuffer(self._layers, self._page_size, len(chain.names))
        buffer.copy_out(message.page_table)
        self._writes.add(chain.names, nbytes, self._writer.submit(self._write, chain, buffer))

    def fetch(self, message: FetchPages) -> None:
        """Begin to read pages."""
        while len(self._fetches) >= MAX_FETCHES:
            self._fetches.pop(next(iter(self._fetches)))[0].cancel()
        self._fetches[message.number] = self._reader.submit(self._read, message.chain), time.monotonic()

    def is_read(self, number: int) -> bool:
        """Whether taking what was fetched under this number would not wait."""
        return number not in self._fetches or self._fetches[number][0].done()

    @torch.inference_mode()
    def take(self, message: TakePages) -> int:
        """Put what was fetched into the cache; how many pages from the first on are there now."""
        if message.number not in self._fetches:
            return 0
        fetch, began = self._fetches.pop(message.number)
        if not message.page_table:
            fetch.cancel()
            return 0
        try:
            # Ranks wait one after another, but all have been reading since the same moment.
            fetched = fetch.result(max(0.0, began + TAKE_SECONDS - time.monotonic()))
        except TimeoutError:
            log.warning("pages in %s were not read within %g s, and are computed", self.folder.root, TAKE_SECONDS)
            return 0
        count = min(fetched.num_whole, num_pages(message.page_table))
        fetched.buffer.copy_in(message.page_table, count)
        return count

    def close(self) -> None:
        """Give what waits to be written a little time, and read nothing more."""
        if self.others is not None:
            self.others.close()
        self._reader.shutdown(wait=False, cancel_futures=True)
        wait(self._writes.under_way(), CLOSE_SECONDS)
        self._writer.shutdown(wait=False, cancel_futures=True)

    def stats(self) -> dict[str, float]:
        return self.folder.stats()

    def _write(self, chain: PageChain, buffer: PageBuffer) -> None:
        for place, name in enumerate(chain.names):
            if self._is_written(name):
                continue
            pieces, content = list[LayerPiece](), list[memoryview]()
            for number, layer in self._layers.items():
                part = buffer.page(number, place)
                pieces.append(piece_of(number, layer.heads, layer.forms, part))
                content += part
            header = PageHeader(identity_of(self._model, chain, place), tuple(pieces))
            fill = partial(write_page, header=header, content=content)
            written = self.folder.write(name, self._box, file_bytes(header), fill)
            if written:
                self.folder.touch(name, self._box, chain.first + place)

    def _is_written(self, name: bytes) -> bool:
        """Whether files have this rank's part of a page, its own or others'."""
        boxes = self.folder.boxes(name)
        return bool(boxes) and covers(boxes, self._box)

    def _read(self, chain: PageChain) -> Fetched:
        if self.others is not None:
            self.others.bring(chain.names, self._box)
        buffer = PageBuffer(self._layers, self._page_size, len(chain.names))
        for place in range(len(chain.names)):
            if not self._read_page(chain, place, buffer):
                return Fetched(buffer, place)
        return Fetched(buffer, len(chain.names))

    def _read_page(self, chain: PageChain, place: int, buffer: PageBuffer) -> bool:
        """Fill in one page from as many files as it takes; whether all of it was there."""
        name, identity = chain.names[place], identity_of(self._model, chain, place)
        missing = {(number, head) for number, one in self._layers.items() for head in range(*one.heads)}
        boxes = sorted(self.folder.boxes(name), key=lambda box: box != self._box)
        for box in boxes:
            wanted = {number for number, head in missing if box.has(number, head)}
            if not wanted:
                continue
            for piece, content in self._read_file(name, box, identity, wanted):
                buffer.fill(piece.layer, place, content, (piece.first_head, piece.stop_head))
                missing -= {(piece.layer, head) for head in range(piece.first_head, piece.stop_head)}
            self.folder.touch(name, box, chain.first + place)
        return not missing

    def _read_file(
        self, name: bytes, box: Box, identity: PageIdentity, wanted: set[int]
    ) -> list[tuple[LayerPiece, bytes]]:
        """Pieces of these layers in a file that is whole and of just this page; of any other file, none."""
        path = self.folder.path(name, box)
        try:
            return self._read_pieces(path, identity, box, wanted)
        except OSError:  # another process may have made room
            self.folder.remove(name, box)
        except WeightsError as error:
            self.folder.remove(name, box, error.message)
        return []

    def _read_pieces(
        self, path: Path, identity: PageIdentity, box: Box, wanted: set[int]
    ) -> list[tuple[LayerPiece, bytes]]:
        with path.open("rb") as file:
            header = read_header(file, os.fstat(file.fileno()).st_size, str(path))
            if header.identity != identity or held_box(header) != box:
                raise WeightsError(f"{path} holds another page than its name says")
            of_layer = {piece.layer: piece for piece in header.pieces if piece.layer in wanted}
            for number, piece in of_layer.items():
                if piece.tensors != self._layers[number].forms:
                    raise WeightsError(f"{path} holds tensors {piece.tensors}, not {self._layers[number].forms}")
            pieces = read_pieces(file, header, {number: self._head_bytes[number] for number in of_layer}, str(path))
        self.folder.bytes_read += sum(map(len, pieces.values()))
        return [(of_layer[number], content) for number, content in pieces.items()]


class PendingWrites:
    """Pages that were copied and are not written yet. The rank's thread adds them, the writer's takes them off."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._lock = threading.Lock()
        self._parts: dict[Future[None], tuple[frozenset[bytes], int]] = {}

    def __contains__(self, name: bytes) -> bool:
        with self._lock:
            return any(name in names for names, _ in self._parts.values())

    def under_way(self) -> list[Future[None]]:
        """What is being written, or waits for it."""
        with self._lock:
            return list(self._parts)

    def add(self, names: tuple[bytes, ...], nbytes: int, write: Future[None]) -> None:
        """Count them until they are written."""
        with self._lock:
            self._parts[write] = frozenset(names), nbytes
            self.num_bytes += nbytes
        write.add_done_callback(self._end)

    def _end(self, write: Future[None]) -> None:
        with self._lock:
            self.num_bytes -= self._parts.pop(write)[1]
        if not write.cancelled() and (error := write.exception()) is not None:
            log.error("pages were not written: %s: %s", type(error).__name__, error)
