"""`ReplyCounters`: what replies have cost a rank so far, from which the coordinator sees how fast it is at the
moment."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from tllm.comm.collectives.group import Group
from tllm.engine.schedule.batch import Batch


class ReplyCounters:
    """Sums over batches that give each of their sequences its next token; prompts are left out.

    `sequences` and `rows` of all batches, the `keys` that sequences had, and `seconds` of computing: what `tp` took to
    sum is not in it.
    """

    def __init__(self, tp: Group) -> None:
        self.batches = self.sequences = self.rows = self.keys = 0
        self.seconds = 0.0
        self._tp = tp

    @contextmanager
    def of(self, batch: Batch) -> Iterator[None]:
        """What a batch takes in the block; there may be several for one that is `counted` once."""
        began, summed = time.perf_counter(), self._tp.seconds
        yield
        if is_reply(batch):
            self.seconds += time.perf_counter() - began - (self._tp.seconds - summed)

    def counted(self, batch: Batch) -> None:
        """A batch is done."""
        if is_reply(batch):
            self.batches += 1
            self.sequences += len(batch.entries)
            self.rows += len(batch.token_ids)
            self.keys += sum(entry.stop for entry in batch.entries)

    def stats(self) -> dict[str, float]:
        """For the heartbeat."""
        return {
            "reply_batches": self.batches,
            "reply_sequences": self.sequences,
            "reply_rows": self.rows,
            "reply_keys": self.keys,
            "reply_seconds": self.seconds,
        }


def is_reply(batch: Batch) -> bool:
    """Whether each of its sequences gets its next token, and maybe drafted ones after it."""
    return all(entry.count == 1 + entry.drafted for entry in batch.entries)
