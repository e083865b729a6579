"""`TrainingWork`: one training job with its plan, as a cluster is opened for it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tllm.cluster.settings import OUR_LINKS, PredictedSeconds, TrainSettings, Wiring
from tllm.node.coordinator.cluster_options import DEFAULTS, ClusterOptions
from tllm.node.coordinator.workload import Workload
from tllm.spec.families import spec_from_config
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan
from tllm.training.job.initial_model import files_read, run_name
from tllm.training.job.job import encode_job
from tllm.training.job.job_file import ResolvedJob
from tllm.training.job.job_parts import role_nodes

LINK_SECONDS = 600.0
"""How long a rank that trains waits for a message of another one, unless the options say it: a microbatch of a large
model on a slow machine takes minutes, and so does a corpus that rank 0 reads for the first time."""


MOST_FILES = 10_000
"""So many of the files are looked for on a node that may take the coordinator's place."""


@dataclass(frozen=True)
class TrainingWork:
    """What a cluster trains: a job, and the plan by which its ranks divide the model.

    `config` is the text of the model's config.json, as every rank is sent it. `wiring` says what the links between
    ranks are made of, `predicted` what the plan was chosen by.
    """

    resolved: ResolvedJob
    plan: Plan
    config: str
    wiring: Wiring = OUR_LINKS
    predicted: PredictedSeconds | None = None

    @property
    def spec(self) -> ModelSpec:
        """The model that `config` describes."""
        return spec_from_config(json.loads(self.config))

    def workload(self, options: ClusterOptions = DEFAULTS) -> Workload:
        """The same as a coordinator takes it. PlanError where the plan does not fit the model."""
        self.plan.check(self.spec.num_layers)
        link_seconds = options.links_wait(LINK_SECONDS)
        job = self.resolved.job
        settings = TrainSettings(
            job=encode_job(job),
            threads=0,
            link_seconds=link_seconds,
            run=run_name(job),
            wiring=self.wiring,
            predicted=self.predicted,
        )
        return Workload(
            Path(job.model_name_or_path) if job.model_name_or_path else None,
            self.config,
            self.plan,
            settings,
            load_seconds=link_seconds,
            allow_mixed=options.allow_mixed,
            prepare_seconds=link_seconds,
            lost_after=options.lost_after,
            reads=files_read(job)[:MOST_FILES],
            beside=sum(wanted.count for wanted in role_nodes(job).values()),
        )
