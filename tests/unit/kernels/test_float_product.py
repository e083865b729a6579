"""Products with plain weights: every candidate computes the same, and the fastest one is found by timing them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from ctypes import CDLL, CFUNCTYPE, c_int, c_uint, c_void_p, cast
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.models.few_bits import libraries
from tests.unit.kernels.clocks import Clocks
from tllm.core.program import PREPARED
from tllm.kernels import float_product
from tllm.kernels.autotune import Autotuned
from tllm.kernels.fastest import LONG, REPEATS
from tllm.kernels.float_product import (
    CANDIDATES,
    IN_DOUBLING,
    IN_DOUBLING_OF_LARGE,
    LARGE_BYTES,
    ROWS_BY_TILES,
    TILE_ROWS,
    float_matmul,
    is_prepared,
    measure,
    names_for,
    product_name,
)
from tllm.kernels.library import Library, path_of
from tllm.kernels.product_ways import ROW_WAYS, TURNS, ProductWays, Way
from tllm.kernels.recording.recorder import recordable


@pytest.fixture(autouse=True)
def _nothing_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float_product, "choices", Autotuned("product"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 64])
@pytest.mark.parametrize(("outputs", "columns"), [(33, 100), (64, 256), (3, 7)])
def test_candidates_compute_the_same(dtype: torch.dtype, rows: int, outputs: int, columns: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(rows, columns).to(dtype), torch.randn(outputs, columns).to(dtype)
    want = x.double() @ weight.double().T
    size = x.double().abs() @ weight.double().abs().T
    # oneDNN's own product comes to 2.7e-7 with AVX-512 on an Intel Xeon, where sums have another order.
    rounding = {torch.float32: 4e-7, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    for name in names_for(x, weight):
        found = CANDIDATES[name](x, weight)
        assert found.dtype == dtype and found.is_contiguous()
        assert ((found.double() - want).abs() / size).max() < rounding, name


SHAPES = [(21, 310), (101, 700), (8, 64), (3, 7)]
"""The second has more outputs than a panel, and more columns than a piece of some rows."""

ROWS = [1, 2, 3, 5, 8, 13, 21]
"""The last are more than share what is read of a weight."""


def twin(x_TD: Tensor, weight_FD: Tensor) -> Tensor:
    """What the kernel's sums are: over 16 lanes, in float32. Of bfloat16 a lane has two neighbours of 32 columns."""
    products = x_TD.float()[:, None, :] * weight_FD.float()
    whole = products.shape[-1] // 32 * 32 if weight_FD.dtype == torch.bfloat16 else 0
    paired, rest = products[..., :whole], products[..., whole:]
    steps = [paired[..., k + i : k + 32 : 2] for k in range(0, whole, 32) for i in range(2)]
    steps += [torch.nn.functional.pad(one, (0, 16 - one.shape[-1])) for one in rest.split(16, -1) if one.shape[-1]]
    sums = torch.zeros_like(steps[0])
    for step in steps:
        sums = sums + step
    for half in (8, 4, 2, 1):
        sums = sums[..., :half] + sums[..., half : 2 * half]
    return sums[..., 0].to(x_TD.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("library", libraries(), ids=lambda library: library.instruction_set.name)
def test_the_kernel_has_the_same_bits_everywhere(
    library: object, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every instruction set and for any number of rows: products of two numbers of 16 bits are exact."""
    monkeypatch.setattr(float_product, "library", lambda: library)
    torch.manual_seed(0)
    for outputs, columns in SHAPES:
        x, weight = torch.randn(ROWS[-1], columns).to(dtype).float(), torch.randn(outputs, columns).to(dtype)
        want = twin(x, weight)
        for rows in ROWS:
            assert torch.equal(CANDIDATES["kernel"](x[:rows], weight), want[:rows])
        assert torch.equal(CANDIDATES["kernel, one by one"](x[:1], weight), want[:1])


def twin_by_pairs(x_TD: Tensor, weight_FD: Tensor) -> Tensor:
    """The same with both numbers of a pair in one step, the second product first: so Intel defines VDPBF16PS."""
    products = x_TD.float()[:, None, :] * weight_FD.float()
    sums = torch.zeros(*products.shape[:2], 16)
    for k in range(0, products.shape[-1], 32):
        sums = sums + products[..., k + 1 : k + 32 : 2] + products[..., k : k + 32 : 2]
    for half in (8, 4, 2, 1):
        sums = sums[..., :half] + sums[..., half : 2 * half]
    return sums[..., 0].to(x_TD.dtype)


PAIRED = [library for library in libraries() if library.has_pairs]


@pytest.mark.skipif(not PAIRED, reason="this processor does not multiply by pairs")
@pytest.mark.parametrize("library", PAIRED, ids=lambda library: library.instruction_set.name)
def test_products_by_pairs_have_the_same_bits_for_any_number_of_rows(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(float_product, "library", lambda: library)
    torch.manual_seed(0)
    for outputs, columns in [(21, 320), (101, 2720), (3, 32)]:
        x, weight = torch.randn(ROWS[-1], columns).bfloat16(), torch.randn(outputs, columns).bfloat16()
        want = twin_by_pairs(x, weight)
        for rows in ROWS:
            assert torch.equal(CANDIDATES["kernel by pairs"](x[:rows], weight), want[:rows])


@pytest.mark.parametrize("library", libraries(), ids=lambda library: library.instruction_set.name)
def test_pairs_multiply_what_fits_them(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float_product, "library", lambda: library)
    name, x, weight = "kernel by pairs", torch.ones(3, 64).bfloat16(), torch.ones(31, 64).bfloat16()
    assert (name in names_for(x, weight)) == library.has_pairs
    assert name not in names_for(x[:1], weight), "a single row waits for memory"
    assert name not in names_for(x[:, :48], weight[:, :48].contiguous())
    assert name not in names_for(x, torch.ones(64, 32).bfloat16().t())
    assert name not in names_for(x.float(), weight) and name not in names_for(x, weight.float())


@pytest.mark.parametrize(("least", "added"), [(LARGE_BYTES, 1 / 4), (0, 1 / 8)], ids=["small", "large"])
def test_beside_a_weight_there_are_few_numbers_of_rows(
    least: int, added: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a batch of a server: all that is prepared for the four weights of a layer is kept."""
    made = list[int]()

    def linear(x: Tensor, weight: Tensor) -> Tensor:
        made.append(len(x))
        return x @ weight.T

    monkeypatch.setattr("torch.nn.functional.linear", linear)
    monkeypatch.setattr(float_product, "is_prepared", lambda dtype: dtype == torch.bfloat16)
    monkeypatch.setattr(float_product, "LARGE_BYTES", least)
    weight = torch.ones(2, 3)
    for rows in range(1, 1025):
        for name in ("linear", "W x^T"):
            made_so = CANDIDATES[name](torch.ones(rows, 3).bfloat16(), weight.bfloat16())
            assert made_so.tolist() == [[3.0, 3.0]] * rows
        assert rows <= made[-1] < max(rows + TILE_ROWS, rows * (1 + added))
    assert 4 * len(set(made)) <= int(PREPARED["LRU_CACHE_CAPACITY"])
    CANDIDATES["linear"](torch.ones(77, 3), weight)
    assert made[-1] == 77, "other products are not prepared"


COUNT = """
import json, os, sys, torch
from tllm.kernels import float_product
from tllm.parallel.lora.lora_update import LoraModule, LoraUpdate
from tllm.parallel.shard import Shard, ShardPiece, cut_parameter

def multiply(least, product, rows, outputs):
    float_product.LARGE_BYTES = least
    whole = (0, outputs), (0, 32)
    weight = cut_parameter((outputs, 32), Shard((ShardPiece("m.weight", whole),), True))
    update = LoraUpdate(weight, {"m": LoraModule(rank=16, scale=1.0)}).bfloat16()
    weight = weight.bfloat16()
    with torch.inference_mode():
        for count in rows:
            x = torch.ones(count, 32, dtype=torch.bfloat16)
            update(x) if product == "update" else float_product.float_matmul(x, weight)

# Each line is for a process that has loaded torch, and prepared nothing.
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        multiply(*json.loads(line))
        os._exit(0)
    print("ended with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def counting() -> Iterator[subprocess.Popen[str]]:
    """Starts processes in which oneDNN tells what it prepares."""
    env = {**os.environ, "ONEDNN_VERBOSE": "profile_create", "PYTHONPATH": os.pathsep.join(sys.path)}
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", COUNT], env=env, stdin=pipe, stdout=pipe, text=True) as process:
        yield process


@pytest.mark.skipif(not is_prepared(torch.bfloat16), reason="nothing is prepared on this processor")
@pytest.mark.parametrize("least", [LARGE_BYTES, 0], ids=["small", "large"])
def test_what_onednn_prepares_does_not_grow_with_the_batches(least: int, counting: subprocess.Popen[str]) -> None:
    """Counted by oneDNN itself: 192 numbers of rows, and each that is new to it would be prepared."""
    in_doubling = IN_DOUBLING if least else IN_DOUBLING_OF_LARGE
    numbers = 4 + 3 * in_doubling  # of tiles up to 128, and in the three doublings to 1,024
    assert 0 < prepared(counting, least, "float_matmul") <= numbers
    assert 0 < prepared(counting, least, "update") <= 2 * numbers, "A and B of an adapter"


@pytest.mark.skipif(not is_prepared(torch.bfloat16), reason="nothing is prepared on this processor")
@pytest.mark.skipif(not any(one.has_tiles for one in libraries()), reason="this processor has no tiles")
def test_beside_small_weights_onednn_prepares_nothing_for_most_batches(counting: subprocess.Popen[str]) -> None:
    """Tiles do these, whose outputs and columns they take: what is prepared is half a MiB for each number of rows."""
    product = "float_matmul"
    assert prepared(counting, LARGE_BYTES, product, range(1, ROWS_BY_TILES + 1), outputs=64) == 0
    assert prepared(counting, LARGE_BYTES, product, range(1, ROWS_BY_TILES + 1), outputs=48) > 0
    assert 0 < prepared(counting, LARGE_BYTES, product, range(ROWS_BY_TILES + 1, 1025), outputs=64) <= 2 * IN_DOUBLING


def prepared(
    counting: subprocess.Popen[str], least: int, product: str, rows: range = range(65, 1025, 5), outputs: int = 48
) -> int:
    """How many products oneDNN prepares in a new process for these numbers of rows."""
    assert counting.stdin is not None and counting.stdout is not None
    counting.stdin.write(json.dumps([least, product, [*rows], outputs]) + "\n")
    counting.stdin.flush()
    said = list[str]()
    while not (line := counting.stdout.readline()).startswith("ended with"):
        assert line, "who starts them has ended"
        said.append(line)
    assert line == "ended with 0\n"
    return sum("create:cache_miss" in line for line in said)


@pytest.mark.parametrize("library", libraries(), ids=lambda library: library.instruction_set.name)
def test_a_number_depends_on_nothing_beside_it(library: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, where sums are rounded in one order whatever other rows and outputs there are."""
    monkeypatch.setattr(float_product, "library", lambda: library)
    torch.manual_seed(0)
    for outputs, columns in SHAPES:
        x, weight = torch.randn(ROWS[-1], columns), torch.randn(outputs, columns)
        whole = CANDIDATES["kernel"](x, weight)
        assert torch.allclose(whole, x @ weight.T, rtol=1e-5, atol=1e-4)
        for rows in ROWS:
            assert torch.equal(CANDIDATES["kernel"](x[-rows:], weight), whole[-rows:])
        assert torch.equal(CANDIDATES["kernel"](x, weight[1:]), whole[:, 1:])


TILED = [lib for lib in libraries() if lib.has_tiles]
TILED_SHAPES = [(32, 32), (96, 288), (64, 2048)]
TILED_ROWS = [1, 16, 17, 33, 64, 70]
"""Up to a tile, two, and several pairs of these, of which the last has one or two."""


def twin_of_tiles(x_TD: Tensor, weight_FD: Tensor) -> Tensor:
    """What a product by tiles sums: of each 32 columns the even and the odd ones apart, in float32."""
    sums = torch.zeros(len(x_TD), len(weight_FD))
    for k in range(0, x_TD.shape[1], 32):
        products = x_TD.float()[:, None, k : k + 32] * weight_FD.float()[:, k : k + 32]
        even, odd = torch.zeros_like(sums), torch.zeros_like(sums)
        for pair in range(0, 32, 2):
            even, odd = even + products[..., pair], odd + products[..., pair + 1]
        sums = sums + (even + odd)
    return sums.to(x_TD.dtype)


@pytest.mark.skipif(not TILED, reason="this processor has no tiles")
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("outputs", "columns"), TILED_SHAPES)
def test_a_product_by_tiles_has_the_bits_of_its_twin(
    outputs: int, columns: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For any number of rows, and whatever else is computed beside one."""
    monkeypatch.setattr(float_product, "library", lambda: TILED[0])
    torch.manual_seed(0)
    x, weight = torch.randn(TILED_ROWS[-1], columns).bfloat16(), torch.randn(outputs, columns).bfloat16()
    x[3, 5] = float("nan")  # of one row only
    want, before = twin_of_tiles(x, weight), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for rows in TILED_ROWS:
            found = CANDIDATES["tiles"](x[:rows], weight)
            torch.testing.assert_close(found, want[:rows], rtol=0, atol=0, equal_nan=True)
            found = CANDIDATES["tiles"](x[-rows:], weight[32:])
            torch.testing.assert_close(found, want[-rows:, 32:], rtol=0, atol=0, equal_nan=True)
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(not TILED, reason="this processor has no tiles")
@pytest.mark.parametrize(("outputs", "columns"), [(32, 256), (160, 544)])
def test_many_rows_have_the_bits_of_few(outputs: int, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more than 128 rows columns are taken in blocks of 256; of more than 512, and of 128 outputs, these first."""
    monkeypatch.setattr(float_product, "library", lambda: TILED[0])
    torch.manual_seed(0)
    x, weight = torch.randn(1030, columns).bfloat16(), torch.randn(outputs, columns).bfloat16()
    want = torch.cat([CANDIDATES["tiles"](some, weight) for some in x.split(70)])
    assert torch.equal(want[:70], twin_of_tiles(x[:70], weight))
    for rows in (128, 129, 140, 511, 512, 513, 530, 1030):
        assert torch.equal(CANDIDATES["tiles"](x[:rows], weight), want[:rows])
        assert torch.equal(CANDIDATES["tiles"](x[-rows:], weight[-32:]), want[-rows:, -32:])


@pytest.mark.parametrize("library", libraries(), ids=lambda library: library.instruction_set.name)
def test_tiles_multiply_what_fits_them(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where all products are to be the kernels', so that they can be played."""
    monkeypatch.setattr(float_product, "library", lambda: library)
    x, weight = torch.ones(3, 64).bfloat16(), torch.ones(32, 64).bfloat16()
    assert ("tiles" in names_for(x, weight)) == library.has_tiles
    assert "tiles" not in names_for(x, weight[:31])
    assert "tiles" not in names_for(x[:, :48], weight[:, :48].contiguous())
    assert "tiles" not in names_for(x, torch.ones(64, 32).bfloat16().t())
    assert "tiles" not in names_for(x.float(), weight.float())
    monkeypatch.setattr(float_product, "library", lambda: recordable(library))
    few = "kernel by pairs" if library.has_pairs else "kernel"
    assert product_name(x, weight) == ("tiles" if library.has_tiles else few)
    assert product_name(x, weight[:31]) == few
    assert product_name(x[:1], weight[:31]) == "kernel"


BODY = CFUNCTYPE(None, c_void_p)
FORK = CFUNCTYPE(None, c_void_p, c_void_p, c_uint, c_uint)
NUMBER = CFUNCTYPE(c_int)


@pytest.mark.parametrize("library", libraries(), ids=lambda library: library.instruction_set.name)
@pytest.mark.parametrize("outputs", [17, 64, 5000])
def test_what_one_thread_does_not_come_to_the_others_do(
    library: Library, outputs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three threads only the last one ever comes here, as on a machine whose other cores do something else."""
    path = shutil.copy(path_of(library.instruction_set), tmp_path)  # loaded anew, so that it has threads of its own
    kernels, forks = Library(library.instruction_set, Path(path)), list[int]()

    def fork(body: int, data: int, threads: int, flags: int) -> None:
        forks.append(threads)
        BODY(body)(data)

    callbacks = FORK(fork), NUMBER(lambda: 2), NUMBER(lambda: 3)
    CDLL(path).tllm_set_threads(*(cast(one, c_void_p) for one in callbacks))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(float_product, "library", lambda: kernels)
    torch.manual_seed(0)
    x, weight = torch.randn(2, 64), torch.randn(outputs, 64)
    found = float_product.CANDIDATES["kernel"](x, weight)
    monkeypatch.setattr(float_product, "library", lambda: library)
    assert torch.equal(found, float_product.CANDIDATES["kernel"](x, weight))
    assert forks == [3]


def test_the_fastest_is_taken_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float_product, "MEASURED_BYTES", 0)
    clocks, used = Clocks(monkeypatch), list[str]()
    takes_long, takes_less = clocks.takes(5e-3, 0.0), clocks.takes(1e-3, 0.0)

    def slow(x: Tensor, weight: Tensor) -> Tensor:
        takes_long()
        return x @ weight.T

    def fast(x: Tensor, weight: Tensor) -> Tensor:
        takes_less()
        used.append("fast")
        return x @ weight.T

    monkeypatch.setattr(float_product, "CANDIDATES", {"linear": slow, "W x^T": fast})
    x, weight = torch.randn(3, 16), torch.randn(8, 16)
    float_matmul(x, weight)
    (kind, choice), *more = float_product.choices.known.items()
    assert not more and choice.name == "W x^T" and (kind.rows, kind.outputs, kind.columns) == (4, 8, 16)
    used.clear()
    float_matmul(torch.randn(4, 16), weight)
    assert used == ["fast"] and len(float_product.choices.known) == 1


@pytest.mark.skipif(not TILED, reason="this processor has no tiles")
@pytest.mark.parametrize(("seconds", "taken"), [(0.95e-3, "tiles"), (0.85e-3, "linear")])
def test_tiles_multiply_many_rows_unless_onednn_is_clearly_faster(
    seconds: float, taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clocks, weight = Clocks(monkeypatch), torch.ones(512, 1024).bfloat16()
    seconds_of = {"linear": seconds, "tiles": 1e-3, "kernel": 0.1e-3}
    work = {name: clocks.takes(taking, 0.0) for name, taking in seconds_of.items()}
    monkeypatch.setattr(float_product, "library", lambda: TILED[0])
    monkeypatch.setattr(float_product, "CANDIDATES", {name: lambda x, w, run=run: run() for name, run in work.items()})
    assert product_name(torch.ones(65, 1024).bfloat16(), weight) == taken
    assert product_name(torch.ones(64, 1024).bfloat16(), weight) == "kernel", "of few rows all are timed"


def test_a_hopeless_candidate_is_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks, calls = Clocks(monkeypatch), list[str]()

    def taking(name: str, seconds: float) -> Callable[[Tensor, Tensor], Tensor]:
        run = clocks.takes(seconds, 0.0)

        def product(x: Tensor, weight: Tensor) -> Tensor:
            run()
            calls.append(name)
            return x @ weight.T

        return product

    monkeypatch.setattr(
        float_product, "CANDIDATES", {"linear": taking("fast", 1e-3), "W x^T": taking("slow", 1.2 * LONG)}
    )
    assert measure(torch.randn(3, 16), torch.randn(8, 16)).name == "linear"
    assert calls.count("slow") == 1 and calls.count("fast") == REPEATS


@pytest.mark.parametrize("faster", ROW_WAYS)
def test_a_recorded_row_is_multiplied_in_the_way_that_is_the_fastest(
    faster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found on the products themselves, which are right meanwhile. Of several rows there is one way."""
    clocks, ways = Clocks(monkeypatch), list[Way]()
    takes_long, takes_less = clocks.takes(2e-3, 0.0), clocks.takes(1e-3, 0.0)
    kernels = recordable(libraries()[-1])
    made = kernels.float_matmul

    def matmul(*arguments: Any) -> None:
        ways.append(arguments[-2])
        (takes_less if ROW_WAYS[faster] == arguments[-2] else takes_long)()
        made(*arguments)

    kernels.float_matmul = matmul
    monkeypatch.setenv("TLLM_AUTOTUNE_CACHE", "off")
    monkeypatch.setattr(float_product, "row_ways", ProductWays("a row by the kernel"))
    monkeypatch.setattr(float_product, "MEASURED_BYTES", 0)
    monkeypatch.setattr(float_product, "library", lambda: kernels)
    x, weight = torch.randn(3, 70), torch.randn(20, 70)
    for _ in range(2 * TURNS + 2):
        torch.testing.assert_close(float_matmul(x[:1], weight), x[:1] @ weight.T)
    assert ways[: 2 * TURNS] == [*ROW_WAYS.values()] * TURNS and set(ways[2 * TURNS :]) == {ROW_WAYS[faster]}
    ways.clear()
    float_matmul(x, weight)
    assert ways == [Way.SIDE_BY_SIDE]


def test_small_weights_and_many_rows_are_torchs() -> None:
    float_matmul(torch.randn(3, 16), torch.randn(8, 16))
    float_matmul(torch.randn(100, 1024), torch.randn(2048, 1024))
    assert not float_product.choices.known
