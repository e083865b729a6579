"""What `tllm train --dry-run` prints: the plan, the memory of each rank, and seconds of a step."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import NamedTuple

from tllm.cli.display.tensor_modes import show_tensor_modes
from tllm.cli.display.training_plans import facts_of, show_plan, show_prediction
from tllm.cli.planning.plan_chooser import TrainingChooser
from tllm.core.errors import counted
from tllm.core.memory import amount
from tllm.node.machine.process_facts import cores
from tllm.planner.memory.training_memory import training_bytes
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan
from tllm.training.checkpoint.durable_disk import DurableDisk
from tllm.training.job.job import Job


class Computing(NamedTuple):
    """What a worker here would compute with: threads, or what `--device` names for the process at this place."""

    threads: int | None
    device: str = "cpu"
    place: int = 0


def dry_run(
    job: Job,
    plan: Plan,
    spec: ModelSpec,
    computing: Computing,
    lasting: bool,
    chooser: TrainingChooser | None,
    measuring: str,
) -> None:
    """Print what a run would do. A plan that is still to be chosen is chosen by a saved survey; without one, `plan`
    stands in for it. `measuring` is the command that measures machines for this very job."""
    survey = chooser.recalled() if chooser is not None else None
    if chooser is not None and survey is not None:
        print(f"as {chooser.path} was measured, on {' '.join(node.node for node in survey.nodes)}:")
        best = chooser.decide(survey)
        chosen, plan = chooser.resolved.job, best.placed.plan
        print("\n" + show_plan(chosen, plan, spec, lasting) + _disk_here(chosen, plan, spec), flush=True)
        return
    if chooser is not None and chooser.given is None:
        print(_unknown(job, plan, chooser), flush=True)
    modes = show_tensor_modes(job, plan, spec)
    print(show_plan(job, plan, spec, lasting) + f"\n\n{modes}".rstrip() + _disk_here(job, plan, spec), flush=True)
    print("\n" + _predicted_here(job, plan, spec, computing, measuring), flush=True)


def _disk_here(job: Job, plan: Plan, spec: ModelSpec) -> str:
    """What a save takes of disks, and what the one here has; "" where nobody knows before the run."""
    saved = sum(rank.saving for rank in training_bytes(spec, plan, facts_of(job, spec)))
    folder = Path(job.output_dir).absolute()
    there = next(path for path in (folder, *folder.parents) if path.is_dir())
    free = DurableDisk().free(there)
    if not saved or free is None:
        return ""
    at_once = job.save_total_limit + 1
    return f"\n\na save: {amount(saved)} at most, up to {at_once} at once; {there} here has {amount(free)} free"


def _unknown(job: Job, plan: Plan, chooser: TrainingChooser) -> str:
    model = str(job.model_name_or_path or job.config_name)
    asked = ["--batch", str(job.global_batch_size), "--seq", str(job.seq_len), "--dtype", job.dtype]
    choose = ["tllm", "plan", model, "--goal", "train"]
    measured = ["--nodes", str(plan.world_size), "--keep", job.output_dir]
    return (
        f"no plan is given, and {chooser.path} is no survey of this model on "
        f"{counted(plan.world_size, 'machine')}: the run "
        "measures them when they are here, and then chooses. To choose now, measure or describe them:\n\n"
        f"  {shlex.join([*choose, *measured, *asked])}\n"
        f"  {shlex.join([*choose, '--cluster', 'cluster.toml', *asked])}\n\n"
        "What follows is a replica on each, which only shows sizes.\n"
    )


def _predicted_here(job: Job, plan: Plan, spec: ModelSpec, computing: Computing, measuring: str) -> str:
    import torch

    from tllm.devices.choose import CPU, choose_device, compute_on
    from tllm.devices.memory import device_name
    from tllm.training.measure.pass_speed import layer_speed
    from tllm.weights.dtypes import torch_dtype

    device = choose_device(computing.device, computing.place)
    compute_on(device)
    threads = computing.threads or max(1, cores() // plan.world_size)
    torch.set_num_threads(threads)
    speed = layer_speed(spec, torch_dtype(job.dtype), job.seq_len, job.microbatch_size, device)
    where = counted(threads, "thread") if device == CPU else device_name(device)
    return show_prediction(job, plan, spec, speed, where, measuring)
