"""The messages between a run and a rollout server.

A run introduces itself by its job. Before it asks for completions it sends the hashes of its weights, chunk by chunk;
the server names the chunks that it lacks, and is sent these.
"""

from __future__ import annotations

import msgspec

from tllm.training.policy.rollouts import Completion, CompletionSampling, PromptGroup
from tllm.training.questions.run_connection import Conversation


class RolloutRun(msgspec.Struct, frozen=True):
    """The run: its job (`encode_job`), and its model's `config.json`.

    `vocabulary` is the digest of its tokens, "" without a tokenizer. `base` is the digest of the files of the model
    beside an adapter that is trained, "" where the model itself is.
    """

    job: str
    config: str
    vocabulary: str
    base: str = ""


class WeightHashes(msgspec.Struct, frozen=True, tag="hashes"):
    """The hashes of all chunks of the weights that come next; `table` is the digest of their places (`ChunkTable`)."""

    table: bytes
    hashes: bytes


class WeightBytes(msgspec.Struct, frozen=True, tag="bytes"):
    """Some chunks that a server lacks, by their numbers."""

    numbers: tuple[int, ...]
    contents: tuple[bytes, ...]


class PromptGroups(msgspec.Struct, frozen=True, tag="prompts"):
    """Prompts to complete with the weights of this `root`, as in a `RolloutOrder`."""

    number: int
    root: bytes
    groups: tuple[PromptGroup, ...]
    stop_ids: tuple[int, ...]
    sampling: CompletionSampling


RolloutQuestion = WeightHashes | WeightBytes | PromptGroups


class RolloutAnswer(msgspec.Struct, frozen=True):
    """To hashes: numbers of chunks that are `lacking`. To bytes: nothing. To prompts: completions. Or an `error`."""

    number: int = 0
    lacking: tuple[int, ...] = ()
    completions: tuple[Completion, ...] = ()
    error: str = ""


SAMPLING: Conversation[RolloutRun, RolloutQuestion, RolloutAnswer] = Conversation(
    "rollout server",
    introductions=msgspec.msgpack.Decoder(RolloutRun),
    questions=msgspec.msgpack.Decoder(RolloutQuestion),
    answers=msgspec.msgpack.Decoder(RolloutAnswer),
)
