"""`StagePages`: a stage's part in the ring's messages about pages on disk.

A message is passed on like a batch. `TakePages` waits at each stage until all its ranks have done their part, since it
carries on of how many pages that was true so far.
"""

from __future__ import annotations

import msgspec

from tllm.comm.collectives.group import Group
from tllm.core.errors import FrameError
from tllm.engine.page_store.rank_pages import RankPages
from tllm.engine.pages.page_messages import FetchPages, PageMessage, SavePages, TakePages, num_pages
from tllm.engine.ring_links import RingLinks
from tllm.engine.schedule.batch import encode
from tllm.engine.schedule.limits import Limits

COUNT_BYTES = 4
TOKEN_BYTES = 4


class StagePages:
    """One rank's place: its pages on disk (`store`, None where it has no folder), its stage's ranks, its links."""

    def __init__(self, tp: Group, ring: RingLinks | None, limits: Limits, is_last: bool) -> None:
        self.store: RankPages | None = None
        self.limits = limits
        self._tp, self._ring, self._is_last = tp, ring, is_last

    @property
    def most_pages(self) -> int:
        """Pages of one message, at most."""
        return most_pages(self.limits)

    def serve(self, message: PageMessage) -> None:
        """On a rank that does not drive: do what a message asks for, and pass it on."""
        if self._ring is None:
            self._do(message)
        elif isinstance(message, TakePages):
            self._ring.next.send_bytes(encode(self._do(message)))
        else:
            if not self._is_last:
                self._ring.next.send_bytes(encode(message))
            self._do(message)

    def start(self, message: PageMessage) -> TakePages | None:
        """On the driver's rank: do its part, and send a message on its way. If it is back, since there is one stage, it
        is returned."""
        if self._tp.size > 1:
            self._tp.broadcast_bytes(encode(message), limit=self.limits.batch_bytes)
        done = self._do(message)
        if self._ring is not None:
            self._ring.next.send_bytes(encode(done))
            return None
        return done if isinstance(done, TakePages) else None

    def check_back(self, sent: TakePages, came: object) -> TakePages:
        """What came round the ring, if it is what was sent, taken by no more than what was wanted."""
        if not isinstance(came, TakePages) or (came.number, came.page_table) != (sent.number, sent.page_table):
            raise FrameError(f"{type(came).__name__} came round the ring while pages {sent.number} were next")
        if came.num_taken > sent.num_taken:
            raise FrameError(f"{came.num_taken} pages came round the ring where {sent.num_taken} were wanted")
        return came

    def close(self) -> None:
        """Let what was copied be written."""
        if self.store is not None:
            self.store.close()

    def _do(self, message: PageMessage) -> PageMessage:
        """This rank's part; of a message that counts, what all ranks of the stage could do."""
        check_pages(message, self.limits)
        match message:
            case SavePages():
                if self.store is not None:
                    self.store.save(message)
            case FetchPages():
                if self.store is not None:
                    self.store.fetch(message)
            case TakePages():
                taken = 0 if self.store is None else self.store.take(message)
                if self._tp.size > 1:
                    counts = self._tp.all_gather_bytes(taken.to_bytes(COUNT_BYTES, "little"))
                    taken = min(int.from_bytes(count, "little") for count in counts)
                return msgspec.structs.replace(message, num_taken=min(taken, message.num_taken))
        return message


def most_pages(limits: Limits) -> int:
    """Pages of one message, at most: as many as the tokens of a batch fill, so that a message is no longer than one."""
    return max(1, limits.max_num_batched_tokens // limits.page_size)


def check_pages(message: PageMessage, limits: Limits) -> None:
    """Refuse a message about pages outside the cache, or about other pages than it names."""
    runs = () if isinstance(message, FetchPages) else message.page_table
    if any(count < 1 or first + count > limits.num_pages for first, count in runs):
        raise FrameError(f"pages {runs} of {limits.num_pages} were to be moved")
    if isinstance(message, TakePages):
        return
    names, nbytes = len(message.chain.names), len(message.chain.token_ids)
    if not 0 < names <= most_pages(limits) or nbytes != names * limits.page_size * TOKEN_BYTES:
        raise FrameError(f"{names} pages of {limits.page_size} tokens came with {nbytes} bytes of token ids")
    if isinstance(message, SavePages) and num_pages(runs) != names:
        raise FrameError(f"{num_pages(runs)} pages were to be saved under {names} names")
