"""Models of ollama and LM Studio, and the list of all that are on a machine."""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.house.tree import ROOT
from tests.support.models.gguf_models import SavedModel, with_tokenizer, write_gguf
from tllm.cli.main import main
from tllm.core.errors import ConfigError, TllmError
from tllm.core.gguf_files import open_gguf
from tllm.hub.locate import locate
from tllm.hub.ollama_store import MODEL

pytestmark = pytest.mark.usefixtures("own_process")

TINY = ROOT / "models" / "tiny"


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny-Q8_0.gguf"
    return write_gguf(SavedModel(TINY), path, lambda name: "Q8_0", with_tokenizer(TINY))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from huggingface_hub import constants

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ".cache"))
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    return tmp_path


def in_ollama(home: Path, gguf: Path, name: str = "library/tiny/latest", **layer: object) -> Path:
    """What `ollama pull` leaves."""
    models, content = home / ".ollama" / "models", gguf.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    (models / "blobs").mkdir(parents=True, exist_ok=True)
    (models / "blobs" / f"sha256-{digest}").write_bytes(content)
    manifest = models / "manifests" / "registry.ollama.ai" / name
    manifest.parent.mkdir(parents=True, exist_ok=True)
    weights = {"mediaType": MODEL, "digest": f"sha256:{digest}", "size": len(content), **layer}
    license = {"mediaType": "application/vnd.ollama.image.license", "digest": "sha256:" + "0" * 64, "size": 3}
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": [weights, license]}))
    return manifest


def test_a_model_of_ollama(home: Path, gguf: Path) -> None:
    in_ollama(home, gguf)
    in_ollama(home, gguf, "me/mine/v2")
    for text in ("ollama:tiny", "ollama:tiny:latest", "ollama:library/tiny"):
        found = locate(text, "whole")
        assert found.path.suffix == ".gguf" and open_gguf(found.path) is not None
        assert "blobs/sha256-" in found.said
    assert locate("ollama:me/mine:v2", "whole").path.stem == "me-mine-v2"
    with pytest.raises(ConfigError, match="ollama has no other:latest") as wrong:
        locate("ollama:other", "whole")
    assert "ollama:me/mine:v2, ollama:tiny:latest" in wrong.value.hint or "ollama:tiny:latest" in wrong.value.hint


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ({"digest": "sha256:../../x"}, "names a blob"),
        ({"size": 7}, "ollama's manifest says 7"),
        ({"mediaType": "application/vnd.ollama.image.adapter"}, "adds an adapter"),
        ({"mediaType": "application/vnd.ollama.image.tensor"}, "has 0 files of weights"),
        ({"size": "many"}, "is not a manifest of ollama"),
    ],
)
def test_a_manifest_that_is_not_followed(home: Path, gguf: Path, layer: dict[str, object], message: str) -> None:
    in_ollama(home, gguf, **layer)
    with pytest.raises(ConfigError, match=message):
        locate("ollama:tiny", "whole")


def test_programs_that_ask_for_a_model_of_ollama_at_once_all_have_it(home: Path, gguf: Path) -> None:
    in_ollama(home, gguf)
    with ThreadPoolExecutor(8) as pool:
        for _ in range(20):
            for found in pool.map(lambda _: locate("ollama:tiny", "whole").path, range(8)):
                assert found.is_file()
            found.unlink()
            assert not list(found.parent.iterdir())


@pytest.mark.parametrize("folder", [".lmstudio/models", ".cache/lm-studio/models"])
def test_a_model_of_lm_studio(home: Path, gguf: Path, folder: str) -> None:
    place = home / folder / "org" / "tiny-gguf"
    place.mkdir(parents=True)
    (place / gguf.name).symlink_to(gguf)
    assert locate("lmstudio:org/tiny-gguf", "whole").path == place / gguf.name
    # By the hub's name too, before the hub is asked.
    found = locate("org/tiny-gguf:q8_0", "whole")
    assert found.path == place / gguf.name and "LM Studio" in found.said
    with pytest.raises(ConfigError, match="LM Studio has no GGUF file of Q4_0") as wrong:
        locate("lmstudio:org/tiny-gguf:Q4_0", "whole")
    assert "there are: Q8_0" in wrong.value.hint
    with pytest.raises(ConfigError, match="LM Studio has no org/tiny") as wrong:
        locate("lmstudio:org/tiny", "whole")
    assert wrong.value.hint == "there are: lmstudio:org/tiny-gguf:Q8_0"


def test_which_commit_a_name_stands_for_is_looked_up_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what is said of LM Studio and of the hub is said of one commit, though another program fetches."""
    looked_up = list[str]()

    def commit_of(repo: str, revision: str) -> str:
        looked_up.append(repo)
        return ""

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("tllm.hub.locate.commit_of", commit_of)
    with pytest.raises(TllmError):
        locate("org/elsewhere", "whole")
    assert looked_up == ["org/elsewhere"]


def test_a_path_wins_over_a_name(home: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    (home / "org").mkdir()
    (home / "org" / "name").symlink_to(TINY)
    assert locate("org/name", "whole").said == ""
    with pytest.raises(ConfigError, match="is a path here and has no revision"):
        locate("org/name", "whole", "main")
    for text in ("x" * 300, "~nobody-of-this-name/model"):
        with pytest.raises(ConfigError, match="cannot be looked for"):
            locate(text, "whole")


def test_all_models_of_a_machine_are_listed(home: Path, gguf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    in_ollama(home, gguf)
    in_ollama(home, gguf, "library/torn/latest", size=7)
    place = home / ".lmstudio" / "models" / "org" / "tiny-gguf"
    place.mkdir(parents=True)
    (place / gguf.name).symlink_to(gguf)
    snapshot = home / "hf" / "models--org--part" / "snapshots" / ("c" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_bytes((TINY / "config.json").read_bytes())
    given = home / "given" / "mine"
    given.mkdir(parents=True)
    for path in TINY.iterdir():
        (given / path.name).symlink_to(path.resolve())
    assert main(["models", str(home / "given"), "--json"]) == 0
    listed = {one["model"]: one for one in json.loads(capsys.readouterr().out)}
    assert {name: (one["place"], one["family"], one["format"]) for name, one in listed.items()} == {
        f"org/part@{'c' * 40}": ("hub", "llama", "safetensors"),
        "ollama:tiny:latest": ("ollama", "llama", "gguf"),
        "ollama:torn:latest": ("ollama", "", "gguf"),
        "lmstudio:org/tiny-gguf:Q8_0": ("LM Studio", "llama", "gguf"),
        str(given): ("folder", "llama", "safetensors"),
    }
    assert listed["ollama:tiny:latest"]["bytes"] == gguf.stat().st_size
    assert {name: bool(one["reason"]) for name, one in listed.items() if one["reason"]}.keys() == {
        f"org/part@{'c' * 40}",
        "ollama:torn:latest",
    }
    assert main(["models", str(home / "given")]) == 0
    text = capsys.readouterr().out
    assert "yes" in text and "no: no weights are whole on this disk" in text
