"""Embeddings, scores and rankings over HTTP, of a fake engine whose vectors count kinds of tokens."""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import tokenizers

from tests.unit.server.kit import POOLING, TOKENIZER, post, refusal, run, say, serve
from tllm.core.errors import ClusterError, RequestError, TllmError
from tllm.server.admission.token_bucket import RateLimits
from tllm.server.pooling.pooled_prompts import AT_ONCE, PooledPrompts
from tllm.server.pooling.pooler_config import ModelPooling
from tllm.server.pooling.score_prompts import AFTER, BEFORE, INSTRUCTION, ScorePrompts
from tllm.server.pooling.vectors import cosine, embedding
from tllm.spec.request import Output, PoolingParams, Request
from tllm.text.tokenizer import Tokenizer

ANSWERS = (TOKENIZER.inner.id_to_token(40), TOKENIZER.inner.id_to_token(41))
IDS = [5, 6, 7, 9, 13]
COUNTS = [0.0, 3.0, 1.0, 1.0]  # of IDS by the rest after dividing by 4


def unit(values: list[float]) -> list[float]:
    length = math.sqrt(sum(value * value for value in values))
    return [value / length for value in values]


def embed(**fields: Any) -> Any:
    response = post(serve(say()), "/v1/embeddings", fields)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("given", ["the dog", ["the dog"], TOKENIZER.encode("the dog"), [TOKENIZER.encode("the dog")]])
def test_an_input_is_a_text_or_ids_or_a_batch_of_either(given: Any) -> None:
    reply = embed(input=given, model="tiny", user="someone")
    ids = TOKENIZER.encode("the dog")
    assert reply["usage"] == {"prompt_tokens": len(ids), "total_tokens": len(ids)}
    assert (reply["object"], reply["model"]) == ("list", "tiny")
    [one] = reply["data"]
    assert (one["object"], one["index"]) == ("embedding", 0)
    wanted = unit([float(sum(i % 4 == kind for i in ids)) for kind in range(4)])
    assert one["embedding"] == pytest.approx(wanted, rel=1e-6)


def test_batches_keep_their_order_and_base64_has_the_same_numbers() -> None:
    batch = [[i + 1] * (i + 1) for i in range(AT_ONCE + 9)]
    plain, packed = embed(input=batch), embed(input=batch, encoding_format="base64")
    assert [one["index"] for one in plain["data"]] == list(range(len(batch)))
    for given, one, other in zip(batch, plain["data"], packed["data"], strict=True):
        assert one["embedding"] == [float(given[0] % 4 == kind) for kind in range(4)]
        assert list(struct.unpack("<4f", base64.b64decode(other["embedding"]))) == one["embedding"]


def test_dimensions_cut_and_normalise_again() -> None:
    assert embed(input=IDS)["data"][0]["embedding"] == pytest.approx(unit(COUNTS), rel=1e-6)
    assert embed(input=IDS, dimensions=3)["data"][0]["embedding"] == pytest.approx(unit(COUNTS[:3]), rel=1e-6)
    assert embed(input=IDS, dimensions=3, normalize=False)["data"][0]["embedding"] == COUNTS[:3]
    assert embed(input=IDS, dimensions=1)["data"][0]["embedding"] == [0.0], "zeros have no direction"


