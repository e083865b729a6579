"""`make bench`: the benchmarks in turn that need neither another program to compare with, nor a text, nor a GPU. Each
writes its page and its raw figures under benchmarks/<subject>/results.

`python -m benchmarks serving.throughput 1.1b` runs one of them with its own arguments.
"""

from __future__ import annotations

import subprocess
import sys

from benchmarks.processes.python_module import environment, module_command

RUNS = (
    ["comm.collectives"],
    ["serving.throughput", "0.3b", "--float32"],
    ["serving.throughput", "1.1b"],
    ["serving.few_bits"],
    ["serving.start"],
    ["serving.chat_turns"],
    ["training.throughput"],
    ["training.slow_links"],
    ["fuzz.malformed_frames"],
    ["faults.fault_suite"],
    ["faults.double_faults"],
    ["planner.published"],
    ["planner.many_machines"],
    ["planner.held_out"],
    ["comm.wire_cost"],
    ["comm.links"],
    ["comm.tensor_parallel"],
    ["faults.lost_ranks"],
    ["faults.recovery_timeline"],
    ["planner.planning"],
    ["training.memory"],
    ["training.log_prob_mismatch"],
    ["training.experiments.learning"],
    ["training.sampled_ahead"],
    ["training.distillation"],
    ["serving.drafts"],
    ["serving.draft_model"],
    ["serving.two_machines"],
    ["cluster.coordinator_scale"],
    ["faults.mixed_load"],
)


def main() -> None:
    failed = []
    for name, *words in [sys.argv[1:]] if sys.argv[1:] else RUNS:
        print("==", name, *words, flush=True)
        if subprocess.run(module_command(name, *words), check=False, env=environment()).returncode:
            failed.append(name)
    if failed:
        sys.exit(f"failed, as each says above: {', '.join(failed)}")


if __name__ == "__main__":
    main()
