"""Loading: every cut a model makes is filled with the right numbers, once, from just its own bytes."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tllm.core.errors import PlanError, WeightsError
from tllm.parallel.shard import Shard, ShardPiece, cut_parameter, shard_of
from tllm.parallel.weight_reuse import wanted, weights_of
from tllm.weights import load as load_module
from tllm.weights.byte_source import LocalFiles, RemoteFiles
from tllm.weights.coverage import check_coverage
from tllm.weights.header_tables import SINGLE
from tllm.weights.load import held_of, load
from tllm.weights.safetensors_index import Index


class Cut(nn.Module):
    """Rank `rank` of `size` of a model with every kind of cut; 8 rows, 6 columns, 4 experts."""

    def __init__(self, rank: int, size: int, device: str = "meta") -> None:
        super().__init__()
        rows = (8 * rank // size, 8 * (rank + 1) // size)
        cols = (6 * rank // size, 6 * (rank + 1) // size)
        n, c = rows[1] - rows[0], cols[1] - cols[0]
        experts = [
            ShardPiece(f"experts.{i}.{part}", ((0, 8), cols), ((i, i + 1), (8 * j, 8 * j + 8), (0, c)))
            for i in range(4)
            for j, part in enumerate(("gate", "up"))
        ]
        with torch.device(device):
            self.merged = cut_parameter(
                (2 * n, 6),
                Shard(
                    (
                        ShardPiece("q", (rows, (0, 6)), ((0, n), (0, 6))),
                        ShardPiece("k", (rows, (0, 6)), ((n, 2 * n), (0, 6))),
                    )
                ),
            )
            self.columns = cut_parameter((8, c), Shard((ShardPiece("o", ((0, 8), cols)),)))
            self.norm = cut_parameter((6,), Shard((ShardPiece("norm"),), replicated=True))
            self.experts = cut_parameter((4, 16, c), Shard(tuple(experts)))
            self.fused = cut_parameter((4, n, 6), Shard((ShardPiece("fused", ((0, 4), rows, (0, 6))),)))
            # One parameter in two modules, as tied embeddings are.
            self.inner = nn.Linear(1, 1, bias=False)
        self.inner.weight = self.norm


class Progress:
    """Remembers each call."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int]] = []

    def __call__(self, done: int, total: int) -> None:
        self.steps.append((done, total))


def checkpoint() -> dict[str, Tensor]:
    torch.manual_seed(1)
    names = [f"experts.{i}.{part}" for i in range(4) for part in ("gate", "up")]
    tensors = {name: torch.randn(8, 6) for name in ["q", "k", "o", *names]}
    return tensors | {"norm": torch.randn(6), "fused": torch.randn(4, 8, 6), "inv_freq": torch.randn(3)}


def opened(folder: Path, tensors: dict[str, Tensor]) -> tuple[Index, LocalFiles]:
    save_file(tensors, folder / SINGLE)
    source = LocalFiles(folder)
    return Index.read(source), source


def filled(model: Cut, tensors: dict[str, Tensor], rank: int, size: int) -> None:
    rows = slice(8 * rank // size, 8 * (rank + 1) // size)
    cols = slice(6 * rank // size, 6 * (rank + 1) // size)
    stacked = [
        torch.cat([tensors[f"experts.{i}.gate"][:, cols], tensors[f"experts.{i}.up"][:, cols]]) for i in range(4)
    ]
    want = {
        "merged": torch.cat([tensors["q"][rows], tensors["k"][rows]]),
        "columns": tensors["o"][:, cols],
        "norm": tensors["norm"],
        "experts": torch.stack(stacked),
        "fused": tensors["fused"][:, rows],
    }
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, want[name].to(parameter.dtype)), name


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("chunk", [4, 100, load_module.CHUNK_BYTES])
def test_every_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, dtype: torch.dtype, chunk: int) -> None:
    monkeypatch.setattr(load_module, "CHUNK_BYTES", chunk)
    tensors = checkpoint()
    index, source = opened(tmp_path, tensors)
    for rank in range(size):
        model = Cut(rank, size)
        progress = Progress()
        before = source.bytes_read
        load(model, index, source, dtype, progress)
        filled(model, tensors, rank, size)
        numbers = sum(parameter.numel() for parameter in model.parameters())
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}
        assert source.bytes_read - before == 4 * numbers, "the files are float32, and one tensor is of no use"
        assert model.inner.weight is model.norm, "what was shared still is"
        assert all(shard_of(parameter).pieces for parameter in model.parameters())
        assert progress.steps[-1] == (4 * numbers, 4 * numbers)
        assert all(0 < after[0] - before[0] <= chunk for before, after in pairwise([(0, 0), *progress.steps]))


@pytest.mark.parametrize(("rank", "size", "again"), [(0, 2, 5), (1, 2, 1), (0, 1, 1), (0, 3, 1)])
def test_what_is_kept_is_not_read_again(tmp_path: Path, rank: int, size: int, again: int) -> None:
    """The same cut has all five parameters, any other only the norm that every rank holds whole."""
    tensors = checkpoint()
    index, source = opened(tmp_path, tensors)
    old, new = Cut(0, 2), Cut(rank, size)
    load(old, index, source)
    kept = wanted(new, weights_of(old))
    assert len(kept) == again
    before = source.bytes_read
    load(new, index, source, kept=kept)
    filled(new, tensors, rank, size)
    unread = sum(p.nbytes for p in kept.values())
    assert source.bytes_read - before == sum(p.nbytes for p in new.parameters()) - unread
    assert sum(any(p is one for one in old.parameters()) for p in new.parameters()) == again
    assert new.inner.weight is new.norm
    assert shard_of(new.norm).replicated
    assert not wanted(new, weights_of(Cut(rank, size).double())), "numbers of another dtype are others"


