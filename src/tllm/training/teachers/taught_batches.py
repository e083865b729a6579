"""`TaughtBatches`: the rows of a job with what its teachers say of each token, asked ahead of their steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tllm.cluster.tls import data_client
from tllm.core.errors import ClusterError
from tllm.text.same_vocabulary import check_same_vocabulary
from tllm.training.data.batch_feed import StepRows
from tllm.training.data.encoder import IGNORED
from tllm.training.data.packing import PackedRow
from tllm.training.job.distillation_keys import DistillationKeys, address_of
from tllm.training.job.initial_model import InitialModel
from tllm.training.job.job import Job
from tllm.training.objectives.distillation import BYTES, IDS, LOG_PROBS
from tllm.training.teachers.question_queue import AskedRow, QuestionQueue
from tllm.training.teachers.teacher_messages import Answer, Lesson, Question, packed, unpacked
from tllm.training.teachers.teacher_model import TeacherModel, vocabulary_digest
from tllm.training.teachers.teacher_secret import teacher_identity
from tllm.training.teachers.teacher_threads import LocalTeacher, RemoteTeacher, TeacherThread

STEPS_AHEAD = 1
"""Steps whose rows are with the teachers while rank 0 waits for those of an earlier one, and the feed holds another."""

LOOK_SECONDS = 5.0
"""Between two looks whether any teacher can be reached."""

LOST_SECONDS = 500.0
"""How long the run waits where no teacher can be reached: less than other ranks wait for their rows (`LINK_SECONDS`),
so that the teacher is named and not the rank."""


def open_batches(job: Job, beginning: InitialModel) -> StepRows:
    """The rows of a job, taught where it says so. ConfigError where teacher and student do not fit each other."""
    batches = beginning.batches(job)
    if job.distill is None:
        return batches
    keys, spec = job.distill, beginning.spec
    lesson = Lesson(keys.top_k, keys.temperature, spec.vocab_size, vocabulary_digest(beginning.folder))
    queue = QuestionQueue()
    return TaughtBatches(batches, lesson, queue, _teachers(keys, lesson, queue, beginning), job.max_steps)


def _teachers(
    keys: DistillationKeys, lesson: Lesson, queue: QuestionQueue, beginning: InitialModel
) -> list[TeacherThread]:
    if keys.teacher_model_name_or_path:
        teacher = TeacherModel.open(keys.teacher_model_name_or_path, keys.teacher_dtype)
        sizes = beginning.spec.vocab_size, teacher.spec.vocab_size
        check_same_vocabulary(beginning.folder, teacher.folder, *sizes, "teacher")
        compared = msgspec.structs.replace(lesson, vocabulary=teacher.vocabulary)  # token by token: padding may differ
        return [LocalTeacher(teacher, compared, queue)]
    context = data_client(teacher_identity(Path(keys.teacher_secret), "student"))
    return [RemoteTeacher(address_of(address), context, lesson, queue) for address in keys.teachers]


class TaughtBatches:
    """`StepRows` that bring, of each token, the log-probabilities that a teacher gives (`objectives.distillation`).

    Whichever teacher is free computes the next row, alone, so that what it finds hangs on the row and on nothing else.
    """

    def __init__(
        self,
        batches: StepRows,
        lesson: Lesson,
        queue: QuestionQueue,
        teachers: Sequence[TeacherThread],
        max_steps: int,
    ) -> None:
        self._batches, self._lesson, self._queue, self._max_steps = batches, lesson, queue, max_steps
        self._teachers = list(teachers)
        self._asked: dict[int, list[tuple[PackedRow, AskedRow | None]]] = {}
        self._number = 0
        for teacher in self._teachers:
            teacher.start()

    def step(self, step: int) -> list[PackedRow]:
        """The rows of a step, when all are taught; those of the next are asked meanwhile."""
        for ahead in range(step, min(step + STEPS_AHEAD + 1, max(self._max_steps, step + 1))):
            if ahead not in self._asked:
                self._asked[ahead] = [(row, self._ask(row)) for row in self._batches.step(ahead)]
        return [self._taught(row, step, asked) for row, asked in self._asked.pop(step)]

    def state(self, step: int) -> dict[str, Any]:
        return self._batches.state(step)

    def restore(self, state: dict[str, Any]) -> int:
        self._asked.clear()
        return self._batches.restore(state)

    def waits_for(self) -> str:
        """The teachers, with what is the matter with each."""
        if not self._queue.unanswered:
            return ""
        each = ", ".join(f"{teacher.name} ({teacher.trouble or 'computing'})" for teacher in self._teachers)
        return f"{self._queue.unanswered} rows of the teachers {each}"

    def interrupt(self) -> None:
        """Whoever waits for a teacher gets an error."""
        self._queue.close()

    def close(self) -> None:
        """End the threads."""
        self._queue.close()
        for teacher in self._teachers:
            teacher.close()
        self._batches.close()

    def _ask(self, row: PackedRow) -> AskedRow | None:
        places = np.flatnonzero(row.labels != IGNORED)
        if not len(places):
            return None
        self._number += 1
        return self._queue.ask(Question(self._number, packed(row.input_ids), row.lengths, packed(places)))

    def _taught(self, row: PackedRow, step: int, asked: AskedRow | None) -> PackedRow:
        answer, nbytes = (Answer(0), 0) if asked is None else self._wait_for(asked, step)
        places, tokens = np.flatnonzero(row.labels != IGNORED), len(row.labels)
        log_probs = np.zeros((tokens, self._lesson.width), dtype="<f4")
        log_probs[places] = np.frombuffer(answer.log_probs, dtype="<f4").reshape(len(places), self._lesson.width)
        of_tokens = {**row.of_tokens, LOG_PROBS: log_probs}
        if self._lesson.top_k:
            of_tokens[IDS] = np.zeros((tokens, self._lesson.top_k), dtype="<i4")
            of_tokens[IDS][places] = unpacked(answer.ids).reshape(len(places), self._lesson.top_k)
        share = np.full(len(row.lengths), nbytes / len(row.lengths), dtype="<f8")
        return replace(row, of_tokens=of_tokens, of_documents={**row.of_documents, BYTES: share})

    def _wait_for(self, asked: AskedRow, step: int) -> tuple[Answer, int]:
        """The answer. ClusterError where no teacher can be reached for LOST_SECONDS."""
        reached = time.monotonic()
        while True:
            try:
                return asked.answered.result(timeout=LOOK_SECONDS)
            except TimeoutError:
                now = time.monotonic()
                if any(not teacher.trouble for teacher in self._teachers):
                    reached = now
                if now - reached > LOST_SECONDS:
                    raise ClusterError(
                        f"step {step + 1} waits for {self.waits_for()}; none could be reached "
                        f"for {now - reached:.0f} s",
                        "start the teachers again: the run goes on from its last save",
                    ) from None
