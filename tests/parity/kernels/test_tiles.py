"""The kernels for Intel's AMX with tiles in plain C: they pass the tests of kernels where there is AVX-512 and no AMX.

They had been changed for days in which no machine that ran this suite had tiles.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from ctypes import c_int64

import pytest
import torch
from torch import Tensor

from tests.support.kernels.emulated_tiles import EmulatedTiles, emulated_tiles, why_not
from tests.support.models import few_bits
from tests.support.models.few_bits import KINDS
from tests.support.selection import soak_but
from tests.unit.engine.compute import test_paged_attention as test_paged_cache
from tests.unit.kernels import test_float_product, test_memory_bounds, test_paged_attention, test_quantized_matmul
from tests.unit.parallel import test_packed_experts
from tests.unit.training.attention import test_kernel_attention
from tllm.kernels.float_product import float_matmul
from tllm.kernels.library import Library, using
from tllm.kernels.product_ways import Way
from tllm.kernels.recording.held_memory import HeldMemory
from tllm.kernels.recording.recorder import Recorder

pytestmark = [
    pytest.mark.slow,  # to compile them takes a quarter of a minute of a processor
    pytest.mark.timeout(300),
    pytest.mark.skipif(why_not() != "", reason=why_not()),
]

FULL = [(16, 64)] * 8
"""Rows of each tile, and bytes of these."""


@pytest.fixture(scope="module")
def emulated() -> EmulatedTiles:
    return emulated_tiles()


@pytest.fixture(autouse=True)
def no_fault(emulated: EmulatedTiles) -> Iterator[None]:
    yield
    assert emulated.fault() == ""


@pytest.fixture
def tiles(emulated: EmulatedTiles, monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    """In place of this process's kernels, in all tests that look for some; products of few bits are made by tiles."""
    kernels, threads = few_bits.take((emulated.kernels, Way.BY_TILES), monkeypatch), torch.get_num_threads()
    monkeypatch.setattr(test_paged_attention, "libraries", lambda: [kernels])
    monkeypatch.setattr(test_float_product, "TILED", [kernels])
    with using(kernels):
        yield kernels
    torch.set_num_threads(threads)


@pytest.fixture
def call(emulated: EmulatedTiles) -> Iterator[Callable[..., None]]:
    """An instruction for tiles, by its name, with numbers and tensors."""

    def run(name: str, *arguments: int | Tensor) -> None:
        values = [c_int64(one if isinstance(one, int) else one.data_ptr()) for one in arguments]
        getattr(emulated.functions, f"emulated_{name}")(*values)

    yield run
    run("release")


def configuration(shapes: list[tuple[int, int]], palette: int = 1) -> Tensor:
    config = torch.zeros(64, dtype=torch.uint8)
    config[0], config[48 : 48 + len(shapes)] = palette, torch.tensor([rows for rows, _ in shapes])
    config[16:48].view(torch.int16)[: len(shapes)] = torch.tensor([size for _, size in shapes], dtype=torch.int16)
    return config


def test_a_product_of_bytes_is_the_manuals(call: Callable[..., None]) -> None:
    """Of 5 rows with 12 columns and 7 outputs, whose rows lie apart; what lies behind them stays."""
    x, codes = (torch.randint(-128, 128, shape, dtype=torch.int8) for shape in ((5, 40), (3, 7, 4)))
    sums = torch.full((5, 9), 3, dtype=torch.int32)
    call("loadconfig", configuration([(5, 28), (5, 12), (3, 28)]))
    call("loadd", 0, sums, 36), call("loadd", 1, x, 40), call("loadd", 2, codes, 28)
    call("dpbssd", 0, 1, 2), call("stored", 0, sums, 36)
    assert torch.equal(sums[:, :7], 3 + x[:, :12].int() @ codes.transpose(1, 2).reshape(12, 7).int())
    assert (sums[:, 7:] == 3).all()


