"""A GGUF file with changed bytes: a model, a tokenizer and an index, or one error in words; never another exception."""

from __future__ import annotations

import contextlib
import math
import random
import struct
import tracemalloc
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import pytest
import transformers
from gguf import GGUFValueType
from gguf.gguf_writer import GGUFValue

from tests.support.models.families import save_model
from tests.support.models.gguf_models import write_gguf
from tests.unit.text.test_gguf_tokenizer import byte_level_of, parts_of
from tllm.core.errors import TllmError
from tllm.core.gguf_header import STEP
from tllm.spec.families import spec_from_config
from tllm.spec.hf_config import read_config
from tllm.text.chat_template import ChatTemplate
from tllm.text.gguf_tokenizer import PRE
from tllm.text.tokenizer import Tokenizer
from tllm.weights.byte_source import LocalFiles
from tllm.weights.formats.open_index import open_index

CHANGES = 150

TOKENS, MERGES, KINDS = parts_of(byte_level_of(PRE["qwen2"]))
VOCABULARY = dict(
    tokenizer_model="gpt2", tokenizer_pre="qwen2", token_list=TOKENS, token_types=KINDS, token_merges=MERGES,
    eos_token_id=1, bos_token_id=0, chat_template="{{ messages[0].content }}",
)  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "mixtral": dict(hidden_size=32, intermediate_size=32),
    "qwen2_moe": dict(hidden_size=32, moe_intermediate_size=32, shared_expert_intermediate_size=32),
    "gemma3": dict(hidden_size=32, intermediate_size=32, layer_types=None),
    "phi3": dict(hidden_size=32, intermediate_size=32, head_dim=4),
    "qwen3_next_moe": dict(
        hidden_size=32, moe_intermediate_size=32, shared_expert_intermediate_size=32, mlp_only_layers=[],
        num_hidden_layers=4, layer_types=None,
    ),
    "qwen3_5": dict(hidden_size=32, intermediate_size=32, num_hidden_layers=4, layer_types=None),
    "gemma4_moe": dict(hidden_size=32, intermediate_size=32, moe_intermediate_size=32, num_hidden_layers=4),
    "gpt_oss_moe": dict(hidden_size=32, intermediate_size=32),
    "glm4_moe": dict(hidden_size=32, intermediate_size=32, moe_intermediate_size=32, num_hidden_layers=2),
    "deepseek_v3_moe": dict(
        hidden_size=32, intermediate_size=32, moe_intermediate_size=32, num_hidden_layers=3, attention_bias=False
    ),
    "olmo3": dict(hidden_size=32, intermediate_size=32, head_dim=4),
    "granite": dict(hidden_size=32, intermediate_size=32, head_dim=4),
    "ministral3": dict(hidden_size=32, intermediate_size=32),
    "minimax_m2_moe": dict(hidden_size=32, intermediate_size=32),
    "gemma4_e2b": dict(
        hidden_size=32, intermediate_size=32, num_hidden_layers=4, vocab_size_per_layer_input=len(TOKENS)
    ),
}  # fmt: skip
KEYS = (
    "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length", "rope.dimension_count",
    "rope.scaling.yarn_beta_fast", "rope.scaling.attn_factor", "rope.scale_linear", "rope.freq_base_swa",
    "expert_weights_norm", "expert_gating_func", "expert_weights_scale", "attention.causal", "attention.sliding_window",
    "attention.sliding_window_pattern", "final_logit_softcapping", "nextn_predict_layers", "full_attention_interval",
    "expert_group_count", "expert_group_used_count", "leading_dense_block_count", "expert_shared_count",
    "attention.key_length_mla", "attention.q_lora_rank", "rope.scaling.yarn_log_multiplier",
    "attention.temperature_scale", "attention.scale", "embedding_scale", "residual_scale", "logit_scale",
    "attention.shared_kv_layers", "embedding_length_per_layer_input", "rope.dimension_sections",
)  # fmt: skip
OTHERS = (
    "general.type", "general.alignment", "split.count", "split.no", "split.tensors.count",
    "tokenizer.ggml.add_bos_token", "tokenizer.chat_template.tool", "tokenizer.ggml.eot_token_id",
    "tokenizer.ggml.add_space_prefix",
)  # fmt: skip
"""Keys that may be there beside those that are."""
VALUES: tuple[tuple[Any, GGUFValueType], ...] = (
    *((value, GGUFValueType.UINT32) for value in (0, 1, 7, 2**32 - 1)),
    *((value, GGUFValueType.INT32) for value in (-1, -(2**31))),
    (2**63, GGUFValueType.UINT64),
    *((value, GGUFValueType.FLOAT32) for value in (0.0, 0.5, -1.5, math.nan, math.inf)),
    (1e300, GGUFValueType.FLOAT64),
    *((value, GGUFValueType.STRING) for value in ("", "llama", "yarn", "{{", "none")),
    *((value, GGUFValueType.BOOL) for value in (True, False)),
    *((value, GGUFValueType.ARRAY) for value in ([1, 2], [0], [-1], ["a"], [0.5], [True], [math.nan], ["a"] * 300)),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@cache
def saved(case: str, folder: Path) -> transformers.PreTrainedModel:
    """A small model, made once for all files of it."""
    own = {"num_hidden_layers": 1, **OWN.get(case, {})}
    return save_model(case, folder / f"plain-{case}", vocab_size=len(TOKENS), **own)


def write(folder: Path, case: str = "mixtral", change: Callable[[gguf.GGUFWriter], None] = lambda writer: None) -> Path:
    """A model of one layer, or of one of each kind, with a tokenizer."""

    def more(writer: gguf.GGUFWriter) -> None:
        for name, value in VOCABULARY.items():
            getattr(writer, f"add_{name}")(value)
        change(writer)

    return write_gguf(saved(case, folder), folder / "m.gguf", lambda name: "Q8_0", more)


def opened(path: Path) -> None:
    config = read_config(path)
    spec_from_config(config)
    tokenizer = Tokenizer.from_folder(path)
    if tokenizer is not None:
        ChatTemplate.from_folder(path, tokenizer)
        tokenizer.encode("a text")
    open_index(LocalFiles(path), config)


def changed(dice: random.Random, good: bytes, header: int) -> bytes:
    """A few bytes of the header are others, or a number of it is, or some are missing or twice there."""
    damaged = bytearray(good)
    at = dice.randrange(header)
    match dice.randrange(4):
        case 0:
            for _ in range(dice.randint(1, 4)):
                damaged[dice.randrange(header)] = dice.randrange(256)
        case 1:
            damaged[at : at + 4] = struct.pack("<I", dice.choice([0, 1, 8, 9, 12, 2**31, 2**32 - 1]))
        case 2:
            del damaged[at : at + dice.randint(1, 9)]
        case _:
            damaged[at:at] = damaged[at : at + dice.randint(1, 9)]
    return bytes(damaged)


def test_a_file_with_changed_bytes_is_one_error(folder: Path) -> None:
    dice = random.Random(5)
    path = write(folder)
    good = path.read_bytes()
    opened(path)
    header = good.index(b"blk.0.ffn_down_exps.weight") + 200
    refused = 0
    for number in range(CHANGES):
        path.write_bytes(changed(dice, good, header if number % 2 else 2000))
        tracemalloc.start()
        try:
            opened(path)
        except TllmError:
            refused += 1
        finally:
            taken = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert taken < 10 * len(good) + 4 * STEP, f"{taken} bytes were taken, number {number}"
    assert refused > CHANGES // 3


@pytest.mark.parametrize("case", OWN)
def test_a_file_that_says_something_else_is_one_error(case: str, folder: Path) -> None:
    """One of its keys has another value, of this type or another."""
    dice = random.Random(case)
    path = write(folder, case)
    opened(path)
    for _ in range(40):

        def change(writer: gguf.GGUFWriter) -> None:
            values = writer.kv_data[0]
            own = [f"{writer.arch}.{key}" for key in KEYS]
            values[dice.choice(sorted({*values, *own, *OTHERS}))] = GGUFValue(*dice.choice(VALUES))

        with contextlib.suppress(TllmError):
            opened(write(folder, case, change))
