"""`LoraAdapters`: the LoRA adapters of a cluster that serves: by name for requests, loaded and let go on every rank."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import torch

from tllm.cluster.channel import Channel, Gone
from tllm.cluster.heartbeat import describe
from tllm.cluster.messages import LoadAdapter, UnloadAdapter
from tllm.cluster.weight_messages import AdapterFiles
from tllm.core.disk import given_path
from tllm.core.errors import CapacityError, ClusterError, RequestError, TllmError, counted
from tllm.model.transformer import build
from tllm.node.coordinator.coordinator import Coordinator
from tllm.node.recovery.recovery import Recovery
from tllm.node.weights.adapter_registry import AdapterRegistry
from tllm.parallel.lora.adapted_model import module_shapes
from tllm.parallel.mesh import whole
from tllm.spec.lora.lora_config import MAX_LORA_RANK, ServedLoras
from tllm.spec.model_spec import ModelSpec
from tllm.spec.request import Output
from tllm.weights.lora.held_adapter import HeldAdapter
from tllm.weights.lora.sampled_digest import ANOTHER_BASE

log = logging.getLogger("tllm.node")

LOAD_SECONDS = 120.0
TRIES = 4
"""So often an adapter is loaded anew where nodes are lost meanwhile."""

CHANGE_SECONDS = 10.0
"""How long a node that did not answer may take until it is known to be lost."""


@dataclass
class ServedAdapter:
    """An adapter, and how many open requests name it. One that `is_leaving` is no longer found by its name."""

    held: HeldAdapter
    files: AdapterFiles
    requests: int = 0
    is_leaving: bool = False


class LoraAdapters:
    """At most `max_loras` adapters of rank `max_lora_rank` or less, which every rank of the plan has loaded.

    The coordinator's work names those to begin with, before any is loaded: so whoever takes the coordinator's place
    knows them, however early. What they take is part of what `check_room` looks at, which raises CapacityError. A new
    epoch begins with all that are loaded, since `Assign` names them, and gets its open requests after that.
    """

    def __init__(
        self,
        base: str,
        spec: ModelSpec,
        coordinator: Coordinator,
        recovery: Recovery,
        check_room: Callable[[], None],
    ) -> None:
        known = coordinator.work.adapters or ServedLoras(1, MAX_LORA_RANK, {})
        self.max_loras, self.max_lora_rank = known.max_loras, known.max_lora_rank
        self._to_load = dict(known.paths)
        self._base, self._spec = base, spec
        self._coordinator, self._recovery, self._check_room = coordinator, recovery, check_room
        self._served: dict[str, ServedAdapter] = {}
        self._changing = asyncio.Lock()

    @property
    def paths(self) -> Mapping[str, str]:
        """The folder of each adapter that requests may name, by its name."""
        return {one.held.name: one.held.path for one in self._served.values() if not one.is_leaving}

    def id_of(self, name: str) -> str:
        """What requests of this adapter carry; "" where there is none of this name."""
        return next((one.held.lora for one in self._served.values() if self._is(one, name)), "")

    def elements(self, layers: range) -> int:
        """Numbers of all adapters' tensors in some layers."""
        return sum(held.elements(layers) for held in self._registry)

    async def load(self, name: str, path: str) -> None:
        """Load an adapter of PEFT's from a folder of this machine on every rank, while requests run.

        RequestError where there is one of this name already; WeightsError or ConfigError for what is no adapter of
        this model; CapacityError where there are too many, or memory is lacking.
        """
        async with self._changing:
            self._check_name(name)
            if len(self._served) >= self.max_loras:
                leaving = sum(one.is_leaving for one in self._served.values())
                loaded = counted(len(self._served), "adapter is", "adapters are")
                message = f"{loaded} loaded and max_loras is {self.max_loras}"
                if leaving:
                    message += f"; requests still have {leaving} of them that were unloaded"
                hint = "try again when they have ended" if leaving else "unload one"
                raise CapacityError(message, f"{hint}, or start the server with a larger --max-loras")
            shapes, most = await asyncio.to_thread(lambda: self._shapes), self.max_lora_rank
            folder = await asyncio.to_thread(given_path, path)
            held = await asyncio.to_thread(HeldAdapter.read, name, folder, shapes, most)
            base = self._coordinator.weights.folder
            if base is not None and await asyncio.to_thread(base.is_another_base, held.adapter.base):
                log.warning("adapter %s %s", name, ANOTHER_BASE)
            files = self._registry.add(held)
            with ExitStack() as undo:
                undo.callback(self._drop, files)
                await self._load_on_each_rank(files)
                undo.pop_all()
            self._served[held.lora] = ServedAdapter(held, files)
            self._to_load.pop(name, None)
            self._tell()
            log.info("adapter %s is loaded from %s", name, held.path)

    async def load_first(self) -> None:
        """Load those to begin with. Raises what `load` does."""
        for name, path in list(self._to_load.items()):
            await self.load(name, path)

    async def load_again(self) -> None:
        """Load what another coordinator had, or was to load, from the same folders. What is not here as well is left
        out."""
        for name, path in list(self._to_load.items()):
            try:
                await self.load(name, path)
            except TllmError as error:
                log.warning("adapter %s is served no more: %s", name, error.message)
                del self._to_load[name]
                self._tell()

    async def unload(self, name: str) -> None:
        """Take an adapter's name away. Requests that have begun with it finish; then every rank lets go of it.

        RequestError where there is none of this name.
        """
        one = next((one for one in self._served.values() if self._is(one, name)), None)
        if one is None:
            raise RequestError(f"no adapter {name[:100]!r} is loaded", "see /v1/models", "lora_name")
        one.is_leaving = True
        self._tell()
        self._let_go_unused(one)

    async def counted(self, lora: str, outputs: AsyncGenerator[Output, None]) -> AsyncGenerator[Output, None]:
        """The outputs of a request that names an adapter, which is kept until they end."""
        one = self._served.get(lora)
        if one is None or one.is_leaving:
            raise RequestError("the adapter that this request names was unloaded", "load it again", "model")
        one.requests += 1
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    yield output
        finally:
            one.requests -= 1
            self._let_go_unused(one)

    def _check_name(self, name: str) -> None:
        """RequestError where an adapter cannot be called so."""
        if not name or name == self._base:
            what = f"{name!r} is the model's own name" if name else "the adapter has no name"
            raise RequestError(what, "give another name", "lora_name")
        for one in self._served.values():
            if one.held.name == name and one.is_leaving:
                message = f"the adapter {name[:100]!r} was unloaded, and {one.requests} requests have it still"
                raise RequestError(message, "try again when they have ended, or give another name", "lora_name")
            if one.held.name == name:
                message = f"the adapter {name[:100]!r} has already been loaded, from {one.held.path}"
                raise RequestError(message, "unload it first, or give another name", "lora_name")

    @property
    def _registry(self) -> AdapterRegistry:
        return self._coordinator.weights.adapters

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, int]]:
        """Outputs and inputs of each linear of the model that can be adapted."""
        return adaptable_shapes(self._spec)

    def _tell(self) -> None:
        """Say in the workload what is loaded, or is to be, as whoever takes the coordinator's place is to know it."""
        known = ServedLoras(self.max_loras, self.max_lora_rank, {**self._to_load, **self.paths})
        self._coordinator.work = dataclasses.replace(self._coordinator.work, adapters=known)

    def _is(self, one: ServedAdapter, name: str) -> bool:
        return one.held.name == name and not one.is_leaving

    def _let_go_unused(self, one: ServedAdapter) -> None:
        """Let go of an adapter without a name and without requests; both are then free."""
        if one.is_leaving and not one.requests:
            self._drop(one.files)
            del self._served[one.held.lora]
            log.info("adapter %s is unloaded", one.held.name)

    def _drop(self, files: AdapterFiles) -> None:
        """Let every rank drop an adapter, after what is under way. A new epoch begins without it anyway."""
        self._registry.remove(files)
        state = self._coordinator.state
        if self._recovery.is_open:
            channel = self._coordinator.members.channels[state.ranks[0].node]
            channel.post(UnloadAdapter(files.lora, files.number))

    async def _load_on_each_rank(self, files: AdapterFiles) -> None:
        """On every rank of the epoch, and again in the next one where a node is lost meanwhile."""
        for left in reversed(range(TRIES)):
            await self._recovery.until(lambda: self._recovery.is_open, LOAD_SECONDS)
            if not self._recovery.is_open:
                raise ClusterError("the cluster does not serve now", "see its status, and try again when it does")
            self._check_room()
            message = LoadAdapter(self._coordinator.state.epoch, files)
            try:
                await self._ask_each(message)
                return
            except ClusterError:
                if not left:
                    raise
                await self._recovery.until(partial(self._is_over, message.epoch), CHANGE_SECONDS)
                if not self._is_over(message.epoch):  # no node is lost: one refuses
                    raise

    async def _ask_each(self, message: LoadAdapter) -> None:
        refusals, members = list[TllmError](), self._coordinator.members

        async def ask(node: str, channel: Channel, rank: int) -> None:
            try:
                await channel.ask(message, LOAD_SECONDS)
            except Gone:
                raise
            except TllmError as error:  # for which the rank need not begin anew, as for a part that it refuses
                refusals.append(type(error)(f"{describe(members.state, node)}: {error.message}", error.hint))

        await members.each(ask)
        if refusals:
            raise refusals[0]

    def _is_over(self, epoch: int) -> bool:
        return not self._recovery.is_open or self._coordinator.state.epoch != epoch


def adaptable_shapes(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of each linear of a model that can be adapted."""
    return module_shapes(build(spec, whole(spec), torch.float32, "meta"))


def check_adapter(folder: Path, spec: ModelSpec, max_lora_rank: int) -> None:
    """Look at an adapter in a folder for a model that is not loaded yet. Raises what `HeldAdapter.read` does."""
    HeldAdapter.read("", folder, adaptable_shapes(spec), max_lora_rank)
