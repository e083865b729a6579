"""A rank's pages on disk: cut as any plan wants them, of many dtypes, and never another page's or a damaged one's."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from tllm.core.errors import WeightsError
from tllm.engine.page_store import rank_pages
from tllm.engine.page_store.page_buffer import HeldLayer
from tllm.engine.page_store.page_file import START, read_header, read_pieces
from tllm.engine.page_store.page_folder import PageFolder
from tllm.engine.page_store.rank_pages import RankPages
from tllm.engine.pages.page_messages import FetchPages, PageChain, SavePages, TakePages, salt_digest

PAGE, PAGES, HEADS, LAYERS = 4, 6, 4, 3
TAILS: tuple[tuple[tuple[int, ...], torch.dtype], ...] = (((8,), torch.int8), ((), torch.float32))
"""An 8-bit cache: codes, and a scale for each slot."""

Truth = dict[int, tuple[Tensor, ...]]


def chain_of(names: str = "abc", salt: str = "", first: int = 0) -> PageChain:
    ids = b"".join(bytes([ord(name)] * PAGE * 4) for name in names)
    return PageChain(tuple(name.encode() * 32 for name in names), first, bytes(32), ids, salt_digest(salt))


def truth(seed: int, tails: tuple[tuple[tuple[int, ...], torch.dtype], ...] = TAILS) -> Truth:
    """All layers and kv heads of a model's cache, with random bytes in it."""
    g = torch.Generator().manual_seed(seed)

    def filled(tail: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        raw = torch.randint(0, 100, (HEADS, PAGES * PAGE, *tail, dtype.itemsize), generator=g, dtype=torch.uint8)
        return raw.view(dtype).squeeze(-1)

    return {layer: tuple(filled(*tail) for tail in tails) for layer in range(LAYERS)}


def part_of(cache: Truth, layers: range, heads: tuple[int, int]) -> dict[int, HeldLayer]:
    """What a rank has of it: its own copy."""
    return {n: HeldLayer(tuple(x[slice(*heads)].clone() for x in cache[n]), heads) for n in layers}


@contextmanager
def rank(path: Path, held: dict[int, HeldLayer], model: str = "model", limit: int = 1 << 20) -> Iterator[RankPages]:
    pages = RankPages(held, PAGE, PageFolder(path / "pages", model, limit), model)
    yield pages
    pages.close()


def saved(
    path: Path, cache: Truth, chain: PageChain, *ranks: tuple[range, tuple[int, int]], model: str = "model"
) -> None:
    for layers, heads in ranks:
        with rank(path, part_of(cache, layers, heads), model) as pages:
            pages.save(SavePages(chain, ((1, 2), (5, 1))))
            assert all(map(pages.keeps, chain.names)), "also while it is written"


def taken(pages: RankPages, chain: PageChain) -> int:
    pages.fetch(FetchPages(7, chain))
    return pages.take(TakePages(7, ((3, 1), (0, 2)), len(chain.names)))


WHOLE = (range(LAYERS), (0, HEADS))
EMPTY = truth(99)


@pytest.mark.parametrize(
    "tails",
    [
        TAILS,
        (((8,), torch.bfloat16),),
        (((2,), torch.float8_e4m3fn), ((2,), torch.float8_e4m3fn), ((), torch.float32), ((), torch.float32)),
    ],
)
def test_any_cut_finds_what_any_other_has_written(
    tails: tuple[tuple[tuple[int, ...], torch.dtype], ...], tmp_path: Path
) -> None:
    cache, empty, chain = truth(1, tails), truth(99, tails), chain_of()
    # pp=2 with tp=1+2, whose ranks share a kv head
    saved(tmp_path, cache, chain, (range(1), (0, 4)), (range(1, 3), (0, 3)), (range(1, 3), (2, 4)))
    for layers, heads in (WHOLE, (range(2), (1, 3)), (range(2, 3), (3, 4)), (range(1, 3), (0, 3))):
        held = part_of(empty, layers, heads)
        with rank(tmp_path, held) as pages:
            assert taken(pages, chain) == 3
            for layer in layers:
                for mine, whole, before in zip(held[layer].tensors, cache[layer], empty[layer], strict=True):
                    for to, source in ((3, 1), (0, 2), (1, 5)):
                        came = mine[:, to * PAGE : (to + 1) * PAGE].view(torch.uint8)
                        sent = whole[slice(*heads), source * PAGE : (source + 1) * PAGE].view(torch.uint8)
                        assert torch.equal(came, sent)
                    rest = slice(4 * PAGE, None)
                    assert torch.equal(mine[:, rest].view(torch.uint8), before[slice(*heads), rest].view(torch.uint8))


def test_layers_that_have_other_numbers_of_heads_are_found_by_any_other_cut(tmp_path: Path) -> None:
    """The least box of a rank's file is then wider than what it has of some layers: sixteen heads and eight here."""
    chain, cache = chain_of(), truth(1)
    cache = {layer: tuple(torch.cat([x] * (4 if layer else 2)) for x in cache[layer]) for layer in range(2)}
    empty = {layer: tuple(torch.zeros_like(x) for x in cache[layer]) for layer in cache}

    def held(of: Truth, ranks: int, place: int) -> dict[int, HeldLayer]:
        each = {layer: len(of[layer][0]) // ranks for layer in of}
        return {n: part_of(of, range(n, n + 1), (place * each[n], (place + 1) * each[n]))[n] for n in of}

    for place in range(8):
        with rank(tmp_path, held(cache, 8, place)) as pages:
            pages.save(SavePages(chain, ((1, 2), (5, 1))))
    for ranks in (1, 2, 4):
        for place in range(ranks):
            mine, whole = held(empty, ranks, place), held(cache, ranks, place)
            with rank(tmp_path, mine) as pages:
                assert taken(pages, chain) == 3, f"rank {place} of {ranks}"
            for layer in mine:
                for came, sent in zip(mine[layer].tensors, whole[layer].tensors, strict=True):
                    assert torch.equal(came[:, 3 * PAGE : 4 * PAGE], sent[:, PAGE : 2 * PAGE])


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ([((2, 4), (0, 1))], ((0, 4), (0, 1))),
        ([((2, 4), (0, 1)), ((4, 6), (1, 2)), ((6, 8), (1, 2))], ((0, 8), (0, 2))),
    ],
    ids=["one file of this name", "files that seem to hold it together"],
)
def test_a_page_that_only_seems_whole_is_saved_again(
    files: list[tuple[tuple[int, int], tuple[int, int]]],
    wanted: tuple[tuple[int, int], tuple[int, int]],
    tmp_path: Path,
) -> None:
    """Eight heads and two, of four ranks. A file's box is the least that has both layers' heads."""
    chain, cache = chain_of(), {layer: tuple(torch.cat([x] * 2) for x in of) for layer, of in truth(1).items()}

    def held(*heads: tuple[int, int]) -> dict[int, HeldLayer]:
        return {layer: part_of(cache, range(layer, layer + 1), of)[layer] for layer, of in enumerate(heads)}

    for heads in files:
        with rank(tmp_path, held(*heads)) as pages:
            pages.save(SavePages(chain, ((1, 2), (5, 1))))
    with rank(tmp_path, held(*wanted)) as pages:
        assert taken(pages, chain) == 0 and not any(map(pages.keeps, chain.names))
        pages.save(SavePages(chain, ((1, 2), (5, 1))))
        wait(pages._writes.under_way(), 60)
        assert taken(pages, chain) == 3
    with rank(tmp_path, held(*files[0])) as pages:
        assert taken(pages, chain) == 3, "those of the other cut are there as well"


