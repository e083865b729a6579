"""`Speculation`: how many drafted tokens a batch checks beside those it computes anyway, from what turns really take.

A token that a row confirms comes without a turn of its own round the ring, one that it refutes has cost its row. What
a row costs is little where weights are read or a turn is far, and much where arithmetic is what takes the time; so it
is measured, and drafts end where they no longer pay. What comes out is the same in any case (speculative decoding,
2211.17192, with drafts that are looked up): a token counts only where it is the one that would have been chosen.
"""

from __future__ import annotations

from statistics import linear_regression

from tllm.engine.schedule.ngram_draft import UNKNOWN, NGramProposer
from tllm.engine.schedule.sequence import Sequence

ROW_SHARE = 1 / 32
"""What a row more is taken to cost, as a part of a turn, until turns with several numbers of rows were seen."""

WEIGHT = 0.2
"""Of each new turn in what is known of its number of rows."""

LATELY = 0.3
"""Of each reply that ends in the chance with which the next ones begin."""

NUMBERS = 32
"""Of rows that are remembered, those seen last."""

AGAIN = 16
"""Of turns in which drafts seem to lose, one has them all the same: machines and links change."""


class TurnCost:
    """Seconds of a turn by its rows: as they were of late without drafts, and a line through those with drafts.

    The first row beside a sequence's own may cost far more than the next: products and attention of one row have
    kernels of their own. So the line leaves out turns without drafts, once there are others.
    """

    def __init__(self) -> None:
        self._plain: dict[int, float] = {}
        self._drafted: dict[int, float] = {}
        self.first, self.row = 1.0, ROW_SHARE  # of a turn without rows, and of each row

    def took(self, rows: int, seconds: float, drafted: bool) -> None:
        kind = self._drafted if drafted else self._plain
        known = kind.pop(rows, seconds)
        kind[rows] = known + WEIGHT * (seconds - known)
        if len(kind) > NUMBERS:
            del kind[next(iter(kind))]
        seen = self._drafted if len(self._drafted) > 1 else {**self._plain, **self._drafted}
        if len(seen) == 1:
            self.row = ROW_SHARE * seen[rows]
            self.first = seen[rows] - rows * self.row
        else:
            slope, self.first = linear_regression(list(seen), list(seen.values()))
            self.row = max(0.0, slope)

    def pays(self, chance: float, rows: int, tokens: float) -> bool:
        """Whether one row more, right with this chance, gives more tokens a second than `rows` with `tokens`."""
        return chance * (self.first + self.row * rows) > self.row * tokens

    def gains(self, sequences: int, rows: int, tokens: float) -> bool:
        """Whether such a turn gives more tokens a second than one of these sequences without drafts."""
        plain = self._plain.get(sequences)
        if plain is None or not self._drafted:
            return True
        return tokens * plain > sequences * (self.first + self.row * rows)


class Speculation:
    """Up to `most` tokens of each sequence. `chance`: with which the next one begins, as those before it ended.

    Counts, over all: drafts, their tokens, those accepted; and of what could have been told, how much was right and
    wrong, whether or not it was checked.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.cost, self.chance = TurnCost(), UNKNOWN
        self.drafts = self.drafted = self.accepted = 0
        self.right = self.wrong = 0
        self._lost = 0  # turns in which drafts seemed to lose
        self._drafts: dict[int, NGramProposer] = {}

    def choose(self, sequences: list[Sequence], room: int) -> list[list[int]]:
        """What each sequence is to check after its last token, in batches of `room` tokens at the most."""
        rows, tokens = len(sequences), float(len(sequences))
        chosen = []
        for sequence in sequences:
            draft = self._drafts.get(sequence.key)
            if draft is None:
                draft = self._drafts[sequence.key] = NGramProposer(sequence.token_ids, self.chance)
            told = draft.tell(self.most)
            count, chance = 0, draft.chance
            while count < min(len(told), most_of(sequence)) and rows < room and self.cost.pays(chance, rows, tokens):
                count, rows, tokens, chance = count + 1, rows + 1, tokens + chance, chance * draft.chance
            chosen.append(told[:count])
        if rows > len(sequences) and not self.cost.gains(len(sequences), rows, tokens):
            self._lost += 1
            if self._lost % AGAIN:
                return [[] for _ in sequences]
        return chosen

    def heard(self, sequence: Sequence, drafted: int, came: list[int]) -> None:
        """Take note of the tokens that a sequence was given, of which all but the last were drafted."""
        draft = self._drafts.get(sequence.key)
        if draft is None:
            return  # its first token, which follows from the prompt
        heard = draft.hear(came)
        self.right, self.wrong = self.right + heard.right, self.wrong + heard.wrong
        if drafted:
            self.drafts += 1
            self.drafted += drafted
            self.accepted += len(came) - 1

    def forget(self, sequence: Sequence) -> None:
        """A sequence has ended."""
        draft = self._drafts.pop(sequence.key, None)
        if draft is not None:
            self.chance += LATELY * (draft.chance - self.chance)

    def stats(self) -> dict[str, float]:
        return {
            "drafts": self.drafts,
            "draft_tokens": self.drafted,
            "accepted_tokens": self.accepted,
            "draft_right": self.right,
            "draft_wrong": self.wrong,
        }


def most_of(sequence: Sequence) -> int:
    """Tokens that a sequence may draft: one more is chosen beside them, and what is banned must be so for all."""
    left = sequence.params.max_tokens - sequence.num_output - 1
    before_end = sequence.params.min_tokens - sequence.num_output - 1
    return min(left, before_end) if before_end >= 0 else left
