"""Llama model folders with random weights, in the sizes that benchmarks use. A folder is made once and kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
)
SHAPES = {
    "tiny": dict(zip(SIZES, (64, 2, 4, 2, 160, 256), strict=True)),
    "1m": dict(zip(SIZES, (128, 4, 4, 4, 344, 256), strict=True)),
    "30m": dict(zip(SIZES, (512, 8, 8, 4, 1408, 8192), strict=True)),
    "60m": dict(zip(SIZES, (640, 11, 10, 5, 1728, 8192), strict=True)),
    "0.3b": dict(zip(SIZES, (1024, 24, 16, 8, 2816, 32000), strict=True)),
    "1.1b": dict(zip(SIZES, (2048, 22, 32, 4, 5632, 32000), strict=True)),
}


def parameters(size: str) -> str:
    """A size in words, as titles have it: "0.3 billion parameters"."""
    units = {"m": "million", "b": "billion"}
    return "0.1 million parameters" if size == "tiny" else f"{size[:-1]} {units[size[-1]]} parameters"


def config_of(
    shape: dict[str, int], dtype: str, context: int = 4096, eps: float = 1e-6, theta: float = 10000.0
) -> dict[str, Any]:
    """The `config.json` of a Llama of this shape (`SIZES`); eps and theta are Llama 2's, or given."""
    return dict(
        shape,
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        max_position_embeddings=context,
        rms_norm_eps=eps,
        rope_theta=theta,
        tie_word_embeddings=False,
        hidden_act="silu",
        torch_dtype=dtype,
        bos_token_id=1,
        eos_token_id=2,
    )


def model_folder(size: str, root: Path, dtype: torch.dtype = torch.bfloat16, vocabulary: int | None = None) -> Path:
    """The folder of a model of this size, without a tokenizer; it is written on first use.

    `vocabulary`: tokens, where they are to be others than the size has.
    """
    name = str(dtype).removeprefix("torch.")
    tokens = "" if vocabulary is None else f"-v{vocabulary}"
    folder = root / f"llama-{size}{tokens}-random{'' if dtype == torch.bfloat16 else '-' + name}"
    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    shape = SHAPES[size] if vocabulary is None else SHAPES[size] | {"vocab_size": vocabulary}
    config = config_of(shape, name)
    save_file(_weights(config, dtype), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder


def _weights(config: dict[str, object], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    D, F, V = (int(str(config[key])) for key in ("hidden_size", "intermediate_size", "vocab_size"))
    kv = D // int(str(config["num_attention_heads"])) * int(str(config["num_key_value_heads"]))
    shapes = {"model.embed_tokens.weight": (V, D), "lm_head.weight": (V, D)}
    for i in range(int(str(config["num_hidden_layers"]))):
        at = f"model.layers.{i}"
        shapes |= {f"{at}.self_attn.{p}_proj.weight": (n, D) for p, n in (("q", D), ("k", kv), ("v", kv), ("o", D))}
        shapes |= {f"{at}.mlp.{p}_proj.weight": (F, D) for p in ("gate", "up")} | {f"{at}.mlp.down_proj.weight": (D, F)}
    weights = {name: (torch.randn(shape) * 0.02).to(dtype) for name, shape in shapes.items()}
    layers = range(int(str(config["num_hidden_layers"])))
    norms = [f"model.layers.{i}.{kind}_layernorm" for i in layers for kind in ("input", "post_attention")]
    return weights | {f"{name}.weight": torch.ones(D, dtype=dtype) for name in [*norms, "model.norm"]}
