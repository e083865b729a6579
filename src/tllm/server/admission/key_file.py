"""Reads a file of API keys, TOML or JSON: a list `keys` with a name, a key and limits for each."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from tllm.core.errors import UNREADABLE, UNREADABLE_TOML, ConfigError, toml_fault
from tllm.server.admission.account import ApiKey
from tllm.server.admission.token_bucket import Most, RateLimits

MAX_BYTES, MAX_KEYS = 1 << 20, 1000
"""Of a file. Every key is compared with what a request gives, so there may not be any number."""

_NAME = re.compile(r"[A-Za-z0-9_.@-]{1,64}\Z")
_HASH = re.compile(r"[0-9A-Fa-f]{64}\Z")


class KeyEntry(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One key of the file: its text as `key`, or its hash as `key_sha256`."""

    name: str
    key: str | None = None
    key_sha256: str | None = None
    requests_per_minute: Most | None = None
    tokens_per_minute: Most | None = None
    max_concurrent: Most | None = None
    priority: Annotated[int, Meta(gt=-(1 << 31), lt=1 << 31)] | None = None
    weight: Annotated[float, Meta(ge=0.001, le=1000.0)] = 1.0


class KeyFile(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The whole file."""

    keys: Annotated[list[KeyEntry], Meta(min_length=1, max_length=MAX_KEYS)]


def check_key(key: str, called: str = "an API key") -> None:
    """ConfigError for a key that is too short, or cannot stand in a header; it says which by what it is called."""
    if len(key) < 8 or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"{called} needs at least 8 printable ASCII characters and no space", "make a longer one")


def digest_of(key: str) -> bytes:
    """What is kept and compared of a key."""
    return sha256(key.encode()).digest()


def read_keys(path: Path, defaults: RateLimits, hears_priorities: bool) -> list[ApiKey]:
    """The keys of a file, with `defaults` where an entry has no limit. ConfigError that names the file and the fault.

    Where the server does not hear priorities, a key that has one is refused.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", "check --api-keys-file") from error
    if len(text) > MAX_BYTES:
        raise ConfigError(f"{path} has over {MAX_BYTES} bytes", f"at most {MAX_KEYS} keys are taken")
    try:
        if path.suffix == ".json":
            values = msgspec.json.decode(text)
        else:
            values = tomllib.loads(text.decode("utf-8-sig"))
        entries = msgspec.convert(values, KeyFile).keys
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}", "the guide to serving shows such a file") from error
    except (*UNREADABLE, *UNREADABLE_TOML) as error:
        kind = "JSON" if path.suffix == ".json" else "TOML"
        raise ConfigError(
            f"{path} is not {kind}: {toml_fault(error)}", "a name that ends with .json is read as JSON"
        ) from error
    keys = [_key(path, entry, defaults) for entry in entries]
    check_distinct(keys, f"{path}: ")
    if not hears_priorities and (given := [key.name for key in keys if key.priority is not None]):
        message = f"{path}: the key {given[0]} has a priority, and the scheduling policy is fcfs"
        raise ConfigError(message, "start the server with --scheduling-policy priority, or leave priorities out")
    return keys


def check_distinct(keys: Sequence[ApiKey], where: str = "") -> None:
    """ConfigError where two have one name, or one text; it begins with `where`."""
    for place, key in enumerate(keys):
        for other in keys[:place]:
            if key.name == other.name or key.digest == other.digest:
                what = "name" if key.name == other.name else "key"
                message = f"{where}the keys {other.name} and {key.name} have the same {what}"
                raise ConfigError(message, "change one of them")


def _key(path: Path, entry: KeyEntry, defaults: RateLimits) -> ApiKey:
    if not _NAME.match(entry.name):
        message = f"{path}: a key is called {entry.name[:80]!r}"
        raise ConfigError(message, "names have 1 to 64 letters, digits, '_', '.', '@' and '-'")
    if (entry.key is None) == (entry.key_sha256 is None):
        raise ConfigError(f"{path}: {entry.name} needs one of key and key_sha256", "give its text, or its hash")
    if entry.key is not None:
        check_key(entry.key, f"{path}: the key of {entry.name}")
    elif not _HASH.match(entry.key_sha256 or ""):
        raise ConfigError(f"{path}: key_sha256 of {entry.name} is no SHA-256", "give 64 hexadecimal digits")
    return ApiKey(
        entry.name,
        digest_of(entry.key) if entry.key is not None else bytes.fromhex(entry.key_sha256 or ""),
        RateLimits(
            requests_per_minute=entry.requests_per_minute,
            tokens_per_minute=entry.tokens_per_minute,
            max_concurrent=entry.max_concurrent,
        ).or_else(defaults),
        entry.priority,
        entry.weight,
    )
