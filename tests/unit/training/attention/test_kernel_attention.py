"""Attention of training by our kernels: numbers and gradients against float64 written out, and when it is taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from tests.support.models.few_bits import libraries
from tllm.kernels.autotune import Autotuned
from tllm.kernels.fastest import Choice
from tllm.kernels.library import Library, using
from tllm.kernels.training.causal_attention import causal_attention
from tllm.model.attention import AttentionSpec
from tllm.training.attention import kernel_attention
from tllm.training.attention.kernel_attention import KERNEL, TORCH, choose_kernel
from tllm.training.attention.packed_attention import TrainAttend
from tllm.training.data.batch_tensors import Tokens

Attended = Callable[[Tensor, Tensor, Tensor], Tensor]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CASES: list[tuple[tuple[int, ...], int, int, int, int | None]] = [
    ((1,), 2, 1, 16, None),
    ((5, 70, 33), 4, 2, 32, None),
    ((100, 131), 4, 4, 64, 50),
    ((66,), 6, 2, 80, 64),
    ((130, 64), 2, 2, 128, 1000),
    ((90,), 1, 1, 48, 2),
]
"""Lengths, query heads, kv heads, width, window: blocks have 32 or 64 rows and 64 keys."""

IDS = [f"{lengths}-{heads}-{kv_heads}-{width}-{window}" for lengths, heads, kv_heads, width, window in CASES]


@pytest.fixture(autouse=True)
def _nothing_chosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(kernel_attention, "_chosen", set())
    monkeypatch.setattr(kernel_attention, "choices", Autotuned("attention of training by a kernel"))
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=libraries(), ids=lambda library: library.instruction_set.name)
def kernels(request: pytest.FixtureRequest) -> Iterator[Library]:
    with using(request.param):
        yield request.param


def written_out(lengths: tuple[int, ...], scale: float, window: int | None) -> Attended:
    """The slow twin: whole matrices of scores, document by document."""

    def attended(q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
        outs = []
        for q, k, v in zip(*(x.split(lengths) for x in (q_TNH, k_TKH, v_TKH)), strict=True):
            shared, place = q.shape[1] // k.shape[1], torch.arange(len(q))
            k_NSH, v_NSH = (x.transpose(0, 1).repeat_interleave(shared, 0) for x in (k, v))
            distance = place[:, None] - place
            seen = (distance >= 0) & (distance < (window or len(q)))
            scores = (q.transpose(0, 1) @ k_NSH.transpose(1, 2) * scale).masked_fill(~seen, float("-inf"))
            outs.append((scores.softmax(-1) @ v_NSH).transpose(0, 1))
        return torch.cat(outs)

    return attended


def drawn(lengths: tuple[int, ...], heads: int, kv_heads: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    """q, keys, values and the gradient of what comes out."""
    torch.manual_seed(0)
    tensors = [torch.randn(sum(lengths), n, width).to(dtype) for n in (heads, kv_heads, kv_heads, heads)]
    return [*(x.requires_grad_() for x in tensors[:3]), tensors[3]]


def there_and_back(attend: Attended, q: Tensor, k: Tensor, v: Tensor, gradient: Tensor) -> list[Tensor]:
    out = attend(q, k, v)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), gradient)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("lengths", "heads", "kv_heads", "width", "window"), CASES, ids=IDS)
def test_it_has_the_numbers_and_gradients_of_float64(
    lengths: tuple[int, ...],
    heads: int,
    kv_heads: int,
    width: int,
    window: int | None,
    dtype: torch.dtype,
    kernels: Library,
) -> None:
    scale, tensors = width**-0.5, drawn(lengths, heads, kv_heads, width, dtype)
    found = there_and_back(lambda q, k, v: causal_attention(q, k, v, lengths, scale, window), *tensors)
    wide = [x.detach().double().requires_grad_() for x in tensors]
    exact = there_and_back(written_out(lengths, scale, window), *wide)
    for mine, want, like in zip(found, exact, [tensors[0], *tensors[:3]], strict=True):
        assert mine.dtype == dtype and mine.shape == like.shape
        ordinary = max(want.norm().item(), want.numel() ** 0.5)  # numbers of about one, where all cancels
        limit = (8 if dtype == torch.float32 else 1) * torch.finfo(dtype).eps * ordinary
        assert (mine.double() - want).norm().item() <= limit


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_a_document_has_the_same_bits_beside_others_and_on_any_threads(dtype: torch.dtype, kernels: Library) -> None:
    lengths, scale = (70, 3, 129), 0.2
    tensors = drawn(lengths, 4, 2, 32, dtype)

    def attend(some: tuple[int, ...]) -> Attended:
        return lambda q, k, v: causal_attention(q, k, v, some, scale)

    torch.set_num_threads(1)
    together = [x.split(lengths) for x in there_and_back(attend(lengths), *tensors)]
    torch.set_num_threads(3)
    again = [x.split(lengths) for x in there_and_back(attend(lengths), *tensors)]
    for n, length in enumerate(lengths):
        of_document = [x.detach().split(lengths)[n] for x in tensors]
        alone = there_and_back(attend((length,)), *(x.requires_grad_() for x in of_document[:3]), of_document[3])
        for whole, anew, single in zip(together, again, alone, strict=True):
            assert torch.equal(whole[n], single) and torch.equal(anew[n], single)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_tokens_may_lie_apart(dtype: torch.dtype, kernels: Library) -> None:
    """As q, keys and values do that one product gives side by side."""
    lengths = (40, 25)
    side_by_side = torch.randn(65, 8, 32).to(dtype)
    parts = side_by_side.split([4, 2, 2], dim=1)
    assert not parts[1].is_contiguous()
    gradient = torch.randn(65, 4, 32).to(dtype)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return causal_attention(q, k, v, lengths, 0.2)

    found = there_and_back(attend, *(x.requires_grad_() for x in parts), gradient)
    want = there_and_back(attend, *(x.detach().contiguous().requires_grad_() for x in parts), gradient)
    heads_first = [x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for x in parts]
    for mine, same, other in zip(found, want, there_and_back(attend, *heads_first, gradient), strict=True):
        assert torch.equal(mine, same) and torch.equal(mine, other)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_large_scores_and_numbers_that_are_none_stay_what_they_are(dtype: torch.dtype, kernels: Library) -> None:
    """A row of one large score has the value of its key; a number that is none is met by those after it in its
    document."""
    q, k, v, gradient = drawn((70, 30), 1, 1, 16, dtype)
    with torch.no_grad():
        k *= 1000
        q[10] = k[4] / k[4].norm()
        v[20] = float("nan")
    out, *gradients = there_and_back(lambda q, k, v: causal_attention(q, k, v, (70, 30), 1.0), q, k, v, gradient)
    assert out[20:70].isnan().all() and out[70:].isfinite().all()
    assert all(x[70:].isfinite().all() for x in gradients)
    v = v.detach().nan_to_num().requires_grad_()
    out, *gradients = there_and_back(lambda q, k, v: causal_attention(q, k, v, (70, 30), 1.0), q, k, v, gradient)
    assert torch.equal(out[10], v.detach()[4])
    assert all(x.isfinite().all() for x in (out, *gradients))


@pytest.mark.parametrize(("name", "by_kernel"), [(KERNEL, True), (TORCH, False)])
def test_it_is_taken_where_it_was_found_faster(monkeypatch: pytest.MonkeyPatch, name: str, by_kernel: bool) -> None:
    asked: list[torch.dtype] = []

    def measure(dtype: torch.dtype) -> Choice:
        asked.append(dtype)
        return Choice(name, {KERNEL: 1.0, TORCH: 1.0})

    monkeypatch.setattr(kernel_attention, "measure", measure)
    assert not choose_kernel(torch.float64) and not choose_kernel(torch.float32, fixed=True) and not asked
    assert choose_kernel(torch.float32) == by_kernel
    assert choose_kernel(torch.float32) == by_kernel and asked == [torch.float32], "measured once"
    q, k, v, _ = drawn((20, 28), 4, 2, 16, torch.float32)
    ran = calls_of_the_kernel(monkeypatch)
    attend(AttentionSpec(scale=0.25), q, k, v)
    assert len(ran) == by_kernel
    assert not choose_kernel(torch.float32, fixed=True), "though it is known by now"
    attend(AttentionSpec(scale=0.25), q, k, v)
    assert len(ran) == by_kernel


def test_it_takes_no_caps_sinks_prefixes_nor_fewer_parts_than_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_attention._chosen.add(torch.float32)
    ran = calls_of_the_kernel(monkeypatch)
    q, k, v, _ = drawn((20, 28), 4, 2, 16, torch.float32)
    spec = AttentionSpec(scale=0.25)
    attend(AttentionSpec(scale=0.25, softcap=5.0), q, k, v)
    attend(spec, q, k, v, sinks_N=torch.zeros(4))
    attend(spec, q, k, v, prefixes=(None, 0))
    attend(spec, q, k, v[..., :8])
    attend(spec, q[..., :8], k[..., :8], v[..., :8])
    torch.set_num_threads(5)
    attend(spec, q, k, v)
    assert not ran
    torch.set_num_threads(4)
    attend(spec, q, k, v)
    assert ran == [[20, 28]]


@pytest.mark.parametrize("window", [None, 7])
def test_layers_have_the_numbers_that_they_have_by_torch(window: int | None) -> None:
    """Query heads that do not share keys evenly, too."""
    q, k, v, gradient = drawn((20, 28), 4, 3, 16, torch.float32)
    spec = AttentionSpec(scale=0.25, window=window, kv_index=(0, 0, 1, 2))
    want = there_and_back(lambda *x: attend(spec, *x), q, k, v, gradient)
    kernel_attention._chosen.add(torch.float32)
    torch.testing.assert_close(there_and_back(lambda *x: attend(spec, *x), q, k, v, gradient), want)


def calls_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The documents of each call from now on."""
    ran: list[list[int]] = []

    def run(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], scale: float, window: int | None) -> Tensor:
        ran.append(list(lengths))
        return causal_attention(q, k, v, lengths, scale, window)

    monkeypatch.setattr("tllm.training.attention.packed_attention.causal_attention", run)
    return ran


def attend(
    spec: AttentionSpec,
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    sinks_N: Tensor | None = None,
    prefixes: tuple[int | None, ...] = (),
) -> Tensor:
    """Over documents of 20 and 28 tokens."""
    nothing = torch.zeros(48, dtype=torch.int64)
    tokens = Tokens(nothing, nothing, nothing, [20, 28], prefixes=prefixes)
    return TrainAttend({0: spec}, tokens)(0, q_TNH, k_TKH, v_TKH, sinks_N)
