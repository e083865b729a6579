"""`StepCost`: the measured time of a step by its number of rows, so that no more tokens are drafted than pay."""

from __future__ import annotations

from statistics import linear_regression

INITIAL_ROW_SHARE = 1 / 32
"""What one more row is taken to cost, as a part of a step, until steps with several numbers of rows were seen."""

NEW_STEP_WEIGHT = 0.2
"""Of each new step in the moving average of the seconds of steps with its number of rows."""

MAX_ROW_COUNTS = 32
"""Numbers of rows whose seconds are remembered, those seen last."""

FIRST_ROUND, LONGEST_ROUND = 16, 2048
"""Steps until the cost of a row is measured anew: at first, then twice as many each time, up to so many."""


class StepCost:
    """Seconds of a step by its number of rows, measured: a line through steps with drafts, and each count without.

    The line is `base_seconds + row_seconds * rows`. The first row beside a sequence's own may cost far more than the
    next, as products and attention of a single row have kernels of their own. So the line leaves out steps without
    drafts once there are others.

    Something may have held up a step whose number of rows does not come again, or comes no more as it made drafts seem
    too dear. So from time to time all is forgotten but the last steps without drafts. Where a row does cost too much,
    the steps that show it lose: therefore ever less often.
    """

    def __init__(self) -> None:
        self._without_drafts: dict[int, float] = {}
        self._with_drafts: dict[int, float] = {}
        self.base_seconds, self.row_seconds = 1.0, INITIAL_ROW_SHARE
        self._steps, self._round = 0, FIRST_ROUND

    def record(self, rows: int, seconds: float, has_drafts: bool) -> None:
        """Take in one step."""
        self._steps += 1
        if self._steps == self._round:
            self._steps, self._round = 0, min(2 * self._round, LONGEST_ROUND)
            self._with_drafts.clear()
            self._without_drafts = dict(list(self._without_drafts.items())[-1:])
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

    def seconds(self, rows: float) -> float:
        """What a step with drafts and so many rows takes."""
        return self.base_seconds + self.row_seconds * rows

    def row_pays(self, probability: float, rows: int, tokens: float) -> bool:
        """Whether one row more, which is right with this probability, gives more tokens a second.

        Without it a step has `rows` rows and is expected to give `tokens` tokens.
        """
        return probability * self.seconds(rows) > self.row_seconds * tokens

    def drafts_pay(self, sequences: int, rows: int, tokens: float) -> bool:
        """Whether a step of so many rows and tokens gives more tokens a second than one without drafts."""
        plain = self._without_drafts.get(sequences)
        if plain is None or not self._with_drafts:
            return True
        return tokens * plain > sequences * self.seconds(rows)
