"""Small tokenizers of the two common kinds, trained in the test: byte-level BPE and BPE with byte fallback."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from tllm.text.tokenizer import Tokenizer

CORPUS = [
    "the quick brown fox jumps over the lazy dog and the dog sleeps",
    "def read(self, size=-1): return self.buffer.read(size)",
    "Größe und Maß: naïve façade, crème brûlée",
    "hello world hello there, how are you? I am fine.",
    "<|user|> says hello to the world\n\nand the world answers\n",
] * 4


@lru_cache(maxsize=1)
def byte_level() -> tokenizers.Tokenizer:
    """As GPT-2, Llama 3 and Qwen have it."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>", "<|user|>", "<｜assistant｜>"],
        show_progress=False,
    )
    made.train_from_iterator(CORPUS, trainer)
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))]
    )
    return made


@lru_cache(maxsize=1)
def sentencepiece_like() -> tokenizers.Tokenizer:
    """As Llama 2 and Mistral have it: ▁ for a space, bytes for what the vocabulary lacks, first space stripped."""
    made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=520,
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))],
        limit_alphabet=60,
        show_progress=False,
    )
    made.train_from_iterator(CORPUS, trainer)
    state = json.loads(made.to_str())
    for token in state["added_tokens"]:  # bytes are ordinary tokens, not special ones
        token["special"] = not token["content"].startswith("<0x")
    state["added_tokens"] = [token for token in state["added_tokens"] if token["special"]]
    return tokenizers.Tokenizer.from_str(json.dumps(state))


def both() -> dict[str, Tokenizer]:
    """The two as this project's Tokenizer."""
    config = {"bos_token": "<s>", "eos_token": "</s>"}
    return {
        "byte-level": Tokenizer(byte_level(), config),
        "sentencepiece-like": Tokenizer(sentencepiece_like(), config),
    }


def save(folder: Path, inner: tokenizers.Tokenizer, config: dict[str, object]) -> Path:
    """A folder that `transformers` can read too."""
    inner.save(str(folder / "tokenizer.json"))
    whole = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(whole), encoding="utf-8")
    return folder
