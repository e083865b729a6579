"""A path that is mistyped is taken for a name on the hub: what is said then."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import httpx2
import pytest
from huggingface_hub.errors import RepositoryNotFoundError

from tllm.core.errors import TllmError
from tllm.hub.hub_errors import hub_errors

NOT_FOUND = SimpleNamespace(status_code=404, headers={}, request=None)


@pytest.mark.parametrize(
    "error",
    [httpx2.ConnectError("Name or service not known"), RepositoryNotFoundError("404", response=NOT_FOUND)],  # type: ignore[arg-type]
    ids=["unreachable", "not there"],
)
def test_the_path_that_was_meant_is_named(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models/tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for name, is_near in (("models/tinny", True), ("models/qwen", False), ("nobody/tiny", False)):
        with pytest.raises(TllmError) as caught, hub_errors(name, "main"):
            raise error
        assert ("did you mean 'tiny'?" in caught.value.hint) is is_near, caught.value.hint
