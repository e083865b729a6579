"""Whether products of few bits are made by tiles: what was measured decides, and what the processor may do."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from tllm.kernels import instruction_sets
from tllm.kernels.instruction_sets import AMX, VNNI, may_use, supported
from tllm.kernels.library import PackedWeightArguments
from tllm.kernels.tiled_product import choices, kind_of, multiply

KERNELS = SimpleNamespace(has_tiles=True)
WEIGHT = PackedWeightArguments(columns=64, kind=0, group=32)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The products that were made, whether by tiles; nothing is known of any kind."""
    monkeypatch.setattr(choices, "known", {})
    monkeypatch.setenv("TLLM_AUTOTUNE_CACHE", "off")
    return []


def slow_by(made: list[bool], slow: bool) -> Callable[[bool], None]:
    def product(by_tiles: bool) -> None:
        made.append(by_tiles)
        if by_tiles == slow:
            time.sleep(0.002)

    return product


@pytest.mark.parametrize("faster", [False, True])
def test_the_faster_way_is_taken_for_products_that_are_alike(made: list[bool], faster: bool) -> None:
    product = slow_by(made, slow=not faster)
    multiply(KERNELS, kind_of(20, 48, WEIGHT, False), product)  # type: ignore[arg-type]
    assert set(made) == {False, True} and made[-1] is faster
    made.clear()
    multiply(KERNELS, kind_of(32, 48, WEIGHT, False), product)  # type: ignore[arg-type]
    assert made == [faster]
    assert [(kind.rows, kind.outputs, kind.columns, kind.codes, kind.group) for kind in choices.known] == [
        (32, 48, 64, 0, 32)
    ]
    multiply(KERNELS, kind_of(5000, 48, WEIGHT, True), product)  # type: ignore[arg-type]
    assert {(kind.rows, kind.exact) for kind in choices.known} == {(32, False), (512, True)}


@pytest.mark.parametrize(("has_tiles", "rows"), [(False, 512), (True, 1)])
def test_nothing_is_measured_without_tiles_or_for_one_row(made: list[bool], has_tiles: bool, rows: int) -> None:
    multiply(SimpleNamespace(has_tiles=has_tiles), kind_of(rows, 48, WEIGHT, False), made.append)  # type: ignore[arg-type]
    assert made == [False] and not choices.known


def test_tiles_that_linux_refuses_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int | None] = []

    def refuse(registers: int | None) -> bool:
        asked.append(registers)
        return registers is None

    monkeypatch.setattr(instruction_sets, "may_use", refuse)
    assert [one.name for one in supported("x86_64", AMX)] == ["avx512vnni", "avx2", "generic"]
    asked.clear()
    assert supported("x86_64", VNNI)[0].name == "avx512vnni" and set(asked) == {None}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="asks what Linux asks of x86-64 alone")
def test_registers_that_there_are_not_are_refused() -> None:
    assert may_use(None) and not may_use(1)
