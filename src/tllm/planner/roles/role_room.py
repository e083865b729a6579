"""`Room`: whether a machine can have a role, and how fast it is in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tllm.core.errors import CapacityError
from tllm.planner.cluster.device import Cluster
from tllm.planner.cost.rank_work import TeacherFacts, TrainingFacts
from tllm.planner.memory.heap import TRAINER_BYTES
from tllm.planner.memory.role_memory import rollout_bytes, teacher_bytes
from tllm.planner.simulate.role_seconds import group_seconds, teacher_seconds
from tllm.spec.model_spec import ModelSpec


@dataclass(frozen=True)
class Room:
    """For a role that is to `does` ("teach"), whose model takes `nbytes` and computes in `dtype`.

    `seconds` of a device: of the same work on each, to compare them.
    """

    cluster: Cluster
    does: str
    nbytes: int
    dtype: str
    seconds: Callable[[int], float]

    def is_there(self, device: int) -> bool:
        """Whether a device has room for the whole model, and its speed in the model's dtype is known."""
        own = self.cluster.as_serving().devices[device]
        return own.knows(self.dtype) and self.nbytes + TRAINER_BYTES <= self.cluster.devices[device].memory

    def check(self, device: int) -> None:
        """CapacityError for a device that was named and has none."""
        if not self.is_there(device):
            needs, has = self.nbytes + TRAINER_BYTES, self.cluster.devices[device].memory
            raise CapacityError(
                f"{self.cluster.name(device)} is to {self.does}: its model needs {needs / 2**30:.2f} GiB and it has "
                f"{has / 2**30:.2f} GiB, or its speed in {self.dtype} is unknown",
                "name another machine, or none",
            )


def teacher_room(cluster: Cluster, teacher: TeacherFacts) -> Room:
    """For a teacher."""
    serving = cluster.as_serving()
    return Room(
        cluster,
        "teach",
        teacher_bytes(teacher),
        teacher.dtype,
        lambda device: teacher_seconds(teacher, serving, device),
    )


def rollout_room(cluster: Cluster, spec: ModelSpec, facts: TrainingFacts) -> Room:
    """For a whole copy of the policy that samples."""
    serving = cluster.as_serving()
    return Room(
        cluster,
        "sample",
        rollout_bytes(spec, facts),
        facts.dtype,
        lambda device: group_seconds(spec, facts, serving, device, 1),
    )
