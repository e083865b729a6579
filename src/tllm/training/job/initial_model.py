"""`InitialModel`: what a run starts from, kept in its folder: config, tokenizer, and where the initial weights are."""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer as Trainable
from tokenizers import decoders, models, pre_tokenizers, trainers

from tllm.core.disk import whole_file
from tllm.core.errors import ConfigError
from tllm.core.gguf_files import is_gguf
from tllm.hub.locate import Need, locate, nearby
from tllm.hub.model_name import parse_name
from tllm.spec.families import spec_from_config
from tllm.spec.hf_config import read_config
from tllm.spec.model_spec import ModelSpec
from tllm.text.chat_template import ChatTemplate
from tllm.text.companions import COMPANIONS, TOKENIZER, copy_companions
from tllm.text.tokenizer import Tokenizer
from tllm.training.data.batches import Batches, DataConfig
from tllm.training.data.choose_encoder import RowEncoder, choose_encoder, count_rows, sampled_rows
from tllm.training.data.dataset import Dataset, Documents
from tllm.training.data.encoder import FORMS, Document
from tllm.training.data.packing import RowLengths
from tllm.training.data.prompt_batches import PromptBatches, PromptEncoder, PromptRowEncoder, RepliedPromptEncoder
from tllm.training.data.row_forms import instruction_row, is_instruction
from tllm.training.job.job import Job
from tllm.training.job.job_parts import JudgeSpecs, data_config, eval_data_config, steps_of_one_sampling
from tllm.training.job.reward_head import with_reward_head
from tllm.training.job.rollout_keys import RolloutConfig, completions_evaluated
from tllm.weights.byte_source import LocalFiles
from tllm.weights.lora.sampled_digest import is_another, sampled_digest

log = logging.getLogger("tllm.model")

FOLDER = "start"
CONFIG, NAME, BASE = "config.json", "name", "base_sha256"

END = "<|endoftext|>"

ROWS_READ = 100
"""Of a job's data, about, to know how long they are."""


OUTPUT_IS_LEFT = (
    "%s: rows of Alpaca's form are prompts here, of their instruction and input; their output is not learned, and "
    "reward functions get it as a column"
)


