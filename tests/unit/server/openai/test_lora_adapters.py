"""The routes that load and unload adapters, and requests that name one as their model."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.unit.server.kit import POOLING, TEMPLATE, TOKENIZER, client, get, post, run, say
from tllm.core.errors import CapacityError, ConfigError, TllmError, WeightsError
from tllm.server.app import App, build_app
from tllm.server.http.settings import ServerSettings
from tllm.server.openai.prompts import Prompts
from tllm.server.pooling.pooler_config import ModelPooling


class Loaded:
    """`ServedAdapters` of a dict; `fault` is what loading fails with."""

    def __init__(self) -> None:
        self.paths = {"sql": "/adapters/sql"}
        self.fault: TllmError | None = None

    def id_of(self, name: str) -> str:
        return f"id-{name}" if name in self.paths else ""

    async def load(self, name: str, path: str) -> None:
        if self.fault is not None:
            raise self.fault
        self.paths[name] = path

    async def unload(self, name: str) -> None:
        del self.paths[name]


def served(adapters: Loaded | None) -> tuple[App, Loaded | None]:
    return build_app(say(), TOKENIZER, TEMPLATE, adapters=adapters), adapters


def test_the_model_of_a_request_names_its_adapter() -> None:
    engine = say()
    app = build_app(engine, TOKENIZER, TEMPLATE, adapters=Loaded())
    chat = dict(messages=[dict(role="user", content="hi")], max_tokens=3)
    for name in ("sql", "tiny"):
        assert post(app, "/v1/chat/completions", dict(chat, model=name)).json()["model"] == name
        assert post(app, "/v1/completions", dict(prompt="hi", model=name, n=2)).json()["model"] == name
    post(app, "/v1/completions", dict(prompt="hi"))
    assert [request.lora for request in engine.submitted] == [*["id-sql"] * 3, *[""] * 4]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": ["hi", "ho"]}),
        ("/v1/score", {"text_1": "hi", "text_2": "ho"}),
        ("/v2/rerank", {"query": "hi", "documents": ["ho"]}),
        ("/api/embed", {"input": ["hi", "ho"]}),
    ],
)
def test_prompts_are_pooled_with_the_adapter_that_is_named(path: str, body: dict[str, Any]) -> None:
    engine = say()
    app = build_app(engine, TOKENIZER, TEMPLATE, adapters=Loaded(), pooling=POOLING)
    for name in ("sql", "tiny"):
        reply = post(app, path, dict(body, model=name))
        assert reply.status_code == 200 and reply.json().get("model") == name
    assert [request.lora for request in engine.submitted] == ["id-sql"] * 2 + [""] * 2


def test_texts_are_classified_with_the_adapter_that_is_named() -> None:
    engine = say()
    engine._pooled = lambda request: (1.0, -1.0)  # type: ignore[method-assign]
    labels = ModelPooling(score_type="classification", hidden_size=4, num_labels=2, labels=("good", "bad"))
    app = build_app(engine, TOKENIZER, TEMPLATE, adapters=Loaded(), pooling=labels)
    assert post(app, "/classify", dict(input="hi", model="sql")).json()["model"] == "sql"
    assert [request.lora for request in engine.submitted] == ["id-sql"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
def test_an_adapter_that_is_unloaded_meanwhile_is_not_the_model_alone(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts are encoded aside from the loop, and others are answered meanwhile."""
    adapters, engine = Loaded(), say()
    batch = Prompts.batch

    async def encoded(self: Prompts, *given: Any) -> Any:
        found = await batch(self, *given)
        await adapters.unload("sql")
        return found

    monkeypatch.setattr(Prompts, "batch", encoded)
    app = build_app(engine, TOKENIZER, TEMPLATE, adapters=adapters, pooling=POOLING)
    reply = post(app, path, {"prompt": "hi", "input": "hi", "model": "sql"})
    assert reply.status_code == 404 and reply.json()["error"]["code"] == "model_not_found"
    assert not engine.submitted


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_kept_reply_of_an_adapter_that_was_unloaded_is_read_again(path: str) -> None:
    app, _ = served(Loaded())

    async def scene() -> None:
        async with client(app) as http:
            body = dict(prompt="hi", messages=[dict(role="user", content="hi")], model="sql", store=True)
            reply = (await http.post(path, json=body)).json()
            assert (await http.post("/v1/unload_lora_adapter", json=dict(lora_name="sql"))).status_code == 200
            assert (await http.get(f"{path}/{reply['id']}")).json() == reply
            assert (await http.post(path, json=body)).status_code == 404

    run(asyncio.wait_for(scene(), 20))


def test_adapters_are_listed_with_their_parent_and_come_and_go() -> None:
    app, _ = served(Loaded())

    async def scene() -> None:
        async with client(app) as http:
            reply = await http.post("/v1/load_lora_adapter", json=dict(lora_name="x", lora_path="/adapters/x"))
            assert reply.text == "Success: LoRA adapter 'x' added successfully."
            cards = {card["id"]: card for card in (await http.get("/v1/models")).json()["data"]}
            assert {name: (card["root"], card["parent"]) for name, card in cards.items()} == {
                "tiny": ("tiny", None),
                "sql": ("/adapters/sql", "tiny"),
                "x": ("/adapters/x", "tiny"),
            }
            assert (await http.get("/v1/models/x")).json()["parent"] == "tiny"
            assert (await http.post("/v1/unload_lora_adapter", json=dict(lora_name="x"))).status_code == 200
            assert (await http.post("/v1/unload_lora_adapter", json=dict(lora_name="x"))).status_code == 404
            assert (await http.get("/v1/models/x")).status_code == 404

    run(asyncio.wait_for(scene(), 20))


@pytest.mark.parametrize("fault", [WeightsError("no adapter"), ConfigError("rank 99"), CapacityError("2 of 1")])
def test_what_loading_fails_with_is_the_callers_fault(fault: TllmError) -> None:
    app, adapters = served(Loaded())
    assert adapters is not None
    adapters.fault = fault
    reply = post(app, "/v1/load_lora_adapter", dict(lora_name="x", lora_path="/adapters/x"))
    assert reply.status_code == 400 and fault.message in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    "body", [{}, dict(lora_name="x"), dict(lora_name="", lora_path="a"), dict(lora_name="x" * 300, lora_path="a")]
)
def test_bodies_that_are_none_are_refused(body: dict[str, str]) -> None:
    app, _ = served(Loaded())
    assert post(app, "/v1/load_lora_adapter", body).status_code == 400


def test_another_name_of_the_model_is_taken() -> None:
    app = build_app(say(), TOKENIZER, TEMPLATE, ServerSettings(model_aliases=("alias",)), adapters=Loaded())
    reply = post(app, "/v1/load_lora_adapter", dict(lora_name="alias", lora_path="/adapters/x"))
    assert reply.status_code == 400 and "'alias' is a name of the model" in reply.json()["error"]["message"]


def test_without_adapters_a_hint_says_how_to_serve_them() -> None:
    app, _ = served(None)
    reply = post(app, "/v1/load_lora_adapter", dict(lora_name="x", lora_path="/adapters/x"))
    assert reply.status_code == 400 and "--enable-lora" in reply.json()["error"]["message"]
    assert len(get(app, "/v1/models").json()["data"]) == 1
