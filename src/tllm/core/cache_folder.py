"""Where programs of this user keep what they can get again (the XDG base directory specification)."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from tllm.core.errors import ConfigError


def cache_folder(name: str = "weights") -> Path:
    """The folder of what is called `name`; nobody has made it yet. RuntimeError for a user who has no home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tllm" / name


def write_whole(path: Path, content: bytes, variable: str) -> None:
    """Put a small file in its place whole. ConfigError where that fails; `variable` says where the folder lies."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
        beside.write_bytes(content)
        beside.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", f"free some space, or set {variable}") from error
