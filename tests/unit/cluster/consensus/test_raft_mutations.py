"""The schedules can tell a wrong Raft from a right one: each rule that is taken out is missed by some schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.consensus.delivered_by_hand import play_older_term
from tests.support.consensus.simulated_replicas import Broken, SimulatedReplicas
from tllm.cluster.consensus import raft_log
from tllm.cluster.consensus.raft import Leadership, Raft
from tllm.cluster.consensus.raft_messages import RequestVote
from tllm.cluster.consensus.timing import CLOCK_DRIFT
from tllm.cluster.messages import ReplicaPlace

SCHEDULES = 1500


class CommitsOlderTerms(Raft):
    """Commits by counting what an earlier leader wrote (figure 3.7 of the thesis)."""

    def _may_commit(self, index: int) -> bool:
        return True


class VotesTwice(Raft):
    """Gives its vote of a term to whoever asks."""

    def _is_free_for(self, candidate: str) -> bool:
        return True


class VotesForOldLogs(Raft):
    """Votes for a candidate that lacks what it has itself."""

    def _is_up_to_date(self, request: RequestVote) -> bool:
        return True


class NeverStepsDown(Raft):
    """Has no check-quorum, and so believes in its lease for ever."""

    def _has_quorum(self, lead: Leadership, now: float) -> bool:
        return True

    def _lease_end(self, lead: Leadership, now: float) -> float:
        return now + 1


class VotesWhileLed(Raft):
    """Votes for another while its leader may count on it."""

    def _hears_a_leader(self, now: float) -> bool:
        return False


class CountsFromTheAnswer(Raft):
    """Begins its lease when answers come, not when it sent what they answer."""

    def _on_appended(self, answer: Any, now: float) -> None:
        super()._on_appended(type(answer)(answer.term, answer.sender, now, answer.success, answer.match), now)


class LeadsWithoutMajority(Raft):
    """Takes two votes for enough, however many there are."""

    def _on_vote(self, vote: Any, now: float) -> None:
        campaign = self._campaign
        super()._on_vote(vote, now)
        if campaign is not None and self._campaign is campaign and not campaign.is_pre and len(campaign.votes) == 2:
            self._lead(now, self.ballot.term)


class ChangesAtOnce(Raft):
    """Changes who votes while the change before is not committed."""

    def _may_change(self, lead: Leadership) -> bool:
        return True


class ReadsBeforeItsTerm(Raft):
    """Reads before an entry of its own term is committed, and so may not know of the last ones."""

    def is_leased(self, now: float) -> bool:
        lead = self.leadership
        return lead is not None and now < self._lease_end(lead, now)


class LeadsOnThoughItHandedOver(Raft):
    """Believes in its lease when another was told to stand without waiting for its end."""

    def hand_over(self, now: float) -> ReplicaPlace | None:
        lead = self.leadership
        heir = super().hand_over(now)
        if heir is not None:
            self.standing, self.leader, self.leadership = "leader", self.me.id, lead
        return heir


class ForgetfulProcesses(SimulatedReplicas):
    """Processes come back under their old identity, having forgotten their votes and their logs."""

    def _crash(self) -> None:
        ended = self.dice.choice(list(self.processes))
        self.start((), int(ended.partition("/")[2], 16))


FOUND = {
    VotesTwice: 150,
    VotesForOldLogs: 0,
    NeverStepsDown: 0,
    VotesWhileLed: 330,
    CountsFromTheAnswer: 20,
    LeadsWithoutMajority: 520,
    ChangesAtOnce: 650,
    ReadsBeforeItsTerm: 90,
    LeadsOnThoughItHandedOver: 350,
}
"""Each wrong replica, and a schedule shortly before the first one that it breaks, so that the search is short."""


def first_broken(
    make: Callable[..., Raft] = Raft,
    start: int = 0,
    drift: float = CLOCK_DRIFT,
    schedule: type[SimulatedReplicas] = SimulatedReplicas,
) -> int | None:
    """The first schedule from `start` on in which a rule is broken."""
    for seed in range(start, start + SCHEDULES):
        try:
            schedule(seed, make, size=3 + 2 * (seed % 2), drift=drift).run()
        except AssertionError:
            return seed
    return None


@pytest.fixture(autouse=True)
def _short_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raft_log, "COMPACT_ENTRIES", 5)
    monkeypatch.setattr(raft_log, "KEPT_ENTRIES", 2)
    monkeypatch.setattr(raft_log, "BATCH_ENTRIES", 1)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mutant", FOUND)
def test_schedules_miss_a_rule_that_is_taken_out(mutant: type[Raft]) -> None:
    seed = first_broken(mutant, FOUND[mutant])
    assert seed is not None, f"{SCHEDULES} schedules hold with a {mutant.__name__}"
    print(f"{mutant.__name__}: broken in schedule {seed}")


def test_committing_an_older_term_breaks_a_rule_in_the_schedule_made_for_it() -> None:
    """It takes so much to happen that schedules by chance do not find it."""
    with pytest.raises(Broken, match="lacks entry 2, which was committed"):
        play_older_term(CommitsOlderTerms)


def test_a_vote_must_not_be_forgotten_by_an_identity() -> None:
    """Why a process that starts again is another replica. In all other schedules it is, and no rule is broken."""
    assert first_broken(schedule=ForgetfulProcesses) is not None


def test_clocks_that_are_off_by_more_than_is_stated_break_the_lease() -> None:
    assert first_broken(start=120, drift=0.4) is not None
