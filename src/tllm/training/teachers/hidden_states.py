"""A teacher's hidden states: taken from its model, encoded for the wire, and decoded as numbers of a row's tokens."""

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

    def encoded(self) -> dict[int, bytes] | None:
        """As they travel, by the number that the lesson has for each that was taken here; None where one is not
        finite."""
        dtype, found = torch_dtype(self._lesson.hidden_state_dtype), dict[int, bytes]()
        letters = HIDDEN_STATE_TYPES[self._lesson.hidden_state_dtype]
        for asked, number in zip(self._lesson.hidden_states, self._numbers, strict=True):
            if number not in self._taken:  # another rank has it
                continue
            x_PD = self._taken[number].to(dtype)
            if not torch.isfinite(x_PD).all():
                return None
            numbers = x_PD.view(torch.int16) if dtype == torch.bfloat16 else x_PD
            found[asked] = numbers.numpy().astype(letters).tobytes()
        return found


def states_of_tokens(answer: Answer, lesson: Lesson, places: NDArray[np.int64], tokens: int) -> dict[str, NDArray[Any]]:
    """By name the numbers of each of a row's tokens: what a teacher answered at the places, and 0 elsewhere."""
    letters, width = HIDDEN_STATE_TYPES[lesson.hidden_state_dtype], lesson.hidden_size
    told = np.frombuffer(answer.hidden_states, letters).reshape(len(lesson.hidden_states), len(places), width)
    found = {f"{STATES}{number}": np.zeros((tokens, width), dtype=letters) for number in lesson.hidden_states}
    for x_TD, x_PD in zip(found.values(), told, strict=True):
        x_TD[places] = x_PD
    return found
