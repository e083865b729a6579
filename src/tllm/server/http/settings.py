"""The settings of the HTTP server, and the ranges they must be in."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from tllm.core.errors import ConfigError


@dataclass(frozen=True)
class ServerSettings:
    """Addresses, keys and limits. Seconds and bytes unless said otherwise."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free one
    api_keys: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()  # names that clients may use, besides localhost, addresses and this host's name
    allowed_origins: tuple[str, ...] = ()  # web pages that may call, as "https://name:port"
    model_aliases: tuple[str, ...] = ()
    max_body_bytes: int = 8 << 20
    max_header_bytes: int = 32 << 10
    header_seconds: float = 10.0
    body_seconds: float = 60.0
    request_seconds: float = 3600.0
    max_sequences: int = 1024  # running and waiting; more are answered 429
    keep_alive_seconds: float = 10.0  # a stream that is silent this long sends a comment
    stall_seconds: float = 60.0  # /health/progress: work in hand and no step for this long
    drain_seconds: float = 30.0
    version: str = "0"
    tool_call_parser: str = "auto"  # how calls of tools are read; "auto": as the chat template writes them
    reasoning_parser: str = "auto"
    keep_streams: float = 600.0  # seconds for which a reply that may be taken up is kept after its end; 0: none is
    keep_streams_bytes: int = 256 << 20  # of all of them together
    started: int = 0  # Unix seconds: when the models of `/v1/models` were "created"
    fingerprint: str = ""  # of plan and weights: `system_fingerprint` in replies

    def check(self) -> None:
        """Refuse what is out of range, and serving other machines without a key."""
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port {self.port} is not between 0 and 65535", "give --port a free port")
        for name in ("max_body_bytes", "max_header_bytes", "max_sequences", "keep_streams_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, it must be at least 1", "leave it out")
        for name in ("header", "body", "request", "keep_alive", "stall", "drain"):
            if not 0 <= getattr(self, f"{name}_seconds") < float("inf"):
                raise ConfigError(f"{name}_seconds is {getattr(self, f'{name}_seconds')}", "give a number of seconds")
        if not 0 <= self.keep_streams < float("inf"):
            raise ConfigError(f"--keep-streams is {self.keep_streams}", "give a number of seconds, 0 to keep none")
        if any(len(key) < 8 or not key.isascii() or not key.isprintable() or " " in key for key in self.api_keys):
            raise ConfigError(
                "an API key needs at least 8 printable ASCII characters and no space", "make a longer one"
            )
        if not self.api_keys and not is_loopback(self.host):
            raise ConfigError(
                f"{self.host} can be reached from other machines and no API key is set",
                "set one with --api-key, or serve on 127.0.0.1",
            )


def is_loopback(host: str) -> bool:
    """Whether an address to bind to is only reachable from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
