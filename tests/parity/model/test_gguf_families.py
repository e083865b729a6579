"""GGUF files of every family: the weights are those of `transformers`' reader, the logits those of its model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from tests.parity.model.test_layouts import prompt
from tests.support.models.families import YARN, save_model
from tests.support.models.gguf_models import write_gguf
from tests.support.models.layouts import logits_under, spec_of
from tests.support.selection import EACH_PART, in_turn
from tllm.quantization.blocks import Blocks, dequantize
from tllm.spec.gguf.gguf_config import ARCHITECTURES as CONFIGS
from tllm.spec.gguf.gguf_keys import GgufKeys
from tllm.spec.gguf.gguf_names import ARCHITECTURES
from tllm.spec.gguf.gguf_parts import rope_scaling
from tllm.spec.hf_config import read_config
from tllm.spec.model_spec import DeltaSpec, LayerSpec, ModelSpec
from tllm.weights.boxes import whole
from tllm.weights.byte_source import LocalFiles
from tllm.weights.formats import gguf_index, gguf_joined
from tllm.weights.formats.gguf_index import GgufWeight
from tllm.weights.formats.open_index import open_index
from tllm.weights.load import load, read_stored

WIDE = dict(hidden_size=64, intermediate_size=96)
EXPERTS = dict(WIDE, moe_intermediate_size=64)
SHARPER = dict(YARN, mscale=0.8, mscale_all_dim=0.8)
LATENTS = dict(EXPERTS, attention_bias=False, kv_lora_rank=32, qk_nope_head_dim=32, v_head_dim=16)
LONG = dict(
    original_max_position_embeddings=64,
    rope_scaling=dict(rope_type="longrope", short_factor=[1.0, 1.5, 2.0, 2.5], long_factor=[2.0, 3.0, 4.0, 5.0]),
)
DELTA = dict(
    linear_num_key_heads=2,
    linear_num_value_heads=6,
    linear_key_head_dim=16,
    linear_value_head_dim=32,
    layer_types=None,
)
CASES: dict[str, tuple[str, dict[str, Any], bool]] = {
    "llama": ("llama", WIDE, True),
    "llama_tied_bias": ("llama_mha_tied_bias", WIDE, True),
    "llama_mqa": ("llama_mqa", WIDE, True),
    "llama_linear": ("llama_linear", WIDE, True),
    "llama_yarn": ("llama_yarn", WIDE, True),
    "llama3": ("llama3", WIDE, True),
    "mixtral": ("mixtral", WIDE, False),
    "qwen2": ("qwen2", WIDE, True),
    "qwen3": ("qwen3", WIDE, True),
    "qwen2moe": ("qwen2_moe", dict(EXPERTS, shared_expert_intermediate_size=32), True),
    "qwen3moe": ("qwen3_moe", dict(EXPERTS, decoder_sparse_step=1), True),
    "gemma2": ("gemma2", dict(WIDE, query_pre_attn_scalar=8), True),
    "gemma3": ("gemma3", dict(WIDE, query_pre_attn_scalar=8, num_hidden_layers=6, layer_types=None), True),
    "phi3": ("phi3", dict(WIDE, head_dim=8), True),
    "phi3_long": ("phi3", dict(WIDE, **LONG, head_dim=8), True),
    "olmo2": ("olmo2", dict(WIDE, head_dim=8), False),
    "smollm3": ("smollm3", dict(WIDE, head_dim=8, no_rope_layer_interval=4), False),
    "olmo3": ("olmo3", dict(WIDE, head_dim=8), False),
    "granite": ("granite", dict(WIDE, head_dim=8), False),
    "seed_oss": ("seed_oss", WIDE, False),
    "mistral3": ("ministral3", WIDE, False),
    "exaone4": ("exaone4", dict(WIDE, head_dim=8), False),
    "arcee": ("arcee", dict(WIDE, head_dim=8), False),
    "ernie4_5": ("ernie4_5", WIDE, False),
    "glm4": ("glm4", WIDE, False),
    "qwen3vl": ("qwen3_vl", WIDE, False),
    "minimax-m2": ("minimax_m2_moe", dict(hidden_size=64, intermediate_size=32), False),
    "qwen3next": (
        "qwen3_next_moe",
        dict(EXPERTS, **DELTA, shared_expert_intermediate_size=32, mlp_only_layers=[]),
        False,
    ),
    "qwen35": ("qwen3_5", dict(WIDE, **DELTA), False),
    "qwen35moe": (
        "qwen3_5_moe",
        dict(EXPERTS, **DELTA, shared_expert_intermediate_size=32, attention_bias=False),
        False,
    ),
    "gpt-oss": ("gpt_oss_moe", dict(WIDE, swiglu_limit=7.0, swiglu_alpha=1.702), False),
    "glm4moe": ("glm4_moe", EXPERTS, False),
    "glm4moe_plain": (
        "glm4_moe",
        dict(EXPERTS, use_qk_norm=False, attention_bias=False, n_group=1, topk_group=1),
        False,
    ),
    "deepseek2": ("deepseek_v3_moe", dict(LATENTS, rope_parameters=SHARPER), False),
    "deepseek2_old": ("deepseek_v3_moe", dict(LATENTS, rope_parameters=SHARPER), False),
    "deepseek2_softmax": ("deepseek_v2_moe", LATENTS, False),
    "deepseek2_glm": ("glm4_moe_lite", LATENTS, False),
    "gemma4": ("gemma4", WIDE, False),
    "gemma4_moe": ("gemma4_moe", EXPERTS, False),
    "gemma4_e2b": ("gemma4_e2b", dict(WIDE, hidden_size_per_layer_input=16), False),
}
"""Our name -> the family's case, what differs from it, and whether transformers reads such files."""

