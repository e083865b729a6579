from __future__ import annotations

import io
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from tests.support.serving.scripted_engine import ListedEngine, out
from tllm.api.engine_options import EngineOptions
from tllm.cli.main import main
from tllm.spec.request import TokenLogprobs


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> ListedEngine:
    """The engine that every command opens; `options` are those it was opened with."""
    made = ListedEngine(out(5), out(6, 7), out(reason="length"))

    @asynccontextmanager
    async def open_listed(options: EngineOptions, on_progress: Any, adapters: None) -> AsyncIterator[ListedEngine]:
        yield made

    monkeypatch.setattr("tllm.cli.commands.generate.open_engine", open_listed)
    monkeypatch.setattr("tllm.cli.commands.chat.open_engine", open_listed)
    return made


@pytest.fixture
def letters(folder: Path) -> Path:
    """The folder with a tokenizer whose ids are a, b, c …"""
    vocabulary = {chr(ord("a") + i): i for i in range(26)}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    inner.decoder = tokenizers.decoders.Fuse()
    inner.save(str(folder / "tokenizer.json"))
    return folder


def test_ids_in_ids_out(folder: Path, engine: ListedEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(folder), "--prompt-ids", "1,2"]) == 0
    assert capsys.readouterr().out == "5,6,7\n"
    assert engine.requests[0].prompt_ids == (1, 2)


def test_text_is_streamed(letters: Path, engine: ListedEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(letters), "--prompt", "ab"]) == 0
    assert capsys.readouterr().out == "fgh\n"
    assert engine.requests[0].prompt_ids == (0, 1)


def test_a_stop_text_over_two_tokens(letters: Path, engine: ListedEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(letters), "--prompt", "ab", "--stop", "gh", "--json"]) == 0
    got = json.loads(capsys.readouterr().out)
    assert got["text"] == "f"
    assert got["finish_reason"] == "stop"


def test_a_piped_prompt(letters: Path, engine: ListedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("abc"))
    assert main(["generate", str(letters)]) == 0
    assert engine.requests[0].prompt_ids == (0, 1, 2)


def test_json_has_every_field(folder: Path, engine: ListedEngine, capsys: pytest.CaptureFixture[str]) -> None:
    engine.outputs = (out(5, logprobs=(TokenLogprobs(5, -0.5, ((5, -0.5), (9, -1.0))),), reason="length"),)
    words = ["generate", str(folder), "--prompt-ids", "1,2", "--json", "--logprobs", "2", "--plan", "pp=2"]
    assert main(words) == 0
    got = json.loads(capsys.readouterr().out)
    assert list(got) == [
        "prompt_ids", "token_ids", "text", "finish_reason", "logprobs", "top_logprobs", "plan", "ttft_s", "tokens_per_s"
    ]  # fmt: skip
    assert got["prompt_ids"] == [1, 2]
    assert got["token_ids"] == [5]
    assert got["plan"] == "pp=2,tp=1+1,layers=3+3"
    assert got["logprobs"] == [-0.5]
    assert got["top_logprobs"] == [[[5, -0.5], [9, -1.0]]]


@pytest.mark.parametrize(
    ("options", "field", "value"),
    [
        ([], "max_tokens", 126),  # 128 would be the default; the context of 128 leaves less
        (["--max-tokens", "9"], "max_tokens", 9),
        (["--temperature", "0.5"], "temperature", 0.5),
        (["--seed", "7"], "seed", 7),
        (["--top-k", "4"], "top_k", 4),
        (["--ignore-eos"], "ignore_eos", True),
        ([], "logprobs", None),
        (["--json"], "logprobs", 0),
    ],
)
def test_options_reach_the_engine(
    options: list[str], field: str, value: Any, folder: Path, engine: ListedEngine
) -> None:
    assert main(["generate", str(folder), "--prompt-ids", "1,2", *options]) == 0
    assert getattr(engine.requests[0].params, field) == value


