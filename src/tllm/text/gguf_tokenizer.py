"""The tokenizer that a GGUF file's metadata describes, as the `tokenizers` library has it.

`tokenizer.ggml.model` says of which kind it is: "gpt2" is byte-level BPE, whose text is first split by the expression
that `tokenizer.ggml.pre` names; "llama" is sentencepiece's BPE, whose merges follow from the scores of its tokens, and
"gemma4" the same with merges that the file lists. What a file does not say is what llama.cpp takes for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from tllm.core.errors import ConfigError, WeightsError
from tllm.core.gguf_header import Value
from tllm.core.gguf_vocabulary import CONTROL, NORMAL, TOKENS, TYPES, USER_DEFINED, Role, numbers, texts, token_id

BESIDE = "put the model's tokenizer.json beside the file"

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}"
QWEN2 = LLAMA3.replace("{1,3}", "")
QWEN35 = (
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{SPACES}"
)
SEED = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{SPACES}"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
BEFORE_WORD, SIGNS = r"[^\r\n\p{L}\p{N}]?", r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
TEKKEN = rf"{BEFORE_WORD}{UPPER}*{LOWER}+|{BEFORE_WORD}{UPPER}+{LOWER}*|\p{{N}}|{SIGNS}|{SPACES}"
GPT4O = (
    rf"{BEFORE_WORD}{UPPER}*{LOWER}+{CONTRACTIONS}?|{BEFORE_WORD}{UPPER}+{LOWER}*{CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}|{SIGNS}|{SPACES}"
)
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
DIGIT = r"\p{N}"
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    rf"|{SPACES}",
)
"""Numbers by three digits, Chinese and Japanese, and what is left."""

PRE: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "dbrx", "smaug-bpe"),
        (LLAMA3,),
    ),
    **dict.fromkeys(("glm4", "chatglm-bpe"), (LLAMA3,)),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen", "kormo", "megrez", "stablelm2", "hunyuan", "grok-2"),
        (QWEN2,),
    ),
    "qwen35": (QWEN35,),
    "seed-coder": (SEED,),
    "deepseek-v3": DEEPSEEK3,
    "tekken": (TEKKEN,),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), (GPT4O,)),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "exaone4"), (GPT2,)),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
        (DIGIT, GPT2),
    ),
}
"""The expressions that text is split by, one after the other, by their names in files."""

WHOLE_WORDS = frozenset(
    ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken")
)
"""Of these, a word that is a token is that token, whatever the merges make of it; and a text begins with `bos`."""

GEMMA = ("gemma", "gemma2", "gemma3")
NOT_STRIPPED = ("<unk>", "<s>", "<|endoftext|>")
"""Control tokens of Phi-3 after which spaces count. After its others they do not, which no key of the file says."""
SPACE = "\u2581"


def gguf_tokenizer(metadata: Mapping[str, Value]) -> tuple[tokenizers.Tokenizer, dict[str, Any]] | None:
    """The tokenizer, and what a tokenizer_config.json would say. None where the file has no vocabulary.

    ConfigError for a kind of tokenizer that is not known, or a vocabulary that cannot be right.
    """
    kind, tokens = metadata.get("tokenizer.ggml.model"), texts(metadata, TOKENS)
    if not tokens or kind in (None, "none", "no_vocab"):
        return None
    if kind not in ("gpt2", "llama", "gemma4"):
        raise ConfigError(f"the file has a tokenizer of kind {kind!r}, and gpt2, llama and gemma4 are read", BESIDE)
    pre = metadata.get("tokenizer.ggml.pre")
    try:
        inner = _byte_level(metadata, tokens) if kind == "gpt2" else _sentencepiece(metadata, tokens)
        _add_special_tokens(inner, metadata, tokens)
        _add_ends(inner, metadata, tokens, kind in ("llama", "gemma4") or pre in WHOLE_WORDS)
    except (ConfigError, WeightsError):
        raise
    except Exception as error:  # the library raises exactly this for every fault in a vocabulary
        raise ConfigError(f"the file's tokenizer cannot be built: {str(error)[:300]}", BESIDE) from error
    return inner, _config(metadata, tokens)


def is_same_vocabulary(inner: tokenizers.Tokenizer, metadata: Mapping[str, Value]) -> bool:
    """Whether a tokenizer.json gives the ids of a file's tokens, as far as each 50th of its plain tokens tells."""
    tokens, kinds = texts(metadata, TOKENS), numbers(metadata, TYPES)
    plain = [i for i in range(len(tokens)) if i >= len(kinds) or kinds[i] == NORMAL]
    return all(inner.id_to_token(i) == tokens[i] for i in plain[::50])


def _byte_level(metadata: Mapping[str, Value], tokens: list[str]) -> tokenizers.Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre")
    if not isinstance(pre, str) or pre not in PRE:
        raise ConfigError(
            f"the file's tokenizer splits text in a way that is called {pre!r}, which is not known here", BESIDE
        )
    merges = [_pair(merge) for merge in texts(metadata, "tokenizer.ggml.merges")]
    inner = tokenizers.Tokenizer(models.BPE(_ids(tokens), merges, ignore_merges=pre in WHOLE_WORDS))
    splits = [pre_tokenizers.Split(tokenizers.Regex(expression), "isolated") for expression in PRE[pre]]
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    inner.decoder = decoders.ByteLevel()
    return inner


