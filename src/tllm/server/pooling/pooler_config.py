"""How a model's prompts become embeddings and scores: what the user says, else what its folder says.

A folder of sentence-transformers lists its modules in `modules.json`; that of its module `Pooling` is read, and which
`Dense` ones and whether a `Normalize` follow. Any other folder is taken for a causal model: the last token is pooled,
and normalised.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import msgspec

from tllm.core.errors import UNREADABLE, ConfigError, counted, nearest
from tllm.core.model_folders import model_name
from tllm.spec.model_spec import ModelSpec
from tllm.spec.request import PoolingKind

ScoreType = Literal["auto", "embedding", "generative", "classification"]
"""What scores two texts: the cosine of their embeddings, the answer to a question, or a classification head."""

Activation = Literal["identity", "tanh"]

MODULES = "modules.json"
POOLING_MODES: Mapping[str, PoolingKind] = {"mean": "mean", "lasttoken": "last"}
"""Names of sentence-transformers, as far as they are computed here."""

ACTIVATIONS: Mapping[str, Activation] = {
    "torch.nn.modules.linear.Identity": "identity",
    "torch.nn.modules.activation.Tanh": "tanh",
}
MODULE = ("Transformer", "Pooling", "Dense", "Normalize")

ANSWERS = ("no", "yes")


class DenseModule(msgspec.Struct, frozen=True, kw_only=True):
    """A linear of sentence-transformers that a pooled prompt goes through: the folder of its weights, and what it makes
    of how many numbers."""

    path: str
    in_features: int
    out_features: int
    bias: bool = True
    activation: Activation = "tanh"


class PoolerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`--pooler-config`, with vLLM's names. What is left out follows from the model's folder."""

    pooling_type: Literal["LAST", "MEAN"] | None = None
    normalize: bool | None = None
    score_type: ScoreType = "auto"


class ModelPooling(msgspec.Struct, frozen=True, kw_only=True):
    """How the prompts of one model are pooled. `score_type` is none but "auto".

    `hidden_size`: numbers of an embedding. `answers` are the tokens, as texts, whose log-probabilities are a generative
    score; the second one says yes.
    `labels` are the names of a classification head's numbers, and `problem_type` what they are, in the words of
    `config.json`: one of several labels where it says nothing.
    """

    kind: PoolingKind = "last"
    normalize: bool = True
    score_type: ScoreType = "embedding"
    hidden_size: int
    num_labels: int = 0
    answers: tuple[str, str] = ANSWERS
    labels: tuple[str, ...] = ()
    problem_type: str = ""


def read_pooler_config(given: str | Mapping[str, Any] | PoolerConfig | None) -> PoolerConfig:
    """JSON text, a dict or nothing as a `PoolerConfig`. ConfigError for anything unknown."""
    if given is None or isinstance(given, PoolerConfig):
        return given or PoolerConfig()
    try:
        values = msgspec.json.decode(given) if isinstance(given, str) else dict(given)
        kind = values.get("pooling_type") if isinstance(values, dict) else None
        if isinstance(kind, str):
            values = {**values, "pooling_type": kind.upper()}
        return msgspec.convert(values, PoolerConfig)
    except UNREADABLE as error:
        hint = """write '{"pooling_type": "MEAN"}'; the keys are pooling_type (LAST, MEAN), normalize and score_type"""
        raise ConfigError(f"pooler_config cannot be read: {str(error)[:200]}", hint) from error


def model_pooling(
    folder: Path, spec: ModelSpec, config: Mapping[str, Any], given: PoolerConfig | None = None
) -> ModelPooling:
    """How the model of a folder is pooled; `config` is its config.json.

    Raises ConfigError where the folder asks for something that is not computed here, or the user for a head that the
    model lacks.
    """
    given = given or PoolerConfig()
    kind, normalize = _of_folder(folder)
    dense = dense_modules(folder)
    if dense and dense[0].in_features != spec.hidden_size:
        raise ConfigError(
            f"{dense[0].path} takes {dense[0].in_features} numbers and a hidden state has {spec.hidden_size}",
            "copy the whole model folder again",
        )
    answers = config.get("classifier_from_token")
    if given.pooling_type is not None:
        kind = "mean" if given.pooling_type == "MEAN" else "last"
    score_type = given.score_type
    if score_type == "auto":
        asks = bool(answers) or "rerank" in model_name(folder).lower()
        score_type = "classification" if spec.num_labels else "generative" if asks else "embedding"
    if (score_type == "classification" and not spec.num_labels) or (score_type == "generative" and not spec.writes):
        plain = "no head" if spec.is_headless or spec.bidirectional else "a head for tokens alone"
        has = f"a classification head of {counted(spec.num_labels, 'label')}" if spec.num_labels else plain
        raise ConfigError(f"score_type is {score_type!r} and the model has {has}", "leave score_type out")
    return ModelPooling(
        kind=kind,
        normalize=normalize if given.normalize is None else given.normalize,
        score_type=score_type,
        hidden_size=dense[-1].out_features if dense else spec.hidden_size,
        num_labels=spec.num_labels,
        answers=_answers(answers),
        labels=_labels(config.get("id2label"), spec.num_labels),
        problem_type=str(config.get("problem_type") or ""),
    )


