"""A node that computes on a device measures itself there, and two of them what sums between them take."""

from __future__ import annotations

import msgspec

from tests.support.comm.ranks import run_ranks
from tests.support.device.separate_device import MEMORY, SEPARATE
from tests.unit.planner.search.test_serving_search import spec_of
from tllm.cluster.settings import SurveySettings
from tllm.comm.collectives.group import local_groups
from tllm.devices.choose import CPU
from tllm.node.roles.sum_latency import measure_sums
from tllm.node.roles.survey_rank import examined

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
