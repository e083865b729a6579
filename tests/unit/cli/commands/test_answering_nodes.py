"""What `tllm teach` and `tllm rollout` refuse of the machines that are to hold a model, before any is waited for."""

from __future__ import annotations

import argparse
import socket
from pathlib import Path

import pytest

from tests.support.models.families import save_model
from tllm.cli.commands.post_training.answering_load import asked_load
from tllm.cli.main import main
from tllm.core.errors import ConfigError, PlanError
from tllm.node.coordinator.cluster_options import ClusterOptions
from tllm.node.serve.answering_cluster import Answerers
from tllm.planner.roles.answering_plans import AnsweringLoad, GroupLoad
from tllm.spec.plan import Plan
from tllm.spec.process_groups import RoleName
from tllm.training.questions.answering_model import AnsweringModel


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model("llama", folder)
    return folder


@pytest.mark.parametrize("command", ["teach", "rollout"])
@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (["--spare-nodes", "1"], ConfigError, "--spare-nodes is for a model that several processes hold"),
        (["--nodes", "3", "--plan", "pp=2"], PlanError, "has 2 ranks and --nodes is 3"),
        (["--on-loss", "wait"], ConfigError, "--on-loss is for a model that several processes hold"),
        (["--local", "2", "--plan", "tp=3"], PlanError, "has 3 ranks and --local is 2"),
        (["--plan", "dp=2"], PlanError, "gives dp, and one copy of a model answers"),
        (["--nodes", "9", "--port", "BUSY"], ConfigError, "Address already in use"),
        (["--nodes", "1", "--leave-out", "never"], ConfigError, "one node has none to choose"),
        (["--nodes", "2", "--lost-after", "0.1"], ConfigError, "cannot be given up after 0.1 s"),
        (["--nodes", "2", "--port", "BUSY"], ConfigError, "Address already in use"),
        (["--leave-out", "never"], ConfigError, "--leave-out is for a model that several processes hold"),
        (
            ["--local", "2", "--plan", "pp=2", "--leave-out", "never"],
            ConfigError,
            "--leave-out is what a plan is chosen",
        ),
    ],
)
def test_a_wrong_option_gets_one_line(
    command: str,
    words: list[str],
    code: type[ConfigError | PlanError],
    line: str,
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        given = [word.replace("BUSY", str(busy.getsockname()[1])) for word in words]
        assert main([command, str(model), "--secret", str(tmp_path / "key"), *given]) == code.exit_code
    said = capsys.readouterr()
    assert not said.out and line in said.err and len(said.err.splitlines()) == 2, said.err


@pytest.mark.parametrize(("command", "option"), [("teach", "--row"), ("rollout", "--max-completion-length")])
def test_what_a_plan_is_chosen_for_is_refused_where_none_is(
    command: str, option: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, line in (
        ((), f"{option} is for a model that several processes hold"),
        (("--local", "2", "--plan", "pp=2"), f"{option} is what a plan is chosen by, and --plan gives one"),
    ):
        given = [command, str(model), "--secret", str(tmp_path / "key"), option, "8", *words]
        assert main(given) == ConfigError.exit_code
        assert line in capsys.readouterr().err


def test_a_plan_is_chosen_for_rows_that_the_model_can_have(model: Path) -> None:
    spec = AnsweringModel.find_causal(str(model), "", "").spec
    longest = spec.max_model_len
    names = ("row", "prompt", "max_completion_length", "num_generations", "max_num_seqs", "run_dtype")

    def load(role: RoleName, **given: int) -> AnsweringLoad:
        return asked_load(argparse.Namespace(**{**dict.fromkeys(names), "dtype": "float32", **given}), role, spec)

    assert load("teacher", row=9).tokens == 9 and load("teacher", row=10 * longest).tokens == longest
    for given, asked in (
        (dict(prompt=8, max_completion_length=longest - 9), (8, longest - 9, 4, 8, 32)),
        (dict(prompt=longest, max_completion_length=longest), (1, longest - 1, 4, 8, 32)),
        (dict(prompt=2, max_completion_length=3, num_generations=6, max_num_seqs=16), (2, 3, 2, 6, 16)),
        (dict(prompt=2, max_completion_length=3, num_generations=6, max_num_seqs=4), (2, 3, 1, 6, 4)),
    ):
        found = load("rollout", **given)
        assert isinstance(found, GroupLoad)
        of = found.sampling
        assert (of.prompt, of.completion, of.groups, of.num_generations, of.at_once) == asked
        assert of.context == of.prompt + of.completion and found.facts.dtype == "float32"


@pytest.mark.parametrize(("role", "is_read"), [("teacher", True), ("rollout", False)])
def test_only_a_policys_weights_may_come_from_runs(role: RoleName, is_read: bool, tmp_path: Path) -> None:
    """A teacher's files are read whatever they are, be it GGUF or none, of which whoever reads them then tells."""
    save_model("llama", tmp_path)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    model = AnsweringModel.find_causal(str(tmp_path), "", "")
    plan = Plan.parse("pp=2", model.spec.num_layers)
    answerers = Answerers(role, "model", model, plan, ("127.0.0.1", 1), tmp_path / "key", "float32")
    assert answerers.workload(ClusterOptions(authority=None)).folder == (tmp_path if is_read else None)
