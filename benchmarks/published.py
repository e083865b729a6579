"""What others published, beside what the planner's cost model predicts for the same machines, models and plans.

Nothing here was measured by us. `published/machines.toml` holds data-sheet numbers and one efficiency curve for each
kind of machine, `published/rows.toml` what was published and how it was configured. Rows that a curve was fitted on say
so; all others were only predicted.
"""

from __future__ import annotations

import argparse
import datetime
import json
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from tllm.planner.cluster.cluster_file import cluster_from
from tllm.planner.cluster.device import Cluster
from tllm.planner.cost.rank_work import TrainingFacts
from tllm.planner.cost.serving_load import ServingFacts
from tllm.planner.simulate.large_cluster import ordered
from tllm.planner.simulate.placed_plan import Placed
from tllm.planner.simulate.serving import predict_serving
from tllm.spec.families import spec_from_config
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan

HERE = Path(__file__).parent
GIVEN = HERE / "published"
CLOSE = 0.15
UNITS = {"tokens_per_second": "tokens/s", "milliseconds": "ms/token", "tflops": "Tflop/s/GPU"}
NOTES = """## What was chosen, and on what

- Data sheets: peaks, memory, bandwidths. Of a link's bandwidth 80 % (NVLink) or 90 % (network), of memory's 90 % count.
- For each kind of machine one curve, chosen by hand on the rows marked fit: a GPU's share of its peak for products as
  wide as a head and for large ones; a small machine's share of its peak or bandwidth, and seconds of an operation. A
  link of the Raspberry Pi and c3d rows has the latency of their two-node rows.
- For all: products are 1.1 times as slow beside messages; elementwise work passes five times over what a layer keeps,
  12 times where nothing is fused (chosen on the eager row of torchtitan); half of the messages of TP are beside
  products where the trainer does that; on Hopper FlashAttention-2 reaches 0.57 of 3's rate (its paper: half to two
  thirds).
- A token of a mixture of experts goes once to each rank that holds one of its experts, and experts are chosen alike
  often. A trainer that sends it once for each of its experts sends more, which is not in the model.
- Held out are all other rows. They were seen while the model was written, and that some parts of it exist (the rate of
  FlashAttention-2, the order of ranks, the slowdown of products) is owed to them; no curve was chosen on them.
- Not published, and assumed: the chunks of the Llama 3 paper's schedule (four), prompts of tLLM's table (64 tokens).
- Memory is no part of this: these trainers keep less than tllm does.
"""
BASE = {"collectives": "levels", "slowdown": 1.1}
CONFIG = {"rms_norm_eps": 1e-5, "rope_theta": 5e5, "max_position_embeddings": 1 << 20, "hidden_act": "silu"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", metavar="WORD", help="rows whose id has this in it; nothing is written")
    only = parser.parse_args().only
    rows = [predicted(row) for row in read("rows")["row"] if only in row["id"]]
    text = as_table(rows)
    print(text)
    if not only:
        write(rows, text)


@cache
def read(name: str) -> dict[str, Any]:
    return tomllib.loads((GIVEN / f"{name}.toml").read_text())


def predicted(row: dict[str, Any]) -> dict[str, Any]:
    """The row with `predicted`, in the unit that was published, and `error`, of the speed."""
    spec, cluster = spec_of(row["model"]), cluster_of(row)
    ((unit, value),) = row["published"].items()
    found = of_training(row, spec, cluster) if "train" in row else of_serving(row, spec, cluster)
    error = (value / found[unit] if unit == "milliseconds" else found[unit] / value) - 1
    return row | {"unit": unit, "value": value, "predicted": found[unit], "error": error} | {"all": found}


def spec_of(name: str) -> ModelSpec:
    return spec_from_config(CONFIG | read("models")[name])


def cluster_of(row: dict[str, Any]) -> Cluster:
    """So many nodes of each kind, and the link of the first unless the row names one."""
    kinds = read("machines")
    nodes = [kinds[kind]["node"] | {"name": kind, "count": count} for kind, count in row["machines"].items()]
    link = row.get("link") or kinds[next(iter(row["machines"]))].get("link")
    stack = {key: value for key, value in stack_of(row).items() if key != "order"}
    raw = {"node": nodes, "execution": BASE | stack | row.get("execution", {})}
    return cluster_from(raw | ({"link": link} if link else {}), GIVEN / "machines.toml")


def stack_of(row: dict[str, Any]) -> dict[str, Any]:
    """How its trainer works."""
    found: dict[str, Any] = read("rows")["stack"].get(row.get("stack"), {})
    return found


def of_training(row: dict[str, Any], spec: ModelSpec, cluster: Cluster) -> dict[str, float]:
    train = row["train"]
    facts = TrainingFacts(train["seq"], train["batch"], train["microbatch"], train.get("dtype", "bfloat16"))
    plan = Plan.parse(train["plan"], spec.num_layers)
    devices = ordered(plan, stack_of(row).get("order", "replicas"))
    placed = Placed(spec, plan, facts, cluster, devices, train.get("products"), cluster.execution)
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


def of_serving(row: dict[str, Any], spec: ModelSpec, cluster: Cluster) -> dict[str, float]:
    serve = dict(row["serve"])
    plan = Plan.parse(serve.pop("plan"), spec.num_layers)
    found = predict_serving(spec, plan, cluster, tuple(range(plan.world_size)), ServingFacts(**serve))
    return {"tokens_per_second": 1 / found.per_token, "milliseconds": 1e3 * found.per_token}


def as_table(rows: list[dict[str, Any]]) -> str:
    lines = ["| what | source | use | published | predicted | error | why |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        why = row.get("why", "" if abs(row["error"]) <= CLOSE else "NOT EXPLAINED")
        unit = UNITS[row["unit"]] + ("/GPU" if "train" in row and row["unit"] == "tokens_per_second" else "")
        cells = [row["what"], row["source"], row["use"], f"{row['value']:,g} {unit}", f"{row['predicted']:,.4g}"]
        lines.append("| " + " | ".join([*cells, f"{100 * row['error']:+.1f} %", why]) + " |")
    return "\n".join([*lines, "", summary(rows)])


def summary(rows: list[dict[str, Any]]) -> str:
    parts = []
    for use, word in (("fit", "fitted"), ("held", "held out")):
        errors = sorted(abs(row["error"]) for row in rows if row["use"] == use)
        if errors:
            close = sum(error <= CLOSE for error in errors)
            parts.append(
                f"{len(errors)} rows {word}: {close} within {CLOSE:.0%}, mean error {sum(errors) / len(errors):.1%}, "
                f"median {errors[len(errors) // 2]:.1%}, worst {errors[-1]:.1%}; the {close} alone: mean "
                f"{sum(errors[:close]) / max(1, close):.1%}"
            )
    return "\n\n".join(parts)


def write(rows: list[dict[str, Any]], text: str) -> None:
    today = datetime.date.today().isoformat()
    path = HERE / "results" / f"published_{today}.md"
    head = (
        f"# Published results, predicted\n\n- date: {today}\n- command: `python benchmarks/published.py`\n\n{__doc__}\n"
    )
    path.write_text(f"{head}\n{text}\n\n{NOTES}")
    path.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
    print(path.name)


if __name__ == "__main__":
    main()
