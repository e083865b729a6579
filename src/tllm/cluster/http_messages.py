"""Messages between the coordinator and a node whose HTTP server answers requests, beside `Submit`, `Cancel`, `Outputs`.

Chat completions and the like run on the engine wherever their client asked; replies that may be taken up are run and
kept by the coordinator.
"""

from __future__ import annotations

import msgspec

from tllm.cluster.wire_message import Message
from tllm.spec.request import Request, StageSpan, StreamRecord
from tllm.text.generation_config import GenerationConfig


class ServesHttp(Message, frozen=True):
    """This node would answer HTTP requests. It is sent a `ServedModel` once there is one."""


class ServedModel(Message, frozen=True, kw_only=True):
    """What the HTTP server of the first machine serves, and how, so that a node's replies are the same.

    The tokenizer is read as `node.weights.tokenizer_file` says. `tool_template` is the chat template for requests with
    tools, where there is one of its own. `pooling`: how prompts become embeddings and scores, as JSON. The rest are
    limits of the coordinator's server (`server.http.settings`), which hold for whoever takes its place.
    """

    model_name: str
    max_model_len: int
    chat_template: str | None
    tool_template: str | None
    model_aliases: tuple[str, ...]
    tool_call_parser: str
    reasoning_parser: str
    generation_config: GenerationConfig
    started: int
    fingerprint: str
    pooling: bytes
    max_sequences: int
    request_seconds: float
    keep_streams: float
    keep_streams_bytes: int


class AskEngine(Message, frozen=True):
    """Asks how the engine is. The answer is an `EngineReport`."""

    answers = ("EngineReport",)


class EngineReport(Message, frozen=True):
    """What `EngineClient` says of itself; `status` and `health` as JSON. `adapters`: by name, what requests of a LoRA
    adapter carry, and its folder."""

    stats: dict[str, float]
    status: bytes
    health: bytes
    adapters: dict[str, tuple[str, str]] = msgspec.field(default_factory=dict)


class OpenStream(Message, frozen=True):
    """Run these requests as a reply that may be taken up. The answer is `StreamOpened`."""

    answers = ("StreamOpened",)

    record: StreamRecord
    requests: tuple[Request, ...]


class StreamOpened(Message, frozen=True):
    """It runs."""


class FollowStream(Message, frozen=True):
    """Asks for a stored reply of this owner's, until `Cancel` of `follower`. The answer is a stream: `StreamFound`,
    then, if there is one, `Outputs` from the first on."""

    answers = ("StreamFound", "Outputs")

    follower: str
    stream_id: str
    owner: str


class StreamFound(Message, frozen=True):
    """The reply, if it is there: how many outputs it has now, and whether those are all."""

    record: StreamRecord | None = None
    seen: int = 0
    is_over: bool = False


class EndStream(Message, frozen=True):
    """Cancel what runs of a stored reply of this owner's, and perhaps forget it. The answer is `StreamEnded`."""

    answers = ("StreamEnded",)

    stream_id: str
    owner: str
    forget: bool


class StreamEnded(Message, frozen=True):
    """Whether there was such a reply."""

    found: bool


class AskSpans(Message, frozen=True):
    """Asks what the ranks did for the sequences with these traces. The answer is `ToldSpans`."""

    answers = ("ToldSpans",)

    traces: tuple[int, ...]


class ToldSpans(Message, frozen=True):
    """For each: the rank's node, the rank, and what it did."""

    spans: tuple[tuple[str, int, StageSpan], ...]


FromHttpServer = ServesHttp | AskEngine | AskSpans | OpenStream | FollowStream | EndStream
"""What a node sends whose HTTP server answers requests, beside the requests themselves."""

ToHttpServer = ServedModel | EngineReport | StreamOpened | StreamFound | StreamEnded | ToldSpans
"""What the coordinator sends to it, beside outputs."""
