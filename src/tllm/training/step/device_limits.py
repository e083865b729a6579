"""Refuses, by name and before a run begins, what a rank cannot do on a device other than the processor."""

from __future__ import annotations

from tllm.core.errors import ConfigError
from tllm.devices.choose import CPU, check_float64
from tllm.training.step.rank_groups import RankConfig

HINT = "leave it out, or train with --device cpu"


def check_device(config: RankConfig) -> None:
    """ConfigError for what the processor alone does."""
    device, job, plan = config.device, config.job, config.plan
    if device == CPU:
        return
    here = f"and this rank computes on {device}"
    check_float64(device)
    if plan.servers:
        raise ConfigError(f"the plan has servers={plan.servers}, which sum on processors, {here}", HINT)
    if job.rollouts is not None and job.deterministic:
        raise ConfigError(f"deterministic completions are those of the processor's kernels, {here}", HINT)
