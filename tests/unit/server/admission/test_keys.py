"""Files of keys: what may stand in them, and what becomes of a server's keys when they change."""

from __future__ import annotations

import hmac
import json
import logging
import os
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from tllm.core.errors import ConfigError
from tllm.server.admission import key_ring
from tllm.server.admission.key_file import MAX_BYTES, MAX_KEYS, read_keys
from tllm.server.admission.key_ring import KeyRing
from tllm.server.admission.token_bucket import UNLIMITED, RateLimits

ALICE, BOB = "alice-key-1", "bob-key-22"
TOML = f"""
[[keys]]
name = "alice"
key = "{ALICE}"
requests_per_minute = 60
weight = 2.5

[[keys]]
name = "bob@example.org"
key_sha256 = "{sha256(BOB.encode()).hexdigest()}"
max_concurrent = 3
"""


def write(path: Path, text: str) -> Path:
    """In another file at first, as is right: nobody sees half of it."""
    new = path.with_name("new")
    new.write_text(text)
    new.replace(path)
    return path


def look(ring: KeyRing) -> None:
    """Twice: a file is read once it is the same in two looks."""
    ring.look()
    ring.look()


def test_toml_and_json_say_the_same(tmp_path: Path) -> None:
    defaults = RateLimits(tokens_per_minute=1000, max_concurrent=9)
    as_toml = read_keys(write(tmp_path / "keys.toml", "\ufeff" + TOML.replace("\n", "\r\n")), defaults, False)
    values = {
        "keys": [
            {"name": "alice", "key": ALICE, "requests_per_minute": 60, "weight": 2.5},
            {"name": "bob@example.org", "key_sha256": sha256(BOB.encode()).hexdigest().upper(), "max_concurrent": 3},
        ]
    }
    as_json = read_keys(write(tmp_path / "keys.json", json.dumps(values)), defaults, False)
    assert as_toml == as_json
    alice, bob = as_toml
    assert alice.limits == RateLimits(requests_per_minute=60, tokens_per_minute=1000, max_concurrent=9)
    assert bob.limits == RateLimits(tokens_per_minute=1000, max_concurrent=3)
    assert (alice.weight, bob.weight, alice.priority) == (2.5, 1.0, None)
    assert ALICE not in repr(alice) and alice.digest.hex() not in repr(alice)


def entry(**values: Any) -> str:
    return json.dumps({"keys": [{"name": "a", "key": "a-long-key", **values}]})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"keys": []}',
        "[" * 100_000,
        entry(name=""),
        entry(name="two words"),
        entry(name="x" * 65),
        entry(key=None),
        entry(key="short"),
        entry(key="with a space"),
        entry(key="schlüssel-lang"),
        entry(key_sha256="0" * 64),
        entry(key=None, key_sha256="0" * 63),
        entry(requests_per_minute=0),
        entry(tokens_per_minute=-1),
        entry(tokens_per_minute=1.5),
        entry(max_concurrent="4"),
        entry(weight=0),
        entry(weight=1e9),
        entry(priority=1 << 31),
        entry(priority=1),
        entry(limit=3),
        json.dumps({"keys": [{"name": "a", "key": "a-long-key"}] * 2}),
        json.dumps({"keys": [{"name": "a", "key": "a-long-key"}, {"name": "b", "key": "a-long-key"}]}),
        json.dumps({"keys": [{"name": "a", "key": "a-long-key"}, {"name": "a", "key": "another-key"}]}),
        json.dumps({"keys": [{"name": f"n{i}", "key": f"long-key-{i}"} for i in range(MAX_KEYS + 1)]}),
        entry() + " " * MAX_BYTES,
    ],
)
def test_what_is_wrong_is_said_with_a_hint_and_without_the_key(text: str, tmp_path: Path) -> None:
    path = write(tmp_path / "keys.json", text)
    with pytest.raises(ConfigError) as caught:
        read_keys(path, UNLIMITED, False)
    assert caught.value.hint and str(path) in caught.value.message
    assert "a-long-key" not in str(caught.value)


def test_of_many_keys_the_one_that_is_too_short_is_named(tmp_path: Path) -> None:
    text = json.dumps({"keys": [{"name": "a", "key": "a-long-key"}, {"name": "b", "key": "short"}]})
    with pytest.raises(ConfigError, match="the key of b needs at least 8"):
        read_keys(write(tmp_path / "keys.json", text), UNLIMITED, False)