def test_a_product_of_bfloat16_is_the_manuals(call: Callable[..., None]) -> None:
    """Of pairs the first numbers are summed apart from the second ones; what is less than 2^-126 is nothing."""
    x, y = torch.zeros(5, 4), torch.zeros(2, 7, 2)
    x[0], y[:, 0] = torch.tensor([2.0**30, 1.0, -(2.0**30), 1.0]), 1.0  # one after another: 1
    x[1, 0], y[0, 1, 0] = 2.0**-70, 2.0**-60
    x[2, 0], y[0, 2, 0] = 2.0**-127, 2.0**20
    x[3, :2], y[0, 3] = 2.0**-60, torch.tensor([2.0**-66, 2.0**-67])
    sums = torch.zeros(5, 7)
    sums[4, :2] = torch.tensor([2.0**-127, 2.0**-126])
    call("loadconfig", configuration([(5, 28), (5, 8), (2, 28)]))
    call("loadd", 0, sums, 28), call("loadd", 1, x.bfloat16(), 8), call("loadd", 2, y.bfloat16(), 28)
    call("dpbf16ps", 0, 1, 2), call("stored", 0, sums, 28)
    assert sums[0, 0] == 2.0 and sums[1, 1] == sums[2, 2] == 0
    assert sums[3, 3] == 2.0**-126, "and not with its half"
    assert sums[4].tolist() == [0.0, 2.0**-126, *[0.0] * 5]


@pytest.mark.parametrize(
    ("shapes", "name", "arguments", "why"),
    [
        ([], "zero", (0,), "has not configured"),
        ([(16, 65)], "release", (), "no such configuration"),
        ([(17, 64)], "release", (), "no such configuration"),
        ([(16, 0)], "release", (), "no such configuration"),
        ([*FULL, (16, 64)], "release", (), "no such configuration"),
        (FULL[:7], "zero", (7,), "not among"),
        (FULL, "dpbssd", (0, 0, 1), "twice"),
        ([(8, 64), *FULL[1:]], "dpbf16ps", (0, 1, 2), "other rows"),
        ([(16, 32), *FULL[1:]], "dpbf16ps", (0, 1, 2), "other columns"),
        ([(16, 64), (16, 32), (16, 64)], "dpbssd", (0, 1, 2), "do not meet"),
        ([(16, 64), (16, 62), (15, 64)], "dpbssd", (0, 1, 2), "whole words"),
        (FULL, "zero", (7,), "has not released"),
    ],
)
def test_what_a_processor_refuses_is_refused(
    shapes: list[tuple[int, int]],
    name: str,
    arguments: tuple[int, ...],
    why: str,
    emulated: EmulatedTiles,
    call: Callable[..., None],
) -> None:
    if shapes:
        call("loadconfig", configuration(shapes))
    call(name, *arguments)
    assert why in emulated.fault()


def test_each_thread_configures_its_own_tiles(emulated: EmulatedTiles, call: Callable[..., None]) -> None:
    call("loadconfig", configuration(FULL))
    other = threading.Thread(target=call, args=("zero", 0))
    other.start()
    other.join()
    assert emulated.fault() == "this thread has not configured its tiles"


@pytest.mark.parametrize("kind", KINDS)
def test_products_of_few_bits(kind: str, tiles: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_quantized_matmul, "SHAPES", [(37, 544), (5, 48)])
    monkeypatch.setattr(test_quantized_matmul, "ROWS", [2, 8, 13, 130])
    test_quantized_matmul.test_bits_are_those_of_the_slow_twin(kind, tiles)


def test_products_of_few_bits_with_other_rows_and_formats_beside(tiles: Library) -> None:
    for threads in (1, 2):
        test_quantized_matmul.test_bits_depend_neither_on_threads_nor_on_what_is_beside(tiles, threads)
    test_quantized_matmul.test_parts_of_several_formats_make_one_weight(tiles)
    test_quantized_matmul.test_columns_before_the_cut_meet_zeros(tiles)
    test_quantized_matmul.test_what_is_no_number_is_not_lost(tiles, float("nan"))


