"""Results that others published, beside the planner's predictions: `python -m benchmarks.planner.published`.

Nothing here was measured by us. `published_rows/machines.toml` holds data-sheet numbers and one efficiency curve for
each kind of machine, `published_rows/rows.toml` what was published and how it was configured. Rows to which a curve
was fitted say so; all others were only predicted.
"""

from __future__ import annotations

import argparse
import re
import statistics
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.report import markdown
from benchmarks.report.markdown import percent
from benchmarks.report.results import Page, Provenance, write
from tllm.planner.cluster.cluster_file import cluster_from
from tllm.planner.cluster.device import Cluster
from tllm.planner.cost.rank_work import TrainingFacts
from tllm.planner.cost.serving_load import ServingFacts
from tllm.planner.simulate.large_cluster import device_order
from tllm.planner.simulate.placed_plan import PlacedPlan
from tllm.planner.simulate.serving import predict_serving
from tllm.spec.families import spec_from_config
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan

HERE = Path(__file__).parent
GIVEN = HERE / "published_rows"
CLOSE = 0.15
UNITS = {"tokens_per_second": "tokens/s", "milliseconds": "ms/token", "tflops": "Tflop/s/GPU"}
SECONDS = ("milliseconds", "seconds")
"""Units in which a faster row is a smaller number."""
BASE = {"collectives": "levels", "slowdown": 1.1}
CONFIG = {"rms_norm_eps": 1e-5, "rope_theta": 5e5, "max_position_embeddings": 1 << 20, "hidden_act": "silu"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", metavar="WORD", help="rows whose id has this in it; nothing is written")
    only = parser.parse_args().only
    rows = [predicted(row) for row in read("rows")["row"] if only in row["id"]]
    print(as_table(rows))
    if not only:
        write(page(rows), rows, computed())


def computed() -> Provenance:
    """Of a page on which no figure depends on the machine."""
    return replace(Provenance.of_this_run(), processor="none: computed, not measured")


@cache
def read(name: str) -> dict[str, Any]:
    return tomllib.loads((GIVEN / f"{name}.toml").read_text())


def predicted(row: dict[str, Any]) -> dict[str, Any]:
    """The row with `predicted`, in the unit that was published, and `error`, of the speed."""
    spec, cluster = spec_of(row["model"]), cluster_of(row)
    ((unit, value),) = row["published"].items()
    found = of_training(row, spec, cluster) if "train" in row else of_serving(row, spec, cluster)
    if unit in COUNTED:
        found[unit] = found["tokens_per_second"] * COUNTED[unit](spec, row["train"]["seq"]) / 1e12
    error = (value / found[unit] if unit in SECONDS else found[unit] / value) - 1
    return row | {"unit": unit, "value": value, "predicted": found[unit], "error": error} | {"all": found}


def spec_of(name: str) -> ModelSpec:
    return spec_from_config(CONFIG | read("models")[name])


def cluster_of(row: dict[str, Any]) -> Cluster:
    """The row's nodes, joined by the link of the first kind unless the row names another."""
    kinds = read("machines")
    nodes = [kinds[kind]["node"] | {"name": kind, "count": count} for kind, count in row["machines"].items()]
    link = row.get("link") or kinds[next(iter(row["machines"]))].get("link")
    stack = {key: value for key, value in stack_of(row).items() if key != "order"}
    raw = {"node": nodes, "execution": BASE | stack | row.get("execution", {})}
    return cluster_from(raw | ({"link": link} if link else {}), GIVEN / "machines.toml")


def stack_of(row: dict[str, Any]) -> dict[str, Any]:
    """How the row's trainer works."""
    found: dict[str, Any] = read("rows")["stack"].get(row.get("stack"), {})
    return found


def of_training(row: dict[str, Any], spec: ModelSpec, cluster: Cluster) -> dict[str, float]:
    train = row["train"]
    facts = TrainingFacts(train["seq"], train["batch"], train["microbatch"], train.get("dtype", "bfloat16"))
    plan = Plan.parse(train["plan"], spec.num_layers)
    devices = device_order(plan, stack_of(row).get("order", "replicas"))
    placed = PlacedPlan(spec, plan, facts, cluster, devices, train.get("products"), cluster.execution)
    found = placed.predict()
    each = found.tokens_per_second / plan.world_size
    flops = placed.mfu(found.seconds) * placed.peak() / plan.world_size
    return {
        "tokens_per_second": each,
        "tflops": flops / 1e12,
        "seconds": found.seconds,
        "compute": found.compute,
        "layers": found.layers,
        "pipeline": found.pipeline,
        "gradients": found.gradients,
    }


def counted_flops(spec: ModelSpec, seq_len: int) -> float:
    """Of a token, as Megatron-LM counts them (2104.04473, equation 3): all scores, a forward pass a second time."""
    L, D, V = spec.num_layers, spec.hidden_size, spec.vocab_size
    return 96 * L * D**2 * (1 + seq_len / (6 * D) + V / (16 * L * D))


def neox_flops(spec: ModelSpec, seq_len: int) -> float:
    """Of a token, as gpt-neox counted them until September 2023 (megatron/logging.py; its issue 981): six for each
    parameter, no forward pass a second time, and five times what scores take."""
    L, D, V = spec.num_layers, spec.hidden_size, spec.vocab_size
    return 6 * (12 * L * D**2 + 2 * V * D) + 60 * seq_len * D * L


COUNTED = {"counted_tflops": counted_flops, "neox_tflops": neox_flops}
"""What a token is said to take, by the unit."""


def of_serving(row: dict[str, Any], spec: ModelSpec, cluster: Cluster) -> dict[str, float]:
    serve = dict(row["serve"])
    plan = Plan.parse(serve.pop("plan"), spec.num_layers)
    found = predict_serving(spec, plan, cluster, tuple(range(plan.world_size)), ServingFacts(**serve))
    return {"tokens_per_second": 1 / found.per_token, "milliseconds": 1e3 * found.per_token}


TITLES = ["what", "source", "use", "published", "predicted", "error", "why"]


def as_table(rows: list[dict[str, Any]]) -> str:
    """Every row, as it is printed, with the summary of all."""
    return "\n".join([markdown.table([TITLES, *map(cells, rows)], left=3, comment=True), "", summary(rows)])


def cells(row: dict[str, Any]) -> list[str]:
    why = row.get("why", "" if abs(row["error"]) <= CLOSE else "NOT EXPLAINED")
    unit = UNITS[row["unit"]] + ("/GPU" if "train" in row and row["unit"] == "tokens_per_second" else "")
    numbers = [f"{row['value']:,g} {unit}", f"{row['predicted']:,.4g}", percent(row["error"], sign=True)]
    return [row["what"], row["source"], row["use"], *numbers, why]


def summary(rows: list[dict[str, Any]]) -> str:
    parts = []
    for use, word in (("fit", "fitted"), ("held", "held out")):
        errors = sorted(abs(row["error"]) for row in rows if row["use"] == use)
        if errors:
            close = sum(error <= CLOSE for error in errors)
            parts.append(
                f"{len(errors)} rows {word}: {close} within 15 %, mean error {percent(statistics.fmean(errors))}, "
                f"median {percent(errors[len(errors) // 2])}, worst {percent(errors[-1])}; the {close} alone: mean "
                f"{percent(sum(errors[:close]) / max(1, close))}."
            )
    return "\n\n".join(parts)


PURPOSE = """Whether the cost model also holds for machines that we do not have: GPU clusters and small computers, for
which others published tokens per second. Nothing here was measured by us. Each prediction comes from data sheets, from
one efficiency curve for each kind of machine, and from the published configuration."""
READING = """`fitted` rows are those on which a machine's curve was chosen; all others are held out. They were seen
while the model was written, and some parts of it exist because of them (the rate of FlashAttention-2, the order of
ranks, the slowdown of products beside messages); no curve was chosen on them.

{summary}

- Data sheets give peaks, memory and bandwidths. Of a link's bandwidth 80 % (NVLink) or 90 % (network) count, of
  memory's 90 %.
- A curve is a GPU's share of its peak for products as wide as an attention head and for large ones, or a small
  machine's share of its peak and bandwidth and its seconds for an operation. Links of the Raspberry Pi and c3d rows
  have the latency of their two-node rows.
- For all: products are 1.1 times as slow beside messages; elementwise work passes five times over what a layer keeps,
  12 times where nothing is fused (chosen on torchtitan's eager row); half of the messages of tensor parallelism run
  beside products where the trainer does that; on Hopper, FlashAttention-2 reaches 0.57 of FlashAttention-3's rate.
- Not published, and assumed: the chunks of the Llama 3 paper's schedule (four), prompts of tLLM's table (64 tokens)."""
LIMITS = """The second table has every held-out row that is further off than 15 %, with the reason. For mixtures of
experts the release of the software decides more than the machine, and what permuting and dropping tokens costs is not
in the model. A token of such a model goes once to each rank that holds one of its experts, and experts are chosen alike
often. Memory is no part of this: these trainers keep less than tllm does."""


def page(rows: list[dict[str, Any]]) -> Page:
    """The page: errors by publisher, and each row that is further off than `CLOSE`."""
    publishers: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        publishers.setdefault(publisher(row), []).append(row)
    lines = [["published by", "rows", "fitted", "within 15 %", "mean error", "worst"]]
    for name, some in publishers.items():
        errors = [abs(row["error"]) for row in some]
        counts = [len(some), sum(row["use"] == "fit" for row in some), sum(error <= CLOSE for error in errors)]
        lines.append([name, *map(str, counts), percent(statistics.fmean(errors)), percent(max(errors))])
    far = [cells(row) for row in spelt_out(rows) if abs(row["error"]) > CLOSE]
    misses = [TITLES[:2] + TITLES[3:], *([*row[:2], *row[3:]] for row in far)]
    body = f"{markdown.table(lines)}\n\n{markdown.table(misses, left=2, comment=True)}"
    reading = READING.format(summary=summary(rows))
    return Page("planner", "published", "Planner: published results, predicted", PURPOSE, body, reading, LIMITS)


def spelt_out(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows; one that is `the same` as a row above it names that row, which may not stand in the table."""
    of = ""
    for row in rows:
        of = of if row["what"].startswith("the same") else row["what"]
        yield row | {"what": row["what"] if of == row["what"] else f"{of}; {row['what']}"}


def publisher(row: dict[str, Any]) -> str:
    """The source without its release, table and date."""
    return re.split(r",| README| \d+\.\d", row["source"], maxsplit=1)[0]


if __name__ == "__main__":
    main()
