"""A run looks before anything else whether the programs that its job names trust it."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from pathlib import Path

import pytest

from tests.support.models.families import save_model
from tests.support.training.post_training.policy_task import grpo, policy_job, write_task
from tests.support.training.post_training.rollout_servers import sampling
from tests.support.training.post_training.teachers import address_of, serving
from tests.support.training.runs import job_for
from tllm.api.trainer import Trainer
from tllm.core.errors import AuthError
from tllm.training.answerer_trust import LOOK_SECONDS, check_trust
from tllm.training.job.distillation_keys import DistillationKeys
from tllm.training.job.job import Job


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("task")
    write_task(made)
    save_model("llama", made / "model")
    secret(made / "other")
    return made


def secret(file: Path) -> Path:
    """One that nothing else has."""
    file.write_text(os.urandom(32).hex())
    file.chmod(0o600)
    return file


def wait_for_threads(name: str) -> None:
    """Until no thread of this process has the name any more."""
    deadline = time.monotonic() + 30
    while any(thread.name == name for thread in threading.enumerate()):  # one that is about to start cannot be joined
        assert time.monotonic() < deadline
        time.sleep(0.01)


def sampled(folder: Path, key: Path, *addresses: str) -> Job:
    return policy_job(folder, folder / "run", grpo(folder, rollout_servers=addresses, rollout_secret=str(key)))


def test_servers_with_another_secret_are_named_before_anything_is_made(folder: Path, tmp_path: Path) -> None:
    """One of two, of which the other does trust the run; and it hears nothing that it would warn of."""
    with sampling(folder, tmp_path / "key") as mine, sampling(folder, folder / "other") as other:
        check_trust(sampled(folder, tmp_path / "key", address_of(mine)))
        keys = {
            **dict(config_name=str(folder / "config.json"), tokenizer_name=str(folder / "tokenizer.json")),
            **dict(train_files=[str(folder / "prompts.jsonl")], output_dir=str(tmp_path / "run"), task="grpo"),
            **dict(max_steps=1, seq_len=16, global_batch_size=16),
            "grpo": {
                **dict(reward_funcs=[f"{folder / 'rewards.py'}:closeness"], num_generations=4),
                **dict(max_completion_length=8, rollout_secret=str(tmp_path / "key")),
                "rollout_servers": [address_of(mine), address_of(other)],
            },
        }
        trainer = Trainer(keys)
        with pytest.raises(AuthError, match=rf"{address_of(other)} and this run do not trust each other") as caught:
            trainer.train()
    assert "same file of the secret" in caught.value.hint and not (tmp_path / "run").exists()


def test_a_server_that_is_looked_at_and_trusted_warns_of_nothing(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor does it tell that a run is gone, of one that it never served."""
    caplog.set_level(logging.INFO, "tllm.answers")
    with sampling(folder, tmp_path / "key") as server:
        check_trust(sampled(folder, tmp_path / "key", address_of(server)))
        wait_for_threads("tllm run")
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING or "is gone" in one.message]


def test_teachers_with_another_secret_are_named(folder: Path, tmp_path: Path) -> None:
    with serving(folder / "model", tmp_path / "key") as teacher:

        def job(key: Path) -> Job:
            keys = DistillationKeys(teachers=(address_of(teacher),), teacher_secret=str(key))
            return job_for(folder / "model", tmp_path / "run", task="distill", distill=keys)

        check_trust(job(tmp_path / "key"))
        with pytest.raises(AuthError, match=r"the teacher at .* do not trust each other"):
            check_trust(job(folder / "other"))


@pytest.mark.parametrize(
    ("content", "line"),
    [(None, "cannot read the secret"), ("short", "has 5 characters, of at least 32")],
)
def test_a_secret_that_is_none_is_told(content: str | None, line: str, folder: Path, tmp_path: Path) -> None:
    key = tmp_path / "key"
    if content is not None:
        key.write_text(content)
        key.chmod(0o600)
    with pytest.raises(AuthError, match=line):
        check_trust(sampled(folder, key, "127.0.0.1:1"))


def test_who_cannot_be_reached_is_left_to_the_run(folder: Path, tmp_path: Path) -> None:
    """Nobody listens, or somebody who says nothing: no fault, and none is waited for longer than for all."""
    silent = [socket.create_server(("127.0.0.1", 0)) for _ in range(40)]
    addresses = ["127.0.0.1:1", *(f"127.0.0.1:{one.getsockname()[1]}" for one in silent)]
    began = time.monotonic()
    check_trust(sampled(folder, secret(tmp_path / "key"), *addresses))
    assert time.monotonic() - began < 20 * LOOK_SECONDS, "one after the other, they would take 40 times as long"
    for one in silent:
        one.close()