@pytest.mark.parametrize("kind", soak_but(["zeros_of_groups", "groups_of_16"], KINDS))
def test_products_of_experts(kind: str, tiles: Library) -> None:
    test_packed_experts.test_a_stack_multiplies_each_experts_rows_with_its_weight(kind, False, tiles)
    test_packed_experts.test_a_stack_multiplies_each_experts_rows_with_its_weight(kind, True, tiles)


def test_codes_and_sums_of_all_sizes(tiles: Library) -> None:
    test_quantized_matmul.test_codes_that_eight_bits_with_a_sign_do_not_hold(tiles)
    for kind, rows in (("rounded_to_4", 83), ("four_bits_and_minima", 72), ("groups_of_16", 76)):
        test_quantized_matmul.test_exact_sums_of_parts_of_all_sizes(kind, rows, tiles)
    for columns in (17, 100):
        test_quantized_matmul.test_a_row_of_few_columns_has_one_scale(columns, tiles)


@pytest.mark.parametrize("kind", ["rounded_to_8", "four_bits_and_minima"])
def test_products_of_few_bits_stay_in_their_memory(kind: str, tiles: Library) -> None:
    test_memory_bounds.test_products_of_few_bits(kind, (tiles, Way.BY_TILES))


@pytest.mark.parametrize("threads", [1, 2])
def test_plain_products(threads: int, tiles: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    for outputs, columns in test_float_product.TILED_SHAPES:
        test_float_product.test_a_product_by_tiles_has_the_bits_of_its_twin(outputs, columns, threads, monkeypatch)


def test_plain_products_of_many_rows(tiles: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    test_float_product.test_many_rows_have_the_bits_of_few(160, 544, monkeypatch)
    test_float_product.test_tiles_multiply_what_fits_them(tiles, monkeypatch)


@pytest.mark.parametrize(("width", "window"), [(32, None), (96, 20), (64, 300)])
@pytest.mark.parametrize(("softcap", "has_sinks"), [(0.0, False), (1.5, True)])
def test_attention_of_prompts(width: int, window: int | None, softcap: float, has_sinks: bool, tiles: Library) -> None:
    test_paged_attention.test_prompts_by_amx(width, window, softcap, has_sinks)


@pytest.mark.parametrize("name", test_paged_cache.SPECS)
def test_attention_of_prompts_beside_replies(name: str, tiles: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    test_paged_cache.test_any_mixture_by_amx(name, True, monkeypatch)


@pytest.mark.parametrize("case", [one for one in test_kernel_attention.CASES if one[3] % 32 == 0], ids=str)
def test_attention_of_training(
    case: tuple[tuple[int, ...], int, int, int, int | None], tiles: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    test_kernel_attention.test_it_has_the_numbers_and_gradients_of_float64(*case, torch.bfloat16, tiles)


def test_attention_of_training_beside_other_documents(tiles: Library) -> None:
    test_kernel_attention.test_a_document_has_the_same_bits_beside_others_and_on_any_threads(torch.bfloat16, tiles)
    test_kernel_attention.test_tokens_may_lie_apart(torch.bfloat16, tiles)


@torch.inference_mode()
def test_recorded_products(tiles: Library) -> None:
    """A plain one and one of few bits, played with other numbers on two threads."""
    torch.manual_seed(0)
    packed = test_quantized_matmul.weight_of(KINDS["four_bits_and_minima"](64, 96))
    x, weight = torch.randn(21, 64).bfloat16(), torch.randn(96, 64).bfloat16()
    torch.set_num_threads(2)
    recorder = Recorder(tiles, HeldMemory())
    with recorder.recording():
        out = packed.matmul(float_matmul(x, weight))
    recording = recorder.recorded()
    assert recording is not None, recorder.refused
    x.copy_(torch.randn(21, 64))
    recording.play()
    assert torch.equal(out, packed.matmul(test_float_product.twin_of_tiles(x, weight)))
