"""Tables that nothing was fitted to: what stacks say is counted here, and the committed page is what the model says."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace

import pytest

from benchmarks.planner import held_out, published
from tllm.planner.cost.activations import layer_bytes, logits_bytes
from tllm.planner.cost.rank_work import TrainingFacts, rank_works
from tllm.spec.plan import Plan

TABLES = published.read("held_out")["table"]
STACKS = published.read("rows")["stack"]

B, F, WIDE = 2, 4, 4
"""Bytes of a number, widths of the MLP in widths of the model, and bytes of a float32."""

LAYER_NORM = (2 * B, 5 * B)
"""Bytes of an element forward, and backward: the gradient and the input are read, the result is written; both are read
again for the gradients of weights."""

FOUNDRY = [
    *[LAYER_NORM] * 2,
    *[(3 * B, 3 * B)] * 2,  # the two sums of a layer, and of gradients where the stream divides
    (2 * F * B, 3 * F * B),  # GELU
]
MEGATRON = [
    *[LAYER_NORM] * 2,
    (6 * B, 3 * B),  # biases of q, k and v, and their gradients
    (2 * B, 2 * B),  # heads merged
    (0, 6 * B),  # gradients of q, k and v put together
    *[(3 * B + 1, 3 * B + 1)] * 2,  # bias, dropout and sum; backward also the gradient of the bias
    (2 * F * B, 4 * F * B),  # bias and GELU; backward also the gradient of the bias
    *[(0, 3 * B)] * 2,  # sums of gradients where the stream divides
]
TURNED = 1 / 4
"""Of each head's columns in GPT-NeoX-20B."""
NEOX = [
    *[LAYER_NORM] * 2,
    (6 * B, 3 * B),  # biases of q, k and v, and their gradients
    # q and k: halves negated and put together, products with cosines and sines added, both parts put together; backward
    # each of four slices is laid into zeros, and these are added up
    *[((2 + 6 * TURNED) * B, (7 + 14 * TURNED) * B)] * 2,
    (2 * B, 2 * B),  # heads merged
    (0, 6 * B),  # gradients of q, k and v put together
    (2 * B + 1, 3 * B + 1),  # bias and dropout of attention; backward also the gradient of the bias
    (3 * B + 1, 3 * B + 1),  # those of the MLP, and the sum of both
    (3 * B, 0),  # the sum with the stream, once both are summed over ranks
    (2 * F * B, 4 * F * B),  # bias and GELU; backward also the gradient of the bias
    *[(0, 3 * B)] * 2,  # sums of gradients where the stream divides
]
LOSS = {
    "foundry": (B + WIDE) + 2 * WIDE + WIDE + 3 * WIDE + (WIDE + B),  # cast, log-softmax; gradient, of it, cast
    "megatron": (B + WIDE) + (1 + 2 + 2 + 1 + 2) * WIDE + 2 * WIDE + (WIDE + B),  # cast, max to softmax; scaled, cast
}
LOSS["neox"] = LOSS["megatron"]


@pytest.mark.parametrize(("stack", "operations"), [("foundry", FOUNDRY), ("megatron", MEGATRON), ("neox", NEOX)])
def test_what_operations_move_is_counted(stack: str, operations: list[tuple[int, int]]) -> None:
    spec, facts = published.spec_of("gpt-7.5b"), TrainingFacts(2048, 1, 1, "bfloat16")
    work = rank_works(spec, Plan.parse("pp=1", spec.num_layers), facts)[0]
    by_steps = replace(work.batch, is_lean=False)
    kept = layer_bytes(spec, spec.layers[0], work.cut, by_steps) / (2048 * spec.hidden_size)
    touches = sum(early + late for early, late in operations) / kept
    logits = logits_bytes(spec, work.cut, by_steps) / (2048 * spec.vocab_size)
    said = [of for name, of in STACKS.items() if stack in name and "loss_touches" in of]
    assert len(said) == (5 if stack == "megatron" else 1)
    for of in said:
        assert of["touches"] == pytest.approx(touches, abs=0.05)
        assert of["loss_touches"] == pytest.approx(LOSS[stack] / logits, abs=0.3)


def test_gpt_neox_counts_the_flops_of_its_own_program() -> None:
    """Six for each parameter and 60 for attention, as it had them from 2021 until September 2023; no pass twice."""
    spec = published.spec_of("gpt-neox-20b")
    P, D, L = 20_556_201_984, 6144, 44  # P: as its model card says, with biases and norms
    assert published.neox_flops(spec, 2048) == pytest.approx(6 * P + 60 * 2048 * D * L, rel=2e-4)
    assert published.neox_flops(spec, 2048) / published.counted_flops(spec, 2048) == pytest.approx(0.92, abs=1e-3)


def test_a_row_names_a_model_a_plan_and_a_batch() -> None:
    """No number is given for a row, and a table names a stack and a machine whose curve other rows fitted."""
    fitted = {name for name, kind in published.read("machines").items() if kind["fit"]}
    like = {"a100-40gb": "a100", "a100-40gb-4-hca": "a100", "a100-omni-path": "a100"}
    for table in TABLES:
        assert set(table) <= {"name", "source", "use", "stack", "machine", "products", "unit", "rows"}
        assert table["use"] in held_out.USES and table["stack"] in STACKS
        machine = like.get(table["machine"], table["machine"])
        assert machine in fitted
        curves = [published.read("machines")[name]["node"]["efficiency"] for name in (machine, table["machine"])]
        assert curves[0] == curves[1]
        for row in table["rows"]:
            assert set(row) <= {"model", "plan", "batch", "microbatch", "seq", "published"}


def test_the_committed_page_is_what_the_model_says() -> None:
    committed = json.loads((published.HERE / "results" / "held-out.json").read_text())
    assert [table["name"] for table in committed] == [table["name"] for table in TABLES]
    for table, known in zip(TABLES, committed, strict=True):
        assert [row["plan"] for row in known["rows"]] == [row["plan"] for row in table["rows"]]
        quick = [row for row in known["rows"] if "pp=" not in row["plan"] or "pp=1," in row["plan"]][::8]
        for row, other in zip(quick, held_out.predicted(table | {"rows": quick})["rows"], strict=True):
            assert row["predicted"] == pytest.approx(other["predicted"], rel=1e-6)
    held = held_out.errors([table for table in committed if table["use"] == "held"])
    assert len(held) == 20 and statistics.fmean(held) < 0.08, "the aim for tables that are not seen"