def _labels(names: Any, count: int) -> tuple[str, ...]:
    """The name of each label, as transformers has it where the config says none."""
    given = names if isinstance(names, dict) else {}
    return tuple(str(given.get(str(number), f"LABEL_{number}")) for number in range(count))


def _answers(given: Any) -> tuple[str, str]:
    if given is None:
        return ANSWERS
    if not isinstance(given, list) or len(given) != 2 or not all(isinstance(one, str) for one in given):
        raise ConfigError(
            f"config.json: classifier_from_token is {str(given)[:60]}, not two tokens", 'as ["no", "yes"]'
        )
    return given[0], given[1]


def dense_modules(folder: Path) -> tuple[DenseModule, ...]:
    """The linears that a pooled prompt of the model in a folder goes through, in order. ConfigError for what is not
    computed here, or where one does not take what the one before it makes."""
    found = [_dense(path) for kind, path in _modules(folder) if kind == "Dense"]
    for one, after in pairwise(found):
        if one.out_features != after.in_features:
            raise ConfigError(
                f"{after.path} takes {after.in_features} numbers and {one.path} before it makes {one.out_features}",
                "copy the whole model folder again",
            )
    return tuple(found)


def _dense(folder: Path) -> DenseModule:
    """What the `config.json` of a module `Dense` says. What it leaves out is as sentence-transformers has it."""
    file = folder / "config.json"
    values = _read(file)
    if not isinstance(values, dict):
        raise ConfigError(f"{file} is not a JSON object", "copy the file again")
    activation = values.get("activation_function", "torch.nn.modules.activation.Tanh")
    if activation not in ACTIVATIONS:
        known = ", ".join(name.rpartition(".")[2] for name in ACTIVATIONS)
        raise ConfigError(
            f"{file}: activation_function {str(activation)[:80]!r} is not computed here", f"known: {known}"
        )
    for key in ("module_input_name", "module_output_name"):
        if values.get(key) not in (None, "sentence_embedding"):
            raise ConfigError(
                f"{file}: {key} is {str(values[key])[:80]!r}", "a Dense of the sentence's embedding is computed"
            )
    given = {key: values[key] for key in ("in_features", "out_features", "bias") if key in values}
    try:
        made = msgspec.convert({"path": str(folder), **given, "activation": ACTIVATIONS[activation]}, DenseModule)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{file} cannot be read: {error}", "copy the file again") from error
    if min(made.in_features, made.out_features) < 1:
        raise ConfigError(f"{file} makes {made.out_features} numbers of {made.in_features}", "copy the file again")
    return made


def _of_folder(folder: Path) -> tuple[PoolingKind, bool]:
    """What is pooled, and whether that is normalised, by the files of sentence-transformers."""
    modules = _modules(folder)
    if not modules:
        return "last", True
    pooling = next(path for kind, path in modules if kind == "Pooling")
    return _pooling_mode(pooling / "config.json"), modules[-1][0] == "Normalize"


def _modules(folder: Path) -> list[tuple[str, Path]]:
    """The kind and the folder of each module of sentence-transformers, in order; none where the folder lists none."""
    root = folder if folder.is_dir() else folder.parent
    file = root / MODULES
    if not file.is_file():
        return []
    modules = _read(file)
    if not isinstance(modules, list) or not all(isinstance(one, dict) for one in modules):
        raise ConfigError(f"{file} is not a list of modules", "copy the file again")
    kinds = [str(one.get("type")).rpartition(".")[2] for one in modules]
    unknown = [kind for kind in kinds if kind not in MODULE]
    if unknown:
        raise ConfigError(
            f"{file} has a module {unknown[0]!r}, which is not computed here",
            f"{', '.join(MODULE)} are; to serve the model as one that writes, take the file away",
        )
    if kinds.count("Pooling") != 1:
        raise ConfigError(f"{file} has {kinds.count('Pooling')} modules that pool, not one", "copy the file again")
    if kinds.count("Normalize") > 1 or kinds != sorted(kinds, key=MODULE.index):
        raise ConfigError(f"{file} has its modules as {', '.join(kinds)}", f"their order is {', '.join(MODULE)}")
    paths = [str(one.get("path") or "") for one in modules]
    for path in paths:
        if ".." in Path(path).parts or Path(path).is_absolute():
            raise ConfigError(
                f"{file} names the folder {path[:80]!r}, which is outside of the model's", "copy it again"
            )
    return [(kind, root / path) for kind, path in zip(kinds, paths, strict=True)]


def _pooling_mode(file: Path) -> PoolingKind:
    """The one mode that a `1_Pooling/config.json` switches on."""
    values = _read(file)
    if not isinstance(values, dict):
        raise ConfigError(f"{file} is not a JSON object", "copy the file again")
    given = values.get("pooling_mode")
    if given is None:
        prefix = "pooling_mode_"
        on = [key.removeprefix(prefix) for key, value in values.items() if key.startswith(prefix) and value]
        given = [mode.removesuffix("_tokens") for mode in on]
    modes = [given] if isinstance(given, str) else list(given)
    if len(modes) != 1 or modes[0] not in POOLING_MODES:
        hint = nearest(str(modes[0])[:40], POOLING_MODES) if len(modes) == 1 else "one of mean and lasttoken is"
        raise ConfigError(f"{file} pools by {modes!r}, which is not computed here", hint)
    return POOLING_MODES[modes[0]]


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read: {str(error)[:200]}", "copy the whole model folder again") from error
