"""Tokenizers of GGUF files: the same ids as transformers makes of the same file, and as the model's own tokenizer."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer, get_gguf_tokenizer

from tests.unit.text import kits
from tllm.core.errors import ConfigError
from tllm.text.chat_template import ChatTemplate
from tllm.text.gguf_tokenizer import PRE
from tllm.text.tokenizer import Tokenizer

PAGE = """# A page of text, with a heading

It's 12345 o'clock; we'll see 3.14159 and 2,000,000 — don't THEY'RE you'd. camelCaseWords and HTTPServer2Go.

    def read(self, size=-1):\t# tabs
        return self.buffer.read(size)\x20\x20


Größe und Maß: naïve façade, crème brûlée. Привет, мир! 你好，世界。 नमस्ते दुनिया 👋🏽 ﬁn. //comment/path ///
\r\nwindows line\r\n  trailing   spaces   \n\n\n end"""
NORMAL, CONTROL, USER, BYTE = 1, 3, 4, 6
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def write(
    path: Path, model: str, tokens: list[str], kinds: list[int], more: dict[str, Any], architecture: str = "llama"
) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    for name, value in more.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def by_transformers(path: Path) -> tokenizers.Tokenizer:
    architecture, described, _ = get_gguf_tokenizer(str(path))
    if described.get("tokenizer_type") == "llama":
        described["scores"] = gguf.GGUFReader(path).fields["tokenizer.ggml.scores"].contents()
    described["token_type"] = gguf.GGUFReader(path).fields["tokenizer.ggml.token_type"].contents()
    return convert_gguf_tokenizer(architecture, described)[0]


def ours(path: Path) -> Tokenizer:
    made = Tokenizer.from_folder(path)
    assert made is not None
    return made


def parts_of(inner: tokenizers.Tokenizer) -> tuple[list[str], list[str], list[int]]:
    """(tokens, merges, kinds) of a BPE tokenizer, as a converter writes them."""
    state = json.loads(inner.to_str())
    vocab = inner.get_vocab(with_added_tokens=True)
    tokens = sorted(vocab, key=lambda token: vocab[token])
    added = {token["content"]: token["special"] for token in state["added_tokens"]}
    kinds = [
        BYTE if token.startswith("<0x") else NORMAL if token not in added else CONTROL if added[token] else USER
        for token in tokens
    ]
    return tokens, [" ".join(pair) for pair in state["model"]["merges"]], kinds


def byte_level_of(splits: tuple[str, ...]) -> tokenizers.Tokenizer:
    """Trained on the page with the splits of a file's `pre`."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(split), "isolated") for split in splits),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>", "<|im_end|>"],
        show_progress=False,
    )
    made.train_from_iterator([PAGE, *kits.CORPUS], trainer)
    made.add_tokens([tokenizers.AddedToken("<think>", normalized=False)])
    return made


IN_TRANSFORMERS = ("llama-bpe", "qwen2", "qwen35", "tekken", "gpt-4o", "gpt-2")


@pytest.mark.parametrize("pre", [*IN_TRANSFORMERS, "smollm", "seed-coder", "deepseek-v3"])
def test_byte_level(pre: str, tmp_path: Path) -> None:
    made = byte_level_of(PRE[pre])
    tokens, merges, kinds = parts_of(made)
    more = {"token_merges": merges, "tokenizer_pre": pre, "bos_token_id": 0, "eos_token_id": 1}
    path = write(tmp_path / "m.gguf", "gpt2", tokens, kinds, more)
    got = ours(path)
    for text in (PAGE, "a <think> b</s>c<|im_end|>", "  two", "", "\n", "x" * 50):
        ids = got.encode(text, add_special_tokens=False)
        assert ids == made.encode(text, add_special_tokens=False).ids
        if pre in IN_TRANSFORMERS:
            assert ids == by_transformers(path).encode(text, add_special_tokens=False).ids
        assert got.decode(ids) == text
    # llama.cpp begins texts of these with bos though no key says so
    begins = pre in ("llama-bpe", "tekken")
    assert got.encode("x")[: len(got.encode("x")) - 1] == ([0] if begins else [])
    assert set(got.eos_ids) == {1, 2}


def test_one_kind_of_split_is_not_like_another() -> None:
    """A mutation: the page tells the ways to split apart."""
    seen = set()
    for pre in ("llama-bpe", "qwen2", "qwen35", "tekken", "gpt-4o", "gpt-2", "smollm", "seed-coder", "deepseek-v3"):
        made = byte_level_of(PRE[pre])
        words = made.pre_tokenizer.pre_tokenize_str(PAGE + "日本２ 1½ ä́ x!\n\n a's A'S")
        seen.add(tuple(word for word, _ in words))
    assert len(seen) == 9


