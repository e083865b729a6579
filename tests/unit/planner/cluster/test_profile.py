"""The file that `tllm profile` writes: it reads back as it was, and a file that is none is refused in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tllm.core.errors import ConfigError
from tllm.planner.cluster.profile import Hardware, LoopbackWire, MemorySpeed, ProductSpeed, Profile, read_profile

PROFILE = Profile(
    date="2026-11-21T12:00:00+00:00",
    tllm="0.1.0",
    torch="2.13.0",
    hardware=Hardware("box", ("avx2",), 4, 4, 0.0, 2**33, 2**32, "Linux"),
    products=(
        ProductSpeed("float32", 1, 1024, 1e9, 9),
        ProductSpeed("float32", 8, 1024, 4e9, 9),
        ProductSpeed("float32", 64, 1024, 8e9, 9),
        ProductSpeed("float32", 1, 4096, 2e9, 9),
        ProductSpeed("bfloat16", 1, 1024, 5e9, 9),
    ),
    memory=MemorySpeed(2e10, 3e10),
    operation=1e-6,
    wire=LoopbackWire(2e-5, 0.0, 1e9),
)


def test_it_reads_back_as_it_was(tmp_path: Path) -> None:
    PROFILE.save(tmp_path / "p.json")
    assert read_profile(tmp_path / "p.json") == PROFILE
    assert len((tmp_path / "p.json").read_text().splitlines()) > 40, "one value a line, for people"


@pytest.mark.parametrize(
    ("rows", "width", "rate"),
    [
        (1, 1024, 1e9),
        (8, 1024, 4e9),
        (64, 1024, 8e9),
        (1000, 1024, 8e9),
        (1, None, 2e9),
        (1, 3000, 2e9),
        (1, 1500, 1e9),
    ],
)
def test_rates_at_and_beyond_what_was_measured(rows: int, width: int | None, rate: float) -> None:
    assert PROFILE.matrix_rate("float32", rows, width) == rate


def test_a_rate_between_two_goes_by_the_logarithm_of_rows() -> None:
    """64 = 8 * 8: the geometric mean of 8 and 64 rows is half-way."""
    assert PROFILE.matrix_rate("float32", 23, 1024) == pytest.approx(6e9, rel=0.01)
    rates = [PROFILE.matrix_rate("float32", rows, 1024) for rows in range(1, 70)]
    assert rates == sorted(rates)


def test_a_dtype_that_was_not_measured() -> None:
    with pytest.raises(ConfigError, match="no products in float16") as caught:
        PROFILE.matrix_rate("float16", 1)
    assert "float32, bfloat16" in caught.value.hint


def damaged(**changes: Any) -> str:
    return json.dumps({**msgspec.to_builtins(PROFILE), **changes})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not a profile"),
        ("[]", "is not a profile"),
        ("{}", "missing required field `version`"),
        (damaged(version=9), "of version 9, and this tllm reads 1"),
        (damaged(operation=0), "operation is 0"),
        (damaged(operation=-1.5), "operation is -1.5"),
        (damaged(operation="fast"), "Expected `float`"),
        (damaged(speed=1), "unknown field `speed`"),
        (damaged(memory=dict(read=0.0, copy=1.0)), "memory.read is 0"),
        (damaged(wire=dict(latency=1e-5, jitter=0, bandwidth=-1)), "wire.bandwidth is -1"),
        (
            damaged(products=[dict(dtype="float32", rows=0, width=1, flops_per_second=1, repeats=3)]),
            "products.rows is 0",
        ),
    ],
)
def test_what_is_no_profile(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_profile(tmp_path / "p.json")
    assert words in caught.value.message
    assert "tllm profile --out" in caught.value.hint


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the profile"):
        read_profile(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="cannot write"):
        PROFILE.save(tmp_path / "no" / "p.json")
