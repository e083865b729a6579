"""Quantises weights plainly (round to nearest) into the formats of Hugging Face folders, and reads them back slowly.

What reads them back is not ours: `compressed_tensors`, `transformers`, or a loop over single codes written from the
format's description.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight
from transformers.integrations.metal_quantization import _affine_dequantize_tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

Planes = dict[str, Tensor]
FP8 = torch.float8_e4m3fn
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True)
class Format:
    """One format: what `config.json` says of it, how a matrix [outputs, inputs] is written, and how it is read."""

    config: dict[str, Any]
    write: Callable[[Tensor], Planes]
    read: Callable[[Planes], Tensor]
    key: str = "quantization_config"


def save_quantized(plain: Path, folder: Path, form: Format, head: bool = False) -> Path:
    """Quantise the linears of the layers of a plain folder, and the table of the logits if the `head` is asked for.

    Returns a third folder, of what the format's own reader makes of them, beside it.
    """
    written, read = dict[str, Tensor](), dict[str, Tensor]()
    for name, x in load_file(plain / "model.safetensors").items():
        if is_linear(name, x) or (head and name == "lm_head.weight"):
            planes = form.write(x)
            written |= {f"{name.removesuffix('weight')}{part}": plane.contiguous() for part, plane in planes.items()}
            read[name] = form.read(planes).contiguous()
        else:
            written[name] = read[name] = x
    return _save(plain, folder, written, read, {form.key: form.config})


def save_mxfp4(plain: Path, folder: Path) -> Path:
    """The same with random MXFP4 blocks in the place of a plain folder's stacks of experts, as gpt-oss is published."""
    draw = torch.Generator().manual_seed(0)
    written, read = dict[str, Tensor](), dict[str, Tensor]()
    for name, x in load_file(plain / "model.safetensors").items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            groups = x.shape[0], x.shape[2], x.shape[1] // 32
            blocks = torch.randint(0, 256, (*groups, 16), generator=draw, dtype=torch.uint8)
            scales = torch.randint(120, 123, groups, generator=draw, dtype=torch.uint8)
            written |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            read[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        else:
            written[name] = read[name] = x
    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    return _save(plain, folder, written, read, {"quantization_config": config})


def _save(plain: Path, folder: Path, written: Planes, read: Planes, settings: dict[str, Any]) -> Path:
    slow = folder.with_name(f"{folder.name}-read")
    for to, tensors in ((folder, written), (slow, read)):
        to.mkdir(exist_ok=True)
        save_file(tensors, to / "model.safetensors", {"format": "pt"})
        shutil.copy(plain / "config.json", to)
    config = json.loads((plain / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **settings}))
    return slow


def is_linear(name: str, x: Tensor) -> bool:
    """Whether it is a linear of a layer, and no router."""
    return "layers." in name and x.ndim == 2 and not name.endswith(("mlp.gate.weight", "shared_expert_gate.weight"))


