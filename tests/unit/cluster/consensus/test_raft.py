"""One replica's rules, message by message."""

from __future__ import annotations

import pytest

from tests.support.consensus.delivered_by_hand import LONG, DeliveredByHand, play_older_term
from tests.support.consensus.simulated_replicas import TIMING
from tllm.cluster.consensus import raft_log
from tllm.cluster.consensus.raft import PENDING_ENTRIES, Raft
from tllm.cluster.consensus.raft_messages import (
    Appended,
    AppendEntries,
    InstallSnapshot,
    LogEntry,
    LogSnapshot,
    RequestVote,
    TimeoutNow,
    Vote,
)
from tllm.cluster.consensus.timing import RaftTiming, boot_clock
from tllm.core.errors import ClusterError


def value(raft: Raft) -> bytes:
    return raft._machine.snapshot()


def test_a_leader_is_elected_and_what_it_writes_is_everywhere() -> None:
    group = DeliveredByHand()
    leader = group.elect(0, range(3))
    assert leader.is_leased(group.now)
    assert leader.propose(b"v", group.now) == (1, 2)
    group.deliver(range(3))
    group.tick(0, TIMING.heartbeat)
    group.deliver(range(3))
    assert [value(raft) for raft in group.replicas] == [b"v"] * 3
    assert [raft.leader for raft in group.replicas] == [leader.me.id] * 3


def test_one_alone_leads_at_once_and_without_others() -> None:
    group = DeliveredByHand(1)
    raft = group.replicas[0]
    assert raft.is_leased(group.now)
    assert raft.propose(b"v", group.now) == (1, 2)
    assert value(raft) == b"v"
    group.tick(0, LONG)
    assert raft.is_leased(group.now)


def test_who_was_cut_off_does_not_begin_terms() -> None:
    """Pre-vote: it asks again and again, and when it is back the leader goes on."""
    group = DeliveredByHand()
    leader = group.elect(0, range(3))
    for _ in range(50):
        group.now += TIMING.heartbeat
        for number in range(3):
            group.tick(number)
        group.deliver((0, 1))
    assert group.replicas[2].standing == "candidate"
    assert group.replicas[2].ballot.term == leader.ballot.term == 1
    group.tick(0, TIMING.heartbeat)
    group.deliver(range(3))
    assert (group.replicas[2].standing, group.replicas[2].leader) == ("follower", leader.me.id)
    assert leader.leadership is not None


def test_what_a_replica_cannot_apply_is_not_skipped() -> None:
    """An entry of another version of the program, say: the state would be another one from then on, and nobody knew."""

    def refuse(content: bytes) -> None:
        raise ClusterError("this entry is not known here")

    group = DeliveredByHand()
    leader, other = group.elect(0, range(3)), group.replicas[1]
    apply, restore = other._machine.apply, other._machine.restore
    assert leader.propose(b"v", group.now) is not None
    group.deliver(range(3))
    other._machine.apply = other._machine.restore = refuse  # type: ignore[method-assign]
    for _ in range(2):
        group.tick(0, TIMING.heartbeat)
        with pytest.raises(ClusterError):
            group.deliver((0, 1))
    with pytest.raises(ClusterError):
        group.step(1, InstallSnapshot(1, group.places[0], 0.0, LogSnapshot(50, 1, group.places, b"w")))
    assert other.log.commit < 2
    other._machine.apply, other._machine.restore = apply, restore  # type: ignore[method-assign]
    group.tick(0, TIMING.heartbeat)
    group.deliver((0, 1))
    assert value(other) == b"v"


def test_nobody_is_voted_for_while_a_leader_is_heard() -> None:
    """Not even in a later term, or a lease would mean nothing."""
    group = DeliveredByHand()
    leader = group.elect(0, range(3))
    for number in (0, 1):
        group.step(number, RequestVote(9, group.places[2], 99, 9, False))
        assert not group.sent
        assert group.replicas[number].ballot.term == 1
    assert leader.leadership is not None


