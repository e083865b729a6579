"""An adapter's files as PEFT writes them: `adapter_config.json` and `adapter_model.safetensors`, read and checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from tllm.comm.collectives.group import Group
from tllm.core.errors import ConfigError, WeightsError, nearest
from tllm.parallel.lora.adapted_model import (
    NO_DORA,
    ODD_EXPERTS,
    Update,
    is_of_expert,
    odd_experts,
    updates_of,
    with_dora,
)
from tllm.parallel.lora.lora_update import LoraModule, magnitude_name, tensor_names, weight_of
from tllm.spec.lora.lora_config import CONFIG_FILE, CONFIG_LIMIT, LoraConfig, read_lora_config
from tllm.spec.quantized.quantization_config import text_name
from tllm.weights.boxes import Shape
from tllm.weights.byte_source import ByteSource, read_whole
from tllm.weights.load import load
from tllm.weights.lora.dora_factors import DoraFactors
from tllm.weights.lora.sampled_digest import KEY
from tllm.weights.safetensors_header import TensorEntry, read_header, read_metadata
from tllm.weights.safetensors_index import PICKLED, Index

WEIGHTS_FILE = "adapter_model.safetensors"
ADAPTER_FILES = (CONFIG_FILE, WEIGHTS_FILE)

WRAPPED = "base_model.model."
"""What PEFT puts before the name of a module."""

KINDS = ("A.weight", "B.weight", "magnitude_vector")
"""Of a module's tensors, what follows `.lora_` in their names."""


@dataclass(frozen=True)
class Adapter:
    """An adapter whose headers have been read: rank and scale of each module that it adapts, and where its tensors lie.

    Modules and tensors have the names that the model's text part gives them. `base` is the digest of the weights that
    it was trained beside, where its file says so (`sampled_digest`).
    """

    config: LoraConfig
    modules: dict[str, LoraModule]
    index: Index
    base: str = ""

    @property
    def max_rank(self) -> int:
        """The largest rank of its modules."""
        return max(module.rank for module in self.modules.values())

    def check(self, shapes: Mapping[str, tuple[int, int]]) -> None:
        """WeightsError for a module that is not among the adaptable ones of a model, or has another size there.

        `shapes` are outputs and inputs of those of the whole model (`adapted_model.module_shapes`).
        """
        for name, (rank, _, use_dora) in self.modules.items():
            if name not in shapes:
                raise WeightsError(
                    f"the adapter adapts {name}, and of this model no such linear can be adapted",
                    "linears of attention, MLPs and experts can be; routers, embeddings and lm_head cannot; "
                    f"{nearest(name, shapes)}",
                )
            if use_dora and is_of_expert(name):
                raise WeightsError(
                    f"the adapter adapts {name} with use_dora, {NO_DORA}",
                    "merge it with the versions of PEFT and transformers that trained it",
                )
            outputs, inputs = shapes[name]
            wanted: dict[str, Shape] = dict(zip(tensor_names(name), ((rank, inputs), (outputs, rank)), strict=True))
            if use_dora:
                wanted[magnitude_name(name)] = (outputs,)
            for tensor, shape in wanted.items():
                if self.index.shape(tensor) != shape:
                    raise WeightsError(
                        f"{tensor} has shape {self.index.shape(tensor)} and this model with rank {rank} needs {shape}",
                        "is the adapter of this model, and of this adapter_config.json?",
                    )

        if odd := odd_experts(self.modules, shapes):
            raise WeightsError(f"the adapter adapts {odd} and {ODD_EXPERTS}", "merge it with PEFT")

    def load(self, model: nn.Module, source: ByteSource, dtype: torch.dtype, tp: Group) -> dict[nn.Module, Update]:
        """The updates of a rank's linears, read from the adapter's files: this rank's parts and no other bytes.

        They are on the device of the model, whose weights must be there: the norms of DoRA are those of their rows.
        `tp` are the ranks that have the other parts. Magnitudes are kept in float32 at least.
        """
        with next(model.parameters()).device:
            updates = updates_of(model, self.modules)
            whole = with_dora(updates) if self.config.use_dora else {}
            factors = {linear: DoraFactors(linear, update, tp) for linear, update in whole.items()}
        load(nn.ModuleList(updates.values()), self.index, source, dtype)
        if factors:
            load(nn.ModuleList(factors.values()), self.index, source, torch.promote_types(dtype, torch.float32))
        for linear, of_linear in factors.items():
            of_linear.measure(weight_of(linear), whole[linear])
            whole[linear].factor = of_linear
        return updates


