"""`DenseLayers`: the linears of a sentence-transformers folder, which pooled prompts of its model go through.

They are a small part of a model and follow what its last stage pools, so whoever gives requests to the ranks has them:
the coordinator, or the process of an engine that is in one process. They are computed in float64.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import cached_property
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from tllm.core.errors import ConfigError, WeightsError
from tllm.server.pooling.pooler_config import MODULES, DenseModule, dense_modules
from tllm.spec.request import Output, Request
from tllm.weights.byte_source import LocalFiles
from tllm.weights.header_tables import SINGLE
from tllm.weights.safetensors_header import read_header
from tllm.weights.safetensors_index import Index

EMBEDDED = ("last", "mean")
"""Kinds of pooling that make an embedding."""


class DenseLayers:
    """Those of the model in a folder, none for most; the folder is looked into, and weights are read, when the first
    embedding is asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reading = threading.Lock()

    @cached_property
    def modules(self) -> tuple[DenseModule, ...]:
        return dense_modules(self._folder)

    def follow(self, request: Request, outputs: AsyncGenerator[Output, None]) -> AsyncGenerator[Output, None]:
        """The outputs of a request, of which an embedding has gone through the layers."""
        is_embedded = request.pooling is not None and request.pooling.kind in EMBEDDED
        return self._applied(outputs) if is_embedded and self.modules else outputs

    async def _applied(self, outputs: AsyncGenerator[Output, None]) -> AsyncGenerator[Output, None]:
        async with aclosing(outputs):
            async for output in outputs:
                if output.pooled:
                    pooled = await asyncio.to_thread(self, output.pooled)
                    output = msgspec.structs.replace(output, pooled=pooled)
                yield output

    def __call__(self, values: tuple[float, ...]) -> tuple[float, ...]:
        x_D = torch.tensor(values, dtype=torch.float64)
        with self._reading:  # threads call this, and one reads for all
            weights = self._weights
        for module, (weight_OI, bias_O) in zip(self.modules, weights, strict=True):
            x_D = weight_OI @ x_D if bias_O is None else weight_OI @ x_D + bias_O
            x_D = x_D.tanh() if module.activation == "tanh" else x_D
        return tuple(x_D.tolist())

    @cached_property
    def _weights(self) -> list[tuple[Tensor, Tensor | None]]:
        return [_read(module) for module in self.modules]


def check_dense(folder: Path) -> None:
    """WeightsError where the folder of a model lacks the weights of a module `Dense`, or they have another shape."""
    for module in dense_modules(folder):
        _open(module)


def dense_files(folder: Path) -> tuple[str, ...]:
    """The paths of all that is read here of a model's folder: whoever goes on with its embeddings needs the same."""
    folder = folder.resolve()
    listed = str((folder if folder.is_dir() else folder.parent) / MODULES)
    try:
        modules = dense_modules(folder)
    except ConfigError:  # it cannot embed, and elsewhere must not pass for one without such modules
        return (listed,)
    files = (str(Path(module.path) / name) for module in modules for name in ("config.json", SINGLE))
    return (listed, *files) if modules else ()


def _open(module: DenseModule) -> tuple[LocalFiles, Index]:
    """Its files and what is in them. WeightsError for what is missing or has another shape."""
    source = LocalFiles(Path(module.path))
    if SINGLE not in source.names():
        raise WeightsError(
            f"{module.path} has no {SINGLE}, the weights of a module Dense",
            "copy it there, as pickles are not read; to serve the model without embeddings, take modules.json away",
        )
    index = Index(read_header(source, SINGLE))
    wanted = {"linear.weight": (module.out_features, module.in_features)}
    if module.bias:
        wanted["linear.bias"] = (module.out_features,)  # type: ignore[assignment]
    for name, shape in wanted.items():
        if tuple(index.shape(name)) != shape:
            message = f"{name} of {module.path} is {list(index.shape(name))}, its config.json says {list(shape)}"
            raise WeightsError(message, "copy the whole model folder again")
    return source, index


def _read(module: DenseModule) -> tuple[Tensor, Tensor | None]:
    """Its weight [out, in] and bias [out], in float64."""
    source, index = _open(module)
    weight_OI = index.slice(source, "linear.weight").double()
    return weight_OI, index.slice(source, "linear.bias").double() if module.bias else None
