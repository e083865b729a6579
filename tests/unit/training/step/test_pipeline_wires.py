from __future__ import annotations

import torch

from tllm.comm.links.link import LocalLink
from tllm.devices.choose import CPU
from tllm.spec.pipeline_schedule import StageChunk, StageTransfer, build
from tllm.spec.process_groups import source, targets
from tllm.training.step.pipeline_wires import Mail, Wires


def test_each_rank_of_a_stage_is_sent_to_once_by_the_rank_it_takes_from() -> None:
    for here in range(1, 5):
        for there in range(1, 5):
            reached = [other for place in range(here) for other in targets(place, here, there)]
            assert sorted(reached) == list(range(there))
            assert all(source(other, here) == place for place in range(here) for other in targets(place, here, there))


def test_what_comes_early_is_kept() -> None:
    """Two stages with two chunks: activations and gradients share a wire, and are taken by name."""
    schedule = build("interleaved", 2, 2, chunks=2)
    there, here = LocalLink(0, 1), LocalLink(1, 0)
    shapes = [(2, 3), (5, 3)]
    first = Mail(schedule, 0, Wires({1: (there,)}, {1: here}), shapes, torch.float32, CPU)
    second = Mail(schedule, 1, Wires({0: (here,)}, {0: there}), shapes, torch.float32, CPU)
    hops = [hop for op in schedule.lists[0] if (hop := schedule.sends(0, op)) is not None]
    assert {hop.kind for hop in hops} == {"forward", "backward"}
    for number, hop in enumerate(hops):
        first.send(hop, torch.full(shapes[hop.microbatch], float(number)))
    for number, hop in reversed(list(enumerate(hops))):
        assert torch.equal(second.receive(hop), torch.full(shapes[hop.microbatch], float(number)))


def test_between_chunks_of_one_stage_nothing_is_sent() -> None:
    schedule = build("interleaved", 1, 1, chunks=2)
    mail = Mail(schedule, 0, Wires(), [(2, 3)], torch.float32, CPU)
    x = torch.rand(2, 3, requires_grad=True)
    hop = StageTransfer("forward", 0, StageChunk(0, 0), StageChunk(0, 1))
    mail.send(hop, x)
    assert torch.equal(mail.receive(hop), x) and not mail._buffered
