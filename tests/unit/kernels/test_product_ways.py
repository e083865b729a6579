"""In which way products of our kernels are made: what was measured decides, and what the processor may do."""

from __future__ import annotations

import platform
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest

from tests.unit.kernels.clocks import Clocks
from tllm.kernels import instruction_sets
from tllm.kernels.instruction_sets import AMX, VNNI, may_use, supported
from tllm.kernels.library import PackedWeightArguments
from tllm.kernels.product_ways import TURNS, Product, Way, kind_of, multiply_packed, packed

KERNELS = SimpleNamespace(has_tiles=True)
WEIGHT = PackedWeightArguments(columns=64, kind=0, group=32)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Way]:
    """The products that were made, and how; nothing is known of any kind."""
    monkeypatch.setattr(packed, "known", {})
    monkeypatch.setattr(packed, "_trials", {})
    monkeypatch.setenv("TLLM_AUTOTUNE_CACHE", "off")
    return []


@pytest.fixture
def slow_in(made: list[Way], monkeypatch: pytest.MonkeyPatch) -> Callable[[Way], Product]:
    """A product that takes twice as long in one way."""
    clocks = Clocks(monkeypatch)
    long, short = clocks.takes(2e-3, 0.0), clocks.takes(1e-3, 0.0)

    def product(slow: Way, way: Way) -> None:
        made.append(way)
        (long if way == slow else short)()

    return lambda slow: partial(product, slow)


def test_products_that_are_alike_have_one_choice(made: list[Way], slow_in: Callable[[Way], Product]) -> None:
    product = slow_in(Way.ONE_BY_ONE)
    for rows in (20, 32) * TURNS:
        multiply_packed(KERNELS, kind_of(rows, 48, WEIGHT, False), product)  # type: ignore[arg-type]
    assert [(kind.rows, kind.outputs, kind.columns, kind.codes, kind.group) for kind in packed.known] == [
        (32, 48, 64, 0, 32)
    ]
    for _ in range(2 * TURNS):
        multiply_packed(KERNELS, kind_of(5000, 48, WEIGHT, True), product)  # type: ignore[arg-type]
    assert {(kind.rows, kind.exact) for kind in packed.known} == {(32, False), (512, True)}


def test_nothing_is_measured_of_several_rows_without_tiles(made: list[Way]) -> None:
    multiply_packed(SimpleNamespace(has_tiles=False), kind_of(512, 48, WEIGHT, False), made.append)  # type: ignore[arg-type]
    assert made == [Way.ONE_BY_ONE] and not packed.known


@pytest.mark.parametrize(("rows", "other"), [(1, Way.SIDE_BY_SIDE), (20, Way.BY_TILES)])
@pytest.mark.parametrize("is_slow", [False, True], ids=["the other is faster", "the other is slower"])
def test_products_are_made_once_each_and_by_turns_until_one_way_is_known(
    made: list[Way],
    slow_in: Callable[[Way], Product],
    rows: int,
    other: Way,
    is_slow: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow, faster = (other, Way.ONE_BY_ONE) if is_slow else (Way.ONE_BY_ONE, other)
    kind, product = kind_of(rows, 48, WEIGHT, False), slow_in(slow)
    for _ in range(2 * TURNS + 3):
        multiply_packed(KERNELS, kind, product)  # type: ignore[arg-type]
    assert made == [Way.ONE_BY_ONE, other] * TURNS + [faster] * 3
    monkeypatch.setenv("TLLM_AUTOTUNE_CACHE", "on")
    packed.put(kind, packed.known[kind]._replace(is_sure=True))
    packed.known.clear()
    made.clear()
    multiply_packed(KERNELS, kind, product)  # type: ignore[arg-type]
    assert made == [faster]


def test_tiles_that_linux_refuses_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int | None] = []

    def refuse(registers: int | None) -> bool:
        asked.append(registers)
        return registers is None

    monkeypatch.setattr(instruction_sets, "may_use", refuse)
    assert [one.name for one in supported("x86_64", AMX)] == ["avx512bf16", "avx512vnni", "avx2", "generic"]
    asked.clear()
    assert supported("x86_64", VNNI)[0].name == "avx512vnni" and set(asked) == {None}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="asks what Linux asks of x86-64 alone")
def test_registers_that_there_are_not_are_refused() -> None:
    assert may_use(None) and not may_use(1)
