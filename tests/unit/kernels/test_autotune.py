"""What is measured once is not measured again: by this process, nor by the next one on the same machine."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from tests.unit.kernels.clocks import Clocks
from tllm.core.cache_folder import cache_folder
from tllm.core.errors import ConfigError
from tllm.engine.compute import attention_choice
from tllm.engine.compute.attention_choice import AttentionKind, fastest_way
from tllm.kernels import autotune, float_product, product_ways
from tllm.kernels.autotune import VARIABLE, Autotuned, choice_file, in_words
from tllm.kernels.fastest import Choice, fastest
from tllm.kernels.float_product import float_matmul
from tllm.kernels.product_ways import TURNS, PackedProductKind, ProductWays
from tllm.kernels.training import training_matmul
from tllm.kernels.training.training_matmul import choose_products
from tllm.training.attention import attention_dtype


class RowsKind(NamedTuple):
    rows: int
    dtype: torch.dtype


KIND = RowsKind(4, torch.bfloat16)
NAMES = ("slow", "quick")


class Measuring:
    """Counts how often something is measured."""

    def __init__(self, choice: Choice) -> None:
        self.choice = choice
        self.count = 0

    def __call__(self, *_: object) -> Choice:
        self.count += 1
        return self.choice


@pytest.fixture
def measuring() -> Measuring:
    return Measuring(Choice("quick", {"slow": 2.0, "quick": 1.0}))


def test_a_kind_in_words() -> None:
    assert in_words(KIND) == "rows=4 dtype=bfloat16"


def test_the_next_start_measures_nothing(measuring: Measuring) -> None:
    first = Autotuned[RowsKind]("product")
    assert first.choose(KIND, NAMES, measuring) == first.choose(KIND, NAMES, measuring) == measuring.choice
    assert measuring.count == 1
    assert Autotuned[RowsKind]("product").choose(KIND, NAMES, measuring) == measuring.choice
    assert measuring.count == 1, "a start later"
    Autotuned[RowsKind]("product").choose(KIND._replace(rows=8), NAMES, measuring)
    Autotuned[RowsKind]("attention").choose(KIND, NAMES, measuring)
    Autotuned[RowsKind]("product").choose(KIND, (*NAMES, "new"), measuring)
    assert measuring.count == 4, "another kind, another area, and a candidate more"


@pytest.mark.parametrize(("mode", "times", "kept"), [("on", 1, 1), ("off", 2, 0), ("again", 2, 1)])
def test_modes(mode: str, times: int, kept: int, measuring: Measuring, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, mode)
    for _ in range(2):
        Autotuned[RowsKind]("product").choose(KIND, NAMES, measuring)
    assert measuring.count == times
    monkeypatch.setenv(VARIABLE, "on")
    file = choice_file()
    assert file is not None and file.count() == kept


def test_measured_again_it_takes_the_place_of_what_was_kept(
    measuring: Measuring, monkeypatch: pytest.MonkeyPatch
) -> None:
    Autotuned[RowsKind]("product").choose(KIND, NAMES, measuring)
    monkeypatch.setenv(VARIABLE, "again")
    other = Measuring(Choice("slow", {"slow": 1.0, "quick": 2.0}))
    Autotuned[RowsKind]("product").choose(KIND, NAMES, other)
    monkeypatch.delenv(VARIABLE)
    assert Autotuned[RowsKind]("product").choose(KIND, NAMES, measuring) == other.choice


def test_a_mode_that_is_none_is_refused(measuring: Measuring, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "yes")
    with pytest.raises(ConfigError, match="TLLM_AUTOTUNE_CACHE=yes is not known") as caught:
        Autotuned[RowsKind]("product").choose(KIND, NAMES, measuring)
    assert all(mode in caught.value.hint for mode in ("on", "off", "again"))


def test_who_has_no_home_keeps_nothing(measuring: Measuring, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    assert choice_file() is None
    assert Autotuned[RowsKind]("product").choose(KIND, NAMES, measuring) == measuring.choice


def test_what_was_interrupted_is_used_and_not_kept(measuring: Measuring) -> None:
    measuring.choice = measuring.choice._replace(is_sure=False)
    here = Autotuned[RowsKind]("product")
    assert here.choose(KIND, NAMES, measuring) is here.choose(KIND, NAMES, measuring)
    assert measuring.count == 1
    Autotuned[RowsKind]("product").choose(KIND, NAMES, measuring)
    assert measuring.count == 2


def test_ranks_that_are_threads_measure_once(measuring: Measuring) -> None:
    here = Autotuned[RowsKind]("product")

    def measure() -> Choice:
        time.sleep(0.02)
        return measuring()

    threads = [threading.Thread(target=here.choose, args=(KIND, NAMES, measure)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert measuring.count == 1


@pytest.mark.parametrize(
    ("first", "second", "winner", "sure"),
    [
        ((1e-3, 0.0), (2e-3, 0.0), "a", True),
        ((1e-3, 0.0), (2e-3, 5e-3), "a", True),
        ((1e-3, 0.0), (0.8e-3, 5e-3), "a", False),
        ((1e-3, 0.0), (0.8e-3, 0.0, 9e-3, 0.0), "b", True),
        ((1e-3, 0.0), (0.97e-3, 1e-4), "a", True),
    ],
    ids=[
        "alone",
        "the loser was held up and is slower anyway",
        "held up, and faster else",
        "held up once",
        "nearly equal",
    ],
)
def test_a_choice_is_sure_if_nobody_lost_by_being_held_up(
    first: tuple[float, ...], second: tuple[float, ...], winner: str, sure: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clocks = Clocks(monkeypatch)
    choice = fastest({"a": clocks.takes(*first), "b": clocks.takes(*second)})
    assert (choice.name, choice.is_sure) == (winner, sure)


def test_every_area_reads_what_was_kept(measuring: Measuring, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start measures a product, attention of a prompt, products and attention of training; the next one nothing."""
    kind = AttentionKind(8, 8, 4, 2, 16, torch.float32, 0, False, False, 1)
    packed_kind = PackedProductKind(8, 64, 64, 0, 32, False, 1)
    weights = [torch.empty(512, 512, dtype=torch.bfloat16)]
    x_TD, weight_FD = torch.randn(1, 1024), torch.randn(1024, 1024)
    counts = []
    for _ in range(2):
        monkeypatch.setattr(float_product, "choices", Autotuned("product"))
        monkeypatch.setattr(product_ways, "packed", ProductWays("product of few bits"))
        monkeypatch.setattr(attention_choice, "choices", Autotuned("attention of prompts"))
        monkeypatch.setattr(training_matmul, "measured", Autotuned("product of training"))
        monkeypatch.setattr(attention_dtype, "measured", Autotuned("attention of training"))
        monkeypatch.setattr(training_matmul, "choices", {})
        monkeypatch.setattr(attention_dtype, "_chosen", {})
        products = Measuring(Choice("linear", dict.fromkeys(float_product.names_for(x_TD, weight_FD), 1.0)))
        packed = Measuring(Choice("tiles", {"tiles": 1.0, "vectors": 2.0}))
        prompts = Measuring(Choice("b", {"a": 2.0, "b": 1.0}))
        trained = Measuring(Choice("float32", {"float32": 1.0, "bfloat16": 2.0}))
        monkeypatch.setattr(float_product, "fastest", products)
        monkeypatch.setattr(product_ways.Trials, "fastest", packed)
        monkeypatch.setattr(attention_choice, "fastest", prompts)
        monkeypatch.setattr(training_matmul, "wide_or_own", trained)
        monkeypatch.setattr(attention_dtype, "wide_or_own", trained)
        float_matmul(x_TD, weight_FD)
        has_tiles = SimpleNamespace(has_tiles=True)
        for _ in range(2 * TURNS):
            product_ways.multiply_packed(has_tiles, packed_kind, lambda way: None)  # type: ignore[arg-type]
        assert fastest_way(kind, {"a": lambda: 1, "b": lambda: 2}, lambda way: None) == 2
        assert choose_products(weights).popitem()[1] == frozenset(training_matmul.PASSES)
        assert attention_dtype.choose_attention_dtype(torch.bfloat16) == torch.float32
        counts.append((products.count, packed.count, prompts.count, trained.count))
    assert counts == [(1, 1, 1, 4), (0, 0, 0, 0)]
    assert cache_folder(autotune.FOLDER).is_dir()
