"""The tests' second device does what a GPU would: or a tensor of the wrong device would pass unseen."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tests.support.device.separate_device import SEPARATE

HERE, THERE = SEPARATE[:2]


def test_tensors_of_two_devices_do_not_meet() -> None:
    x, y = torch.ones(3, device=HERE), torch.ones(3)
    for other in (y, torch.ones(3, device=THERE)):
        with pytest.raises(RuntimeError, match=r"on the same device|at least two devices"):
            x + other
        with pytest.raises(RuntimeError, match=r"on the same device|at least two devices"):
            torch.cat([x, other])
    with pytest.raises(RuntimeError, match="on the same device"):
        x[torch.tensor([0, 2])]
    assert torch.equal((x + torch.tensor(2.0)).cpu(), torch.full((3,), 3.0)), "a number alone may come from the host"


def test_its_memory_is_not_the_hosts() -> None:
    with pytest.raises(TypeError, match="can't convert"):
        torch.ones(3, device=HERE).numpy()
    program = (
        "import ctypes, torch\n"
        "from tests.support.device.separate_device import SEPARATE\n"
        "x = torch.ones(3, device=SEPARATE[0])\n"
        "ctypes.string_at(x.data_ptr(), 4)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert done.returncode < 0, "whoever reads its addresses is ended by the processor"


def test_its_numbers_are_the_processors_forward_and_backward() -> None:
    dice = torch.Generator().manual_seed(1)
    w, x = torch.randn(5, 7, generator=dice), torch.randn(4, 7, generator=dice)
    found = []
    for device in (torch.device("cpu"), HERE):
        weight = w.clone().to(device).requires_grad_()
        y = torch.nn.functional.silu(x.to(device) @ weight.T).softmax(-1)
        y.log().sum().backward()
        assert weight.grad is not None and weight.grad.device == device
        found.append((y.detach().cpu(), weight.grad.cpu()))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_views_share_its_memory() -> None:
    x = torch.zeros(3, 4, device=HERE)
    x[1].fill_(7)
    x.view(-1)[::4] += 1
    assert x.cpu().tolist() == [[1, 0, 0, 0], [8, 7, 7, 7], [1, 0, 0, 0]]
