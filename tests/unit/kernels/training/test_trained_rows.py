"""The small operations of a layer with gradients: numbers against float64, bits, and what is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from tests.support.models.few_bits import libraries
from tests.support.models.live_tensors import Live
from tllm.kernels import library as module
from tllm.kernels.library import Library, using
from tllm.kernels.rows.row_operations import row_operations
from tllm.kernels.rows.torch_steps import gated_in_steps, rms_norm_in_steps, rotated_in_steps
from tllm.kernels.rows.trained_rows import TRAINED

Operation = Callable[..., Tensor]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = [(1, 2048), (3, 100), (5, 7), (130, 64), (0, 32), (70, 1000)]
"""Rows and widths: of whole vectors and not, and more than the 64 rows that are summed together."""


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=[*libraries(), None], ids=lambda library: library.instruction_set.name if library else "none")
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Library | None]:
    """Those of each instruction set, and none: torch's steps."""
    if request.param is None:
        monkeypatch.setattr(module, "library", lambda: None)
        yield None
    else:
        with using(request.param):
            yield request.param


def drawn(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape).to(dtype) for shape in shapes]


def there_and_back(operation: Operation, gradient: Tensor, *inputs: Tensor) -> list[Tensor]:
    """What comes out, and the gradients of the inputs."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    y = operation(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, gradient)]


def check(mine: Operation, written_out: Operation, gradient: Tensor, *inputs: Tensor, also: int = 1) -> list[Tensor]:
    """Near to float64's in norm, within `also` roundings more than one of the dtype."""
    found, dtype = there_and_back(mine, gradient, *inputs), gradient.dtype
    exact = there_and_back(written_out, gradient.double(), *(x.double() for x in inputs))
    for one, want, like in zip(found, exact, [gradient, *inputs], strict=True):
        assert one.dtype == dtype and one.shape == like.shape
        limit = (8 if dtype == torch.float32 else also) * torch.finfo(dtype).eps * want.norm().item()
        assert (one.double() - want).norm().item() <= limit
    return found


def gated(activation: str) -> Operation:
    return lambda x: TRAINED.gated(x, activation)


def normed(adds_one: bool) -> Operation:
    return lambda x, w: TRAINED.rms_norm(x, w, 1e-5, adds_one)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), SHAPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_gates(dtype: torch.dtype, rows: int, width: int, activation: str, kernels: Library | None) -> None:
    x, gradient = drawn(dtype, (rows, 2 * width), (rows, width))
    check(gated(activation), lambda x: gated_in_steps(x, activation), gradient, 3 * x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), SHAPES)
@pytest.mark.parametrize("adds_one", [False, True])
def test_norms(dtype: torch.dtype, rows: int, width: int, adds_one: bool, kernels: Library | None) -> None:
    x, w, gradient = drawn(dtype, (rows, width), (width,), (rows, width))
    check(normed(adds_one), lambda x, w: rms_norm_in_steps(x, w, 1e-5, adds_one), gradient, 3 * x, w)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [64, 32, 20])
