"""A node that computes on a device measures itself there, and two of them what sums between them take."""

from __future__ import annotations

from collections import Counter
from itertools import count

import msgspec
import pytest
import torch

from tests.support.comm.ranks import run_ranks
from tests.support.device.separate_device import MEMORY, SEPARATE
from tests.unit.planner.search.test_serving_search import spec_of
from tllm.cluster.settings import SurveySettings
from tllm.comm.collectives.group import local_groups
from tllm.devices.choose import CPU
from tllm.node.machine import measure as measure_module
from tllm.node.machine.measure import DEVICE_ROWS, measure, measure_products
from tllm.node.roles.sum_latency import measure_sums
from tllm.node.roles.survey_rank import examined
from tllm.parallel.quantized_weight import QuantizedWeight
from tllm.spec.quantized.weight_form import Quantize

SETTINGS = SurveySettings(
    dtype="float32",
    length=16,
    rows=(16, 48),
    measure_seconds=0.2,
    way_seconds=0.1,
    link_seconds=5.0,
    device=str(SEPARATE[1]),
)


def test_training_is_measured_on_the_device_and_within_its_memory() -> None:
    found = examined("a", spec_of(4), SETTINGS)
    assert found.device == f"{SEPARATE[1]} Separate" and 0 < found.memory_bytes <= MEMORY
    assert [(one.rows, one.ranks) for one in found.layers] == [(16, 1), (48, 1), (16, 2), (48, 2)]
    assert all(one.seconds > 0 for one in (*found.layers, *found.logits)) and found.update > 0


def test_serving_is_measured_on_the_device() -> None:
    settings = msgspec.structs.replace(SETTINGS, rows=(16,), sequences=(1, 2))
    found = examined("a", spec_of(4), settings)
    assert len(found.layers) == 6 and len(found.turns) == len(found.follows) == 2
    assert all(one.seconds > 0 for one in (*found.layers, *found.logits))


def test_sums_with_a_rank_on_another_device_are_measured() -> None:
    groups = local_groups(2, deadline=20.0)
    devices = (SEPARATE[0], CPU)
    found = run_ranks(groups, lambda group: measure_sums(group, 0.1, device=devices[group.rank]))
    assert all(min(met.turn, met.work, met.sum) > 0 and met.rate > 0 for met in found)


@pytest.mark.parametrize(("kind", "nbytes"), [("int8", 8.5 * 128 * 128 / 8), ("int4", 4.5 * 128 * 128 / 8)])
def test_products_of_few_bits_read_several_weights_in_turn(
    kind: Quantize, nbytes: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as no cache holds, and as fit: what one product takes is the time of all, divided."""
    assert not list(measure_products(kind, 0.1, 2**30, device=SEPARATE[1])), "without kernels they take too long"
    monkeypatch.setattr(measure_module, "gpu_kernels", lambda kind: "some")
    monkeypatch.setattr(measure_module, "DEVICE_CACHE_BYTES", int(4 * nbytes))
    made, now = Counter[int](), 0.0

    def matmul(weight: QuantizedWeight, x_TD: torch.Tensor) -> None:
        nonlocal now
        assert x_TD.device == SEPARATE[1]
        now += 2 * len(x_TD) * 128 * 128 / 1e9
        made[id(weight)] += 1

    monkeypatch.setattr(QuantizedWeight, "matmul", matmul)
    found = list(measure_products(kind, 3.0, 2**30, lambda: now, (128,), SEPARATE[1]))
    assert [(one.dtype, one.rows, one.width, one.product) for one in found] == [
        (kind, rows, 128, "Triton") for rows in DEVICE_ROWS
    ]
    assert all(one.flops_per_second == pytest.approx(1e9) for one in found)
    assert len(made) == 4 and len(set(made.values())) == 1
    made.clear()
    least = (128 + 2 * 4096) * 128 * 4
    assert not list(measure_products(kind, 3.0, least - 1, lambda: now, (128,), SEPARATE[1])) and not made


def test_a_device_that_has_kernels_has_speeds_of_every_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_module, "gpu_kernels", lambda kind: "some")
    monkeypatch.setattr(measure_module, "DEVICE_WIDTHS", (64,))
    monkeypatch.setattr(measure_module, "DEVICE_ROWS", (1, 2))
    monkeypatch.setattr(measure_module, "DEVICE_CACHE_BYTES", 2**14)
    ticks = count(0.0, 4e-3)  # by a real clock a busy machine leaves out products that seem to take too long
    found = measure(4.0, 2**27, lambda: next(ticks), SEPARATE[1])
    assert {(one.dtype, one.rows) for one in found.products} == {
        (kind, rows) for kind in ("float32", "bfloat16", "float16", "int8", "int4") for rows in (1, 2)
    }
    assert min(one.flops_per_second for one in found.products) > 0
