"""Options of `tllm serve` about limits: the settings that they mean, and what is wrong with others."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from tllm.cli.arguments.parser import Parser
from tllm.cli.arguments.server_limits import add_server_limits, server_limits
from tllm.core.errors import ConfigError
from tllm.server.admission.token_bucket import RateLimits
from tllm.server.http.settings import RequestLimits, ServerSettings


def settings(*words: str) -> ServerSettings:
    parser = Parser("tllm serve", "")
    add_server_limits(parser)
    return ServerSettings(**server_limits(parser.parse_args(words)))


def test_without_options_the_settings_are_the_defaults() -> None:
    assert settings() == ServerSettings()


def test_each_limit_of_a_request_has_an_option() -> None:
    words = [word for name in asdict(RequestLimits()) for word in (f"--{name.replace('_', '-')}", "7")]
    assert settings(*words).limits == RequestLimits(**dict.fromkeys(asdict(RequestLimits()), 7))


def test_the_others_mean_what_they_say() -> None:
    made = settings(
        *("--api-keys-file", "keys.toml", "--rate-limit", "requests_per_minute=5,max_concurrent=2"),
        *("--scheduling-policy", "priority", "--max-concurrent-requests", "9", "--max-queue-seconds", "1.5"),
        *("--max-request-seconds", "2", "--send-seconds", "3", "--max-connections", "4"),
        *("--h11-max-incomplete-event-size", "64K", "--h11-max-header-count", "6"),
    )
    assert made == ServerSettings(
        api_keys_file="keys.toml",
        rate_limit=RateLimits(requests_per_minute=5, max_concurrent=2),
        scheduling_policy="priority",
        max_sequences=9,
        max_queue_seconds=1.5,
        request_seconds=2.0,
        send_seconds=3.0,
        max_connections=4,
        max_header_bytes=64 << 10,
        max_header_count=6,
    )


@pytest.mark.parametrize(
    "words",
    [
        ("--rate-limit", "rpm=5"),
        ("--rate-limit", "requests_per_minute=many"),
        ("--scheduling-policy", "fair"),
        ("--max-queue-seconds", "-1"),
        ("--max-request-seconds", "nan"),
        ("--send-seconds", "soon"),
        ("--max-n", "-2"),
        ("--max-connections", "0"),
    ],
)
def test_wrong_ones_are_config_errors(words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        settings(*words)
    assert caught.value.hint and str(caught.value.message).count(words[0]) == 1
