"""`AdapterRegistry`: the LoRA adapters that a coordinator holds in memory, whole, for the nodes that load them."""

from __future__ import annotations

from collections.abc import Iterator

from tllm.cluster.weight_messages import AdapterFiles, Bytes, ReadBytes, adapter_file
from tllm.node.weights.model_folder import check_range, hashed
from tllm.weights.lora.held_adapter import HeldAdapter


class AdapterRegistry:
    """Adapters by their ids. Each new epoch begins with all of them."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[HeldAdapter, AdapterFiles]] = {}
        self._contents: dict[str, bytes] = {}
        self._number = 0

    def __iter__(self) -> Iterator[HeldAdapter]:
        return (held for held, _ in self._held.values())

    def add(self, held: HeldAdapter) -> AdapterFiles:
        """Keep an adapter; what nodes must know to read it, with a number that no earlier one had."""
        self._number += 1
        sizes = {file: len(content) for file, content in held.contents.items()}
        files = AdapterFiles(held.lora, self._number, sizes)
        self._held[held.lora] = held, files
        self._contents |= {adapter_file(held.lora, file): content for file, content in held.contents.items()}
        return files

    def remove(self, files: AdapterFiles) -> None:
        """Let go of one."""
        self._held.pop(files.lora, None)
        for file in files.sizes:
            self._contents.pop(adapter_file(files.lora, file), None)

    def files(self) -> tuple[AdapterFiles, ...]:
        """What nodes are told of them."""
        return tuple(files for _, files in self._held.values())

    def read(self, wanted: ReadBytes) -> Bytes | None:
        """Bytes of an adapter's file, with their hash; None for what is none. WeightsError for more than there are."""
        content = self._contents.get(wanted.file)
        if content is None:
            return None
        check_range(wanted, len(content))
        return hashed(content[wanted.start : wanted.stop])
