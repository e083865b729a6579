"""`PageMoves`: the driver's loop of saving and loading pages, beside its batches.

Before each batch it sends what must go before that batch, and then little else: a message about one part of what is to
be saved, and one for each load. So replies that are under way wait for no more than the copying of a part, and for a
load only where its pages have been read on the driver's disk.
"""

from __future__ import annotations

from typing import NamedTuple

from tllm.engine.pages.page_messages import TakePages
from tllm.engine.schedule.sequence_pages import SequencePages
from tllm.engine.schedule.stored_prefixes import PrefixLoad
from tllm.engine.stage_pages import StagePages

PART_BYTES = 32 << 20
"""Pages of one message, of the driver's rank: what is copied between two batches."""

ROOM_SECONDS = 0.05
"""How long an idle driver waits for the disk before it looks for requests again."""

CLOSE_SECONDS = 2.0
"""How long a driver that ends goes on saving."""


class PagesInFlight(NamedTuple):
    """A message in the ring that comes back, and the load that it is part of."""

    message: TakePages
    load: PrefixLoad


class PageMoves:
    """The messages of one replica about pages. Where nothing is kept on disk it does nothing.

    `has_moved`: the last `send` had something to do.
    """

    def __init__(self, stage: StagePages, pages: SequencePages) -> None:
        self.has_moved = False
        self._stage, self._pages = stage, pages
        if stage.store is not None:
            pages.keep_on_disk(stage.store, max(1, min(PART_BYTES // stage.store.page_bytes, stage.most_pages)))

    @property
    def has_work(self) -> bool:
        """Whether pages are to be saved, or a load has not come to its end."""
        stored = self._pages.stored
        return stored is not None and (stored.has_saves or bool(stored.loads))

    def send(self, is_idle: bool) -> list[PagesInFlight]:
        """Send what goes before the next batch; the messages that will come back. If the driver `is_idle`, it may wait
        for its disk."""
        stored, store = self._pages.stored, self._stage.store
        if stored is None or store is None:
            return []
        self.has_moved = self.has_work
        for urgent in stored.urgent_saves():
            self._stage.start(urgent)
        if is_idle and stored.has_saves and not stored.loads:
            store.wait_for_room(ROOM_SECONDS)
        if store.has_room and (save := stored.next_save()) is not None:
            self._stage.start(save)
        under_way = []
        for load in list(stored.loads.values()):
            if len(load.parts) < 2 and (fetch := stored.next_fetch(load)) is not None:
                self._stage.start(fetch)
            if load.parts and not load.is_taking and (is_idle or load.is_dropped or store.is_read(load.parts[0][0])):
                sent = PagesInFlight(stored.next_take(load), load)
                came = self._stage.start(sent.message)
                if came is None:
                    under_way.append(sent)
                else:
                    self.accept(sent, came)
        return under_way

    def accept(self, sent: PagesInFlight, came: object) -> None:
        """Take in what came back."""
        assert self._pages.stored is not None
        self._pages.stored.took(sent.load, self._stage.check_back(sent.message, came))

    def stats(self) -> dict[str, float]:
        """Of the driver's own disk."""
        return {} if self._stage.store is None else self._stage.store.stats()
