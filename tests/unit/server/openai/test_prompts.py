"""Prompts that come as token ids, of which a body has room for millions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.server.kit import TOKENIZER, post, refusal, run, say, serve
from tllm.core.errors import RequestError
from tllm.server.http.errors import HttpError
from tllm.server.openai.prompts import IDS_AT_ONCE, Prompts

MANY = 5 * IDS_AT_ONCE


class UnseenIds(list[int]):
    """Ids of which none but the first may be looked at."""

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("all ids were looked at")

    def __getitem__(self, place: Any) -> Any:
        assert place == 0, f"{place} was looked at"
        return super().__getitem__(place)


@pytest.mark.parametrize("is_batch", [False, True])
def test_ids_that_cannot_fit_are_refused_before_they_are_looked_at(is_batch: bool) -> None:
    ids = UnseenIds([7]) * 257
    unseen = UnseenIds(ids)
    with pytest.raises(HttpError, match=r"prompt is too long: 257 tokens > 256; .* context length is 256"):
        run(Prompts(TOKENIZER, None, 256).batch([[5], unseen] if is_batch else unseen, True))


@pytest.mark.parametrize("is_batch", [False, True])
def test_others_have_their_turn_while_many_ids_are_looked_at(is_batch: bool) -> None:
    async def work() -> int:
        turns = 0

        async def others() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        beside = asyncio.create_task(others())
        ids = [7] * MANY
        [*_, prompt] = await Prompts(TOKENIZER, None, MANY).batch([[5], ids] if is_batch else ids, True)
        beside.cancel()
        assert prompt.ids == tuple(ids)
        return turns

    assert run(work()) == MANY // IDS_AT_ONCE - 1


@pytest.mark.parametrize(("last", "said"), [(-1, "from 0 to"), (1 << 31, "from 0 to"), ("a", "not bare ids among")])
def test_the_last_of_many_ids_is_looked_at_too(last: int | str, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        run(Prompts(TOKENIZER, None, MANY).batch([*([7] * (MANY - 1)), last], True))


@pytest.mark.parametrize(("path", "name"), [("/v1/completions", "prompt"), ("/v1/embeddings", "input")])
@pytest.mark.parametrize("given", [[7] * 300, [[7] * 300], "a " * 100_000])
def test_the_field_that_is_too_long_is_named(path: str, name: str, given: Any) -> None:
    reply = refusal(post(serve(say()), path, {"model": "tiny", name: given}), 400)
    assert (reply["code"], reply["param"]) == ("context_length_exceeded", name)
