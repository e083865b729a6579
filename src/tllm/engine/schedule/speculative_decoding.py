"""`Speculation`: how many draft tokens a batch checks, decided by what steps with and without them have taken.

Speculative decoding (2211.17192): a batch computes draft tokens beside the tokens it computes anyway, and a draft token
counts only where it is the token that is sampled there. So the output is the same in any case. A right draft token
saves a step of its own round the ring; a wrong one has cost a row. A row costs little where a step's time goes into
reading weights or into the network, and much where it goes into arithmetic. So its cost is measured, and no more
tokens are drafted than pay.

Drafts that are looked up (`NGramProposer`) cost nothing to make and come first, where they are likely to be right.
Elsewhere a draft model drafts, if there is one and if that pays (`ModelDrafting`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tllm.engine.schedule.model_drafting import ModelDrafting
from tllm.engine.schedule.ngram_draft import NGramProposer
from tllm.engine.schedule.proposer import AcceptanceRates, DraftedSequence, Proposer
from tllm.engine.schedule.step_cost import StepCost

RETRY_EVERY = 16
"""Of so many steps in which drafts seem to lose, one has them all the same: machines and links change."""

LONG_MATCH = 6
"""Tokens that stood before in the same order: what followed them is proposed without asking the draft model."""


class Draft(NamedTuple):
    """What is proposed for one sequence, and the rates of whoever proposed it."""

    token_ids: list[int]
    rates: AcceptanceRates


class Speculation:
    """The policy of one scheduler: up to `max_draft_tokens` draft tokens of each sequence, looked up or by a model.

    The counts of `stats` are over all sequences: drafts that were checked, their tokens, those accepted; and of all
    that was proposed, whether or not it was checked, how much was right and wrong.
    """

    def __init__(self, max_draft_tokens: int, draft_model: Proposer | None = None) -> None:
        self.max_draft_tokens = max_draft_tokens
        self.cost, self.ngram_rates = StepCost(), AcceptanceRates()
        self.model = None if draft_model is None else ModelDrafting(draft_model)
        self.num_drafts = self.num_draft_tokens = self.num_accepted_tokens = 0
        self.num_right = self.num_wrong = 0
        self._losing_steps = 0  # steps in which drafts seemed to lose
        self._ngrams = NGramProposer()
        self._proposed: dict[int, Draft] = {}  # by sequence, until it is known what came

    @property
    def draft_seconds(self) -> float:
        """What a draft model took for the last call of `propose`."""
        return 0.0 if self.model is None else self.model.seconds

    def propose(self, sequences: Sequence[DraftedSequence], room: int) -> list[list[int]]:
        """The draft tokens that each sequence is to check after its last token, in a batch of at most `room` tokens."""
        found = self._ngrams.propose(sequences, [self.max_draft_tokens] * len(sequences))
        drafts = [Draft(token_ids, self.ngram_rates) for token_ids in found]
        if self.model is not None and self.model.begin_step(len(sequences)):
            drafts = self._with_model(self.model, sequences, drafts, room)
        self._proposed.update((one.key, draft) for one, draft in zip(sequences, drafts, strict=True))
        rows, tokens = len(sequences), float(len(sequences))
        checked = []
        for sequence, draft in zip(sequences, drafts, strict=True):
            rate = draft.rates[sequence.key]
            longest = min(len(draft.token_ids), sequence.max_draft_tokens)
            count, probability = 0, rate
            is_decided = draft.rates is not self.ngram_rates  # what a model drafted has been paid for
            while count < longest and rows < room and (is_decided or self.cost.row_pays(probability, rows, tokens)):
                count, rows, tokens = count + 1, rows + 1, tokens + probability
                probability *= rate
            checked.append(draft.token_ids[:count])
        if rows > len(sequences) and not self.draft_seconds and not self.cost.drafts_pay(len(sequences), rows, tokens):
            self._losing_steps += 1
            if self._losing_steps % RETRY_EVERY:
                return [[] for _ in sequences]
        return checked

    def prepare(self, sequences: Sequence[DraftedSequence]) -> None:
        """While a batch is on its way: let the draft model compute tokens that it lacks, such as prompts."""
        if self.model is not None:
            self.model.prepare(sequences)

    def record_acceptance(self, key: int, num_draft_tokens: int, accepted: Sequence[int]) -> None:
        """Take in the tokens that the sequence `key` got in a step; all but the last were draft tokens."""
        draft = self._proposed.pop(key, None)
        if self.model is not None:
            self.model.phases.record(len(accepted))
        if draft is None:
            return  # its first token, which follows from the prompt
        outcome = draft.rates.record(key, draft.token_ids, accepted)
        self.num_right, self.num_wrong = self.num_right + outcome.right, self.num_wrong + outcome.wrong
        if num_draft_tokens:
            self.num_drafts += 1
            self.num_draft_tokens += num_draft_tokens
            self.num_accepted_tokens += len(accepted) - 1

    def preempted(self, key: int) -> None:
        """The sequence `key` begins again later: its place in the draft model's cache is for others."""
        if self.model is not None:
            self.model.proposer.release(key)

    def forget(self, key: int) -> None:
        """The sequence `key` has ended."""
        self._proposed.pop(key, None)
        self._ngrams.release(key)
        self.ngram_rates.forget(key)
        if self.model is not None:
            self.model.proposer.release(key)
            self.model.rates.forget(key)

    def stats(self) -> dict[str, float]:
        """The counts, under the names that metrics have."""
        counts: dict[str, float] = {
            "drafts": self.num_drafts,
            "draft_tokens": self.num_draft_tokens,
            "accepted_tokens": self.num_accepted_tokens,
            "draft_right": self.num_right,
            "draft_wrong": self.num_wrong,
        }
        if self.model is not None:
            counts |= {"draft_model_steps": self.model.steps, "draft_model_seconds": self.model.total_seconds}
        return counts

    def _with_model(
        self, model: ModelDrafting, sequences: Sequence[DraftedSequence], looked_up: list[Draft], room: int
    ) -> list[Draft]:
        """The drafts, with those of the draft model where what was looked up is not to be trusted."""
        drafts, places, rows, tokens = list(looked_up), list[int](), 0, 0.0
        for place, (sequence, (token_ids, _)) in enumerate(zip(sequences, looked_up, strict=True)):
            rate = self.ngram_rates[sequence.key]
            if token_ids and (self._ngrams.match(sequence.key) >= LONG_MATCH or rate > model.rates[sequence.key]):
                rows, tokens = rows + 1 + len(token_ids), tokens + sum(rate**n for n in range(1 + len(token_ids)))
            else:
                places.append(place)
        if not places:
            return drafts
        asked, most = [sequences[place] for place in places], (room - rows) // len(places) - 1
        count = model.length(asked, (rows, tokens), min(most, self.max_draft_tokens), self.cost)
        if count > 0:
            for place, token_ids in zip(places, model.propose(asked, count), strict=True):
                if token_ids:
                    drafts[place] = Draft(token_ids, model.rates)
        return drafts
