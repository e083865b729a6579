"""`LoRARequest`: the LoRA adapter that a call of `LLM` asks for, and which adapters are loaded for the calls."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tllm.core.disk import given_path
from tllm.core.errors import CapacityError, ConfigError, RequestError, WeightsError, counted
from tllm.spec.lora.lora_config import CONFIG_FILE

if TYPE_CHECKING:
    from tllm.server.openai.engine_client import EngineClient
    from tllm.server.openai.lora_adapters import ServedAdapters

EXAMPLE = 'give LoRARequest("sql", 1, "adapters/sql")'


@dataclass(frozen=True)
class LoRARequest:
    """The adapter of a name, in a folder as PEFT saves it, in vLLM's form. `lora_int_id` says nothing here."""

    lora_name: str
    lora_int_id: int = 1
    lora_path: str = ""


LoRARequests = LoRARequest | Sequence[LoRARequest | None] | None
"""Of all prompts of a call, or of each; None for the model alone."""


def of_each_prompt(given: LoRARequests, prompts: int) -> list[LoRARequest | None]:
    """The adapter of each prompt. RequestError where there are several that are not as many as the prompts."""
    if given is None or isinstance(given, LoRARequest):
        return [given] * prompts
    each: object = given
    if not isinstance(each, Sequence) or not all(one is None or isinstance(one, LoRARequest) for one in each):
        message = f"lora_request is a LoRARequest, or one for each prompt, and a {type(given).__name__} was given"
        raise RequestError(message, EXAMPLE, "lora_request")
    if len(given) != prompts:
        raise RequestError(
            f"{counted(len(given), 'lora_request')} for {counted(prompts, 'prompt')}",
            "give one for all, or one for each, with None for the model alone",
            "lora_request",
        )
    return list(given)


class RequestedAdapters:
    """Loads an adapter when a call first asks for it. Where `max_loras` are loaded, the one whose last use lies
    furthest back makes room. All calls come from the engine's own loop."""

    def __init__(self, client: EngineClient, max_loras: int) -> None:
        self._client, self._max_loras = client, max_loras
        self._in_use = Counter[str]()
        self._by_use = list[str]()  # names of those that are loaded, the one that was used last at the end
        self._loading = asyncio.Lock()

    @asynccontextmanager
    async def loaded(self, wanted: Sequence[LoRARequest | None]) -> AsyncGenerator[list[str]]:
        """What the request of each of `wanted` carries, as long as the block runs; "" for the model alone.

        CapacityError where this call and those that run want more than `max_loras`; RequestError, ConfigError or
        WeightsError, with the folder, for what cannot be loaded.
        """
        folders = _folders(wanted)
        if not folders:
            yield [""] * len(wanted)
            return
        if not self._max_loras:
            raise ConfigError("lora_request is given and adapters are not loaded", "give LLM(enable_lora=True) too")
        names = sorted(folders.keys() | self._in_use.keys())
        if len(names) > self._max_loras:
            message = f"{len(names)} adapters are asked for at once, {', '.join(names)}, and max_loras is"
            raise CapacityError(f"{message} {self._max_loras}", f"give LLM(max_loras={len(names)})")
        self._in_use.update(folders.keys())
        try:
            async with self._loading:
                for name, folder in folders.items():
                    await self._load(name, folder)
            yield ["" if one is None else self._adapters.id_of(one.lora_name) for one in wanted]
        finally:
            self._in_use -= Counter(folders.keys())

    async def _load(self, name: str, folder: str) -> None:
        """Load one that is in use, if it is not loaded yet, and make room for it."""
        loaded = self._adapters.paths
        if loaded.get(name) != folder:
            if name in loaded and self._in_use[name] > 1:
                message = f"the adapter {name!r} runs from {loaded[name]}"
                raise RequestError(message, "give another name", "lora_request")
            if name in loaded:
                await self._adapters.unload(name)
            elif len(loaded) >= self._max_loras:
                await self._adapters.unload(
                    next(one for one in self._by_use if one in loaded and not self._in_use[one])
                )
            try:
                await self._adapters.load(name, folder)
            except (ConfigError, WeightsError) as error:
                raise type(error)(f"{folder}: {error.message}", error.hint) from error
        self._by_use = [one for one in self._by_use if one in loaded and one != name] + [name]

    @property
    def _adapters(self) -> ServedAdapters:
        from tllm.node.serve.serving import Serving

        assert isinstance(self._client, Serving), "ranks that load adapters are nodes"
        return self._client.adapters


def _folders(wanted: Sequence[LoRARequest | None]) -> dict[str, str]:
    """The absolute folder of each adapter by its name. RequestError where one has none, or two."""
    folders: dict[str, str] = {}
    for one in wanted:
        if one is None:
            continue
        if not one.lora_name or not one.lora_path:
            raise RequestError(f"{one} lacks a name or a folder", EXAMPLE, "lora_request")
        folder = str(given_path(one.lora_path))
        if not (Path(folder) / CONFIG_FILE).is_file():
            raise ConfigError(f"{one.lora_path} has no {CONFIG_FILE}", "give the folder of an adapter as PEFT saves it")
        if folders.setdefault(one.lora_name, folder) != folder:
            raise RequestError(f"the adapter {one.lora_name!r} has two folders", "give two names", "lora_request")
    return folders
