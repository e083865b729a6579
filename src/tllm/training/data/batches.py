"""The rows of each step. They depend on the job and the step alone, never on the number of ranks."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from tllm.core.errors import ConfigError
from tllm.text.chat_template import ChatTemplate
from tllm.text.tokenizer import Tokenizer
from tllm.training.data.choose_encoder import RowEncoder, choose_encoder, open_rows
from tllm.training.data.data_position import RowLedger
from tllm.training.data.dataset import DataFileFacts, Documents, check_same
from tllm.training.data.encoder import NO_VALUES, Document, OverLong, Values, fit
from tllm.training.data.packing import OPEN_ROWS, Packed, PackedRow, Packer, deal, put_together
from tllm.training.data.row_order import order_of
from tllm.training.data.seeds import DRAWS, draws_of

TOKENS_KEPT = 4_000_000
"""Encoded tokens held for rows that are soon asked for again (8 bytes each)."""
STATES_KEPT = 24
"""Positions in the data, more than a feed reads ahead: the one of a save is among them."""


@dataclass(frozen=True)
class DataConfig:
    """What to read and how. `global_batch_size` counts rows, after packing; each has at most `seq_len` tokens.

    `weights` mix the files by rows, in proportion; without them each row comes once an epoch. `epochs=None` goes on for
    ever. `documents` says what a text file is. `add_eos` ends texts and completions with the tokenizer's eos token.
    With `draws` each token has a number of its own, for what is random in a step.
    `rows` says what each row is (`choose_encoder`).
    """

    files: tuple[str, ...]
    seq_len: int
    global_batch_size: int
    weights: tuple[float, ...] | None = None
    seed: int = 0
    shuffle: bool = True
    packing: bool = True
    over_long: OverLong = "split"
    documents: Documents = "blank_lines"
    add_eos: bool = True
    epochs: int | None = None
    draws: bool = False
    rows: str = "texts"

    def __post_init__(self) -> None:
        for name in ("seq_len", "global_batch_size", "epochs"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}", "it must be 1 or more")
        for name, known in (("over_long", ("split", "truncate", "refuse")), ("documents", ("blank_lines", "stream"))):
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} is {getattr(self, name)!r}", f"it must be one of {', '.join(known)}")


class DataState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A place in the data: the step that comes next, the ledger, and the files and choices that its numbers hang on."""

    step: int
    epoch: int
    ledger: dict[str, Any]
    files: list[DataFileFacts]
    choices: dict[str, Any]


