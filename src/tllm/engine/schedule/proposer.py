"""`Proposer`: the interface of whatever drafts tokens; and `AcceptanceRates`, how often drafts were right of late.

There are two: `NGramProposer` looks tokens up in the text so far, and `engine.draft.draft_model.DraftModel` is a small
model. What is proposed never changes a reply: a draft token counts only where it is the token that is sampled there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from tllm.engine.schedule.batch import Sampling

INITIAL_ACCEPTANCE_RATE = 0.5
"""The rate before any draft token was checked."""

NEW_TOKEN_WEIGHT = 0.1
"""Of each new token in the moving average that the rate is."""

NEW_REPLY_WEIGHT = 0.3
"""Of each reply that ends in the acceptance rate with which the next ones begin."""


class DraftedSequence(Protocol):
    """What is read of a sequence: its number, its tokens, how the next is sampled, and how many may be drafted now."""

    key: int
    token_ids: list[int]

    @property
    def prompt_length(self) -> int: ...

    @property
    def max_draft_tokens(self) -> int: ...

    def sampling(self) -> Sampling: ...


class Proposer(Protocol):
    """Drafts tokens for sequences that are computed together, and keeps something of each of them for that."""

    def prepare(self, sequences: Sequence[DraftedSequence]) -> None:
        """Bring what is kept of these sequences up to date, as far as one short step of computing can."""

    def propose(self, sequences: Sequence[DraftedSequence], counts: Sequence[int]) -> list[list[int]]:
        """Up to so many tokens that may come next in each sequence; none where nothing can be said."""

    def release(self, key: int) -> None:
        """Let go of what is kept of a sequence: it has ended, or was preempted and may come again."""


class DraftOutcome(NamedTuple):
    """Of one draft: how many tokens came as proposed, and whether (0 or 1) one came that was not."""

    right: int
    wrong: int


class AcceptanceRates:
    """Of one proposer: how likely a draft token of each sequence is right if all before it were, as moving averages.

    A sequence begins with `initial`, an average of the rates with which those before it ended.
    """

    def __init__(self) -> None:
        self.initial = INITIAL_ACCEPTANCE_RATE
        self._rates: dict[int, float] = {}

    def __getitem__(self, key: int) -> float:
        return self._rates.get(key, self.initial)

    def __setitem__(self, key: int, rate: float) -> None:
        self._rates[key] = rate

    def record(self, key: int, draft: Sequence[int], sampled: Sequence[int]) -> DraftOutcome:
        """Compare a draft with the tokens that the model gave."""
        rate, right = self[key], num_accepted_tokens(draft, sampled)
        is_wrong = right < min(len(draft), len(sampled))
        for _ in range(right):
            rate += NEW_TOKEN_WEIGHT * (1 - rate)
        self._rates[key] = rate - NEW_TOKEN_WEIGHT * rate if is_wrong else rate
        return DraftOutcome(right, int(is_wrong or not draft))

    def forget(self, key: int) -> None:
        """The sequence has ended."""
        self.initial += NEW_REPLY_WEIGHT * (self._rates.pop(key, self.initial) - self.initial)


def num_accepted_tokens(draft: Sequence[int], sampled: Sequence[int]) -> int:
    """How many draft tokens are what was sampled, from the first on."""
    count = 0
    for proposed, token_id in zip(draft, sampled, strict=False):
        if proposed != token_id:
            break
        count += 1
    return count
