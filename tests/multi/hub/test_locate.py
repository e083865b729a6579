"""Models by name from a hub: what is fetched, where it lands, and what is said where it cannot be."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache

from tests.house.tree import ROOT
from tests.support.hub.fake_hub import FakeHub, FakeRepository, fake_hub
from tests.support.hub.this_machine import use_hub
from tests.support.models.gguf_models import SavedModel, with_tokenizer, write_gguf
from tllm.api.llm import LLM
from tllm.api.trainer import Trainer
from tllm.cli.main import main
from tllm.core.cache_folder import cache_folder
from tllm.core.errors import AuthError, CapacityError, ConfigError, WeightsError
from tllm.hub import hub_client, part_files
from tllm.hub.byte_ranges import ATTEMPTS
from tllm.hub.hub_errors import HubUnreachable
from tllm.hub.locate import locate
from tllm.node.weights.hub_chunks import HubChunks
from tllm.spec.request import SamplingParams
from tllm.weights.chunk_cache import ChunkCache

pytestmark = pytest.mark.usefixtures("own_process")

TINY = ROOT / "models" / "tiny"
NAME = "org/tiny"
WEIGHTS = "model.safetensors"
GREEDY = SamplingParams(max_tokens=8, temperature=0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The shipped model with what repositories have beside."""
    made = tmp_path / "repository"
    shutil.copytree(TINY, made)
    (made / "pytorch_model.bin").write_bytes(b"\x80\x04" + bytes(30_000))
    (made / "modeling_evil.py").write_text("raise SystemExit")
    (made / "consolidated.safetensors").write_bytes(bytes(30_000))
    (made / "README.md").write_text("# tiny")
    return made


@pytest.fixture
def hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setattr(hub_client, "RETRY_SECONDS", 0.0)
    with fake_hub() as running:
        running.add(NAME, folder)
        use_hub(monkeypatch, tmp_path, running)
        yield running


def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def test_the_whole_model_lands_where_other_programs_find_it(hub: FakeHub, folder: Path) -> None:
    found = locate(NAME, "whole")
    assert found.weights is None and NAME in found.said
    names = sorted(path.name for path in found.path.iterdir())
    kept = {WEIGHTS, "config.json", "tokenizer.json"}
    assert kept <= set(names)
    assert not [name for name in names if name.endswith((".bin", ".py", ".md")) or "consolidated" in name]
    for name in names:
        assert (found.path / name).read_bytes() == (folder / name).read_bytes()
        assert try_to_load_from_cache(NAME, name, cache_dir=constants.HF_HUB_CACHE) == str(found.path / name)
    before = hub.weights_sent()
    assert locate(NAME, "whole").path == found.path
    assert hub.weights_sent() == before == (folder / WEIGHTS).stat().st_size, "once"


