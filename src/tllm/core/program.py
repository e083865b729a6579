"""A digest of this program's source: machines that compute together should run the same program."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

ROOT = Path(__file__).parents[1]


@functools.cache
def source_digest(root: Path = ROOT) -> str:
    """SHA-256, in hex, of all Python files of the package with their names, as they are at the first call."""
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()
