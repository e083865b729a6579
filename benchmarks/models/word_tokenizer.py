"""A tokenizer of made-up words, each of which is one token, for models with random weights that are given texts."""

from __future__ import annotations

import json
import random
from pathlib import Path

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

SPECIAL = ("<unk>", "<s>", "</s>")


def add_word_tokenizer(folder: Path) -> Path:
    """Write a tokenizer with as many tokens as the model of the folder has, the third of which ends a text."""
    count = json.loads((folder / "config.json").read_text())["vocab_size"]
    names = [*SPECIAL, *map(word, range(len(SPECIAL), count))]
    tokenizer = Tokenizer(WordLevel({name: number for number, name in enumerate(names)}, unk_token=SPECIAL[0]))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = dict(tokenizer_class="PreTrainedTokenizerFast", eos_token="</s>", pad_token="<unk>", unk_token="<unk>")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def word(number: int) -> str:
    """The text of token `number`."""
    return f"w{number}"


def words(dice: random.Random, length: int, vocab: int) -> str:
    """A text of so many tokens, drawn at random."""
    return " ".join(word(dice.randrange(len(SPECIAL), vocab)) for _ in range(length))
