"""How long a test may take that starts processes, where it does not say so itself."""

from __future__ import annotations

from pathlib import Path

import pytest

SECONDS = 300
"""The first of them imports torch in the server that forks the others, on a machine that may be busy."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SECONDS))
