"""The settings of the HTTP server, and the ranges they must be in."""

from __future__ import annotations

import ipaddress
import time
from dataclasses import dataclass, fields
from typing import Literal

from tllm.core.errors import ConfigError
from tllm.server.admission.key_file import check_key
from tllm.server.admission.token_bucket import UNLIMITED, RateLimits
from tllm.text.generation_config import NO_DEFAULTS, GenerationConfig

STARTED = int(time.time())

SchedulingPolicy = Literal["fcfs", "priority"]


@dataclass(frozen=True)
class RequestLimits:
    """The largest request that is taken, whichever interface it comes by."""

    max_body_bytes: int = 8 << 20
    max_json_depth: int = 128
    max_json_containers: int = 1 << 16  # objects and lists in one body
    max_input_tokens: int = 0  # of a prompt; 0: what the context holds
    max_n: int = 16
    max_stops: int = 16
    max_stop_length: int = 256  # characters
    max_stop_token_ids: int = 64
    max_logit_bias: int = 1024
    max_messages: int = 4096
    max_tools: int = 128

    def check(self) -> None:
        """Refuse what is out of range."""
        most = {"max_logit_bias": 1024, "max_stop_token_ids": 200, "max_json_depth": 500}  # what the engine takes
        for name in (field.name for field in fields(self)):
            least, value = (0 if name == "max_input_tokens" else 1), getattr(self, name)
            if not least <= value <= most.get(name, 1 << 53):
                wanted = f"{least} to {most[name]}" if name in most else f"at least {least}"
                raise ConfigError(f"{name} is {value}, it must be {wanted}", "leave it out")


@dataclass(frozen=True)
class ServerSettings:
    """Addresses, keys and limits. Seconds and bytes unless said otherwise."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free one
    api_keys: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()  # names that clients may use, besides localhost, addresses and this host's name
    allowed_origins: tuple[str, ...] = ()  # web pages that may call, as "https://name:port"
    model_aliases: tuple[str, ...] = ()
    api_keys_file: str = ""  # TOML or JSON, read anew when it changes
    rate_limit: RateLimits = UNLIMITED  # of each key that has none of its own
    scheduling_policy: SchedulingPolicy = "fcfs"  # whether `priority` of requests and keys is heard
    limits: RequestLimits = RequestLimits()
    max_bodies_bytes: int = 256 << 20  # of all requests in work together
    max_connections: int = 1000
    max_header_bytes: int = 32 << 10
    max_header_count: int = 256
    header_seconds: float = 10.0
    body_seconds: float = 60.0
    send_seconds: float = 60.0  # a client that takes nothing for so long is cut off; 0: never
    request_seconds: float = 3600.0
    max_queue_seconds: float = 0.0  # a request that cannot begin within is answered 429; 0: it waits
    max_sequences: int = 1024  # running and waiting; more are answered 429
    keep_alive_seconds: float = 10.0  # a stream that is silent this long sends a comment; 0: none does
    stall_seconds: float = 60.0  # /health/progress: work in hand and no step for this long
    drain_seconds: float = 30.0
    version: str = "0"
    tool_call_parser: str = "auto"  # how calls of tools are read; "auto": as the chat template writes them
    reasoning_parser: str = "auto"
    generation_config: GenerationConfig = NO_DEFAULTS  # how tokens are chosen where requests do not say
    keep_streams: float = 600.0  # seconds for which a reply that may be taken up is kept after its end; 0: none is
    keep_streams_bytes: int = 256 << 20  # of all of them together
    started: int = 0  # Unix seconds: when the models that are listed were "created"; 0: when this process began
    fingerprint: str = ""  # of plan and weights: `system_fingerprint` in replies

    @property
    def created(self) -> int:
        """When the models that are listed were "created", in Unix seconds: with the server, where it is not said."""
        return self.started or STARTED

    def check(self) -> None:
        """Refuse what is out of range, and serving other machines without a key."""
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port {self.port} is not between 0 and 65535", "give --port a free port")
        self.limits.check()
        for name in (
            "max_header_bytes",
            "max_header_count",
            "max_sequences",
            "max_connections",
            "max_bodies_bytes",
            "keep_streams_bytes",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, it must be at least 1", "leave it out")
        for name in ("header", "body", "request", "send", "max_queue", "keep_alive", "stall", "drain"):
            if not 0 <= getattr(self, f"{name}_seconds") < float("inf"):
                raise ConfigError(f"{name}_seconds is {getattr(self, f'{name}_seconds')}", "give a number of seconds")
        if not 0 <= self.keep_streams < float("inf"):
            raise ConfigError(f"--keep-streams is {self.keep_streams}", "give a number of seconds, 0 to keep none")
        for key in self.api_keys:
            check_key(key)
        if not self.api_keys and not self.api_keys_file and not is_loopback(self.host):
            raise ConfigError(
                f"{self.host} can be reached from other machines and no API key is set",
                "set one with --api-key or --api-keys-file, or serve on 127.0.0.1",
            )


def is_loopback(host: str) -> bool:
    """Whether an address to bind to is only reachable from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
