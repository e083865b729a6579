"""`Batches`: the rows of step k are what the job says, for any ranks, after any restart."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

from tests.unit.text import kits
from tllm.core.errors import ConfigError
from tllm.training.data import batches as data
from tllm.training.data.batches import Batches, DataConfig
from tllm.training.data.packing import PackedRow


def rows_file(folder: Path, lengths: list[int], name: str = "rows.jsonl") -> str:
    """Row i is the ids 1000 * i, 1000 * i + 1, …: each token says where it comes from."""
    path = folder / name
    path.write_text(
        "".join(json.dumps({"input_ids": [1000 * i + j for j in range(n)]}) + "\n" for i, n in enumerate(lengths))
    )
    return str(path)


def tokens(rows: list[PackedRow]) -> list[int]:
    return [int(token) for row in rows for token in row.input_ids]


def some_lengths(count: int, longest: int = 40) -> list[int]:
    return [1 + (37 * i * i + 11 * i) % longest for i in range(count)]


def test_unpacked_and_unshuffled_step_k_has_rows_kb_to_kb_plus_b(tmp_path: Path) -> None:
    config = DataConfig((rows_file(tmp_path, some_lengths(20)),), 64, 4, shuffle=False, packing=False)
    batches = Batches(config)
    for step in (0, 1, 2, 4, 3, 0):
        found = batches.step(step)
        assert [row.row_numbers for row in found] == [(4 * step + i,) for i in range(4)]
        assert [row.place for row in found] == [0, 1, 2, 3]
    row = batches.step(2)[1]
    length = some_lengths(20)[9]
    assert row.input_ids.tolist() == [9000 + j for j in range(length)]
    assert row.labels.tolist() == [*(9000 + j for j in range(1, length)), -100]
    assert row.positions.tolist() == list(range(length))
    assert row.lengths == (length,)
    assert row.input_ids.dtype == row.labels.dtype == row.positions.dtype == np.int64
    assert batches.step(5)[0].row_numbers == (0,)  # the next epoch


def test_packed_rows_keep_their_borders(tmp_path: Path) -> None:
    batches = Batches(DataConfig((rows_file(tmp_path, some_lengths(200)),), 32, 8, seed=5))
    rows = [row for step in range(6) for row in batches.step(step)]
    assert max(len(row.lengths) for row in rows) > 1
    for row in rows:
        assert len(row.input_ids) == len(row.labels) == sum(row.lengths) <= 32
        at = 0
        for piece, length in zip(row.pieces, row.lengths, strict=True):
            ids, labels = row.input_ids[at : at + length], row.labels[at : at + length]
            assert ids.tolist() == [1000 * piece.row + j for j in range(piece.start, piece.stop)]
            last = -100 if piece.stop == some_lengths(200)[piece.row] else 1000 * piece.row + piece.stop
            assert labels.tolist() == [*ids[1:].tolist(), last]  # a split document goes on to its next token
            assert row.positions[at : at + length].tolist() == list(range(length))
            at += length


@pytest.mark.parametrize("packing", [True, False])
def test_ranks_and_shares_only_deal_the_same_rows(tmp_path: Path, packing: bool) -> None:
    config = DataConfig((rows_file(tmp_path, some_lengths(90)),), 32, 12, packing=packing)
    whole = Batches(config)
    for shares in ((1, 1), (1, 1, 1, 1), (3, 1), (5, 4, 3), (1,) * 20):
        ranks = [Batches(config) for _ in shares]
        for step in range(3):
            dealt = [batches.step(step, rank, shares) for rank, batches in enumerate(ranks)]
            assert [row.pieces for part in dealt for row in part] == whole.plan(step)
            assert tokens([row for part in dealt for row in part]) == tokens(whole.step(step))
            assert [row.place for part in dealt for row in part] == list(range(12))
        assert ranks[0].state(3) == ranks[-1].state(3) == whole.state(3)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_each_token_once_an_epoch_under_kills_and_changes_of_ranks(tmp_path: Path, packing: bool, seed: int) -> None:
    """Each life has its own ranks, shares and batch; what was done after the last save is lost with the weights."""
    chance = random.Random(seed)
    lengths = some_lengths(60)
    file = rows_file(tmp_path, lengths)
    learned: Counter[int] = Counter()
    saved, done = "", False
    while not done:
        size = chance.randint(1, 9)
        batches = Batches(DataConfig((file,), 24, size, packing=packing, epochs=2))
        step = batches.restore(json.loads(saved)) if saved else 0
        shares = [chance.randint(1, 3) for _ in range(chance.randint(1, 5))]
        since: Counter[int] = Counter()
        for _ in range(chance.randint(1, 6)):
            for rank in range(len(shares)):
                since.update(tokens(batches.step(step, rank, shares)))
            done = not batches.plan(step)
            batches.plan(step + chance.randint(0, 2))  # read ahead, which a save must not count
            step += 1
            if done or chance.random() < 0.5:
                saved, since, learned = json.dumps(batches.state(step)), Counter(), learned + since
        batches.close()
    assert learned == {1000 * i + j: 2 for i, length in enumerate(lengths) for j in range(length)}


def test_a_run_that_stopped_goes_on_as_if_it_had_not(tmp_path: Path) -> None:
    config = DataConfig((rows_file(tmp_path, some_lengths(50)),), 32, 6)
    quiet, first, second = Batches(config), Batches(config), Batches(config)
    first.step(16)
    assert second.restore(json.loads(json.dumps(first.state(17)))) == 17
    for step in (17, 18, 30, 17):
        assert second.plan(step) == quiet.plan(step)
    with pytest.raises(ConfigError, match="step 16 lies before step 17"):
        second.plan(16)
    assert second.state(40)["epoch"] == quiet.state(40)["epoch"] > 0


def test_the_end_of_the_last_epoch(tmp_path: Path) -> None:
    config = DataConfig((rows_file(tmp_path, [4] * 10),), 8, 4, shuffle=False, packing=False, epochs=1)
    batches = Batches(config)
    assert [len(batches.step(step)) for step in range(5)] == [4, 4, 2, 0, 0]
    assert batches.step(3, 1, (1, 1)) == []


def test_what_changes_the_order_cannot_change_on_the_way(tmp_path: Path) -> None:
    file = rows_file(tmp_path, [4] * 10)
    state = Batches(DataConfig((file,), 8, 2)).state(0)
    changed: list[dict[str, Any]] = [{"seed": 1}, {"seq_len": 9}, {"packing": False}, {"weights": (1.0,)}]
    for change in changed:
        (name,) = change
        with pytest.raises(ConfigError, match=f"{name} was .* when the run began"):
            Batches(DataConfig(**{"files": (file,), "seq_len": 8, "global_batch_size": 2, **change})).restore(state)
    with pytest.raises(ConfigError, match="tokenizer, template or add_eos was"):
        Batches(DataConfig((file,), 8, 2), kits.both()["byte-level"]).restore(state)
    rows_file(tmp_path, [4] * 11)
    with pytest.raises(ConfigError, match=r"rows\.jsonl has changed"):
        Batches(DataConfig((file,), 8, 2)).restore(state)
    with pytest.raises(ConfigError, match="position in the data"):
        Batches(DataConfig((file,), 8, 2)).restore({"step": "one"})


def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"input_ids": [1]}\n\n{"input_ids": [1, "2"]}\n')
    batches = Batches(DataConfig((str(tmp_path / "x.jsonl"),), 8, 2, shuffle=False, packing=False))
    with pytest.raises(ConfigError, match=r"x\.jsonl, line 3: input_ids is not a list"):
        batches.step(0)


def test_a_text_is_learned_to_its_end(tmp_path: Path) -> None:
    tokenizer = kits.both()["byte-level"]
    (tmp_path / "x.txt").write_text("hello world\n\nthe quick brown fox\n" * 5)
    (row, *_) = Batches(DataConfig((str(tmp_path / "x.txt"),), 64, 1), tokenizer).step(0)
    assert len(row.lengths) > 1
    assert tokenizer.decode(row.input_ids.tolist()).count("</s>") == len(row.lengths)


def test_a_mixture_takes_files_by_weight(tmp_path: Path) -> None:
    files = (rows_file(tmp_path, [4] * 50, "a.jsonl"), rows_file(tmp_path, [4] * 50, "b.jsonl"))
    batches = Batches(DataConfig(files, 8, 8, weights=(3, 1), packing=False))
    for step in range(10):
        assert sum(row.row_numbers[0] < 50 for row in batches.step(step)) == 6


def test_a_thread_may_read_ahead(tmp_path: Path) -> None:
    config = DataConfig((rows_file(tmp_path, some_lengths(80)),), 32, 4)
    shared, quiet = Batches(config), Batches(config)
    ahead = Thread(target=lambda: [shared.step(step) for step in range(1, 40)])
    ahead.start()
    states = [shared.state(step) for step in range(20)]
    ahead.join()
    assert states == [quiet.state(step) for step in range(20)]


@pytest.mark.parametrize(
    "wrong", [{"seq_len": 0}, {"global_batch_size": 0}, {"epochs": 0}, {"over_long": "cut"}, {"documents": "lines"}]
)
def test_choices_that_are_none(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        DataConfig(**{"files": ("x",), "seq_len": 8, "global_batch_size": 2, **wrong})


def test_states_of_steps_long_gone_are_found_again(tmp_path: Path) -> None:
    config = DataConfig((rows_file(tmp_path, some_lengths(80)),), 32, 4)
    batches, quiet = Batches(config), Batches(config)
    batches.step(50)
    for step in (1, 30, 2, 51):
        fresh = Batches(config)
        assert batches.state(step) == quiet.state(step) == fresh.state(step)


def test_restoring_forgets_what_was_read_before(tmp_path: Path) -> None:
    file = rows_file(tmp_path, some_lengths(80))
    state = Batches(DataConfig((file,), 32, 6)).state(4)
    used, fresh = Batches(DataConfig((file,), 32, 3)), Batches(DataConfig((file,), 32, 3))
    before = used.plan(4)
    assert used.restore(state) == fresh.restore(state) == 4
    assert used.plan(4) == fresh.plan(4) != before


def test_documents_that_are_no_longer_held_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = DataConfig((rows_file(tmp_path, some_lengths(80)),), 32, 6)
    held = [tokens(Batches(config).step(step)) for step in range(5)]
    monkeypatch.setattr(data, "TOKENS_KEPT", 10)
    assert [tokens(Batches(config).step(step)) for step in range(5)] == held