def test_a_later_last_term_counts_before_a_longer_log() -> None:
    group = DeliveredByHand()
    leader = group.elect(0, range(3))
    assert leader.propose(b"v", group.now) is not None
    group.deliver(range(3))
    group.now += LONG
    for term, last_index, last_term, is_granted in ((6, 99, 0, False), (7, 1, 5, True), (8, 1, 1, False)):
        group.step(1, RequestVote(term, group.places[2], last_index, last_term, False))
        (_, _, vote), *_ = group.sent
        group.sent.clear()
        assert isinstance(vote, Vote) and vote.granted == is_granted


def test_votes_count_in_the_election_that_they_were_given_in() -> None:
    """Late ones of a term before could make two leaders; those of a vote do not say what one would be now."""
    group = DeliveredByHand()
    raft, other = group.replicas[0], group.places[1]
    for term in (1, 2):
        group.tick(0, LONG)
        if term == 2:
            group.step(0, Vote(1, other, True, False))
            assert raft.ballot.term == 1
        group.step(0, Vote(term, other, True, True))
        assert (raft.ballot.term, raft.standing) == (term, "candidate")
    group.step(0, Vote(1, other, True, False))
    assert raft.leadership is None
    group.step(0, Vote(2, other, True, False))
    assert raft.leadership is not None


