"""Weights in chunks: only changed ones are named, others than their hashes say are not written, parts make wholes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.models.families import save_model
from tests.support.models.layouts import in_threads
from tests.support.training.local_links import local_links
from tllm.comm.collectives.group import Group, solo
from tllm.core.errors import FrameError
from tllm.model.transformer import Transformer
from tllm.parallel.mesh import mesh_of, whole
from tllm.spec.families import spec_from_config
from tllm.spec.hf_config import read_config
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan
from tllm.training.rollout_servers import weight_chunks
from tllm.training.rollout_servers.gathered_weights import GatheredWeights
from tllm.training.rollout_servers.held_weights import HeldWeights
from tllm.training.rollout_servers.weight_chunks import ChunkTable
from tllm.training.state.initial_weights import fill_randomly
from tllm.training.step.model_chunks import build_chunks
from tllm.training.step.rank_groups import groups_of

FAMILIES = ("llama", "qwen3_moe", "qwen3_next_moe", "gpt_oss_moe")


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that tensors of tests have several, the last of them short."""
    monkeypatch.setattr(weight_chunks, "CHUNK_BYTES", 1000)


def spec_of(family: str, folder: Path) -> ModelSpec:
    save_model(family, folder)
    return spec_from_config(read_config(folder))


def whole_model(spec: ModelSpec, seed: int, dtype: torch.dtype = torch.float32) -> Transformer:
    (model,) = build_chunks(spec, whole(spec), [range(spec.num_layers)], dtype)
    fill_randomly(model.parameters(), spec, seed)
    return model


def tensors_of(model: Transformer) -> dict[str, Tensor]:
    """By hand: the model's own, brought together alone."""
    gathered = GatheredWeights(groups_of(Plan.parse("pp=1", model.spec.num_layers), 0, {}).replica, [model])
    gathered.gather(tensors := gathered.room())
    return tensors


def hashes_by_hand(tensors: dict[str, Tensor]) -> bytes:
    found = b""
    for name in sorted(tensors):
        content = tensors[name].contiguous().view(torch.uint8).numpy().tobytes()
        found += b"".join(hashlib.sha256(content[at : at + 1000]).digest() for at in range(0, len(content), 1000))
    return found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("plan_text", ["pp=2", "tp=2", "pp=2,tp=1+2"])
