"""Where programs of this user keep what they can get again (the XDG base directory specification)."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(name: str = "weights") -> Path:
    """The folder of what is called `name`; nobody has made it yet. RuntimeError for a user who has no home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tllm" / name
