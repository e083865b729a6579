"""`sampled_digest`: a hash by which the weights that an adapter was trained beside are known again.

It is kept in the metadata of the adapter's safetensors file, which other readers pass over. Another model of the same
shape, or the same one trained further, has another.
"""

from __future__ import annotations

import hashlib

from tllm.weights.byte_source import ByteSource
from tllm.weights.header_tables import read_tables

KEY = "base_sha256"
"""Of the metadata."""

SAMPLE_BYTES = 512
"""Of the beginning of each tensor: training changes nearly every number, and a large model is not read whole."""


def sampled_digest(source: ByteSource) -> str:
    """SHA-256 of names, dtypes and shapes of a model's tensors, and of the first bytes of each; "" without any.

    How they are spread over safetensors files does not count.
    """
    files = [name for name in source.names() if name.endswith(".safetensors")]
    entries = {name: (file, entry) for file in files for name, entry in read_tables(source, file).tensors.items()}
    digest = hashlib.sha256()
    for name, (file, entry) in sorted(entries.items()):
        digest.update(f"{name} {entry.dtype} {list(entry.shape)}\n".encode())
        digest.update(source.read(file, entry.start, min(entry.start + SAMPLE_BYTES, entry.stop)))
    return digest.hexdigest() if entries else ""


def is_another_base(trained_beside: str, source: ByteSource) -> bool:
    """Whether weights are known not to be those of this digest ("": it is not known)."""
    found = sampled_digest(source) if trained_beside else ""
    return found not in ("", trained_beside)


ANOTHER_BASE = (
    "was trained beside other weights than these, though of the same shape: another model, one trained further, or in "
    "another form or dtype. If that is intended, no more is to be done"
)
"""What is said of such an adapter."""
