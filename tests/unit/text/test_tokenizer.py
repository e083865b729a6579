"""Tokenizer against `transformers` on the same folder, and the folders it cannot read."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
import tokenizers
import transformers

from tests.unit.text import kits
from tllm.core.errors import ConfigError, RequestError
from tllm.text.tokenizer import Tokenizer, stop_ids

_T = TypeVar("_T")
TEXTS = ["hello world", " Größe 🙂\n\n日本", "", "  two  spaces ", "<|user|>hello</s>", "crème\tbrûlée"]


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece_like"])
@pytest.mark.parametrize("add_bos", [None, True, False])
def test_ids_and_text_equal_those_of_transformers(kind: str, add_bos: bool | None, tmp_path: Path) -> None:
    config: dict[str, object] = {"bos_token": "<s>", "eos_token": "</s>"}
    if add_bos is not None:
        config["add_bos_token"] = add_bos
    kits.save(tmp_path, getattr(kits, kind)(), config)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = Tokenizer.from_folder(tmp_path)
    assert ours is not None
    for text in TEXTS:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special)
            for skip in (True, False):
                assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.bos_id == theirs.bos_token_id
    assert ours.eos_ids == (theirs.eos_token_id,)


def test_tokens_declared_only_in_the_config_are_added(tmp_path: Path) -> None:
    inner = kits.byte_level()
    size = inner.get_vocab_size()
    extra = {str(size): {"content": "<|tool|>", "special": True, "normalized": False}}
    kits.save(tmp_path, inner, {"added_tokens_decoder": extra})
    ours = Tokenizer.from_folder(tmp_path)
    assert ours is not None
    assert ours.encode("<|tool|>", add_special_tokens=False) == [size]
    assert ours.is_special(size)
    file = tmp_path / "tokenizer_config.json"
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())  # as an editor of Windows saves it
    assert Tokenizer.from_folder(tmp_path) is not None
    extra = {str(size + 7): {"content": "<|tool|>", "special": True}}
    kits.save(tmp_path, inner, {"added_tokens_decoder": extra})
    with pytest.raises(ConfigError, match=f"is id {size + 7}, tokenizer.json makes it {size}"):
        Tokenizer.from_folder(tmp_path)


def test_a_folder_without_a_tokenizer_gives_none(tmp_path: Path) -> None:
    assert Tokenizer.from_folder(tmp_path) is None


def test_a_sentencepiece_only_folder_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a\x00")
    with pytest.raises(ConfigError, match=r"tokenizer\.model but no tokenizer\.json") as caught:
        Tokenizer.from_folder(tmp_path)
    assert "save_pretrained" in caught.value.hint


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"model": {"type": "BPE"}}', "[" * 100_000])
def test_torn_files_are_config_errors(content: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    kits.save(tmp_path, kits.byte_level(), {})
    tables = ("[1]", '{"x": {}}', '{"1": {}}', '{"99999999999": {"content": "x"}}')
    for damage in ("[1]", *(f'{{"added_tokens_decoder": {one}}}' for one in tables)):
        (tmp_path / "tokenizer_config.json").write_text(damage)
        with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
            Tokenizer.from_folder(tmp_path)


def test_a_tokenizer_that_git_left_out_is_said_to_be_none(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\n")
    with pytest.raises(ConfigError, match=r"tokenizer\.json is a pointer of Git LFS"):
        Tokenizer.from_folder(tmp_path)


def test_stop_ids_prefer_the_generation_config(tmp_path: Path) -> None:
    assert stop_ids(tmp_path) == ()
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    assert stop_ids(tmp_path) == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert stop_ids(tmp_path) == (7, 9)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": "</s>"}))
    with pytest.raises(ConfigError, match="eos_token_id"):
        stop_ids(tmp_path)


def test_half_a_surrogate_pair_is_the_requests_fault() -> None:
    with pytest.raises(RequestError, match="surrogate"):
        kits.both()["byte-level"].encode("\ud800")


@pytest.mark.parametrize("name", ["byte-level", "sentencepiece-like"])
def test_token_bytes_join_to_the_text(name: str) -> None:
    tokenizer = kits.both()[name]
    text = "Größe 🙂 naïve 日本, the dog"
    data = b"".join(tokenizer.token_bytes(i) for i in tokenizer.encode(text, add_special_tokens=False))
    assert data.decode().removeprefix(" ") == text


def test_labels_tell_every_token_of_other_bytes_apart() -> None:
    for tokenizer in kits.both().values():
        by_label: dict[str, set[bytes]] = {}
        for token_id in range(tokenizer.size):
            by_label.setdefault(tokenizer.token_label(token_id), set()).add(tokenizer.token_bytes(token_id))
        assert all(len(datas) == 1 for datas in by_label.values())


def test_an_added_token_outside_the_byte_alphabet_stands_for_itself() -> None:
    tokenizer = kits.both()["byte-level"]
    [token_id] = tokenizer.encode("<｜assistant｜>", add_special_tokens=False)
    assert tokenizer.token_bytes(token_id).decode() == "<｜assistant｜>"
    assert tokenizer.token_bytes(10**6) == b""


def test_other_threads_run_while_a_long_text_is_encoded_and_decoded() -> None:
    """Else the server's event loop would stand still, and with it heartbeats of the cluster. The system may let another
    thread wait, too, so it is asked again; while the library keeps Python to itself, none ever runs."""
    tokenizer = Tokenizer.from_folder(Path("models/tiny"))
    assert tokenizer is not None
    text = "hello world " * 40_000
    ended, turns = threading.Event(), 0

    def take_turns() -> None:
        nonlocal turns
        while not ended.wait(0.002):
            turns += 1

    def others_run(work: Callable[[], _T]) -> _T:
        """What the work comes to, once another thread had more turns in it than at its two ends."""
        until = time.monotonic() + 30
        while True:
            before = turns
            found = work()
            if turns - before > 5:
                return found
            assert time.monotonic() < until, "no other thread runs"

    other = threading.Thread(target=take_turns)
    other.start()
    try:
        ids = others_run(lambda: tokenizer.encode(text))
        decoded = others_run(lambda: tokenizer.decode(ids * 8))
    finally:
        ended.set()
        other.join()
    assert (ids, decoded) == (tokenizer.inner.encode(text).ids, text * 8)


def test_long_pairs_and_halves_of_surrogates_are_as_short_ones() -> None:
    tokenizer = Tokenizer.from_folder(Path("models/tiny"))
    assert tokenizer is not None
    long = "one two " * 4000
    assert tokenizer.encode_pair(long, "three") == tokenizer.inner.encode(long, "three").ids
    for broken in ("\ud800", long + "\ud800"):
        with pytest.raises(RequestError, match="half of a surrogate pair"):
            tokenizer.encode(broken)
        with pytest.raises(RequestError, match="half of a surrogate pair"):
            tokenizer.encode_pair("a", broken)


def test_a_cut_text_keeps_all_that_fits_where_characters_are_no_tokens() -> None:
    words = {word: at for at, word in enumerate(("[UNK]", "[CLS]", "[SEP]", "hello", "world"))}
    inner = tokenizers.Tokenizer(tokenizers.models.WordPiece(words, unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    inner.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    tokenizer = Tokenizer(inner, {}, ())
    assert tokenizer.encode_cut("hello" + " " * 200 + "world", 8) == [1, 3, 4, 2]
    assert tokenizer.encode_cut("hello" + " " * 200 + "world " * 9, 8) == [1, 3, 4, 4, 4, 4, 4, 2]
    assert tokenizer.encode_cut("hello" + " " * 200, 8) == [1, 3, 2]