UNTOLD = {"glm4_moe_lite": "deepseek_v3"}
"""Families that no file tells from others, which are the same."""

LAYOUTS = ("tp=3,shares=1:2:1", "pp=2,tp=1+2")


def mixed(name: str) -> str:
    """Types that a file may mix: by the tensor, as quantisers do it."""
    if "exps" in name:
        return "Q4_0" if "down" in name else "MXFP4"
    if "ffn" in name:
        return {"gate": "Q5_0", "up": "IQ4_NL", "down": "Q4_1"}.get(name.split("_")[1].split(".")[0], "F32")
    return {"attn_q": "Q8_0", "attn_k": "Q4_0", "token_embd": "F16", "output": "BF16"}.get(name.split(".")[-2], "Q8_0")


def fill(model: nn.Module, path: Path) -> None:
    source = LocalFiles(path)
    load(model, open_index(source, read_config(path)), source)


@EACH_PART
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str, part: str, tmp_path: Path) -> None:
    family, own, _ = CASES[case]
    truth = save_model(family, tmp_path / "plain", **own)
    path = write_gguf(truth, tmp_path / "model.gguf", mixed, old=case.endswith("_old"))
    if case not in ("llama3", "phi3_long"):  # of which a file has factors that are worked out, and rounded
        plain = replace(spec_of(tmp_path / "plain"), dtype="bfloat16")
        plain = replace(plain, family=UNTOLD.get(plain.family, plain.family))
        assert replace(spec_of(path), quantization=None, layers=()) == replace(plain, layers=())
        assert _of_any_order(spec_of(path)) == _of_any_order(plain)
    ids_T = prompt(40)
    with torch.inference_mode():
        want = truth(ids_T[None]).logits[0]
    unsplit = logits_under(path, "pp=1", ids_T, torch.float64, fill=fill)
    torch.testing.assert_close(unsplit.float(), want, rtol=0, atol=2e-5)
    spread = ["tp=2,experts=spread"] if "moe" in family or family == "mixtral" else []
    for layout in in_turn([*LAYOUTS, *spread], case, CASES, part, count=1):
        got = logits_under(path, layout, ids_T, torch.float32, fill=fill)
        torch.testing.assert_close(got, want, rtol=0, atol=2e-5, msg=lambda m, at=layout: f"{case} {at}: {m}")


