"""A comparison in one process: the truth is the model, a damaged weight is found, and what a verdict says."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch

from tests.support.models.families import save_model
from tests.support.models.layouts import logits_under, spec_of
from tllm.comm.collectives.group import solo
from tllm.engine.assembly import make_stage
from tllm.engine.schedule.limits import check_batch
from tllm.model.transformer import Transformer, build
from tllm.node.roles.comparison_record import (
    Compared,
    Difference,
    HeldPart,
    Record,
    compare,
    difference,
    digest,
    fingerprints,
    part_of,
    place_of,
)
from tllm.node.roles.reference_model import DECODED, batches_of, limits_for, write_reference
from tllm.node.roles.verify_rank import held_part, play
from tllm.node.verify.verdict import ROUNDING_64, Damaged, Differs, Pass, judge
from tllm.node.verify.verify import as_pass
from tllm.parallel.mesh import mesh_of, whole
from tllm.parallel.shard import shard_of
from tllm.spec.plan import Plan
from tllm.weights.byte_source import LocalFiles
from tllm.weights.load import load, part
from tllm.weights.safetensors_index import Index

IDS = (1, 17, 100, 5, 66, 42, 8, 9, 77, 2, 3, 55)
EXACT = torch.float64


@pytest.fixture(scope="module", params=["llama", "qwen3_moe", "llama_dynamic", "llama_mha_tied_bias"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    save_model(request.param, made)
    return made


@pytest.fixture
def truth(folder: Path, tmp_path: Path) -> Path:
    spec, limits = spec_of(folder), limits_for(spec_of(folder), len(IDS))
    write_reference(folder, tmp_path, spec, EXACT, batches_of(IDS, limits), limits)
    return tmp_path


def run_whole(folder: Path, name: str = "", by: float = 0.0) -> tuple[Record, Transformer]:
    """The model on one rank, as a rank serves it; one element of one tensor may be off."""
    spec, limits = spec_of(folder), limits_for(spec_of(folder), len(IDS))
    plan = Plan.parse("pp=1", spec.num_layers)
    mesh = mesh_of(spec, plan, 0, solo())
    model = build(spec, mesh, EXACT, "meta")
    source = LocalFiles(folder)
    load(model, Index.read(source), source, EXACT)
    if name:
        parameter, target = next(
            (p, piece.target) for p in model.parameters() for piece in shard_of(p).pieces if piece.name == name
        )
        part(parameter.detach(), target)[0, 0] += by
    record = Record(model)
    play(make_stage(model, mesh, plan, None, limits), batches_of(IDS, limits))
    return record, model


def held(model: Transformer) -> HeldPart:
    return held_part(whole(model.spec), model, batches_of(IDS, limits_for(model.spec, len(IDS))))


def test_the_truth_is_what_the_plain_model_gives(folder: Path, truth: Path) -> None:
    """Its last logits are those of all tokens at once, with no cache."""
    written = torch.frombuffer(bytearray((truth / "logits.bin").read_bytes()), dtype=EXACT).view(1 + DECODED, -1)
    plain = logits_under(folder, "pp=1", torch.tensor(IDS), EXACT)[-1 - DECODED :]
    if spec_of(folder).scales_by_length:  # there a token's rotation goes by the length when it was computed
        written, plain = written[:1], logits_under(folder, "pp=1", torch.tensor(IDS[:-DECODED]), EXACT)[-1:]
    torch.testing.assert_close(written, plain, rtol=1e-12, atol=1e-12)


def test_the_model_is_equal_to_itself(folder: Path, truth: Path) -> None:
    record, model = run_whole(folder)
    differences = compare(record, truth, held(model))
    layers = [f"layer {number}" for number in range(spec_of(folder).num_layers)]
    assert sorted(one.what for one in differences) == ["embedding", *layers, "logits"]
    assert all(one.equal and one.largest == 0 and one.scale > 0 for one in differences)
    found = as_pass([Compared(0, differences, fingerprints(model))], folder, "float64", len(layers))
    assert found == Pass("float64", (), ())
    assert judge(found, None).equal


def test_layers_with_keys_of_others_are_compared_one_by_one(tmp_path: Path) -> None:
    """The reference makes their keys, and each layer's own input, by products of another shape: equal to rounding."""
    model, truth = tmp_path / "model", tmp_path / "truth"
    truth.mkdir()
    save_model("gemma4_e2b", model)
    spec, limits = spec_of(model), limits_for(spec_of(model), len(IDS))
    write_reference(model, truth, spec, EXACT, batches_of(IDS, limits), limits)
    record, made = run_whole(model)
    differences = compare(record, truth, held(made))
    assert len(differences) == 1 + spec.num_layers + 1
    assert max(one.relative for one in differences) < ROUNDING_64
    assert judge(as_pass([Compared(0, differences, fingerprints(made))], model, "float64", spec.num_layers), None).equal
    spoiled, made = run_whole(model, "model.layers.1.self_attn.v_proj.weight", 1.0)
    found = as_pass([Compared(0, compare(spoiled, truth, held(made)), fingerprints(made))], model, "float64", 4)
    assert judge(found, None).layer == "layer 1"


