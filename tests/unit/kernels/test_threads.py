"""How the kernels share work among threads."""

from __future__ import annotations

import shutil
from ctypes import CDLL, CFUNCTYPE, c_int, c_uint, c_void_p, cast
from pathlib import Path

import pytest
import torch

from tests.support.models.few_bits import libraries
from tllm.kernels import float_product
from tllm.kernels.library import Library, path_of

BODY = CFUNCTYPE(None, c_void_p)
FORK = CFUNCTYPE(None, c_void_p, c_void_p, c_uint, c_uint)
NUMBER = CFUNCTYPE(c_int)


@pytest.mark.parametrize("library", libraries(), ids=lambda library: library.instruction_set.name)
@pytest.mark.parametrize("outputs", [17, 64, 5000])
def test_what_one_thread_does_not_come_to_the_others_do(
    library: Library, outputs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three threads only the last one ever comes here, as on a machine whose other cores do something else."""
    path = shutil.copy(path_of(library.instruction_set), tmp_path)  # loaded anew, so that it has threads of its own
    kernels, forks = Library(library.instruction_set, Path(path)), list[int]()

    def fork(body: int, data: int, threads: int, flags: int) -> None:
        forks.append(threads)
        BODY(body)(data)

    callbacks = FORK(fork), NUMBER(lambda: 2), NUMBER(lambda: 3)
    CDLL(path).tllm_set_threads(*(cast(one, c_void_p) for one in callbacks))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(float_product, "library", lambda: kernels)
    torch.manual_seed(0)
    x, weight = torch.randn(2, 64), torch.randn(outputs, 64)
    found = float_product.CANDIDATES["kernel"](x, weight)
    monkeypatch.setattr(float_product, "library", lambda: library)
    assert torch.equal(found, float_product.CANDIDATES["kernel"](x, weight))
    assert forks == [3]
