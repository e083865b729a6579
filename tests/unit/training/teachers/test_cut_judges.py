"""Teachers and reward models cut by a plan say what the whole model says, and read no more than their part."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import pytest

from tests.support.models.families import save_model
from tests.support.training.local_links import local_links
from tests.unit.training.reward_models.test_reward_model import write_reward_model
from tllm.core.errors import ConfigError
from tllm.spec.hf_config import read_config
from tllm.spec.plan import Plan
from tllm.spec.process_groups import computing
from tllm.training.job.distillation_keys import DistillationKeys
from tllm.training.job.job import Job
from tllm.training.job.job_parts import role_plan
from tllm.training.questions.answering_model import AnsweringModel
from tllm.training.reward_models.reward_messages import ScoringRun, TextToScore
from tllm.training.reward_models.reward_model import RewardModel
from tllm.training.step.frozen_model import FrozenModel
from tllm.training.step.rank_groups import groups_of
from tllm.training.teachers.teacher_messages import Answer, Lesson, Question, packed
from tllm.training.teachers.teacher_model import TeacherModel
from tllm.weights.byte_source import LocalFiles, RemoteFiles

Found = TypeVar("Found")
VOCAB = 101


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("teacher")
    save_model("llama", made, num_hidden_layers=4, vocab_size=VOCAB)
    return made


def parts(folder: Path, text: str) -> tuple[list[FrozenModel], list[int]]:
    """Of each rank of a plan, and the bytes of the files that each has read."""
    config, plan, read = read_config(folder), Plan.parse(text, read_config(folder)["num_hidden_layers"]), list[int]()
    links = local_links(plan)
    files = {path.name: path.stat().st_size for path in folder.glob("*.safetensors")}

    def part(rank: int) -> FrozenModel:
        own = {wire: link for wire, link in links.items() if rank in (wire.source, wire.target)}

        def ask(file: str, start: int, stop: int) -> bytes:
            read[rank] += stop - start
            with (folder / file).open("rb") as opened:
                opened.seek(start)
                return opened.read(stop - start)

        read.append(0)
        return FrozenModel.load(config, RemoteFiles(ask, files), "float64", plan, rank, groups_of(plan, rank, own))

    return [part(rank) for rank in computing(plan)], read


def together(calls: list[Callable[[], Found]]) -> Found:
    """What the first rank says while all make the same call."""
    with ThreadPoolExecutor(len(calls)) as pool:
        found = [future.result() for future in [pool.submit(call) for call in calls]]
    return found[0]


LESSONS = (
    Lesson(0, 0.7, VOCAB, "v"),
    Lesson(9, 1.0, VOCAB, "v", hidden_states=(-1, 0, 2), hidden_size=64, hidden_state_dtype="float64"),
    Lesson(20, 1.3, 97, "v", kl_budget=0.5),
)


@pytest.mark.parametrize("text", ["pp=3", "tp=2", "pp=2,tp=1+3"])
def test_a_teacher_says_the_same_cut_by_any_plan(folder: Path, text: str) -> None:
    every, read = parts(folder, text)
    whole = TeacherModel("t", FrozenModel.load(read_config(folder), LocalFiles(folder), "float64"), "v")
    ids = np.random.default_rng(1).integers(0, VOCAB, 23)
    question = Question(1, packed(ids), (9, 14), packed(np.array([0, 3, 8, 11, 22])))
    for lesson in LESSONS:
        lesson = msgspec.structs.replace(lesson, hidden_size=whole.spec.hidden_size)
        want = whole.answer(question, lesson)
        teachers = [TeacherModel("t", part, "v") for part in every]
        got: Answer = together([partial(teacher.answer, question, lesson) for teacher in teachers])
        assert (got.error, got.ids, got.counts) == ("", want.ids, want.counts) and len(got.log_probs) > 0
        mine, theirs = (np.frombuffer(answer.log_probs, "<f4") for answer in (got, want))
        np.testing.assert_allclose(mine, theirs, rtol=1e-6)
        mine, theirs = (np.frombuffer(answer.hidden_states, "<f8") for answer in (got, want))
        np.testing.assert_allclose(mine, theirs, rtol=1e-9, atol=1e-12)
        assert bool(want.hidden_states) == bool(lesson.hidden_states) and abs(got.lost - want.lost) < 1e-12
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    if "pp" in text:  # columns of so small tensors are read with what lies between them
        assert max(read) < 0.75 * size, "each rank asks for its own ranges alone"


def test_a_reward_model_says_the_same_cut_by_any_plan(tmp_path: Path) -> None:
    write_reward_model(tmp_path)
    whole = RewardModel.open("r", AnsweringModel.find_scoring(str(tmp_path)), "float64")
    text = TextToScore(3, np.arange(1, 12, dtype="<i4").tobytes())
    for plan in ("pp=2", "tp=2"):
        models = [RewardModel("r", part) for part in parts(tmp_path, plan)[0]]
        got = together([partial(model.answer, text) for model in models])
        want = whole.answer(text)
        assert (got.number, got.error) == (3, "") and want.score and abs(got.score - want.score) < 1e-12


def test_a_deterministic_run_is_answered_by_stages_alone(folder: Path, tmp_path: Path) -> None:
    """Whoever chose the plan: `tllm teach --plan` is in no job."""
    write_reward_model(tmp_path)
    for text, reason in (("pp=2", ""), ("tp=2", "its plan is pp=1,tp=2,layers=")):
        teacher = TeacherModel("t", parts(folder, text)[0][0], "v")
        reward = RewardModel("r", parts(tmp_path, text)[0][0])
        for told in (
            teacher.refusal(Lesson(5, 1.0, VOCAB, "v", deterministic=True)),
            reward.refusal(ScoringRun(reward.spec.vocab_size, deterministic=True)),
        ):
            assert told.startswith(reason) and bool(told) == bool(reason)
        assert not teacher.refusal(Lesson(5, 1.0, VOCAB, "v"))
        assert not reward.refusal(ScoringRun(reward.spec.vocab_size))


def test_plans_that_answer_for_no_single_row_are_refused() -> None:
    def job(text: str) -> Job:
        keys: Any = dict(teacher_model_name_or_path="t", teacher_nodes=(2,), teacher_plan=text)
        return Job("run", ("a",), max_steps=1, model_name_or_path="m", task="distill", distill=DistillationKeys(**keys))

    assert role_plan(job("pp=2"), "teacher", 4).world_size == 2
    for text, key in (("dp=2", "dp"), ("cp=2", "cp"), ("tp=2,sequence=true", "sequence")):
        with pytest.raises(ConfigError, match=f"distill.teacher_plan: plan .* gives {key}, and one copy"):
            job(text)
