"""Options that people type by habit: each is answered with what there is here, and with no option that is not."""

from __future__ import annotations

import functools
import importlib
import re

import pytest

from tllm.cli import main as cli
from tllm.cli.arguments.elsewhere import _SAID, COMMANDS_ELSEWHERE, VALUES_ELSEWHERE
from tllm.cli.arguments.parser import Parser
from tllm.core.errors import ConfigError
from tllm.training.job.job_file import ELSEWHERE


@functools.cache
def _parser(command: str) -> Parser:
    parser = Parser(prog=f"tllm {command}", description="A command.")
    parser.add_argument("--debug", action="store_true")
    importlib.import_module(cli.module_of(command)).add_arguments(parser)
    return parser


def _names(command: str) -> set[str]:
    return set(_parser(command)._option_string_actions)


def _needed(command: str) -> list[str]:
    others = {"export": ["models/tiny", "out"], "simulate": ["models/tiny", "--cluster", "c.toml"], "demo": []}
    others |= {name: ["127.0.0.1:1"] for name in ("doctor", "status")}
    return others.get(command, ["models/tiny"])


def _hint(command: str, *words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        _parser(command).parse_args([*_needed(command), *words])
    message = caught.value.message
    assert words[0].partition("=")[0] in message or repr(words[-1]) in message, message
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
        ("train", "--tensor-parallel-size", "give --plan"),
    ],
)
def test_options_of_other_programs(command: str, option: str, hint: str) -> None:
    assert hint in _hint(command, option, "2")


@pytest.mark.parametrize(
    ("command", "words", "hint"),
    [
        ("plan", "--tp 2", "give --plan tp=N"),
        ("plan", "--context-length 9", "give --max-model-len"),
        ("plan", "--load-in-4bit", "--quantize"),
        ("plan", "--block-size 16", "give --page-size"),
        ("plan", "--n-parallel 4", "give --max-num-seqs"),
        ("serve", "--disable-radix-cache", "give --no-enable-prefix-caching"),
        ("serve", "--cache-reuse 256", "--enable-prefix-caching"),
        ("serve", "--kv-transfer-config {}", "--cache-dir"),
        ("serve", "--fully-sharded-loras", "cut as the linears"),
        ("serve", "--uds /run/s", "a Unix socket"),
        ("serve", "--middleware x", "other code"),
        ("serve", "--numa distribute", "give --numa-binding"),
        ("serve", "--mirostat 2", "temperature, top_k"),
        ("serve", "--pooling-type mean", "give --pooler-config"),
        ("serve", "--pooling mean", "give --pooler-config"),
        ("serve", "--prio 2", "`nice`"),
        ("serve", "--enable-reasoning", "--reasoning-parser"),
        ("generate", "--file x", 'give --prompt "$(cat FILE)"'),
        ("chat", "-sys x", "give --system"),
        ("generate", "-sys x", "`tllm chat MODEL --system TEXT`"),
        ("doctor", "-v", "--debug shows more, --quiet less"),
        ("train", "--tp-size 2", "give --plan, as dp=2, tp=2"),
        ("train", "--config-name c.json", "it is a key of the job"),
        ("train", "--task sft", "it is a key of the job"),
    ],
)
def test_a_hint_is_that_of_the_command(command: str, words: str, hint: str) -> None:
    assert hint in _hint(command, *words.split())


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("plan", "--gradient-checkpointing"),
        ("serve", "--file x"),
        ("simulate", "-p x"),
        ("train", "-m x"),
        ("demo", "-m x"),
        ("doctor", "--hf-repo=x"),
        ("teach", "-hf x"),
        ("status", "--workers=2"),
        ("train", "--embedding"),
        ("train", "--grammar x"),
        ("train", "--enable-chunked-prefill"),
        ("chat", "-i"),
        ("teach", "--dtype half"),
        ("teach", "--dtype int8"),
        ("export", "--dtype int8"),
        ("simulate", "--dtype q8_0"),
    ],
)
def test_no_hint_presupposes_what_a_command_has_not(command: str, words: str) -> None:
    assert _hint(command, *words.split()) == f"`tllm {command} --help` lists its options"


def test_a_model_is_no_option_of_a_job() -> None:
    assert "model_name_or_path" in _hint("train", "--model-id", "x")


@pytest.mark.parametrize(("command", "hint"), [("teach", "float32"), ("serve", "that of the files")])
def test_a_dtype_that_is_left_out(command: str, hint: str) -> None:
    assert _hint(command, "--dtype", "auto") == f"leave it out: it is then {hint}"


@pytest.mark.parametrize("command", cli.COMMANDS)
@pytest.mark.parametrize(("option", "value"), VALUES_ELSEWHERE)
def test_values_of_other_programs(command: str, option: str, value: str) -> None:
    parser = _parser(command)
    if option not in parser._option_string_actions:
        pytest.skip("the command has no such option")
    if given := re.match(r"give (-*)([a-z\d-]+) ?(\w*)$|give (auto): as --dtype$", _hint(command, option, value)):
        words = [option, *given.group(2, 4)] if not given[1] else [given[1] + given[2], given[3]]
        parser.parse_args([*_needed(command), *filter(None, words)])


def test_every_value_is_answered_by_serve() -> None:
    for option, value in VALUES_ELSEWHERE:
        assert _hint("serve", option, value).startswith("give ")


def test_a_second_value_is_no_option() -> None:
    again = "--served-model-name takes one value: give it again for another"
    assert again in _hint("serve", "--served-model-name", "one", "two")
    assert again in _hint("serve", "--served-model-name=one", "two")


@pytest.mark.parametrize("words", ["--temperature 1 2", "one two", "--ignore-eos one"])
def test_what_may_not_come_again_is_not_to_be_given_again(words: str) -> None:
    assert _hint("generate", *words.split()) == "`tllm generate --help` lists its options"


_OPTIONS = sorted({pattern.replace("*", "x") for _, patterns, *_ in _SAID for pattern in patterns.split()})


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_no_hint_names_an_option_that_a_command_lacks(command: str) -> None:
    parser = _parser(command)
    for option in {*_OPTIONS, *(f"--{key}" for key in ELSEWHERE if "*" not in key)} - _names(command):
        _all_there(command, parser._meant(option))


def test_each_entry_is_some_commands_answer() -> None:
    reached = {
        (_parser(command)._meant(option), option)
        for command in cli.COMMANDS
        for option in _OPTIONS
        if option not in _names(command)
    }
    listed = {(hint, pattern.replace("*", "x")) for hint, patterns, *_ in _SAID for pattern in patterns.split()}
    assert listed <= reached, sorted(listed - reached)


def test_hints_name_commands_that_there_are() -> None:
    assert not set(COMMANDS_ELSEWHERE) & set(cli.COMMANDS)
    for hint in COMMANDS_ELSEWHERE.values():
        _all_there(None, hint)


def _all_there(command: str | None, hint: str) -> None:
    """A hint names commands that there are with options of theirs, and beside these only options of its command."""
    for other, words in re.findall(r"`tllm ([a-z-]+)([^`]*)`", hint):
        assert {*re.findall(r"--[a-z][a-z-]*", words)} <= _names(other), hint
    if command is not None:
        assert {*re.findall(r"(?<![\w-])--?[a-z][a-z-]*", re.sub("`[^`]*`", "", hint))} <= _names(command), hint
