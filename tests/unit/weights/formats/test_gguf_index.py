"""Weights of a GGUF file are read by any box, decoded and put where the model wants them."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType

from tests.support.models.gguf_models import random_blocks
from tllm.core.errors import ModelError, TllmError, WeightsError
from tllm.quantization.blocks import Blocks, dequantize
from tllm.weights.boxes import Box, whole, within
from tllm.weights.byte_source import LocalFiles
from tllm.weights.formats.gguf_index import gguf_index, unpaired
from tllm.weights.load import part, read_stored
from tllm.weights.safetensors_index import Index

HEADS, HEAD = 3, 8
IN = 512


class GgufMaker:
    """A file with what a test adds to it; the keys that an index needs are there."""

    def __init__(self, path: Path, architecture: str = "llama") -> None:
        self.path = path
        self.writer = gguf.GGUFWriter(path, architecture)
        self.writer.add_block_count(2)
        self.writer.add_head_count(HEADS)
        self.raw: dict[str, np.ndarray] = {}

    def add(self, name: str, kind: str, *shape: int) -> None:
        dice = np.random.default_rng(len(self.raw))
        if kind in ("F32", "F16"):
            self.raw[name] = dice.standard_normal(shape).astype({"F32": np.float32, "F16": np.float16}[kind])
        else:
            self.raw[name] = random_blocks(kind, int(np.prod(shape[:-1])), shape[-1], dice).reshape(*shape[:-1], -1)
        self.writer.add_tensor(name, self.raw[name], raw_dtype=GGMLQuantizationType[kind])

    def numbers(self, name: str, kind: str) -> torch.Tensor:
        return torch.from_numpy(gguf.quants.dequantize(self.raw[name], GGMLQuantizationType[kind]))

    def opened(self) -> tuple[Index, LocalFiles]:
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()
        source = LocalFiles(self.path)
        return gguf_index(source), source


@pytest.fixture
def maker(tmp_path: Path) -> GgufMaker:
    return GgufMaker(tmp_path / "model.gguf")


def read(index: Index, source: LocalFiles, name: str, box: Box = ()) -> torch.Tensor:
    stored = index.stored[name]
    box = box or whole(stored.shape)
    found, _ = read_stored(name, stored, box, index, source)
    numbers = dequantize(found) if isinstance(found, Blocks) else found
    return part(numbers, within(box, stored.aligned(box)))


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q8_0", "MXFP4", "F16"])
def test_any_box_of_a_matrix(maker: GgufMaker, kind: str) -> None:
    maker.add("blk.1.ffn_down.weight", kind, 20, IN)
    index, source = maker.opened()
    name, want = "model.layers.1.mlp.down_proj.weight", maker.numbers("blk.1.ffn_down.weight", kind)
    assert index.shape(name) == (20, IN)
    for box in [(), ((3, 9), (0, IN)), ((0, 20), (256, 512)), ((7, 8), (31, 33)), ((19, 20), (255, 511))]:
        (a, b), (c, d) = box or whole((20, IN))
        assert torch.equal(read(index, source, name, box).float(), want[a:b, c:d])


def test_only_the_blocks_of_a_box_are_read(maker: GgufMaker) -> None:
    maker.add("blk.0.ffn_up.weight", "Q4_K", 20, IN)
    index, source = maker.opened()
    name = "model.layers.0.mlp.up_proj.weight"
    _, nbytes = read_stored(name, index.stored[name], ((2, 4), (300, 301)), index, source)
    assert nbytes == 2 * 144


@pytest.mark.parametrize("kind", ["Q5_K", "Q4_0", "F32"])
def test_rows_of_heads_are_put_back(maker: GgufMaker, kind: str) -> None:
    maker.writer.add_head_count_kv(1)
    maker.add("blk.0.attn_q.weight", kind, HEADS * HEAD, IN)
    maker.add("blk.0.attn_k.weight", kind, HEAD, IN)
    maker.add("blk.0.attn_q.bias", "F32", HEADS * HEAD)
    maker.add("blk.0.attn_v.weight", kind, HEAD, IN)
    index, source = maker.opened()

    def back(x: torch.Tensor) -> torch.Tensor:
        """Row h * HEAD/2 + i of a head is row 2 i + h of the file's."""
        rows = [
            x[head + 2 * i + half] for head in range(0, len(x), HEAD) for half in range(2) for i in range(HEAD // 2)
        ]
        return torch.stack(rows)

    attention = "model.layers.0.self_attn"
    for part_name, gguf_name in [
        ("q_proj.weight", "blk.0.attn_q.weight"),
        ("k_proj.weight", "blk.0.attn_k.weight"),
        ("q_proj.bias", "blk.0.attn_q.bias"),
    ]:
        want = back(maker.numbers(gguf_name, "F32" if "bias" in gguf_name else kind))
        assert torch.equal(read(index, source, f"{attention}.{part_name}"), want), part_name
    whole_q = read(index, source, f"{attention}.q_proj.weight")
    assert torch.equal(read(index, source, f"{attention}.q_proj.weight", ((5, 13), (40, 300))), whole_q[5:13, 40:300])
    plain = maker.numbers("blk.0.attn_v.weight", kind)
    assert torch.equal(read(index, source, f"{attention}.v_proj.weight"), plain)


def test_pairs_become_halves() -> None:
    assert unpaired(torch.arange(8), 4).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_experts_of_a_stack_and_those_of_their_own(maker: GgufMaker) -> None:
    maker.add("blk.0.ffn_gate_exps.weight", "Q4_0", 3, 8, 64)
    maker.add("blk.1.ffn_down.2.weight", "Q8_0", 64, 32)
    index, source = maker.opened()
    stack = maker.numbers("blk.0.ffn_gate_exps.weight", "Q4_0")
    for expert in range(3):
        name = f"model.layers.0.block_sparse_moe.experts.{expert}.w1.weight"
        assert torch.equal(read(index, source, name, ((2, 7), (10, 40))), stack[expert, 2:7, 10:40])
    one = read(index, source, "model.layers.1.block_sparse_moe.experts.2.w2.weight")
    assert torch.equal(one, maker.numbers("blk.1.ffn_down.2.weight", "Q8_0"))


def test_norms_of_gemma_lose_the_one(tmp_path: Path) -> None:
    maker = GgufMaker(tmp_path / "model.gguf", "gemma3")
    maker.add("blk.0.attn_q_norm.weight", "F32", HEAD)
    maker.add("output_norm.weight", "F32", 16)
    index, source = maker.opened()
    norm = maker.numbers("blk.0.attn_q_norm.weight", "F32")
    assert torch.equal(read(index, source, "model.layers.0.self_attn.q_norm.weight", ((2, 5),)), norm[2:5] - 1)
    assert torch.equal(read(index, source, "model.norm.weight"), maker.numbers("output_norm.weight", "F32") - 1)


def test_a_shared_experts_gate_is_a_row(tmp_path: Path) -> None:
    maker = GgufMaker(tmp_path / "model.gguf", "qwen2moe")
    maker.add("blk.0.ffn_gate_inp_shexp.weight", "F32", 16)
    index, source = maker.opened()
    name = "model.layers.0.mlp.shared_expert_gate.weight"
    assert index.shape(name) == (1, 16)
    assert torch.equal(read(index, source, name)[0], maker.numbers("blk.0.ffn_gate_inp_shexp.weight", "F32"))


def test_what_a_gated_delta_net_has(tmp_path: Path) -> None:
    """-exp(A_log), a convolution without its middle dim, and a norm that is no 1 + weight; layers after the last."""
    maker = GgufMaker(tmp_path / "model.gguf", "qwen35")
    maker.writer.add_uint32("qwen35.nextn_predict_layers", 1)
    maker.raw["blk.0.ssm_a"] = -np.exp(np.array([0.5, -2.0, 3.0], dtype=np.float32))
    maker.writer.add_tensor("blk.0.ssm_a", maker.raw["blk.0.ssm_a"])
    maker.add("blk.0.ssm_dt.bias", "F32", 3)
    maker.add("blk.0.ssm_conv1d.weight", "F32", 10, 4)
    maker.add("blk.0.ssm_norm.weight", "F32", HEAD)
    maker.add("blk.0.attn_norm.weight", "F32", 16)
    maker.add("blk.1.nextn.eh_proj.weight", "F32", 4, 4)
    index, source = maker.opened()
    name = "model.layers.0.linear_attn"
    assert not any(key.startswith("model.layers.1.") for key in index.stored)
    found = read(index, source, f"{name}.A_log", ((1, 3),))
    torch.testing.assert_close(found, torch.tensor([-2.0, 3.0], dtype=torch.float64), rtol=0, atol=1e-6)
    assert torch.equal(read(index, source, f"{name}.dt_bias"), maker.numbers("blk.0.ssm_dt.bias", "F32"))
    kernel = maker.numbers("blk.0.ssm_conv1d.weight", "F32")
    assert index.shape(f"{name}.conv1d.weight") == (10, 1, 4)
    assert torch.equal(read(index, source, f"{name}.conv1d.weight", ((2, 7), (0, 1), (0, 4)))[:, 0], kernel[2:7])
    assert torch.equal(read(index, source, f"{name}.norm.weight"), maker.numbers("blk.0.ssm_norm.weight", "F32"))
    plus_one = maker.numbers("blk.0.attn_norm.weight", "F32")
    assert torch.equal(read(index, source, "model.layers.0.input_layernorm.weight"), plus_one - 1)


@pytest.mark.parametrize("kind", ["Q4_0", "F16"])
def test_gates_and_ups_of_one_stack_are_apart(tmp_path: Path, kind: str) -> None:
    maker = GgufMaker(tmp_path / "model.gguf", "gemma4")
    maker.add("blk.1.ffn_gate_up_exps.weight", kind, 3, 12, 64)
    index, source = maker.opened()
    stack = maker.numbers("blk.1.ffn_gate_up_exps.weight", kind)
    for expert in range(3):
        for start, part_name in ((0, "gate"), (6, "up")):
            name = f"model.layers.1.experts.{expert}.{part_name}_proj.weight"
            assert index.shape(name) == (6, 64)
            found = read(index, source, name, ((1, 5), (20, 50))).float()
            assert torch.equal(found, stack[expert, start + 1 : start + 5, 20:50])


def experts_of_gpt_oss(maker: GgufMaker, up: str, columns: int, without: tuple[str, ...] = (), more: int = 0) -> None:
    """Two experts of 40 widths; `more` rows are those that the up has too many."""
    for half, kind, rows in (("gate", "MXFP4", 40), ("up", up, 40 + more), ("down", "MXFP4", 40)):
        if half not in without:
            maker.add(f"blk.0.ffn_{half}_exps.weight", kind, 2, rows, columns)
        if f"{half} bias" not in without:
            maker.add(f"blk.0.ffn_{half}_exps.bias", "F32", 2, rows)


@pytest.mark.parametrize("up", ["MXFP4", "Q5_0", "Q4_K", "F16"])
def test_gates_and_ups_are_rows_by_turns(tmp_path: Path, up: str) -> None:
    columns = 256 if up == "Q4_K" else 64
    maker = GgufMaker(tmp_path / "model.gguf", "gpt-oss")
    experts_of_gpt_oss(maker, up, columns)
    index, source = maker.opened()
    gate, down = (maker.numbers(f"blk.0.ffn_{half}_exps.weight", "MXFP4") for half in ("gate", "down"))
    both = torch.stack((gate, maker.numbers("blk.0.ffn_up_exps.weight", up)), 2).flatten(1, 2)
    name = "model.layers.0.mlp.experts"
    assert index.shape(f"{name}.gate_up_proj") == (2, columns, 80)
    assert torch.equal(read(index, source, f"{name}.gate_up_proj"), both.mT)
    box = ((1, 2), (20, 50), (7, 30))
    assert torch.equal(read(index, source, f"{name}.gate_up_proj", box), both.mT[1:, 20:50, 7:30])
    assert torch.equal(read(index, source, f"{name}.down_proj"), down.mT)
    assert (f"{name}.1.gate_up_proj.weight" in index) == (f"{name}.1.down_proj.weight" in index) == (up == "MXFP4")
    if up == "MXFP4":
        assert index.stored[f"{name}.1.gate_up_proj.weight"].scheme is not None
        assert torch.equal(read(index, source, f"{name}.1.gate_up_proj.weight", ((9, 12), (0, 64))), both[1, 9:12])
    biases = torch.stack([maker.numbers(f"blk.0.ffn_{half}_exps.bias", "F32") for half in ("gate", "up")], 2)
    assert torch.equal(read(index, source, f"{name}.gate_up_proj_bias", ((0, 2), (3, 10))), biases.flatten(1)[:, 3:10])


@pytest.mark.parametrize(
    ("without", "more", "why"),
    [
        (("up",), 0, r"no tensor that is model\.layers\.0\.mlp\.experts\.0\.up_proj\.weight"),
        (("down",), 0, r"no tensor that is .*down_proj\.weight"),
        (("gate bias",), 0, r"no tensor that is .*gate_proj_bias"),
        ((), 8, r"the gate has shape \(40, 64\) and the up \(48, 64\)"),
    ],
)
def test_halves_of_experts_that_do_not_belong_together(
    tmp_path: Path, without: tuple[str, ...], more: int, why: str
) -> None:
    maker = GgufMaker(tmp_path / "model.gguf", "gpt-oss")
    experts_of_gpt_oss(maker, "MXFP4", 64, without, more)
    with pytest.raises(WeightsError, match=why):
        maker.opened()


@pytest.mark.parametrize("kind", ["Q8_0", "F16"])
def test_keys_and_values_of_latents_are_rows_of_one_matrix(tmp_path: Path, kind: str) -> None:
    """Keys of a head, its values, and several heads; of a head's keys alone no values are read."""
    maker = GgufMaker(tmp_path / "model.gguf", "deepseek2")
    maker.add("blk.1.attn_k_b.weight", kind, HEADS, 64, 32)
    maker.add("blk.1.attn_v_b.weight", kind, HEADS, 20, 64)
    index, source = maker.opened()
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    keys, values = (maker.numbers(f"blk.1.attn_{part_name}_b.weight", kind) for part_name in "kv")
    want = torch.cat((keys.mT, values), 1).flatten(0, 1)
    assert index.shape(name) == (HEADS * 52, 64)
    boxes = {(0, 32): "k", (60, 70): "k", (84, 104): "v", (90, 91): "v", (30, 40): "kv", (0, 156): "kv"}
    for rows, planes in boxes.items():
        assert torch.equal(read(index, source, name, (rows, (5, 60))), want[slice(*rows), 5:60]), rows
        assert set(index.planes(name, (rows, (0, 64)))) == {f"blk.1.attn_{part_name}_b.weight" for part_name in planes}


@pytest.mark.parametrize(
    ("tensors", "why"),
    [
        ({"k_b": (3, 64, 32)}, r"no tensor that is .*self_attn\.v_b_proj"),
        ({"v_b": (3, 20, 64)}, r"no tensor that is .*self_attn\.k_b_proj"),
        ({"k_b": (3, 64, 32), "v_b": (3, 20, 48)}, r"k_b_proj has shape \(3, 64, 32\) and v_b_proj \(3, 20, 48\)"),
        ({"k_b": (3, 64, 32), "v_b": (2, 20, 64)}, r"k_b_proj has shape"),
        ({"k_b": (3, 64, 32), "v_b": (3, 20, 64), "kv_b": (156, 64)}, "whole, and in two parts beside it"),
        ({"k_b": (64, 32), "v_b": (3, 20, 64)}, r"attn_k_b.weight' has shape \(64, 32\)"),
    ],
)
def test_keys_and_values_that_do_not_belong_together(
    tmp_path: Path, tensors: dict[str, tuple[int, ...]], why: str
) -> None:
    maker = GgufMaker(tmp_path / "model.gguf", "deepseek2")
    for name, shape in tensors.items():
        maker.add(f"blk.0.attn_{name}.weight", "F32", *shape)
    with pytest.raises(WeightsError, match=why):
        maker.opened()


@pytest.mark.parametrize(
    ("architecture", "name", "kind", "shape", "why"),
    [
        ("gemma4", "blk.0.ffn_gate_up_exps.weight", "F32", (2, 5, 32), r"has shape \(2, 5, 32\)"),
        ("gemma4", "blk.0.attn_norm.weight", "Q8_0", (32,), "is of type Q8_0, and plain in any model"),
        ("gemma4", "blk.0.ffn_up.scale", "F32", (4,), "has no tensor"),
        ("qwen35", "blk.0.ssm_a", "F32", (3, 3), r"has shape \(3, 3\)"),
        ("qwen35", "blk.0.ssm_in.weight", "F32", (3, 3), "has no tensor"),
        ("qwen35", "ssm_a", "F32", (3,), "has no tensor"),
        ("gpt-oss", "blk.0.attn_sinks.weight", "F32", (3, 3), r"has shape \(3, 3\)"),
        ("gpt-oss", "blk.0.ffn_up_exps.bias", "F32", (3,), r"has shape \(3,\)"),
        ("gpt-oss", "blk.0.ffn_up_exps.bias", "Q8_0", (3, 32), "is of type Q8_0, and plain in any model"),
        ("gpt-oss", "blk.0.ffn_up.1.weight", "F32", (3, 3), "has no tensor"),
        ("gpt-oss", "blk.0.ffn_gate_up_exps.weight", "F32", (2, 4, 32), "has no tensor 'blk.0.ffn_gate_up"),
    ],
)
def test_what_such_a_model_cannot_have_is_refused(
    tmp_path: Path, architecture: str, name: str, kind: str, shape: tuple[int, ...], why: str
) -> None:
    maker = GgufMaker(tmp_path / "model.gguf", architecture)
    maker.add(name, kind, *shape)
    with pytest.raises(TllmError, match=why):
        maker.opened()


@pytest.mark.parametrize(
    ("name", "kind", "shape", "why"),
    [
        ("blk.0.attn_sinks.weight", "F32", (4,), "has no tensor 'blk.0.attn_sinks.weight'"),
        ("blk.2.attn_v.weight", "F32", (4, 32), "of 2 layers has no tensor 'blk.2"),
        ("blk.0.ffn_norm.bias", "F32", (4,), "has no tensor"),
        ("v.blk.0.attn_q.weight", "F32", (4, 4), "has no tensor"),
        ("blk.0.attn_norm.weight", "F32", (4, 4), r"has shape \(4, 4\)"),
        ("blk.0.ffn_up.weight", "F32", (4,), r"has shape \(4,\)"),
        ("blk.0.attn_q.weight", "F32", (HEADS * 5, 32), "15 rows and there are 3 heads"),
    ],
)
def test_what_the_model_cannot_have_is_refused(
    maker: GgufMaker, name: str, kind: str, shape: tuple[int, ...], why: str
) -> None:
    maker.add(name, kind, *shape)
    with pytest.raises(TllmError, match=why):
        maker.opened()


def test_a_weight_twice_is_refused(maker: GgufMaker) -> None:
    maker.add("blk.0.ffn_gate_exps.weight", "Q4_0", 3, 8, 64)
    maker.add("blk.0.ffn_gate.1.weight", "Q4_0", 8, 64)
    with pytest.raises(WeightsError, match=r"are both model\.layers\.0\.block_sparse_moe\.experts\.1\.w1\.weight"):
        maker.opened()


def test_types_that_are_not_read_are_named(maker: GgufMaker) -> None:
    maker.writer.add_tensor("output.weight", np.zeros((2, 66), np.uint8), raw_dtype=GGMLQuantizationType.IQ2_XXS)
    with pytest.raises(ModelError, match="type IQ2_XXS, which is not read") as caught:
        maker.opened()
    assert "Q4_K" in caught.value.hint


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="architecture 'mamba' is not known"):
        GgufMaker(tmp_path / "model.gguf", "mamba").opened()


def test_heads_may_be_a_list_of_equals(tmp_path: Path) -> None:
    maker = GgufMaker(tmp_path / "model.gguf")
    maker.writer.add_head_count_kv([2, 2])
    maker.add("blk.0.attn_k.weight", "F32", 2 * HEAD, 4)
    index, _ = maker.opened()
    assert index.stored["model.layers.0.self_attn.k_proj.weight"].aligned(((3, 4), (0, 4)))[0] == (0, HEAD)
