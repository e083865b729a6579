"""What the server says about itself: health, models, and its tokenizer."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from tllm.core.errors import RequestError, counted
from tllm.server.http.errors import HttpError
from tllm.server.openai.engine_client import EngineClient, Health, RequestRouter
from tllm.server.openai.prompts import Prompts
from tllm.server.openai.requests import TokenizeRequest
from tllm.server.openai.tools import OfferedTools


def alive(router: RequestRouter) -> dict[str, Any]:
    """`/health`: the process answers and its engine is not dead."""
    health = router.client.health()
    if not health.alive:
        raise _unwell("the engine is dead", "engine_dead", health)
    return {"status": "ok"}


def ready(router: RequestRouter) -> dict[str, Any]:
    """`/health/ready`: every stage has joined and loaded, and new requests are taken."""
    health = router.client.health()
    if router.draining:
        raise _unwell("the server is shutting down", "draining", health)
    if not health.alive or not health.ready:
        raise _unwell("the model is not ready", "not_ready", health)
    return {"status": "ready"}


def progress(router: RequestRouter, stall_seconds: float) -> dict[str, Any]:
    """`/health/progress`: running sequences get tokens; an idle engine is fine."""
    health = router.client.health()
    if not health.alive:
        raise _unwell("the engine is dead", "engine_dead", health)
    if stalled := _stalled(health, stall_seconds):
        raise _unwell(stalled, "stalled", health)
    return {"status": "ok", "running": health.running, "seconds_since_step": health.seconds_since_step}


def waiting(router: RequestRouter, stall_seconds: float) -> str:
    """What the running sequences wait for, in the words of `/health/progress`; "" while they move."""
    health = router.client.health()
    stalled = _stalled(health, stall_seconds)
    return _with_node(stalled, health) if stalled else ""


def _stalled(health: Health, stall_seconds: float) -> str:
    if health.running and health.seconds_since_step > stall_seconds:
        waited = f"{counted(health.running, 'sequence')} in hand and no step for {health.seconds_since_step:.0f} s"
        return waited + (f", waiting for node {health.waits_for}" if health.waits_for and not health.node else "")
    if not health.node:
        return ""
    return {0: "a sequence would not move", 1: "the sequence in hand does not move"}.get(
        health.running, f"{counted(health.running, 'sequence in hand does', 'sequences in hand do')} not move"
    )


def _unwell(message: str, code: str, health: Health) -> HttpError:
    words = _with_node(message, health)
    return HttpError(503, words, "server_error", code, headers={"retry-after": "5"})


def _with_node(message: str, health: Health) -> str:
    name = f"node {health.node}" if health.node else ""
    said = [message, *(words for words in (name, health.reason) if words)]
    if name and name in health.reason:  # as it is where the cluster says it
        said.remove(name)
    return ": ".join(said)


def utc(seconds: int) -> str:
    """Unix seconds as Anthropic's and ollama's interfaces write times."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def model_card(name: str, client: EngineClient, created: int, adapter: str = "") -> dict[str, Any]:
    """One entry of `/v1/models`; `created` is in Unix seconds. An adapter's has the folder that it came from, and the
    model as its parent."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "together-llm",
        "root": adapter or client.model_name,
        "parent": client.model_name if adapter else None,
        "max_model_len": client.max_model_len,
    }


async def tokenize(prompts: Prompts, request: TokenizeRequest, limit: int) -> dict[str, Any]:
    """`/tokenize`."""
    tokenizer = prompts.need_tokenizer("/tokenize")
    if (request.prompt is None) == (request.messages is None):
        raise RequestError("give either prompt or messages", param="prompt")
    if request.messages is not None:
        go_on = bool(request.continue_final_message)
        variables = {**(request.chat_template_kwargs or {}), "add_generation_prompt": not go_on}
        if request.add_generation_prompt is not None:
            variables["add_generation_prompt"] = request.add_generation_prompt
        tools = OfferedTools(request.tools, None, None).for_template()
        prompt = await prompts.chat(request.messages, bool(request.add_special_tokens), go_on, variables, tools)
        ids = list(prompt.ids)
    else:
        ids = await prompts.encode(request.prompt or "", request.add_special_tokens is not False)
    made: dict[str, Any] = {"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": None}
    if request.return_token_strs:
        made["token_strs"] = [tokenizer.token_label(i) for i in ids]
    return made


def tokenizer_info(prompts: Prompts) -> dict[str, Any]:
    """`/tokenizer_info`: the special tokens and the chat template, for clients that render prompts themselves."""
    tokenizer = prompts.need_tokenizer("/tokenizer_info")
    template = prompts.template.source if prompts.template is not None else None
    return {"tokenizer_class": "Tokenizer", **tokenizer.special_tokens, "chat_template": template}
