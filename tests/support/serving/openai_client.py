"""The official client, as a process of its own: `python -m tests.support.serving.openai_client URL KEY COUNT`.

It streams COUNT completions at once, and prints one JSON list of the token ids of each; an error goes to stderr with
its type and code, exit code 1.
"""

from __future__ import annotations

import asyncio
import json
import sys

from openai import APIError, AsyncOpenAI


async def one(client: AsyncOpenAI, model: str, number: int) -> list[int]:
    stream = await client.completions.create(
        model=model,
        prompt=[1, 2, 3 + number],
        max_tokens=24,
        temperature=0,
        stream=True,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    ids: list[int] = []
    async for chunk in stream:
        for choice in chunk.choices:
            ids += getattr(choice, "token_ids", None) or []
    return ids


async def main(url: str, key: str, count: int) -> None:
    async with AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
        model = (await client.models.list()).data[0].id
        print(json.dumps(await asyncio.gather(*(one(client, model, number) for number in range(count)))))


if __name__ == "__main__":
    try:
        asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
    except APIError as error:
        sys.exit(f"{type(error).__name__} {error.code}: {error.message}")
