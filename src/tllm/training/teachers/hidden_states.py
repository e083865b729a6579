"""Hidden states of a teacher: taken from its model, as they travel, and as numbers of a row's tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tllm.model.transformer import Transformer
from tllm.training.objectives.hidden_state_loss import STATES
from tllm.training.teachers.teacher_messages import HIDDEN_STATE_TYPES, Answer, Lesson
from tllm.weights.dtypes import torch_dtype


class TakenStates:
    """An `Observe` that takes what a lesson asks for of a row at its places; numbered by `ModelSpec.hidden_state`."""

    def __init__(self, lesson: Lesson, model: Transformer, places_P: Tensor) -> None:
        self._lesson, self._model, self._places_P = lesson, model, places_P
        self._numbers = [model.spec.hidden_state(number) for number in lesson.hidden_states]
        self._taken: dict[int | None, Tensor] = {}

    def __call__(self, number: int, x_TD: Tensor) -> Tensor:
        if number in self._numbers:
            self._taken[number] = x_TD[self._places_P]
        return x_TD

    def take_last(self, x_PD: Tensor) -> None:
        """What the final norm gives of the last layer's rows at the places."""
        last = self._model.spec.num_layers
        if last in self._numbers:
            self._taken[last] = self._model.normed(x_PD)

    def encoded(self) -> bytes | None:
        """As they travel; None where one is not finite."""
        dtype, parts = torch_dtype(self._lesson.hidden_state_dtype), list[bytes]()
        for number in self._numbers:
            x_PD = self._taken[number].to(dtype)
            if not torch.isfinite(x_PD).all():
                return None
            letters = HIDDEN_STATE_TYPES[self._lesson.hidden_state_dtype]
            parts.append(
                (x_PD.view(torch.int16) if dtype == torch.bfloat16 else x_PD).numpy().astype(letters).tobytes()
            )
        return b"".join(parts)


def states_of_tokens(answer: Answer, lesson: Lesson, places: NDArray[np.int64], tokens: int) -> dict[str, NDArray[Any]]:
    """By name the numbers of each of a row's tokens: what a teacher answered at the places, and 0 elsewhere."""
    letters, width = HIDDEN_STATE_TYPES[lesson.hidden_state_dtype], lesson.hidden_size
    told = np.frombuffer(answer.hidden_states, letters).reshape(len(lesson.hidden_states), len(places), width)
    found = {f"{STATES}{number}": np.zeros((tokens, width), dtype=letters) for number in lesson.hidden_states}
    for x_TD, x_PD in zip(found.values(), told, strict=True):
        x_TD[places] = x_PD
    return found