@pytest.mark.parametrize("layer", [0, 2])
def test_a_damaged_weight_is_named_and_so_is_where_it_shows(folder: Path, truth: Path, layer: int) -> None:
    name = f"model.layers.{layer}.self_attn.v_proj.weight"
    record, model = run_whole(folder, name, 3.0)
    differences = compare(record, truth, held(model))
    found = as_pass([Compared(0, differences, fingerprints(model))], folder, "float64", 4)
    assert [(one.layer, one.name) for one in found.damaged] == [(f"layer {layer}", name)]
    assert found.differs[0].what == f"layer {layer}", "no layer before it"
    assert len(found.differs) == 4 - layer + 1, "all after it, and the logits"
    verdict = judge(found, None)
    assert not verdict.equal
    assert (verdict.layer, verdict.rank) == (f"layer {layer}", 0)
    assert verdict.parameter == name


def test_a_bit_that_changes_nothing_is_found_by_its_digest(folder: Path, truth: Path) -> None:
    """The table's row of token 0, which no prompt holds."""
    record, model = run_whole(folder, "model.embed_tokens.weight", 1e-9)
    found = as_pass([Compared(0, compare(record, truth, held(model)), fingerprints(model))], folder, "float64", 4)
    if not spec_of(folder).tied:
        assert not found.differs
    assert judge(found, None).parameter == "model.embed_tokens.weight"


def test_batches_are_a_prompt_and_then_token_by_token() -> None:
    spec = type("Spec", (), dict(vocab_size=200, delta=None))
    for count in (1, 2, 5, 40, 2500):
        limits = limits_for(spec, count)  # type: ignore[arg-type]
        ids = tuple(i % 200 for i in range(count))
        batches = batches_of(ids, limits)
        for batch in batches:
            check_batch(batch, limits)
        assert tuple(token for batch in batches for token in batch.token_ids) == ids
        assert [batch.entries[0].start for batch in batches] == [
            sum(len(one.token_ids) for one in batches[:n]) for n in range(len(batches))
        ]
        assert all(len(batch.token_ids) == 1 for batch in batches[-min(DECODED, count - 1) :] if count > 1)
    assert [len(batch.token_ids) for batch in batches] == [1024, 1024, 448, 1, 1, 1, 1]


def test_a_value_that_is_no_number_differs_infinitely() -> None:
    one = torch.tensor([[1.0, 2.0]])
    assert difference("layer 0", one, one).equal
    found = difference("layer 0", torch.tensor([[1.0, float("nan")]]), one)
    assert not found.equal
    assert found.relative == float("inf")
    assert difference("layer 0", torch.tensor([[1.0, 1.5]]), one).relative == 0.25


def test_a_digest_is_of_the_elements_in_order() -> None:
    values = torch.arange(6.0).view(2, 3)
    assert digest(values) == hashlib.sha256(values.numpy().tobytes()).hexdigest()
    assert digest(values.t()) == digest(values.t().contiguous()) != digest(values)
    assert digest(values[:, 1:]) == digest(values[:, 1:].clone())


