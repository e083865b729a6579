"""Training on CUDA: the losses and weights of the processor's float64, within what another order of sums changes.

And in bfloat16, by the kernels that GPUs have for it, its losses within what so few bits change.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.models.families import save_model
from tests.support.training.runs import final, job_for, records, train
from tllm.core.errors import ConfigError
from tllm.devices.choose import CPU
from tllm.model.attention import AttentionSpec
from tllm.model.rope import Rotation, rotation
from tllm.parallel.cross_entropy import check_labels
from tllm.spec.model_spec import RopeSpec
from tllm.training.attention.packed_attention import TrainAttend
from tllm.training.attention.varlen_attention import VarlenAttend, has_varlen
from tllm.training.data.batch_tensors import Tokens, sent_to_host
from tllm.training.gradients.gradient_clipping import of_norms
from tllm.training.job.lora_job import LoraJob

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device here")
CUDA = torch.device("cuda", 0)


def rotation_of_the_host(
    rope: RopeSpec, positions_T: Tensor, dtype: torch.dtype, lengths_T: Tensor | None = None
) -> Rotation:
    """`rotation` as the processor works it out, wherever the tokens lie."""
    there = positions_T.device
    made = rotation(rope, positions_T.cpu(), dtype, None if lengths_T is None else lengths_T.cpu())
    scale = None if made.query_scale is None else made.query_scale.to(there)
    return Rotation(made.cos.to(there), made.sin.to(there), made.interleaved, scale)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma2"])
def test_a_run_on_cuda_is_the_run_on_the_processor(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cosines and sines are of float32 angles in every dtype, and CUDA's differ from the processor's in the last bit.

    No other step of a float64 run is in float32, so with the processor's the rest is equal but for the order of sums.
    With its own the losses differ by that bit: by 3e-9 of themselves, as they do where it is changed on the processor.
    """
    save_model(family, tmp_path / "model")

    def ran(name: str, device: torch.device, dtype: str = "float64") -> tuple[list[float], dict[str, Tensor]]:
        (tmp_path / name).mkdir()
        job = job_for(tmp_path / "model", tmp_path / name / "run", dtype=dtype)
        told = records(train(job, "pp=1", devices=(device,)))
        return [one.loss for one in told], final(Path(job.output_dir))

    want, kept = ran("processor", CPU)

    def furthest(losses: list[float]) -> float:
        return max(abs(a - b) / b for a, b in zip(losses, want, strict=True))

    assert len(want) == 6
    assert furthest(ran("cuda", CUDA)[0]) < 1e-7
    assert furthest(ran("narrow", CUDA, "bfloat16")[0]) < 2e-2
    monkeypatch.setattr("tllm.model.rope.rotation", rotation_of_the_host)
    losses, weights = ran("rotated", CUDA)
    assert furthest(losses) < 1e-12
    assert max(float((weights[name] - x).abs().max()) for name, x in kept.items()) < 1e-10


@pytest.mark.parametrize(("family", "quantize"), [("llama", "int4"), ("qwen3_moe", "int8")])
def test_an_adapter_beside_weights_in_few_bits(family: str, quantize: str, tmp_path: Path) -> None:
    """In float64 they are the plain numbers that they stand for, and the run is the processor's; else they are packed,
    and products round their inputs to 8 bits, which what a device rounds otherwise may move by a step."""
    save_model(family, tmp_path / "model")
    lora = LoraJob(r=4, target_modules=("all-linear",), lora_dropout=0.1, quantize=quantize)

    def ran(name: str, device: torch.device, dtype: str) -> list[float]:
        (tmp_path / name).mkdir()
        job = job_for(tmp_path / "model", tmp_path / name / "run", dtype=dtype, lora=lora, max_steps=3)
        return [one.loss for one in records(train(job, "pp=1", devices=(device,)))]

    want = ran("processor", CPU, "float64")
    assert len(want) == 3
    for dtype, limit in (("float64", 1e-7), ("float32", 2e-2), ("bfloat16", 4e-2)):
        got = ran(dtype, CUDA, dtype)
        assert max(abs(a - b) / b for a, b in zip(got, want, strict=True)) < limit, dtype


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


def test_a_number_is_read_without_waiting_for_what_came_after_it() -> None:
    x = torch.randn(4096, 4096, device=CUDA)
    read = sent_to_host(torch.full((), 0.1, dtype=torch.float64, device=CUDA))
    for _ in range(50):
        x = x @ x
    done = torch.cuda.current_stream().record_event()
    assert read() == 0.1 and not done.query()