@pytest.mark.parametrize("count", [2, 4])
def test_half_of_an_even_group_is_no_majority(count: int) -> None:
    """Which a group has while one more comes: a half commits nothing, keeps no lease and elects nobody."""
    group, half = DeliveredByHand(count), range(count // 2)
    leader = group.elect(0, range(count))
    assert leader.propose(b"v", group.now) == (1, 2)
    group.deliver(half)
    group.tick(0, TIMING.heartbeat)
    group.deliver(half)
    assert leader.log.commit == 1 and leader.is_leased(group.now)
    group.tick(0, TIMING.lease - TIMING.heartbeat / 2)
    assert not leader.is_leased(group.now)
    with pytest.raises(AssertionError, match="was not elected"):
        group.elect(0, half)


def test_a_follower_commits_no_further_than_its_log_is_the_leader_s() -> None:
    """What it has beyond may be of a leader of before, and be replaced."""
    group = DeliveredByHand()
    follower = group.replicas[1]
    group.step(1, AppendEntries(1, group.places[0], 0.0, 0, 0, (LogEntry(1), LogEntry(1, b"old")), 1))
    group.step(1, AppendEntries(2, group.places[2], 0.0, 1, 1, (), 2))
    assert follower.log.commit == 1
    group.step(1, AppendEntries(2, group.places[2], 0.0, 1, 1, (LogEntry(2, b"new"),), 2))
    assert value(follower) == b"new"


def test_a_leader_hands_over_at_once_to_a_voter_that_has_every_entry() -> None:
    """No lease and no election's time is waited for, and at no time do two lead."""
    group = DeliveredByHand()
    leader = group.elect(0, range(3))
    assert leader.propose(b"v", group.now) is not None
    assert leader.hand_over(group.now) is None, "nobody else has the entry"
    assert leader.leadership is not None
    group.deliver((0, 2))
    assert leader.hand_over(group.now) == group.places[2]
    assert leader.leadership is None and not leader.is_leased(group.now)
    group.deliver(range(3))
    heir = group.replicas[2]
    assert (heir.is_leased(group.now), heir.ballot.term, value(heir)) == (True, 2, b"v")
    assert [raft.leader for raft in group.replicas] == [heir.me.id] * 3


def test_a_late_word_of_a_leader_that_handed_over_begins_no_term() -> None:
    group = DeliveredByHand()
    group.elect(0, range(3))
    group.deliver(range(3))
    group.replicas[0].hand_over(group.now)
    ((_, target, late),) = [letter for letter in group.sent if isinstance(letter[2], TimeoutNow)]
    group.deliver(range(3))
    heir = group.replicas[target]
    assert (heir.ballot.term, heir.leadership is not None) == (2, True)
    for number in range(3):
        group.step(number, late)
    assert not group.sent
    assert heir.is_leased(group.now)


def test_who_was_told_to_lead_and_is_silent_is_followed_by_another() -> None:
    group = DeliveredByHand()
    leader = group.elect(0, range(3))
    group.deliver(range(3))
    group.tick(0, TIMING.heartbeat)
    group.deliver((0, 2))
    assert leader.hand_over(group.now) == group.places[2], "who was heard last"
    group.sent.clear()
    assert group.elect(0, range(3)).ballot.term > 1


def test_a_leader_that_reaches_no_majority_steps_down_before_another_can_be_elected() -> None:
    group = DeliveredByHand()
    leader = group.elect(0, range(3))
    group.tick(0, TIMING.heartbeat)
    group.deliver(range(3))
    group.tick(0, TIMING.lease * 0.99)
    group.sent.clear()
    assert leader.is_leased(group.now)
    group.tick(0, TIMING.lease * 0.02)
    assert not leader.is_leased(group.now)
    assert leader.standing == "follower"
    assert leader.propose(b"late", group.now) is None
    assert TIMING.lease < TIMING.election


def test_a_voter_that_answers_no_more_is_not_counted_though_it_is_not_silent_yet() -> None:
    """One that has just left is a voter for some time: who looks must not count it."""
    group = DeliveredByHand()
    leader, (me, second, left) = group.elect(0, (0, 1)), group.places
    group.tick(0, TIMING.heartbeat)
    group.deliver((0, 1))
    assert leader.silent(group.now) == ()
    assert leader.answering(group.now) == (me, second)
    most = int(2 * TIMING.election / TIMING.heartbeat)
    for beats, silent in ((most - 2, ()), (4, (left,))):
        for _ in range(beats):
            group.tick(0, TIMING.heartbeat)
            group.deliver((0, 1))
        assert leader.silent(group.now) == silent
    assert leader.answering(group.now) == (me, second)
    leader.resign(group.now)
    assert leader.answering(group.now) == ()


def test_voters_that_were_heard_a_moment_ago_are_reached_and_no_others() -> None:
    """Who leaves one out must know that the rest are there: else what it proposes may be agreed on by nobody."""
    group = DeliveredByHand()
    leader, (me, dead, cut_off) = group.elect(0, range(3)), group.places
    for _ in range(2):  # the third is cut off
        group.tick(0, TIMING.heartbeat)
        group.deliver((0, 1))
    assert leader.reaches((me, dead), group.now)
    assert not leader.reaches((me, cut_off), group.now)
    for _ in range(2):  # and the second dies
        group.tick(0, TIMING.heartbeat)
        group.deliver((0,))
    assert leader.is_leased(group.now), "it leads still"
    assert not leader.reaches((me, dead), group.now)
    assert leader.reaches((me,), group.now)
    assert not group.replicas[1].reaches((me, dead), group.now)


def test_a_lease_begins_when_what_was_answered_was_sent() -> None:
    group = DeliveredByHand()
    leader = group.elect(0, range(3))
    group.tick(0, TIMING.heartbeat)
    late = list(group.sent)
    group.sent.clear()
    group.now += TIMING.lease - TIMING.heartbeat
    for _, target, message in late:
        group.step(target, message)
    group.deliver(range(3))
    assert not leader.is_leased(group.now + TIMING.heartbeat), "the answer is young and the question was not"


def test_an_older_terms_entry_is_not_committed_by_counting() -> None:
    group = play_older_term(Raft)
    for _ in range(3):
        group.tick(4, TIMING.heartbeat)
        group.deliver(range(5))
    assert {raft.log.commit for raft in group.replicas} == {3}
    assert {raft.log.term(2) for raft in group.replicas} == {group.replicas[4].log.term(2)}


def test_an_answer_of_nobody_or_of_another_term_changes_nothing() -> None:
    group = DeliveredByHand()
    leader = group.elect(0, range(3))
    commit = leader.log.commit
    for answer in (
        Appended(0, group.places[1], group.now, True, 5),
        Appended(1, group.places[1], group.now, True, 500),
        Appended(1, group.places[1], group.now + 1e9, False, 0),
        Appended(1, group.places[1], float("nan"), True, 1),
    ):
        group.step(0, answer)
    assert leader.log.commit == commit
    group.sent.clear()
    group.now += LONG
    assert not leader.is_leased(group.now), "no answer can make a lease longer than from now"


def test_a_leader_takes_no_more_than_it_can_commit() -> None:
    group = DeliveredByHand()
    leader = group.elect(0, range(3))
    taken = sum(leader.propose(b"x", group.now) is not None for _ in range(PENDING_ENTRIES + 10))
    assert taken == PENDING_ENTRIES


@pytest.mark.parametrize(("heard", "lacks"), [(0, True), (15, True), (16, False)])
def test_a_follower_that_lacks_what_was_dropped_gets_the_state(
    heard: int, lacks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries up to 17 are dropped, and the follower's last is the one before, or that one, or long before."""
    monkeypatch.setattr(raft_log, "COMPACT_ENTRIES", 10)
    monkeypatch.setattr(raft_log, "KEPT_ENTRIES", 3)
    group = DeliveredByHand()
    leader = group.elect(0, range(3))
    for number in range(25):
        assert leader.propose(f"{number}".encode(), group.now) is not None
        group.deliver(range(3) if number < heard else (0, 1))
    assert leader.log.snapshot.index == 20
    assert leader.log.offset == 17
    group.tick(0, TIMING.heartbeat)
    group.deliver(range(3))
    group.tick(0, TIMING.heartbeat)
    came = []
    while group.sent:
        _, target, message = group.sent.pop(0)
        came.append(message)
        group.step(target, message)
    states = [message for message in came if isinstance(message, InstallSnapshot)]
    assert bool(states) == lacks
    assert value(group.replicas[2]) == b"24"
    for late in states:
        group.step(2, late)
    assert value(group.replicas[2]) == b"24", "a state of before that comes once more is no news"


def test_voters_change_one_at_a_time_and_after_they_have_learned() -> None:
    group = DeliveredByHand(3)
    leader = group.elect(0, range(3))
    fewer = group.places[:2]
    unheard = DeliveredByHand(3).elect(0, range(3), is_heard=False)
    assert unheard.change(fewer, LONG) is None, "nothing of its own term is committed"
    assert leader.change(fewer, group.now) == (1, 2)
    assert leader.change(group.places[:1], group.now) is None, "the change before is not committed"
    group.deliver((0, 1))
    assert leader.log.configuration == fewer
    leader.learn(group.places[2], group.now)
    assert not leader.has_learned(group.places[2].id)
    group.deliver(range(3))
    group.tick(0, TIMING.heartbeat)
    group.deliver(range(3))
    assert leader.has_learned(group.places[2].id)
    assert leader.change(group.places, group.now) is not None
    group.deliver(range(3))
    assert group.replicas[2].log.configuration == group.places
    with pytest.raises(AssertionError, match="one replica comes or goes"):
        leader.change(group.places[:1], group.now)
    with pytest.raises(AssertionError, match="does not remove itself"):
        leader.change(group.places[1:], group.now)


def test_a_lease_is_shorter_than_what_followers_wait_on_a_fast_clock() -> None:
    timing = RaftTiming(0.3, 1.5)
    assert timing.lease / 0.98 == pytest.approx(timing.election / 1.02)
    assert boot_clock() <= boot_clock()