def test_whole_words_come_before_merges(tmp_path: Path) -> None:
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "hello"]
    for pre, want in (("llama-bpe", 1), ("qwen2", 5)):
        more = {"token_merges": [], "tokenizer_pre": pre, "add_bos_token": False}
        path = write(tmp_path / f"{pre}.gguf", "gpt2", tokens, [NORMAL] * len(tokens), more)
        assert len(ours(path).encode("hello")) == want


def sentencepiece(tmp_path: Path, architecture: str, **more: Any) -> tuple[Path, tokenizers.Tokenizer]:
    """A file as it is made of a sentencepiece model: scores fall in the order of merges, and no merge is written."""
    made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(
        vocab_size=640,
        special_tokens=[
            "<unk>",
            "<s>",
            "</s>",
            *(f"<0x{byte:02X}>" for byte in range(256)),
            "<|end|>",
            "<|endoftext|>",
        ],
        limit_alphabet=50,
        show_progress=False,
    )
    made.train_from_iterator([PAGE, *kits.CORPUS], trainer)
    tokens, _, kinds = parts_of(made)
    kinds = [BYTE if token.startswith("<0x") else kind for token, kind in zip(tokens, kinds, strict=True)]
    scores = [0.0 if i < 261 else -float(i - 261) for i in range(len(tokens))]
    fields = dict(token_scores=scores, bos_token_id=1, eos_token_id=2, unk_token_id=0, **more)
    return write(tmp_path / f"{architecture}.gguf", "llama", tokens, kinds, fields, architecture), made


@pytest.mark.parametrize(
    ("architecture", "more"), [("llama", {}), ("phi3", {}), ("gemma2", {"add_space_prefix": False})]
)
def test_sentencepiece(architecture: str, more: dict[str, Any], tmp_path: Path) -> None:
    path, _ = sentencepiece(tmp_path, architecture, **more)
    got, theirs = ours(path), by_transformers(path)
    for text in (PAGE, "hello world", "Ω and 你", "x  y   z"):
        ids = got.encode(text, add_special_tokens=False)
        assert ids == theirs.encode(text, add_special_tokens=False).ids, text
        assert got.decode(ids) == text
        assert got.encode(text) == [1, *ids]
    assert set(got.eos_ids) == {2, got.inner.token_to_id("<|end|>"), got.inner.token_to_id("<|endoftext|>")}


def test_every_text_of_a_sentencepiece_model_begins_with_a_space(tmp_path: Path) -> None:
    """As sentencepiece and llama.cpp do it, and the tokenizer.json of models with such a vocabulary, also after control
    tokens; transformers' conversion of llama does it only at the very beginning, and not before a space."""
    path, made = sentencepiece(tmp_path, "llama")
    got = ours(path)
    for text in (" hello", "   x", "hello", "a</s>b", "a<|end|> b"):
        assert got.encode(text, add_special_tokens=False) == made.encode(text, add_special_tokens=False).ids
        if "<" not in text:
            assert got.decode(got.encode(text, add_special_tokens=False)) == text


def test_spaces_after_control_tokens_of_phi3_do_not_count(tmp_path: Path) -> None:
    path, _ = sentencepiece(tmp_path, "phi3")
    got = ours(path)
    end = got.inner.token_to_id("<|end|>")
    assert got.encode("a<|end|>\n b") == [*got.encode("a<|end|>"), *got.encode("b", add_special_tokens=False)]
    assert got.encode("a<|end|>")[-1] == end
    assert got.encode("a<|endoftext|> b") != got.encode("a<|endoftext|>b"), "but they do after this one"


def test_gemmas_runs_of_spaces(tmp_path: Path) -> None:
    """The converter writes them as spaces; as tokens they are ▁."""
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "  ", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a"]
    kinds = [CONTROL] * 4 + [USER] + [BYTE] * 256 + [NORMAL] * 3
    more = dict(
        token_scores=[0.0] * len(tokens), bos_token_id=2, eos_token_id=1, unk_token_id=3, add_space_prefix=False
    )
    path = write(tmp_path / "m.gguf", "llama", tokens, kinds, {**more, "add_space_prefix": False}, "gemma2")
    ids = ours(path).encode("  ", add_special_tokens=False)
    assert ids == [4]
    assert ids == by_transformers(path).encode("  ", add_special_tokens=False).ids