def test_the_engine_is_asked_for_the_models_pooling() -> None:
    engine = say()
    app = serve(engine, pooling=ModelPooling(kind="mean", hidden_size=4), api_keys=("secret-key",))
    headers = {"authorization": "Bearer secret-key"}
    assert post(app, "/v1/embeddings", {"input": IDS, "cache_salt": "a"}, headers=headers).status_code == 200
    assert post(app, "/v1/embeddings", {"input": IDS, "cache_salt": "b"}, headers=headers).status_code == 200
    assert [request.pooling for request in engine.submitted] == [PoolingParams(kind="mean")] * 2
    assert len({request.cache_salt for request in engine.submitted} - {""}) == 2


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [1, "a"]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": IDS, "dimensions": 5}, "dimensions"),
        ({"input": IDS, "dimensions": 0}, "dimensions"),
        ({"input": IDS, "encoding_format": "int8"}, "encoding_format"),
        ({"input": IDS, "truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
        ({"input": [3] * 257}, "input"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    assert refusal(post(serve(say()), "/v1/embeddings", fields), 400)["param"] == param


def test_unknown_models_and_servers_without_pooling_are_refused() -> None:
    for path, fields in (("/v1/embeddings", {"input": "a"}), ("/score", {"text_1": "a", "text_2": "b"})):
        assert refusal(post(serve(say()), path, {**fields, "model": "other"}), 404)["code"] == "model_not_found"
        refusal(post(serve(say(), pooling=None), path, fields), 400)


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_a_score_is_the_cosine_of_embeddings(path: str) -> None:
    texts = ["the dog", "the cat", "hello"]
    vectors = [embed(input=text)["data"][0]["embedding"] for text in texts]
    engine = say()
    reply = post(serve(engine), path, {"text_1": texts[0], "text_2": texts}).json()
    assert [one["score"] for one in reply["data"]] == pytest.approx([cosine(vectors[0], v) for v in vectors], rel=1e-6)
    assert reply["data"][0] == {"index": 0, "object": "score", "score": pytest.approx(1.0)}
    assert len(engine.submitted) == 3, "each text is embedded once"
    assert reply["usage"]["prompt_tokens"] == sum(len(TOKENIZER.encode(text)) for text in texts)
    side_by_side = post(serve(say()), path, {"text_1": texts[:2], "text_2": texts[1:]}).json()
    assert [one["score"] for one in side_by_side["data"]] == pytest.approx(
        [cosine(vectors[0], vectors[1]), cosine(vectors[1], vectors[2])], rel=1e-6
    )
    for wrong in ({"text_1": texts[:2], "text_2": texts}, {"text_1": [], "text_2": texts}):
        refusal(post(serve(say()), path, wrong), 400)
    refusal(post(serve(say()), path, {"text_1": "a", "text_2": "b", "instruction": "c"}), 400)


def test_rankings_are_sorted_and_cut() -> None:
    texts = ["hello", "the dog", {"text": "the cat"}, "the dog"]
    plain = ["hello", "the dog", "the cat", "the dog"]
    scores = [cosine(*(embed(input=text)["data"][0]["embedding"] for text in ("the dog", one))) for one in plain]
    order = sorted(range(4), key=lambda i: -scores[i])
    asked = {"query": "the dog", "documents": texts}
    for path, shows in (("/rerank", True), ("/v1/rerank", True), ("/v2/rerank", False)):
        reply = post(serve(say()), path, asked).json()
        assert [one["index"] for one in reply["results"]] == order
        assert order[:2] == [1, 3], "of equal documents the earlier one comes first"
        assert [one["relevance_score"] for one in reply["results"]] == pytest.approx([scores[i] for i in order])
        for one in reply["results"]:
            assert one.get("document") == ({"text": plain[one["index"]]} if shows else None)
        other = post(serve(say()), path, {**asked, "top_n": 2, "return_documents": not shows}).json()
        assert [one["index"] for one in other["results"]] == order[:2]
        assert all(("document" in one) is not shows for one in other["results"])
    refusal(post(serve(say()), "/rerank", {"query": "a", "documents": []}), 400)
    assert refusal(post(serve(say()), "/rerank", {**asked, "rank_fields": ["a"]}), 400)["param"] == "rank_fields"


def test_a_generative_reranker_is_asked_in_the_words_of_its_card() -> None:
    """Through the template, where the tokenizer lacks the marks of Qwen's chat; the second answer against the first."""
    engine = say()
    pooling = ModelPooling(score_type="generative", hidden_size=4, answers=ANSWERS)
    reply = post(serve(engine, pooling=pooling), "/rerank", {"query": "q", "documents": ["d"], "instruction": "why"})
    assert reply.status_code == 200, reply.text
    [request] = engine.submitted
    assert request.pooling == PoolingParams(kind="logprobs", token_ids=(40, 41))
    said = TOKENIZER.decode(request.prompt_ids)
    assert said.endswith("<｜assistant｜>")
    assert "<Instruct>: why\n<Query>: q\n<Document>: d" in said
    difference = 1 / len(request.prompt_ids)  # of the fake engine's two log-probabilities
    assert reply.json()["results"][0]["relevance_score"] == pytest.approx(1 / (1 + math.exp(difference)))
    lacks = ModelPooling(score_type="generative", hidden_size=4, answers=("no-such-token", ANSWERS[1]))
    refused = post(serve(say(), pooling=lacks), "/rerank", {"query": "q", "documents": ["d"]})
    assert "no-such-token" in refusal(refused, 400)["message"]


def test_the_card_is_quoted_in_three_pieces() -> None:
    class Pieces:
        """A tokenizer with the marks of Qwen's chat, whose ids are places in what it has encoded."""

        def __init__(self) -> None:
            self.texts: list[str] = []

        def id_of(self, token: str) -> int | None:
            return 7 if token == "<|im_start|>" else None

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            assert not add_special_tokens
            self.texts.append(text)
            return [len(self.texts)]

    pieces = Pieces()
    ids = ScorePrompts(pieces, None, ("no", "yes")).question("q", "d", None)  # type: ignore[arg-type]
    assert ids == (1, 2, 3)
    assert pieces.texts == [BEFORE, f"<Instruct>: {INSTRUCTION}\n<Query>: q\n<Document>: d", AFTER]


def test_a_classification_head_scores_pairs() -> None:
    pooling = ModelPooling(score_type="classification", hidden_size=4, num_labels=1)
    pair = len(TOKENIZER.encode_pair("the", "dog"))
    asked = {"text_1": "the", "text_2": "dog"}
    for activation, wanted in ((True, 1 / (1 + math.exp(-pair / 4))), (False, pair / 4)):
        reply = post(serve(say(), pooling=pooling), "/score", {**asked, "use_activation": activation}).json()
        assert reply["data"][0]["score"] == pytest.approx(wanted)
    three = ModelPooling(score_type="classification", hidden_size=4, num_labels=3)
    assert "3 labels" in refusal(post(serve(say(), pooling=three), "/score", asked), 400)["message"]


@pytest.mark.parametrize(
    ("problem_type", "probs"),
    [
        ("", [1 / (1 + math.exp(-2.0) + math.exp(-3.0)), math.exp(-2.0), math.exp(-3.0)]),
        ("multi_label_classification", [1 / (1 + math.exp(-1.0)), 1 / (1 + math.exp(1.0)), 1 / (1 + math.exp(2.0))]),
        ("regression", [1.0, -1.0, -2.0]),
    ],
)
def test_texts_are_classified_as_vllm_does(problem_type: str, probs: list[float]) -> None:
    if not problem_type:
        probs = [probs[0], probs[0] * probs[1], probs[0] * probs[2]]
    engine = say()
    engine._pooled = lambda request: (1.0, -1.0, -2.0)  # type: ignore[method-assign]
    named = dict(labels=("calm", "angry", "sad"), problem_type=problem_type)
    pooling = ModelPooling(score_type="classification", hidden_size=4, num_labels=3, **named)  # type: ignore[arg-type]
    app = serve(engine, pooling=pooling)
    reply = post(app, "/classify", {"input": ["the dog", "hello"]}).json()
    assert [one["label"] for one in reply["data"]] == ["calm"] * 2 and reply["data"][1]["num_classes"] == 3
    assert reply["data"][0]["probs"] == pytest.approx(probs)
    assert reply["usage"]["prompt_tokens"] == sum(len(TOKENIZER.encode(text)) for text in ("the dog", "hello"))
    bare = post(app, "/classify", {"input": "hello", "use_activation": False}).json()
    assert bare["data"][0]["probs"] == [1.0, -1.0, -2.0]
    assert refusal(post(app, "/classify", {"input": "a", "messages": [1]}), 400)["param"] == "messages"
    assert "no classification head" in refusal(post(serve(say()), "/classify", {"input": "a"}), 400)["message"]


def test_ollama_embeds_texts_by_both_names() -> None:
    wanted = [embed(input=text)["data"][0]["embedding"] for text in ("the dog", "hello")]
    reply = post(serve(say()), "/api/embed", {"model": "tiny:latest", "input": ["the dog", "hello"]}).json()
    assert reply["embeddings"] == wanted
    assert reply["prompt_eval_count"] == len(TOKENIZER.encode("the dog")) + len(TOKENIZER.encode("hello"))
    assert post(serve(say()), "/api/embeddings", {"model": "tiny", "prompt": "hello"}).json() == {
        "embedding": wanted[1]
    }
    short = post(serve(say()), "/api/embed", {"model": "tiny", "input": "hello", "dimensions": 2}).json()
    assert len(short["embeddings"][0]) == 2
    long = {"model": "tiny", "input": "the dog " * 300}
    engine = say()
    assert post(serve(engine), "/api/embed", long).status_code == 200
    assert engine.submitted[0].prompt_ids == tuple(TOKENIZER.encode(long["input"])[: engine.max_model_len]), "cut"
    huge = {**long, "input": ["the dog " * 50_000, "hello"]}
    assert len(post(serve(say()), "/api/embed", huge).json()["embeddings"]) == 2
    refused = post(serve(say()), "/api/embed", {**long, "truncate": False})
    assert refused.status_code == 400 and "context" in refused.json()["error"]


def test_a_text_that_is_cut_keeps_the_token_after_it() -> None:
    """Models that embed are trained to be read there: of another token the embedding says something else."""
    inner = tokenizers.Tokenizer.from_str(TOKENIZER.inner.to_str())
    ends = [(token, inner.token_to_id(token)) for token in ("<s>", "</s>")]
    inner.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    tokenizer, engine = Tokenizer(inner, TOKENIZER.config), say()
    text = "the dog " * 300
    assert post(serve(engine, tokenizer), "/api/embed", {"model": "tiny", "input": [text, "a"]}).status_code == 200
    cut, short = (request.prompt_ids for request in engine.submitted)
    assert len(cut) == engine.max_model_len
    assert cut == (*tokenizer.encode(text)[: len(cut) - 1], inner.token_to_id("</s>"))
    assert short == tuple(tokenizer.encode("a"))


@pytest.mark.usefixtures("full_buckets")
@pytest.mark.parametrize(
    ("error", "status", "least", "most_left"),
    [(RequestError("no"), 400, 940, 989), (ClusterError("gone"), 503, 1000, 1000)],
)
def test_prompts_that_are_done_are_paid_for_unless_the_server_fails(
    error: TllmError, status: int, least: int, most_left: int
) -> None:
    engine = say()
    app = serve(engine, max_sequences=2, rate_limit=RateLimits(tokens_per_minute=1000))
    most = 0

    def pooled(request: Request) -> tuple[float, ...]:
        nonlocal most
        most = max(most, engine.running)
        if request.prompt_ids[0] == 5:
            raise error
        return (1.0,) * 4

    engine._pooled = pooled  # type: ignore[method-assign]
    assert post(app, "/v1/embeddings", {"input": [[n] * 10 for n in range(1, 9)]}).status_code == status
    assert most == 2, "no more than are taken at once"
    left = int(app.keys.anonymous.headers()["x-ratelimit-remaining-tokens"])
    assert least <= left <= most_left, "those before the fifth, and one or two after it, of ten tokens each"


@pytest.mark.usefixtures("virtual_time", "full_buckets")
def test_prompts_that_are_cancelled_cost_what_was_computed_of_them() -> None:
    engine = say()
    engine.computed, engine.hold_after = 30, 0
    app = serve(engine, rate_limit=RateLimits(tokens_per_minute=100), request_seconds=0.1)
    assert post(app, "/v1/embeddings", {"input": [[1] * 40, [2] * 40]}).status_code == 504
    left = int(app.keys.anonymous.headers()["x-ratelimit-remaining-tokens"])
    assert left == 100 - 2 * 30


def test_the_first_prompt_that_fails_ends_the_others() -> None:
    cancelled: list[int] = []

    async def one(request: Request, look: Callable[[Output], None]) -> Output:
        import asyncio

        if request.prompt_ids == (2,):
            raise RequestError("no")
        try:
            await asyncio.sleep(30)
        finally:
            cancelled.append(request.prompt_ids[0])
        raise AssertionError("nobody waits for this")

    pooled = PooledPrompts(one, POOLING, ScorePrompts(None, None, ("no", "yes")))
    with pytest.raises(RequestError, match="no"):
        run(pooled.embed([[1], [2], [3]]))
    assert sorted(cancelled) == [1, 3]
    assert embedding((3.0, 4.0), normalize=True) == (0.6, 0.8)


def test_nothing_is_encoded_after_a_pair_that_is_too_long() -> None:
    """A query is part of each pair: one of 4 MB with 2048 documents would have been encoded 2048 times, for hours, in
    one of the few threads that encode long texts for all."""
    encoded = list[str]()

    class Prompts(ScorePrompts):
        def pair(self, text: str, other: str) -> tuple[int, ...]:
            encoded.append(other)
            return super().pair(text, other)

    def check(ids: Sequence[int]) -> None:
        if len(ids) > 50:
            raise RequestError(f"an input has {len(ids)} tokens")

    async def run_pooled(request: Request, look: Callable[[Output], None]) -> Output:
        raise AssertionError("nothing is computed")

    pooling = ModelPooling(score_type="classification", hidden_size=4, num_labels=1)
    pooled = PooledPrompts(run_pooled, pooling, Prompts(TOKENIZER, None, ANSWERS), check)
    with pytest.raises(RequestError, match="an input has"):
        run(pooled.score([("the dog " * 100, str(number)) for number in range(2048)]))
    assert encoded == ["0"]
