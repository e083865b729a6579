"""Rows with what their teachers say: asked ahead, put in their places, and an end to waiting where nobody is there."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from tllm.core.errors import ConfigError
from tllm.training.data.encoder import IGNORED
from tllm.training.data.packing import PackedRow
from tllm.training.objectives.distillation import BYTES, IDS, LOG_PROBS
from tllm.training.questions import remote_answerer
from tllm.training.teachers.taught_batches import TaughtBatches
from tllm.training.teachers.teacher_messages import Answer, Lesson, unpacked
from tllm.training.teachers.teacher_pool import TeacherPool
from tllm.training.teachers.teacher_threads import LocalTeacher, TeacherQueue

LESSON = Lesson(top_k=2, temperature=1.0, vocab_size=50, vocabulary="")


class TwoRows:
    """Of each step one row of which something is predicted, and one of which nothing is."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def step(self, step: int) -> list[PackedRow]:
        self.read.append(step)
        ids = np.array([step, 7, 8])
        labels = [np.array([7, IGNORED, 9]), np.full(3, IGNORED)]
        return [PackedRow(place, ids, labels[place], np.arange(3), (1, 2), ()) for place in (0, 1)]

    def state(self, step: int) -> dict[str, Any]:
        return {"step": step}

    def restore(self, state: dict[str, Any]) -> int:
        return int(state["step"])

    def waits_for(self) -> str:
        return ""

    def interrupt(self) -> None: ...

    def close(self) -> None: ...


class Absent:
    """A teacher that cannot be reached."""

    name, trouble, bytes_read = "far:1", "no route", 0

    def close(self) -> None: ...


class AtOnce:
    """A queue whose questions are answered as they are asked: by the row's own first id."""

    name, trouble, bytes_read = "here:1", "", 0

    def __init__(self, queue: TeacherQueue) -> None:
        ask = queue.ask

        def answered(question: Any) -> Any:
            asked = ask(question)
            first = unpacked(question.ids)[0]
            log_probs = np.full((2, 3), first, dtype="<f4")
            queue.answer(asked, Answer(question.number, np.full(4, first, "<u2").tobytes(), log_probs.tobytes()), 90)
            return asked

        queue.ask = answered  # type: ignore[method-assign]

    def close(self) -> None: ...


def test_answers_stand_at_the_places_that_were_asked_for() -> None:
    rows, queue = TwoRows(), TeacherQueue("teacher")
    taught = TaughtBatches(rows, TeacherPool(LESSON, queue, [AtOnce(queue)]), max_steps=3)
    assert taught.restore(taught.state(1)) == 1
    first, second = taught.step(1)
    assert rows.read == [1, 2], "the next step's rows are asked ahead"
    assert first.of_tokens[IDS].tolist() == [[1, 1], [0, 0], [1, 1]]
    assert first.of_tokens[LOG_PROBS].tolist() == [[1, 1, 1], [0, 0, 0], [1, 1, 1]]
    assert first.of_documents[BYTES].tolist() == [45, 45]
    assert not second.of_tokens[LOG_PROBS].any() and second.of_tokens[IDS].shape == (3, 2)
    assert taught.step(2)[0].of_tokens[IDS][0].tolist() == [2, 2]
    assert rows.read == [1, 2], "there is no step 3"
    taught.close()


def test_a_run_whose_teachers_are_all_away_ends_with_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_answerer, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(remote_answerer, "LOST_SECONDS", 0.05)
    taught = TaughtBatches(TwoRows(), TeacherPool(LESSON, TeacherQueue("teacher"), [Absent()]), max_steps=1)
    with pytest.raises(ConfigError, match=r"step 1 waits for 1 row of the teachers far:1 \(no route\); none could"):
        taught.step(0)  # a ConfigError of rows is told to all ranks, which save the steps before
    taught.close()


class WithoutRoom:
    """A teacher in this process for whose numbers there is no memory, as numpy tells it."""

    name = "t"

    def refusal(self, lesson: Lesson) -> str:
        return ""

    def answer(self, question: Any, lesson: Lesson) -> Answer:
        raise MemoryError("Unable to allocate 7 bytes")


def test_a_teacher_beside_the_student_that_fails_ends_the_run() -> None:
    """And its thread does not end without a word, while the run waits for it."""
    queue = TeacherQueue("teacher")
    beside: Any = LocalTeacher(WithoutRoom(), LESSON, queue)  # type: ignore[arg-type]
    beside.start()
    taught = TaughtBatches(TwoRows(), TeacherPool(LESSON, queue, [beside]), max_steps=1)
    threading.Timer(20.0, queue.close).start()
    with pytest.raises(ConfigError, match="the teacher t cannot answer: it failed: Unable to allocate 7 bytes"):
        taught.step(0)
    taught.close()


class ThirdIsTorn(TwoRows):
    """The third step has a row that cannot be read."""

    def step(self, step: int) -> list[PackedRow]:
        if step == 2:
            raise ConfigError("rows.jsonl, line 5: no row", "repair it")
        return super().step(step)


def test_a_row_that_cannot_be_read_ends_its_own_step_and_no_earlier_one() -> None:
    """It is asked for while the step before it is taught, whose rows are all there."""
    queue = TeacherQueue("teacher")
    taught = TaughtBatches(ThirdIsTorn(), TeacherPool(LESSON, queue, [AtOnce(queue)]), 4)
    for step in (0, 1):
        assert len(taught.step(step)) == 2
    with pytest.raises(ConfigError, match="line 5"):
        taught.step(2)
