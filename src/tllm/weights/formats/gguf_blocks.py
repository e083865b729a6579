"""Blocks of GGUF files as `Blocks`: which bytes of a block are codes and scales, and how they are packed.

d and m are float16 numbers of 2 bytes. What the letters of ggml's structures mean: `qs` low bits of codes, `qh` their
high bits, `sc` scales in few bits. Every function takes [..., blocks, bytes of a block] and gives all planes for whole
rows. Source: ggml-quants.c and ggml-common.h of ggml; the numbers equal those of `gguf.quants.dequantize` to the bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tllm.core.gguf_header import BLOCK_TYPES
from tllm.kernels.library import library
from tllm.kernels.packing import split_nibbles
from tllm.quantization.blocks import MXFP4, Blocks, Scheme

IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""What the codes of IQ4_NL and IQ4_XS stand for."""

BLOCK_BYTES = {kind.name: kind.nbytes for kind in BLOCK_TYPES.values()}


def _above(values: tuple[int, ...], offset: int) -> tuple[int, ...]:
    """A table of values that are 0 or more; the scheme's offset takes it back."""
    return tuple(value + offset for value in values)


SCHEMES: dict[str, Scheme] = {
    "Q4_0": Scheme(4, 32, offset=8),
    "Q4_1": Scheme(4, 32),
    "Q5_0": Scheme(8, 32, offset=16),
    "Q5_1": Scheme(8, 32),
    "Q8_0": Scheme(8, 32, offset=128),
    "Q2_K": Scheme(4, 16, super_group=256),
    "Q3_K": Scheme(4, 16, offset=4, super_group=256),
    "Q4_K": Scheme(4, 32, super_group=256),
    "Q5_K": Scheme(8, 32, super_group=256),
    "Q6_K": Scheme(8, 16, offset=32, super_group=256),
    "IQ4_NL": Scheme(4, 32, offset=128, table=_above(IQ4, 128)),
    "IQ4_XS": Scheme(4, 32, offset=128, table=_above(IQ4, 128), super_group=256),
    "MXFP4": MXFP4,
}
"""How each type that is read codes its weights."""


def blocks_of(kind: str, data: Tensor) -> Blocks:
    """Whole rows, or parts of rows that begin and end at blocks, [..., rows, bytes] -> `Blocks`."""
    assert data.dtype == torch.uint8
    return UNPACK[kind](SCHEMES[kind], _split(data, -1, BLOCK_BYTES[kind]))


def _split(x: Tensor, *widths: int) -> Tensor:
    """The last dim as several."""
    return x.reshape(*x.shape[:-1], *widths)


def _half(raw: Tensor, at: int) -> Tensor:
    """The float16 number at a byte of each block, [..., blocks]."""
    return raw[..., at : at + 2].contiguous().view(torch.float16).squeeze(-1)


def _nibbles(qs: Tensor, run: int = 16) -> Tensor:
    """Of each run of bytes the low halves and then the high halves."""
    kernels = library()
    if kernels is not None and run % 16 == 0:
        return split_nibbles(kernels, qs, run)
    qs = _split(qs, -1, run)
    return torch.cat((qs & 15, qs >> 4), -1).flatten(-2)


