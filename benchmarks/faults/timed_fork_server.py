"""The fork server of workers (`tllm.node.fork_server`) whose workers note how long what they do after a loss takes."""

from __future__ import annotations

import sys

from benchmarks.faults.call_spans import time_calls
from tllm.node import fork_server

CALLS = {
    "tllm.node.worker:Worker.__init__": "join",
    "tllm.node.worker:Worker._end_role": "end",
    "tllm.node.roles.role:open_links": "links",
    "tllm.comm.links.connect:start_tls": "handshake",
    "tllm.comm.links.listener:start_tls": "handshake",
    "tllm.node.worker:Worker._load": "load",
    "tllm.training.trainer:RankTrainer.__init__": "build",
    "tllm.training.trainer:known_peak": "peak",
    "tllm.training.sync.learner:SynchronousLearner.__init__": "learner",
    "tllm.training.snapshot.replication:SnapshotReplicator.find": "find",
    "tllm.training.snapshot.replication:SnapshotReplicator.restore": "restore",
    "tllm.training.snapshot.replication:SnapshotReplicator.begin": "copy",
    "tllm.node.roles.serving_rank:RankWeights.load": "weights",
}
"""What is timed, and the name of its spans."""

if __name__ == "__main__":
    time_calls(CALLS)
    sys.exit(fork_server.main())
