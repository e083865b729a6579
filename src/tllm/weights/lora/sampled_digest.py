"""`sampled_digest`: a hash by which the weights that an adapter was trained beside are known again.

It is kept in the metadata of the adapter's safetensors file, which other readers pass over. Another model of the same
shape, or the same one trained further, has another.
"""

from __future__ import annotations

import hashlib

from tllm.core.gguf_files import gguf_files, read_gguf
from tllm.weights.byte_source import ByteSource
from tllm.weights.header_tables import TableEntry, read_tables, weight_files

KEY = "base_sha256"
"""Of the metadata."""

SAMPLE_BYTES = 512
"""Of the beginning of each tensor: training changes nearly every number, and a large model is not read whole."""


def sampled_digest(source: ByteSource) -> str:
    """SHA-256 of names, dtypes and shapes of a model's tensors, and of the first bytes of each; "" without any.

    How they are spread over files does not count.
    """
    entries, digest = _entries(source), hashlib.sha256()
    for name, (file, entry) in sorted(entries.items()):
        digest.update(f"{name} {entry.dtype} {list(entry.shape)}\n".encode())
        digest.update(source.read(file, entry.start, min(entry.start + SAMPLE_BYTES, entry.stop)))
    return digest.hexdigest() if entries else ""


def _entries(source: ByteSource) -> dict[str, tuple[str, TableEntry]]:
    """Every tensor, in safetensors or in GGUF files, with the file that it is in."""
    if pieces := gguf_files(source.names()):
        tensors = read_gguf(pieces, source.size, source.read).tensors
        return {
            name: (one.file, TableEntry(one.type.name, one.shape, one.start, one.stop)) for name, one in tensors.items()
        }
    files = {file: read_tables(source, file).tensors for file in weight_files(source)}
    return {name: (file, entry) for file, tensors in files.items() for name, entry in tensors.items()}


def is_another(trained_beside: str, found: str) -> bool:
    """Whether weights of the digest `found` are known not to be those that an adapter was trained beside; "" says that
    a digest is not known."""
    return "" not in (trained_beside, found) and found != trained_beside


ANOTHER_BASE = (
    "was trained beside other weights than these, though of the same shape: another model, one trained further, or in "
    "another form or dtype. If that is intended, no more is to be done"
)
"""What is said of such an adapter."""