def test_a_page_of_which_a_head_is_missing_ends_what_is_taken(tmp_path: Path) -> None:
    cache, chain = truth(1), chain_of()
    saved(tmp_path, cache, chain, (range(3), (0, 3)))
    saved(tmp_path, cache, chain_of("a"), (range(3), (3, 4)))
    held = part_of(EMPTY, *WHOLE)
    with rank(tmp_path, held) as pages:
        assert taken(pages, chain) == 1
        assert pages.may_have(chain.names[1]) and not pages.keeps(chain.names[1]) and pages.keeps(chain.names[0])
        for layer in range(LAYERS):
            assert torch.equal(held[layer].tensors[0][:, :12], EMPTY[layer][0][:, :12]), "page 3 alone was written"


@pytest.mark.parametrize(
    "other",
    [
        msgspec.structs.replace(chain_of(), salt=salt_digest("salt")),
        msgspec.structs.replace(chain_of(), token_ids=bytes(3 * PAGE * 4)),
        msgspec.structs.replace(chain_of(), parent=b"p" * 32),
    ],
)
def test_a_page_with_this_name_and_other_content_is_not_taken(other: PageChain, tmp_path: Path) -> None:
    saved(tmp_path, truth(1), other, WHOLE)
    with rank(tmp_path, part_of(EMPTY, *WHOLE)) as pages:
        assert pages.may_have(chain_of().names[0])
        assert taken(pages, chain_of()) == 0


def test_a_file_under_another_pages_name_is_not_taken(tmp_path: Path) -> None:
    saved(tmp_path, truth(1), chain_of(), WHOLE)
    pages = PageFolder(tmp_path / "pages", "model", 1 << 20)
    (box,) = pages.boxes(b"a" * 32)
    pages.path(b"b" * 32, box).replace(pages.path(b"a" * 32, box))
    with rank(tmp_path, part_of(EMPTY, *WHOLE)) as again:
        assert taken(again, chain_of()) == 0
        assert again.folder.num_damaged == 1


