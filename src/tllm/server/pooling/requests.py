"""Requests for embeddings and scores as types: OpenAI's, vLLM's, and those of Jina and Cohere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tllm.core.errors import RequestError, counted
from tllm.server.openai.prompts import count_prompts
from tllm.server.openai.requests import Refused, Salt, refuse

MAX_INPUTS = 2048
"""Texts of one request, as OpenAI has it."""

Texts = str | Annotated[list[str], Meta(max_length=MAX_INPUTS)]


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """`POST /v1/embeddings`: a text, ids, or a batch of either. `user` is taken and has no effect."""

    input: str | Annotated[list[str | int | list[int]], Meta(min_length=1)]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    add_special_tokens: bool | None = None
    cache_salt: Salt | None = None
    truncate_prompt_tokens: Refused = None
    messages: Refused = None

    def check(self) -> None:
        """What types alone do not say."""
        refuse(self, EmbeddingRequest)
        _check_count(self.input)


class ClassificationRequest(msgspec.Struct, kw_only=True):
    """`POST /classify`: a text, ids, or a batch of either, for a model with a classification head. `user` is taken and
    has no effect."""

    input: str | Annotated[list[str | int | list[int]], Meta(min_length=1)]
    model: str | None = None
    use_activation: bool | None = None
    add_special_tokens: bool | None = None
    cache_salt: Salt | None = None
    truncate_prompt_tokens: Refused = None
    messages: Refused = None

    def check(self) -> None:
        """What types alone do not say."""
        refuse(self, ClassificationRequest)
        _check_count(self.input)


class ScoreRequest(msgspec.Struct, kw_only=True):
    """`POST /v1/score`: one text with one or many, or as many with as many."""

    text_1: Texts
    text_2: Texts
    model: str | None = None
    instruction: str | None = None
    use_activation: bool | None = None
    cache_salt: Salt | None = None
    truncate_prompt_tokens: Refused = None

    def pairs(self) -> list[tuple[str, str]]:
        """The pairs to score. RequestError for lists that do not go together."""
        refuse(self, ScoreRequest)
        first = [self.text_1] if isinstance(self.text_1, str) else self.text_1
        second = [self.text_2] if isinstance(self.text_2, str) else self.text_2
        if not first or not second:
            raise RequestError("a score is of two texts, and one list is empty", param="text_2" if first else "text_1")
        if len(first) == 1:
            return [(first[0], other) for other in second]
        if len(first) != len(second):
            message = f"text_1 has {counted(len(first), 'text')} and text_2 {len(second)}"
            raise RequestError(message, "give one text_1, or as many as there are of text_2", "text_2")
        return list(zip(first, second, strict=True))


class RerankDocument(msgspec.Struct, kw_only=True):
    """A document as an object; only its text is read."""

    text: str


class RerankRequest(msgspec.Struct, kw_only=True):
    """`POST /v1/rerank` and `/v2/rerank`: documents, ordered by how well they meet a query."""

    query: str
    documents: Annotated[list[str | RerankDocument], Meta(min_length=1, max_length=MAX_INPUTS)]
    model: str | None = None
    top_n: Annotated[int, Meta(ge=0)] | None = None
    return_documents: bool | None = None
    instruction: str | None = None
    use_activation: bool | None = None
    cache_salt: Salt | None = None
    truncate_prompt_tokens: Refused = None
    rank_fields: Refused = None
    max_chunks_per_doc: Refused = None

    def texts(self) -> list[str]:
        """The documents. RequestError for what is not done here."""
        refuse(self, RerankRequest)
        return [one if isinstance(one, str) else one.text for one in self.documents]


def _check_count(given: str | Sequence[str | int | list[int]]) -> None:
    count = count_prompts(given)
    if count > MAX_INPUTS:
        raise RequestError(f"{count} inputs, at most {MAX_INPUTS} are taken", "send several", "input")
