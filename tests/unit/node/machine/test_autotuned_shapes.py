"""What `tllm profile` shows of choices: every area, all ways, and nothing that is known is measured."""

from __future__ import annotations

import pytest
import torch

from tllm.engine.compute import attention_choice
from tllm.kernels import float_product
from tllm.kernels.autotune import Autotuned
from tllm.kernels.fastest import Choice
from tllm.kernels.float_product import float_matmul
from tllm.kernels.library import library
from tllm.kernels.training import training_matmul
from tllm.node.machine import autotuned_shapes as shapes
from tllm.training.attention import attention_dtype, kernel_attention


def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A new start, whose measurements are counted and take no time; those of single tokens are always made."""
    measured: list[str] = []
    for module, area in (
        (float_product, "choices"),
        (attention_choice, "choices"),
        (training_matmul, "measured"),
        (attention_dtype, "measured"),
        (kernel_attention, "choices"),
    ):
        monkeypatch.setattr(module, area, Autotuned(getattr(module, area).area))
        way = "wide_or_own" if area == "measured" else "fastest"

        def measure(*arguments: object, name: str = module.__name__, way: str = way) -> Choice:
            measured.append(name)
            if way == "wide_or_own":
                return Choice("float32", {"float32": 1e-3, str(arguments[2]).removeprefix("torch."): 3e-3})
            names = list(arguments[0])  # type: ignore[call-overload]
            return Choice(names[0], dict.fromkeys(names, 1e-3))

        monkeypatch.setattr(module, way, measure)
    return measured


def test_every_area_with_all_its_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = started(monkeypatch)
    with torch.inference_mode():
        float_matmul(torch.ones(1, 1024), torch.ones(1024, 1024))
    found = shapes.autotuned_shapes()
    first = dict.fromkeys(measured)
    areas = {one.what: one for one in found}
    kernels = library()
    kernel = kernels is not None
    prompts = {"attention of prompts"} if kernel else set()
    by_kernel = {"attention of training by a kernel"} if kernel else set()
    assert set(areas) == {
        *("product", "attention of a token", "product of training", "attention of training"),
        *prompts,
        *by_kernel,
    }
    assert set(areas["product"].seconds) == set(float_product.names_for(torch.ones(1, 1024), torch.ones(1024, 1024)))
    assert "rows=1 outputs=1024 columns=1024 dtype=float32" in areas["product"].shape
    ways = {"kernel", "torch"} if kernel else {"torch"}
    assert set(areas["attention of a token"].seconds) == ways
    for area in by_kernel:
        assert set(areas[area].seconds) == {"kernel", "torch"}
    for area in prompts:
        assert set(areas[area].seconds) == ways | ({"AMX"} if kernels is not None and kernels.has_tiles else set())
    assert areas["attention of a token"].taken == ("kernel" if kernel else "torch"), "whatever is faster"
    trained = [one for one in found if one.what == "product of training"]
    assert {(one.shape.partition("computes=")[2], *one.seconds) for one in trained} == {
        (name, "float32", dtype) for name in training_matmul.PASSES for dtype in ("bfloat16", "float16")
    }
    assert len(first) == (5 if kernel else 3)
    words = shapes.kept_in()
    assert words.startswith(f"{len(measured)} choices of this machine are kept in ")
    again = started(monkeypatch)
    with torch.inference_mode():
        float_matmul(torch.ones(1, 1024), torch.ones(1024, 1024))
    repeated = shapes.autotuned_shapes()
    assert again == [], "the next start reads them"
    assert [one.taken for one in repeated] == [one.taken for one in found]
    assert shapes.kept_in() == words


def test_where_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLLM_AUTOTUNE_CACHE", "off")
    assert shapes.kept_in() == ""
