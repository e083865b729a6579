"""Turns a coordinator's `Workload` into the form that its replicas keep, and back."""

from __future__ import annotations

from pathlib import Path

from tllm.cluster.consensus.replicated_state import ReplicatedWork
from tllm.hub.repository import HubWeights
from tllm.node.coordinator.workload import Workload
from tllm.node.recovery.recovery import Policy


def replicated_work(work: Workload, policy: Policy, replicas: int) -> ReplicatedWork:
    """What replicas are told of it. Where this machine keeps what it fetches from the hub is its own matter."""
    return ReplicatedWork(
        folder="" if work.folder is None else str(work.folder.resolve()),
        config=work.config,
        plan=work.plan,
        settings=work.settings,
        load_seconds=work.load_seconds,
        allow_mixed=work.allow_mixed,
        prepare_seconds=work.prepare_seconds,
        lost_after=work.lost_after,
        policy=policy,
        replicas=replicas,
        hub=None if work.hub is None else work.hub.repository,
        served=work.served,
        adapters=work.adapters,
        reads=work.reads,
    )


def workload_of(work: ReplicatedWork, cache: str, cache_bytes: int) -> Workload:
    """The same on another machine, which keeps what it fetches from the hub in the folder `cache`."""
    return Workload(
        folder=Path(work.folder) if work.folder else None,
        config=work.config,
        plan=work.plan,
        settings=work.settings,
        load_seconds=work.load_seconds,
        allow_mixed=work.allow_mixed,
        prepare_seconds=work.prepare_seconds,
        lost_after=work.lost_after,
        hub=None if work.hub is None else HubWeights(work.hub, cache, cache_bytes),
        served=work.served,
        adapters=work.adapters,
        reads=work.reads,
    )
