"""A log in memory: what is replaced, what is dropped, and which configuration holds."""

from __future__ import annotations

import pytest

from tllm.cluster.consensus import raft_log
from tllm.cluster.consensus.raft_log import RaftLog
from tllm.cluster.consensus.raft_messages import BATCH_BYTES, BATCH_ENTRIES, LogEntry, LogSnapshot, ReplicaPlace

A, B, C = (ReplicaPlace(f"{name}/{number:016x}", "h", 1) for number, name in enumerate("abc"))


def filled(*terms: int) -> RaftLog:
    log = RaftLog((A,))
    for index, term in enumerate(terms, 1):
        log.append(LogEntry(term, f"{index}".encode()))
    return log


def test_a_leaders_entries_replace_those_that_differ_and_no_others() -> None:
    log = filled(1, 1, 2, 2)
    assert log.take(1, (LogEntry(1, b"2"), LogEntry(3, b"new"))) == 3
    assert [log.term(index) for index in range(4)] == [0, 1, 1, 3]
    assert log.take(1, (LogEntry(1, b"2"),)) == 2, "an old message"
    assert log.last_index == 3
    assert log.nbytes == sum(len(log.entry(index).content) for index in (1, 2, 3))


def test_what_is_committed_is_not_replaced() -> None:
    log = filled(1, 1)
    log.commit = 2
    assert log.take(0, (LogEntry(9, b"x"), LogEntry(9, b"y"))) == 2
    assert log.entry(1) == LogEntry(1, b"1")


def test_the_latest_configuration_holds_and_is_taken_back_with_its_entry() -> None:
    log = filled(1)
    log.append(LogEntry(1, b"", (A, B)))
    log.append(LogEntry(1, b"", (A, B, C)))
    assert (log.configuration_index, log.configuration) == (3, (A, B, C))
    log.take(2, (LogEntry(2, b"other"),))
    assert (log.configuration_index, log.configuration) == (2, (A, B))


def test_compaction_keeps_the_state_its_configuration_and_the_last_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raft_log, "KEPT_ENTRIES", 2)
    log = filled(1, 1, 1)
    log.append(LogEntry(1, b"", (A, B)))
    log.append(LogEntry(2, b"5"))
    log.append(LogEntry(2, b"", (A, B, C)))
    log.commit = 5
    log.compact(b"state")
    assert log.snapshot == LogSnapshot(5, 2, (A, B), b"state")
    assert (log.offset, log.last_index, log.nbytes) == (3, 6, 1)
    assert log.configuration == (A, B, C)
    assert log.matches(3, 1)
    log.take(5, (LogEntry(3, b"other"),))
    assert log.configuration == (A, B)


def test_entries_that_are_too_many_bytes_do_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raft_log, "COMPACT_BYTES", 3)
    log = filled(1, 1, 1, 1)
    assert not log.is_long, "nothing is committed"
    log.commit = 4
    assert log.is_long
    log.compact(b"state")
    assert (log.offset, log.nbytes) == (4, 0)
    log.append(LogEntry(1, b"long"))
    log.commit = 5
    assert log.is_long
    log.compact(b"state")
    assert (log.offset, log.nbytes) == (5, 0), "though fewer than are kept came since"


def test_a_snapshot_replaces_a_log_that_does_not_lead_to_it() -> None:
    log = filled(1, 1, 1)
    log.install(LogSnapshot(5, 2, (A, C), b"state"))
    assert (log.offset, log.last_index, log.commit, log.nbytes) == (5, 5, 5, 0)
    assert (log.last_term, log.configuration) == (2, (A, C))
    unlike = filled(1, 1, 1)
    unlike.install(LogSnapshot(2, 2, (A, C), b"state"))
    assert (unlike.last_index, unlike.last_term) == (2, 2), "what followed another entry goes"
    other = filled(1, 1, 1)
    other.append(LogEntry(1, b"", (A, B)))
    other.install(LogSnapshot(2, 1, (A,), b"state"))
    assert (other.offset, other.last_index, other.configuration) == (2, 4, (A, B)), "what follows it stays"


def test_a_message_has_so_many_entries_or_bytes_at_most() -> None:
    log = filled(*[1] * (BATCH_ENTRIES + 5))
    assert len(log.batch(1)) == BATCH_ENTRIES
    assert len(log.batch(BATCH_ENTRIES + 1)) == 5
    log.append(LogEntry(1, b"x" * (BATCH_BYTES + 1)))
    log.append(LogEntry(1, b"y"))
    assert len(log.batch(log.last_index - 1)) == 1
