"""Rewards of an HTTP server: a reward model that is served (`/score`), or any program that verifies completions.

A path that ends with `/score` is asked as `tllm serve` and vLLM are, with lists of texts:

    {"text_1": [prompt, …], "text_2": [completion, …], "use_activation": false} -> {"data": [{"score": …}, …]}

Any other gets what a Python function gets, and answers with a list of numbers, null for nothing to say:

    {"prompts": […], "completions": […], "completion_ids": […], "COLUMN": […]} -> {"rewards": […]}
"""

from __future__ import annotations

import http.client
import os
import re
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from tllm.core.errors import UNREADABLE, ConfigError
from tllm.server.http.opener import opener
from tllm.training.policy.reward_functions import RewardFunction

KEY_VARIABLE = "TLLM_REWARD_API_KEY"
"""The environment variable of the key that servers of rewards are sent, if they want one."""

AT_ONCE = 64
"""Completions of one question to `/score`, which servers bound."""

LIMIT = 64 * 1024 * 1024
"""Bytes of an answer that are read at most."""

NOT_JSON = re.compile(rb"[\[,:]\s*(-?(?:NaN|Infinity))\b")
"""What Python's json writes of numbers that JSON has not."""

T = TypeVar("T")


class PairScore(msgspec.Struct):
    """One score of an answer of `/score`."""

    score: float


class ScoreAnswer(msgspec.Struct):
    """An answer of `/score`, in the order of the question."""

    data: list[PairScore]


class RewardAnswer(msgspec.Struct):
    """The answer of any other server."""

    rewards: list[float | None]


_SCORES, _REWARDS = msgspec.json.Decoder(ScoreAnswer), msgspec.json.Decoder(RewardAnswer)


def http_reward(url: str, seconds: float) -> RewardFunction:
    """What the server at `url` says of completions. ConfigError, in one line, where it says nothing of use.

    It has these `seconds` as a Python function has them, together with all others: the client has no limit of its own,
    which would go on while this process stands still.
    """
    ask = _scores if url.rstrip("/").endswith("/score") else _rewards
    return RewardFunction(url, None, lambda **columns: ask(url, columns), seconds)


def _rewards(url: str, columns: Mapping[str, Sequence[Any]]) -> list[float | None]:
    return _asked(url, columns, _REWARDS).rewards


def _scores(url: str, columns: Mapping[str, Sequence[Any]]) -> list[float]:
    prompts, completions = columns["prompts"], columns["completions"]
    if not all(isinstance(text, str) for text in (*prompts, *completions)):
        raise ConfigError(
            f"the server at {url} scores texts, and prompts of this job are messages",
            "write prompts as texts, or reward them by a function of your own that asks the server",
        )
    found: list[float] = []
    for at in range(0, len(prompts), AT_ONCE):
        texts = {"text_1": prompts[at : at + AT_ONCE], "text_2": completions[at : at + AT_ONCE]}
        found += [one.score for one in _asked(url, {**texts, "use_activation": False}, _SCORES).data]
    return found


def _asked(url: str, question: Mapping[str, Any], decoder: msgspec.json.Decoder[T]) -> T:
    """The answer to a question."""
    headers = {"content-type": "application/json"}
    if key := os.environ.get(KEY_VARIABLE):
        headers["authorization"] = f"Bearer {key}"
    request = urllib.request.Request(url, msgspec.json.encode(question), headers)
    try:
        with opener(url).open(request) as reply:
            content = reply.read(LIMIT)
    except urllib.error.HTTPError as error:
        said = " ".join(error.read(200).decode("utf-8", "replace").split())
        error.close()
        raise ConfigError(
            f"the server at {url} answered {error.code}: {said or error.reason}",
            f"see its log; a key is sent where {KEY_VARIABLE} is set",
        ) from error
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise ConfigError(f"the server at {url} cannot be asked: {reason}", "start it, and go on") from error
    try:
        return decoder.decode(content)
    except UNREADABLE as error:
        if (found := NOT_JSON.search(content)) is not None:
            raise ConfigError(
                f"the server at {url} answered with {found[1].decode()} for a reward, which is no number",
                "null says that there is no reward",
            ) from error
        raise ConfigError(
            f"the server at {url} answered with something else than rewards: {error}",
            'it is to answer {"rewards": [number or null, …]}, or as /score does',
        ) from error
