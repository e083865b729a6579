from __future__ import annotations

import pytest
import torch
from transformers import SchedulerType
from transformers import optimization as theirs

from tllm.core.errors import ConfigError
from tllm.training.job.lr_schedule import SHAPES, LearningRateSchedule

STEPS = 40


def factors(make: object, **options: object) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = make(optimizer, **options)  # type: ignore[operator]
    made = []
    for _ in range(STEPS + 3):
        made.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return made


CASES = [
    (LearningRateSchedule("constant", STEPS), theirs.get_constant_schedule, {}),
    (
        LearningRateSchedule("constant_with_warmup", STEPS, 7),
        theirs.get_constant_schedule_with_warmup,
        dict(num_warmup_steps=7),
    ),
    (
        LearningRateSchedule("linear", STEPS, 7),
        theirs.get_linear_schedule_with_warmup,
        dict(num_warmup_steps=7, num_training_steps=STEPS),
    ),
    (
        LearningRateSchedule("cosine", STEPS, 7),
        theirs.get_cosine_schedule_with_warmup,
        dict(num_warmup_steps=7, num_training_steps=STEPS),
    ),
    (
        LearningRateSchedule("cosine", STEPS, floor=0.1, cycles=1.5),
        theirs.get_cosine_with_min_lr_schedule_with_warmup,
        dict(num_warmup_steps=0, num_training_steps=STEPS, num_cycles=1.5, min_lr_rate=0.1),
    ),
    (
        LearningRateSchedule("warmup_stable_decay", STEPS, 5, 10, floor=0.05),
        theirs.get_wsd_schedule,
        dict(num_warmup_steps=5, num_decay_steps=10, num_training_steps=STEPS, min_lr_ratio=0.05),
    ),
]


@pytest.mark.parametrize(("ours", "make", "options"), CASES, ids=[case[0].kind for case in CASES])
def test_factors_are_those_of_transformers(
    ours: LearningRateSchedule, make: object, options: dict[str, object]
) -> None:
    want = factors(make, **options)
    assert [ours.factor(step) for step in range(STEPS + 3)] == pytest.approx(want, abs=1e-12)


def test_what_would_be_ignored_is_refused() -> None:
    with pytest.raises(ConfigError, match="cosin") as caught:
        LearningRateSchedule("cosin", 10)
    assert "cosine" in caught.value.hint
    with pytest.raises(ConfigError, match="warmup_steps is 3"):
        LearningRateSchedule("constant", 10, 3)
    with pytest.raises(ConfigError, match="4 decay steps"):
        LearningRateSchedule("linear", 10, 0, 4)
    with pytest.raises(ConfigError, match="linear has no cosine, and min_lr_ratio is given"):
        LearningRateSchedule("linear", 10, floor=0.1)
    with pytest.raises(ConfigError, match="constant has no cosine, and num_cycles is given"):
        LearningRateSchedule("constant", 10, cycles=1.0)
    with pytest.raises(ConfigError, match="more than all 10"):
        LearningRateSchedule("linear", 10, 11)


def test_schedules_of_transformers_work_or_are_named_with_what_to_take() -> None:
    for kind in (member.value for member in SchedulerType):
        if kind in SHAPES:
            LearningRateSchedule(kind, 10)
            continue
        with pytest.raises(ConfigError, match=f"{kind}' is not known") as caught:
            LearningRateSchedule(kind, 10)
        assert any(f'take "{known}"' in caught.value.hint for known in SHAPES), kind
