"""LoRA adapters over HTTP: what the server needs of whoever loads them, and vLLM's routes that load and unload one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from tllm.core.errors import ConfigError, RequestError, WeightsError
from tllm.server.http.errors import HttpError
from tllm.server.http.routed import decode, routes

MAX_NAME, MAX_PATH = 200, 4096


class ServedAdapters(Protocol):
    """The adapters that are loaded now. A request names one as its model."""

    @property
    def paths(self) -> Mapping[str, str]:
        """The folder of each adapter that requests may name, by its name."""

    def id_of(self, name: str) -> str:
        """What `Request.lora` is for this name; "" where it is no adapter's."""

    async def load(self, name: str, path: str) -> None:
        """Load the adapter in a folder of the server's machine. What it raises says why not."""

    async def unload(self, name: str) -> None:
        """Take a name away, and let go of the adapter when no request has it any more."""


class NoAdapters:
    """Of a server that serves its model alone."""

    @property
    def paths(self) -> Mapping[str, str]:
        return {}

    def id_of(self, name: str) -> str:
        return ""

    async def load(self, name: str, path: str) -> None:
        raise _off()

    async def unload(self, name: str) -> None:
        raise _off()


class LoadLoraRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of `/v1/load_lora_adapter`."""

    lora_name: Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]
    lora_path: Annotated[str, Meta(min_length=1, max_length=MAX_PATH)]


class UnloadLoraRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of `/v1/unload_lora_adapter`. vLLM's clients may send its number too, which says nothing here."""

    lora_name: Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]
    lora_int_id: int | None = None


class LoraRoutes:
    """The two routes. `taken` are other names of the model."""

    def __init__(self, adapters: ServedAdapters, taken: Sequence[str] = ()) -> None:
        self._adapters, self._taken = adapters, taken

    def table(self) -> list[Route]:
        return routes("POST", {"/v1/load_lora_adapter": self.load, "/v1/unload_lora_adapter": self.unload})

    async def load(self, http: HttpRequest) -> Response:
        asked = decode(await http.body(), LoadLoraRequest)
        if asked.lora_name in self._taken:
            raise RequestError(f"{asked.lora_name!r} is a name of the model", "give another", "lora_name")
        try:
            await self._adapters.load(asked.lora_name, asked.lora_path)
        except (WeightsError, ConfigError) as error:
            raise RequestError(f"{asked.lora_path}: {error.message}", error.hint, "lora_path") from error
        return PlainTextResponse(f"Success: LoRA adapter '{asked.lora_name}' added successfully.")

    async def unload(self, http: HttpRequest) -> Response:
        asked = decode(await http.body(), UnloadLoraRequest)
        if asked.lora_name not in self._adapters.paths:
            text = f"no adapter {asked.lora_name!r} is loaded; /v1/models lists those that are"
            raise HttpError(404, text, "not_found_error", "model_not_found", "lora_name")
        await self._adapters.unload(asked.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{asked.lora_name}' removed successfully.")


def _off() -> RequestError:
    return RequestError("this server serves no adapters", "start it with --enable-lora", "lora_name")