class Batches:
    """The batches of a job. Any step may be asked for, also by a thread that reads ahead; going forward is fast."""

    def __init__(
        self,
        config: DataConfig,
        tokenizer: Tokenizer | None = None,
        template: ChatTemplate | None = None,
        vocab_size: int | None = None,
        encoder: RowEncoder | None = None,
    ) -> None:
        self.config = config
        self._encoder = encoder or choose_encoder(config.rows, tokenizer, template, config.add_eos, vocab_size)
        self._rows = open_rows(config.rows, config.files, config.documents)
        self._files = self._rows.facts  # as they are when the run opens them
        self.values_of: Callable[[int], Values] = lambda row: NO_VALUES
        """Further numbers of a row's documents by its number, which are not in the files."""
        self._documents: OrderedDict[int, Document] = OrderedDict()
        order = order_of(self._rows.counts, config.weights, config.seed, config.shuffle)
        packer = Packer(config.seq_len, OPEN_ROWS if config.packing else 0)
        end = None if config.epochs is None else config.epochs * len(self._rows)
        self._ledger = RowLedger(order, lambda row: len(self._document(row).ids), packer, end)
        self._next = self._tokens = 0
        self._states = {0: self._ledger.state()}
        self._latest: tuple[int, list[Packed]] = (-1, [])
        self._lock = threading.RLock()

    def step(self, step: int, dp_rank: int = 0, shares: Sequence[int] = (1,)) -> list[PackedRow]:
        """The rows of one step that a data-parallel rank takes by its share; none where rows are fewer than ranks."""
        with self._lock:
            packed = self.plan(step)
            mine = deal(len(packed), shares)[dp_rank]
            rows = [put_together(place, packed[place], self.document) for place in mine]
        return [self._with_draws(row, step) for row in rows] if self.config.draws else rows

    def document(self, row: int) -> Document:
        """A row of the data by its number, with all that is known of it."""
        with self._lock:
            found = self._document(row)
            more = self.values_of(row)
            return found._replace(values={**found.values, **more}) if more else found

    def row(self, number: int) -> dict[str, Any]:
        """A row of the data as it stands in its file."""
        return self._rows.read(number)

    def plan(self, step: int) -> list[Packed]:
        """The whole global batch of a step, as the pieces of each of its rows; empty after the last epoch."""
        with self._lock:
            if self._latest[0] != step:
                self._go_to(step)
                self._advance()
            return self._latest[1]

    def state(self, step: int) -> dict[str, Any]:
        """The state from which `step` comes next, as JSON holds it: what a save after step `step - 1` keeps."""
        with self._lock:
            if step not in self._states:
                self._go_to(step)
            ledger = self._states[step]
            epoch = ledger["position"] // len(self._rows)
            return dict(msgspec.to_builtins(DataState(step, epoch, ledger, self._files, self._choices())))

    def restore(self, state: dict[str, Any]) -> int:
        """Go on from a state, with any number of ranks and any global batch size; returns the step that comes next."""
        try:
            read = msgspec.convert(state, DataState)
        except msgspec.ValidationError as error:
            raise ConfigError(f"the position in the data is not one: {error}", "resume from another save") from error
        check_same(read.files, self._files)
        for name, now in self._choices().items():
            if read.choices.get(name) != now:
                raise ConfigError(
                    f"{name} was {read.choices.get(name)} when the run began and is {now} now",
                    "which row comes next hangs on it: set it back, or give another output_dir for a new run",
                )
        with self._lock:
            self._ledger.restore(read.ledger)
            self._next, self._states, self._latest = read.step, {read.step: self._ledger.state()}, (-1, [])
        return read.step

    def waits_for(self) -> str:
        """For nobody: rows come from files."""
        return ""

    def interrupt(self) -> None:
        """Nobody waits here for more than a disk."""

    def row_numbers(self, steps: int) -> set[int]:
        """The rows of the data that the first `steps` steps hold something of."""
        seen: set[int] = set()
        for step in range(steps):
            seen.update(piece.row for packed in self.plan(step) for piece in packed)
            if len(seen) == len(self._rows):
                break
        return seen

    @property
    def row_count(self) -> int:
        """How many rows the files have."""
        return len(self._rows)

    @property
    def identity(self) -> dict[str, Any]:
        """What decides which row has which number and which tokens: files and choices, as JSON holds them."""
        return {"files": [facts.sha256 for facts in self._files], "choices": self._choices()}

    def close(self) -> None:
        self._rows.close()

    def _with_draws(self, row: PackedRow, step: int) -> PackedRow:
        draws = draws_of(self.config.seed, step, row.place, len(row.input_ids))
        return replace(row, of_tokens={**row.of_tokens, DRAWS: draws})

    def _go_to(self, step: int) -> None:
        """Let `step` be the next: from the nearest state kept before it, or from where the ledger stands."""
        if step < self._next:
            before = [kept for kept in self._states if kept <= step]
            if not before:
                raise ConfigError(
                    f"step {step} lies before step {min(self._states)}, where this run went on",
                    "resume from an earlier save",
                )
            self._next = max(before)
            self._states = {kept: self._states[kept] for kept in before}
            self._ledger.restore(self._states[self._next])
        while self._next < step:
            self._advance()

    def _advance(self) -> None:
        self._latest = (self._next, self._ledger.take(self.config.global_batch_size))
        self._next += 1
        self._states[self._next] = self._ledger.state()
        for old in sorted(self._states)[1:-STATES_KEPT]:  # the first stays: every step can be reached from it
            del self._states[old]

    def _document(self, row: int) -> Document:
        if row in self._documents:
            self._documents.move_to_end(row)
            return self._documents[row]
        content = self._rows.read(row)
        try:
            document = fit(
                self._encoder.encode(content, self._rows.whole(row)), self.config.seq_len, self.config.over_long
            )
        except ConfigError as error:
            raise ConfigError(f"{self._rows.place(row)}: {error.message}", error.hint) from error
        self._documents[row] = document
        self._tokens += len(document.ids)
        while self._tokens > TOKENS_KEPT and len(self._documents) > 1:
            self._tokens -= len(self._documents.popitem(last=False)[1].ids)
        return document

    def _choices(self) -> dict[str, Any]:
        """What decides which row stands where; each must be the same when a run goes on."""
        names = ("seq_len", "seed", "shuffle", "packing", "over_long", "documents")
        weights = None if self.config.weights is None else list(self.config.weights)
        own = {name: getattr(self.config, name) for name in names}
        return {**own, "weights": weights, "tokenizer, template or add_eos": self._encoder.key}
