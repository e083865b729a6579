"""A reward model beside the trainer and on nodes: its scores, the texts that it is given, and nodes that are lost."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.support.training.post_training.policy_task import CONFIG, write_tokenizer
from tests.support.training.post_training.teachers import in_a_thread
from tllm.cluster.certificates import Authority
from tllm.cluster.tls import data_client, data_server
from tllm.core.errors import ConfigError
from tllm.training.job.rollout_keys import GRPOConfig
from tllm.training.questions.answerer_places import AnswererPlace
from tllm.training.questions.answerer_pool import ClusterAnswerers
from tllm.training.questions.answering_model import AnsweringModel
from tllm.training.questions.question_server import QuestionServer
from tllm.training.questions.stop_signal import StopSignal
from tllm.training.reward_models.model_rewards import ModelRewards
from tllm.training.reward_models.reward_messages import SCORING, ScoringRun, TextScore, TextToScore
from tllm.training.reward_models.reward_model import RewardModel

TEXTS: dict[str, Any] = {"prompts": ["3=", "1=", "12="], "completions": ["aaa", "ab", "()" * 9]}
CHAT = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}"


def write_reward_model(folder: Path, labels: int = 1) -> None:
    """A random one of the task's characters."""
    torch.manual_seed(7)
    shape = {key: value for key, value in CONFIG.items() if key not in ("architectures", "initializer_range")}
    kinds: Any = transformers
    config = kinds.LlamaConfig(**shape, num_labels=labels, initializer_range=0.3)
    config.pad_token_id = 0
    kinds.LlamaForSequenceClassification(config).save_pretrained(folder)
    write_tokenizer(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("reward")
    write_reward_model(made)
    return made


def keys(folder: Path, **more: Any) -> GRPOConfig:
    return GRPOConfig(reward_model_name_or_path=str(folder), **more)


def here(folder: Path, **more: Any) -> ModelRewards:
    found = ModelRewards.open(keys(folder, **more), None, StopSignal(), deterministic=False)
    assert found is not None
    return found


@contextlib.contextmanager
def on_nodes(folder: Path, *models: Any) -> Iterator[ModelRewards]:
    """The same on a node for each model."""
    authority = Authority.create()
    cluster = ClusterAnswerers(data_client(authority.identity("first")))
    with contextlib.ExitStack() as stack:
        places = []
        for number, model in enumerate(models):
            server = QuestionServer(model, SCORING, ("127.0.0.1", 0), data_server(authority.identity(f"n{number}")))
            stack.enter_context(in_a_thread(server))
            places.append(AnswererPlace(f"n{number}", server.address, f"n{number}"))
            model.server = server
        cluster.places.tell("reward", places)
        config = keys(folder, reward_nodes=(len(models),))
        rewards = ModelRewards.open(config, cluster, StopSignal(), deterministic=False)
        assert rewards is not None
        yield rewards
        rewards.close()


class Dying:
    """A model whose node is lost with the `at`th text that it is asked."""

    def __init__(self, folder: Path, at: int) -> None:
        self.model = RewardModel.open(str(folder), AnsweringModel.find_scoring(str(folder)), "float32")
        self.name, self.at, self.asked = "dying", at, 0
        self.server: QuestionServer[ScoringRun, TextToScore, TextScore] | None = None

    def open_session(self, run: ScoringRun) -> Any:
        session = self.model.open_session(run)

        def answer(question: TextToScore) -> TextScore:
            self.asked += 1
            if self.asked == self.at:
                assert self.server is not None
                for connection in list(self.server._runs):
                    connection.close()
            return self.model.answer(question)

        object.__setattr__(session, "answer", answer)
        return session


def test_scores_are_those_of_transformers_and_of_nodes_that_are_lost(folder: Path) -> None:
    truth = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    want = []
    for prompt, completion in zip(TEXTS["prompts"], TEXTS["completions"], strict=True):
        with torch.no_grad():
            want.append(float(truth(torch.tensor([tokenizer.encode(prompt + completion)])).logits[0, 0]))
    got = here(folder)(TEXTS)
    assert max(abs(a - b) for a, b in zip(got, want, strict=True)) < 1e-6 and len({round(one, 3) for one in got}) == 3
    one, two = Dying(folder, 2), Dying(folder, 10**9)
    with on_nodes(folder, one, two) as rewards:
        many = {name: each * 8 for name, each in TEXTS.items()}
        assert rewards(many) == got * 8, "to the bit, whoever scores"
        assert one.asked >= 2 and one.asked + two.asked > 24, "what it was asked that was lost, is asked again"


def test_what_is_said_is_scored_as_the_models_own_template_writes_it(folder: Path, tmp_path: Path) -> None:
    write_reward_model(tmp_path)
    said = {"prompts": [[{"role": "0", "content": "3="}]], "completions": [[{"role": "1", "content": "aaa"}]]}
    with pytest.raises(ConfigError, match=r"prompts are messages and the reward model .* has no chat template"):
        here(tmp_path)(said)
    (tmp_path / "chat_template.jinja").write_text(CHAT)
    assert here(tmp_path)(said) == here(folder)({"prompts": ["03="], "completions": ["1aaa"]})


def test_models_that_cannot_be_asked_are_refused(folder: Path, tmp_path: Path) -> None:
    write_reward_model(tmp_path, labels=2)
    with pytest.raises(ConfigError, match="has a classification head of 2 labels, and a reward model has one of 1"):
        here(tmp_path)
    with pytest.raises(ConfigError, match=r"has 70 tokens of the reward model .*, whose context is 64"):
        here(folder)({"prompts": ["3="], "completions": ["a" * 68]})
    write_reward_model(tmp_path)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    with torch.no_grad():
        model.score.weight.fill_(float("nan"))
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="gives the score nan"):
        here(tmp_path)(TEXTS)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"reward_nodes": (1,)}, "grpo.reward_nodes is given and grpo.reward_model_name_or_path is not"),
        ({"reward_model_name_or_path": "m", "reward_dtype": "float"}, "grpo.reward_dtype is 'float'"),
        (
            {"reward_model_name_or_path": "m", "reward_nodes": ("a", "b"), "rollout_nodes": ("b",)},
            "grpo.reward_nodes and rollout_nodes both name b",
        ),
        ({"reward_model_name_or_path": "x/f", "reward_funcs": ("a:f",)}, "two functions of one name: f, f"),
    ],
)
def test_keys_that_cannot_be_are_refused(more: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        GRPOConfig(**{"reward_funcs": ("a:b",), **more})
