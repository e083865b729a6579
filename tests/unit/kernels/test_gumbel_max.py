"""Draws by every kernel and by torch: whom top-p leaves, against plain references, and the noise itself."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.support.models.few_bits import libraries
from tllm.kernels import gumbel_max as module
from tllm.kernels.gumbel_max import RACE_SPREAD, Draws, gumbel_max, gumbel_noise, noise_starts
from tllm.kernels.splitmix64 import GOLDEN_GAMMA, splitmix64

MASK = 2**64 - 1


@pytest.fixture(params=[*libraries(), None], ids=lambda one: one.instruction_set.name if one else "torch")
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "kernels_for", lambda x: request.param)


def column(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)[:, None]


def of_seeds(count: int, least: float | None = None, top_p: float | None = None) -> Draws:
    limits = (None if one is None else column(one).expand(count, 1) for one in (least, top_p))
    return Draws(column(1.0).expand(count, 1), torch.arange(count)[:, None], torch.full((count, 1), 3), *limits)


def of_repeated(draws: Draws, times: int) -> Draws:
    temperatures, seeds, positions, top_p = (
        torch.cat([x] * times) for x in (draws.temperatures, draws.seeds, draws.positions, draws.top_p) if x is not None
    )
    return Draws(temperatures, seeds, positions, top_p=top_p)


def drawn(scores: list[float], count: int, least: float | None = None, top_p: float | None = None) -> list[int]:
    """How often each token is drawn, by `count` seeds."""
    ids = gumbel_max(torch.tensor(scores).expand(count, -1), of_seeds(count, least, top_p))
    return torch.bincount(ids, minlength=len(scores)).tolist()


@pytest.mark.usefixtures("kernels")
def test_draws_follow_the_chances_of_what_is_left() -> None:
    scores, count = [0.0, 1.0, 2.0, -1.0, 0.5, -9.0], 20_000
    for least, top_p, lowest in (
        (None, None, -9.0),
        (-1.6, None, 0.5),  # of the best, 2
        (None, 0.79, 0.5),  # 2 and 1 have 0.77 together
        (-1.1, 0.7, 2.0),  # 2 has 0.73 of what is left
    ):
        left = [math.exp(score) if score >= lowest else 0.0 for score in scores]
        for times, chance in zip(drawn(scores, count, least, top_p), left, strict=True):
            want = chance / sum(left)
            assert abs(times - count * want) <= 5 * math.sqrt(count * want * (1 - want)), (least, top_p)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("slope", [1e-4, 1e-3, 4e-3])
def test_top_p_leaves_as_many_as_it_must(slope: float) -> None:
    scores_V = torch.arange(3000) * -slope
    chances = torch.softmax(scores_V.double(), 0)
    want = int((chances.cumsum(0) - chances < 0.9).sum())
    ids = gumbel_max(scores_V.expand(500, -1), of_seeds(500, top_p=0.9))
    assert 0.95 * want < int(ids.max()) < want


@pytest.mark.usefixtures("kernels")
def test_tokens_as_likely_as_the_last_one_stay() -> None:
    for least, top_p in ((-1.0, None), (None, 0.6)):
        counts = drawn([-1.0, 0.0, -1.0, -2.0], 400, least, top_p)
        assert all(counts[:3]) and not counts[3]


@pytest.mark.usefixtures("kernels")
def test_rows_without_numbers_give_no_token() -> None:
    nan, inf = math.nan, math.inf
    for width in (5, 37):  # inside whole vectors, and after them
        row = torch.zeros(width)
        rows = torch.stack([row.clone().index_fill_(0, torch.tensor([width - 1]), x) for x in (nan, inf, -inf)])
        rows = torch.cat([rows, row.fill_(-inf)[None]])
        ids = gumbel_max(rows, of_seeds(4, top_p=0.9)).tolist()
        assert ids[0] == ids[1] == ids[3] == width and ids[2] < width - 1


@pytest.mark.usefixtures("kernels")
def test_a_draw_does_not_depend_on_other_rows_or_threads() -> None:
    torch.manual_seed(0)
    rows, wide = torch.randn(40, 1000) * 3, torch.randn(40, 1500)
    draws = of_seeds(40, top_p=0.9)
    want = gumbel_max(rows, draws)
    assert torch.equal(torch.cat([gumbel_max(rows[at : at + 1], draws.rows(at, at + 1)) for at in range(40)]), want)
    wide[:, 250:1250] = rows
    assert torch.equal(gumbel_max(wide[:, 250:1250], draws), want), "rows that do not follow one another in memory"
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    many = gumbel_max(rows.repeat(3, 1), of_repeated(draws, 3))
    torch.set_num_threads(before)
    assert torch.equal(many, want.repeat(3))


def test_noise_is_gumbels_and_a_tokens_own() -> None:
    def noise(ids: Tensor, seed: int, position: int) -> Tensor:
        return gumbel_noise(ids, noise_starts(torch.tensor(seed), torch.tensor(position)))

    ids = torch.arange(100_000)
    found = noise(ids, 7, 3)
    assert torch.equal(noise(ids[5::7], 7, 3), found[5::7]), "whatever else is drawn for"
    assert float(found.mean()) == pytest.approx(0.5772, abs=0.02)
    assert float(found.var()) == pytest.approx(math.pi**2 / 6, abs=0.05)
    for other in (noise(ids, 7, 4), noise(ids, 8, 3), noise(ids, 3, 7), found.roll(1)):
        assert abs(float(torch.corrcoef(torch.stack((found, other)))[0, 1])) < 0.02
    of_seeds = gumbel_noise(torch.full((5000,), 11), noise_starts(torch.arange(5000), torch.zeros(5000).long()))
    assert float(of_seeds.mean()) == pytest.approx(0.5772, abs=0.08)


def test_splitmix64_gives_what_its_authors_code_gives() -> None:
    """The first outputs from the state 0."""
    states = GOLDEN_GAMMA * torch.tensor([1, 2, 3])
    found = [number & MASK for number in splitmix64(states).tolist()]
    assert found == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_noise_is_splitmix() -> None:
    """The wrapping sums and shifts of torch's signed integers against Python's own."""

    def mixed(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
        return x ^ (x >> 31)

    gamma = 0x9E3779B97F4A7C15
    for seed, position, token in ((0, 0, 0), (-1, 5, 31999), (12345, 2**20, 128_000)):
        start = mixed((mixed((seed + gamma) & MASK) ^ position) + gamma & MASK)
        first = splitmix64(torch.tensor(seed) + GOLDEN_GAMMA) ^ position
        assert int(splitmix64(first + GOLDEN_GAMMA)) & MASK == start
        bits = mixed(start + token * gamma & MASK) >> 40
        want = -math.log(-math.log((bits + 0.5) / 2**24))
        got = gumbel_noise(torch.tensor([token]), noise_starts(torch.tensor(seed), torch.tensor(position)))
        assert float(got) == pytest.approx(want, rel=1e-12)


def test_no_noise_misleads_further_than_is_looked() -> None:
    uniform = (torch.arange(0, 2**24, 2**8 - 1).double() + 0.5) / 2**24
    assert float(uniform[0]) == 0.5 / 2**24 and float(uniform[-1]) == 1 - 0.5 / 2**24
    misled = -torch.log(uniform) / (1 - uniform)
    assert float(misled.min()) >= 1 and float(misled.max()) < RACE_SPREAD
