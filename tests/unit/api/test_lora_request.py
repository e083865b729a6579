"""Which adapters are loaded for the calls of an `LLM`, whoever loads them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

import pytest

from tllm import LoRARequest
from tllm.api.lora_request import RequestedAdapters
from tllm.core.errors import CapacityError
from tllm.server.openai.engine_client import EngineClient


class Loads:
    """Stands for an engine's adapters, and writes down what is done with them."""

    def __init__(self) -> None:
        self.paths: dict[str, str] = {}
        self.done: list[str] = []

    def id_of(self, name: str) -> str:
        return f"id of {name}" if name in self.paths else ""

    async def load(self, name: str, path: str) -> None:
        await asyncio.sleep(0)  # others may ask meanwhile
        assert name not in self.paths
        self.paths[name] = path
        self.done.append(f"+{name}")

    async def unload(self, name: str) -> None:
        del self.paths[name]
        self.done.append(f"-{name}")


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Loads:
    made = Loads()
    monkeypatch.setattr(RequestedAdapters, "_adapters", made)
    return made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in "abc":
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").touch()
    return tmp_path


def adapters(max_loras: int) -> RequestedAdapters:
    return RequestedAdapters(cast(EngineClient, None), max_loras)


def test_the_one_that_is_unused_for_longest_makes_room(loads: Loads, folder: Path) -> None:
    async def scene() -> None:
        wanted = {name: LoRARequest(name, 1, str(folder / name)) for name in "abc"}
        requested = adapters(2)
        for names in ("ab", "a", "c", "b"):
            async with requested.loaded([wanted[name] for name in names]) as ids:
                assert ids == [f"id of {name}" for name in names]
        assert loads.done == ["+a", "+b", "-b", "+c", "-a", "+b"]
        async with requested.loaded([wanted["c"], None, wanted["b"]]) as ids:
            assert ids == ["id of c", "", "id of b"]
            with pytest.raises(CapacityError, match="3 adapters are asked for at once, a, b, c, and max_loras is 2"):
                async with requested.loaded([wanted["a"]]):
                    pass

    asyncio.run(scene())


def test_calls_that_ask_at_once_load_one_once(loads: Loads, folder: Path) -> None:
    async def ask(requested: RequestedAdapters) -> list[str]:
        async with requested.loaded([LoRARequest("a", 1, str(folder / "a"))]) as ids:
            return ids

    async def scene() -> None:
        requested = adapters(1)
        assert await asyncio.gather(*(ask(requested) for _ in range(3))) == [["id of a"]] * 3
        assert loads.done == ["+a"]

    asyncio.run(scene())
