"""docs/reference/api-surface.toml says of every parameter of the official clients what is seen when it is sent.

The parameters are the installed clients' own. Each is sent by its client over a socket, once with it and once without,
to a server whose engine remembers what it was asked: a parameter that works makes another request or another reply, one
without effect makes neither, and one that is refused is an error that names it.
"""

from __future__ import annotations

import inspect
import json
import re
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import anthropic
import httpx
import msgspec
import ollama
import openai
import pydantic
import pytest
from anthropic.resources.messages import Messages
from openai.resources.chat.completions import Completions as ChatCompletions
from openai.resources.completions import Completions
from openai.resources.embeddings import Embeddings
from openai.resources.models import Models
from openai.resources.responses import Responses

from tests.house.tree import ROOT
from tests.multi.serving.test_openai_client import Running
from tests.unit.server.kit import POOLING, TOKENIZER, say
from tllm.server.app import build_app
from tllm.server.http.settings import ServerSettings
from tllm.text.chat_template import ChatTemplate

SURFACE: dict[str, Any] = tomllib.loads((ROOT / "docs" / "reference" / "api-surface.toml").read_text())
OURS = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
"""Of a method's parameters those that say how the client sends, not what."""

TEMPLATE = ChatTemplate(
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% for t in tools or [] %}[{{ t.function.name }}]"
    "{% endfor %}{{ reasoning_effort }}{{ verbosity }}{{ enable_thinking }}<assistant>{# <tool_call> <think> #}",
    TOKENIZER.special_tokens,
)
HELLO: list[Any] = [{"role": "user", "content": "hi"}]
OTHER: list[Any] = [{"role": "user", "content": "hello"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
JSON_SCHEMA = {"type": "json_schema", "name": "x", "schema": SCHEMA}
PIXEL = "iVBORw0KGgo="


class Clients(Running):
    """A server, and one client of each kind for it."""

    def start(self) -> Clients:
        super().start()
        self.openai = self.client()
        self.anthropic = anthropic.Anthropic(base_url=self.url, api_key="none", max_retries=0)
        self.ollama = ollama.Client(host=self.url)
        return self

    def join(self, seconds: float = 60) -> bool:
        self.anthropic.close()
        self.ollama._client.close()
        return super().join(seconds)


@dataclass(frozen=True)
class Method:
    """A method of a client: what it needs, and of each parameter a value to send, beside what that needs."""

    function: Callable[..., Any]
    call: Callable[[Clients], Callable[..., Any]]
    needed: dict[str, Any]
    values: dict[str, Any]
    beside: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def has_no_seed(self) -> bool:
        """Whether a seed cannot be given, and is drawn."""
        return self.function in (Responses.create, Messages.create, Messages.count_tokens)

    @property
    def parameters(self) -> list[str]:
        return [name for name in inspect.signature(self.function).parameters if name not in OURS]


SAMPLED: dict[str, Any] = dict(
    frequency_penalty=0.5, logit_bias={"5": 1.0}, n=2, presence_penalty=0.5, seed=7, stop=["world"], temperature=0.5,
    top_p=0.5, user="someone", stream=True, stream_options={"include_usage": True}, model="other",
)  # fmt: skip
NO_EFFECT_ON_CACHE = dict(prompt_cache_key="a", prompt_cache_options={"mode": "explicit"}, prompt_cache_retention="24h")
OPENAI_CHAT: dict[str, Any] = dict(
    **SAMPLED, **NO_EFFECT_ON_CACHE, messages=OTHER, audio={"voice": "alloy", "format": "mp3"}, function_call="auto",
    functions=[{"name": "f"}], logprobs=True, max_completion_tokens=3, max_tokens=3, metadata={"a": "b"},
    modalities=["text", "audio"], moderation={"model": "omni"}, parallel_tool_calls=False,
    prediction={"type": "content", "content": "a"}, reasoning_effort="high", response_format={"type": "json_object"},
    safety_identifier="a", service_tier="flex", store=True, tool_choice="required", tools=[FUNCTION], top_logprobs=2,
    verbosity="high", web_search_options={},
)  # fmt: skip
RESPONSES: dict[str, Any] = dict(
    **NO_EFFECT_ON_CACHE, access_programs={"a": True}, background=True, context_management=[{"type": "compaction"}],
    conversation="conv_1", image={"detail": "low"}, include=["message.output_text.logprobs"], input="hello",
    instructions="be", max_output_tokens=3, max_tool_calls=1, metadata={"a": "b"}, model="other",
    moderation={"model": "omni"}, parallel_tool_calls=False, previous_response_id="resp_1", prompt={"id": "p"},
    reasoning={"effort": "high"}, safety_identifier="a", service_tier="flex", store=True, stream=True,
    stream_options={"include_obfuscation": True}, temperature=0.5, text={"format": JSON_SCHEMA}, tool_choice="required",
    tools=[{"type": "function", "name": "f", "parameters": SCHEMA, "strict": True}], top_logprobs=2, top_p=0.5,
    truncation="auto", user="someone",
)  # fmt: skip
OF_TOOLS = {
    "tool_choice": {"tools": [FUNCTION]},
    "parallel_tool_calls": {"tools": [FUNCTION], "tool_choice": "required"},
}
OF_RESPONSES = {
    "tool_choice": {"tools": RESPONSES["tools"]},
    "parallel_tool_calls": {"tools": RESPONSES["tools"], "tool_choice": "required"},
    "stream_options": {"stream": True},
}
CLAUDE_TOOLS = [{"name": "f", "input_schema": SCHEMA}]
CLAUDE: dict[str, Any] = dict(
    messages=OTHER, model="other", cache_control={"type": "ephemeral"}, speed="fast", system="be",
    thinking={"type": "enabled", "budget_tokens": 1024}, tool_choice={"type": "none"}, tools=CLAUDE_TOOLS,
    user_profile_id="a", workspace_id="b", output_config={"format": {"type": "json_schema", "schema": SCHEMA}},
)  # fmt: skip
OLLAMA: dict[str, Any] = dict(
    model="other", stream=True, think=True, logprobs=True, top_logprobs=2, format="json", options={"top_k": 3},
    keep_alive="1h",
)  # fmt: skip
OPTIONS: dict[str, Any] = dict(
    numa=True, num_ctx=8, num_batch=8, num_gpu=1, main_gpu=1, low_vram=True, f16_kv=True, logits_all=True,
    vocab_only=True, use_mmap=True, use_mlock=True, embedding_only=True, num_thread=1, num_keep=1, seed=7,
    num_predict=3, top_k=3, top_p=0.5, tfs_z=0.5, typical_p=0.5, repeat_last_n=64, temperature=0.5, repeat_penalty=1.1,
    presence_penalty=0.5, frequency_penalty=0.5, mirostat=1, mirostat_tau=3.0, mirostat_eta=0.2, penalize_newline=False,
    stop=["world"],
)  # fmt: skip
STREAMED = {"stream_options": {"stream": True}}
SCORED = {"top_logprobs": {"logprobs": True}}


class Answer(pydantic.BaseModel):
    """A form of a reply."""

    a: int


LONG = "hello world " * 200


def with_option(server: Clients) -> Callable[..., Any]:
    """An option as if it were a parameter."""
    return lambda **options: server.ollama.chat("tiny", HELLO, options={"seed": 1, **options})


METHODS: dict[str, Method] = {
    "openai completions.create": Method(
        Completions.create,
        lambda server: server.openai.completions.create,
        dict(model="tiny", prompt="hi", seed=1),
        dict(**SAMPLED, prompt="hello", best_of=2, echo=True, logprobs=2, max_tokens=3, suffix="b"),
        STREAMED,
    ),
    "openai chat.completions.create": Method(
        ChatCompletions.create,
        lambda server: server.openai.chat.completions.create,
        dict(model="tiny", messages=HELLO, seed=1),
        OPENAI_CHAT,
        {**OF_TOOLS, **STREAMED, **SCORED},
    ),
    "openai responses.create": Method(
        Responses.create,
        lambda server: server.openai.responses.create,
        dict(model="tiny", input="hi", temperature=0),
        RESPONSES,
        OF_RESPONSES,
    ),
    "openai embeddings.create": Method(
        Embeddings.create,
        lambda server: server.openai.embeddings.with_raw_response.create,
        dict(model="tiny", input="hi", encoding_format="float"),
        dict(input=["hello"], model="other", dimensions=2, encoding_format="base64", user="someone"),
    ),
    "openai models.retrieve": Method(
        Models.retrieve, lambda server: server.openai.models.retrieve, dict(model="tiny"), dict(model="other")
    ),
    "anthropic messages.create": Method(
        Messages.create,
        lambda server: server.anthropic.messages.create,
        dict(model="tiny", messages=HELLO, max_tokens=40, extra_body={"temperature": 0}),
        dict(
            **CLAUDE,
            max_tokens=3,
            container={"skills": []},
            diagnostics={"previous_message_id": "a"},
            inference_geo="eu",
            metadata={"user_id": "a"},
            service_tier="auto",
            stop_sequences=["world"],
            stream=True,
        ),
        {"tool_choice": {"tools": CLAUDE_TOOLS}},
    ),
    "anthropic messages.count_tokens": Method(
        Messages.count_tokens,
        lambda server: server.anthropic.messages.count_tokens,
        dict(model="tiny", messages=HELLO),
        dict(**{**CLAUDE, "model": "nobody"}, output_format=Answer),
        {"tool_choice": {"tools": CLAUDE_TOOLS}},
    ),
    "ollama chat": Method(
        ollama.Client.chat,
        lambda server: server.ollama.chat,
        dict(model="tiny", messages=HELLO, options={"seed": 1}),
        dict(**OLLAMA, messages=OTHER, tools=[FUNCTION]),
        SCORED,
    ),
    "ollama generate": Method(
        ollama.Client.generate,
        lambda server: server.ollama.generate,
        dict(model="tiny", prompt="hi", options={"seed": 1}),
        dict(
            **OLLAMA,
            prompt="hello",
            suffix="a",
            system="be",
            template="a",
            context=[1],
            raw=True,
            images=[PIXEL],
            width=8,
            height=8,
            steps=3,
        ),
        SCORED,
    ),
    "ollama options": Method(ollama.Client.chat, with_option, {}, OPTIONS),
    "ollama embed": Method(
        ollama.Client.embed,
        lambda server: server.ollama.embed,
        dict(model="tiny", input="hi"),
        dict(model="other", input="hello", truncate=False, options={"top_k": 3}, keep_alive="1h", dimensions=2),
        {"truncate": {"input": LONG}},
    ),
    "ollama embeddings": Method(
        ollama.Client.embeddings,
        lambda server: server.ollama.embeddings,
        dict(model="tiny", prompt="hi"),
        dict(model="nobody", prompt="hello", options={"top_k": 3}, keep_alive="1h"),
    ),
    "ollama show": Method(
        ollama.Client.show, lambda server: server.ollama.show, dict(model="tiny"), dict(model="nobody")
    ),
}
CASES = [(name, parameter) for name, of in SURFACE.items() for parameter in of["parameters"]]


@pytest.fixture(scope="module")
def server() -> Iterator[Clients]:
    made = Clients(say(), model_aliases=("other",))
    settings = ServerSettings(port=0, model_aliases=("other",))
    made.app = build_app(made.engine, TOKENIZER, TEMPLATE, settings, pooling=POOLING)
    made.start()
    yield made
    made.ask_to_stop()
    assert made.join()


def parameters(name: str) -> list[str]:
    return list(ollama.Options.model_fields) if name == "ollama options" else METHODS[name].parameters


def test_every_parameter_of_every_method_is_listed() -> None:
    """In the order of the client, so that one that comes or goes with a new version is seen."""
    assert list(SURFACE) == list(METHODS)
    for name, method in METHODS.items():
        assert sorted(SURFACE[name]["parameters"]) == sorted(parameters(name)), name
        assert set(method.values) >= set(parameters(name)), name


@pytest.mark.parametrize(("name", "parameter"), CASES)
def test_what_is_said_of_a_parameter_is_what_is_seen(name: str, parameter: str, server: Clients) -> None:
    method, stated = METHODS[name], SURFACE[name]["parameters"][parameter]
    outcome = stated.partition(":")[0]
    assert outcome in ("works", "no effect", "refused"), stated
    base = {**method.needed, **method.beside.get(parameter, {})}
    without = seen(server, method, base)
    assert not isinstance(without, Exception), without
    found = seen(server, method, {**base, parameter: method.values[parameter]})
    if outcome == "refused":
        assert isinstance(found, Exception), f"{parameter} was taken, and is said to be refused"
        assert getattr(found, "status_code", None) == 400 and parameter in str(found), found
    elif outcome == "works":
        assert found != without, f"{parameter} changes nothing, and is said to work"
    else:
        assert found == without, f"{parameter} is said to have no effect"


def seen(server: Clients, method: Method, arguments: dict[str, Any]) -> Any:
    """What the engine was asked and what came back, without what is another with every request; or the error."""
    server.engine.submitted.clear()
    try:
        reply = method.call(server)(**arguments)
        if hasattr(reply, "http_response"):
            reply = reply.http_response.json()
        parts = [reply] if isinstance(reply, dict) or hasattr(reply, "model_dump") else list(reply)
    except (openai.APIStatusError, anthropic.APIStatusError, ollama.ResponseError) as error:
        return error
    asked = [msgspec.structs.replace(one, id="") for one in server.engine.submitted]
    if method.has_no_seed:
        asked = [msgspec.structs.replace(one, params=msgspec.structs.replace(one.params, seed=0)) for one in asked]
    return asked, [plain(part) for part in parts]


CHANGING = re.compile(r'[0-9a-f]{24,}|"(created|created_at|completed_at|\w+_duration)": ("[^"]*"|[\d.]+)')
"""Ids, and times."""


def plain(part: Any) -> str:
    text = json.dumps(part if isinstance(part, dict) else part.model_dump(mode="json"), sort_keys=True)
    return CHANGING.sub("", text)


@pytest.mark.parametrize(
    "call",
    [
        lambda server: server.openai.files.list(),
        lambda server: server.openai.moderations.create(input="a"),
        lambda server: server.openai.images.generate(prompt="a"),
        lambda server: server.openai.responses.retrieve("resp_1"),
        lambda server: server.ollama.pull("a"),
        lambda server: server.ollama.push("a"),
        lambda server: server.ollama.create("a", from_="b"),
        lambda server: server.ollama.delete("a"),
        lambda server: server.ollama.copy("a", "b"),
    ],
)
def test_methods_that_are_not_offered_are_not_found(call: Callable[[Clients], Any], server: Clients) -> None:
    with pytest.raises((openai.NotFoundError, ollama.ResponseError)) as raised:
        call(server)
    assert raised.value.status_code == 404


def test_lists_of_models_are_read_by_every_client(server: Clients) -> None:
    assert [model.id for model in server.openai.models.list()] == ["tiny", "other"]
    assert [model.model for model in server.ollama.list().models] == ["tiny", "other"]
    assert [model.model for model in server.ollama.ps().models] == ["tiny", "other"]
    assert httpx.get(f"{server.url}/v1/models").json()["object"] == "list"
    assert [(one.id, one.type) for one in server.anthropic.models.list()] == [("tiny", "model"), ("other", "model")]
    assert server.anthropic.models.retrieve("other").display_name == "other"
    assert server.ollama.list().models[0].modified_at.year > 2000
    assert server.openai.embeddings.create(model="tiny", input="hi").data[0].embedding, "base64, the client's default"
