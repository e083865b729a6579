"""What a job says of the machines for its roles, as the planner takes it."""

from __future__ import annotations

from collections.abc import Sequence

from tllm.core.errors import ConfigError, counted
from tllm.planner.cluster.device import Cluster
from tllm.planner.cost.rank_work import TrainingFacts
from tllm.planner.roles.role_machines import RoleWish
from tllm.planner.roles.teacher_machines import Taught
from tllm.spec.process_groups import RoleName
from tllm.training.job.job import Job
from tllm.training.job.job_parts import role_key, role_nodes, role_plan_text
from tllm.training.job.key_limits import AUTO


def wishes_of(cluster: Cluster, job: Job) -> dict[RoleName, RoleWish]:
    """By role, for those that the job gives to nodes. ConfigError for names that cannot be, or too many nodes."""
    found: dict[RoleName, RoleWish] = {}
    for role, wanted in role_nodes(job).items():
        key = role_key(job, role)
        if wanted.count >= len(cluster):
            raise ConfigError(
                f"{key} takes {wanted.count} of {counted(len(cluster), 'machine')}",
                "one at least must train: give fewer",
            )
        devices = named_devices(cluster, wanted.names, key) if wanted.names else None
        divides = role_plan_text(job, role) == AUTO
        found[role] = RoleWish(devices, None if wanted.is_auto else wanted.count, divides)
    return found


def named_devices(cluster: Cluster, names: Sequence[str], key: str) -> tuple[int, ...]:
    """The devices of machines that a job names, in its order. ConfigError for names that cannot be."""
    unknown = [name for name in names if name not in cluster.names]
    if unknown:
        raise ConfigError(
            f"{key} names {unknown[0]!r}, and the cluster has {', '.join(cluster.names)}",
            "give the names of machines of the cluster",
        )
    of_names = {name: [d for d in range(len(cluster)) if cluster.names[cluster.node_of[d]] == name] for name in names}
    devices = tuple(device for own in of_names.values() for device in own)
    if 0 in devices:
        raise ConfigError(
            f"{key} names {cluster.name(0)}, the first machine, which has the data and trains", "name another one"
        )
    return devices


def taught_of(job: Job, facts: TrainingFacts) -> Taught | None:
    """What is asked of a student's teacher, where its model is known."""
    if job.distill is None or facts.teacher is None:
        return None
    return Taught(facts.teacher, answer_bytes(job, facts.teacher.spec.vocab_size), job.distill.lmbda)


def answer_bytes(job: Job, vocab_size: int) -> float:
    """Bytes at most of what a teacher says of a row: the likeliest tokens of each place, all others together, and
    hidden states."""
    assert job.distill is not None, "a student has a teacher"
    top_k, item = job.distill.top_k, 2 if vocab_size <= 2**16 else 4
    return job.seq_len * ((top_k * (item + 4) + 4 if top_k else 4 * vocab_size) + job.distill.hidden_state_bytes)
