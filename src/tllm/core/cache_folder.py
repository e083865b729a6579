"""Where programs of this user keep what they can get again (the XDG base directory specification)."""

from __future__ import annotations

import os
from pathlib import Path

from tllm.core.errors import ConfigError


def home() -> Path:
    """The user's home. ConfigError for one who has none, as a user without an entry in the system's list may."""
    try:
        return Path.home()
    except RuntimeError as error:
        raise ConfigError("this user has no home folder", "set HOME to a folder that this user may write") from error


def cache_folder(name: str = "weights") -> Path:
    """The folder of what is called `name`; nobody has made it yet. ConfigError for a user who has no home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or home() / ".cache") / "tllm" / name
