"""Rows that wait for teachers: none is lost, none is answered twice, and nobody waits for ever."""

from __future__ import annotations

import threading

import pytest

from tllm.core.errors import ClusterError
from tllm.training.questions.question_queue import MOST_LOSSES
from tllm.training.teachers.teacher_messages import Answer, Question
from tllm.training.teachers.teacher_threads import TeacherQueue


def question(number: int) -> Question:
    return Question(number, b"", (1,), b"")


def test_rows_of_a_lost_teacher_are_the_next_in_their_order() -> None:
    queue = TeacherQueue("teacher")
    for number in range(5):
        queue.ask(question(number))
    lost = [queue.take(), queue.take()]
    queue.give_back([row for row in lost if row])
    taken = [queue.take() for _ in range(5)]
    assert [row.question.number for row in taken if row] == [0, 1, 2, 3, 4]
    assert queue.take(wait=False) is None and queue.unanswered == 5
    assert [row.times_given_back for row in taken if row] == [1, 1, 0, 0, 0]


def test_a_row_that_no_teacher_survives_is_not_asked_for_ever() -> None:
    queue = TeacherQueue("teacher")
    asked, other = queue.ask(question(1)), queue.ask(question(2))
    for _ in range(MOST_LOSSES):
        assert not asked.answered.done()
        taken = queue.take()
        assert taken is asked
        queue.give_back([taken])
    for row in (asked, other):
        with pytest.raises(ClusterError, match="10 times a teacher was lost that had the same question"):
            row.answered.result(0)


def test_the_second_answer_to_a_row_is_dropped() -> None:
    queue = TeacherQueue("teacher")
    asked = queue.ask(question(1))
    queue.answer(asked, Answer(1, b"a"), 10)
    queue.answer(asked, Answer(1, b"b"), 20)
    assert asked.answered.result(0) == (Answer(1, b"a"), 10) and queue.unanswered == 0


def test_who_waits_gets_the_first_error_and_so_does_who_asks_later() -> None:
    queue, taken = TeacherQueue("teacher"), []
    asked = queue.ask(question(1))
    queue.take()
    waiting = threading.Thread(target=lambda: taken.append(queue.take()))
    waiting.start()
    queue.fail(ClusterError("the first"))
    queue.close()
    waiting.join(20)
    assert taken == [None] and queue.is_over
    for row in (asked, queue.ask(question(2))):
        with pytest.raises(ClusterError, match="the first"):
            row.answered.result(0)
    queue.answer(asked, Answer(1), 0)  # too late, and nobody minds