@dataclass(frozen=True)
class InitialModel:
    """`folder` holds config and tokenizer; `weights` is the folder of the first weights, None for random ones."""

    folder: Path
    config: dict[str, Any]
    spec: ModelSpec
    weights: Path | None

    @property
    def base(self) -> str:
        """The digest of the weights that an adapter is trained beside, as the run began; "" where none
        was kept."""
        path = self.folder / BASE
        return path.read_text("utf-8") if path.is_file() else ""

    @property
    def companions(self) -> list[Path]:
        """What a finished model is given along."""
        return [self.folder / name for name in COMPANIONS if (self.folder / name).is_file()]

    def prompts(self, job: Job, tools: Sequence[Mapping[str, Any]] = ()) -> PromptBatches:
        """The prompts of a job that samples their completions, in which these tools are shown."""
        config = job.rollouts
        assert config is not None, "checked when the run began"
        each = replace(data_config(job), global_batch_size=job.global_batch_size // config.num_generations)
        return PromptBatches(each, self._row_encoder(job, config, tools), steps_of_one_sampling(job))

    def eval_prompts(self, job: Job, tools: Sequence[Mapping[str, Any]] = ()) -> PromptBatches | None:
        """The prompts held out, if the job names any: as many at once as the completions of a step are of."""
        config = job.rollouts
        if config is None or not job.eval_files:
            return None
        at_once = max(1, job.global_batch_size // completions_evaluated(config))
        each = replace(eval_data_config(job), global_batch_size=at_once)
        return PromptBatches(each, self._row_encoder(job, config, tools))

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """What the run's texts are read by."""
        return Tokenizer.from_folder(self.folder)

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        """What makes a text of messages."""
        return ChatTemplate.from_folder(self.folder, self.tokenizer)

    @property
    def reply_tokenizer(self) -> Tokenizer:
        """What gives completions their text; ConfigError where there is none, or none of its tokens ends a text."""
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise ConfigError(
                f"{self.folder} has no {TOKENIZER}", "it names the token that ends a completion: give a tokenizer"
            )
        if not tokenizer.eos_ids:
            raise ConfigError(
                "the tokenizer names no token that ends a text, so that every completion would be cut off",
                "give eos_token in tokenizer_config.json",
            )
        return tokenizer

    def batches(self, job: Job) -> Batches:
        """The rows of the job, in this model's tokens."""
        return self._batches(data_config(job))

    def eval_batches(self, job: Job) -> Batches | None:
        """The rows held out, if the job names any that are not prompts."""
        return self._batches(eval_data_config(job)) if job.eval_files and job.rollouts is None else None

    def check_rows(self, job: Job) -> None:
        """ConfigError for a file of rows whose first row cannot be read or is of no form that the job's task takes. Of
        files that are not on this machine, and of large ones that are no files of lines, nothing is known."""
        for config in (data_config(job), eval_data_config(job)):
            here = [name for name in config.files if Path(name).is_file()]
            encoder = self._first_encoder(job, config) if here else None
            for name in here:
                for row, whole in sampled_rows(config.rows, [name], config.documents, 1) or ():
                    assert encoder is not None, "there is a file"
                    try:
                        encoder.encode(row, whole)
                        if learns_no_reply(job) and is_instruction(row):
                            log.warning(OUTPUT_IS_LEFT, name)
                    except ConfigError as error:
                        raise ConfigError(f"{name}, first row: {error.message}", error.hint) from error

    def _first_encoder(self, job: Job, config: DataConfig) -> RowEncoder:
        """What encodes rows of the job; without its tools, for which code of the user's would have to be run."""
        if job.rollouts is not None:
            return self._row_encoder(job, job.rollouts, ())
        vocab_size = self.spec.vocab_size
        return choose_encoder(config.rows, self.tokenizer, self.chat_template, config.add_eos, vocab_size)

    def _row_encoder(self, job: Job, config: RolloutConfig, tools: Sequence[Mapping[str, Any]]) -> PromptRowEncoder:
        """Of prompts; where a teacher judges, of the data's own completions too."""
        tokenizer, template = self.reply_tokenizer, self.chat_template
        longest, vocab_size = job.seq_len - config.max_completion_length, self.spec.vocab_size
        prompts = PromptEncoder(tokenizer, template, longest, tools, vocab_size)
        if job.distill is None:
            return prompts
        rows = choose_encoder("texts", tokenizer, template, job.add_eos, vocab_size)
        return RepliedPromptEncoder(prompts, rows, keeps_replies=job.distill.lmbda < 1)

    def _batches(self, config: DataConfig) -> Batches:
        return Batches(config, self.tokenizer, self.chat_template, self.spec.vocab_size)


def learns_no_reply(job: Job) -> bool:
    """Whether a row's own reply is never learned, as the model that is trained writes all of them."""
    return job.rollouts is not None and (job.distill is None or job.distill.lmbda == 1)


def spec_of(job: Job) -> ModelSpec:
    """The model that the job names; nothing is written."""
    return spec_from_config(config_of(job))


def config_of(job: Job) -> dict[str, Any]:
    """The `config.json` of the model that the job names; nothing is written."""
    return _config_for(job, _named(job))


def judge_specs(job: Job) -> JudgeSpecs:
    """The teacher and the reward model that a job names."""
    teacher = None if job.distill is None else job.distill.teacher_model_name_or_path
    reward = None if job.rollouts is None else job.rollouts.reward_model_name_or_path
    found = [spec_from_config(read_config(locate(name, "config").path)) if name else None for name in (teacher, reward)]
    return JudgeSpecs(*found)


def row_lengths(job: Job) -> RowLengths | None:
    """How long the documents are that a job's rows are made of. None where one text fills every row, where nobody knows
    (what is sampled), or neither the data nor what gives their tokens is on this machine yet."""
    data = data_config(job)
    is_one_text = data.rows == "texts" and data.packing and data.documents == "stream"
    return None if is_one_text or job.rollouts is not None else _lengths(job, data)


def rows_learned(job: Job, lengths: RowLengths | None) -> RowsRead:
    """Different rows that a run of DPO or KTO learns from, as `rows_held_out` has them: those of its steps, or where
    the data has fewer, all. `lengths` are the job's (`row_lengths`)."""
    data, steps = data_config(job), job.max_steps * job.global_batch_size
    found = None if lengths is None else _rows_read(data, lengths)
    return RowsRead(steps, steps, lengths) if found is None else found._replace(rows=min(found.rows, steps))


def rows_held_out(job: Job) -> RowsRead | None:
    """What an evaluation computes of `eval_files`. None where there are none, of prompts, and where nobody knows: as
    for `row_lengths`, and of files that are too large to be read through."""
    data = eval_data_config(job)
    lengths = _lengths(job, data) if job.eval_files and job.rollouts is None else None
    return None if lengths is None else _rows_read(data, lengths)


def prompts_held_out(job: Job) -> int | None:
    """How many prompts an evaluation completes for their rewards; None where there are none, and where nobody knows."""
    data = eval_data_config(job)
    if job.rollouts is None or not data.files or not all(Path(name).is_file() for name in data.files):
        return None
    return count_rows(data.rows, data.files, data.documents)


class RowsRead(NamedTuple):
    """Of how many `documents` some data is, and about how many rows these fill; and how long they are, on an average;
    None where nobody knows, so that rows are taken to be full."""

    documents: int
    rows: int
    lengths: RowLengths | None


def _rows_read(data: DataConfig, lengths: RowLengths) -> RowsRead | None:
    if (count := count_rows(data.rows, data.files, data.documents)) is None:
        return None
    return RowsRead(count, lengths.rows(count, data.seq_len, data.packing), lengths)


def _lengths(job: Job, data: DataConfig) -> RowLengths | None:
    """Of some of a job's data."""
    found = _sampled_documents(job, data)
    return None if found is None else RowLengths.of(found, data.seq_len, splits=data.over_long == "split")


def _sampled_documents(job: Job, data: DataConfig) -> list[Document] | None:
    """Some documents of data, spread over all of it; None where nobody knows."""
    kept = Path(job.output_dir) / FOLDER
    if not all(Path(name).is_file() for name in data.files):
        return None
    folder = kept if kept.is_dir() else _tokenizer_source(job, _named(job))
    if (tokenizer := Tokenizer.from_folder(folder)) is None:
        return None
    template = ChatTemplate.from_folder(folder, tokenizer)
    encoder = choose_encoder(data.rows, tokenizer, template, data.add_eos, None)
    try:
        found = sampled_rows(data.rows, data.files, data.documents, ROWS_READ)
        return None if found is None else [encoder.encode(row, whole) for row, whole in found]
    except ConfigError as error:
        log.info("whole rows are counted, as a row of %s cannot be read: %s", ", ".join(data.files), error.message)
        return None


def open_initial_model(job: Job, name: str = "") -> InitialModel:
    """Read what the job names, or what the run kept of it when it began. Puts nothing half-made into its folder.

    `name` is what the run is called that has begun in another folder, and goes on in this one; "" names a new run.
    """
    named = _named(job)
    folder = Path(job.output_dir) / FOLDER
    config = _config_for(job, named)
    if not folder.is_dir():
        _keep(job, named, config, folder, name or secrets.token_hex(8))
    kept = read_config(folder)
    if kept != config:
        changed = sorted(key for key in kept.keys() | config.keys() if kept.get(key) != config.get(key))
        raise ConfigError(
            f"the run in {job.output_dir} began with another config.json than {named} now gives: {', '.join(changed)}",
            "give another output_dir, or the config that the run began with",
        )
    initial = InitialModel(folder, kept, spec_from_config(kept), named if job.model_name_or_path else None)
    if job.lora is not None and initial.weights is not None:
        _know_base(initial, initial.weights, job)
    return initial


def _know_base(initial: InitialModel, weights: Path, job: Job) -> None:
    """Keep the digest of the weights beside an adapter where none is kept; ConfigError where they have another."""
    found, path = sampled_digest(LocalFiles(weights)), initial.folder / BASE
    if is_another(initial.base, found):
        raise ConfigError(
            f"the adapter in {job.output_dir} began beside other weights of this shape than {weights} now has",
            f"give another output_dir, or the model that it began with; if it is intended, remove {path}",
        )
    if not initial.base:
        try:
            with whole_file(path) as file:
                file.write(found.encode())
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror or error}", "give another output_dir") from error


def run_name(job: Job) -> str:
    """What the run was named when its folder was made, unlike any other; "" where there is none."""
    path = Path(job.output_dir) / FOLDER / NAME
    return path.read_text("utf-8") if path.is_file() else ""


def digest_of(folder: Path) -> str:
    """SHA-256 of what a run keeps in its folder `start`, but for its name: equal where the same texts give the same
    tokens to the same model."""
    digest = hashlib.sha256()
    for name in (CONFIG, *COMPANIONS):
        path = folder / name
        content = path.read_bytes() if path.is_file() else b""
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def files_read(job: Job) -> tuple[str, ...]:
    """The files that rank 0 of a run reads beside weights, as far as the job names them by their paths."""
    keys = job.distill
    teacher = None if keys is None else keys.teacher_secret if keys.teachers else keys.teacher_model_name_or_path
    if keys is not None and keys.teacher_nodes:
        teacher = None  # which other nodes read
    rollouts = job.rollouts
    secret = rollouts.rollout_secret if rollouts is not None and rollouts.rollout_servers else None
    reward = rollouts.reward_model_name_or_path if rollouts is not None else None  # of which it has the tokenizer
    models = job.model_name_or_path, job.config_name, job.tokenizer_name
    named = [name for name in (*models, teacher, reward, secret, job.lm_eval_include_path) if name]
    return (*data_config(job).files, *eval_data_config(job).files, *(name for name in named if Path(name).exists()))


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> Trainable:
    """A byte-level BPE (Sennrich et al., 2016) of at most `vocab_size` ids, of which 0 ends a document."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size <= len(alphabet):
        raise ConfigError(
            f"a vocabulary of {vocab_size} has no room for the {len(alphabet)} bytes and the end of a text",
            f"give a config with a vocab_size of {len(alphabet) + 1} or more, or tokenizer_name",
        )
    tokenizer = Trainable(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def texts_of(files: tuple[str, ...], documents: Documents) -> Iterator[str]:
    """All texts of the data, in whichever form they stand. A row without any is a ConfigError, unless it holds ids."""
    rows = Dataset(files, documents)
    try:
        for number in range(len(rows)):
            row = rows.read(number)
            texts = _texts(instruction_row(row, as_messages=True) if is_instruction(row) else row)
            if not texts and "input_ids" not in row:
                raise ConfigError(f"{rows.place(number)}: a row with the keys {sorted(row)} holds no text", FORMS)
            yield from texts
    finally:
        rows.close()


def _texts(row: dict[str, Any]) -> list[str]:
    found = []
    for name in ("text", "prompt", "completion", "chosen", "rejected", "messages"):
        value = row.get(name)
        turns = value if isinstance(value, list) else []
        found += [value, *(turn.get("content") for turn in turns if isinstance(turn, dict))]
    return [text for text in found if isinstance(text, str)]


def _named(job: Job) -> Path:
    """What the run begins with, on this disk; a name is looked up, and fetched where it is not there."""
    if job.model_name_or_path:
        return _located(job.model_name_or_path, "whole")
    return _located(job.config_name or "", "config")


@lru_cache
def _located(text: str, need: Need) -> Path:
    """Once in a process: the answer of the hub may change while a run is prepared."""
    path = Path(text)
    if path.exists() or parse_name(text) is None:
        return path
    found = locate(text, need)
    log.info("%s", found.said)
    return found.path


def _config_for(job: Job, named: Path) -> dict[str, Any]:
    """The config of the model that is trained: that of what is named, with a head for scores if the task needs one."""
    config = _config_of(named)
    return with_reward_head(config) if job.task == "reward" else config


def _config_of(named: Path) -> dict[str, Any]:
    if named.suffix == ".json" and named.is_file():
        return read_config(named)
    if not named.is_dir() and not is_gguf(named):
        raise ConfigError(
            f"{named} is neither a model's folder nor a config.json",
            f"{nearby(named)}give the path of one, or a name: ORG/NAME",
        )
    return read_config(named)


def _keep(job: Job, named: Path, config: dict[str, Any], folder: Path, name: str) -> None:
    """Write the folder beside its place and rename it last."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=f".{FOLDER}.", dir=folder.parent))
        try:
            (beside / CONFIG).write_text(json.dumps(config, indent=2) + "\n", "utf-8")
            (beside / NAME).write_text(name, "utf-8")
            _keep_tokenizer(job, named, spec_from_config(config), beside)
            beside.chmod(0o755)
            beside.rename(folder)
        finally:
            shutil.rmtree(beside, ignore_errors=True)  # still there only if something failed before the rename
    except OSError as error:
        raise ConfigError(f"cannot write {folder}: {error.strerror or error}", "give another output_dir") from error


def _tokenizer_source(job: Job, named: Path) -> Path:
    """The folder, or the GGUF file, of the tokenizer that is named, else of the model."""
    chosen = _located(job.tokenizer_name, "config") if job.tokenizer_name else named
    return chosen if chosen.is_dir() or is_gguf(chosen) else chosen.parent


def _keep_tokenizer(job: Job, named: Path, spec: ModelSpec, folder: Path) -> None:
    """The tokenizer that is named, else the model's own, else one trained on the data if this is text."""
    source = _tokenizer_source(job, named)
    if job.model_name_or_path or job.tokenizer_name:
        copy_companions(source, folder)
        if job.tokenizer_name and not (folder / TOKENIZER).is_file():
            raise ConfigError(f"{source} has no {TOKENIZER}", "give tokenizer_name a folder with one, or leave it out")
        return
    data = data_config(job)
    texts = texts_of(data.files, data.documents)
    first = next(texts, None)
    if first is None:
        return
    train_tokenizer(chain([first], texts), spec.vocab_size).save(str(folder / TOKENIZER))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", "utf-8")
