"""Training on one device: `python -m benchmarks.devices.training [--shape 1b --length 4096 --rows 4] [--loop eager]`.

The real `RankTrainer` on random weights and rows; with `--loop` a plain loop over `transformers`' Llama in its place.
Each step is told when it is done, so that a run which is cut off has told what it found.

    MFU = 6 N + attention flops a token, times tokens a second, over the device's peak

N are the weights that a token is multiplied by: all but the table of embeddings. Attention counts as masked,
6 L D (S + 1) for rows of one document; beside it stands the MFU as torchtitan counts it, with 12 L D S.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch

from benchmarks.devices.figures import append
from benchmarks.devices.training_peer import peer_run
from benchmarks.devices.training_profile import told_kernels, told_waits
from benchmarks.devices.training_work import SHAPES, WeightsOfDevice, Work
from tllm.devices.choose import choose_device
from tllm.devices.memory import device_name, forget_peak, peak_memory, wait_for
from tllm.kernels.library import CHOICE
from tllm.spec.plan import Plan
from tllm.training.job.initial_model import open_initial_model
from tllm.training.measure.peak_flops import matrix_peak
from tllm.training.report.events import RunEvent, RunStepped
from tllm.training.step.rank_groups import Groups, RankConfig
from tllm.training.trainer import RankTrainer
from tllm.weights.dtypes import torch_dtype

PROMISED = {"H100": 989e12, "H200": 989e12}
"""Dense flop/s in 16 bits that the maker's data sheets promise, by a word of the device's name."""

Figures = dict[str, Any]


class Enough(Exception):
    """The run has taken the steps that are wanted."""


class Stopwatch:
    """Tells each step, times those after the warm-up as a whole, and then has one watched more, if asked to."""

    def __init__(self, device: torch.device, warm_up: int, steps: int, profiled: bool) -> None:
        self.device, self.warm_up, self.steps, self.profiled = device, warm_up, steps, profiled
        self.losses: list[float] = []
        self.seconds, self.peak = 0.0, 0
        self._before = self._began = time.perf_counter()
        self._watching = ExitStack()

    def __call__(self, event: RunEvent) -> None:
        if not isinstance(event, RunStepped):
            return
        self.losses.append(event.record.loss)
        done, last = len(self.losses), self.warm_up + self.steps
        if done in (self.warm_up, last):
            wait_for(self.device)
        now = time.perf_counter()
        print(f"step {done}: {(now - self._before) * 1e3:.1f} ms, loss {event.record.loss:.3f}", flush=True)
        self._before = now
        if done == self.warm_up:
            forget_peak(self.device)
            self._began = now
        elif done == last:
            self.seconds, self.peak = (now - self._began) / self.steps, peak_memory(self.device)
            if not self.profiled:
                raise Enough
            self._watching.enter_context(told_waits())
            self._watching.enter_context(told_kernels())
        elif done > last:
            self._watching.close()
            raise Enough


def our_figures(work: Work, device: torch.device, options: argparse.Namespace) -> Figures:
    """The trainer's."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="tllm-") as folder:
        job = work.job(Path(folder))
        beginning = open_initial_model(job)
        config = RankConfig(
            job, Plan.parse(options.plan, beginning.spec.num_layers), beginning.spec, 0, Groups(), device
        )
        trainer = RankTrainer(config, WeightsOfDevice(), beginning)
        print(f"built in {time.perf_counter() - began:.1f} s", flush=True)
        try:
            trainer.prepare()
            print(f"prepared in {time.perf_counter() - began:.1f} s", flush=True)
            watch = Stopwatch(device, options.warm_up, options.steps, options.profile)
            with suppress(Enough):
                trainer.run(watch)
        finally:
            trainer.close()
    return figures(work, device, watch.seconds, watch.peak) | {"losses": watch.losses}


def figures(work: Work, device: torch.device, seconds: float, memory: int) -> Figures:
    peak = peak_flops(device, work.dtype)
    return {
        "tokens_per_second": work.tokens / seconds,
        "step_seconds": seconds,
        "mfu": work.flops / seconds / peak,
        "mfu_unmasked": work.flops_unmasked / seconds / peak,
        "memory": memory,
    }


def peak_flops(device: torch.device, dtype: str) -> float:
    """What the data sheet promises, else the best product found."""
    name = device_name(device)
    promised = [flops for word, flops in PROMISED.items() if word in name and dtype != "float32"]
    return promised[0] if promised else matrix_peak(torch_dtype(dtype), 0.5, device)


def line(name: str, found: Figures) -> str:
    return (
        f"{name}: {found['tokens_per_second']:,.0f} tokens/s, step {found['step_seconds'] * 1e3:.1f} ms, "
        f"MFU {found['mfu']:.1%} ({found['mfu_unmasked']:.1%} unmasked), peak {found['memory'] / 2**30:.1f} GiB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--shape", default="1b", choices=tuple(SHAPES))
    parser.add_argument("--length", type=int, default=4096, help="tokens of a row")
    parser.add_argument("--rows", type=int, default=4, help="of a microbatch")
    parser.add_argument("--microbatches", type=int, default=1, help="of a step")
    parser.add_argument("--packed", action="store_true", help="rows of several documents of unlike lengths")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--plan", default="pp=1", help="for one process: recompute=layer and the like")
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="kernels, gaps and waits of one step more")
    parser.add_argument("--loop", default="tllm", choices=("tllm", "eager", "compiled"), help="the others: the peer's")
    parser.add_argument("--out", type=Path, help="append the figures to this file, a line of JSON")
    options = parser.parse_args()
    device = choose_device(options.device)
    work = Work(options.shape, options.length, options.rows, options.microbatches, options.dtype, options.packed)
    print(device_name(device), torch.__version__, work, flush=True)
    if options.loop == "tllm":
        name, found = "tllm", our_figures(work, device, options)
    else:
        name = f"transformers, {options.loop}"
        run = peer_run(work, device, options.warm_up, options.steps, options.loop == "compiled")
        found = figures(work, device, run.seconds, run.memory) | {"losses": run.losses}
    print(line(name, found), flush=True)
    given = {key: str(value) for key, value in vars(options).items() if key != "out"}
    given["kernels"] = os.environ.get(CHOICE, "")
    append(options.out, {"device": device_name(device), "given": given, "figures": {name: found}})


if __name__ == "__main__":
    main()
