"""Options that people type by habit: each is answered with what there is here, and with no option that is not."""

from __future__ import annotations

import importlib
import re

import pytest

from tllm.cli import main as cli
from tllm.cli.arguments.elsewhere import COMMANDS_ELSEWHERE, VALUES_ELSEWHERE, said_of_option
from tllm.cli.arguments.parser import Parser
from tllm.core.errors import ConfigError


def _parser(command: str) -> Parser:
    parser = Parser(prog=f"tllm {command}", description="A command.")
    parser.add_argument("--debug", action="store_true")
    importlib.import_module(cli.module_of(command)).add_arguments(parser)
    return parser


def _hint(command: str, *words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        _parser(command).parse_args(["models/tiny", *words])
    return caught.value.hint


@pytest.mark.parametrize(
    ("command", "option", "hint"),
    [
        ("serve", "--tensor-parallel-size", "give --plan tp=N"),
        ("serve", "-tp", "give --plan tp=N"),
        ("serve", "--data-parallel-size", "one copy of a model"),
        ("serve", "--gpu-memory-utilization", "--kv-cache-memory"),
        ("serve", "--max-num-batched-tokens", "leave it out"),
        ("serve", "--trust-remote-code", "never run"),
        ("serve", "--enable-auto-tool-choice", "tools are on"),
        ("serve", "--disable-log-requests", "--quiet"),
        ("serve", "--ctx-size", "--max-model-len"),
        ("serve", "-c", "--max-model-len"),
        ("serve", "-ngl", "--device"),
        ("serve", "-hf", "ORG/NAME:Q4_K_M"),
        ("serve", "-p", "--port"),
        ("serve", "--model", "alone behind the command"),
        ("serve", "--max_model_len", "did you mean '--max-model-len'?"),
        ("serve", "--prefix-of-nothing-at-all", "`tllm serve --help`"),
        ("generate", "--max_new_tokens", "--max-tokens"),
        ("generate", "-n", "--max-tokens"),
        ("generate", "-p", "--prompt"),
        ("generate", "--temp", "--temperature"),
        ("generate", "--tmperature", "did you mean '--temperature'?"),
        ("train", "--learning_rate", "--set learning_rate=…"),
        ("train", "--lora-alpha", "--set lora.lora_alpha=…"),
        ("train", "--num_train_epochs", "max_steps"),
        ("train", "--bf16", 'dtype = "bfloat16"'),
        ("train", "--nproc_per_node", "--local N"),
        ("train", "--config", "the job's file"),
        ("train", "--tensor-parallel-size", "plan says who computes what"),
    ],
)
def test_options_of_other_programs(command: str, option: str, hint: str) -> None:
    assert hint in _hint(command, option, "2")


@pytest.mark.parametrize(("option", "value"), VALUES_ELSEWHERE)
def test_values_of_other_programs(option: str, value: str) -> None:
    assert _hint("serve", option, value) == VALUES_ELSEWHERE[option, value]
    for given in re.findall(r"^give ([a-z]+\d*)", VALUES_ELSEWHERE[option, value]):
        _parser("serve").parse_args(["models/tiny", option, given])


def test_a_second_value_is_no_option() -> None:
    assert "give it again" in _hint("serve", "--served-model-name", "one", "two")


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_no_hint_names_an_option_that_a_command_lacks(command: str) -> None:
    known = set(_parser(command)._option_string_actions)
    for option in ("--tp", "--ctx-size", "--temp", "-n", "-p", "--system", "--num-gpus", "--config", "--log-level"):
        hint = re.sub("`[^`]*`", "", said_of_option(option, known) or "")
        assert set(re.findall(r"--[a-z][a-z-]+", hint)) <= known


def test_hints_name_commands_that_there_are() -> None:
    assert not set(COMMANDS_ELSEWHERE) & set(cli.COMMANDS)
    assert set(re.findall(r"`tllm ([a-z]+)", " ".join(COMMANDS_ELSEWHERE.values()))) <= set(cli.COMMANDS)
