"""`DraftPhases`: finds whether a draft model pays, by alternating phases with and without it.

What a draft model costs a ring is not only its own time: other batches may wait for the first rank meanwhile, or they
may not. So tokens a second are counted in phases with the draft model and in phases without. The phases of whoever
gave more become longer, those of the other stay short.
"""

from __future__ import annotations

SHORT_PHASE, LONG_PHASE = 12, 768
"""Steps of a phase: at first and after a loss, and at the most."""

SETTLING = 4
"""Steps at the beginning of a phase that are not counted: batches of the phase before are still on their way."""

LONG_PAUSE = 10.0
"""An interval so many times the average one is no step: nobody had asked for anything."""

ALIKE = 0.25
"""By how much the numbers of sequences in two phases may differ if their speeds are to be compared."""


class PhaseCount:
    """What came in one phase."""

    def __init__(self, is_drafting: bool) -> None:
        self.is_drafting = is_drafting
        self.steps = self.sequences = self.tokens = 0
        self.seconds = 0.0
        self._last: float | None = None

    def begin_step(self, sequences: int, now: float) -> None:
        """A step of so many sequences begins."""
        self.steps += 1
        counted = self.steps - SETTLING
        if counted <= 0:
            return
        pause = 0.0 if self._last is None else now - self._last
        if counted < 3 or pause < LONG_PAUSE * self.seconds / (counted - 1):
            self.seconds += pause
        self.sequences += sequences
        self._last = now

    def record(self, tokens: int) -> None:
        """A sequence got so many tokens."""
        if self._last is not None:
            self.tokens += tokens

    @property
    def counted(self) -> int:
        """Steps that count."""
        return max(0, self.steps - SETTLING)

    @property
    def mean_sequences(self) -> float:
        """Sequences of a step."""
        return self.sequences / max(1, self.counted)

    @property
    def speed(self) -> float:
        """Tokens a second of one of as many sequences as a step has."""
        return self.tokens / max(self.seconds, 1e-9) / max(self.mean_sequences, 1.0)


class DraftPhases:
    """Says of each step whether the draft model is asked in it. It begins without."""

    def __init__(self) -> None:
        self._phase = PhaseCount(False)
        self._before: PhaseCount | None = None
        self._lengths = {False: SHORT_PHASE, True: SHORT_PHASE}

    @property
    def is_drafting(self) -> bool:
        """Whether the draft model is asked now."""
        return self._phase.is_drafting

    @property
    def pays(self) -> bool:
        """Whether the draft model was not found to lose."""
        return self._lengths[True] >= self._lengths[False]

    def begin_step(self, sequences: int, now: float) -> bool:
        """A step of so many sequences begins at this time, in seconds; whether the draft model is asked in it."""
        self._phase.begin_step(sequences, now)
        if self._phase.counted > self._lengths[self.is_drafting]:
            self._compare()
            self._before, self._phase = self._phase, PhaseCount(not self.is_drafting)
        return self.is_drafting

    def record(self, tokens: int) -> None:
        """A sequence got so many tokens."""
        self._phase.record(tokens)

    def _compare(self) -> None:
        """Let the phases of the faster way be twice as long the next time, and those of the other short."""
        one, other = self._phase, self._before
        if other is None or abs(one.mean_sequences - other.mean_sequences) > ALIKE * other.mean_sequences:
            return
        faster = one.is_drafting if one.speed > other.speed else other.is_drafting
        self._lengths[faster] = min(2 * self._lengths[faster], LONG_PHASE)
        self._lengths[not faster] = SHORT_PHASE
