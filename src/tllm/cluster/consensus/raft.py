"""`Raft`: one replica's part in the consensus. It elects leaders, replicates the log and commits entries.

After Ongaro's thesis, "Consensus: Bridging Theory and Practice" (2014): chapter 3 for elections, the log and (3.10)
leaders that hand over, 4 for changes of who votes, 5 for snapshots, 6.4 for reads by a lease, 9.6 for pre-votes.
Nothing here waits, reads a clock or opens a socket: time, randomness, sending and the state machine are handed in.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Literal, Protocol

from tllm.cluster.consensus.raft_log import RaftLog
from tllm.cluster.consensus.raft_messages import (
    REPLICAS,
    Appended,
    AppendEntries,
    Configuration,
    InstallSnapshot,
    LogEntry,
    RaftMessage,
    RequestVote,
    TimeoutNow,
    Vote,
)
from tllm.cluster.consensus.timing import RaftTiming
from tllm.cluster.messages import ReplicaPlace

Standing = Literal["follower", "candidate", "leader"]

PENDING_ENTRIES = 1024
"""A leader takes no more proposals while so many are not committed."""

RECENT_BEATS = 1.5
"""A voter that answered what was sent so many heartbeats ago, or later, was there a moment ago."""

NEVER = -math.inf


class StateMachine(Protocol):
    """What committed entries are applied to, in the same order on every replica."""

    def apply(self, content: bytes) -> None:
        """Apply the next entry. Must depend on nothing but the entries so far."""

    def snapshot(self) -> bytes:
        """All of the state."""

    def restore(self, data: bytes) -> None:
        """Become what `snapshot` wrote."""


@dataclass
class Ballot:
    """What an identity must never forget (section 3.8): the latest term that it knows, and whom it voted for in it.

    It lies in memory only. That is safe because an identity ends with its process.
    """

    term: int = 0
    vote: str = ""


@dataclass
class Follow:
    """What a leader knows of another replica. `acked`: the leader's clock when it sent the latest message that was
    answered. `match`: up to there the logs agree. `next`: where the next message begins. `snapshot_at`: when the state
    was last sent to it."""

    next: int
    match: int = 0
    acked: float = NEVER
    snapshot_at: float = NEVER


@dataclass
class Leadership:
    """What a leader keeps: since when it leads, the index of the entry that began its term, and who follows.

    `learners` are sent all entries and do not vote yet.
    """

    since: float
    first_index: int
    follows: dict[str, Follow] = field(default_factory=dict)
    learners: tuple[ReplicaPlace, ...] = ()


@dataclass
class Campaign:
    """Votes that a candidate has, its own among them. `is_pre`: they are only promised."""

    is_pre: bool
    votes: set[str]


class Raft:
    """One replica. Call `step` for each message that comes, and `tick` often: at least each quarter of a heartbeat.

    `configuration` are the voters that it begins with: itself alone founds a group, none waits until a leader writes.
    `send(to, message)` may lose, delay, repeat and reorder.
    """

    def __init__(
        self,
        me: ReplicaPlace,
        configuration: Configuration,
        timing: RaftTiming,
        dice: random.Random,
        send: Callable[[ReplicaPlace, RaftMessage], None],
        machine: StateMachine,
    ) -> None:
        self.me = me
        self.log = RaftLog(configuration)
        self.ballot = Ballot()
        self.standing: Standing = "follower"
        self.leader = ""
        self.leadership: Leadership | None = None
        self._timing, self._dice, self._send, self._machine = timing, dice, send, machine
        self._campaign: Campaign | None = None
        self._times = _Times()

    # --- what others ask of it
    def is_leased(self, now: float) -> bool:
        """Whether this replica leads and no other can, by the lease. Then its state may be read: it has every entry
        that anybody was told is committed."""
        lead = self.leadership
        return lead is not None and self.log.commit >= lead.first_index and now < self._lease_end(lead, now)

    def propose(self, content: bytes, now: float) -> tuple[int, int] | None:
        """Append an entry if this replica leads and has room; its term and index. It is committed once `log.commit` has
        reached the index and the entry there is still of this term; if it never is, nothing was changed."""
        if self.leadership is None or self.log.last_index - self.log.commit >= PENDING_ENTRIES:
            return None
        return self.ballot.term, self._append(LogEntry(self.ballot.term, content), now)

    def learn(self, place: ReplicaPlace, now: float) -> None:
        """Send a replica all entries, before it votes: one that does not keep up must not be needed (section 4.2.1)."""
        lead = self.leadership
        if lead is not None and place.id not in self._ids() and place not in lead.learners:
            lead.learners = (*lead.learners, place)
            lead.follows[place.id] = Follow(self.log.last_index + 1)
            self._replicate(place, now)

    def has_learned(self, replica: str) -> bool:
        """Whether a replica has every committed entry."""
        follow = None if self.leadership is None else self.leadership.follows.get(replica)
        return follow is not None and follow.match >= self.log.commit

    def change(self, configuration: Configuration, now: float) -> tuple[int, int] | None:
        """Propose other voters, one more or one less than now, this replica among them. None where it does not lead, or
        where a change before is not committed yet, or nothing is of its own term (Ongaro's correction of 2015)."""
        assert 0 < len(configuration) <= REPLICAS, f"a configuration has 1 to {REPLICAS} replicas"
        assert len(set(configuration) ^ set(self.log.configuration)) == 1, "one replica comes or goes at a time"
        assert self.me in configuration, "a leader does not remove itself"
        if self.leadership is None or not self._may_change(self.leadership):
            return None
        return self.ballot.term, self._append(LogEntry(self.ballot.term, b"", configuration), now)

    def silent(self, now: float) -> tuple[ReplicaPlace, ...]:
        """Where this replica leads: voters that have answered nothing since an election's time or longer."""
        lead = self.leadership
        if lead is None:
            return ()
        limit = now - 2 * self._timing.election
        return tuple(
            place
            for place in self.log.configuration
            if place.id != self.me.id and max(_acked(lead, place.id), lead.since) < limit
        )

    def answering(self, now: float) -> tuple[ReplicaPlace, ...]:
        """Where this replica leads: it, and the voters that have answered what it sent a moment ago.

        Others need not be `silent` yet, for which an election's time must pass.
        """
        lead, limit = self.leadership, now - RECENT_BEATS * self._timing.heartbeat
        if lead is None:
            return ()
        return tuple(p for p in self.log.configuration if p.id == self.me.id or _acked(lead, p.id) >= limit)

    def reaches(self, configuration: Configuration, now: float) -> bool:
        """Whether this replica leads, and a majority of these voters is `answering`. Else a change to them could be one
        that is never committed: it counts from when it stands in a log."""
        return 2 * len(set(configuration) & set(self.answering(now))) > len(configuration)

    def resign(self, now: float) -> None:
        """Lead no more, if it does, and let others stand first."""
        if self.leadership is not None:
            self._follow("", now)

    def hand_over(self, now: float) -> ReplicaPlace | None:
        """Let another voter lead, which has every entry and was heard last. This replica leads no more from now on, so
        that its lease need not end first. None, and nothing has changed, where there is no such voter."""
        lead = self.leadership
        if lead is None:
            return None
        ready = [place for place in self._others() if _match(lead, place.id) == self.log.last_index]
        if not ready:
            return None
        heir, term = max(ready, key=lambda place: _acked(lead, place.id)), self.ballot.term
        self._follow("", now)
        self._send(heir, TimeoutNow(term, self.me))
        return heir

    # --- time and messages
    def tick(self, now: float) -> None:
        """Do what is due by now."""
        if self._times.deadline == NEVER:
            self._await_leader(now)
        if (lead := self.leadership) is not None:
            if not self._has_quorum(lead, now):
                self._follow("", now)
            elif now >= self._times.beat:
                self._broadcast(now)
        elif self._ids() == {self.me.id}:
            self._lead(now, self.ballot.term + 1)
        elif now >= self._times.deadline:
            self._stand(now, is_pre=True)

    def step(self, message: RaftMessage, now: float) -> None:
        """Take a message from another replica."""
        match message:
            case RequestVote():
                self._on_request_vote(message, now)
            case TimeoutNow():
                if message.term == self.ballot.term and self.leadership is None:
                    self._stand(now, is_pre=False, is_transfer=True)
            case Vote():
                self._on_vote(message, now)
            case AppendEntries():
                if self._is_led_by(message, now):
                    self._on_append(message)
            case InstallSnapshot():
                if self._is_led_by(message, now):
                    self._on_snapshot(message)
            case Appended():
                self._on_appended(message, now)

    # --- elections
    def _stand(self, now: float, is_pre: bool, is_transfer: bool = False) -> None:
        """Ask all voters for a vote, or whether they would give one. Who does not vote itself does not stand."""
        self._await_leader(now)
        if self.me.id not in self._ids():
            return
        self.leader = ""
        self.standing = "candidate"
        self._campaign = Campaign(is_pre, {self.me.id})
        if not is_pre:
            self.ballot.term, self.ballot.vote = self.ballot.term + 1, self.me.id
        term = self.ballot.term + is_pre
        request = RequestVote(term, self.me, self.log.last_index, self.log.last_term, is_pre, is_transfer)
        for place in self._others():
            self._send(place, request)

    def _on_request_vote(self, request: RequestVote, now: float) -> None:
        # Else a lease would mean nothing (section 6.4.1), and who was cut off disturbs. One that hands over has none.
        if self._hears_a_leader(now) and not request.is_transfer:
            return
        if request.term > self.ballot.term and not request.is_pre:
            self._learn_term(request.term, now)
        fresh = request.term > self.ballot.term if request.is_pre else request.term == self.ballot.term
        granted = fresh and self._is_up_to_date(request) and (request.is_pre or self._is_free_for(request.sender.id))
        if granted and not request.is_pre:
            self.ballot.vote = request.sender.id
            self._await_leader(now)
        term = request.term if granted else self.ballot.term
        self._send(request.sender, Vote(term, self.me, granted, request.is_pre))

    def _on_vote(self, vote: Vote, now: float) -> None:
        if not vote.granted:
            self._learn_term(vote.term, now)
            return
        campaign = self._campaign
        if campaign is None or vote.is_pre != campaign.is_pre or vote.term != self.ballot.term + vote.is_pre:
            return
        campaign.votes.add(vote.sender.id)
        if self._is_majority(campaign.votes):
            if campaign.is_pre:
                self._stand(now, is_pre=False)
            else:
                self._lead(now, self.ballot.term)

    def _is_up_to_date(self, request: RequestVote) -> bool:
        """Whether a candidate's log has all that this one has (section 3.6.1)."""
        return (request.last_term, request.last_index) >= (self.log.last_term, self.log.last_index)

    def _is_free_for(self, candidate: str) -> bool:
        """Whether this replica's vote of this term is still to be had."""
        return self.ballot.vote in ("", candidate)

    def _hears_a_leader(self, now: float) -> bool:
        """Whether a leader may count on this replica voting for nobody else; its own lease counts too."""
        lead = self.leadership
        led = now < self._times.heard + self._timing.election
        return led or (lead is not None and now < self._lease_end(lead, now))

    def _lead(self, now: float, term: int) -> None:
        self.ballot = Ballot(term, self.me.id)
        self.standing, self.leader, self._campaign = "leader", self.me.id, None
        self.leadership = Leadership(now, self.log.last_index + 1)
        self._append(LogEntry(term), now)

    def _follow(self, leader: str, now: float) -> None:
        self.standing, self.leader = "follower", leader
        self.leadership = self._campaign = None
        self._await_leader(now)

    def _learn_term(self, term: int, now: float) -> None:
        """A later term has begun somewhere."""
        if term > self.ballot.term:
            self.ballot = Ballot(term)
            self._follow("", now)

    def _await_leader(self, now: float) -> None:
        self._times.deadline = now + self._timing.election * (1 + self._timing.spread * self._dice.random())

    # --- a leader's side
    def _append(self, entry: LogEntry, now: float) -> int:
        index = self.log.append(entry)
        self._broadcast(now)
        self._commit()
        return index

    def _broadcast(self, now: float) -> None:
        lead = self.leadership
        assert lead is not None, "only a leader sends entries"
        self._times.beat = now + self._timing.heartbeat
        lead.learners = tuple(place for place in lead.learners if place.id not in self._ids())
        for place in (*self._others(), *lead.learners):
            self._replicate(place, now)

    def _replicate(self, place: ReplicaPlace, now: float) -> None:
        """Send what a replica lacks, or nothing but that this one leads. What is sent counts as come until the answer
        says otherwise."""
        assert self.leadership is not None, "only a leader sends entries"
        follow = self.leadership.follows.setdefault(place.id, Follow(self.log.last_index))
        if follow.next <= self.log.offset and now >= follow.snapshot_at + self._timing.election:
            follow.snapshot_at, follow.next = now, self.log.snapshot.index + 1
            self._send(place, InstallSnapshot(self.ballot.term, self.me, now, self.log.snapshot))
            return
        previous = max(follow.next - 1, self.log.offset)  # while the state is on its way, no more than a heartbeat
        entries = self.log.batch(follow.next) if follow.next > self.log.offset else ()
        append = AppendEntries(
            self.ballot.term, self.me, now, previous, self.log.term(previous), entries, self.log.commit
        )
        follow.next += len(entries)
        self._send(place, append)

    def _on_appended(self, answer: Appended, now: float) -> None:
        self._learn_term(answer.term, now)
        follow = None if self.leadership is None else self.leadership.follows.get(answer.sender.id)
        if follow is None or answer.term != self.ballot.term or answer.match > self.log.last_index:
            return
        follow.acked = max(follow.acked, min(answer.sent, now))
        if not answer.success:
            follow.next = max(follow.match, answer.match) + 1
            return
        follow.match = max(follow.match, answer.match)
        follow.next = max(follow.next, follow.match + 1)
        self._commit()
        if follow.next <= self.log.last_index and answer.match + 1 == follow.next:  # a long backlog, without waiting
            self._replicate(answer.sender, now)

    def _commit(self) -> None:
        """Commit what a majority has."""
        lead = self.leadership
        assert lead is not None, "only a leader commits by counting"
        matches = [self.log.last_index if who == self.me.id else _match(lead, who) for who in self._ids()]
        index = sorted(matches, reverse=True)[len(matches) // 2]
        if index > self.log.commit and self._may_commit(index):
            self._apply(index)

    def _may_commit(self, index: int) -> bool:
        """An entry of an earlier term may still be replaced, though a majority has it (section 3.6.2)."""
        return self.log.term(index) == self.ballot.term

    def _may_change(self, lead: Leadership) -> bool:
        return self.log.commit >= lead.first_index and self.log.commit >= self.log.configuration_index

    def _has_quorum(self, lead: Leadership, now: float) -> bool:
        """Whether a majority answered in time; a new leader is given an election's time for it."""
        return now < max(lead.since + self._timing.election, self._lease_end(lead, now))

    def _lease_end(self, lead: Leadership, now: float) -> float:
        """Until when no majority votes for anybody else."""
        acked = [now if who == self.me.id else _acked(lead, who) for who in self._ids()]
        return sorted(acked, reverse=True)[len(acked) // 2] + self._timing.lease

    # --- a follower's side
    def _is_led_by(self, message: AppendEntries | InstallSnapshot, now: float) -> bool:
        """Whether the sender leads this replica's term; a sender of an earlier one is told so."""
        if message.term < self.ballot.term:
            self._answer(message, False, 0)
            return False
        self._learn_term(message.term, now)
        assert self.leadership is None, "a term has one leader"
        self._follow(message.sender.id, now)
        self._times.heard = now
        return True

    def _on_append(self, append: AppendEntries) -> None:
        if not self.log.matches(append.previous_index, append.previous_term):
            self._answer(append, False, self.log.commit)
            return
        match = self.log.take(append.previous_index, append.entries)
        self._apply(min(append.commit, match))
        self._answer(append, True, match)

    def _on_snapshot(self, install: InstallSnapshot) -> None:
        if install.snapshot.index > self.log.commit:
            self._machine.restore(install.snapshot.data)
            self.log.install(install.snapshot)
        self._answer(install, True, install.snapshot.index)

    def _answer(self, message: AppendEntries | InstallSnapshot, success: bool, match: int) -> None:
        self._send(message.sender, Appended(self.ballot.term, self.me, message.sent, success, match))

    # --- both
    def _apply(self, index: int) -> None:
        """Commit entries up to `index`, and apply them."""
        while self.log.commit < index:
            entry = self.log.entry(self.log.commit + 1)
            if entry.content:
                self._machine.apply(entry.content)
            self.log.commit += 1  # now: one that this program cannot apply is not skipped by the next message
        if self.log.is_long:
            self.log.compact(self._machine.snapshot())

    def _ids(self) -> set[str]:
        return {place.id for place in self.log.configuration}

    def _others(self) -> tuple[ReplicaPlace, ...]:
        return tuple(place for place in self.log.configuration if place.id != self.me.id)

    def _is_majority(self, replicas: Collection[str]) -> bool:
        voters = self._ids()
        return 2 * len(voters & set(replicas)) > len(voters)


@dataclass
class _Times:
    """By the replica's own clock: when it last heard a leader, when it stands for election, and when its heartbeat is
    due."""

    heard: float = NEVER
    deadline: float = NEVER
    beat: float = NEVER


def _match(lead: Leadership, replica: str) -> int:
    follow = lead.follows.get(replica)
    return 0 if follow is None else follow.match


def _acked(lead: Leadership, replica: str) -> float:
    follow = lead.follows.get(replica)
    return NEVER if follow is None else follow.acked
