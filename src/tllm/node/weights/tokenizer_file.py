"""The model's tokenizer, which the node of the first rank gets from the coordinator when the first grammar comes.

It travels like the headers of weights, as bytes of a file: the length in 8 bytes, then what `Tokenizer.to_bytes` gave;
nothing after the length where the model has no tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tllm.core.errors import WeightsError
from tllm.text.tokenizer import Tokenizer
from tllm.weights.byte_source import FETCH_LIMIT

TOKENIZER = "tokenizer"
"""What `ReadBytes` calls it; no file of weights is called so."""

LENGTH_BYTES, MAX_BYTES = 8, 256 * 1024 * 1024


def tokenizer_file(folder: Path) -> bytes:
    """What is read, of a model in a folder (or a GGUF file)."""
    tokenizer = Tokenizer.from_folder(folder)
    packed = b"" if tokenizer is None else tokenizer.to_bytes()
    return len(packed).to_bytes(LENGTH_BYTES, "big") + packed


def fetch_tokenizer(fetch: Callable[[str, int, int], bytes]) -> Tokenizer | None:
    """Bring it from the coordinator. WeightsError where what comes is none."""
    length = int.from_bytes(fetch(TOKENIZER, 0, LENGTH_BYTES), "big")
    if length > MAX_BYTES:
        raise WeightsError(f"a tokenizer of {length} bytes was announced, at most {MAX_BYTES} are taken")
    stop = LENGTH_BYTES + length
    pieces = [fetch(TOKENIZER, at, min(at + FETCH_LIMIT, stop)) for at in range(LENGTH_BYTES, stop, FETCH_LIMIT)]
    return Tokenizer.from_bytes(b"".join(pieces)) if pieces else None
