"""`Room`: whether a machine has the memory for a role, and how fast it is in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import cycle

from tllm.core.errors import CapacityError
from tllm.planner.cluster.device import Cluster
from tllm.planner.cost.rank_work import JudgeFacts, TrainingFacts
from tllm.planner.memory.heap import TRAINER_BYTES
from tllm.planner.memory.role_memory import judge_parts, rollout_parts
from tllm.planner.simulate.role_seconds import group_seconds, row_seconds
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan


@dataclass(frozen=True)
class Room:
    """For a role that is to `does` ("teach"), whose model computes in `dtype`.

    `parts`: bytes of each device of those that hold one model together by a `plan`, in their order. `seconds` of a
    device: of the same work on each, to compare them.
    """

    cluster: Cluster
    does: str
    parts: tuple[int, ...]
    dtype: str
    seconds: Callable[[int], float]
    plan: Plan | None = None

    @property
    def size(self) -> int:
        """Devices that hold one model."""
        return len(self.parts)

    @property
    def needs(self) -> int:
        """Bytes of the largest part, with the process before any tensor."""
        return max(self.parts) + TRAINER_BYTES

    def is_there(self, device: int) -> bool:
        """Whether a device has room for some part of the model, and its speed in the model's dtype is known."""
        return self._has(device, min(self.parts) + TRAINER_BYTES)

    def is_for_all(self, device: int) -> bool:
        """The same of every part, the largest too."""
        return self._has(device, self.needs)

    def fits(self, devices: Sequence[int]) -> bool:
        """Whether each has room for its own part."""
        parts = cycle(self.parts)
        return all(self._has(device, part + TRAINER_BYTES) for device, part in zip(devices, parts, strict=False))

    def placed(self, devices: Sequence[int]) -> tuple[int, ...]:
        """The same devices, of each model the fastest where the parts are largest; where that leaves some without room,
        those that have most memory. Neighbours have a model together, unless some of them have no room then: the
        largest parts then go to the strongest of all.
        """
        largest = sorted(range(self.size), key=lambda place: -self.parts[place])
        for strength in (self.quickness, self.strength):
            found = list(devices)
            for at in range(0, len(devices), self.size):
                team = devices[at : at + self.size]
                if len(set(map(strength, team))) > 1:
                    for place, device in zip(largest, sorted(team, key=strength, reverse=True), strict=True):
                        found[at + place] = device
            if self.fits(found):
                return tuple(found)
        strongest, teams = iter(sorted(devices, key=self.strength, reverse=True)), len(devices) // self.size
        for place in largest:
            for number in range(teams):
                found[number * self.size + place] = next(strongest)
        return tuple(found)

    def quickness(self, device: int) -> tuple[float, int]:
        """By what devices of one model are ordered: speed, and then memory."""
        return -self.seconds(device), self.cluster.devices[device].memory

    def strength(self, device: int) -> tuple[int, float]:
        """The same by memory, and then speed."""
        return self.cluster.devices[device].memory, -self.seconds(device)

    def check(self, device: int, place: int) -> None:
        """CapacityError for a device that was named, at this place, and has none for the part that it then gets."""
        needs, has = self.parts[place % self.size] + TRAINER_BYTES, self.cluster.devices[device].memory
        if not self._has(device, needs):
            raise CapacityError(
                f"{self.cluster.name(device)} is to {self.does}: its model needs {needs / 2**30:.2f} GiB and it has "
                f"{has / 2**30:.2f} GiB, or its speed in {self.dtype} is unknown",
                "name another machine, or none",
            )

    def knows(self, device: int) -> bool:
        """Whether the speed of a device in the model's dtype is known."""
        return self.cluster.as_serving().devices[device].knows(self.dtype)

    def _has(self, device: int, nbytes: int) -> bool:
        return self.knows(device) and nbytes <= self.cluster.devices[device].memory


def judge_room(cluster: Cluster, does: str, judge: JudgeFacts) -> Room:
    """For a teacher or a reward model."""
    serving = cluster.as_serving()

    @cache  # it is asked of each set of devices
    def seconds(device: int) -> float:
        return row_seconds(judge.whole, serving, device)

    return Room(cluster, does, judge_parts(judge), judge.dtype, seconds, judge.plan)


def rollout_room(cluster: Cluster, spec: ModelSpec, facts: TrainingFacts) -> Room:
    """For a copy of the policy that samples. Devices are compared by what each takes for a prompt with all of it."""
    serving, sampling = cluster.as_serving(), facts.sampling
    assert sampling is not None, "asked of a job that samples"
    whole = replace(facts, sampling=replace(sampling, plan=None))

    @cache  # it is asked of each set of devices
    def seconds(device: int) -> float:
        return group_seconds(spec, whole, serving, 1, device)

    return Room(cluster, "sample", rollout_parts(spec, facts), facts.dtype, seconds, sampling.plan)
