"""The page of `benchmarks.devices.training`: `python -m benchmarks.devices.training_report FIGURES.jsonl --commit C`.

Devices are lent for minutes and reports are written elsewhere, so the runs append lines to a file (`--out`) that this
makes a page of. Beside each of our runs stands what the planner predicts of it, from single products and attention as
`benchmarks.devices.training_pieces` measured them on the same device.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.devices.figures import read_figures, report_parser
from benchmarks.devices.training import PROMISED
from benchmarks.devices.training_work import Work
from benchmarks.report.markdown import percent, table
from benchmarks.report.results import Page, Provenance, write
from tllm.planner.cluster.cluster_file import cluster_from
from tllm.planner.cluster.execution import TLLM
from tllm.planner.cost.rank_work import TrainingFacts
from tllm.planner.simulate.placed_plan import PlacedPlan
from tllm.spec.plan import Plan

PIECES: dict[str, dict[str, Any]] = {
    "H200": {
        "memory": "141 GB",
        "memory_bandwidth": "4.23 TB/s",  # a copy
        # Shares of the peak, forward and backward: attention with heads of 64 and of 128, the products of an MLP.
        "efficiency": [[64, 384 / 989], [128, 489 / 989], [2048, 716 / 989]],
        "operation": "2 us",
    }
}
"""What single pieces of work reach, by a word of the device's name (2026-11-26, torch 2.11)."""

PURPOSE = """Whether one GPU trains as fast as it can: tokens per second and MFU of the real trainer on random weights
and rows, beside a plain loop over `transformers`' Llama (sdpa, fused AdamW, the gradient's norm clipped) with the same
shape, rows and dtype. The shape "1b" is that of Llama 3.2 1B's layers (16, 2048 wide, 32 heads of 64 over 8, an MLP of
8192) with 32,000 words, embeddings and head apart; "1b-128k" has its 128,256 words."""

MEANING = """- MFU is 6 flops for each weight that a token meets and attention as masked, over 989 Tflop/s, the
  dense peak of the data sheet; "unmasked" counts attention as torchtitan does, as if every token met each of its row.
- torchtitan publishes no run of one GPU and none of this shape. Its nearest: Llama 3.1 8B in rows of 8,192 on 8 H100 of
  500 W, bfloat16, FSDP and `torch.compile`: 6,667 tokens/s a GPU (its page of 2024-12-26), which is 39 % as it counts;
  on 64 A100 58.2 % of theirs (its page of 2024). The unmasked column is the one to hold beside these. They pay for
  messages and for recomputing a part, which one GPU does not; narrow layers and heads of 64 cost one GPU what they do
  not pay: an 8B's products are wider.
- The planner's column is its prediction of the same step from single pieces of work: products at 716 Tflop/s and
  attention at 384, forward and backward, and a copy at 4.23 TB/s; elementwise operations pass five times over what a
  layer keeps, as for published runs. No figure of a step was used for it. The optimizer, 9 ms here, was not measured
  apart and counts as nothing.
- Of the step's 230 ms, by its profile, products are 133 (768 Tflop/s, 78 % of the peak), attention is 45 (345, by
  cuDNN), AdamW 9, gates 8, the norms of layers 6, all else 17; and 8 to 12 are gaps."""

LIMITS = """One GPU and few shapes; of each run {steps} steps are timed, once, so how far a second run is off is not
known. Nothing here is of several GPUs, whose messages go through the host. Heads of 64 are the worst for attention: a
product of theirs fills half of what a tensor core takes, and with heads of 128 the same call reaches 489 Tflop/s in
place of 384. The first step takes four seconds, while cuDNN's plans and Triton's kernels are made. The loop beside it
is `transformers` as it comes, not compiled; its weights, gradients and AdamW's states have 16 bits throughout, where
ours are float32 beside weights of 16 bits, so its optimizer moves fewer bytes. {missing}"""


