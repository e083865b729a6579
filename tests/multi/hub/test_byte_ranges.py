"""Ranges of files from a hub that breaks off, changes its mind, or answers what was not asked."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from huggingface_hub import constants
from huggingface_hub.file_download import HfFileMetadata

from tests.support.hub.fake_hub import FakeHub
from tllm.core.errors import AuthError, WeightsError
from tllm.hub.byte_ranges import ATTEMPTS, FIRST_ATTEMPTS, HubRanges
from tllm.hub.hub_client import list_repository
from tllm.hub.hub_errors import HubUnreachable
from tllm.hub.repository import HubFile

SIZE = 400_000


@pytest.fixture
def content(tmp_path: Path) -> bytes:
    data = os.urandom(SIZE)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(data)
    (tmp_path / "model" / "config.json").write_text('{"a": 1}')
    return data


def opened(pause: float = 0.0) -> tuple[HubRanges, HubFile]:
    listed = list_repository("org/name", "main")
    file = listed.file("model.safetensors")
    assert file is not None
    return HubRanges(listed, pause), file


def test_ranges_are_those_of_the_file(hub: FakeHub, content: bytes) -> None:
    ranges, file = opened()
    for start, stop in ((0, 1), (0, SIZE), (SIZE - 7, SIZE), (12_345, 300_001)):
        assert ranges.read(file, start, stop) == content[start:stop]
    assert hub.weights_sent() == ranges.fetched == 1 + SIZE + 7 + 287_656
    small = list_repository("org/name", "main").file("config.json")
    assert small is not None
    assert ranges.read(small, 2, 5) == b'a":'


def test_a_transfer_that_breaks_is_gone_on_with(hub: FakeHub, content: bytes) -> None:
    ranges, file = opened()
    hub.breaks = [100_000, 1, 250_000]
    assert ranges.read(file, 10, SIZE) == content[10:]
    assert hub.weights_sent() == SIZE - 10, "no byte twice"


def test_one_that_breaks_every_time_says_how_far_it_came(hub: FakeHub) -> None:
    ranges, file = opened()
    hub.breaks = [1000] * ATTEMPTS
    with pytest.raises(HubUnreachable, match=rf"broke off {ATTEMPTS} times, the last at byte {5 + ATTEMPTS * 1000}"):
        ranges.read(file, 5, SIZE)
    hub.breaks = []
    hub.status = 503
    with pytest.raises(HubUnreachable, match="answers HTTP 503"):
        ranges.read(file, 0, SIZE)


def test_a_hub_that_never_gave_anything_is_given_up_soon(hub: FakeHub) -> None:
    ranges, file = opened()
    hub.status = 500
    before = len(hub.requests)
    with pytest.raises(HubUnreachable, match=f"broke off {FIRST_ATTEMPTS} times"):
        ranges.read(file, 0, SIZE)
    assert len(hub.requests) - before == 1 + FIRST_ATTEMPTS  # where the file is, and the attempts


def test_an_address_that_has_expired_is_asked_for_anew(hub: FakeHub, content: bytes) -> None:
    ranges, file = opened()
    ranges.read(file, 0, 10)
    hub.storage_expired = True
    assert ranges.read(file, 10, 20) == content[10:20]


def test_a_file_that_changes_in_midway_is_refused(hub: FakeHub) -> None:
    ranges, file = opened()
    ranges.read(file, 0, 1000)
    hub.storage_etag = '"storage-2"'
    with pytest.raises(WeightsError, match=r"changed while it was fetched: its etag was"):
        ranges.read(file, 1000, 2000)


def test_a_file_that_is_not_the_one_that_was_listed_is_refused(hub: FakeHub) -> None:
    ranges, file = opened()
    hub.linked_etag = "0" * 64
    with pytest.raises(WeightsError, match=rf"the etag {file.etag} was listed, and {'0' * 64} is given"):
        ranges.read(file, 0, 1000)
    assert hub.weights_sent() == 0


def test_answers_that_are_not_the_range_are_refused(hub: FakeHub, content: bytes) -> None:
    ranges, file = opened()
    hub.ignores_ranges = True
    with pytest.raises(WeightsError, match="a range was asked for, and the answer is HTTP 200"):
        ranges.read(file, 5, 10)
    assert ranges.read(file, 0, SIZE) == content, "all of it was asked for"
    hub.ignores_ranges = False
    hub.extra = 3
    with pytest.raises(WeightsError, match="more bytes came than were asked for"):
        ranges.read(file, 5, 10)
    hub.extra = 0
    hub.shifted = 1
    with pytest.raises(WeightsError, match=r"bytes 5-9/400000 were asked for, and the answer is bytes 6-10/400000"):
        ranges.read(file, 5, 10)


def test_a_gated_file_needs_a_token_that_may(hub: FakeHub, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repositories["org/name"].readers = {"friend"}
    for token, message in (("", "there is no Hugging Face token here"), ("other", "this token has no access")):
        monkeypatch.setenv("HF_TOKEN", token)
        ranges, file = opened()
        with pytest.raises(AuthError, match=message):
            ranges.read(file, 0, 10)
    monkeypatch.setenv("HF_TOKEN", "friend")
    ranges, file = opened()
    assert ranges.read(file, 0, 10) == content[:10]


def test_nothing_is_fetched_in_clear_where_the_hub_is_encrypted(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    ranges, file = opened()
    found = HfFileMetadata(ranges._repository.commit, file.etag, "http://elsewhere/x", file.size, None)
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", lambda *args, **more: found)
    monkeypatch.setattr(constants, "ENDPOINT", "https://hub")
    with pytest.raises(WeightsError, match="which is not encrypted"):
        ranges.read(file, 0, 10)


def test_what_is_wanted_no_more_ends(hub: FakeHub) -> None:
    ranges, file = opened()
    ranges.is_stopped = True
    with pytest.raises(WeightsError, match="wanted no more"):
        ranges.read(file, 0, SIZE)
    assert hub.weights_sent() == 0
