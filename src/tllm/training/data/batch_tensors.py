"""Rows of a batch as the tensors that the model takes: all tokens of a microbatch, end to end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tllm.training.data.encoder import IGNORED
from tllm.training.data.packing import PackedRow

Span = tuple[int, int]

PROMPT_LENGTH = "prompt_length"
"""Of a document: how many of its tokens were computed together before the others came one by one."""


@dataclass(frozen=True, eq=False)
class Tokens:
    """One microbatch, or what a cp rank has of it: `spans`, tokens [start, stop) of the whole; None for all of them.

    `lengths` are the documents' tokens of the whole microbatch, in order, those of filling included. `of_documents` are
    numbers of each of these documents, `of_tokens` of each token here, by name: 0 for filling. `at_host` is the same
    on the processor, of what was copied to a device: to ask the copy would be to wait for all that the device does.
    `prefixes`: of each document the number of an earlier one whose tokens it sees before its own, as if it began with
    them, or None; left out, no document does.
    """

    ids_T: Tensor
    labels_T: Tensor
    positions_T: Tensor
    lengths: list[int]
    spans: tuple[Span, ...] | None = None
    of_documents: Mapping[str, Tensor] = field(default_factory=dict)
    of_tokens: Mapping[str, Tensor] = field(default_factory=dict)
    at_host: Tokens | None = None
    prefixes: tuple[int | None, ...] = ()

    @property
    def predicted(self) -> int:
        """How many tokens are learned: what a mean over the global batch is divided by, summed over the ranks."""
        return int((self._labels_at_host != IGNORED).sum())

    @property
    def learned_T(self) -> Tensor | None:
        """The places of the tokens that are learned; None if all are."""
        learned_T = self._labels_at_host != IGNORED
        if bool(learned_T.all()):
            return None
        return copied(learned_T.nonzero().flatten(), self.ids_T.device)

    @property
    def _labels_at_host(self) -> Tensor:
        return self.labels_T if self.at_host is None else self.at_host.labels_T

    @property
    def before(self) -> tuple[int, ...]:
        """Of each document the tokens of another that it sees before its own."""
        prefixes = self.prefixes or (None,) * len(self.lengths)
        return tuple(0 if prefix is None else self.lengths[prefix] for prefix in prefixes)

    @property
    def lengths_T(self) -> Tensor:
        """For each token here the length of its document when it was computed, wherever the rest of it is.

        That is the whole length, but of a completion's token its place + 1.
        """
        assert not self.prefixes or PROMPT_LENGTH in self.of_documents, "the length of what begins elsewhere"
        if PROMPT_LENGTH in self.of_documents:
            prompt_T = self.of_documents[PROMPT_LENGTH][self.document_T]
            return torch.maximum(prompt_T.to(self.positions_T.dtype), self.positions_T + 1)
        lengths = torch.tensor(self.lengths)
        return self._here(torch.repeat_interleave(lengths, lengths))

    @property
    def document_T(self) -> Tensor:
        """For each token here the number of its document in the microbatch."""
        lengths = torch.tensor(self.lengths)
        return self._here(torch.repeat_interleave(torch.arange(len(lengths)), lengths))

    def to(self, device: torch.device) -> Tokens:
        """The same on another device, or itself if it is there."""
        if self.ids_T.device == device:
            return self
        return replace(
            self,
            ids_T=copied(self.ids_T, device),
            labels_T=copied(self.labels_T, device),
            positions_T=copied(self.positions_T, device),
            of_documents={name: copied(x_N, device) for name, x_N in self.of_documents.items()},
            of_tokens={name: copied(x_T, device) for name, x_T in self.of_tokens.items()},
            at_host=self if self.ids_T.is_cpu else None,
        )

    def only(self, keep_N: Tensor) -> Tokens:
        """These documents alone, of a microbatch that is whole."""
        assert self.spans is None and not self.prefixes, "documents are chosen before their tokens are cut or shared"
        keep_T = keep_N[self.document_T]
        return Tokens(
            self.ids_T[keep_T],
            self.labels_T[keep_T],
            self.positions_T[keep_T],
            [length for length, keep in zip(self.lengths, keep_N.tolist(), strict=True) if keep],
            None,
            {name: x_N[keep_N] for name, x_N in self.of_documents.items()},
            {name: x_T[keep_T] for name, x_T in self.of_tokens.items()},
        )

    def _here(self, whole_T: Tensor) -> Tensor:
        """Of numbers of all tokens, made on the processor, those of the tokens here, where these are."""
        return copied(whole_T if self.spans is None else picked(whole_T, self.spans), self.ids_T.device)


def tokens_of(rows: Sequence[PackedRow], width: int | None = None, device: torch.device | str = "cpu") -> Tokens:
    """Rows end to end; with `width`, each filled to so many tokens by a last document of id 0 that is not learned."""
    ids, labels, positions = [], [], []
    lengths: list[int] = []
    of_documents: dict[str, list[NDArray[Any]]] = {name: [] for name in rows[0].of_documents} if rows else {}
    of_tokens: dict[str, list[NDArray[Any]]] = {name: [] for name in rows[0].of_tokens} if rows else {}
    for row in rows:
        over = 0 if width is None else width - len(row.input_ids)
        assert over >= 0, f"a row of {len(row.input_ids)} tokens is wider than {width}"
        ids += [row.input_ids, np.zeros(over, dtype=np.int64)]
        labels += [row.labels, np.full(over, IGNORED, dtype=np.int64)]
        positions += [row.positions, np.arange(over, dtype=np.int64)]
        lengths += [*row.lengths, *([over] if over else [])]
        for values, places, of_row in (
            (of_documents, min(over, 1), row.of_documents),
            (of_tokens, over, row.of_tokens),
        ):
            for name, parts in values.items():
                parts += [of_row[name], np.zeros((places, *of_row[name].shape[1:]), of_row[name].dtype)]
    return Tokens(
        _joined(ids, device),
        _joined(labels, device),
        _joined(positions, device),
        lengths,
        of_documents={name: _joined(parts, device) for name, parts in of_documents.items()},
        of_tokens={name: _joined(parts, device) for name, parts in of_tokens.items()},
    )


def copied(x: Tensor, device: torch.device) -> Tensor:
    """x of the processor on a device, in its turn: the host does not wait where CUDA can copy by itself."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" and x.is_cpu else x.to(device)


def sent_to_host(x: Tensor) -> Callable[[], float]:
    """How to read a number of a device later: on CUDA it waits for what was asked for up to now, and for no more."""
    if x.device.type != "cuda":
        return lambda: float(x)
    at_host = torch.empty((), dtype=x.dtype, pin_memory=True)
    at_host.copy_(x, non_blocking=True)
    arrived = torch.cuda.current_stream(x.device).record_event()

    def number() -> float:
        arrived.synchronize()
        return float(at_host)

    return number


def picked(x: Tensor, spans: Sequence[Span], dim: int = 0) -> Tensor:
    """The places [start, stop) of a dim, one span after another; a copy."""
    return torch.cat([x.narrow(dim, 0, 0), *(x.narrow(dim, start, stop - start) for start, stop in spans)], dim)


def _joined(parts: list[NDArray[Any]], device: torch.device | str) -> Tensor:
    whole = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
    return torch.from_numpy(whole).to(device)
