"""`RemotePages`: fetches pages that this node lacks from the disks of other nodes, and copies others in idle time.

The node before this one, in the order of ranks, is copied, so that what a rank has saved is on two disks and the loss
of one node loses none of it. Files come as they are, and are checked before they are kept.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import BinaryIO, Protocol

from tllm.core.errors import TllmError
from tllm.engine.page_store.page_file import check_file
from tllm.engine.page_store.page_folder import Box, PageFolder, covers

log = logging.getLogger("tllm.engine")

FILE_BYTES = 64 << 20
"""Of a page's file, at most, if it comes from another node."""

COPY_QUEUE = 256
"""Messages whose pages wait to be copied, at most; later ones are not copied."""

IDLE_SECONDS = 0.5
"""A rank that has computed nothing for so long has time to copy pages."""

PATIENCE_SECONDS = 10.0
"""A rank that is never idle copies those of one message in so long."""


TRIES = 3
"""Times that a page is asked for which the other node has not written yet."""

LEARN_SECONDS = (0.0, 2.0, 10.0)
"""When other nodes are asked for the names of their pages, each time after the time before."""


class RemoteDisk(Protocol):
    """The pages on another node's disk (`PageExchange`). Its methods raise TllmError where they cannot do it."""

    def find(self, names: Sequence[bytes]) -> list[tuple[Box, ...]]:
        """What it has of each of these pages."""

    def names(self) -> set[bytes]:
        """The pages that it has something of."""

    def get(self, name: bytes, box: Box) -> bytes:
        """The bytes of a file."""


class RemotePages:
    """`disks` are those of the other nodes; `copied` is the one whose pages this node keeps as well. `progress` grows
    while the rank computes."""

    def __init__(
        self, folder: PageFolder, disks: Sequence[RemoteDisk], copied: RemoteDisk | None, progress: Callable[[], int]
    ) -> None:
        self._folder, self._disks, self._copied, self._progress = folder, disks, copied, progress
        self._names = set[bytes]()
        self._to_copy: queue.Queue[tuple[bytes, ...] | None] = queue.Queue(COPY_QUEUE)
        self._ended = threading.Event()
        threading.Thread(target=self._learn, name="tllm-page-names", daemon=True).start()
        if copied is not None:
            threading.Thread(target=self._copy, name="tllm-page-copies", daemon=True).start()

    def __contains__(self, name: bytes) -> bool:
        """Whether another node had something of this page when this rank began."""
        return name in self._names

    def bring(self, names: Sequence[bytes], wanted: Box) -> None:
        """Bring what this node lacks of some pages, as far as other nodes have it."""
        for disk in self._disks:
            lacking = [name for name in names if not covers(self._folder.boxes(name), wanted)]
            if not lacking:
                return
            try:
                for name, boxes in zip(lacking, disk.find(lacking), strict=True):
                    self._take(disk, name, (box for box in boxes if overlap(box, wanted)))
            except TllmError as error:
                log.debug("no pages came from another node: %s", error.message)

    def saved(self, names: tuple[bytes, ...]) -> None:
        """Every rank has been told to save these pages: let them be copied, when there is time."""
        if self._copied is not None and self._folder.can_write and not self._to_copy.full():
            self._to_copy.put(names)

    def close(self) -> None:
        """Copy no more."""
        self._ended.set()
        if not self._to_copy.full():
            self._to_copy.put(None)

    def _take(self, disk: RemoteDisk, name: bytes, boxes: Iterable[Box]) -> None:
        for box in boxes:
            if not self._ended.is_set() and not self._folder.has_file(name, box):
                content = disk.get(name, box)
                check_file(content, self._folder.folder.name, name, box, "what another node gave")
                self._folder.write(name, box, len(content), partial(_put, content))

    def _learn(self) -> None:
        """A thread that asks the others for what they have, and again those that have nothing: they may begin later."""
        silent = list(self._disks)
        for pause in LEARN_SECONDS:
            if self._ended.wait(pause):
                return
            for disk in list(silent):
                try:
                    names = disk.names()
                except TllmError as error:
                    log.debug("another node did not tell of its pages: %s", error.message)
                    continue
                self._names |= names
                if names:
                    silent.remove(disk)

    def _copy(self) -> None:
        """A thread that copies what was saved on the node before this one."""
        assert self._copied is not None
        while (names := self._to_copy.get()) is not None and not self._ended.is_set():
            for _ in range(TRIES):
                self._wait_until_idle()
                names = self._copied_but(self._copied, names)
                if not names:
                    break

    def _copied_but(self, disk: RemoteDisk, names: tuple[bytes, ...]) -> tuple[bytes, ...]:
        """Copy pages; those that the other node has not written yet."""
        try:
            found = list(zip(names, disk.find(names), strict=True))
            for name, boxes in found:
                self._take(disk, name, boxes)
        except TllmError as error:
            log.debug("pages of another node were not copied: %s", error.message)
            return names
        return tuple(name for name, boxes in found if not boxes)

    def _wait_until_idle(self) -> None:
        before = -1
        for _ in range(int(PATIENCE_SECONDS / IDLE_SECONDS)):
            if before == self._progress() or self._ended.is_set():
                return
            before = self._progress()
            self._ended.wait(IDLE_SECONDS)


def overlap(one: Box, other: Box) -> bool:
    """Whether two boxes have a kv head of a layer in common."""
    return max(one.first, other.first) < min(one.stop, other.stop) and max(one.first_head, other.first_head) < min(
        one.stop_head, other.stop_head
    )


def _put(content: bytes, file: BinaryIO) -> None:
    file.write(content)