def test_gemma4_lists_its_merges(tmp_path: Path) -> None:
    """The ids of a tokenizer.json as Gemma's are: ▁ for a space, none before a text, bytes for what is missing."""
    truth = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    truth.normalizer = normalizers.Replace(" ", "▁")
    truth.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")  # as words are learned
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<turn|>"]
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=[*special, *BYTES], show_progress=False)
    truth.train_from_iterator([PAGE.replace("你", ""), *kits.CORPUS], trainer)
    state = json.loads(truth.to_str())
    state |= {"pre_tokenizer": None, "added_tokens": state["added_tokens"][: len(special)]}
    truth = tokenizers.Tokenizer.from_str(json.dumps(state))
    tokens, merges, kinds = parts_of(truth)
    more = dict(token_merges=merges, add_space_prefix=False, bos_token_id=2, eos_token_id=1, unk_token_id=3)
    found = ours(write(tmp_path / "m.gguf", "gemma4", tokens, kinds, more, "gemma4"))
    for text in (PAGE, " a  b", "a\n\n\nb", "你", "", "x<turn|> y"):
        assert found.encode(text) == [2, *truth.encode(text).ids], text
        assert found.decode(found.encode(text)[1:]).replace("<turn|>", "") == text.replace("<turn|>", "")
    assert "<0xE4>" in [tokens[i] for i in found.encode("你")]
    twice = ours(write(tmp_path / "twice.gguf", "gemma4", [*tokens, "a"], [*kinds, NORMAL], more, "gemma4"))
    assert twice.encode("a")[-1] == len(tokens)


def test_chat_template_and_ends(tmp_path: Path) -> None:
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eom|>"]
    kinds = [NORMAL] * 256 + [CONTROL] * 4
    template = "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    more = dict(
        token_merges=[], tokenizer_pre="qwen2", bos_token_id=256, eos_token_id=258, eom_token_id=259,
        chat_template=template,
    )  # fmt: skip
    path = write(tmp_path / "m.gguf", "gpt2", tokens, kinds, more)
    got = ours(path)
    chat = ChatTemplate.from_folder(path, got)
    assert chat is not None
    text = chat.render([{"role": "user", "content": "hi"}])
    assert text == "<|endoftext|><|im_start|>hi<|im_end|>"
    assert got.encode(text, add_special_tokens=False)[:2] == [256, 257]
    assert got.eos_ids == (258, 259, 256)
    assert got.is_special(257)


def test_several_chat_templates(tmp_path: Path) -> None:
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    templates = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    more = {"token_merges": [], "tokenizer_pre": "qwen2", "chat_template": templates}
    path = write(tmp_path / "m.gguf", "gpt2", tokens, [NORMAL] * 256, more)
    chat = ChatTemplate.from_folder(path, ours(path))
    assert chat is not None
    assert chat.render([]) == "plain"
    assert chat.render([], tools=[{"name": "f"}]) == "tools"


def test_a_tokenizer_json_beside_the_file_comes_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = byte_level_of(PRE["gpt-2"])
    tokens, merges, kinds = parts_of(made)
    more = {
        "token_merges": merges,
        "tokenizer_pre": "default",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "chat_template": "c",
    }
    path = write(tmp_path / "m.gguf", "gpt2", tokens, kinds, more)
    with pytest.raises(ConfigError, match="'default', which is not known") as caught:
        Tokenizer.from_folder(path)
    assert "tokenizer.json beside the file" in caught.value.hint
    kits.save(tmp_path, made, {"bos_token": "<s>", "eos_token": "</s>"})
    got = ours(path)
    assert got.encode(PAGE) == made.encode(PAGE).ids
    assert got.config["chat_template"] == "c"
    assert set(got.eos_ids) == {1, 2}
    assert ours(tmp_path).encode(PAGE) == made.encode(PAGE).ids
    # one of another model is not used
    other = write(tmp_path / "n.gguf", "gpt2", tokens[::-1], kinds[::-1], {**more, "tokenizer_pre": "gpt-2"})
    with caplog.at_level(logging.WARNING):
        assert ours(other).inner.token_to_id("</s>") == tokens[::-1].index("</s>")
    assert "is of another model" in caplog.text


@pytest.mark.parametrize(
    ("model", "tokens", "more", "why"),
    [
        ("bert", ["a"], {}, "of kind 'bert'"),
        ("gpt2", ["a", "b"], {}, "called None"),
        ("gpt2", ["a", "b"], {"tokenizer_pre": "viking"}, "called 'viking'"),
        ("gpt2", ["a", "b", "a"], {"tokenizer_pre": "qwen2"}, "has the token 'a' twice"),
        ("gpt2", ["a", "b"], {"tokenizer_pre": "qwen2", "token_merges": ["ab"]}, "merge 'ab'"),
        ("gpt2", ["a", "b"], {"tokenizer_pre": "qwen2", "token_merges": ["a c"]}, "cannot be built"),
        ("llama", ["a", "b"], {"token_scores": [0.0]}, "2 tokens and 1 scores"),
    ],
)
def test_what_cannot_be_right_is_refused(
    model: str, tokens: list[str], more: dict[str, Any], why: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "m.gguf", model, tokens, [NORMAL] * len(tokens), more)
    with pytest.raises(ConfigError, match=why):
        Tokenizer.from_folder(path)


def test_a_file_without_a_vocabulary_has_no_tokenizer(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert Tokenizer.from_folder(tmp_path / "m.gguf") is None
