"""Models in few bits in a process that may use fewer instructions of this processor, in our kernels and in torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.parity.engine.test_few_bits import FAMILIES
from tests.support.models.families import save_model
from tllm.kernels.library import compiled

SCRIPT = """
import json, sys
from tllm.engine.engine import Engine
from tllm.engine.schedule.limits import EngineConfig
from tllm.spec.request import Request, SamplingParams

config = EngineConfig(dtype="float32", cache_tokens=1024, max_num_seqs=8, quantize="int4")
asked = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=1, prompt_logprobs=1)
answers = []
for folder in sys.argv[1:]:
    with Engine.load(folder, "pp=1", config) as engine:
        outs = list(engine.submit(Request(id="one", prompt_ids=tuple(range(3, 99, 2)), params=asked)))
    scores = [one.logprob for out in outs for one in (*out.prompt_logprobs, *out.logprobs) if one]
    answers.append([[token for out in outs for token in out.token_ids], scores])
print(json.dumps(answers))
"""


def answers(folders: list[Path], **environment: str) -> list[tuple[list[int], list[float]]]:
    """The ids of a reply of each model, and the log-probabilities of the prompt's tokens and of these."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *map(str, folders)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stderr
    return [(ids, scores) for ids, scores in json.loads(done.stdout.splitlines()[-1])]


@pytest.mark.slow
@pytest.mark.timeout(360)
def test_a_processor_with_fewer_instructions_answers_alike(tmp_path: Path) -> None:
    """The last bit of a log-probability is torch's; another expert for one token would show in the second digit."""
    if compiled()[0].name == "generic":
        pytest.skip("this processor has no more than the instructions of any")
    folders = [tmp_path / family for family in ("qwen2_moe", "glm4_moe", "gpt_oss_moe")]
    for folder in folders:
        save_model(folder.name, folder, **FAMILIES[folder.name])
    usual = answers(folders)
    fewer = answers(folders, TLLM_KERNELS="generic", ATEN_CPU_CAPABILITY="default")
    for (ids, scores), (others, near) in zip(usual, fewer, strict=True):
        assert ids == others and len(scores) == 47 + 12
        assert near == pytest.approx(scores, rel=0, abs=2e-6)
