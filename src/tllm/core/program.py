"""Which program this is, to the letter: two machines that compute together should run the same."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

ROOT = Path(__file__).parents[1]


@functools.cache
def source_digest(root: Path = ROOT) -> str:
    """SHA-256, in hex, of every Python file of the package by its name, as they lie when this is first asked."""
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()
