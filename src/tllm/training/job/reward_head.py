"""The config of a reward model that is made of a causal language model: the same layers, and a head with one score."""

from __future__ import annotations

from typing import Any

from tllm.core.errors import ConfigError

CAUSAL, SCORING = "ForCausalLM", "ForSequenceClassification"


def with_reward_head(config: dict[str, Any]) -> dict[str, Any]:
    """A `config.json` with one label; that of a model which has a classification head already stays as it is."""
    kinds = config.get("architectures")
    kind = str(kinds[0]) if isinstance(kinds, list) and kinds else ""
    if kind.endswith(SCORING):
        return config
    if not kind.endswith(CAUSAL):
        raise ConfigError(
            f"a reward model is made of a {CAUSAL} or a {SCORING}, and config.json has architectures {kinds!r}",
            "give the folder of one of these",
        )
    plain = {key: value for key, value in config.items() if key not in ("num_labels", "problem_type")}
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return {**plain, "architectures": [kind.removesuffix(CAUSAL) + SCORING], **labels}
