from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.models.families import save_model
from tllm.cluster.messages import Assign, RankAddress
from tllm.cluster.settings import EngineSettings
from tllm.comm.links.link import LocalLink
from tllm.core.errors import AuthError, LinkClosed
from tllm.node.roles import serving_rank
from tllm.node.roles.role import check_speaker
from tllm.node.roles.serving_rank import ServingRank, wires
from tllm.node.weights.model_folder import ModelFolder
from tllm.spec.plan import Plan, Wire


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        ("pp=1", []),
        ("pp=2", [(1, 0), (0, 1)]),
        ("pp=3", [(2, 0), (0, 1), (1, 2)]),
        ("tp=2", [(0, 1), (1, 0)]),
        ("pp=2,tp=1+2", [(1, 2), (2, 1), (1, 0), (0, 1)]),
    ],
)
def test_the_wires_of_a_plan(plan: str, expected: list[tuple[int, int]]) -> None:
    found = wires(Plan.parse(plan, 6))
    assert sorted(found) == sorted(Wire(*pair) for pair in expected)
    assert len(found) == len(set(found))


def test_a_node_speaks_for_its_own_rank_only() -> None:
    certificate = {"subjectAltName": (("DNS", "east"),)}
    check_speaker(certificate, "east", 1)
    with pytest.raises(AuthError, match="east spoke for rank 1, which is on west"):
        check_speaker(certificate, "west", 1)
    for nobody in (None, {}):
        with pytest.raises(AuthError, match="nobody spoke"):
            check_speaker(nobody, "east", 1)


def test_a_rank_that_cannot_take_its_part_lets_go_of_its_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others, who waited for it, could take no part of the next epoch until their links' 30 s were over."""
    save_model("llama", tmp_path)
    plan = Plan.parse("pp=3", 4)
    links = {wire: LocalLink(wire.source, wire.target) for wire in wires(plan)}

    def lose(*_: Any) -> str:
        raise LinkClosed("rank 1 went away")

    monkeypatch.setattr(serving_rank, "connect_wires", lambda *_: links)
    monkeypatch.setattr(serving_rank, "sum_in_memory", lose)
    sizes: Any = dict(num_pages=1, page_size=16, max_model_len=16, max_num_seqs=1, max_num_batched_tokens=16)
    assign = Assign(
        cluster="c",
        epoch=1,
        rank=0,
        plan=plan,
        places=tuple(RankAddress(f"n{rank}", "127.0.0.1", 1) for rank in range(3)),
        config=(tmp_path / "config.json").read_text(),
        settings=EngineSettings(**sizes, dtype="float32", threads=0, link_seconds=1.0),
        folder=str(tmp_path),
        files=ModelFolder(tmp_path).files,
    )
    unused: Any = None
    fetch: Any = SimpleNamespace(found=lambda folder: None)
    with pytest.raises(LinkClosed, match="rank 1 went away"):
        ServingRank(assign, unused, unused, fetch)
    assert all(link.is_over for link in links.values())