def read_adapter(source: ByteSource) -> Adapter:
    """Read and check both headers. WeightsError for what is missing, torn, or not supported, by its name."""
    names = source.names()
    if CONFIG_FILE not in names:
        raise WeightsError(f"there is no {CONFIG_FILE}", "give the folder of an adapter as PEFT saves it")
    if WEIGHTS_FILE not in names:
        pickled = [name for name in names if name.startswith("adapter_model") and name.endswith(PICKLED)]
        hint = f"{pickled[0]} is a pickle, which can run code: save the adapter anew with PEFT" if pickled else ""
        raise WeightsError(f"there is no {WEIGHTS_FILE}", hint or "copy the whole folder")
    config = read_lora_config(read_whole(source, CONFIG_FILE, CONFIG_LIMIT))
    entries = _plain_names(read_header(source, WEIGHTS_FILE))
    modules = {name.rpartition(".lora_")[0]: None for name in entries}
    if not modules:
        raise WeightsError(f"{WEIGHTS_FILE} has no tensor", "copy the adapter again")
    found = {name: _module(name, config, entries) for name in modules}
    return Adapter(config, found, Index(entries), read_metadata(source, WEIGHTS_FILE).get(KEY, ""))


def check_rank(adapter: Adapter, max_lora_rank: int) -> None:
    """ConfigError for an adapter of a larger rank than is served."""
    if adapter.max_rank > max_lora_rank:
        raise ConfigError(
            f"the adapter has rank {adapter.max_rank} and adapters up to rank {max_lora_rank} are served",
            f"start the server with --max-lora-rank {adapter.max_rank}",
        )


def module_name(wrapped: str) -> str:
    """The name that the model's text part gives a module, of the one that PEFT writes.

    That of a model which PEFT wrapped without its head, as it does to embed, lacks the first part.
    """
    name = text_name(wrapped.removeprefix(WRAPPED))
    return f"model.{name}" if name.startswith("layers.") else name


def _plain_names(entries: dict[str, TensorEntry]) -> dict[str, TensorEntry]:
    """The tensors under the names that the model's text part gives their modules."""
    found: dict[str, TensorEntry] = {}
    for name, entry in entries.items():
        module, _, kind = name.rpartition(".lora_")
        if not name.startswith(WRAPPED) or not module or kind not in KINDS:
            raise WeightsError(
                f"{WEIGHTS_FILE} has a tensor {name[:200]!r}, and lora_A, lora_B and magnitudes of linears are read",
                "embeddings, biases and modules_to_save are not supported: merge the adapter with PEFT",
            )
        plain = f"{module_name(module)}.lora_{kind}"
        if plain in found:
            raise WeightsError(f"{WEIGHTS_FILE} has {plain!r} twice, once as {name!r}", "copy the adapter again")
        found[plain] = entry
    return found


def _module(name: str, config: LoraConfig, entries: dict[str, TensorEntry]) -> LoraModule:
    magnitude = magnitude_name(name)
    if magnitude in entries and not config.use_dora:
        raise WeightsError(
            f"{WEIGHTS_FILE} has {magnitude} and {CONFIG_FILE} does not have use_dora",
            "the two files are of different adapters",
        )
    for tensor in (*tensor_names(name), *([magnitude] if config.use_dora else [])):
        if tensor not in entries:
            raise WeightsError(f"{WEIGHTS_FILE} lacks {tensor}", "copy the adapter again")
    if not config.names(name):
        raise WeightsError(
            f"{WEIGHTS_FILE} adapts {name} and target_modules of {CONFIG_FILE} does not name it",
            "the two files are of different adapters",
        )
    return LoraModule(config.rank(name), config.scale(name), config.use_dora)