@pytest.mark.parametrize(
    ("options", "values"),
    [
        ([], (0.0, 0, 1.0, 126)),
        (["--temperature", "1"], (1.0, 20, 0.9, 126)),
        (["--temperature", "1", "--top-k", "0"], (1.0, 0, 0.9, 126)),
        (["--temperature", "1", "--generation-config", "vllm"], (1.0, 0, 1.0, 126)),
        (["--temperature", "0.000001"], (0.0, 0, 1.0, 126)),
        (["--override-generation-config", '{"max_new_tokens": 3}'], (0.0, 0, 1.0, 3)),
        (["--override-generation-config", '{"temperature": 0.6}'], (0.6, 20, 0.9, 126)),
        (["--override-generation-config", '{"temperature": 0.6}', "--temperature", "0"], (0.0, 0, 1.0, 126)),
    ],
)
def test_a_models_defaults(
    options: list[str], values: tuple[float, ...], letters: Path, engine: ListedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are those of `tllm chat`, and of `tllm generate` with a temperature: without one it is greedy."""
    (letters / "generation_config.json").write_text('{"temperature": 0.3, "top_k": 20, "top_p": 0.9}')
    assert main(["generate", str(letters), "--prompt-ids", "1,2", *options]) == 0
    params = engine.requests[0].params
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == values
    (letters / "chat_template.jinja").write_text("a")
    for words, temperature in (([], 0.3), (["--generation-config", "vllm"], 0.7)):
        monkeypatch.setattr(sys, "stdin", io.StringIO("a\n"))
        assert main(["chat", str(letters), *words]) == 0
        assert engine.requests[-1].params.temperature == temperature


def test_a_seed_is_drawn(folder: Path, engine: ListedEngine) -> None:
    for _ in range(2):
        main(["generate", str(folder), "--prompt-ids", "1,2", "--temperature", "1"])
    first, second = (request.params.seed for request in engine.requests)
    assert first is not None
    assert first != second


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--prompt", "ab"], "has no tokenizer.json"),
        (["--prompt-ids", "1", "--stop", "x"], "--stop needs a tokenizer"),
        (["--prompt-ids", "1", "--prompt", "ab"], "not allowed with argument"),
        (["--prompt-ids", ",".join("1" * 128)], "128 prompt tokens and 1 new ones make 129; the context holds 128"),
        (["--prompt-ids", "1,2", "--max-tokens", "127"], "2 prompt tokens and 127 new ones make 129"),
    ],
)
def test_what_cannot_be(
    options: list[str], words: str, folder: Path, engine: ListedEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(folder), *options]) == 2
    assert words in capsys.readouterr().err
    assert not engine.requests


def test_an_empty_prompt(letters: Path, engine: ListedEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(letters), "--prompt", ""]) == 2
    assert "the prompt is empty" in capsys.readouterr().err


def test_chat_remembers(
    letters: Path, engine: ListedEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (letters / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}x{% endfor %}")
    monkeypatch.setattr(sys, "stdin", io.StringIO("ab\n\nc\n/new\nd\n/exit\nnever\n"))
    assert main(["chat", str(letters), "--quiet"]) == 0
    assert capsys.readouterr().out == "fgh\n" * 3
    prompts = ["".join(chr(ord("a") + i) for i in request.prompt_ids) for request in engine.requests]
    assert prompts == ["abx", "abxfghxcx", "dx"]


def test_chat_ends_at_ctrl_c(letters: Path, engine: ListedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    (letters / "chat_template.jinja").write_text("a")

    def interrupted(prompt: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupted)
    assert main(["chat", str(letters)]) == 130


def test_chat_without_a_template(letters: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", str(letters)]) == 2
    assert "has no chat template" in capsys.readouterr().err


def test_chat_says_when_the_context_is_full(
    letters: Path, engine: ListedEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (letters / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    monkeypatch.setattr(sys, "stdin", io.StringIO("a" * 128 + "\nb\n"))
    assert main(["chat", str(letters)]) == 0
    assert "128 tokens long and the context holds 128" in capsys.readouterr().err
    assert engine.requests[0].prompt_ids == (1,), "what did not fit is forgotten"
