"""`Speculation`: how many draft tokens a batch checks, decided by what steps with and without them have taken.

Speculative decoding (2211.17192) with drafts that are looked up (`NGramProposer`): a batch computes draft tokens beside
the tokens it computes anyway, and a draft token counts only where it is the token that is sampled there. So the output
is the same in any case. A right draft token saves a step of its own round the ring; a wrong one has cost a row. A row
costs little where a step's time goes into reading weights or into the network, and much where it goes into arithmetic.
So its cost is measured, and no more tokens are drafted than pay.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import linear_regression
from typing import Protocol

from tllm.engine.schedule.ngram_draft import INITIAL_ACCEPTANCE_RATE, NGramProposer

INITIAL_ROW_SHARE = 1 / 32
"""What one more row is taken to cost, as a part of a step, until steps with several numbers of rows were seen."""

NEW_STEP_WEIGHT = 0.2
"""Of each new step in the moving average of the seconds of steps with its number of rows."""

NEW_REPLY_WEIGHT = 0.3
"""Of each reply that ends in the acceptance rate with which the next ones begin."""

MAX_ROW_COUNTS = 32
"""Numbers of rows whose seconds are remembered, those seen last."""

RETRY_EVERY = 16
"""Of so many steps in which drafts seem to lose, one has them all the same: machines and links change."""


class DraftedSequence(Protocol):
    """What is read of a sequence: its number, its tokens, and how many draft tokens it may have at the moment."""

    key: int
    token_ids: list[int]

    @property
    def max_draft_tokens(self) -> int: ...


class StepCost:
    """Seconds of a step by its number of rows, measured: a line through steps with drafts, and each count without.

    The line is `base_seconds + row_seconds * rows`. The first row beside a sequence's own may cost far more than the
    next, as products and attention of a single row have kernels of their own. So the line leaves out steps without
    drafts once there are others.
    """

    def __init__(self) -> None:
        self._without_drafts: dict[int, float] = {}
        self._with_drafts: dict[int, float] = {}
        self.base_seconds, self.row_seconds = 1.0, INITIAL_ROW_SHARE

    def record(self, rows: int, seconds: float, has_drafts: bool) -> None:
        """Take in one step."""
        averages = self._with_drafts if has_drafts else self._without_drafts
        average = averages.pop(rows, seconds)
        averages[rows] = average + NEW_STEP_WEIGHT * (seconds - average)
        if len(averages) > MAX_ROW_COUNTS:
            del averages[next(iter(averages))]
        points = self._with_drafts if len(self._with_drafts) > 1 else {**self._without_drafts, **self._with_drafts}
        if len(points) == 1:
            self.row_seconds = INITIAL_ROW_SHARE * points[rows]
            self.base_seconds = points[rows] - rows * self.row_seconds
        else:
            slope, self.base_seconds = linear_regression(list(points), list(points.values()))
            self.row_seconds = max(0.0, slope)

    def row_pays(self, probability: float, rows: int, tokens: float) -> bool:
        """Whether one row more, which is right with this probability, gives more tokens a second.

        Without it a step has `rows` rows and is expected to give `tokens` tokens.
        """
        return probability * (self.base_seconds + self.row_seconds * rows) > self.row_seconds * tokens

    def drafts_pay(self, sequences: int, rows: int, tokens: float) -> bool:
        """Whether a step of so many rows and tokens gives more tokens a second than one without drafts."""
        plain = self._without_drafts.get(sequences)
        if plain is None or not self._with_drafts:
            return True
        return tokens * plain > sequences * (self.base_seconds + self.row_seconds * rows)


class Speculation:
    """The policy of one scheduler: up to `max_draft_tokens` draft tokens of each sequence.

    `acceptance_rate` is the one with which the next reply begins, an average of what those before it ended with. The
    counts of `stats` are over all sequences: drafts that were checked, their tokens, those accepted; and of all that
    could have been proposed, whether or not it was checked, how much was right and wrong.
    """

    def __init__(self, max_draft_tokens: int) -> None:
        self.max_draft_tokens = max_draft_tokens
        self.cost, self.acceptance_rate = StepCost(), INITIAL_ACCEPTANCE_RATE
        self.num_drafts = self.num_draft_tokens = self.num_accepted_tokens = 0
        self.num_right = self.num_wrong = 0
        self._losing_steps = 0  # steps in which drafts seemed to lose
        self._proposers: dict[int, NGramProposer] = {}

    def propose(self, sequences: Sequence[DraftedSequence], room: int) -> list[list[int]]:
        """The draft tokens that each sequence is to check after its last token, in a batch of at most `room` tokens."""
        rows, tokens = len(sequences), float(len(sequences))
        drafts = []
        for sequence in sequences:
            proposer = self._proposers.get(sequence.key)
            if proposer is None:
                proposer = NGramProposer(sequence.token_ids, self.acceptance_rate)
                self._proposers[sequence.key] = proposer
            draft = proposer.propose(self.max_draft_tokens)
            longest = min(len(draft), sequence.max_draft_tokens)
            count, probability = 0, proposer.acceptance_rate
            while count < longest and rows < room and self.cost.row_pays(probability, rows, tokens):
                count, rows, tokens = count + 1, rows + 1, tokens + probability
                probability *= proposer.acceptance_rate
            drafts.append(draft[:count])
        if rows > len(sequences) and not self.cost.drafts_pay(len(sequences), rows, tokens):
            self._losing_steps += 1
            if self._losing_steps % RETRY_EVERY:
                return [[] for _ in sequences]
        return drafts

    def record_acceptance(self, key: int, num_draft_tokens: int, accepted: list[int]) -> None:
        """Take in the tokens that the sequence `key` got in a step; all but the last were draft tokens."""
        proposer = self._proposers.get(key)
        if proposer is None:
            return  # its first token, which follows from the prompt
        outcome = proposer.record_acceptance(accepted)
        self.num_right, self.num_wrong = self.num_right + outcome.right, self.num_wrong + outcome.wrong
        if num_draft_tokens:
            self.num_drafts += 1
            self.num_draft_tokens += num_draft_tokens
            self.num_accepted_tokens += len(accepted) - 1

    def forget(self, key: int) -> None:
        """The sequence `key` has ended."""
        proposer = self._proposers.pop(key, None)
        if proposer is not None:
            self.acceptance_rate += NEW_REPLY_WEIGHT * (proposer.acceptance_rate - self.acceptance_rate)

    def stats(self) -> dict[str, float]:
        """The counts, under the names that metrics have."""
        return {
            "drafts": self.num_drafts,
            "draft_tokens": self.num_draft_tokens,
            "accepted_tokens": self.num_accepted_tokens,
            "draft_right": self.num_right,
            "draft_wrong": self.num_wrong,
        }