def test_a_plan_fetches_no_weights(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", NAME, "--plan", "pp=2"]) == 0
    said = capsys.readouterr()
    assert "pp=2" in said.out and "of its weights nothing is needed" in said.err
    assert hub.weights_sent() == 0


def test_replies_are_those_of_the_local_folder(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--prompt-ids", "1,2,3", "--max-tokens", "8", "--json"]
    assert main(["generate", NAME, *words]) == 0
    named = json.loads(capsys.readouterr().out)
    assert main(["generate", str(TINY), *words]) == 0
    assert named["token_ids"] == json.loads(capsys.readouterr().out)["token_ids"]
    with LLM(NAME) as llm:
        assert list(llm.generate([[1, 2, 3]], GREEDY)[0].token_ids) == named["token_ids"]


def test_a_revision_is_another_model(hub: FakeHub, folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rope_theta": 1234.0}))
    commit = hub.add(NAME, other, "v2")
    for text, revision in ((f"{NAME}@v2", None), (NAME, "v2"), (f"{NAME}@{commit}", None)):
        found = locate(text, "config", revision)
        assert found.path.name == commit
        assert json.loads((found.path / "config.json").read_text())["rope_theta"] == 1234.0
    before = len(hub.requests)
    locate(f"{NAME}@{commit}", "config")
    assert len(hub.requests) == before, "a commit never changes"
    with pytest.raises(ConfigError, match="has no revision v3"):
        locate(NAME, "config", "v3")


def test_without_the_hub_the_cache_does(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    offline(monkeypatch)
    with pytest.raises(HubUnreachable, match="HF_HUB_OFFLINE forbids"):
        locate(NAME, "whole")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    first = locate(NAME, "config")
    offline(monkeypatch)
    found = locate(NAME, "config")
    assert found.path == first.path and "as it was last seen (HF_HUB_OFFLINE is set)" in found.said
    with pytest.raises(HubUnreachable, match="not whole on this disk, and HF_HUB_OFFLINE forbids"):
        locate(NAME, "whole")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    locate(NAME, "whole")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    found = locate(NAME, "whole")
    assert found.path == first.path and "as it was last seen (127.0.0.1:9 cannot be reached" in found.said


def test_what_another_program_fetched_is_found_without_the_hub(
    hub: FakeHub, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in folder.glob("*.json"):
        hf_hub_download(NAME, path.name, endpoint=hub.url, cache_dir=constants.HF_HUB_CACHE)
    offline(monkeypatch)
    with pytest.raises(HubUnreachable, match="HF_HUB_OFFLINE forbids"):
        locate(NAME, "whole")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hf_hub_download(NAME, WEIGHTS, endpoint=hub.url, cache_dir=constants.HF_HUB_CACHE)
    offline(monkeypatch)
    found = locate(NAME, "whole")
    assert (found.path / WEIGHTS).read_bytes() == (folder / WEIGHTS).read_bytes()
    assert not (tmp_path / ".cache" / "tllm").exists(), "nothing of ours was needed"


def test_who_may_not_read_is_told_so(
    hub: FakeHub, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"no model of that name at 127\.0\.0\.1"):
        locate("org/missing", "whole")
    (tmp_path / "org" / "missed").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for wrong in ("org/misssed", str(tmp_path / "org" / "misssed")):
        with pytest.raises(ConfigError) as error:
            locate(wrong, "whole")
        assert error.value.hint.startswith("did you mean ") and "org/missed? " in error.value.hint
    commit = hub.add("org/private", folder)
    hub.repositories["org/private"] = FakeRepository({"main": folder, commit: folder}, {"friend"}, private=True)
    with pytest.raises(ConfigError, match="org/private"):
        locate("org/private", "whole")
    hub.repositories[NAME].readers = {"friend"}
    with pytest.raises(AuthError, match="is gated, and there is no Hugging Face token here") as wrong:
        locate(NAME, "whole")
    assert f"{hub.url}/{NAME}" in wrong.value.hint and "HF_TOKEN" in wrong.value.hint
    monkeypatch.setenv("HF_TOKEN", "stranger")
    with pytest.raises(AuthError, match="this token has no access to it"):
        locate(NAME, "whole")
    monkeypatch.setenv("HF_TOKEN", "friend")
    assert locate(NAME, "whole").path.is_dir() and locate("org/private", "whole").path.is_dir()
    monkeypatch.setenv("HF_TOKEN", "stranger")
    found = locate("org/private", "whole")
    assert "as it was last seen (there is no path org/private" in found.said, "it is on this disk, whoever may fetch it"


def test_pickles_are_never_fetched(hub: FakeHub, folder: Path, tmp_path: Path) -> None:
    for path in folder.glob("*.safetensors"):
        path.unlink()
    hub.add("org/old", folder)
    with pytest.raises(ConfigError, match=r"only as pickle files \(pytorch_model\.bin\), which are never fetched"):
        locate("org/old", "whole")
    assert not [request for request in hub.requests if ".bin" in request]


def test_a_full_disk_is_told_before_anything_is_fetched(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(hub_client.shutil, "disk_usage", lambda path: usage._replace(free=200_000))
    with pytest.raises(
        CapacityError, match=r"takes 3.8 MiB more on the disk of .*, and 195.3 KiB are free, 3.6 MiB too"
    ):
        locate(NAME, "whole")
    assert hub.weights_sent() == 0


def test_a_transfer_that_breaks_is_gone_on_with(hub: FakeHub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = (folder / WEIGHTS).stat().st_size
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    locate(NAME, "config")
    hub.sent.clear()
    hub.status = 503
    with pytest.raises(WeightsError, match="HTTP 503"):
        locate(NAME, "whole")
    assert not list(Path(constants.HF_HUB_CACHE).rglob(f"snapshots/*/{WEIGHTS}")), "nothing half-written counts"
    hub.status = 0
    hub.breaks = [1_000_000, 500_000]
    found = locate(NAME, "whole")
    assert (found.path / WEIGHTS).read_bytes() == (folder / WEIGHTS).read_bytes()
    assert size <= hub.weights_sent() <= size + 2_000_000, "most of it once"


def break_off(hub: FakeHub) -> None:
    """Let a command end after the first million bytes of the weights."""
    locate(NAME, "config")
    hub.breaks = [1_000_000, *[0] * (ATTEMPTS - 1)]
    with pytest.raises(WeightsError, match=f"broke off {ATTEMPTS} times, the last at byte 1000000"):
        locate(NAME, "whole")
    hub.sent.clear()


def test_what_has_come_stays_for_the_next_command(hub: FakeHub, folder: Path) -> None:
    content = (folder / WEIGHTS).read_bytes()
    break_off(hub)
    found = locate(NAME, "whole")
    assert (found.path / WEIGHTS).read_bytes() == content
    assert hub.weights_sent() == len(content) - 1_000_000, "no byte twice"
    assert not list(Path(constants.HF_HUB_CACHE).rglob("*.part"))


def test_a_hub_without_ranges_gives_the_whole_file(
    hub: FakeHub, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    break_off(hub)
    hub.ignores_ranges = True
    found = locate(NAME, "whole")
    assert (found.path / WEIGHTS).read_bytes() == (folder / WEIGHTS).read_bytes()
    assert "a range was asked for, and the answer is HTTP 200" in caplog.text
    assert not list(Path(constants.HF_HUB_CACHE).rglob("*.part"))


def test_a_disk_without_locks_has_the_file_too(
    hub: FakeHub, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(file: object, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(part_files, "fcntl", SimpleNamespace(flock=refuse, LOCK_EX=2, LOCK_NB=4))
    found = locate(NAME, "whole")
    assert (found.path / WEIGHTS).read_bytes() == (folder / WEIGHTS).read_bytes()
    assert f"no part of {WEIGHTS} can be kept in" in caplog.text


def test_a_disk_without_links_has_the_file_too(
    hub: FakeHub, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What has come is copied to its place by the library."""

    def refuse(place: Path, target: str) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(Path, "symlink_to", refuse)
    monkeypatch.setattr("huggingface_hub.file_download.are_symlinks_supported", lambda cache_dir=None: False)
    found = locate(NAME, "whole")
    assert (found.path / WEIGHTS).read_bytes() == (folder / WEIGHTS).read_bytes()
    assert f"{WEIGHTS} cannot be a link to" in caplog.text
    assert hub.weights_sent() == (folder / WEIGHTS).stat().st_size, "once"


def test_a_file_that_was_cut_short_is_fetched_again(hub: FakeHub, folder: Path) -> None:
    """As by a machine that lost power, or a copy of the cache that broke off."""
    found = locate(NAME, "whole")
    for name in (WEIGHTS, "config.json"):
        blob = (found.path / name).resolve()
        blob.write_bytes(blob.read_bytes()[:-1])
    assert locate(NAME, "whole").path == found.path
    for name in (WEIGHTS, "config.json"):
        assert (found.path / name).read_bytes() == (folder / name).read_bytes()


def test_changed_bytes_are_thrown_away(hub: FakeHub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locate(NAME, "config")
    content = bytearray((folder / WEIGHTS).read_bytes())
    true = hashlib.sha256(content).hexdigest()
    content[1_000_000] ^= 1
    hub.altered = bytes(content)
    with pytest.raises(WeightsError, match="does not have the hash that the hub gives, and is thrown away"):
        locate(NAME, "whole")
    hub.altered = None
    found = locate(NAME, "whole")
    assert hashlib.sha256((found.path / WEIGHTS).read_bytes()).hexdigest() == true


def test_a_gguf_file_by_its_quantisation(hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = tmp_path / "ggufs"
    made.mkdir()
    for kind in ("Q8_0", "Q4_0"):
        write_gguf(SavedModel(TINY), made / f"tiny-{kind}.gguf", lambda name, kind=kind: kind, with_tokenizer(TINY))
    hub.add("org/tiny-GGUF", made)
    found = locate("org/tiny-GGUF:Q4_0", "whole")
    assert found.path.read_bytes() == (made / "tiny-Q4_0.gguf").read_bytes()
    assert {file for _, file in hub.sent} == {"tiny-Q4_0.gguf"}
    with pytest.raises(ConfigError, match="has no GGUF file of Q5_K_M") as wrong:
        locate("org/tiny-GGUF:Q5_K_M", "whole")
    assert "there are: Q4_0, Q8_0" in wrong.value.hint
    with pytest.raises(ConfigError, match="has no GGUF file of Q8_0") as wrong:
        locate(f"{NAME}:Q8_0", "whole")
    assert "there are: none" in wrong.value.hint
    with pytest.raises(ConfigError, match="has 2 GGUF models"):
        locate("org/tiny-GGUF", "whole")
    assert main(["models", "--json"]) == 0
    assert [one["model"] for one in json.loads(capsys.readouterr().out)] == ["org/tiny-GGUF:Q4_0"]


def test_an_error_is_one_line_and_a_hint(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["plan", "org/missing"], ["generate", "org/missing"], ["serve", "org/missing", "--port", "0"]):
        assert main(words) == 2
        said = capsys.readouterr().err
        assert said.startswith("error: there is no path org/missing") and said.count("\n") == 2


def test_a_name_trains_too(hub: FakeHub, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": "def main(): pass " * 9}) + "\n" for _ in range(8)))
    job = dict(model_name_or_path=NAME, output_dir=str(tmp_path / "run"), train_files=[str(rows)], seq_len=32)
    trainer = Trainer({**job, "max_steps": 1, "global_batch_size": 1})
    assert trainer.beginning.weights is not None and trainer.beginning.weights.parent.name == "snapshots"
    assert os.path.samefile(trainer.beginning.weights, locate(NAME, "whole").path)


def test_a_model_that_nodes_fetched_by_ranges_is_whole_for_the_next_command(
    hub: FakeHub, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = locate(NAME, "ranges").weights
    assert shared is not None
    chunks = HubChunks(shared, ChunkCache(cache_folder(), 1 << 30))
    content = (folder / WEIGHTS).read_bytes()
    assert chunks.read(WEIGHTS, 0, len(content)) == content
    offline(monkeypatch)
    words = ["generate", NAME, "--prompt", "Once", "--max-tokens", "4", "--temperature", "0"]
    assert main(words) == 0
    said = capsys.readouterr()
    assert "of weights are in the Hugging Face cache" in said.err and said.out
    assert hub.weights_sent() == len(content), "once"
