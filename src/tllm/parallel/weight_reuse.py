"""Weights that a node already has, found again by the pieces that a parameter is made of, so that a new plan need not
read them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from tllm.parallel.quantized_weight import stands_for
from tllm.parallel.shard import ShardPiece, shard_of

Key = tuple[tuple[ShardPiece, ...], torch.Size, torch.dtype]
"""Two parameters of one checkpoint hold the same numbers if these are equal."""

Kept = Mapping[Key, nn.Parameter]


def key_of(parameter: nn.Parameter) -> Key:
    return shard_of(parameter).pieces, *stands_for(parameter)


def weights_of(model: nn.Module) -> Kept:
    """All parameters of a model that is filled."""
    return {key_of(parameter): parameter for parameter in model.parameters()}


def wanted(model: nn.Module, kept: Kept) -> Kept:
    """Those of `kept` that `model`, which may be on the meta device, needs too."""
    keys = {key_of(parameter) for parameter in model.parameters()}
    return {key: parameter for key, parameter in kept.items() if key in keys}