def test_another_models_page_is_not_taken(tmp_path: Path) -> None:
    saved(tmp_path, truth(1), chain_of(), WHOLE, model="other")
    with rank(tmp_path, part_of(EMPTY, *WHOLE)) as pages:
        assert taken(pages, chain_of()) == 0
    (tmp_path / "pages" / "model").rmdir()
    (tmp_path / "pages" / "other").rename(tmp_path / "pages" / "model")
    with rank(tmp_path, part_of(EMPTY, *WHOLE)) as pages:
        assert pages.may_have(b"a" * 32) and taken(pages, chain_of()) == 0, "the header says whose it is"


def test_tensors_of_another_form_are_not_taken(tmp_path: Path) -> None:
    saved(tmp_path, truth(1), chain_of(), WHOLE)
    with rank(tmp_path, part_of(truth(1, (((8,), torch.uint8), ((), torch.float32))), *WHOLE)) as pages:
        assert taken(pages, chain_of()) == 0


def test_damaged_files_are_refused_whatever_was_changed(tmp_path: Path) -> None:
    """A changed byte, a file cut short or longer, and headers that ask for much: refused, deleted, and the page is
    computed; the cache is as it was."""
    saved(tmp_path, truth(1), chain_of("a"), WHOLE)
    pages = PageFolder(tmp_path / "pages", "model", 1 << 20)
    (box,) = pages.boxes(b"a" * 32)
    path, rng = pages.path(b"a" * 32, box), random.Random(5)
    good = path.read_bytes()
    length = int.from_bytes(good[8:12], "little")
    damaged = [b"", good[:START], good[:-1], good + b"x", b"TLLMKV01" + b"\xff" * 4 + good[12:]]
    damaged += [good[:at] + bytes([good[at] ^ (1 << rng.randrange(8))]) + good[at + 1 :] for at in range(0, START, 3)]
    for _ in range(150):
        at = rng.choice((rng.randrange(START, START + length), rng.randrange(START + length, len(good))))
        damaged.append(good[:at] + bytes([good[at] ^ rng.randrange(1, 256)]) + good[at + 1 :])
    held = part_of(EMPTY, *WHOLE)
    for content in damaged:
        assert content != good
        path.write_bytes(content)
        with rank(tmp_path, held) as again:
            assert taken(again, chain_of("a")) == 0
            assert not path.exists() and again.folder.num_damaged == 1
            assert not again.may_have(b"a" * 32)
    for layer in range(LAYERS):
        assert all(torch.equal(x, y) for x, y in zip(held[layer].tensors, EMPTY[layer], strict=True))
    path.write_bytes(good)
    with rank(tmp_path, held) as again:
        assert taken(again, chain_of("a")) == 1


def test_what_a_header_says_of_sizes_is_not_believed(tmp_path: Path) -> None:
    """Headers with a right hash: only whoever can write the folder makes these, and still nothing is allocated."""
    saved(tmp_path, truth(1), chain_of("a"), WHOLE)
    pages = PageFolder(tmp_path / "pages", "model", 1 << 20)
    (box,) = pages.boxes(b"a" * 32)
    path = pages.path(b"a" * 32, box)
    with path.open("rb") as file:
        header = read_header(file, path.stat().st_size, "file")
        sizes = {0: PAGE * 12}
        assert set(read_pieces(file, header, sizes, "file")) == {0}
    wide = tuple(msgspec.structs.replace(piece, stop_head=2**30) for piece in header.pieces)
    with path.open("rb") as file:
        wide_header = msgspec.structs.replace(read_header(file, path.stat().st_size, "file"), pieces=wide)
        with pytest.raises(WeightsError, match="bytes of 1073741824 heads"):
            read_pieces(file, wide_header, sizes, "file")


def test_more_than_the_disk_takes_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_pages, "BUFFER_BYTES", 1000)
    with rank(tmp_path, part_of(truth(1), *WHOLE)) as pages:
        assert pages.has_room
        pages.save(SavePages(chain_of(), ((1, 2), (5, 1))))
        assert not any(map(pages.keeps, chain_of().names)), f"{3 * pages.page_bytes} bytes"


def test_a_disk_that_is_too_slow_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, truth(1), chain_of(), WHOLE)
    monkeypatch.setattr(rank_pages, "TAKE_SECONDS", 0.0)
    with rank(tmp_path, part_of(EMPTY, *WHOLE)) as pages:
        gate = threading.Event()
        begun = pages._reader.submit(gate.wait, 20.0)
        assert taken(pages, chain_of()) == 0
        gate.set()
        begun.result()


def test_what_nobody_takes_is_dropped(tmp_path: Path) -> None:
    saved(tmp_path, truth(1), chain_of(), WHOLE)
    with rank(tmp_path, part_of(EMPTY, *WHOLE)) as pages:
        for number in range(20):
            pages.fetch(FetchPages(number, chain_of()))
        assert len(pages._fetches) == rank_pages.MAX_FETCHES
        assert pages.take(TakePages(0, ((0, 1),), 1)) == 0, "dropped"
        assert pages.take(TakePages(19, (), 0)) == 0, "not wanted"
        assert pages.take(TakePages(18, ((0, 2),), 2)) == 2
        assert len(pages._fetches) == rank_pages.MAX_FETCHES - 2
