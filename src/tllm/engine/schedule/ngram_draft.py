"""`NGramProposer`: draft tokens looked up where a sequence's last tokens stood before (prompt lookup decoding).

Every pair of tokens is chained to the place where it last stood, so a token costs one entry of a list, however far
back places are compared.
"""

from __future__ import annotations

from collections.abc import Sequence

from tllm.engine.schedule.proposer import DraftedSequence

MAX_MATCH = 8
"""Tokens back to which two places of a text are compared."""

MAX_CANDIDATES = 16
"""Earlier places of the last two tokens that are compared, the nearest first."""


class NGramProposer:
    """A `Proposer` that keeps an index of each sequence's tokens; it takes no time worth counting."""

    def __init__(self) -> None:
        self._indexes: dict[int, NGramIndex] = {}

    def prepare(self, sequences: Sequence[DraftedSequence]) -> None:
        """Nothing: `propose` itself takes new tokens in."""

    def propose(self, sequences: Sequence[DraftedSequence], counts: Sequence[int]) -> list[list[int]]:
        """What followed the most alike earlier place of each sequence."""
        return [self._index(one).propose(count) for one, count in zip(sequences, counts, strict=True)]

    def match(self, key: int) -> int:
        """How many tokens of the place that was proposed last are those before the sequence's end."""
        return self._indexes[key].match

    def release(self, key: int) -> None:
        self._indexes.pop(key, None)

    def _index(self, sequence: DraftedSequence) -> NGramIndex:
        index = self._indexes.get(sequence.key)
        if index is None:
            index = self._indexes[sequence.key] = NGramIndex(sequence.token_ids)
        return index


class NGramIndex:
    """Reads `token_ids`, which grow elsewhere, and proposes what may come next.

    Of several earlier places it takes the one before which most tokens are the same as before the end; `match` is how
    many these were, 0 where the last two tokens are a new pair.
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.match = 0
        self._ids = token_ids
        self._newest: dict[tuple[int, int], int] = {}  # pair of tokens -> where its second one last stood
        self._earlier = [-1]  # of each place: the one before it with the same pair, or -1

    def propose(self, count: int) -> list[int]:
        """Up to `count` tokens that may come next; none where the last two tokens are a new pair."""
        self._index_new_tokens()
        place, ids = self._best_place(), self._ids
        draft = list[int]()
        if place is not None:
            for at in range(place + 1, place + 1 + count):
                # Past the end the draft itself goes on: a text that repeats itself continues to do so.
                draft.append(ids[at] if at < len(ids) else draft[at - len(ids)])
        return draft

    def _index_new_tokens(self) -> None:
        ids = self._ids
        for at in range(len(self._earlier), len(ids)):
            pair = (ids[at - 1], ids[at])
            self._earlier.append(self._newest.get(pair, -1))
            self._newest[pair] = at

    def _best_place(self) -> int | None:
        """The earlier place before which the most tokens match those before the end; of equals the nearest."""
        at, best, self.match = self._earlier[-1], None, 0
        for _ in range(MAX_CANDIDATES):
            if at < 0 or self.match == MAX_MATCH:
                break
            match = self._match_length(at)
            if match > self.match:
                best, self.match = at, match
            at = self._earlier[at]
        return best

    def _match_length(self, at: int) -> int:
        """How many tokens, backwards from this place, are those backwards from the end."""
        ids, end = self._ids, len(self._ids) - 1
        for back in range(min(MAX_MATCH, at + 1)):
            if ids[at - back] != ids[end - back]:
                return back
        return min(MAX_MATCH, at + 1)
