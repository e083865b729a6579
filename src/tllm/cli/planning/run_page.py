"""`RunPage`: what the page that follows a training run shows, and the server of that page."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tllm.cli.display.run_display import product_of
from tllm.cli.planning.run_watch import Watch
from tllm.core.errors import counted
from tllm.server.live.run_log import RunLog
from tllm.server.live.samples import Severity
from tllm.server.run import serving
from tllm.server.run_app import build_run_app
from tllm.training.report.events import (
    RunBegan,
    RunEnded,
    RunEvent,
    RunLostRank,
    RunResumed,
    RunSaved,
    RunStepped,
    RunWaits,
)

if TYPE_CHECKING:
    from tllm.node.train.training_run import TrainingRun
    from tllm.server.http.settings import ServerSettings
    from tllm.training.job.job import Job


class RunPage:
    """`take` is told of every event, `told` of what else is printed; `run` and `watch` are there once ranks are up."""

    def __init__(self, job: Job, ranks: int) -> None:
        self.run: TrainingRun | None = None
        self.watch: Watch | None = None
        self._job, self._ranks = job, ranks
        self._log = RunLog()
        self._began: RunBegan | None = None
        self._losses = 0

    def serving(self, settings: ServerSettings) -> AbstractAsyncContextManager[str]:
        """Serve the page while the block runs; gives its URL."""
        return serving(build_run_app(self._log, self.status, settings), settings)

    def take(self, event: RunEvent) -> None:
        """Keep a step, or what an event means."""
        match event:
            case RunBegan():
                self._began = event
                self.told(f"an epoch begins after step {event.step}")
                if event.disk:
                    self.told(event.disk, "warning")
            case RunStepped():
                self._log.stepped(msgspec.to_builtins(event.record), msgspec.to_builtins(event.completions))
            case RunWaits():
                self.told(f"step {event.step + 1} waits for {event.reason}", "warning")
            case RunLostRank():
                self._losses += 1
                self.told(f"after step {event.step}: {event.reason}", "error")
            case RunSaved(error=""):
                self.told(f"saved step {event.step} in {event.seconds:.1f} s")
            case RunSaved():
                self.told(f"the save of step {event.step} failed, the run goes on: {event.error}", "error")
            case RunResumed():
                self.told(f"goes on after step {event.step} with plan {event.plan}, {event.seconds:.1f} s later")
            case RunEnded():
                early = f", {event.reason}" if event.reason else ""
                model = f"; {product_of(self._job)} is in {event.final}{event.of_step}" if event.final else ""
                self.told(f"ended after step {event.step}{early}{model}")

    def told(self, text: str, severity: Severity = "info") -> None:
        """Somebody who watches the run has something to say."""
        self._log.told(severity, text)

    def status(self) -> Mapping[str, Any]:
        """The reply of `GET /v1/cluster`: nodes as those of a server, and in `training` what is trained."""
        from tllm.node.coordinator.status_report import report

        known: dict[str, Any] = {"ready": False, "plan": "", "epoch": 0, "nodes": [], "wanted": "", "replicas": None}
        known["weights"] = {"brought": [], "liars": []}
        if self.run is not None:
            coordinator = self.run.coordinator
            replication = coordinator.replication
            known = {
                **report(self.run.state),
                "wanted": str(coordinator.work.plan),
                "weights": coordinator.weights.report(),
                "replicas": None if replication is None else replication.status(),
            }
        began = self._began
        return {
            **known,
            "model": Path(self._job.output_dir).name,
            "doing": "" if known["ready"] else f"brings up {counted(self._ranks, 'rank')}",
            "fault": self.run.fault.message if self.run is not None and self.run.fault is not None else "",
            "trouble": "",
            "losses": self._losses,
            "training": {
                "output_dir": self._job.output_dir,
                "max_steps": self._job.max_steps,
                "first_step": began.step if began else 0,
                "parameters": began.parameters if began else 0,
                "adapter_parameters": began.adapter_parameters if began else 0,
                "network": began.network if began else "",
                "products": began.products if began else "",
            },
            "predicted": self.watch.shown() if self.watch is not None else None,
        }