def grouped(x: Tensor, bits: int, group: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Codes int64 [outputs, inputs], zeros int64 and scales float16 [outputs, groups], 0 <= code < 2^bits."""
    rows, columns = x.shape
    most, count = (1 << bits) - 1, -(-columns // group)
    padded = torch.nn.functional.pad(x, (0, count * group - columns)).view(rows, count, group)
    low, high = padded.amin(-1).clamp(max=0), padded.amax(-1).clamp(min=0)
    if symmetric:
        high = torch.maximum(high, -low)
        low = -high
    scales = ((high - low) / most).clamp(min=1e-4).half()
    zeros = torch.full_like(scales, (most + 1) // 2) if symmetric else (-low / scales.float()).round().clamp(0, most)
    codes = (padded / scales.float()[..., None] + zeros.float()[..., None]).round().clamp(0, most)
    return codes.flatten(1)[:, :columns].long(), zeros.long(), scales


def words(codes: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Codes [rows, n] as int32 [rows, n * bits / 32]: code j of a word in place `order[j]`, or in place j."""
    pack = 32 // bits
    count = -(-codes.shape[1] // pack)
    padded = torch.nn.functional.pad(codes, (0, count * pack - codes.shape[1])).view(len(codes), count, pack)
    out = np.zeros((len(codes), count), dtype=np.uint32)
    for j in range(pack):
        out |= padded[..., j].numpy().astype(np.uint32) << np.uint32(bits * (order or range(pack))[j])
    return torch.from_numpy(out.view(np.int32))


def at(plane: Tensor, row: int, column: int, bits: int) -> int:
    """One code of words that are packed along their columns."""
    pack = 32 // bits
    return int(plane[row, column // pack]) >> bits * (column % pack) & ((1 << bits) - 1)


def awq(group: int) -> Format:
    def write(x: Tensor) -> Planes:
        codes, zeros, scales = grouped(x, 4, group, False)
        return {
            "qweight": words(codes.t(), 4, AWQ_ORDER),
            "qzeros": words(zeros.t(), 4, AWQ_ORDER),
            "scales": scales.t(),
        }

    def read(planes: Planes) -> Tensor:
        converter = AutoAWQConverter(group_size=group)
        q, s, z = converter._convert_gemm_module(planes["qweight"], planes["scales"], planes["qzeros"])
        columns = torch.arange(q.shape[1]) // group
        return (q.float() - z.float()[:, columns]) * s.float()[:, columns]

    return Format(
        {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}, write, read
    )


def gptq(bits: int, group: int, symmetric: bool = True, version: int = 1, desc_act: bool = False) -> Format:
    """The order of `desc_act` is drawn: of what importance it speaks does not matter here."""

    def write(x: Tensor) -> Planes:
        columns, size = x.shape[1], group if group > 0 else x.shape[1]
        order = torch.randperm(columns, generator=torch.Generator().manual_seed(columns)) if desc_act else None
        g_idx = torch.arange(columns) // size
        codes, zeros, scales = grouped(x if order is None else x[:, order], bits, size, symmetric)
        if order is not None:
            back = order.argsort()
            codes, g_idx = codes[:, back], g_idx[back]
        kept = (zeros - (1 if version == 1 else 0)) % (1 << bits)
        planes = {"qweight": words(codes, bits).t(), "qzeros": words(kept.t(), bits), "scales": scales.t()}
        return {**planes, "g_idx": g_idx.int()} if desc_act or version == 2 else planes

    def read(planes: Planes) -> Tensor:
        inputs, outputs = planes["qweight"].shape[0] * 32 // bits, planes["scales"].shape[1]
        size = group if group > 0 else inputs
        groups = planes.get("g_idx", torch.arange(inputs) // size).tolist()
        w, t = np.zeros((outputs, inputs), dtype=np.float32), planes["qweight"].t()
        for n in range(outputs):
            for k in range(inputs):
                zero = at(planes["qzeros"], groups[k], n, bits) + (1 if version == 1 else 0)
                w[n, k] = np.float32(at(t, n, k, bits) - zero % (1 << bits)) * planes["scales"][
                    groups[k], n
                ].numpy().astype(np.float32)
        return torch.from_numpy(w)

    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric, "desc_act": desc_act}
    return Format({**config, **({"checkpoint_format": "gptq_v2"} if version == 2 else {})}, write, read)


def compressed(stored_as: str, write: Callable[[Tensor, QuantizationArgs], Planes], **weights: Any) -> Format:
    """Of compressed-tensors, whose own code reads it."""
    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)

    def read(planes: Planes) -> Tensor:
        in_32 = {part: x.float() if part == "weight_scale" else x for part, x in planes.items()}
        return BaseCompressor.get_value_from_registry(stored_as).decompress(in_32, scheme)["weight"].float()

    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    config = {"quant_method": "compressed-tensors", "format": stored_as, "config_groups": groups, "ignore": ["lm_head"]}
    return Format(config, lambda x: write(x, args), read)


def _packed(x: Tensor, args: QuantizationArgs) -> Planes:
    group = args.group_size if args.strategy == "group" else x.shape[1]
    codes, zeros, scales = grouped(x, args.num_bits, group, args.symmetric)
    middle = 1 << (args.num_bits - 1)
    planes = {
        "weight_packed": pack_to_int32((codes - middle).to(torch.int8), args.num_bits),
        "weight_scale": scales.bfloat16(),
        "weight_shape": torch.tensor(x.shape),
    }
    if not args.symmetric:
        planes["weight_zero_point"] = pack_to_int32((zeros - middle).to(torch.int8), args.num_bits, packed_dim=0)
    return planes


def _int8(x: Tensor, args: QuantizationArgs) -> Planes:
    group = args.group_size if args.strategy == "group" else x.shape[1]
    codes, zeros, scales = grouped(x, 8, group, args.symmetric)
    planes = {"weight": (codes - 128).to(torch.int8), "weight_scale": scales.float()}
    return planes if args.symmetric else {**planes, "weight_zero_point": (zeros - 128).to(torch.int8)}


def _float8(x: Tensor, args: QuantizationArgs) -> Planes:
    rows, columns = x.shape
    height, width = {"tensor": (rows, columns), "channel": (1, columns), "block": args.block_structure}[args.strategy]
    q, scales = in_blocks(x, height, width)
    return {"weight": q, "weight_scale": scales.reshape(1) if args.strategy == "tensor" else scales.bfloat16()}


def in_blocks(x: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Float8 codes and the float32 scale of each block of rows and columns, the last of which may be short."""
    rows, columns = x.shape
    scales = torch.stack(
        [torch.stack([b.abs().max() / 448 for b in strip.split(width, 1)]) for strip in x.split(height)]
    )
    # As files of two bytes a scale have them, so that both dtypes stand for the same weights.
    scales = scales.bfloat16().float()
    each = scales.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :columns]
    return (x / each).clamp(-448, 448).to(FP8), scales


def fp8_whole(rows: int, scale: str, shape: tuple[int, ...]) -> Format:
    """Without blocks: a scale for so many rows, 0 being all, under this name and in this shape."""

    def write(x: Tensor) -> Planes:
        q, scales = in_blocks(x, rows or len(x), x.shape[1])
        return {"weight": q, scale: scales.reshape(shape)}

    def read(planes: Planes) -> Tensor:
        return planes["weight"].float() * planes[scale].reshape(-1, 1)

    config = {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"}
    return Format(config, write, read)


def fp8(height: int, width: int, powers: bool = False) -> Format:
    def write(x: Tensor) -> Planes:
        q, scales = in_blocks(x, height, width)
        if powers:
            exponents = scales.log2().ceil()
            each = exponents.exp2().repeat_interleave(height, 0)[: len(x)].repeat_interleave(width, 1)[:, : x.shape[1]]
            return {"weight": (x / each).to(FP8), "weight_scale_inv": (exponents + 127).to(torch.uint8)}
        return {"weight": q, "weight_scale_inv": scales}

    def read(planes: Planes) -> Tensor:
        scales = planes["weight_scale_inv"]
        scales = (scales.float() - 127).exp2() if powers else scales
        return _dequantize_fp8_weight(planes["weight"], scales, [height, width], torch.float32)

    config = {
        "quant_method": "fp8",
        "weight_block_size": [height, width],
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
    }
    return Format({**config, "modules_to_not_convert": ["lm_head"]}, write, read)


def mlx(bits: int, group: int) -> Format:
    def write(x: Tensor) -> Planes:
        low, high = (f(x.unflatten(1, (-1, group)), -1) for f in (torch.amin, torch.amax))
        scales = ((high - low) / ((1 << bits) - 1)).bfloat16()
        biases = low.bfloat16()
        each = [s.float().repeat_interleave(group, 1) for s in (scales, biases)]
        codes = ((x - each[1]) / each[0]).round().clamp(0, (1 << bits) - 1).long()
        return {"weight": words(codes, bits).view(torch.uint32), "scales": scales, "biases": biases}

    def read(planes: Planes) -> Tensor:
        return _affine_dequantize_tensor(
            planes["weight"].view(torch.int32), planes["scales"], planes["biases"], group, bits
        )

    return Format({"bits": bits, "group_size": group, "mode": "affine"}, write, read, key="quantization")


FORMATS: dict[str, Format] = {
    "awq": awq(32),
    "gptq": gptq(4, 32),
    "gptq_asymmetric": gptq(4, 16, symmetric=False),
    "gptq_v2": gptq(4, 16, symmetric=False, version=2),
    "gptq_8": gptq(8, -1),
    "gptq_8_v2": gptq(8, 16, symmetric=False, version=2),
    "gptq_desc_act": gptq(4, 16, symmetric=False, desc_act=True),
    "int4": compressed("pack-quantized", _packed, num_bits=4, strategy="group", group_size=16),
    "int4_asymmetric": compressed(
        "pack-quantized", _packed, num_bits=4, strategy="group", group_size=16, symmetric=False
    ),
    "int4_odd_groups": compressed("pack-quantized", _packed, num_bits=4, strategy="group", group_size=24),
    "int4_channel": compressed("pack-quantized", _packed, num_bits=4, strategy="channel", symmetric=False),
    "int8_packed": compressed("pack-quantized", _packed, num_bits=8, strategy="group", group_size=16, symmetric=False),
    "int8": compressed("int-quantized", _int8, num_bits=8, strategy="channel"),
    "int8_asymmetric": compressed("int-quantized", _int8, num_bits=8, strategy="channel", symmetric=False),
    "float8_tensor": compressed("float-quantized", _float8, num_bits=8, type="float", strategy="tensor"),
    "float8_channel": compressed("float-quantized", _float8, num_bits=8, type="float", strategy="channel"),
    "float8_block": compressed(
        "float-quantized", _float8, num_bits=8, type="float", strategy="block", block_structure=[16, 24]
    ),
    "fp8": fp8(32, 32),
    "fp8_powers": fp8(16, 16, powers=True),
    "fp8_tensor": fp8_whole(0, "weight_scale_inv", ()),
    "fp8_row": fp8_whole(1, "weight_scale", (-1, 1)),
    "mlx": mlx(4, 16),
    "mlx_8": mlx(8, 16),
}
"""Every format whose linears are matrices of their own."""
