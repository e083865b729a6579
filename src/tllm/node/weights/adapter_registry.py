"""`AdapterRegistry`: the adapters that a coordinator has, whole and in memory, for the nodes that load them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from tllm.cluster.messages import READ_BYTES, AdapterFiles, Bytes, ReadBytes, adapter_file
from tllm.core.errors import WeightsError
from tllm.weights.lora.held_adapter import HeldAdapter


class AdapterRegistry:
    """Adapters by their ids. Each new epoch begins with all of them."""

    def __init__(self) -> None:
        self._held: dict[str, HeldAdapter] = {}
        self._files: dict[str, bytes] = {}

    def __iter__(self) -> Iterator[HeldAdapter]:
        return iter(self._held.values())

    def __len__(self) -> int:
        return len(self._held)

    def add(self, held: HeldAdapter) -> None:
        """Keep an adapter."""
        self._held[held.lora] = held
        self._files |= {adapter_file(held.lora, file): content for file, content in held.contents.items()}

    def remove(self, held: HeldAdapter) -> None:
        """Let go of one."""
        self._held.pop(held.lora, None)
        for file in held.contents:
            self._files.pop(adapter_file(held.lora, file), None)

    def files(self) -> tuple[AdapterFiles, ...]:
        """What nodes are told of them."""
        return tuple(files_of(held) for held in self)

    def read(self, wanted: ReadBytes) -> Bytes | None:
        """Bytes of an adapter's file, with their hash; None for what is none. WeightsError for more than there are."""
        content = self._files.get(wanted.file)
        if content is None:
            return None
        if not 0 <= wanted.start <= wanted.stop <= min(len(content), wanted.start + READ_BYTES):
            raise WeightsError(
                f"bytes [{wanted.start}, {wanted.stop}) were asked for of {wanted.file}, which has {len(content)}; "
                f"at most {READ_BYTES} are given at once"
            )
        data = content[wanted.start : wanted.stop]
        return Bytes(data, hashlib.sha256(data).digest())


def files_of(held: HeldAdapter) -> AdapterFiles:
    """What a node must know of an adapter to read it."""
    return AdapterFiles(held.lora, {file: len(content) for file, content in held.contents.items()})
