"""`--device`: what each text stands for on machines with and without devices, or one clear line of why not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tllm.core.errors import ConfigError
from tllm.devices.choose import CPU, check_float64, choose_device


def has(monkeypatch: pytest.MonkeyPatch, built: str = "13.0", **counts: int) -> None:
    """A machine with so many devices of each kind, and a torch that is built for CUDA unless `built` is ""."""
    for kind in ("cuda", "xpu"):
        module, count = getattr(torch, kind), counts.get(kind, 0)
        monkeypatch.setattr(module, "is_available", lambda count=count: count > 0)
        monkeypatch.setattr(module, "device_count", lambda count=count: count)
    monkeypatch.setattr(torch.version, "cuda", built or None)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: bool(counts.get("mps")))


def test_auto_is_the_first_that_has_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    has_fp64 = True
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device: SimpleNamespace(has_fp64=has_fp64))
    has(monkeypatch, cuda=1, xpu=1, mps=1)
    assert choose_device("auto") == torch.device("cuda", 0)
    has(monkeypatch, xpu=1, mps=1)
    assert choose_device("auto") == torch.device("xpu", 0)
    has_fp64 = False
    assert choose_device("auto") == choose_device("cpu", 7) == CPU
    has(monkeypatch, mps=1)
    assert choose_device("auto") == CPU
    assert choose_device("mps") == torch.device("mps", 0), "what cannot be done on one is said later"


def test_each_process_of_a_machine_has_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, cuda=2)
    assert [choose_device("cuda", place).index for place in (0, 1)] == [0, 1]
    assert choose_device("auto", 1) == torch.device("cuda", 1)
    assert choose_device("cuda:0", 5) == torch.device("cuda", 0), "one that is named is shared"
    with pytest.raises(ConfigError, match=r"process 3 .* it has 2 CUDA devices \(cuda:0 to cuda:1\)"):
        choose_device("cuda", 2)


def test_an_index_beyond_the_last_one_is_told_with_the_count(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, cuda=1)
    with pytest.raises(ConfigError, match=r"^--device cuda:4 and this machine has 1 CUDA device \(cuda:0\)"):
        choose_device("cuda:4")


def test_a_torch_of_the_processor_alone_is_told_from_a_driver_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, built="")
    with pytest.raises(ConfigError, match="is built without cuda") as without:
        choose_device("cuda")
    assert "install torch's build with cuda" in without.value.hint
    has(monkeypatch)
    with pytest.raises(ConfigError, match=r"built with cuda.* finds no CUDA device here") as missing:
        choose_device("cuda:0")
    assert "nvidia-smi" in missing.value.hint
    assert all(len(error.value.message.splitlines()) == 1 for error in (without, missing))


@pytest.mark.parametrize("text", ["gpu", "cuda:", "cuda:-1", "cpu:1", "auto:0", "mps:1", "CUDA", "cuda:0 ", ""])
def test_what_is_no_device_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is no device"):
        choose_device(text)


def test_metal_and_some_intel_gpus_have_no_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = [torch.device(kind, 0) for kind in ("mps", "xpu")]
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device: SimpleNamespace(has_fp64=False))
    for device in devices:
        with pytest.raises(ConfigError, match=f"{device} has no float64, in which tokens are drawn"):
            check_float64(device)
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device: SimpleNamespace(has_fp64=True))
    check_float64(devices[1])
    check_float64(CPU)
