"""Tables that no curve was fitted on, beside the planner's predictions: `python -m benchmarks.planner.held_out`.

`published_rows/held_out.toml` has what was published and how it was configured. A table names a kind of machine, whose
curve was fitted elsewhere, and what its software does ([stack] of `rows.toml`); a row names a model, a plan and a
batch, and nothing else.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.planner import published
from benchmarks.report import markdown
from benchmarks.report.markdown import percent
from benchmarks.report.results import Page, write
from tllm.spec.plan import Plan

SEQ = 2048
"""Tokens of a row, unless it says otherwise."""

LISTED = 20
"""A table of at most so many rows has a line for each; a longer one is laid out by lengths."""

UNITS = {
    "tokens_per_second": "tokens/s/GPU",
    "seconds": "s",
    "counted_tflops": "Tflop/s/GPU",
    "neox_tflops": "Tflop/s/GPU",
}
USES = ("held", "known")


def main() -> None:
    tables = [predicted(table) for table in published.read("held_out")["table"]]
    write(page(tables), tables, published.computed())
    write(long_page(tables), [table for table in tables if len(table["rows"]) > LISTED], published.computed())


def predicted(table: dict[str, Any]) -> dict[str, Any]:
    """The table with `predicted` and `error` (of the speed) in each of its rows."""
    return table | {"rows": [row | _predicted(row, table) for row in table["rows"]]}


def _predicted(row: dict[str, Any], table: dict[str, Any]) -> dict[str, float]:
    train = {key: row[key] for key in ("plan", "batch", "microbatch")} | {"seq": row.get("seq", SEQ)}
    train |= {"products": table["products"]} if "products" in table else {}
    nodes = -(-devices(row) // published.read("machines")[table["machine"]]["node"]["devices"])
    whole = {"stack": table["stack"], "model": row["model"], "machines": {table["machine"]: nodes}, "train": train}
    found = published.predicted(whole | {"published": {table["unit"]: row["published"]}})
    return {"predicted": found["predicted"], "error": found["error"]}


def devices(row: dict[str, Any]) -> int:
    return Plan.parse(row["plan"], published.spec_of(row["model"]).num_layers).world_size


def errors(tables: Sequence[dict[str, Any]]) -> list[float]:
    """Absolute errors of all their rows."""
    return [abs(row["error"]) for table in tables for row in table["rows"]]


PURPOSE = """Whether the cost model holds for software and models that it was not fitted to. Nothing here was measured
by us. A machine's curve is that of [published results](published.md), fitted to other rows; software is described by
what it does, the same for all rows of a table, with numbers that are counted (bytes of each operation) and none that is
fitted."""
READING = """`known` tables were seen, with their errors, while the model of software was written; by the errors of
`held` ones nothing was chosen. {summary}

- **What software does** ([stack] of `rows.toml`): whether scores of attention go through memory for softmax and
  dropout; how often elementwise operations, the loss and gradients do; whether gradients are added up by the products;
  whether all-reduces begin before the backward pass is done; whether a stage waits for messages between stages.
