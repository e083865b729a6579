"""The digest by which two machines know that they run the same program."""

from __future__ import annotations

import shutil
from pathlib import Path

from tllm.core.program import ROOT, source_digest


def test_the_digest_is_of_every_source_file_and_nothing_else(tmp_path: Path) -> None:
    """A file that is changed, added or renamed is another program; where it lies, or a compiled one, is not."""

    def digest(place: str = "here") -> str:
        return source_digest.__wrapped__(tmp_path / place)

    sources = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "core", tmp_path / "here" / "core", ignore=sources)
    before = digest()
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    (tmp_path / "there" / "x.pyc").write_bytes(b"compiled")
    assert digest("there") == before
    path = tmp_path / "here" / "core" / "timing.py"
    text = path.read_text()
    path.write_text(text + "\n")
    assert digest() != before
    path.write_text(text)
    assert digest() == before
    path.rename(path.with_name("timings.py"))
    assert digest() != before
    path.with_name("timings.py").rename(path)
    path.with_name("more.py").write_text("")
    assert digest() != before


def test_it_is_that_of_the_package() -> None:
    assert (ROOT / "cli" / "main.py").is_file()
    assert len(source_digest()) == 64
