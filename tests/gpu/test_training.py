"""Training on CUDA: the losses and weights of the processor's float64, within what another order of sums changes.

And in bfloat16, by the kernels that GPUs have for it, its losses within what so few bits change.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.models.families import save_model
from tests.support.training.runs import final, job_for, records, train
from tllm.core.errors import ConfigError
from tllm.devices.choose import CPU
from tllm.model.attention import AttentionSpec
from tllm.parallel.cross_entropy import check_labels
from tllm.training.attention.packed_attention import TrainAttend
from tllm.training.attention.varlen_attention import VarlenAttend, has_varlen
from tllm.training.data.batch_tensors import Tokens
from tllm.training.gradients.gradient_clipping import of_norms

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device here")
CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma2"])
def test_a_run_on_cuda_is_the_run_on_the_processor(family: str, tmp_path: Path) -> None:
    save_model(family, tmp_path / "model")
    made = {}
    for name, device, dtype in (("cpu", CPU, "float64"), ("cuda", CUDA, "float64"), ("narrow", CUDA, "bfloat16")):
        (tmp_path / name).mkdir()
        job = job_for(tmp_path / "model", tmp_path / name / "run", dtype=dtype)
        told = records(train(job, "pp=1", devices=(device,)))
        made[name] = [one.loss for one in told], final(Path(job.output_dir))
    (losses, weights), (want, kept) = made["cuda"], made["cpu"]
    assert len(want) == 6 and max(abs(a - b) / b for a, b in zip(losses, want, strict=True)) < 1e-12
    assert max(float((weights[name] - x).abs().max()) for name, x in kept.items()) < 1e-10
    assert max(abs(a - b) / b for a, b in zip(made["narrow"][0], want, strict=True)) < 2e-2


@pytest.mark.parametrize("window", [None, 5, 300])
def test_documents_of_unlike_lengths_in_one_call(window: int | None) -> None:
    if not has_varlen(CUDA):
        pytest.skip("this GPU or this torch has no flash attention")
    lengths = [1, 40, 40, 200, 7]
    places = torch.arange(sum(lengths), device=CUDA)
    tokens = Tokens(places, places, places, lengths)
    specs = {0: AttentionSpec(scale=0.2, window=window)}
    torch.manual_seed(0)
    wide = [torch.randn(sum(lengths), heads, 32, device=CUDA) for heads in (4, 2, 2)]
    given = torch.randn(sum(lengths), 4, 32, device=CUDA)
    made = []
    for make, dtype in ((VarlenAttend, torch.bfloat16), (TrainAttend, torch.float32)):
        qkv = [x.bfloat16().to(dtype).requires_grad_() for x in wide]
        out = make(specs, tokens)(0, *qkv)
        made.append((out, *torch.autograd.grad(out, qkv, given.bfloat16().to(dtype))))
    for got, want in zip(*made, strict=True):
        torch.testing.assert_close(got.float(), want, rtol=3e-2, atol=3e-2)


def test_the_norm_of_many_gradients_and_labels_that_are_asked_at_the_host() -> None:
    runs = [torch.randn(size, device=CUDA) for size in (1, 1000, 3_000_000)]
    want = sum(run.double().square().sum() for run in runs)
    assert abs(of_norms(runs) / want - 1) < 1e-6
    check_labels(torch.tensor([-100, 0, 9]), 10)
    with pytest.raises(ConfigError, match="label 10 is outside"):
        check_labels(torch.tensor([3, 10]), 10)
