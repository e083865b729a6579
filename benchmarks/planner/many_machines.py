"""The search for a training plan on up to 1,000 unlike machines: `python -m benchmarks.planner.many_machines`.

Machines are described and not measured: each is drawn, with a seed, from eight kinds of speed, memory and link. The
page says what one search takes on one core, and how far the plan it chooses is from a bound that no plan of the forms
that are searched can beat (`planner.bounds.training_bound`).
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import product
from typing import Any

from benchmarks.processes.python_module import environment, module_command
from benchmarks.report.markdown import percent, table
from benchmarks.report.results import Page, write
from tllm.cli.display.tables import brief
from tllm.planner.bounds.training_bound import least_step_seconds, relaxed_step_seconds
from tllm.planner.cluster.device import Cluster, Device, LinkSpeed, Tier
from tllm.planner.cost.rank_work import TrainingFacts
from tllm.planner.search.training_constraints import MICROBATCHES
from tllm.planner.search.training_search import best_training
from tllm.spec.model_spec import LayerSpec, ModelSpec, RopeSpec

SIZES = (32, 100, 316, 1000)
ROWS = (16, 64)
"""Rows of a step for each machine."""

SEQ_LEN = 1024
SEED = 23
SPEEDS = (4e12, 10e12)
"""Flop/s that products reach."""

MEMORIES = (16 * 2**30, 32 * 2**30)
LINKS = (LinkSpeed(1e-4, 1.25e9), LinkSpeed(2e-4, 3.125e8))
"""Of two sites, and the slower one between them too: 10 and 2.5 Gbit/s."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", type=int, nargs=2, metavar=("MACHINES", "ROWS"), help="only this search; prints JSON")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="machines (%(default)s)")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(searched(*args.one)))
        return
    rows = [of_process(size, each) for each in ROWS for size in args.sizes]
    write(page(rows), rows)


def of_process(machines: int, rows: int) -> dict[str, Any]:
    words = module_command("planner.many_machines", "--one", str(machines), str(rows))
    done = subprocess.run(words, env=environment(), stdout=subprocess.PIPE, text=True, check=True)
    print(done.stdout, file=sys.stderr, flush=True)
    row: dict[str, Any] = json.loads(done.stdout)
    return row


def model() -> ModelSpec:
    """1.6 billion parameters in 32 layers."""
    return ModelSpec(
        family="llama",
        vocab_size=32_000,
        hidden_size=2048,
        intermediate_size=5632,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        layers=tuple(LayerSpec(RopeSpec(10_000.0, 64), None, None) for _ in range(32)),
        norm_eps=1e-5,
        activation="silu",
        max_model_len=4096,
        attention_scale=64**-0.5,
    )


def cluster_of(machines: int, seed: int = SEED) -> Cluster:
    """So many machines of the eight kinds, each drawn by itself."""
    draw = random.Random(seed)
    kinds = list(product(SPEEDS, MEMORIES, range(len(LINKS))))
    drawn = [draw.choice(kinds) for _ in range(machines)]
    devices = {
        (speed, memory): Device(
            memory, (("bfloat16", ((1.0, speed / 20), (1024.0, speed))),), speed / 40, peaks=(("bfloat16", 2 * speed),)
        )
        for speed, memory in product(SPEEDS, MEMORIES)
    }
    return Cluster(
        names=tuple(f"machine{i}" for i in range(machines)),
        devices=tuple(devices[speed, memory] for speed, memory, _ in drawn),
        node_of=tuple(range(machines)),
        inside=(None,) * machines,
        default=LinkSpeed(1e-3, LINKS[1].bandwidth),
        tiers=tuple(
            Tier(f"site{site}", tuple(0 if there == site else -1 for _, _, there in drawn), link)
            for site, link in enumerate(LINKS)
        ),
    )