def test_parts_stand_in_the_models_order() -> None:
    names = ["lm_head.weight", "model.layers.10.mlp.up_proj.weight", "model.norm.weight", "model.embed_tokens.weight"]
    parts = [part_of(name) for name in names]
    assert parts == ["logits", "layer 10", "logits", "embedding"]
    assert [place_of(part, 12) for part in parts] == [13, 11, 13, 0]


def differs(relative: float, what: str = "layer 1", place: int = 2) -> Differs:
    return Differs(0, what, place, relative, relative)


def one_pass(dtype: str, *relative: float) -> Pass:
    return Pass(dtype, tuple(differs(one) for one in relative), ())


@pytest.mark.parametrize(
    ("first", "exact", "equal", "words"),
    [
        (one_pass("bfloat16"), None, True, "the same bits in bfloat16"),
        (one_pass("bfloat16", 0.02), one_pass("float64", 1e-14), True, "equal within rounding"),
        (one_pass("bfloat16", 0.02), one_pass("float64", 2 * ROUNDING_64), False, "layer 1 on rank 0 differs"),
        (one_pass("bfloat16", 0.02), one_pass("float64", float("inf")), False, "not equal"),
        (one_pass("bfloat16", 0.02), one_pass("float64"), True, "in float64 it is 0"),
        (one_pass("bfloat16", 0.02), None, True, "no memory to compare in float64"),
        (one_pass("bfloat16", 0.9), None, False, "in bfloat16"),
        (one_pass("float32", 1e-6), None, True, "within what float32 rounds"),
        (one_pass("float32", 1e-4), None, False, "in float32"),
        (one_pass("float32", float("nan")), None, False, "in float32"),
    ],
)
def test_what_a_verdict_says(first: Pass, exact: Pass | None, equal: bool, words: str) -> None:
    verdict = judge(first, exact)
    assert verdict.equal is equal
    assert words in " ".join(verdict.words)
    assert bool(verdict.layer) is not equal


@pytest.mark.parametrize(
    ("relative", "exactly", "is_routed", "equal"),
    [
        (0.9, 1e-16, False, False),
        (0.9, 2e-15, False, True),  # the model makes ten times as much of a rounding
        (0.9, 1e-16, True, True),  # a token that went to another expert
        (float("inf"), 1e-16, True, False),
        (float("inf"), 1e-11, False, False),
        (float("nan"), 1e-11, False, False),
    ],
)
def test_more_than_rounding_in_its_own_dtype_is_a_fault_though_float64_agrees(
    relative: float, exactly: float, is_routed: bool, equal: bool
) -> None:
    verdict = judge(one_pass("bfloat16", relative), one_pass("float64", exactly), is_routed)
    assert verdict.equal is equal
    assert equal or verdict.layer == "layer 1"
    assert equal or "the fault is in what computes in bfloat16" in verdict.words[1]


def test_damage_counts_whatever_the_layers_give() -> None:
    damaged = (Damaged(2, "layer 1", "model.layers.1.mlp.up_proj.weight", "[0:4, 0:8]"),)
    for one in (Pass("float32", (), damaged), Pass("float32", (differs(1e-7),), damaged)):
        verdict = judge(one, None)
        assert not verdict.equal
        assert (verdict.rank, verdict.layer, verdict.parameter) == (2, "layer 1", "model.layers.1.mlp.up_proj.weight")
        assert "[0:4, 0:8] otherwise than the file" in verdict.words[0]
    assert not judge(one_pass("float32", 1e-7), Pass("float64", (), damaged)).equal


def test_the_first_fault_is_the_first_of_the_model(folder: Path) -> None:
    found = [
        Compared(0, (Difference("layer 0", True, 0.0, 2.0), Difference("layer 3", False, 1.0, 2.0)), ()),
        Compared(1, (Difference("logits", False, 1.0, 2.0), Difference("layer 1", False, 1.0, 2.0)), ()),
    ]
    assert [(one.rank, one.what) for one in as_pass(found, folder, "float32", 4).differs] == [
        (1, "layer 1"),
        (0, "layer 3"),
        (1, "logits"),
    ]
