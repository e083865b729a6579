"""What the repository says about itself is true: version, dependencies, locks, numbers, links."""

from __future__ import annotations

import itertools
import re
import sys
import tomllib
from pathlib import Path

import pytest

import tllm
from tests.house.tree import ROOT, imports, name_of, project_files, sources

IMPORT_NAMES = {"prometheus-client": "prometheus_client", "huggingface-hub": "huggingface_hub"}
EXTRAS = {
    "src/tllm/server/tracing/otlp.py": {"opentelemetry"},
    "src/tllm/training/harness/harness_model.py": {"lm_eval"},
} | {
    f"src/tllm/kernels/gpu/{name}.py": {"triton"}
    for name in (
        *("few_bits_rows", "few_bits_tiles", "few_bits_weight", "few_bits_words"),
        *("paged_attention", "products", "row_operations", "trained_loss", "trained_rows"),
    )
}
"""Modules that import what only an extra brings, or torch's build for GPUs: who imports them answers for it if it is
not there."""

NOT_IMPORTED = {"h11": "uvicorn's HTTP parser, asked for by name"}
NAMED_FILE = re.compile(r"(?<![\w/])(?:docs|benchmarks|tests)/[\w/-]+\.(?:md|py|toml)\b")
NUMBER_WITH_UNIT = re.compile(
    r"(?<![\w.])(\d+(?:[.,]\d+)*)\s?(ms|µs|us|s|min|tok/s|tokens/s|GB/s|MB/s|MiB|GiB|KiB|GB|MB|kB|KB|%|x|×|times)(?![\w])"
)


def project() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def names(requirements: object) -> set[str]:
    assert isinstance(requirements, list)
    return {re.split(r"[<>=!~ \[;]", line, maxsplit=1)[0].lower() for line in requirements}


def locked(file: str) -> dict[str, str]:
    lines = [line.split("#")[0].strip() for line in (ROOT / file).read_text().splitlines()]
    return dict(line.split("==") for line in lines if line)


def test_version_is_the_changelogs_top() -> None:
    top = re.search(r"^## (\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert top is not None
    assert top[1] == tllm.__version__


def test_dependencies_are_what_the_source_imports() -> None:
    declared = {IMPORT_NAMES.get(name, name) for name in names(project()["dependencies"])}
    used = {
        module
        for path in sources()
        for module in (one.module.split(".")[0] for one in imports(path))
        if module not in EXTRAS.get(name_of(path), ())
    } - {"tllm", "__future__"}
    used -= set(sys.stdlib_module_names)
    assert not used - declared, f"imported and not in pyproject.toml: {sorted(used - declared)}"
    unused = declared - used - set(NOT_IMPORTED)
    assert not unused, f"in pyproject.toml and imported nowhere: {sorted(unused)}"


def test_locks_hold_every_dependency_at_one_version() -> None:
    runtime, dev = locked("requirements.lock"), locked("requirements-dev.lock")
    assert next(iter(runtime)) == "torch", "torch stands first: it is installed first and on its own"
    extras = project()["optional-dependencies"]
    assert isinstance(extras, dict)
    assert names(project()["dependencies"]) <= set(runtime)
    assert names(extras["dev"]) <= set(dev) | set(runtime)
    assert not set(runtime) & set(dev), "a package stands in one lock only"


def test_every_dependency_is_justified() -> None:
    log = (ROOT / "docs" / "log" / "dependencies.md").read_text()
    missing = [name for name in names(project()["dependencies"]) if f"| {name} |" not in log]
    assert not missing, f"docs/log/dependencies.md does not say why we depend on {missing}"


def test_readme_numbers_are_measured() -> None:
    """Each number with a unit in a table of README stands in a page of results (benchmarks/*/results) too."""
    results = [p.read_text() for p in sorted((ROOT / "benchmarks").glob("*/results/*.md"))]
    assert results, "no page of results in benchmarks/*/results"
    held = {_plain(match[1]) for text in results for match in re.finditer(r"(?<![\w.])(\d+(?:[.,]\d+)*)", text)}
    readme = ROOT / "README.md"
    lines = readme.read_text().splitlines() if readme.exists() else []
    faults = [
        f"README.md:{number}: {match[0]}"
        for number, line in enumerate(lines, 1)
        if line.lstrip().startswith("|")
        for match in NUMBER_WITH_UNIT.finditer(line)
        if _plain(match[1]) not in held
    ]
    assert not faults, "not in benchmarks/*/results:\n" + "\n".join(faults)


@pytest.mark.parametrize("page", [p for p in project_files() if p.suffix == ".md"], ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    faults = []
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target and not (page.parent / target).exists():
            faults.append(target)
    assert not faults, f"{name_of(page)} links to {faults}, which do not exist"


@pytest.mark.parametrize("page", [p for p in project_files() if p.suffix == ".md"], ids=name_of)
def test_headings_skip_no_level(page: Path) -> None:
    """A reader's table of contents has no gap; the documentation site refuses a page that leaves a level out."""
    text = re.sub(r"^(```+|~~~+).*?^\1", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    levels = [len(marks) for marks in re.findall(r"^(#+) ", text, re.MULTILINE)]
    skipped = [(above, below) for above, below in itertools.pairwise(levels) if below > above + 1]
    assert not skipped, f"{name_of(page)} goes from a heading of one level to one two or more below: {skipped}"


def test_the_log_lists_each_of_its_entries() -> None:
    folder = ROOT / "docs" / "log"
    listed = set(re.findall(r"\]\(([\w-]+\.md#[\w-]+)\)", (folder / "index.md").read_text().partition("\n## [")[2]))
    missing = [
        f"{page.name}: {title}"
        for page in sorted(folder.glob("*.md"))
        for title in re.findall(r"^## (20\d\d-.*)$", page.read_text(), re.MULTILINE)
        if f"{page.name}#{re.sub(r'[^a-z0-9_ -]', '', title.lower()).replace(' ', '-')}" not in listed
    ]
    assert not missing, "docs/log/index.md has no line of these:\n" + "\n".join(missing)


def test_files_that_the_source_names_exist() -> None:
    """A docstring that sends its reader to a page, a benchmark or a test names one that is there."""
    faults = [
        f"{name_of(path)}:{number}: {named}"
        for path in sources()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for named in NAMED_FILE.findall(line)
        if not (ROOT / named).exists()
    ]
    assert not faults, "\n".join(faults)


def _plain(number: str) -> str:
    return number.replace(",", "")
