"""What counts as a gain, and when patience ends."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from tllm.core.errors import ConfigError
from tllm.training.evaluation.best_evaluation import BestEvaluation, Standing
from tllm.training.evaluation.held_out import Evaluated, perplexity_of
from tllm.training.job.job import Job


def best_of(**keys: Any) -> BestEvaluation:
    job = Job(output_dir="run", train_files=("a",), max_steps=9, config_name="c", eval_files=("b",), **keys)
    return BestEvaluation(job, ("loss", "margins"))


def after(losses: list[float], **keys: Any) -> BestEvaluation:
    best = best_of(early_stopping_patience=2, **keys)
    for step, loss in enumerate(losses, 1):
        best.add(step, Evaluated(loss, {"margins": loss}))
    return best


@pytest.mark.parametrize(
    ("losses", "keys", "standing"),
    [
        ([3.0, 2.0, 2.0], {}, Standing(2.0, 2, 1)),
        ([3.0, 2.0, 2.5, 1.0], {}, Standing(1.0, 4, 0)),
        ([3.0, 2.9], {"early_stopping_threshold": 0.5}, Standing(2.9, 2, 1)),
        ([3.0, 4.0], {"greater_is_better": True}, Standing(4.0, 2, 0)),
        ([3.0, 4.0], {"metric_for_best_model": "eval_margins"}, Standing(4.0, 2, 0)),
        ([3.0, 4.0], {"metric_for_best_model": "margins", "greater_is_better": False}, Standing(3.0, 1, 1)),
        ([math.nan, 4.0, math.nan], {}, Standing(4.0, 2, 1)),
    ],
)
def test_what_counts_as_a_gain(losses: list[float], keys: dict[str, Any], standing: Standing) -> None:
    best = after(losses, **keys)
    now = best.standing
    assert (now.best, now.step, now.waited) == (standing.best, standing.step, standing.waited) and best.reason == ""
    assert now.evaluated == len(losses)
    assert now.values == ({} if math.isnan(losses[-1]) else {"loss": losses[-1], "margins": losses[-1]})
    assert msgspec.convert(msgspec.json.decode(msgspec.json.encode(now)), Standing) == now


def test_losses_and_perplexities_are_better_smaller() -> None:
    def is_gain(name: str) -> bool:
        keys: dict[str, Any] = dict(metric_for_best_model=name, lm_eval_tasks=("some",))
        job = Job(output_dir="run", train_files=("a",), max_steps=9, config_name="c", **keys)
        best = BestEvaluation(job, ("loss", "nll_loss", "rewards/margins"))
        best.add(1, Evaluated(None, {best.name: 2.0}))
        best.add(2, Evaluated(None, {best.name: 3.0}))
        return best.standing.best == 3.0

    smaller = ["eval_nll_loss", "lm_eval/some/word_perplexity", "lm_eval/some/bits_per_byte/none"]
    assert [is_gain(name) for name in smaller] == [False, False, False]
    assert is_gain("rewards/margins") and is_gain("lm_eval/some/acc")


def went_on(before: BestEvaluation, **keys: Any) -> BestEvaluation:
    """The same run from its save, with another job."""
    best = best_of(early_stopping_patience=2, **keys)
    best.take_up(msgspec.convert(msgspec.to_builtins(before.standing), Standing))
    return best


def test_another_metric_begins_with_a_best_of_its_own() -> None:
    before = after([3.0, 1.0, 2.0])
    assert (before.standing.best, before.standing.waited) == (1.0, 1)
    best = went_on(before, metric_for_best_model="margins")
    assert (best.standing.best, best.standing.step, best.standing.waited) == (2.0, 3, 0), "greater is better"
    best.add(4, Evaluated(9.0, {"margins": 1.5}))
    best.add(5, Evaluated(9.0, {"margins": 1.25}))
    assert best.reason == "2 evaluations without a gain: margins was at its best 2, after step 3"
    turned = went_on(before, greater_is_better=True)
    assert (turned.standing.best, turned.standing.step, turned.standing.waited) == (2.0, 3, 0)


def test_a_metric_that_was_not_told_before_has_no_best_yet() -> None:
    before = best_of(early_stopping_patience=2)
    before.add(1, Evaluated(3.0))
    best = went_on(before, metric_for_best_model="margins")
    assert (best.standing.best, best.standing.evaluated, best.standing.values) == (None, 1, {"loss": 3.0})
    best.add(2, Evaluated(3.0, {"margins": -4.0}))
    assert (best.standing.best, best.standing.step, best.reason) == (-4.0, 2, "")


def test_the_same_rule_goes_on_also_from_a_save_that_does_not_tell_it() -> None:
    before = after([1.0, 2.0])
    assert went_on(before).standing == before.standing
    silent = msgspec.structs.replace(before.standing, rule="")
    best = best_of()
    best.take_up(silent)
    assert best.standing == before.standing


def test_the_reason_names_the_best_and_its_step() -> None:
    assert after([3.0, 2.0, 2.5, 2.25]).reason == ("2 evaluations without a gain: loss was at its best 2, after step 2")
    assert "never a number" in after([math.nan, math.nan]).reason


def test_a_save_is_worth_its_own_evaluation_and_none_without() -> None:
    best = after([3.0, 2.0], metric_for_best_model="margins", load_best_model_at_end=True)
    facts = {"evaluations": msgspec.to_builtins(best.standing)}
    assert best.worth(2, facts) == 2.0 and best.worth(3, facts) is None and best.worth(2, {}) is None
    smaller = after([3.0, 2.0], load_best_model_at_end=True)
    assert smaller.worth(2, facts) == -2.0, "of another metric, by the same save"
    assert smaller.choice(2, facts) == "loss 2, the best of the saves"
    assert smaller.choice(3, facts) == "the last, as no save that was evaluated is whole"
    later = after([3.0, 2.0, 1.0], load_best_model_at_end=True)
    assert later.choice(2, facts) == "loss 2, the best of the saves; 1 after step 3 has no save"
    assert after([3.0]).choice(1, facts) == ""


def test_without_patience_a_run_does_not_end() -> None:
    best = best_of()
    for step in range(1, 9):
        best.add(step, Evaluated(float(step)))
    assert best.standing.waited == 7 and best.reason == ""


def test_an_unknown_metric_and_a_threshold_below_0_are_refused() -> None:
    with pytest.raises(ConfigError, match="'accuracy', which the task 'sft' does not tell"):
        best_of(metric_for_best_model="accuracy")
    with pytest.raises(ConfigError, match="early_stopping_threshold is -1"):
        best_of(early_stopping_threshold=-1.0)


def test_perplexity_beyond_floats_is_infinite() -> None:
    assert perplexity_of(0.0) == 1.0 and perplexity_of(1e4) == math.inf
