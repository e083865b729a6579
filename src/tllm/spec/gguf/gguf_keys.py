"""`GgufKeys`: the metadata of a GGUF file, which remembers which of its keys were read, so that none goes unnoticed."""

from __future__ import annotations

import math
import struct
from typing import Any

from tllm.core.errors import ModelError
from tllm.core.gguf_files import GgufFile
from tllm.core.gguf_header import TEXT, GgufArray, GgufTensor

HARMLESS = frozenset({"tensor_data_layout", "rope.scaling.finetuned", "vocab_size"})
"""Keys that do not change what is computed. The vocabulary is as long as the embedding in the file."""


class GgufKeys:
    """Hands out the keys of one architecture; `check_all_read` names one that nobody asked for."""

    def __init__(self, file: GgufFile, architecture: str, unlike: frozenset[str] = frozenset()) -> None:
        self.file, self.architecture, self.unlike = file, architecture, unlike
        self._read: set[str] = set(HARMLESS)

    def get(self, key: str, default: Any = None) -> Any:
        """A key's value. A list with one value for each layer counts as that value if it is the same for all, and as
        its first one for the keys of `unlike`, whose lists the architecture reads."""
        self._read.add(key)
        value = self.file.metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(value, GgufArray):
            items = value.values()
            if not items or (len(set(items)) != 1 and key not in self.unlike):
                raise ModelError(
                    f"{self.file.header.file}: {self.architecture}.{key} differs among layers, which is not handled"
                )
            value = items[0]
        return decimal(value) if isinstance(value, float) else value

    def number(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if value is None:
            raise ModelError(f"{self.file.header.file} has no {self.architecture}.{key}")
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**31:
            raise ModelError(
                f"{self.file.header.file}: {self.architecture}.{key}={value!r} is not a whole number of 0 or more"
            )
        return value

    def count(self, key: str, most: int, default: int | None = None) -> int:
        """A number of things, one at least, each of which something is made for."""
        value = self.number(key, default)
        if not 1 <= value <= most:
            raise ModelError(
                f"{self.file.header.file}: {self.architecture}.{key}={value}, and 1 to {most} are possible here"
            )
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if isinstance(value, (bool, str)) or value is None or not 0 < value < math.inf:
            raise ModelError(f"{self.file.header.file}: {self.architecture}.{key}={value!r} is not a number above 0")
        return float(value)

    def optional(self, key: str) -> float | None:
        """A number above 0, or None where there is none or 0."""
        return self.positive(key) if self.get(key) else None

    def list_of(self, key: str) -> list[Any]:
        """A list with one value for each layer, empty where the file has none."""
        self._read.add(key)
        value = self.file.metadata.get(f"{self.architecture}.{key}")
        return value.values() if isinstance(value, GgufArray) and value.kind != TEXT else []

    def ignore(self, *names: str) -> None:
        """Keys of this architecture that do not change what is computed."""
        self._read.update(names)

    def has(self, tensor: str) -> bool:
        return tensor in self.file.header.tensors

    def tensor(self, name: str) -> GgufTensor:
        if name not in self.file.header.tensors:
            raise ModelError(f"{self.file.header.file} has no tensor {name!r}", "the file is incomplete")
        return self.file.header.tensors[name]

    def check_all_read(self) -> None:
        """Raise ModelError naming the first key that was not read. One that is 0, false or empty asks for nothing, and
        so does a factor of 1."""
        prefix = f"{self.architecture}."
        for key, value in sorted(self.file.metadata.items()):
            is_one = key.endswith(("rope.scaling.attn_factor", "_attn_factor", "_ext_factor")) and value == 1.0
            if key.startswith(prefix) and key.removeprefix(prefix) not in self._read and value and not is_one:
                raise ModelError(
                    f"{self.file.header.file} has a key {key!r} ({str(value)[:60]}) that is not handled",
                    "it may change the maths",
                )


def decimal(value: float) -> float:
    """The shortest decimal that this float32 stands for: 1e-05 where a file can only say 9.99999974737875e-06."""
    try:
        known = struct.pack("<f", value)
    except OverflowError:
        return value
    if struct.unpack("<f", known)[0] == value:
        for digits in range(1, 10):
            short = float(f"{value:.{digits}g}")
            if struct.pack("<f", short) == known:
                return short
    return value
