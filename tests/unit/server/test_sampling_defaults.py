"""A model's defaults of sampling in every interface: taken where a request does not say, and told in its reply."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.server.kit import post, say, serve
from tllm.spec.request import SamplingParams
from tllm.text.generation_config import GenerationConfig

HELLO = [{"role": "user", "content": "hi"}]
DEFAULTS = GenerationConfig(temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.1, max_new_tokens=50)
OPENAI: dict[str, dict[str, Any]] = {"/v1/completions": {"prompt": "a"}, "/v1/chat/completions": {"messages": HELLO}}
ASKED: dict[str, dict[str, Any]] = {
    **OPENAI,
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": HELLO, "max_tokens": 200},
    "/api/chat": {"model": "tiny", "messages": HELLO},
    "/api/generate": {"model": "tiny", "prompt": "a"},
}


def chosen(path: str, config: GenerationConfig = DEFAULTS, **more: Any) -> tuple[SamplingParams, dict[str, Any]]:
    """What the engine is asked for, and the reply."""
    engine = say()
    if path.startswith("/api"):
        more = {"options": more, "stream": False}
    reply = post(serve(engine, generation_config=config), path, {"model": "tiny", **ASKED[path], **more})
    assert reply.status_code == 200, reply.text
    return engine.submitted[0].params, reply.json()


@pytest.mark.parametrize("path", ASKED)
def test_a_request_takes_what_it_does_not_say(path: str) -> None:
    params, _ = chosen(path)
    assert (params.temperature, params.top_k, params.top_p, params.repetition_penalty) == (0.6, 20, 0.95, 1.1)
    assert params.max_tokens == (16 if path == "/v1/completions" else 50)
    own, _ = chosen(path, temperature=0.9, top_p=0.5)
    assert (own.temperature, own.top_k, own.top_p) == (0.9, 20, 0.5)
    greedy, _ = chosen(path, temperature=0)
    assert (greedy.temperature, greedy.top_k, greedy.top_p, greedy.repetition_penalty) == (0.0, 0, 1.0, 1.0)


@pytest.mark.parametrize("path", OPENAI)
def test_no_reply_has_more_tokens_than_the_model_is_to_write(path: str) -> None:
    assert chosen(path, max_tokens=60)[0].max_tokens == 50
    assert chosen(path, max_tokens=40)[0].max_tokens == 40
    assert chosen(path, GenerationConfig(), max_tokens=60)[0].max_tokens == 60


def test_who_wants_more_tokens_than_the_model_is_to_write_is_told_whose_number_it_is() -> None:
    asked = {"model": "tiny", "prompt": "a", "min_tokens": 100}
    server = serve(say(), generation_config=DEFAULTS)
    for max_tokens, said in ((200, "gives at most 50 tokens of any reply (max_new_tokens)"), (40, "max_tokens 40")):
        refused = post(server, "/v1/completions", {**asked, "max_tokens": max_tokens})
        assert refused.status_code == 400
        assert f"min_tokens is 100 and {said}".replace("and gives", "and this server gives") in refused.text


def test_a_response_tells_what_was_used() -> None:
    assert {name: chosen("/v1/responses")[1][name] for name in ("temperature", "top_p")} == {
        "temperature": 0.6,
        "top_p": 0.95,
    }
    assert chosen("/v1/responses", GenerationConfig())[1]["temperature"] == 1.0