def main() -> None:
    parser = report_parser(__doc__)
    parser.add_argument("--torch", required=True, help="its version")
    options = parser.parse_args()
    runs = read_figures(options.figures)
    for run in runs:
        run["given"].pop("out", None)  # a path of the machine that ran
        if (seconds := predicted(run)) is not None:
            run["predicted_seconds"] = seconds
    device = runs[0]["device"].partition(" ")[2]
    made = Provenance(
        options.date,
        options.commit,
        f"{device}, torch {options.torch}",
        "python -m benchmarks.devices.training --out FIGURES.jsonl",
    )
    write(page(runs), runs, made)


def page(runs: list[dict[str, Any]]) -> Page:
    timed = sorted({int(run["given"]["steps"]) for run in runs})
    limits = LIMITS.format(steps=" or ".join(map(str, timed)), missing=missing(runs))
    title = f"Training on one {runs[0]['device'].split()[-1]}"
    return Page("devices", "training", title, PURPOSE, as_table(runs), MEANING, limits)


def as_table(runs: list[dict[str, Any]]) -> str:
    lines = [["shape, rows, dtype", "by", "tokens/s", "step", "MFU", "unmasked", "peak memory", "planner's step"]]
    for run in runs:
        ((name, found),) = run["figures"].items()
        seconds, guess = found["step_seconds"], run.get("predicted_seconds")
        by = name if run["given"].get("kernels") != "off" else f"{name}, `TLLM_KERNELS=off`"
        lines.append(
            [
                named(work_of(run)),
                by,
                f"{found['tokens_per_second']:,.0f}",
                f"{seconds * 1e3:.1f} ms",
                percent(found["mfu"]),
                percent(found["mfu_unmasked"]),
                f"{found['memory'] / 2**30:.1f} GiB",
                "" if guess is None else f"{guess * 1e3:.1f} ms, {percent(guess / seconds - 1, sign=True)}",
            ]
        )
    return table(lines, left=2)


def named(work: Work) -> str:
    what = f"{work.shape}, {work.rows} x {work.length:,}, {work.dtype}"
    return what + (", packed" if work.packed else "") + (f", {work.microbatches} at a time" * (work.microbatches > 1))


def work_of(run: dict[str, Any]) -> Work:
    given = run["given"]
    length, rows, microbatches = (int(given[key]) for key in ("length", "rows", "microbatches"))
    return Work(given["shape"], length, rows, microbatches, given["dtype"], given["packed"] == "True")


def predicted(run: dict[str, Any]) -> float | None:
    """The planner's seconds of the step, for runs of ours with one document in a row."""
    work, given = work_of(run), run["given"]
    pieces = next((known for word, known in PIECES.items() if word in run["device"]), None)
    if "tllm" not in run["figures"] or work.packed or given.get("kernels") == "off" or pieces is None:
        return None
    peak = next(flops for word, flops in PROMISED.items() if word in run["device"])
    node = pieces | {"name": "gpu", "flops": {work.dtype: peak}}
    cluster = cluster_from({"node": [node]}, Path())
    facts = TrainingFacts(work.length, work.rows * work.microbatches, work.rows, work.dtype)
    plan = Plan.parse(given["plan"], work.spec.num_layers)
    return PlacedPlan(work.spec, plan, facts, cluster, (0,), None, TLLM).predict().seconds


def missing(runs: list[dict[str, Any]]) -> str:
    """Which of the runs that belong on this page are not in the file."""
    works, off = [work_of(run) for run in runs], any(run["given"].get("kernels") == "off" for run in runs)
    there = {
        "packed rows": any(work.packed for work in works),
        "128,256 words": any(work.shape == "1b-128k" for work in works),
        "torch's own steps (`TLLM_KERNELS=off`)": off,
    }
    absent = [what for what, is_there in there.items() if not is_there]
    return f"Not run yet: {', '.join(absent)}." if absent else ""


if __name__ == "__main__":
    main()
