"""Llama folders with random weights whose next-token distributions are as sure, and as unsure, as those of a trained
model: with the weights of `random_llama` every token is about equally likely."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks.models.random_llama import model_folder

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
LARGER = 50
"""Times: an embedding is then most of a place's hidden state, or all places of a row would be alike."""

COMMON, OWN, WIDE = 3.0, 5.0, 2
"""The logits of a place are normal with a variance of COMMON² and OWN² times the mean square of WIDE of its hidden
numbers, so that places differ: deviations are from 3 to about 10."""


def peaked_folder(size: str, root: Path, vocabulary: int) -> Path:
    """The float32 folder of `random_llama` with other ends; it is written on first use."""
    plain = model_folder(size, root, torch.float32, vocabulary)
    folder = plain.with_name(plain.name.replace("random", "peaked"))
    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    weights = load_file(plain / "model.safetensors")
    weights[EMBEDDING] *= LARGER
    weights[HEAD] = peaked_head(vocabulary, json.loads((plain / "config.json").read_text())["hidden_size"])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(plain / "config.json", folder / "config.json")
    return folder


def peaked_head(vocabulary: int, width: int) -> torch.Tensor:
    """[V, D]: the logits of hidden states with a mean square of 1 have deviations as `COMMON` and `OWN` say."""
    head_VD: torch.Tensor = (
        torch.randn(vocabulary, width, generator=torch.Generator().manual_seed(1)) * COMMON / width**0.5
    )
    head_VD[:, :WIDE] *= OWN / COMMON * (width / WIDE) ** 0.5
    return head_VD
