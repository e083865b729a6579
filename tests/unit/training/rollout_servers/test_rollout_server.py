"""A rollout server: what it refuses, and what a run makes of one that it cannot use or believe."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.training.post_training.policy_task import CONFIG, grpo, policy_job, write_task, write_tokenizer
from tests.support.training.post_training.rollout_servers import RolloutServer, sampling
from tests.support.training.post_training.teachers import address_of
from tests.support.training.runs import train
from tllm.cluster.tls import data_client
from tllm.core.errors import AuthError, ClusterError, ConfigError, FrameError
from tllm.node.roles.rollout_model import RolloutModel
from tllm.spec.plan import Plan
from tllm.text.same_vocabulary import vocabulary_digest
from tllm.training.job.job import Job, encode_job
from tllm.training.job.lora_job import LoraJob
from tllm.training.policy.rollouts import Completion, CompletionSampling, PromptGroup
from tllm.training.questions.answerer_places import AnswererPlace
from tllm.training.questions.run_connection import RunConnection
from tllm.training.questions.shared_secret import shared_identity
from tllm.training.rollout_servers.published_weights import PublishedWeights, ServerConnection
from tllm.training.rollout_servers.rollout_inquirer import RolloutInquirer, portions
from tllm.training.rollout_servers.rollout_messages import (
    SAMPLING,
    PromptGroups,
    RolloutAnswer,
    RolloutQuestion,
    RolloutRun,
    WeightBytes,
    WeightHashes,
)
from tllm.training.rollout_servers.weight_chunks import sha256

AS_ASKED = CompletionSampling(max_tokens=8)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("task")
    write_task(folder)
    return folder


@pytest.fixture
def server(task: Path, tmp_path: Path) -> Iterator[RolloutServer]:
    with sampling(task, tmp_path / "key") as one:
        yield one


def elsewhere(task: Path, run: Path, secret: Path, *addresses: str, **more: Any) -> Job:
    return policy_job(task, run, grpo(task, rollout_servers=addresses, rollout_secret=str(secret)), **more)


def introduction(task: Path, **more: Any) -> RolloutRun:
    job = policy_job(task, task / "run")
    return RolloutRun(encode_job(job), json.dumps({**CONFIG, **more}), vocabulary_digest(task))


def dial(server: RolloutServer, secret: Path) -> ServerConnection:
    return RunConnection.dial(
        SAMPLING, AnswererPlace("here", server.address), data_client(shared_identity(secret, "policy", "tllm rollout"))
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(config=json.dumps({**CONFIG, "intermediate_size": 96})), "its model is another:"),
        (dict(config=json.dumps({**CONFIG, "vocab_size": 20})), "vocab_size is 16 and the run's 20"),
        (dict(vocabulary="0123456789abcdef"), "its tokens are others: the digests of the two tokenizers are"),
    ],
)
def test_a_run_of_another_model_is_refused(
    change: dict[str, str], reason: str, task: Path, server: RolloutServer, tmp_path: Path
) -> None:
    connection = dial(server, tmp_path / "key")
    assert reason in connection.introduce(msgspec.structs.replace(introduction(task), **change)).refused
    connection.close()


def test_a_deterministic_run_is_sampled_for_by_stages_alone(task: Path) -> None:
    cut = replace(RolloutModel.open(str(task)), plan=Plan.parse("tp=2", 2))
    run = introduction(task)
    assert cut.refusal(run) == ""
    job = msgspec.json.decode(run.job) | {"deterministic": True}
    told = cut.refusal(msgspec.structs.replace(run, job=msgspec.json.encode(job).decode()))
    assert told.startswith("its plan is pp=1,tp=2,layers=2 and the run is deterministic: ")


def test_an_adapter_for_another_base_is_refused(task: Path, tmp_path: Path) -> None:
    run = introduction(task)
    job = msgspec.json.decode(run.job)
    job |= dict(config_name=None, tokenizer_name=None, model_name_or_path=str(task), lora=LoraJob(r=2))
    run = RolloutRun(msgspec.json.encode(job).decode(), run.config, run.vocabulary, base="0123456789abcdef")
    with pytest.raises(ConfigError, match="has no weights of the model beside it"):
        RolloutModel.open(str(task)).open_session(run)
    train(policy_job(task, tmp_path / "run", max_steps=2), "pp=1")
    with pytest.raises(ConfigError, match=r"its weights beside the adapter are others: .* and 0123456789abcdef"):
        RolloutModel.open(str(tmp_path / "run" / "final")).open_session(run)


BAD: list[tuple[RolloutQuestion, str]] = [
    (WeightHashes(b"", b""), "other names, shapes or types"),
    (WeightBytes((0,), (b"1",)), "without hashes"),
    (PromptGroups(7, b"", (PromptGroup((1,), (1,)),), (0,), AS_ASKED), "weights that are not those that were sent"),
]


def test_questions_that_are_none_are_answered_with_the_reason(
    task: Path, server: RolloutServer, tmp_path: Path
) -> None:
    connection = dial(server, tmp_path / "key")
    assert connection.introduce(introduction(task)).refused == ""
    for question, reason in BAD:
        connection.send_question(question)
        assert reason in connection.receive_answer()[0].error
    session = RolloutModel.open(str(task)).open_session(introduction(task))
    root = session._weights.root
    for group in (PromptGroup((), (1,)), PromptGroup((1,), ()), PromptGroup((1,) * 9, (1,)), PromptGroup((16,), (1,))):
        with pytest.raises(FrameError, match="a prompt"):
            session.answer(PromptGroups(1, root, (group,), (0,), AS_ASKED))
    session.close()
    connection.close()


def test_chunks_that_are_on_their_way_are_not_told_again_with_each_of_them(task: Path) -> None:
    """All were compared and told after every 32 MiB: for 140 GB that took longer than a fast network."""
    session = RolloutModel.open(str(task)).open_session(introduction(task))
    table = session._weights.table
    contents = [b"7" * (place.stop - place.start) for place in table.places]
    hashes = b"".join(map(sha256, contents))
    first, *others = session.answer(WeightHashes(table.digest, hashes)).lacking
    assert others and session.answer(WeightBytes((first,), (contents[first],))) == RolloutAnswer()
    session.answer(WeightBytes(tuple(others), tuple(contents[number] for number in others)))
    assert session._weights.root == table.root(hashes)
    session.close()


def test_a_run_that_is_refused_or_not_trusted_ends_with_one_line(
    task: Path, server: RolloutServer, tmp_path: Path
) -> None:
    shared_identity(tmp_path / "other", "rollout", "tllm rollout", make=True)
    with pytest.raises(ConfigError, match=r"the rollout server at .* and this run do not trust each other"):
        train(elsewhere(task, tmp_path / "a", tmp_path / "other", address_of(server)), "pp=1")
    with pytest.raises(AuthError, match="cannot read the secret"):
        train(elsewhere(task, tmp_path / "b", tmp_path / "none", address_of(server)), "pp=1")
    wide = tmp_path / "wide"
    shutil.copytree(task, wide)
    (wide / "config.json").write_text(json.dumps({**CONFIG, "intermediate_size": 96}))
    write_tokenizer(wide)
    with pytest.raises(ConfigError, match=r"at .* cannot sample for this run: its model is another"):
        train(elsewhere(wide, tmp_path / "c", tmp_path / "key", address_of(server)), "dp=2")


INQUIRER = RolloutInquirer(RolloutRun("", "", ""), PublishedWeights(dict), vocab_size=15, eos_ids=(0,))
ASKED = PromptGroups(3, b"", (PromptGroup((1, 2), (7, 8)),), (14,), AS_ASKED)
ENDED, CUT = Completion((5, 0), (-1.0, -0.5), False), Completion((5,) * 8, (-1.0,) * 8, True)


def test_an_answer_that_can_be_true_is_taken() -> None:
    for pair in ((ENDED, CUT), (Completion((14,), (0.0,), False), Completion((0,) * 8, (-1.0,) * 8, False))):
        answer = RolloutAnswer(3, completions=pair)
        assert INQUIRER.checked(answer, ASKED, "there") is answer


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (RolloutAnswer(3, error="out of memory"), "cannot sample: out of memory"),
        (RolloutAnswer(4, completions=(ENDED, CUT)), "answers question 4 with 2 completions, and question 3"),
        (RolloutAnswer(3, completions=(ENDED,)), "with 1 completions, and question 3 asks for 2"),
        (Completion((5, 0), (-1.0,), False), "has 2 tokens and 1 log-probabilities"),
        (Completion((), (), True), "has 0 tokens, and 1 to 8 were asked for"),
        (Completion((5,) * 9, (-1.0,) * 9, True), "has 9 tokens, and 1 to 8 were asked for"),
        (Completion((5, 15), (-1.0, -1.0), False), "has token 15, of a vocabulary of 15"),
        (Completion((-1, 0), (-1.0, -1.0), False), "has token -1, of a vocabulary of 15"),
        (Completion((5, 0), (-1.0, float("nan")), False), "has log-probabilities that are none"),
        (Completion((5, 0), (-1.0, float("-inf")), False), "has log-probabilities that are none"),
        (Completion((5, 0), (-1.0, 0.5), False), "has log-probabilities that are none"),
        (Completion((5, 5), (-1.0, -1.0), True), "is cut off after 2 tokens, and 8 were asked for"),
        (Completion((5, 5), (-1.0, -1.0), False), "ends with token 5, which ends no reply"),
    ],
)
def test_an_answer_that_cannot_be_true_ends_the_run(answer: RolloutAnswer | Completion, reason: str) -> None:
    told = answer if isinstance(answer, RolloutAnswer) else RolloutAnswer(3, completions=(ENDED, answer))
    with pytest.raises(ClusterError) as caught:
        INQUIRER.checked(told, ASKED, "there")
    assert reason in caught.value.message and "there" in caught.value.message


class Wrong:
    """A model whose sessions change what they answer."""

    def __init__(self, served: RolloutModel) -> None:
        self.served, self.name = served, served.name

    def open_session(self, run: RolloutRun) -> Any:
        session = self.served.open_session(run)
        answer = session.answer

        def answered(question: RolloutQuestion) -> RolloutAnswer:
            found = answer(question)
            return msgspec.structs.replace(found, completions=found.completions[:-1])

        session.answer = answered  # type: ignore[method-assign]
        return session


def test_a_server_that_leaves_completions_out_costs_no_step(task: Path, tmp_path: Path) -> None:
    train(policy_job(task, tmp_path / "run", max_steps=2), "pp=1")
    with sampling(task, tmp_path / "key", Wrong(RolloutModel.open(str(task)))) as one:
        job = elsewhere(task, tmp_path / "run", tmp_path / "key", address_of(one))
        with pytest.raises(ConfigError, match=r"answers question 1 with 15 completions, and question 1 asks for 16"):
            train(job, "pp=1")
    assert (tmp_path / "run" / "step-2").is_dir()


class OutOfMemory:
    """A model whose sessions, or whose making, fail as torch does, or numpy."""

    def __init__(self, served: RolloutModel, at_once: bool, kind: type[Exception]) -> None:
        self.served, self.name, self.at_once, self.kind = served, served.name, at_once, kind

    def open_session(self, run: RolloutRun) -> Any:
        if self.at_once:
            raise self.kind("no memory\nof 7 bytes")
        session = self.served.open_session(run)
        answer = session.answer

        def answered(question: RolloutQuestion) -> RolloutAnswer:
            if isinstance(question, PromptGroups):
                raise self.kind("no memory\nof 7 bytes")
            return answer(question)

        session.answer = answered  # type: ignore[method-assign]
        return session


@pytest.mark.parametrize(("at_once", "kind"), [(True, RuntimeError), (False, RuntimeError), (False, MemoryError)])
def test_a_server_that_fails_says_why_in_one_line(
    at_once: bool, kind: type[Exception], task: Path, tmp_path: Path
) -> None:
    with sampling(task, tmp_path / "key", OutOfMemory(RolloutModel.open(str(task)), at_once, kind)) as one:
        job = elsewhere(task, tmp_path / "run", tmp_path / "key", address_of(one))
        with pytest.raises(ConfigError, match=r"cannot sample.*: it failed: no memory(\n|$)"):
            train(job, "pp=1")


@pytest.mark.parametrize(
    ("groups", "servers", "at_once", "sizes"),
    [
        (4, 2, 32, [2, 2]),
        (5, 2, 32, [3, 2]),
        (5, 2, 8, [2, 2, 1]),
        (3, 8, 32, [1, 1, 1]),
        (2, 1, 1, [1, 1]),
        (0, 2, 8, []),
    ],
)
def test_groups_are_shared_out_whole(groups: int, servers: int, at_once: int, sizes: list[int]) -> None:
    every = [PromptGroup((number,), (1, 2, 3, 4)) for number in range(groups)]
    found = list(portions(every, servers, at_once))
    assert [len(one) for one in found] == sizes and [group for one in found for group in one] == every
