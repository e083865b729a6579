"""Models in few bits on devices with memory of their own: what is held there, and what they write."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from tests.devices.test_serving import GREEDY, written
from tests.parity.engine.test_few_bits import EXPERTS, SIZES
from tests.support.device.separate_device import SEPARATE
from tests.support.models.families import save_model
from tests.support.models.few_bits import KINDS
from tests.support.models.gguf_models import write_gguf
from tllm.devices.choose import CPU
from tllm.engine.engine import Engine
from tllm.engine.schedule.limits import EngineConfig
from tllm.parallel.quantized_weight import PackedRows, QuantizedWeight, weight_bytes
from tllm.quantization.packed_layout import pack
from tllm.spec.quantized.weight_form import Quantize

CONFIG = EngineConfig(dtype="float32", cache_tokens=512, max_num_seqs=4, max_num_batched_tokens=23)
FAMILIES = {"llama": SIZES, "qwen3_moe": EXPERTS}


@pytest.mark.parametrize("kind", KINDS)
def test_products_have_the_processors_bits(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces of some outputs too, and an embedding's rows."""
    monkeypatch.setattr("tllm.quantization.reference_matmul.AT_ONCE", 3000)
    torch.manual_seed(4)
    blocks, x = KINDS[kind](37, 544), torch.randn(3, 544)
    weight = QuantizedWeight([PackedRows(pack(blocks), blocks.scheme, 37, 544)] * 2, 544)
    there, ids = weight.to(SEPARATE[1]), torch.tensor([36, 0, 37, 73, 5])
    for exact in (False, True):
        assert torch.equal(there.matmul(x.to(SEPARATE[1]), exact).cpu(), weight.matmul(x, exact))
    assert torch.equal(there.rows(ids.to(SEPARATE[1])).cpu(), weight.rows(ids))


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_by_the_numbers_that_weights_stand_for(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor's to the bit where both multiply in float32; in bfloat16 those of plain weights of that dtype."""
    for name in ("PLAIN_AT_ONCE", "DEVICE_PLAIN_AT_ONCE"):
        monkeypatch.setattr(f"tllm.parallel.quantized_weight.{name}", 3000)
    torch.manual_seed(5)
    blocks = KINDS[kind](37, 544)
    weight = QuantizedWeight([PackedRows(pack(blocks), blocks.scheme, 37, 544)] * 2, 544)
    plain, there = weight.rows(torch.arange(74)), weight.to(SEPARATE[1])
    for dtype, exact in (
        (torch.float32, False),
        (torch.float32, True),
        (torch.bfloat16, False),
        (torch.bfloat16, True),
    ):
        x, given = torch.randn(3, 544, dtype=dtype), torch.randn(3, 74, dtype=dtype)
        here, far = (x.clone().to(device).requires_grad_() for device in (CPU, SEPARATE[1]))
        for rows, held in ((here, weight), (far, there)):
            y = held.matmul(rows, exact)
            y.backward(given.to(rows.device, y.dtype))
        assert here.grad is not None and far.grad is not None and far.grad.dtype == dtype
        want = given.double() @ plain.double()
        limit = 1e-6 if dtype == torch.float32 else 1e-2
        assert (here.grad - want).norm() < limit * want.norm()
        assert (far.grad.cpu() - want).norm() < limit * want.norm()
        if dtype == torch.float32:
            assert torch.equal(far.grad.cpu(), here.grad)


@pytest.mark.parametrize(
    ("case", "kind", "plans"),
    [
        ("llama", "int8", {"tp=2": (CPU, SEPARATE[0])}),
        ("qwen3_moe", "int4", {"pp=2": (SEPARATE[1], CPU)}),
        ("llama", None, {"pp=1": SEPARATE[:1]}),
    ],
)
def test_plans_over_devices_and_processors(
    case: str, kind: Quantize | None, plans: dict[str, tuple[torch.device, ...]], tmp_path: Path
) -> None:
    """Rounded while they are loaded, or as a GGUF file has them. Activations are rounded to 8 bits, so what another
    order of sums changes in a device's attention may be a step of those. In 8 bits the llama of seed 2 never has two
    tokens so nearly as likely that this decides between them."""
    folder = tmp_path / "model"
    model = save_model(case, folder, 2 if kind == "int8" else 0, **FAMILIES[case])
    if kind is None:
        folder = write_gguf(model, tmp_path / "model.gguf", lambda name: "Q4_K" if "blk" in name else "Q6_K")
    config = msgspec.structs.replace(CONFIG, quantize=kind)
    with Engine.load(folder, "pp=1", config) as engine:
        want, held = written(engine, GREEDY), bytes_of(engine)
    for plan, devices in plans.items():
        with Engine.load(folder, plan, config, devices=devices) as engine:
            got = written(engine, GREEDY)
            for stage, device in zip(engine.stages, devices, strict=True):
                assert {x.device for x in stage.model.parameters()} == {device}
            assert bytes_of(engine) == held or plan == "tp=2"
        assert [ids for ids, _ in got] == [ids for ids, _ in want], plan
        for (_, ours), (_, theirs) in zip(got, want, strict=True):
            assert ours == pytest.approx(theirs, abs=0.05), plan


def bytes_of(engine: Engine) -> int:
    return sum(weight_bytes(x) for stage in engine.stages for x in stage.model.parameters())
