"""A small job on disk, as a user would write it: a model from nothing over a few pages of the language reference."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from pydoc_data import topics
from types import MappingProxyType
from typing import Any

CONFIG = dict(
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    vocab_size=300,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    hidden_act="silu",
    max_position_embeddings=128,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    initializer_range=0.05,
    tie_word_embeddings=True,
    bos_token_id=None,
    eos_token_id=0,
    torch_dtype="float32",
)
PAGES = 30


NOTHING: Mapping[str, Any] = MappingProxyType({})


def write_job(folder: Path, config: Mapping[str, Any] = NOTHING, **more: Any) -> Path:
    """Write texts, a config and the job into a folder; the job's file. Its run is in `run` beside them.

    `config` and `more` are what differs from CONFIG, and from the job below.
    """
    pages = [text.strip() for _, text in sorted(topics.topics.items())][:PAGES]
    (folder / "pages.jsonl").write_text("".join(json.dumps({"text": page}) + "\n" for page in pages))
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    fields = dict(
        output_dir=str(folder / "run"),
        train_files=[str(folder / "pages.jsonl")],
        config_name=str(folder / "config.json"),
        max_steps=60,
        seq_len=64,
        global_batch_size=8,
        microbatch_size=2,
        learning_rate=5e-3,
        save_steps=20,
    )
    job = folder / "job.toml"
    job.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in {**fields, **more}.items()))
    return job