@pytest.mark.parametrize("text", ["weight = " + "9" * 5000, "a = " + "[" * 5000])
def test_a_text_that_is_no_toml_is_said_to_be_none(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"keys\.toml is not TOML"):
        read_keys(write(tmp_path / "keys.toml", text), UNLIMITED, False)


def test_the_most_keys_are_taken_and_priorities_where_they_are_heard(tmp_path: Path) -> None:
    many = {"keys": [{"name": f"n{i}", "key": f"long-key-{i}"} for i in range(MAX_KEYS)]}
    assert len(read_keys(write(tmp_path / "keys.json", json.dumps(many)), UNLIMITED, False)) == MAX_KEYS
    assert read_keys(write(tmp_path / "keys.json", entry(priority=-3)), UNLIMITED, True)[0].priority == -3


def test_a_missing_file_is_an_error_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        KeyRing((), str(tmp_path / "none.toml"))


def test_each_key_finds_its_account_and_every_one_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ring = KeyRing(("the-option-1", "the-option-2"), str(write(tmp_path / "keys.toml", TOML)))
    names = {"the-option-1": "default", "the-option-2": "default-2", ALICE: "alice", BOB: "bob@example.org"}
    compared, compare = [], hmac.compare_digest

    def count(one: bytes, other: bytes) -> bool:
        compared.append(other)
        return compare(one, other)

    monkeypatch.setattr(key_ring.hmac, "compare_digest", count)  # type: ignore[attr-defined]
    for key, name in names.items():
        found = ring.find(key)
        assert found is not None and found.key.name == name
    for wrong in ("", "the-option-", "ALICE-KEY-1", ALICE + " ", sha256(BOB.encode()).hexdigest()):
        assert ring.find(wrong) is None
    assert len(compared) == 9 * 4, "whichever is right, as often"
    assert not ring.is_open


def test_names_of_options_and_of_the_file_may_not_be_the_same(tmp_path: Path) -> None:
    text = json.dumps({"keys": [{"name": "default", "key": "a-long-key"}]})
    with pytest.raises(ConfigError, match="same name"):
        KeyRing(("the-option-1",), str(write(tmp_path / "keys.json", text)))


def test_a_changed_file_is_taken_and_use_is_kept(tmp_path: Path) -> None:
    path = write(tmp_path / "keys.toml", TOML)
    ring = KeyRing((), str(path), clock=lambda: 0.0)
    alice = ring.find(ALICE)
    assert alice is not None
    with alice.charged(1, 5, 5):
        look(ring)
        assert ring.find(ALICE) is alice, "nothing has changed"
        write(
            path, TOML.replace("= 60", "= 30").replace("bob@example.org", "carol").replace("alice-key-1", "alice-key-9")
        )
        look(ring)
    assert ring.find(ALICE) is None, "the old text of the key is gone"
    assert ring.find("alice-key-9") is alice
    assert alice.headers()["x-ratelimit-limit-requests"] == "30"
    assert alice.headers()["x-ratelimit-remaining-requests"] == "29", "what was used stays used"
    carol = ring.find(BOB)
    assert carol is not None and carol.key.name == "carol" and "bob@example.org" not in ring.accounts


@pytest.mark.parametrize("wrong", ["", "[[keys", "[[keys]]\nname = 3\n", None])
def test_a_wrong_file_changes_nothing_and_says_so_until_it_is_right(
    wrong: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "keys.toml", TOML)
    ring = KeyRing((), str(path))
    before = dict(ring.accounts)
    if wrong is None:
        path.unlink()
    else:
        write(path, wrong)
    with caplog.at_level(logging.ERROR):
        for _ in range(5):
            ring.look()
    assert ring.accounts == before and ring.find(ALICE) is not None and not ring.is_open
    assert ring.faults == 1 and ring.fault
    assert [record.levelname for record in caplog.records] == ["ERROR"], "once for each wrong file"
    assert "2 keys from before stay" in caplog.text and ALICE not in caplog.text
    write(path, TOML)
    look(ring)
    assert ring.fault == "" and ring.faults == 1


def test_a_file_that_is_being_written_is_not_read(tmp_path: Path) -> None:
    path = write(tmp_path / "keys.toml", TOML)
    ring = KeyRing((), str(path))
    half = TOML[: TOML.index('[[keys]]\nname = "bob')]
    path.write_text(half)  # whole entries, but not all of them
    os.utime(path, ns=(1, 1))
    ring.look()
    assert len(ring.accounts) == 2, "it is not known yet whether more comes"
    path.write_text(TOML)
    os.utime(path, ns=(2, 2))
    look(ring)
    assert len(ring.accounts) == 2 and ring.faults == 0
