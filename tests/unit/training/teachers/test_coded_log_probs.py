"""What log-probabilities in a byte each lose, by the definition: never more than the bound that a budget sets aside."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from tllm.training.job.distillation_keys import CODE_STEP, CODES_LOSE
from tllm.training.teachers.coded_log_probs import LAST, codes_of, log_probs_of, normalised

Numbers = NDArray[np.float64]


def lost(log_p_PB: Numbers) -> Numbers:
    """KL(p || p') of each place, where all but the last number are told as codes."""
    told_PB = log_p_PB.copy()
    told_PB[:, :-1] = log_probs_of(codes_of(log_p_PB[:, :-1]))
    found: Numbers = (np.exp(log_p_PB) * (log_p_PB - normalised(told_PB))).sum(-1)
    return found


@pytest.mark.parametrize("scale", [0.1, 1.0, 3.0, 8.0])
def test_no_distribution_loses_more_than_the_bound(scale: float) -> None:
    z_PB = np.random.default_rng(0).normal(0, scale, (2000, 40))
    found_P = lost(normalised(z_PB))
    assert found_P.min() > -1e-9 and found_P.max() <= CODES_LOSE


def test_the_bound_is_reached_where_half_of_the_mass_is_rounded_up_and_half_down() -> None:
    log_p = np.array([-8.5 * CODE_STEP + 1e-4, -8.5 * CODE_STEP - 1e-4])
    p = np.exp(log_p) / np.exp(log_p).sum()
    told = normalised(log_probs_of(codes_of(log_p))[None])[0]
    assert 0.9 * CODES_LOSE < float((p * (np.log(p) - told)).sum()) <= CODES_LOSE


def test_codes_are_the_nearest_and_end_where_a_byte_does() -> None:
    log_p = np.array([0.0, -0.04, -0.05, -1.0, -21.25, -30.0, -np.inf])
    assert codes_of(log_p).tolist() == [0, 0, 1, 12, LAST, LAST, LAST]
    np.testing.assert_allclose(log_probs_of(codes_of(log_p))[:4], [0, 0, -1 / 12, -1], atol=1e-7)


def test_a_place_adds_up_to_one_and_what_has_no_probability_keeps_none() -> None:
    log_p_PB = normalised(np.array([[-1.0, -np.inf, -2.0], [-900.0, -901.0, -np.inf]]))
    np.testing.assert_allclose(np.exp(log_p_PB).sum(-1), 1, rtol=1e-12)
    assert np.isneginf(log_p_PB[0, 1]) and np.isneginf(log_p_PB[1, 2])
