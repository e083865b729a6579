"""`RaftLog`: a replica's log in memory. The oldest entries are replaced by a snapshot of the state after them."""

from __future__ import annotations

from itertools import takewhile

from tllm.cluster.consensus.raft_messages import (
    BATCH_BYTES,
    BATCH_ENTRIES,
    Configuration,
    LogEntry,
    LogSnapshot,
)

COMPACT_ENTRIES = 512
COMPACT_BYTES = 8 * 1024 * 1024
"""With so many committed entries since the last snapshot, or so many bytes in the log, the state is written down and
old entries are dropped."""

KEPT_ENTRIES = 64
"""So many committed entries stay, so that a follower that is a little behind does not need the whole state. None stay
where that would be more than COMPACT_BYTES."""


class RaftLog:
    """Entries have indices from 1. Those up to `offset` are gone, and `snapshot` has the state at least up to there.

    `commit` is the highest index that is known to be committed, `nbytes` what all entries have in content.
    """

    def __init__(self, configuration: Configuration) -> None:
        self.snapshot = LogSnapshot(0, 0, configuration, b"")
        self.commit = 0
        self.offset = 0
        self.nbytes = 0
        self._offset_term = 0
        self._entries: list[LogEntry] = []
        self._configurations: list[tuple[int, Configuration]] = [(0, configuration)]  # the snapshot's, and later ones

    @property
    def last_index(self) -> int:
        return self.offset + len(self._entries)

    @property
    def last_term(self) -> int:
        return self.term(self.last_index)

    @property
    def configuration(self) -> Configuration:
        """The latest, committed or not: a replica uses it as soon as it has it (thesis, section 4.1)."""
        return self._configurations[-1][1]

    @property
    def configuration_index(self) -> int:
        """Where the latest configuration stands."""
        return self._configurations[-1][0]

    def term(self, index: int) -> int:
        """The term of an entry that is here, or of the last one that is gone."""
        assert self.offset <= index <= self.last_index, f"entry {index} is not here"
        return self._entries[index - self.offset - 1].term if index > self.offset else self._offset_term

    def entry(self, index: int) -> LogEntry:
        assert self.offset < index <= self.last_index, f"entry {index} is not here"
        return self._entries[index - self.offset - 1]

    def append(self, entry: LogEntry) -> int:
        """Its index."""
        self._entries.append(entry)
        self.nbytes += len(entry.content)
        if entry.configuration is not None:
            self._configurations.append((self.last_index, entry.configuration))
        return self.last_index

    def matches(self, index: int, term: int) -> bool:
        """Whether the entry at this index is the one of that term. What is committed is the same everywhere."""
        return index <= self.commit or (index <= self.last_index and self.term(index) == term)

    def take(self, previous: int, entries: tuple[LogEntry, ...]) -> int:
        """Write a leader's entries after `previous`, which matches; from the first that differs, ours are dropped.

        The index of the last one.
        """
        for index, entry in enumerate(entries, previous + 1):
            if not self.matches(index, entry.term):
                self._truncate(index)
                self.append(entry)
        return previous + len(entries)

    def batch(self, start: int) -> tuple[LogEntry, ...]:
        """Entries from `start` on, as many as one message may carry."""
        entries = self._entries[start - self.offset - 1 : start - self.offset - 1 + BATCH_ENTRIES]
        room = BATCH_BYTES
        for count, entry in enumerate(entries, 1):
            room -= len(entry.content)
            if room < 0:
                return tuple(entries[:count])
        return tuple(entries)

    @property
    def is_long(self) -> bool:
        """Whether another snapshot is due."""
        since = self.commit - self.snapshot.index
        return since >= COMPACT_ENTRIES or (since > 0 and self.nbytes > COMPACT_BYTES)

    def compact(self, data: bytes) -> None:
        """Keep the state after `commit`, and drop entries before it but the last few."""
        before = list(takewhile(lambda known: known[0] <= self.commit, self._configurations))
        self._configurations[: len(before)] = before[-1:]
        self.snapshot = LogSnapshot(self.commit, self.term(self.commit), before[-1][1], data)
        self._drop(max(self.commit - KEPT_ENTRIES, self.offset))
        if self.nbytes > COMPACT_BYTES:
            self._drop(self.commit)

    def install(self, snapshot: LogSnapshot) -> None:
        """Take over a leader's snapshot that is ahead of `commit`. Entries after it stay if they follow it."""
        if snapshot.index <= self.last_index and self.term(snapshot.index) == snapshot.term:
            self._drop(snapshot.index)
        else:
            self._entries.clear()
            self.nbytes, self.offset, self._offset_term = 0, snapshot.index, snapshot.term
        later = [known for known in self._configurations if snapshot.index < known[0] <= self.last_index]
        self._configurations = [(snapshot.index, snapshot.configuration), *later]
        self.snapshot, self.commit = snapshot, snapshot.index

    def _drop(self, index: int) -> None:
        """Forget entries up to `index`."""
        self._offset_term = self.term(index)
        gone = index - self.offset
        self.nbytes -= sum(len(entry.content) for entry in self._entries[:gone])
        del self._entries[:gone]
        self.offset = index

    def _truncate(self, index: int) -> None:
        """Forget entries from `index` on, if there are any."""
        assert index > self.commit, "what is committed stays"
        kept = index - self.offset - 1
        self.nbytes -= sum(len(entry.content) for entry in self._entries[kept:])
        del self._entries[kept:]
        while self.configuration_index >= index:
            self._configurations.pop()