def _bits(x: Tensor, width: int) -> Tensor:
    """Each byte cut into numbers of `width` bits, the lowest first, in a dim of their own at the end."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8)
    return x.unsqueeze(-1) >> shifts & (1 << width) - 1


def _layers(x: Tensor, width: int) -> Tensor:
    """The same with that dim before the last one: all lowest numbers of a run of bytes together, then the next ones."""
    mask = (1 << width) - 1
    return torch.stack([x >> shift & mask if shift else x & mask for shift in range(0, 8, width)], -2)


def _planes(qs: Tensor, width: int) -> Tensor:
    """Runs of 32 bytes, of which the lowest bits make 32 codes, the next ones the 32 after them, and so on."""
    if width == 4:
        return _nibbles(qs, 32)
    return _layers(_split(qs, -1, 32), width).flatten(-3)


def _rows(x: Tensor) -> Tensor:
    """[..., blocks, of each block] -> [..., in the order of the row]"""
    return x.flatten(-2)


def _q4_0(scheme: Scheme, raw: Tensor) -> Blocks:
    """d, qs[16]"""
    return Blocks(scheme, _rows(_nibbles(raw[..., 2:])), _half(raw, 0))


def _q4_1(scheme: Scheme, raw: Tensor) -> Blocks:
    """d, m, qs[16]; m is added."""
    return Blocks(scheme, _rows(_nibbles(raw[..., 4:])), _half(raw, 0), minima=-_half(raw, 2))


def _q5_0(scheme: Scheme, raw: Tensor) -> Blocks:
    """d, qh[4] with a bit for each code, qs[16]"""
    codes = _nibbles(raw[..., 6:]) | _bits(raw[..., 2:6], 1).flatten(-2) << 4
    return Blocks(scheme, _rows(codes), _half(raw, 0))


def _q5_1(scheme: Scheme, raw: Tensor) -> Blocks:
    """d, m, qh[4], qs[16]; m is added."""
    codes = _nibbles(raw[..., 8:]) | _bits(raw[..., 4:8], 1).flatten(-2) << 4
    return Blocks(scheme, _rows(codes), _half(raw, 0), minima=-_half(raw, 2))


def _q8_0(scheme: Scheme, raw: Tensor) -> Blocks:
    """d, qs[32] of int8"""
    return Blocks(scheme, _rows(raw[..., 2:] ^ 128), _half(raw, 0))


def _q2_k(scheme: Scheme, raw: Tensor) -> Blocks:
    """sc[16] (scale and minimum of 4 bits), qs[64], d, dmin"""
    scales, codes = raw[..., :16], _planes(raw[..., 16:80], 2)
    return Blocks(
        scheme,
        _rows(codes),
        _rows(scales & 15),
        _half(raw, 80),
        minima=_rows(scales >> 4),
        super_minima=_half(raw, 82),
    )


def _q3_k(scheme: Scheme, raw: Tensor) -> Blocks:
    """qh[32] with a bit for each code, qs[64], sc[12] (low halves in 8 bytes, 2 high bits in 4), d"""
    codes = _planes(raw[..., 32:96], 2) | _planes(raw[..., :32], 1) << 2
    high = _layers(raw[..., 104:108], 2).flatten(-2)
    scales = (_nibbles(raw[..., 96:104], 8) | high << 4).to(torch.int8) - 32
    return Blocks(scheme, _rows(codes), _rows(scales), _half(raw, 108))


def _six_bits(sc: Tensor) -> tuple[Tensor, Tensor]:
    """Eight scales and eight minima of 6 bits from 12 bytes: the last four of each have their high bits elsewhere."""
    a, b, c = sc[..., :4], sc[..., 4:8], sc[..., 8:]
    scales = torch.cat((a & 63, c & 15 | a >> 6 << 4), -1)
    return scales, torch.cat((b & 63, c >> 4 | b >> 6 << 4), -1)


def _q4_k(scheme: Scheme, raw: Tensor) -> Blocks:
    """d, dmin, sc[12], qs[128]: each 32 bytes hold one group in their low halves and the next in their high ones."""
    return _k_blocks(scheme, raw, _planes(raw[..., 16:], 4))


def _q5_k(scheme: Scheme, raw: Tensor) -> Blocks:
    """d, dmin, sc[12], qh[32] with a bit for each group, qs[128] as in Q4_K"""
    return _k_blocks(scheme, raw, _planes(raw[..., 48:], 4) | _planes(raw[..., 16:48], 1) << 4)


def _k_blocks(scheme: Scheme, raw: Tensor, codes: Tensor) -> Blocks:
    scales, minima = _six_bits(raw[..., 4:16])
    return Blocks(
        scheme,
        _rows(codes),
        _rows(scales),
        _half(raw, 0),
        minima=_rows(minima),
        super_minima=_half(raw, 2),
    )


def _q6_k(scheme: Scheme, raw: Tensor) -> Blocks:
    """ql[128], qh[64], sc[16] of int8, d: 64 bytes of ql and 32 of qh for each half of the codes"""
    low = _layers(_split(raw[..., :128], 2, 64), 4).flatten(-3)
    codes = low | _planes(raw[..., 128:192], 2) << 4
    scales = raw[..., 192:208].contiguous().view(torch.int8)
    return Blocks(scheme, _rows(codes), _rows(scales), _half(raw, 208))


def _iq4_xs(scheme: Scheme, raw: Tensor) -> Blocks:
    """d, high bits of sc[2], low halves of sc[4], qs[128]: 16 bytes for each group"""
    low, high = _bits(raw[..., 4:8], 4).flatten(-2), _bits(raw[..., 2:4], 2).flatten(-2)
    codes = _nibbles(raw[..., 8:])
    return Blocks(scheme, _rows(codes), _rows((low | high << 4).to(torch.int8) - 32), _half(raw, 0))


def _mxfp4(scheme: Scheme, raw: Tensor) -> Blocks:
    """e, qs[16]; the scale of twice the values is 2^(e - 128)."""
    return Blocks(scheme, _rows(_nibbles(raw[..., 1:])), raw[..., 0])


UNPACK: dict[str, Callable[[Scheme, Tensor], Blocks]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _q4_0,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
