"""`NGramProposer`: draft tokens of one sequence, looked up where its last tokens stood before (prompt lookup decoding).

Every pair of tokens is chained to the place where it last stood, so a token costs one entry of a list, however far
back places are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

MAX_MATCH = 8
"""Tokens back to which two places of a text are compared."""

MAX_CANDIDATES = 16
"""Earlier places of the last two tokens that are compared, the nearest first."""

INITIAL_ACCEPTANCE_RATE = 0.5
"""The rate that a sequence starts with before any draft token was checked."""

NEW_TOKEN_WEIGHT = 0.1
"""Of each new token in the moving average that the rate is."""


class DraftOutcome(NamedTuple):
    """Of one draft: how many tokens came as proposed, and whether (0 or 1) one came that was not."""

    right: int
    wrong: int


class NGramProposer:
    """Reads `token_ids`, which grow elsewhere, and proposes what may come next.

    `acceptance_rate` is how likely a draft token is right if all before it were, as a moving average. Of several
    earlier places the proposer takes the one before which most tokens are the same as before the end.
    """

    def __init__(self, token_ids: Sequence[int], acceptance_rate: float = INITIAL_ACCEPTANCE_RATE) -> None:
        self.acceptance_rate = acceptance_rate
        self._ids = token_ids
        self._draft: list[int] | None = None
        self._newest: dict[tuple[int, int], int] = {}  # pair of tokens -> where its second one last stood
        self._earlier = [-1]  # of each place: the one before it with the same pair, or -1

    def propose(self, count: int) -> list[int]:
        """Up to `count` tokens that may come next; none where the last two tokens are a new pair."""
        self._index_new_tokens()
        place, ids = self._best_place(), self._ids
        draft = self._draft = list[int]()
        if place is not None:
            for at in range(place + 1, place + 1 + count):
                # Past the end the draft itself goes on: a text that repeats itself continues to do so.
                draft.append(ids[at] if at < len(ids) else draft[at - len(ids)])
        return draft

    def record_acceptance(self, sampled: Sequence[int]) -> DraftOutcome:
        """Compare the last proposal, if there is one, with the tokens that the model gave."""
        draft, self._draft = self._draft, None
        if draft is None:
            return DraftOutcome(0, 0)
        right = num_accepted_tokens(draft, sampled)
        is_wrong = right < min(len(draft), len(sampled))
        for _ in range(right):
            self.acceptance_rate += NEW_TOKEN_WEIGHT * (1 - self.acceptance_rate)
        if is_wrong:
            self.acceptance_rate -= NEW_TOKEN_WEIGHT * self.acceptance_rate
        return DraftOutcome(right, int(is_wrong or not draft))

    def _index_new_tokens(self) -> None:
        ids = self._ids
        for at in range(len(self._earlier), len(ids)):
            pair = (ids[at - 1], ids[at])
            self._earlier.append(self._newest.get(pair, -1))
            self._newest[pair] = at

    def _best_place(self) -> int | None:
        """The earlier place before which the most tokens match those before the end; of equals the nearest."""
        at, best, longest_match = self._earlier[-1], None, 0
        for _ in range(MAX_CANDIDATES):
            if at < 0 or longest_match == MAX_MATCH:
                break
            match = self._match_length(at)
            if match > longest_match:
                best, longest_match = at, match
            at = self._earlier[at]
        return best

    def _match_length(self, at: int) -> int:
        """How many tokens, backwards from this place, are those backwards from the end."""
        ids, end = self._ids, len(self._ids) - 1
        for back in range(min(MAX_MATCH, at + 1)):
            if ids[at - back] != ids[end - back]:
                return back
        return min(MAX_MATCH, at + 1)


def num_accepted_tokens(draft: Sequence[int], sampled: Sequence[int]) -> int:
    """How many draft tokens are what was sampled, from the first on."""
    count = 0
    for proposed, token_id in zip(draft, sampled, strict=False):
        if proposed != token_id:
            break
        count += 1
    return count
