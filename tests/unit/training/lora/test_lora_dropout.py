"""What is dropped is about the part asked for, looks random, and hangs on no rank."""

from __future__ import annotations

import pytest
import torch

from tllm.training.data.seeds import draws_of
from tllm.training.lora.lora_dropout import dropped_out

MODULE = "model.layers.0.self_attn.q_proj.lora_A.weight"


def kept(draws_T: torch.Tensor, columns: int, first: int = 0, part: float = 0.3, module: str = MODULE) -> torch.Tensor:
    x_TD = torch.ones(len(draws_T), columns, dtype=torch.float64)
    return dropped_out(x_TD, draws_T, module, first, part) != 0


def draws(tokens: int = 400, step: int = 3, row: int = 5, seed: int = 42) -> torch.Tensor:
    return torch.from_numpy(draws_of(seed, step, row, tokens))


@pytest.mark.parametrize("part", [0.05, 0.5, 0.9])
def test_about_the_part_is_dropped_and_the_rest_grows(part: float) -> None:
    x_TD = torch.full((400, 300), 2.0)
    y_TD = dropped_out(x_TD, draws(), MODULE, 0, part)
    dropped = y_TD == 0
    assert abs(float(dropped.double().mean()) - part) < 4 * (part * (1 - part) / x_TD.numel()) ** 0.5
    torch.testing.assert_close(y_TD[~dropped], torch.full((int((~dropped).sum()),), 2 / (1 - part)))
    of_rows, of_columns = dropped.double().mean(1), dropped.double().mean(0)
    assert float(of_rows.std()) < 1.3 * (part * (1 - part) / 300) ** 0.5
    assert float(of_columns.std()) < 1.3 * (part * (1 - part) / 400) ** 0.5


def test_a_rank_drops_what_one_process_drops_of_its_tokens_and_columns() -> None:
    whole = kept(draws(), 96)
    assert torch.equal(kept(draws()[100:250], 32, first=40), whole[100:250, 40:72])


@pytest.mark.parametrize("other", [dict(step=4), dict(row=6), dict(seed=43)])
def test_another_step_row_or_seed_drops_others(other: dict[str, int]) -> None:
    same = (kept(draws(), 96) == kept(draws(**other), 96)).double().mean()
    assert abs(float(same) - (0.7**2 + 0.3**2)) < 0.01, "as often alike as by chance"


def test_neighbours_and_linears_are_independent() -> None:
    mask = kept(draws(), 200).double() - 0.7
    other = kept(draws(), 200, module=MODULE.replace("q_proj", "o_proj")).double() - 0.7
    for pair in ((mask[1:], mask[:-1]), (mask[:, 1:], mask[:, :-1]), (mask[1:, 1:], mask[:-1, :-1]), (mask, other)):
        assert abs(float((pair[0] * pair[1]).mean()) / 0.21) < 0.02