def _of_any_order(spec: ModelSpec) -> list[LayerSpec]:
    """The layers, whatever order the heads of their delta nets have in the files."""
    unordered = dict(fused=False, fused_ba=False, tiled=False)
    return [replace(one, delta=replace(one.delta, **unordered) if one.delta else None) for one in spec.layers]


def in_super_blocks(name: str) -> str:
    """Types of 256 columns, so that heads and columns of the MLP are cut inside of a block."""
    kinds = {
        "attn_q": "Q4_K",
        "attn_k": "Q5_K",
        "attn_v": "Q6_K",
        "attn_output": "IQ4_XS",
        "ffn_gate": "Q3_K",
        "ffn_up": "Q2_K",
        "ffn_down": "Q4_K",
        "token_embd": "Q6_K",
    }
    return kinds[name.split(".")[-2]]


def test_cuts_fall_inside_of_blocks(tmp_path: Path) -> None:
    own = dict(hidden_size=256, intermediate_size=512, head_dim=32, num_hidden_layers=2, tie_word_embeddings=True)
    truth = save_model("llama", tmp_path / "plain", **own)
    path = write_gguf(truth, tmp_path / "model.gguf", in_super_blocks)
    ids_T = prompt(24)
    with torch.inference_mode():
        want = truth(ids_T[None]).logits[0]
    for layout in ("tp=3,shares=1:2:1", "tp=5", "pp=2,tp=2+1,shares=1:3+1"):
        got = logits_under(path, layout, ids_T, torch.float64, fill=fill)
        torch.testing.assert_close(got.float(), want, rtol=0, atol=2e-5, msg=lambda m, at=layout: f"{at}: {m}")


@pytest.mark.parametrize("case", [case for case, (_, _, known) in CASES.items() if known])
def test_weights_are_those_that_transformers_reads(case: str, tmp_path: Path) -> None:
    family, own, _ = CASES[case]
    truth = save_model(family, tmp_path / "plain", **own)
    path = write_gguf(truth, tmp_path / "model.gguf", mixed)
    wanted = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=truth)["tensors"]
    source = LocalFiles(path)
    index = open_index(source, read_config(path))
    held = {name: _numbers(index, source, name) for name in index.stored}
    for name, tensor in wanted.items():
        if name == "lm_head.weight" and truth.config.tie_word_embeddings:
            continue
        assert torch.equal(_stacked(held, name), tensor.float()), name
    assert len(wanted) >= len({name for name in held if "experts" not in name})


def _numbers(index: Any, source: LocalFiles, name: str) -> torch.Tensor:
    stored = index.stored[name]
    found, _ = read_stored(name, stored, whole(stored.shape), index, source)
    return dequantize(found) if isinstance(found, Blocks) else found.float()


