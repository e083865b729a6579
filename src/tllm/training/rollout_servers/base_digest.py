"""A digest of the files of a frozen model, by which two machines know that theirs are the same."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from tllm.core.gguf_files import gguf_files
from tllm.weights.byte_source import LocalFiles
from tllm.weights.manifest import make_manifest

SUFFIX = ".safetensors"


def has_weights(model: Path) -> bool:
    """Whether a model's folder has files of weights, or is a GGUF file."""
    return bool(_files(LocalFiles(model)))


def base_digest(model: Path) -> str:
    """Of the contents of all files of weights, 16 hexadecimal digits. They are read once, as a load reads them."""
    source = LocalFiles(model)
    manifest = make_manifest(source.folder, _files(source))
    return hashlib.sha256(msgspec.msgpack.encode(manifest.files)).hexdigest()[:16]


def _files(source: LocalFiles) -> list[str]:
    names = source.names()
    return gguf_files(names) or [name for name in names if name.endswith(SUFFIX)]
