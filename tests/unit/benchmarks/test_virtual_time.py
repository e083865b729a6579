"""The emulated processor replaces functions of `tllm` by name: each must be there, or a machine would not be slowed."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

import pytest

from benchmarks.emulation.emulated_machines import VIRTUAL_TIME


@pytest.fixture
def virtual_time(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module as it is without a speed: it replaces nothing."""
    monkeypatch.delenv("TLLM_EMULATED_SPEED", raising=False)
    spec = importlib.util.spec_from_file_location("virtual_time", VIRTUAL_TIME / "sitecustomize.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_function_that_is_replaced_is_there(virtual_time: ModuleType) -> None:
    assert virtual_time.REPLACED
    for module, owner, _, names in virtual_time.REPLACED:
        holder = importlib.import_module(module)
        assert virtual_time.is_imported(module)
        for name in names:
            assert callable(getattr(getattr(holder, owner) if owner else holder, name)), f"{module}.{owner}.{name}"


def test_replaced_functions_are_called_through(virtual_time: ModuleType) -> None:
    class Owner:
        def send(self, number: int) -> int:
            return number + 1

    class Thread:
        waits, paid = False, 0

        def pay(self) -> None:
            self.paid += 1

        def mark(self) -> None:
            pass

    virtual_time.thread = Thread()
    virtual_time.replace(Owner, virtual_time.after_paying, "send")
    virtual_time.replace(Owner, virtual_time.waiting, "send")
    assert Owner().send(1) == 2
    assert virtual_time.thread.paid == 2 and not virtual_time.thread.waits
