"""What lm-evaluation-harness 0.4.13 asks of a server, word for word, and what it makes of the replies.

Its `local-completions` sends batches of token ids with echo, logprobs and one token to generate, and cuts the prompt's
log-probabilities out of the reply by position; texts with a stop and a seed; and asks for the tokenizer first. Its
`local-chat-completions` sends messages. Embeddings are asked for beside, as retrieval tasks do.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers

from tests.support.models.families import save_model
from tests.unit.server.kit import TEMPLATE, TOKENIZER
from tllm import LLM, SamplingParams
from tllm.api.engine_options import engine_options
from tllm.api.open_engine import open_engine
from tllm.server.app import build_app
from tllm.server.http.settings import ServerSettings

SEED = 1234
PAIRS = [("the dog is", " big"), ("the dog is", " a small animal"), ("", "hello"), ("how are you", "? fine, thank you")]
TEXT = "the dog is big. how are you? fine, thank you. hello world"
CHOICES = [(TOKENIZER.encode(context), TOKENIZER.encode(end, add_special_tokens=False)) for context, end in PAIRS]


async def loglikelihoods(http: httpx.AsyncClient, pairs: list[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
    """The sum over a continuation, and whether each of its tokens is the likeliest."""
    payload = {
        "model": "model",
        "prompt": [context + end for context, end in pairs],
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": SEED,
        "echo": True,
    }
    reply = await http.post("/v1/completions", json=payload)
    assert reply.status_code == 200, reply.text
    found = []
    for choice, (context, _) in zip(sorted(reply.json()["choices"], key=lambda c: c["index"]), pairs, strict=True):
        of_tokens = choice["logprobs"]["token_logprobs"][len(context) : -1]
        tops = choice["logprobs"]["top_logprobs"][len(context) : -1]
        greedy = all(token == max(top.values()) for token, top in zip(of_tokens, tops, strict=True))
        found.append((sum(of_tokens), greedy))
    return found


async def generations(http: httpx.AsyncClient, prompts: Any) -> list[str]:
    payload = {
        "prompt": prompts,
        "model": "model",
        "max_tokens": 12,
        "temperature": 0,
        "stop": ["zzz", "<|endoftext|>"],
        "seed": SEED,
    }
    reply = await http.post("/v1/completions", json=payload)
    assert reply.status_code == 200, reply.text
    return [choice["text"] for choice in sorted(reply.json()["choices"], key=lambda choice: choice["index"])]


async def chat(http: httpx.AsyncClient) -> str:
    payload = {
        "messages": [{"role": "user", "content": "hello", "type": "text"}],
        "model": "model",
        "max_tokens": 12,
        "temperature": 0,
        "stop": ["zzz"],
        "seed": SEED,
    }
    reply = await http.post("/v1/chat/completions", json=payload)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["message"]["content"])


async def tokenizer_is_remote(http: httpx.AsyncClient) -> bool:
    """What it tries before it takes the server's tokenizer for its own."""
    info = (await http.get("/tokenizer_info")).json()
    tokenized = (await http.post("/tokenize", json={"prompt": "the dog", "add_special_tokens": False})).json()
    back = (await http.post("/detokenize", json={"tokens": tokenized["tokens"]})).json()
    return "eos_token" in info and tokenized["count"] == len(tokenized["tokens"]) and back["prompt"] == "the dog"


async def embedded(http: httpx.AsyncClient) -> list[list[float]]:
    reply = await http.post("/v1/embeddings", json={"input": [TEXT, "hello"], "model": "model"})
    assert reply.status_code == 200, reply.text
    return [one["embedding"] for one in reply.json()["data"]]


async def evaluated(folder: Path, plan: str) -> dict[str, Any]:
    """Everything, of a server whose model is cut by this plan."""
    options = engine_options(folder, plan, threads=1)
    async with open_engine(options) as engine:
        app = build_app(
            engine, TOKENIZER, TEMPLATE, ServerSettings(model_aliases=("model",)), pooling=options.pooling()
        )
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000", timeout=60) as http:
            assert await tokenizer_is_remote(http)
            text = TOKENIZER.encode(TEXT)
            rolling = [(text[:1], text[1:])]  # `loglikelihood_rolling`: the first token is the context
            return {
                "loglikelihood": [*await loglikelihoods(http, CHOICES), *await loglikelihoods(http, rolling)],
                "one by one": [(await loglikelihoods(http, [pair]))[0] for pair in CHOICES],
                "texts": await generations(http, [context for context, _ in PAIRS[:2]]),
                "ids": await generations(http, [context for context, _ in CHOICES[:2]]),
                "chat": await chat(http),
                "embeddings": await embedded(http),
            }


def in_process(model: transformers.PreTrainedModel, context: list[int], end: list[int]) -> tuple[float, bool]:
    """What its model `hf` computes."""
    with torch.inference_mode():
        logits_TV = model(torch.tensor([context + end])).logits[0, len(context) - 1 : -1]
    logprobs = torch.log_softmax(logits_TV.float(), -1)[range(len(end)), end]
    return float(logprobs.sum()), bool((logits_TV.argmax(-1) == torch.tensor(end)).all())


@pytest.mark.timeout(300)
def test_an_evaluation_has_the_same_numbers_under_every_plan_as_in_process(tmp_path: Path) -> None:
    model = save_model("llama", tmp_path, vocab_size=TOKENIZER.size)
    text = TOKENIZER.encode(TEXT)
    truth = [in_process(model, *pair) for pair in (*CHOICES, (text[:1], text[1:]))]
    found = {plan: asyncio.run(evaluated(tmp_path, plan)) for plan in ("pp=1", "pp=2", "tp=2")}
    for plan, numbers in found.items():
        for (got, greedy), (want, is_greedy) in zip(numbers["loglikelihood"], truth, strict=True):
            assert abs(got - want) < 2e-4 and greedy == is_greedy, (plan, got, want)
        for (got, _), (want, _) in zip(numbers["one by one"], truth, strict=False):
            assert abs(got - want) < 2e-4, plan
        assert numbers["texts"] == numbers["ids"] == found["pp=1"]["texts"], plan
        assert numbers["chat"] == found["pp=1"]["chat"] != "", plan
        for got, want in zip(numbers["embeddings"], found["pp=1"]["embeddings"], strict=True):
            assert max(abs(a - b) for a, b in zip(got, want, strict=True)) < 1e-5, plan


def test_python_embeds_and_scores_as_the_server_does(tmp_path: Path) -> None:
    save_model("llama", tmp_path, vocab_size=TOKENIZER.size)
    TOKENIZER.inner.save(str(tmp_path / "tokenizer.json"))
    truth = asyncio.run(evaluated(tmp_path, "pp=1"))["embeddings"]
    with LLM(tmp_path, pooler_config={"pooling_type": "last"}) as llm:
        found = llm.embed([TEXT, TOKENIZER.encode("hello")])
        for one, want in zip(found, truth, strict=True):
            assert one.embedding == pytest.approx(want, rel=1e-5, abs=1e-6)
        assert found[0].prompt_token_ids == tuple(TOKENIZER.encode(TEXT))
        assert len(llm.embed("hello", dimensions=5)[0].embedding) == 5
        close, far = llm.score(TEXT, [TEXT, "hello"])
        assert close == pytest.approx(1.0) and close > far
        assert llm.generate("hello", SamplingParams(max_tokens=2))[0].token_ids, "the same engine writes too"