def searched(machines: int, rows: int) -> dict[str, Any]:
    """One search: what it takes, and its plan beside the bound."""
    spec, cluster = model(), cluster_of(machines)
    facts = TrainingFacts(SEQ_LEN, rows * machines, dtype="bfloat16")
    begun, used = time.perf_counter(), time.process_time()
    found = best_training(spec, cluster, facts)
    seconds, processor = time.perf_counter() - begun, time.process_time() - used
    relaxed = relaxed_step_seconds(spec, cluster, facts, MICROBATCHES)
    used_before = time.process_time()
    bound = least_step_seconds(spec, cluster, facts, MICROBATCHES)
    for_bound = time.process_time() - used_before
    best = found.choices[0]
    predicted, plan = best.predicted, best.placed.plan
    return {
        "machines": machines,
        "rows": rows,
        "seconds": seconds,
        "processor": processor,
        "steps": found.steps,
        "relaxed": relaxed,
        "bound": bound,
        "bound_processor": for_bound,
        "predicted": predicted.seconds,
        "parts": {name: getattr(predicted, name) for name in ("compute", "layers", "pipeline", "gradients")},
        "used": len(best.placed.devices),
        "microbatch_size": best.placed.facts.microbatch_size,
        "brief": brief(plan),
        "plan": str(plan),
    }


def page(rows: Sequence[dict[str, Any]]) -> Page:
    titles = ["rows each", "machines", "search, processor s", "bound, s", "chosen plan, s", "above the bound"]
    titles += ["products alone, s"]
    lines = [[*titles, "products", "bubble", "messages", "plan"]]
    for row in rows:
        bound, relaxed, parts = row["bound"], row["relaxed"], row["parts"]
        messages = parts["layers"] + parts["gradients"]
        shares = (parts["compute"] - relaxed, parts["pipeline"], messages)
        lines.append(
            [
                str(row["rows"]),
                f"{row['machines']:,}",
                f"{row['processor']:.1f}",
                f"{bound:.2f}",
                f"{row['predicted']:.2f}",
                percent((row["predicted"] - bound) / bound),
                f"{relaxed:.2f}",
                *(percent(share / relaxed) for share in shares),
                f"`{row['brief']}`",
            ]
        )
    largest = max(rows, key=lambda row: (row["machines"], row["rows"]))
    gaps = [(row["predicted"] - row["bound"]) / row["bound"] for row in rows]
    return Page(
        "planner",
        "many-machines",
        f"The planner's search on up to {largest['machines']:,} unlike machines",
        "What the search for a training plan takes on one core, and how far its plan is from a bound that no plan "
        "of the forms that are searched can beat: it knows that layers, microbatches and replicas are whole, that all "
        "replicas have the same cut and microbatches of one size, that pipelines fill, and what messages of gradients "
        "are not hidden (`planner.bounds`). "
        "Products alone are all flops spread over all machines by speed, with no "
        f"message and no waiting. A model of 1.6 billion parameters in 32 layers, rows of {SEQ_LEN} tokens, bfloat16. "
        "Each machine is one of eight kinds, drawn with a seed: 4 or 10 Tflop/s, 16 or 32 GiB, at a site of 10 or of "
        "2.5 Gbit/s (2.5 Gbit/s between sites).",
        table(lines),
        f"- The longest search took {max(row['processor'] for row in rows):.1f} seconds of processor time, the longest "
        f"bound {max(row['bound_processor'] for row in rows):.1f}.\n"
        f"- The chosen plans are {percent(min(gaps))} to {percent(max(gaps))} above the bound. The last columns say "
        "what they take beyond products alone: products of the busiest stage beyond its fair part (whole layers, whole "
        "microbatches, machines of one stage that wait for a slower one), its waiting for other stages, and messages "
        "that nothing hides.",
        "Predictions alone: no step was run. Within 3 % of the bound: "
        f"{sum(gap <= 0.03 for gap in gaps)} of {len(gaps)} searches. Some of the gap is the bound's: in it any part "
        "of a replica counts, an embedding has no gradients, and interleaved schedules wait little. The search is not "
        "exact: it looks at the promising arrangements alone.",
    )


if __name__ == "__main__":
    main()
