"""Options of `tllm serve` about who may ask for how much: keys, their limits, the queue, the largest request."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import TypedDict

from tllm.cli.arguments.parser import count, option_of, size, user_path_text, whole
from tllm.core.errors import ConfigError
from tllm.server.admission.token_bucket import UNLIMITED, RateLimits
from tllm.server.http.settings import RequestLimits, SchedulingPolicy, ServerSettings

LARGEST = {
    "max_body_bytes": "bytes of a body",
    "max_json_depth": "how deep its JSON may be nested",
    "max_json_containers": "its objects and lists",
    "max_input_tokens": "tokens of a prompt (0: what the context holds)",
    "max_n": "choices of a prompt, n and best_of",
    "max_stops": "stop strings",
    "max_stop_length": "characters of a stop string",
    "max_stop_token_ids": "stop tokens",
    "max_logit_bias": "entries of logit_bias",
    "max_messages": "messages of a chat",
    "max_tools": "tools",
}
"""Options for the fields of `RequestLimits`."""


class LimitSettings(TypedDict):
    """Those of `ServerSettings` that these options set."""

    api_keys_file: str
    rate_limit: RateLimits
    scheduling_policy: SchedulingPolicy
    max_sequences: int
    max_queue_seconds: float
    request_seconds: float
    send_seconds: float
    max_connections: int
    max_header_bytes: int
    max_header_count: int
    limits: RequestLimits


def add_server_limits(parser: argparse.ArgumentParser) -> None:
    """The options, in two groups."""
    default = ServerSettings()
    keys = parser.add_argument_group("keys and queue")
    keys.add_argument(
        "--api-keys-file",
        type=user_path_text,
        default="",
        metavar="FILE",
        help="keys with names and limits, TOML or JSON; read anew when changed",
    )
    keys.add_argument(
        "--rate-limit",
        type=rate_limit,
        metavar="LIMITS",
        help="of each key that has none of its own, joined by commas: requests_per_minute=N, tokens_per_minute=N, "
        "max_concurrent=N",
    )
    keys.add_argument(
        "--scheduling-policy",
        choices=("fcfs", "priority"),
        default=default.scheduling_policy,
        help="order of arrival, or the priorities of requests and keys first; keys share fairly in both (%(default)s)",
    )
    keys.add_argument(
        "--max-concurrent-requests",
        type=whole,
        default=default.max_sequences,
        metavar="N",
        help="replies in work and waiting; more are answered 429 (%(default)s)",
    )
    seconds = {
        "max_queue_seconds": "a request that has not begun after so long is answered 429 (0: it waits)",
        "max_request_seconds": "longest time of a request",
        "send_seconds": "a client that takes nothing of its reply for so long is cut off",
    }
    of_settings = {"max_request_seconds": default.request_seconds}
    for name, text in seconds.items():
        value = of_settings[name] if name in of_settings else getattr(default, name)
        keys.add_argument(option_of(name), type=seconds_of, default=value, metavar="S", help=f"{text} (%(default)g)")
    largest = parser.add_argument_group("largest requests")
    for field in fields(RequestLimits):
        kind = size if field.name == "max_body_bytes" else count
        text = f"{LARGEST[field.name]} (%(default)s)"
        largest.add_argument(option_of(field.name), type=kind, default=field.default, metavar="N", help=text)
    largest.add_argument(
        "--h11-max-incomplete-event-size",
        type=size,
        default=default.max_header_bytes,
        metavar="N",
        help="bytes of a request's head (%(default)s)",
    )
    largest.add_argument(
        "--h11-max-header-count",
        type=whole,
        default=default.max_header_count,
        metavar="N",
        help="headers of a request (%(default)s)",
    )
    largest.add_argument(
        "--max-connections",
        type=whole,
        default=default.max_connections,
        metavar="N",
        help="open connections; for one more, the one that idles longest is closed (%(default)s)",
    )


def server_limits(args: argparse.Namespace) -> LimitSettings:
    """The settings that the options mean."""
    return LimitSettings(
        api_keys_file=args.api_keys_file,
        rate_limit=args.rate_limit or UNLIMITED,
        scheduling_policy=args.scheduling_policy,
        max_sequences=args.max_concurrent_requests,
        max_queue_seconds=args.max_queue_seconds,
        request_seconds=args.max_request_seconds,
        send_seconds=args.send_seconds,
        max_connections=args.max_connections,
        max_header_bytes=args.h11_max_incomplete_event_size,
        max_header_count=args.h11_max_header_count,
        limits=RequestLimits(**{name: getattr(args, name) for name in LARGEST}),
    )


def rate_limit(text: str) -> RateLimits:
    """`requests_per_minute=60,tokens_per_minute=20000,max_concurrent=4`, or some of them."""
    try:
        return RateLimits.parse(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error).replace("\nhint: ", "; ")) from error


def seconds_of(text: str) -> float:
    """A number of seconds, 0 or more."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text[:50]!r} is not a number of seconds, 0 or more")
    return value
