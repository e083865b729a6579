"""The kernels of 64-bit ARM, by an emulator: they pass the tests of this processor's, whose bits they have.

No machine that runs this suite has such a processor, and products with codes of 4 bits were wrong there for weeks.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.support.kernels.emulated_kernels import compile_for, emulated, emulator
from tests.support.models import few_bits
from tests.support.models.few_bits import KINDS
from tests.support.selection import soak_but
from tests.unit.kernels import (
    test_cache_codes,
    test_float_product,
    test_gumbel_max,
    test_paged_attention,
    test_quantized_matmul,
    test_router,
    test_row_operations,
)
from tests.unit.kernels.training import test_float_gradients, test_trained_rows
from tests.unit.quantization import test_round_weights
from tests.unit.training.attention import test_kernel_attention
from tllm.kernels import gumbel_max
from tllm.kernels.instruction_sets import INSTRUCTION_SETS
from tllm.kernels.library import Library, using
from tllm.kernels.product_ways import Way

MACHINE = "aarch64"
ARM = [one for one in INSTRUCTION_SETS if one.machine == MACHINE]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

pytestmark = [
    pytest.mark.slow,  # to compile them takes a quarter of a minute of a processor
    pytest.mark.timeout(300),
    pytest.mark.skipif(emulator(MACHINE) is None, reason=f"there is no qemu-{MACHINE} (Debian: qemu-user-static)"),
]


@pytest.fixture(scope="module", params=soak_but(ARM[:1], ARM), ids=lambda one: one.name)
def arm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Library]:
    program = compile_for(request.param, tmp_path_factory.mktemp("kernels"))
    with pytest.MonkeyPatch.context() as patched:
        yield emulated(request.param, program, patched)


@pytest.fixture(autouse=True)
def both(arm: Library, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tests that compare the instruction sets find this one, and one of the processor that is here."""
    here, threads = few_bits.libraries()[-1], torch.get_num_threads()
    for module in (test_cache_codes, test_paged_attention, test_row_operations, test_router, test_trained_rows):
        monkeypatch.setattr(module, "libraries", lambda: [arm, here])
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("kind", KINDS)
def test_products_of_few_bits(kind: str, arm: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_quantized_matmul, "SHAPES", [(37, 544), (5, 48)])
    monkeypatch.setattr(test_quantized_matmul, "ROWS", [1, 2, 5, 13])
    for way in (Way.ONE_BY_ONE, Way.SIDE_BY_SIDE):
        kernels = few_bits.take((arm, way), monkeypatch)
        test_quantized_matmul.test_bits_are_those_of_the_slow_twin(kind, kernels)


def test_parts_of_several_formats(arm: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    test_quantized_matmul.test_parts_of_several_formats_make_one_weight(
        few_bits.take((arm, Way.SIDE_BY_SIDE), monkeypatch)
    )


@pytest.mark.parametrize("kind", test_round_weights.KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounded_and_packed_weights(
    kind: str, dtype: torch.dtype, arm: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forget() -> None:
        monkeypatch.setattr(test_round_weights.round_weights, "library", lambda: None)
        monkeypatch.setattr(test_round_weights.packed_layout, "library", lambda: None)

    with using(arm):
        test_round_weights.test_the_kernel_is_the_plain_steps(dtype, kind, 100, forget)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_plain_products(dtype: torch.dtype, arm: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_float_product, "SHAPES", test_float_product.SHAPES[:1] + test_float_product.SHAPES[3:])
    test_float_product.test_the_kernel_has_the_same_bits_everywhere(arm, dtype, monkeypatch)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_small_operations(dtype: torch.dtype) -> None:
    test_row_operations.test_norm(dtype, 3, 100, adds_one=False)
    test_row_operations.test_gated_activations(dtype, 3, 100)
    test_row_operations.test_clamped_activations_of_gates_and_ups_by_turns(dtype, 5, 7)
    test_row_operations.test_rotation_of_part_of_each_head(dtype, 20)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_routers(dtype: torch.dtype, arm: Library) -> None:
    test_router.test_products_have_the_bits_of_the_slow_twin(arm, dtype, 7, 100)
    test_router.test_scores_are_near_those_in_float64_and_alike_everywhere(60)
    with using(arm):
        test_router.test_scores_of_extreme_logits(arm)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention(dtype: torch.dtype) -> None:
    for width in (16, 48, 128):
        test_paged_attention.test_single_tokens_of_several_sequences(dtype, width, 1.5)


def test_attention_of_a_prompt() -> None:
    test_paged_attention.test_a_prompt_has_the_same_bits_in_any_tiles(20, has_sinks=True, softcap=1.5)


@pytest.mark.parametrize("kind", test_cache_codes.KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cached_codes(kind: str, dtype: torch.dtype) -> None:
    test_cache_codes.test_rows_are_rounded_as_the_twin_rounds_them(kind, dtype, 40)
    test_cache_codes.test_attention_is_that_over_the_numbers_read(kind, dtype, 48, 1.5)


def test_draws(arm: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gumbel_max, "kernels_for", lambda x: arm)
    test_gumbel_max.test_tokens_as_likely_as_the_last_one_stay()
    test_gumbel_max.test_rows_without_numbers_give_no_token()


def test_gradients_of_products(arm: Library) -> None:
    with using(arm):
        for shape in test_float_gradients.SHAPES[1:3]:
            test_float_gradients.test_they_are_those_of_float64(shape, 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_of_small_operations(dtype: torch.dtype) -> None:
    for _, operation, shapes in test_trained_rows.CASES:
        few = tuple((20, shape[-1]) if len(shape) > 1 else shape for shape in shapes)
        test_trained_rows.test_bits_are_the_same_under_every_instruction_set_and_on_any_threads(dtype, operation, few)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_of_attention(dtype: torch.dtype, arm: Library) -> None:
    with using(arm):
        for case in test_kernel_attention.CASES[::3]:
            test_kernel_attention.test_it_has_the_numbers_and_gradients_of_float64(*case, dtype, arm)