def test_the_parts_of_a_replica_make_the_whole_tensors(family: str, plan_text: str, tmp_path: Path) -> None:
    spec = spec_of(family, tmp_path)
    plan = Plan.parse(plan_text, spec.num_layers)
    links = local_links(plan)

    def rank(number: int) -> dict[str, Tensor]:
        chunks, replica = parts_of(number)
        gathered = GatheredWeights(replica, chunks)
        for chunk in chunks:  # after it was made, as a run does
            fill_randomly(chunk.parameters(), spec, seed=3)
        gathered.gather(tensors := {} if number else gathered.room())
        return tensors

    def parts_of(number: int) -> tuple[Sequence[Transformer], Group]:
        groups = groups_of(plan, number, {wire: link for wire, link in links.items() if number in wire[:2]})
        return build_chunks(spec, mesh_of(spec, plan, number, groups.tp), plan.runs, torch.float32), groups.replica

    got, *others = in_threads([partial(rank, number) for number in range(plan.world_size)])
    want = tensors_of(whole_model(spec, seed=3))
    assert not any(others) and got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)
    table = ChunkTable.of(want)
    assert table.hashes(want) == hashes_by_hand(want) == table.hashes(got)
    assert table == ChunkTable.of(got)

    def held_by(number: int, seed: int = 4) -> tuple[HeldWeights, Sequence[Transformer]]:
        """What a rank of a team that samples holds, and finds of it with the others."""
        chunks, replica = parts_of(number)
        for chunk in chunks:
            fill_randomly(chunk.parameters(), spec, seed)
        return HeldWeights(chunks, replica, is_filled=seed != 0), chunks

    ranks = in_threads([partial(held_by, number) for number in range(plan.world_size)])
    (first, _), *_ = ranks
    alone = HeldWeights([whole_model(spec, seed=4)], solo())
    assert first.root == alone.root and first.table == alone.table
    lacking = first.want(table.digest, hashes := table.hashes(want))
    assert lacking == alone.want(table.digest, hashes)
    sent = [first.of_rank(lacking, number) for number in range(plan.world_size)]
    assert set().union(*sent) == set(lacking) and ("tp" in plan_text or not set(sent[0]) & set(sent[1]))
    for (server, _), numbers in zip(ranks, sent, strict=True):
        server.put(numbers, [content_of(table, want, number) for number in numbers])
    first.confirm(lacking)
    assert first.root == table.root(hashes) and not first.lacking
    for number, (_, chunks) in enumerate(ranks):
        theirs, _ = parts_of(number)
        fill_randomly((one for chunk in theirs for one in chunk.parameters()), spec, seed=3)
        held = [one for chunk in chunks for one in chunk.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(held, theirs[0].parameters(), strict=True))
    empty, *_ = in_threads([partial(held_by, number, min(number, 1) * 4) for number in range(plan.world_size)])
    assert len(empty[0].want(table.digest, hashes)) == len(table.places), "one has no values"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_lacking_makes_a_model_another(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    spec = spec_of(family, tmp_path)
    held, theirs = whole_model(spec, 1, dtype), whole_model(spec, 2, dtype)
    tensors = tensors_of(theirs)
    table = ChunkTable.of(tensors)
    server = HeldWeights([held], solo())
    assert server.table.digest == table.digest
    lacking = server.want(table.digest, hashes := table.hashes(tensors))
    assert 0 < len(lacking) < len(table.places), "norms are the same"
    put(server, table, tensors, lacking)
    assert server.root == table.root(hashes) and not server.lacking
    assert all(torch.equal(a, b) for a, b in zip(held.parameters(), theirs.parameters(), strict=True))
    name = max(tensors, key=lambda one: tensors[one].nbytes)
    tensors[name].view(-1)[0] += 1
    (changed,) = server.want(table.digest, table.hashes(tensors))
    assert table.places[changed] == (name, 0, 1000)


def test_of_a_tensor_only_the_chunks_that_come_are_written(tmp_path: Path) -> None:
    spec = spec_of("llama", tmp_path)
    held, tensors = whole_model(spec, 1), tensors_of(whole_model(spec, 2))
    table, server = ChunkTable.of(tensors), HeldWeights([held], solo())
    lacking = server.want(table.digest, table.hashes(tensors))
    number = next(one for one in lacking if table.places[one].start)
    for parameter in held.parameters():
        parameter.data.fill_(7)
    server.put([number], [content_of(table, tensors, number)])
    place = table.places[number]
    assert sum(int((one != 7).sum()) for one in held.parameters()) == (place.stop - place.start) // 4
    server.confirm([number])
    assert server.lacking == [one for one in lacking if one != number], "no other chunk counts as held"


def test_a_table_is_another_where_a_name_a_shape_or_a_type_is() -> None:
    plain = torch.empty(2, 3)
    tables = [{"w": plain}, {"v": plain}, {"w": plain.t().contiguous()}, {"w": plain.int()}]
    assert len({ChunkTable.of(tensors).digest for tensors in tables}) == len(tables)


def put(server: HeldWeights, table: ChunkTable, tensors: dict[str, Tensor], numbers: list[int]) -> None:
    contents = [content_of(table, tensors, number) for number in numbers]
    server.check(numbers, contents)
    server.put(numbers, contents)
    server.confirm(numbers)


def content_of(table: ChunkTable, tensors: dict[str, Tensor], number: int) -> bytes:
    name, start, stop = table.places[number]
    return tensors[name].view(-1).view(torch.uint8).numpy().tobytes()[start:stop]


def test_bytes_that_are_not_what_their_hashes_say_are_not_written(tmp_path: Path) -> None:
    spec = spec_of("llama", tmp_path)
    held, tensors = whole_model(spec, 1), tensors_of(whole_model(spec, 2))
    table, server = ChunkTable.of(tensors), HeldWeights([held], solo())
    before, root = [one.clone() for one in held.parameters()], server.root
    with pytest.raises(FrameError, match="without hashes"):
        server.check([0], [b""])
    lacking = server.want(table.digest, table.hashes(tensors))
    good = content_of(table, tensors, lacking[0])
    for numbers, contents in (
        ([lacking[0]], [bytes(len(good))]),
        ([lacking[0]], [good[:-1]]),
        ([lacking[1], lacking[0]], [good, good]),
        ([-1], [good]),
        ([len(table.places)], [good]),
        ([lacking[0]], [good, good]),
    ):
        with pytest.raises(FrameError, match=r"chunk|SHA-256"):
            server.check(numbers, contents)
    assert server.root == root and all(torch.equal(a, b) for a, b in zip(before, held.parameters(), strict=True))
    with pytest.raises(FrameError, match="other names, shapes or types"):
        server.want(table.digest[::-1], table.hashes(tensors))
    with pytest.raises(FrameError, match=r"the weights of the run are \d+ chunks and those of this server \d+"):
        server.want(table.digest, table.hashes(tensors)[:-32])
