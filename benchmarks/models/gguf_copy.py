"""A Llama model folder as a GGUF file, in bfloat16 or with its linears rounded, for programs that read these."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
"""GGUF's names of a layer's weights."""

OUTSIDE = {"model.embed_tokens": "token_embd", "lm_head": "output", "model.norm": "output_norm"}

TYPES = {"bfloat16": "BF16", "float16": "F16", "int8": "Q8_0", "int4": "Q4_0"}
"""The types of GGUF with as many bits."""


def gguf_copy(folder: Path, form: str) -> Path:
    """The file, written beside the folder on first use. Random weights: rows of q and k need not be put in order.

    As tllm does with int4, the table of the logits has 8 bits.
    """
    out = folder.parent / f"{folder.name}-{form}.gguf"
    if out.exists():
        return out
    gguf = importlib.import_module("gguf")
    config = json.loads((folder / "config.json").read_text())
    partial = out.with_suffix(".part")
    writer = gguf.GGUFWriter(partial, "llama")
    _describe(writer, config)
    for name, weight in load_file(folder / "model.safetensors").items():
        kind = "F32" if weight.dim() == 1 else TYPES[form]
        if form == "int4" and name in ("lm_head.weight", "model.embed_tokens.weight"):
            kind = "Q8_0"
        kind = getattr(gguf.GGMLQuantizationType, kind)
        writer.add_tensor(_name(name), gguf.quants.quantize(weight.float().numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return partial.rename(out)


def _describe(writer: Any, config: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    _name_tokens(writer, config["vocab_size"])


def _name_tokens(writer: Any, count: int) -> None:
    """A vocabulary of made-up words, as a server must write what it generates."""
    kinds = importlib.import_module("gguf").TokenType
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", *(f"\u2581w{number}" for number in range(3, count))])
    writer.add_token_scores([0.0] * count)
    writer.add_token_types([kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL, *[kinds.NORMAL] * (count - 3)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def _name(name: str) -> str:
    module, part = name.rsplit(".", 1)
    if module in OUTSIDE:
        return f"{OUTSIDE[module]}.{part}"
    _, _, layer, rest = module.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.{part}"


def weight_bytes(file: Path) -> int:
    """Bytes that a token reads of a file's weights: all but the table of the embedding."""
    gguf = importlib.import_module("gguf")
    tensors = gguf.GGUFReader(file).tensors
    return sum(int(tensor.n_bytes) for tensor in tensors if tensor.name != "token_embd.weight")