- **An update** of the weights takes as long as its bytes: {update}.
- GPT models count as ones with rotated positions and without biases; a layer's operations were counted without.
- Tflop/s are what 2104.04473 counts (equation 3): all scores, and layers' forward passes twice. GPT-NeoX's program
  counted 6 for each parameter, and 60 for attention, until September 2023: 0.92 times as many."""
LIMITS = """Megatron-LM's rows without a pipeline are predicted about 9 % too fast: products 2,304 to 6,144 wide, and
kernels for softmax and dropout, are taken to reach what larger ones do. Rows of DeepSpeed's pipeline are too fast by 6
to 23 %: what its engine does between microbatches is not in the model, and GPT-NeoX-20B synchronizes after each layer.
NeMo 24.12 is an older release than the one that the curve of the H100 was fitted to ({nemo} off, all but two rows too
fast). A page does not always say which kernels it ran; rows of LLM Foundry on H100 are left out for that reason.
{far}"""


def page(tables: Sequence[dict[str, Any]]) -> Page:
    """Errors by table, and a line for each row of those that are not long."""
    lines = [["table", "source", "use", "rows", "mean error", "signed", "worst"], *map(_summary, tables)]
    titles = ["table", "model", "plan", "rows a step", "published", "predicted", "error"]
    rows = [_line(row, table) for table in tables if len(table["rows"]) <= LISTED for row in table["rows"]]
    body = f"{markdown.table(lines, left=3)}\n\n{markdown.table([titles, *rows], left=3)}"
    reading = READING.format(
        summary=" ".join(_in_words(use, [table for table in tables if table["use"] == use]) for use in USES),
        update="gradients read, weights and states read and written, and what passes over gradients before",
    )
    nemo = statistics.fmean(errors([table for table in tables if table["name"].startswith("NeMo")]))
    far = f"Of all {len(errors(tables))} rows {sum(e > 0.15 for e in errors(tables))} are further off than 15 %."
    limits = LIMITS.format(nemo=percent(nemo), far=far)
    return Page("planner", "held-out", "Planner: tables that nothing was fitted to", PURPOSE, body, reading, limits)


def _summary(table: dict[str, Any]) -> list[str]:
    signed, found = statistics.fmean(row["error"] for row in table["rows"]), errors([table])
    numbers = [str(len(found)), percent(statistics.fmean(found)), percent(signed, sign=True), percent(max(found))]
    return [table["name"], table["source"], table["use"], *numbers]


def _in_words(use: str, tables: Sequence[dict[str, Any]]) -> str:
    found = errors(tables)
    mean, worst = percent(statistics.fmean(found)), percent(max(found))
    return f"`{use}`: {len(found)} rows, {mean} off on average, {worst} at worst."


def _line(row: dict[str, Any], table: dict[str, Any]) -> list[str]:
    numbers = [f"{row['published']:,g} {UNITS[table['unit']]}", f"{row['predicted']:,.4g}"]
    plan = f"{row['plan']} ({devices(row)})"
    return [table["name"], row["model"], plan, str(row["batch"]), *numbers, percent(row["error"], sign=True)]


LONG_PURPOSE = """Each row of the long tables of [tables that nothing was fitted to](held-out.md): tokens/s of a GPU as
published, and as predicted. Nothing here was measured by us."""
LONG_READING = """A cell is what was published, and what is predicted. Rows of one model differ in tokens of a row, in
the microbatch, and in whether layers are computed again; the JSON has each plan."""
LONG_LIMITS = """{far} of {count} rows are further off than 15 %: {names}. Some of them are slower than rows of the same
table that differ little (the 760m with shorter rows, the 1b on 32 GPUs), which no model of this kind can say."""


def long_page(tables: Sequence[dict[str, Any]]) -> Page:
    """By model and number of GPUs, published and predicted for each length."""
    long = [table for table in tables if len(table["rows"]) > LISTED]
    lengths = sorted({row.get("seq", SEQ) for table in long for row in table["rows"]})
    lines = [["GPU", "model", "GPUs", *(f"{length:,}" for length in lengths)]]
    for table in long:
        cells: dict[tuple[str, int], dict[int, str]] = {}
        for row in table["rows"]:
            cell = f"{row['published']:,g} / {row['predicted']:,.0f}"
            of_length = cells.setdefault((row["model"], devices(row)), {})
            length = row.get("seq", SEQ)
            of_length[length] = f"{of_length[length]}, {cell}" if length in of_length else cell
        lines += [
            [table["machine"], model, str(count), *(found.get(length, "") for length in lengths)]
            for (model, count), found in cells.items()
        ]
    far = [
        f"{row['model']} on {devices(row)} {table['machine']}, {row.get('seq', SEQ):,} ({percent(row['error'], True)})"
        for table in long
        for row in table["rows"]
        if abs(row["error"]) > published.CLOSE
    ]
    limits = LONG_LIMITS.format(far=len(far), count=len(errors(long)), names=", ".join(far))
    body = markdown.table(lines, left=2)
    title = "Planner: LLM Foundry's tables, predicted"
    return Page("planner", "held-out-foundry", title, LONG_PURPOSE, body, LONG_READING, limits)


if __name__ == "__main__":
    main()