def _stacked(held: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """A weight by the name of transformers' model, which stacks experts."""
    base, _, part = name.rpartition(".")
    if not base.endswith("experts"):
        return held[name]
    count = len([key for key in held if key.startswith(base) and "down" in key])
    words = ["gate_proj", "up_proj"] if part == "gate_up_proj" else ["down_proj"]
    return torch.stack([torch.cat([held[f"{base}.{e}.{word}.weight"] for word in words]) for e in range(count)])


MUTATIONS: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "rows of heads left as they are": (
        "llama",
        lambda patch: patch.setattr(gguf_index, "unpaired", lambda rows, head_dim: rows),
    ),
    "norms with their one": (
        "gemma3",
        lambda patch: patch.setitem(ARCHITECTURES, "gemma3", replace(ARCHITECTURES["gemma3"], norm_offset=False)),
    ),
    "another expert": (
        "mixtral",
        lambda patch: patch.setattr(
            GgufWeight, "plane_boxes", lambda self, box, real=GgufWeight.plane_boxes: real(_next_expert(self), box)
        ),
    ),
    "heads of a delta net in the folder's order": (
        "qwen35",
        lambda patch: patch.setattr(DeltaSpec, "key_head", lambda self, head: head // self.group),
    ),
    "decays as they are": ("qwen35", lambda patch: patch.setitem(gguf_index.CHANGED, "minus_exp", lambda x: x)),
    "a delta net's norm without a one": (
        "qwen3next",
        lambda patch: patch.setitem(
            ARCHITECTURES, "qwen3next", replace(ARCHITECTURES["qwen3next"], plain_norms=frozenset())
        ),
    ),
    "gates for ups": (
        "gemma4_moe",
        lambda patch: patch.setattr(
            GgufWeight,
            "plane_boxes",
            lambda self, box, real=GgufWeight.plane_boxes: real(replace(self, first_row=0), box),
        ),
    ),
    "gates below ups": (
        "gpt-oss",
        lambda patch: patch.setattr(gguf_joined, "_by_turns", lambda one, other, dim: torch.cat((one, other), dim)),
    ),
    "rows of a latent's keys and values moved by one": (
        "deepseek2",
        lambda patch: patch.setattr(
            gguf_joined.RowsOfHeads,
            "decode",
            lambda self, box, planes, real=gguf_joined.RowsOfHeads.decode: real(self, box, planes).roll(1, 0),
        ),
    ),
    "scores that are not sharper": (
        "deepseek2",
        lambda patch: patch.setitem(
            CONFIGS,
            "deepseek2",
            lambda keys, real=CONFIGS["deepseek2"]: real(keys) | {"rope_scaling": rope_scaling(keys)},
        ),
    ),
    "weights of experts unscaled": (
        "glm4moe",
        lambda patch: patch.setitem(
            CONFIGS, "glm4moe", lambda keys, real=CONFIGS["glm4moe"]: real(keys) | {"routed_scaling_factor": 1.0}
        ),
    ),
    "a file's way of rope for a folder's": (
        "granite",
        lambda patch: patch.setitem(ARCHITECTURES, "granite", replace(ARCHITECTURES["granite"], paired=False)),
    ),
    "norms of the halves exchanged": (
        "glm4",
        lambda patch: patch.setitem(
            ARCHITECTURES,
            "glm4",
            replace(ARCHITECTURES["glm4"], parts=_exchanged(ARCHITECTURES["glm4"].parts, "ffn_norm", "post_ffw_norm")),
        ),
    ),
    "bounds of YaRN as whole numbers": (
        "gpt-oss",
        lambda patch: patch.setitem(
            CONFIGS, "gpt-oss", lambda keys, real=CONFIGS["gpt-oss"]: real(keys) | {"rope_scaling": rope_scaling(keys)}
        ),
    ),
    "factors of rope forgotten": (
        "llama3",
        lambda patch: patch.setattr(GgufKeys, "has", lambda self, name: name == "output.weight"),
    ),
}


def _exchanged(parts: Mapping[str, str], one: str, other: str) -> dict[str, str]:
    return {**parts, one: parts[other], other: parts[one]}


def _next_expert(weight: GgufWeight) -> GgufWeight:
    return weight if weight.expert is None else replace(weight, expert=(weight.expert + 1) % 5)


@pytest.mark.parametrize("what", MUTATIONS)
def test_a_fault_shows(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case, spoil = MUTATIONS[what]
    family, own, _ = CASES[case]
    truth = save_model(family, tmp_path / "plain", **own)
    path = write_gguf(truth, tmp_path / "model.gguf")
    ids_T = prompt(40)
    with torch.inference_mode():
        want = truth(ids_T[None]).logits[0]
    torch.testing.assert_close(logits_under(path, "pp=1", ids_T, torch.float32, fill=fill), want, rtol=0, atol=2e-5)
    spoil(monkeypatch)
    assert (logits_under(path, "pp=1", ids_T, torch.float32, fill=fill) - want).abs().max() > 0.01


def test_no_architecture_is_left_out() -> None:
    assert set(ARCHITECTURES) == set(CONFIGS)
    assert set(ARCHITECTURES) <= set(CASES)