def _sentencepiece(metadata: Mapping[str, Value], tokens: list[str]) -> tokenizers.Tokenizer:
    """A space is ▁, one is put before each text, and what the vocabulary lacks is spelled in bytes."""
    listed, scores = metadata.get("tokenizer.ggml.model") == "gemma4", numbers(metadata, "tokenizer.ggml.scores")
    if not listed and metadata.get("general.architecture") in GEMMA:
        # The converter has spelled runs of spaces as such, and Gemma's scores are no ranks: the order of its tokens is.
        tokens = [SPACE * len(token) if token and not token.strip(" ") else token for token in tokens]
        scores = [-float(i) for i in range(len(tokens))]
    if not listed and len(scores) != len(tokens):
        raise ConfigError(f"the file has {len(tokens)} tokens and {len(scores)} scores of them", BESIDE)
    # Gemma 4's vocabulary has a few tokens twice, of which the later counts, as in llama.cpp.
    ids = {token: number for number, token in enumerate(tokens)} if listed else _ids(tokens)
    merges = map(_pair, texts(metadata, "tokenizer.ggml.merges")) if listed else _merges(tokens, scores, ids)
    unknown = token_id(metadata, "unknown", len(tokens))
    inner = tokenizers.Tokenizer(
        models.BPE(
            ids,
            list(merges),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    before = metadata.get("tokenizer.ggml.add_space_prefix", True) is True
    inner.normalizer = normalizers.Sequence(
        [*([normalizers.Prepend(SPACE)] if before else []), normalizers.Replace(" ", SPACE)]
    )
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if before else []),
        ]
    )
    return inner


def _merges(tokens: list[str], scores: list[float], ids: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Every way to make a token of two others, the best token first; of the same score, the longer halves first."""
    ways: list[tuple[float, int, int, str, str]] = []
    for token, score in zip(tokens, scores, strict=True):
        halves = [(token[:i], token[i:]) for i in range(1, len(token))]
        known = [(left, right) for left, right in halves if left in ids and right in ids]
        known.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        ways += ((-score, -len(left), -len(right), left, right) for left, right in known)
    ways.sort(key=lambda way: way[:3])
    return ((left, right) for *_, left, right in ways)


def _ids(tokens: list[str]) -> dict[str, int]:
    ids = {token: number for number, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        twice = next(token for number, token in enumerate(tokens) if ids[token] != number)
        raise ConfigError(f"the file's vocabulary has the token {twice!r} twice", BESIDE)
    return ids


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if not left or not right or " " in right:
        raise ConfigError(f"the file's tokenizer has a merge {merge!r}, which is not two tokens", BESIDE)
    return left, right


def _add_special_tokens(inner: tokenizers.Tokenizer, metadata: Mapping[str, Value], tokens: list[str]) -> None:
    """Control tokens and those of the user, which are never cut; the former are left out of texts."""
    kinds = numbers(metadata, TYPES)
    strips = metadata.get("general.architecture") == "phi3" and metadata.get("tokenizer.ggml.model") == "llama"
    for kind, add in ((CONTROL, inner.add_special_tokens), (USER_DEFINED, inner.add_tokens)):
        add(
            [
                tokenizers.AddedToken(
                    token, normalized=False, special=kind == CONTROL, rstrip=strips and token not in NOT_STRIPPED
                )
                for token, of_token in zip(tokens, kinds, strict=False)
                if of_token == kind and inner.token_to_id(token) is not None
            ]
        )


def _add_ends(
    inner: tokenizers.Tokenizer, metadata: Mapping[str, Value], tokens: list[str], begins_with_bos: bool
) -> None:
    """Tokens that go before and after each text."""
    first = token_id(metadata, "bos", len(tokens))
    last = token_id(metadata, "eos", len(tokens))
    before = [first] if first is not None and metadata.get("tokenizer.ggml.add_bos_token", begins_with_bos) else []
    after = [last] if last is not None and metadata.get("tokenizer.ggml.add_eos_token", False) else []
    if before or after:
        inner.post_processor = processors.TemplateProcessing(
            single=[*(tokens[i] for i in before), "$A", *(tokens[i] for i in after)],
            special_tokens=[(tokens[i], i) for i in dict.fromkeys(before + after)],
        )


def _config(metadata: Mapping[str, Value], tokens: list[str]) -> dict[str, Any]:
    """Special tokens by their names, and the chat templates."""
    config: dict[str, Any] = {}
    roles: dict[str, Role] = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    for name, role in roles.items():
        found = token_id(metadata, role, len(tokens))
        if found is not None:
            config[name] = tokens[found]
    prefix = "tokenizer.chat_template"
    templates = {
        key.removeprefix(prefix).lstrip(".") or "default": str(value)
        for key, value in metadata.items()
        if key == prefix or key.startswith(f"{prefix}.")
    }
    if templates.keys() == {"default"}:
        config["chat_template"] = templates["default"]
    elif templates:
        config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    return config