def test_rotations(dtype: torch.dtype, dim: int, kernels: Library | None) -> None:
    """Of queries that lie beside keys, of which a part may not be turned."""
    x, cos, sin, gradient = drawn(dtype, (3, 9, 64), (3, 1, dim), (3, 1, dim), (3, 5, 64))

    def mine(x: Tensor) -> Tensor:
        return TRAINED.rotate_in_place(x[:, :5], cos, sin)

    def written_out(x: Tensor) -> Tensor:
        x, c, s = x[:, :5], cos.double(), sin.double()
        a, b, rest = x[..., : dim // 2], x[..., dim // 2 : dim], x[..., dim:]
        first, second = slice(0, dim // 2), slice(dim // 2, dim)
        return torch.cat((a * c[..., first] + b * s[..., first], b * c[..., second] + a * s[..., second], rest), -1)

    found = check(mine, written_out, gradient, x, also=2)
    steps = there_and_back(lambda x: rotated_in_steps(x[:, :5], cos, sin), gradient, x)
    torch.testing.assert_close(found, steps, rtol=0.02, atol=0.02)
    both = TRAINED.rotate_both(x[:, :5], x[:, 5:7], cos, sin)
    assert torch.equal(both[0], found[0]) and both[1].shape == (3, 2, 64)


CASES: list[tuple[str, Operation, tuple[tuple[int, ...], ...]]] = [
    ("gates", gated("silu"), ((300, 300), (300, 600))),
    ("gelu", gated("gelu_pytorch_tanh"), ((300, 300), (300, 600))),
    ("norms", normed(False), ((300, 300), (300, 300), (300,))),
    ("norms of 1 + w", normed(True), ((300, 300), (300, 300), (300,))),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("operation", "shapes"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_bits_are_the_same_under_every_instruction_set_and_on_any_threads(
    dtype: torch.dtype, operation: Operation, shapes: tuple[tuple[int, ...], ...]
) -> None:
    tensors, found = drawn(dtype, *shapes), list[list[Tensor]]()
    for library in libraries():
        for threads in (1, 3):
            torch.set_num_threads(threads)
            with using(library):
                found.append(there_and_back(operation, *tensors))
    assert all(torch.equal(a, b) for one in found for a, b in zip(one, found[0], strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_are_those_without_gradients(dtype: torch.dtype, kernels: Library | None) -> None:
    """As where a layer is computed once more, or its completions are sampled."""
    x, w, cos, sin = drawn(dtype, (40, 2, 64), (64,), (40, 1, 64), (40, 1, 64))

    def all_of_them() -> list[Tensor]:
        rows = row_operations(x)
        if rows is None:
            rotated = rotated_in_steps(x, cos, sin)
            return [gated_in_steps(x[:, 0], "silu"), rms_norm_in_steps(x, w, 1e-5, False), rotated]
        return [
            rows.gated(x[:, 0], "silu"),
            rows.rms_norm(x, w, 1e-5, False),
            rows.rotate_in_place(x.clone(), cos, sin),
        ]

    with torch.no_grad():
        want = all_of_them()
    assert all(torch.equal(a, b) for a, b in zip(all_of_them(), want, strict=True))


def test_numbers_that_are_none_stay_in_their_row(kernels: Library | None) -> None:
    x, w, gradient = drawn(torch.float32, (70, 64), (32,), (70, 32))
    x[3, 5] = float("nan")
    y, of_x = there_and_back(gated("silu"), gradient, x)
    assert y[3, 5].isnan() and of_x[3, 5].isnan() and of_x[3, 37].isnan() and of_x.isnan().sum() == 2
    y, of_x, of_w = there_and_back(normed(False), gradient, x[:, :32], w)
    assert y[3].isnan().all() and of_x[3].isnan().all() and y.isnan().sum() == of_x.isnan().sum() == 32
    assert of_w.isnan().all()


def test_gates_far_from_zero_have_slopes_of_zero_and_one(kernels: Library | None) -> None:
    gate = torch.tensor([[-1e4, -200.0, -90.0, 90.0, 200.0, 1e4]])
    for activation in ("silu", "gelu_pytorch_tanh"):
        _, of_x = there_and_back(gated(activation), torch.ones(1, 6), torch.cat((gate, torch.ones(1, 6)), 1))
        assert of_x[0, :3].abs().max() < 1e-30 and torch.equal(of_x[0, 3:6], torch.ones(3))
        assert of_x[0, 6:9].abs().max() < 1e-30 and torch.equal(of_x[0, 9:], gate[0, 3:])


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_nothing_is_kept_that_can_be_worked_out(dtype: torch.dtype, kernels: Library | None) -> None:
    x, w, cos, sin = drawn(dtype, (128, 2, 64), (64,), (128, 1, 64), (128, 1, 64))
    x, of_rows = x.requires_grad_(), 128 * 4 if kernels is not None and dtype != torch.float64 else 0
    with Live() as live:
        kept = [TRAINED.gated(x.view(128, 128), "silu")]
        assert live.now == kept[0].nbytes
        kept.append(TRAINED.rms_norm(x.view(128, 128)[:, :64].contiguous(), w, 1e-5, False))
        assert live.now == kept[0].nbytes + 2 * kept[1].nbytes + of_rows + w.nbytes, (
            "a copy of what came in, the scales and the weight"
        )
        kept.append(TRAINED.rotate_in_place(x, cos, sin))
        assert live.now == kept[0].nbytes + 2 * kept[1].nbytes + of_rows + w.nbytes + kept[2].nbytes


def test_a_weight_that_learns_nothing_gets_no_gradient(kernels: Library | None) -> None:
    x, w, gradient = drawn(torch.float32, (70, 64), (64,), (70, 64))
    want = there_and_back(normed(False), gradient, x, w)[1]
    assert torch.equal(there_and_back(lambda x: TRAINED.rms_norm(x, w, 1e-5, False), gradient, x)[1], want)
    assert not TRAINED.rms_norm(x, w, 1e-5, False).requires_grad


def test_a_weight_that_has_no_memory_any_more_may_still_learn(kernels: Library | None) -> None:
    """As with ZeRO-3, where its gradient is worked out after its layer was let go."""
    x, w, gradient = drawn(torch.float32, (70, 64), (64,), (70, 64))
    want = there_and_back(normed(False), gradient, x, w)
    leaves = x.requires_grad_(), w.clone().requires_grad_()
    y = normed(False)(*leaves)
    leaves[1].untyped_storage().resize_(0)
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(y, leaves, gradient), want[1:], strict=True))
