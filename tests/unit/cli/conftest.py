"""A model folder that holds no weights: all that a command may read before it starts anything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

CONFIG = dict(
    model_type="llama",
    architectures=["LlamaForCausalLM"],
    vocab_size=320,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=6,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=8,
    rms_norm_eps=1e-5,
    max_position_embeddings=128,
    hidden_act="silu",
    torch_dtype="bfloat16",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.fixture(autouse=True)
def commands_run_here(own_process: None) -> None:
    """In the tests' own process."""
