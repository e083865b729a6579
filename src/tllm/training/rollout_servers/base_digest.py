"""A digest of the files of a frozen model, by which two machines know that theirs are the same."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from tllm.weights.manifest import make_manifest

SUFFIX = ".safetensors"


def has_weights(folder: Path) -> bool:
    """Whether a model's folder has files of weights."""
    return any(folder.glob(f"*{SUFFIX}"))


def base_digest(folder: Path) -> str:
    """Of the contents of all files of weights, 16 hexadecimal digits. They are read once, as a load reads them."""
    files = sorted(path.name for path in folder.glob(f"*{SUFFIX}"))
    return hashlib.sha256(msgspec.msgpack.encode(make_manifest(folder, files).files)).hexdigest()[:16]
