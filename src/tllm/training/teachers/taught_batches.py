"""`TaughtBatches`: the rows of a job with its teachers' answers for each token, asked ahead of the steps."""

from __future__ import annotations

import contextlib
from typing import Any

from tllm.core.errors import ConfigError
from tllm.training.data.batch_feed import StepRows
from tllm.training.data.packing import PackedRow
from tllm.training.job.initial_model import InitialModel
from tllm.training.job.job import Job
from tllm.training.questions.answerer_pool import ClusterAnswerers
from tllm.training.questions.stop_signal import StopSignal
from tllm.training.questions.waiting_ranks import Still
from tllm.training.teachers.teacher_pool import TeacherPool
from tllm.training.teachers.teacher_threads import AskedRow

STEPS_AHEAD = 1
"""Steps whose rows are with the teachers while rank 0 waits for those of an earlier one, and the feed holds another."""


def open_batches(
    job: Job, beginning: InitialModel, cluster: ClusterAnswerers | None, stop: StopSignal, still: Still
) -> StepRows:
    """The rows of a job, taught where it says so. ConfigError where teacher and student do not fit each other."""
    batches = beginning.batches(job)
    if job.distill is None:
        return batches
    return TaughtBatches(batches, TeacherPool.open(job, beginning, cluster, stop, still), job.max_steps)


class TaughtBatches:
    """`StepRows` that bring, of each token, the log-probabilities that a teacher gives (`objectives.distillation`)."""

    def __init__(self, batches: StepRows, teachers: TeacherPool, max_steps: int) -> None:
        self._batches, self._teachers, self._max_steps = batches, teachers, max_steps
        self._asked: dict[int, list[tuple[PackedRow, AskedRow | None]]] = {}

    def step(self, step: int) -> list[PackedRow]:
        """The rows of a step, when all are taught; those of the next are asked meanwhile."""
        self._ask(step)
        for ahead in range(step + 1, min(step + STEPS_AHEAD + 1, self._max_steps)):
            with contextlib.suppress(ConfigError):  # a row that cannot be read is told in its own step
                self._ask(ahead)
        return [self._teachers.taught(row, asked, step) for row, asked in self._asked.pop(step)]

    def _ask(self, step: int) -> None:
        if step not in self._asked:
            self._asked[step] = [(row, self._teachers.ask(row)) for row in self._batches.step(step)]

    def state(self, step: int) -> dict[str, Any]:
        return self._batches.state(step)

    def restore(self, state: dict[str, Any]) -> int:
        self._asked.clear()
        return self._batches.restore(state)

    def waits_for(self) -> str:
        """The teachers, with what is the matter with each."""
        return self._teachers.waits_for()

    def interrupt(self) -> None:
        """Whoever waits for a teacher gets an error."""
        self._teachers.interrupt()

    def close(self) -> None:
        """End the threads."""
        self._teachers.close()
        self._batches.close()
