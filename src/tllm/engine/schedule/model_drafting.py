"""`ModelDrafting`: when a draft model drafts and how many tokens, by what its steps cost and how often it was right.

A draft of k tokens takes k steps of the draft model, one after the other, before the batch can leave. So it pays only
where a step of the target takes much longer than one of the draft model: a large model, or links with a delay.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from tllm.engine.schedule.draft_phases import DraftPhases
from tllm.engine.schedule.proposer import AcceptanceRates, DraftedSequence, Proposer
from tllm.engine.schedule.step_cost import NEW_STEP_WEIGHT, StepCost


class ModelDrafting:
    """The policy around one draft model.

    `rates` are the acceptance rates of its drafts, `seconds` what it took for the last batch. The seconds of a step of
    the draft model are a moving average for each number of sequences.
    """

    def __init__(self, proposer: Proposer) -> None:
        self.proposer, self.rates, self.phases = proposer, AcceptanceRates(), DraftPhases()
        self.seconds = self.total_seconds = 0.0
        self.steps = 0
        self._step_seconds: dict[int, float] = {}

    def begin_step(self, sequences: int) -> bool:
        """A step of so many sequences begins; whether the draft model is asked in it."""
        self.seconds = 0.0
        return sequences > 0 and self.phases.begin_step(sequences, time.perf_counter())

    def length(self, sequences: Sequence[DraftedSequence], others: tuple[int, float], most: int, cost: StepCost) -> int:
        """How many tokens to draft for each of these sequences: as many as give the most tokens a second, at least one.

        `others` are the rows of the rest of the batch and the tokens that these are expected to give.
        """
        rows, tokens = others[0] + len(sequences), others[1] + len(sequences)
        best, best_speed = min(1, most), 0.0
        draft_seconds = self._seconds_of_step(len(sequences))
        chances = [(self.rates[one.key], one.max_draft_tokens) for one in sequences]
        for count in range(1, most + 1):
            rows += sum(count <= longest for _, longest in chances)
            tokens += sum(rate**count for rate, longest in chances if count <= longest)
            speed = tokens / (cost.seconds(rows) + count * draft_seconds)
            if speed > best_speed:
                best, best_speed = count, speed
        return best

    def prepare(self, sequences: Sequence[DraftedSequence]) -> None:
        """Let the draft model catch up with those of these sequences that may have drafts, unless it was found not to
        pay. A prompt that is pooled, or gets a single token, never has any."""
        sequences = [one for one in sequences if one.max_draft_tokens > 0]
        if sequences and (self.phases.is_drafting or self.phases.pays):
            began = time.perf_counter()
            self.proposer.prepare(sequences)
            self.total_seconds += time.perf_counter() - began

    def propose(self, sequences: Sequence[DraftedSequence], count: int) -> list[list[int]]:
        """Draft, and measure it."""
        counts = [max(0, min(count, one.max_draft_tokens)) for one in sequences]
        began = time.perf_counter()
        self.proposer.prepare(sequences)
        prepared = time.perf_counter()
        drafts = self.proposer.propose(sequences, counts)
        ended = time.perf_counter()
        if steps := max(map(len, drafts), default=0):
            seconds, drafted = (ended - prepared) / steps, sum(map(bool, drafts))
            average = self._step_seconds.get(drafted, seconds)
            self._step_seconds[drafted] = average + NEW_STEP_WEIGHT * (seconds - average)
            self.steps += steps
        self.seconds = ended - began
        self.total_seconds += self.seconds
        return drafts

    def _seconds_of_step(self, sequences: int) -> float:
        """Of a step for so many sequences, or for the nearest number that was measured; nothing before the first."""
        measured = self._step_seconds
        return measured[min(measured, key=lambda count: abs(count - sequences))] if measured else 0.0
