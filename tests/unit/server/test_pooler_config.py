"""How a model's folder, and the user, say that prompts are pooled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.models.layouts import spec_of
from tllm.core.errors import ConfigError
from tllm.server.pooling.pooler_config import PoolerConfig, dense_modules, model_pooling, read_pooler_config
from tllm.spec.families import spec_from_config
from tllm.spec.hf_config import read_config
from tllm.spec.model_spec import ModelSpec

TINY = Path("models/tiny")
RAW = read_config(TINY)
SPEC = spec_of(TINY)
OLD = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": False}


def folder(path: Path, modules: list[str], pooling: dict[str, Any]) -> Path:
    """As sentence-transformers saves one."""
    listed = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(modules)
    ]
    (path / "modules.json").write_text(json.dumps(listed))
    for i, kind in enumerate(modules[1:], 1):
        (path / f"{i}_{kind}").mkdir(exist_ok=True)
    (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return path


@pytest.mark.parametrize(
    ("modules", "pooling", "kind", "normalize"),
    [
        (["Transformer", "Pooling", "Normalize"], {**OLD, "pooling_mode_mean_tokens": True}, "mean", True),
        (["Transformer", "Pooling"], {**OLD, "pooling_mode_lasttoken": True}, "last", False),
        (["Transformer", "Pooling"], {"pooling_mode": "mean"}, "mean", False),
        (["Transformer", "Pooling", "Normalize"], {"pooling_mode": ["lasttoken"]}, "last", True),
    ],
)
def test_folders_of_sentence_transformers(
    modules: list[str], pooling: dict[str, Any], kind: str, normalize: bool, tmp_path: Path
) -> None:
    found = model_pooling(folder(tmp_path, modules, pooling), SPEC, RAW)
    assert (found.kind, found.normalize, found.score_type) == (kind, normalize, "embedding")
    forced = model_pooling(tmp_path, SPEC, RAW, PoolerConfig(pooling_type="LAST", normalize=True))
    assert (forced.kind, forced.normalize) == ("last", True)


def test_a_folder_without_them_is_of_a_causal_model(tmp_path: Path) -> None:
    found = model_pooling(tmp_path, SPEC, RAW)
    assert (found.kind, found.normalize, found.hidden_size) == ("last", True, SPEC.hidden_size)


@pytest.mark.parametrize(
    ("modules", "pooling", "words"),
    [
        (["Transformer", "Pooling", "LSTM"], {"pooling_mode": "mean"}, "LSTM"),
        (["Transformer", "Pooling", "Normalize", "Dense"], {"pooling_mode": "mean"}, "their order|Normalize, Dense"),
        (["Transformer", "Pooling"], {**OLD, "pooling_mode_cls_token": True}, "cls"),
        (["Transformer", "Pooling"], {**OLD}, "pools by"),
        (["Transformer", "Pooling"], dict.fromkeys(OLD, True), "pools by"),
        (["Transformer", "Pooling"], {"pooling_mode": "weightedmean"}, "weightedmean"),
    ],
)
def test_what_is_not_computed_is_refused(
    modules: list[str], pooling: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        model_pooling(folder(tmp_path, modules, pooling), SPEC, RAW)


@pytest.mark.parametrize(
    ("text", "words"), [("[", "read"), ("{}", "list"), ("[]", "0 modules"), ('[{"type": "x.Pooling"}]', "read")]
)
def test_torn_files_are_refused(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(ConfigError, match=words):
        model_pooling(tmp_path, SPEC, RAW)


def dense(folder: Path, number: int, **values: Any) -> None:
    (folder / f"{number}_Dense" / "config.json").write_text(json.dumps(values))


IDENTITY = "torch.nn.modules.linear.Identity"


def test_dense_modules_say_how_many_numbers_an_embedding_has(tmp_path: Path) -> None:
    folder(tmp_path, ["Transformer", "Pooling", "Dense", "Dense", "Normalize"], {"pooling_mode": "mean"})
    width = SPEC.hidden_size
    dense(tmp_path, 2, in_features=width, out_features=7, bias=False, activation_function=IDENTITY)
    dense(tmp_path, 3, in_features=7, out_features=5)
    found = model_pooling(tmp_path, SPEC, RAW)
    assert (found.kind, found.normalize, found.hidden_size) == ("mean", True, 5)
    first, second = dense_modules(tmp_path)
    assert (first.bias, first.activation, first.path) == (False, "identity", str(tmp_path / "2_Dense"))
    assert (second.bias, second.activation) == (True, "tanh"), "as sentence-transformers has it where nothing is said"
    assert dense_modules(TINY) == ()


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (
            dict(in_features=3, out_features=7),
            dict(in_features=7, out_features=5),
            "takes 3 numbers and a hidden state has",
        ),
        (dict(in_features=SPEC.hidden_size, out_features=7), dict(in_features=6, out_features=5), "before it makes 7"),
        (dict(in_features=SPEC.hidden_size), dict(in_features=6, out_features=5), "out_features"),
        (dict(in_features=SPEC.hidden_size, out_features=0), dict(in_features=0, out_features=5), "makes 0 numbers"),
        (dict(in_features="a", out_features=0), dict(in_features=0, out_features=5), "in_features"),
        (dict(activation_function="torch.nn.modules.activation.GELU"), {}, "GELU"),
        (dict(module_input_name="token_embeddings"), {}, "token_embeddings"),
    ],
)
def test_dense_modules_that_cannot_be(
    first: dict[str, Any], second: dict[str, Any], words: str, tmp_path: Path
) -> None:
    folder(tmp_path, ["Transformer", "Pooling", "Dense", "Dense"], {"pooling_mode": "mean"})
    dense(tmp_path, 2, **first)
    dense(tmp_path, 3, **second)
    with pytest.raises(ConfigError, match=words):
        model_pooling(tmp_path, SPEC, RAW)


def test_a_folder_outside_is_not_read(tmp_path: Path) -> None:
    inside = tmp_path / "model"
    inside.mkdir()
    (tmp_path / "config.json").write_text('{"pooling_mode": "mean"}')
    (inside / "modules.json").write_text('[{"type": "a.Pooling", "path": ".."}]')
    with pytest.raises(ConfigError, match="outside"):
        model_pooling(inside, SPEC, RAW)


def test_what_scores(tmp_path: Path) -> None:
    """The head that there is; rerankers by their config or name; or what the user says."""
    raw = {**RAW, "architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "a"}}
    head = spec_from_config(raw)
    assert (head.num_labels, head.tied) == (1, False)
    assert spec_from_config({**raw, "num_labels": 5}).num_labels == 5
    assert model_pooling(tmp_path, head, raw).score_type == "classification"
    converted = {**raw, "classifier_from_token": ["no", "yes"], "is_original_qwen3_reranker": True}
    assert spec_from_config(converted).num_labels == 0
    found = model_pooling(tmp_path, SPEC, {**RAW, "classifier_from_token": ["false", "true"]})
    assert (found.score_type, found.answers) == ("generative", ("false", "true"))
    (tmp_path / "Qwen3-Reranker-0.6B").mkdir()
    assert model_pooling(tmp_path / "Qwen3-Reranker-0.6B", SPEC, RAW).score_type == "generative"
    plain = PoolerConfig(score_type="embedding")
    assert model_pooling(tmp_path / "Qwen3-Reranker-0.6B", SPEC, RAW, plain).score_type == "embedding"
    wrong: tuple[tuple[ModelSpec, str], ...] = ((SPEC, "classification"), (head, "generative"))
    for spec, kind in wrong:
        with pytest.raises(ConfigError, match=kind):
            model_pooling(tmp_path, spec, RAW, read_pooler_config({"score_type": kind}))
    with pytest.raises(ConfigError, match="classifier_from_token"):
        model_pooling(tmp_path, SPEC, {**RAW, "classifier_from_token": ["yes"]})


def test_the_option_is_json_with_known_keys() -> None:
    assert read_pooler_config(None) == PoolerConfig()
    asked = PoolerConfig(pooling_type="MEAN", normalize=False)
    assert read_pooler_config('{"pooling_type": "mean", "normalize": false}') == asked
    assert read_pooler_config({"pooling_type": "MEAN", "normalize": False}) == asked
    for wrong in ("{", "[]", '{"pooling_type": "CLS"}', '{"pooling": "MEAN"}', '{"normalize": 1}'):
        with pytest.raises(ConfigError, match="pooler_config"):
            read_pooler_config(wrong)
