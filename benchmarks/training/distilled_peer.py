"""Other sides of `benchmarks.training.distillation`: `python -m benchmarks.training.distilled_peer WHAT JOB …`.

`keep` asks the job's teacher for each of its rows once and writes the answers to a file. `ask` asks for the rows again
and again, does nothing with the answers, and writes when each came. `replay` is a teacher that has all answers at hand.
`student` is the trainer of the job in this process, with shorter queues than tllm's.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Iterator
from itertools import chain, repeat
from pathlib import Path

import msgspec
import torch

from tllm.cluster.tls import data_server
from tllm.core.memory import LARGEST_TRAINED, keep_freed_memory
from tllm.core.program import reexecute_to_compute
from tllm.spec.plan import Plan
from tllm.training.data.packing import PackedRow
from tllm.training.job.initial_model import open_initial_model
from tllm.training.job.job import Job
from tllm.training.job.job_file import read_job
from tllm.training.questions.question_server import QuestionServer
from tllm.training.questions.shared_secret import shared_identity
from tllm.training.questions.stateless_session import StatelessSession
from tllm.training.questions.stop_signal import StopSignal
from tllm.training.state.initial_weights import InitialWeights
from tllm.training.step.rank_groups import Groups, RankConfig
from tllm.training.teachers import taught_batches
from tllm.training.teachers.teacher_messages import TEACHING, Answer, Lesson, Question
from tllm.training.teachers.teacher_pool import TeacherPool
from tllm.training.teachers.teacher_threads import AskedRow, TeacherInquirer
from tllm.training.trainer import RankTrainer
from tllm.weights.byte_source import LocalFiles

AHEAD = 8
"""Rows that `ask` has asked for and has no answer to: two steps' rows, as a run has them."""


class KeptAnswer(msgspec.Struct, frozen=True, array_like=True):
    """An answer with the question that it is to."""

    question: Question
    answer: Answer


KEPT = msgspec.msgpack.Decoder(list[KeptAnswer])


class Replay:
    """An `Answerer` that computes nothing."""

    name = "kept answers"

    def __init__(self, kept: list[KeptAnswer]) -> None:
        self._answers = {(one.question.ids, one.question.places): one.answer for one in kept}

    def open_session(self, introduction: Lesson) -> StatelessSession[Question, Answer]:
        return StatelessSession(lambda question: None, self.answer, _failed)

    def answer(self, question: Question) -> Answer:
        """What was answered to the same row at the same places."""
        return msgspec.structs.replace(self._answers[question.ids, question.places], number=question.number)


def main() -> None:
    reexecute_to_compute()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("keep", "ask", "replay", "student"))
    parser.add_argument("job", type=Path)
    parser.add_argument("--rows", type=int, default=0, help="that the job's file has")
    parser.add_argument("--answers", type=Path, help="file of `keep` and `replay`")
    parser.add_argument("--times", type=Path, help="file of `ask`")
    parser.add_argument("--address", help="HOST:PORT of `replay`")
    parser.add_argument("--in-flight", type=int, default=1, help="rows that a teacher of `student` has at a time")
    options = parser.parse_args()
    torch.set_num_threads(1)
    job = read_job(options.job).job
    if options.what == "keep":
        options.answers.write_bytes(msgspec.msgpack.encode(list(keep(job, options.rows))))
    elif options.what == "ask":
        ask(job, options.rows, options.times)
    elif options.what == "replay":
        replay(job, options.answers, options.address)
    else:
        train(job, options.in_flight)


def keep(job: Job, rows: int) -> Iterator[KeptAnswer]:
    """The answer to each row of the job."""
    pool = pool_of(job)
    for asked in [_asked(pool, row) for row in rows_of(job, rows)]:
        yield KeptAnswer(asked.question, asked.answered.result()[0])
    pool.close()


def ask(job: Job, rows: int, times: Path) -> None:
    """Until this process is ended."""
    pool, waiting = pool_of(job), deque[AskedRow]()
    with times.open("w") as out:
        for row in chain.from_iterable(repeat(list(rows_of(job, rows)))):
            waiting.append(_asked(pool, row))
            if len(waiting) == AHEAD:
                waiting.popleft().answered.result()
                print(time.time(), file=out, flush=True)


def replay(job: Job, answers: Path, address: str) -> None:
    """Until this process is ended."""
    assert job.distill is not None, "the job has a teacher"
    identity = shared_identity(Path(job.distill.teacher_secret), "teacher", "tllm teach")
    host, port = address.rsplit(":", 1)
    teacher = Replay(KEPT.decode(answers.read_bytes()))
    QuestionServer(teacher, TEACHING, (host, int(port)), data_server(identity)).serve()


def train(job: Job, in_flight: int) -> None:
    """The job, asking for a step's rows when the step before begins, and so many rows at a time."""
    taught_batches.STEPS_AHEAD = 0
    TeacherInquirer.in_flight = in_flight
    keep_freed_memory(LARGEST_TRAINED)
    beginning = open_initial_model(job)
    assert beginning.weights is not None, "the student has a folder"
    config = RankConfig(job, Plan.parse("pp=1", beginning.spec.num_layers), beginning.spec, 0, Groups())
    trainer = RankTrainer(config, InitialWeights(LocalFiles(beginning.weights)), beginning)
    trainer.prepare()
    trainer.run(lambda event: None)
    trainer.close()


def rows_of(job: Job, rows: int) -> Iterator[PackedRow]:
    """The first rows of the job, as a run reads them."""
    batches = open_initial_model(job).batches(job)
    for step in range(rows // job.global_batch_size):
        yield from batches.step(step)
    batches.close()


def pool_of(job: Job) -> TeacherPool:
    return TeacherPool.open(job, open_initial_model(job), None, StopSignal())


def _asked(pool: TeacherPool, row: PackedRow) -> AskedRow:
    asked = pool.ask(row)
    assert asked is not None, "every row has something to learn"
    return asked


def _failed(question: Question, reason: str) -> Answer:
    return Answer(question.number, error=reason)


if __name__ == "__main__":
    main()