def test_ranks_together_read_the_model_once(tmp_path: Path) -> None:
    tensors = checkpoint()
    index, source = opened(tmp_path, tensors)
    before = source.bytes_read
    for rank in range(3):
        load(Cut(rank, 3), index, source)
    used = sum(t.nbytes for name, t in tensors.items() if name != "inv_freq") + 2 * tensors["norm"].nbytes
    assert source.bytes_read - before == used
    shapes = {name: index.shape(name) for name in index.entries}
    check_coverage(
        {rank: held_of(Cut(rank, 3)) for rank in range(3)},
        shapes,
        set(tensors) - {"inv_freq"},
    )
    with pytest.raises(PlanError, match="no rank"):
        check_coverage(
            {rank: held_of(Cut(rank, 3)) for rank in range(2)},
            shapes,
            set(tensors) - {"inv_freq"},
        )


def test_memory_that_is_there_is_filled_in_place(tmp_path: Path) -> None:
    tensors = checkpoint()
    index, source = opened(tmp_path, tensors)
    model = Cut(0, 2, device="cpu")
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    load(model, index, source)
    filled(model, tensors, 0, 2)
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == before


def test_over_the_network(tmp_path: Path) -> None:
    tensors = checkpoint()
    opened(tmp_path, tensors)
    content = (tmp_path / SINGLE).read_bytes()
    source = RemoteFiles(lambda file, start, stop: content[start:stop], {SINGLE: len(content)})
    model = Cut(1, 2)
    load(model, Index.read(source), source)
    filled(model, tensors, 1, 2)


@pytest.mark.parametrize(
    "stored", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float64]
)
def test_stored_dtypes_are_converted(tmp_path: Path, stored: torch.dtype) -> None:
    tensors = {name: tensor.to(stored) for name, tensor in checkpoint().items()}
    index, source = opened(tmp_path, tensors)
    model = Cut(0, 2)
    load(model, index, source, torch.float32)
    filled(model, {name: tensor.float() for name, tensor in tensors.items()}, 0, 2)


@pytest.mark.parametrize(
    ("name", "tensor", "match"),
    [
        ("norm", torch.ones(7), r"'norm' has shape \(7,\) in the files and the model needs \(6,\)"),
        ("norm", torch.ones(6, 1, 2), r"'norm' has shape \(6, 1, 2\).*\(6,\)"),
        ("o", torch.ones(7, 6), r"'o' has shape \(7, 6\).*at least \(8, 3\)"),
        ("q", torch.ones(48), r"'q' has shape \(48,\)"),
        ("k", None, "no tensor 'k'"),
        ("o", torch.ones(8, 6, dtype=torch.int8), "'o' holds torch.int8"),
    ],
)
def test_files_of_another_model(tmp_path: Path, name: str, tensor: Tensor | None, match: str) -> None:
    tensors = {key: value for key, value in (checkpoint() | {name: tensor}).items() if value is not None}
    index, source = opened(tmp_path, tensors)
    model, before = Cut(0, 2), source.bytes_read
    with pytest.raises(WeightsError, match=match):
        load(model, index, source)
    assert source.bytes_read == before
    assert model.norm.is_meta, "nothing was given memory"


@pytest.mark.parametrize(
    "targets",
    [[((0, 4),)], [((0, 4),), ((3, 6),)], [((0, 4),), ((4, 7),)], [((0, 4), (0, 1)), ((4, 6), (0, 1))]],
    ids=["a part", "a part twice", "outside", "another shape"],
)
def test_pieces_that_do_not_make_their_parameter(tmp_path: Path, targets: list[tuple[tuple[int, int], ...]]) -> None:
    index, source = opened(tmp_path, {"norm": torch.ones(6)})
    model = nn.Module()
    pieces = [ShardPiece("norm", (target[0],), target) for target in targets]
    model.weight = cut_parameter((6,), Shard(tuple(pieces)))
    with pytest.raises((AssertionError, WeightsError)):
        load(model, index, source)


def test_little_memory_beside_the_parameters(tmp_path: Path) -> None:
    """A float32 tensor of 64 MB becomes bfloat16 with no more than a chunk in between."""
    save_file({"w": torch.ones(1024, 16384)}, tmp_path / SINGLE)
    largest = 0

    class Watched(LocalFiles):
        def read_spans(self, file: str, spans: object, out: memoryview) -> None:
            nonlocal largest
            largest = max(largest, len(out))
            super().read_spans(file, spans, out)  # type: ignore[arg-type]

    source = Watched(tmp_path)
    index = Index.read(source)
    model = nn.Module()
    with torch.device("meta"):
        model.weight = cut_parameter((1024, 8192), Shard((ShardPiece("w", ((0, 1024), (8192, 16384))),)))
    before = source.bytes_read
    load(model, index, source, torch.bfloat16)
    assert source.bytes_read - before == 32 * 1024 * 1024
    assert largest <= load_module.CHUNK_BYTES
    assert torch.equal(model.weight, torch.ones(1024, 8192, dtype=torch.bfloat16))
