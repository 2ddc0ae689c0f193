"""MLflow: `watch.mlflow` is a tracking server's URI or a folder (extra `headrace[mlflow]`).

MLflow's environment variables apply: MLFLOW_EXPERIMENT_NAME, and those for a server's login.
"""

from __future__ import annotations

import os
import re
import time
import urllib.error
import urllib.request
from typing import Any

from ....console.errors import RunError
from ..config import WatchConfig
from ..logger import Entry, LoggedRun, ScalarLogger

EXPERIMENT = "headrace"
ID_TAG = "headrace.id"
"""Tag by which a start finds its folder's MLflow run."""
TIMEOUT = 10.0
"""Seconds in which a tracking server must answer before a run starts."""
STATUS = {"finish": "FINISHED", "stop": "KILLED", "fail": "FAILED"}
NOT_IN_A_NAME = re.compile(r"[^\w\-./ ]")
"""Characters that MLflow refuses in a metric's name."""


class MLflow(ScalarLogger):
    """Logs to one MLflow run per folder, which each start continues."""

    package = "mlflow"

    def __init__(self, run: LoggedRun) -> None:
        # MLflow 3 refuses a folder as its store unless this is set.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # a run reports to nobody else
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        super().__init__(run)
        self.metric = Metric
        self.client = MlflowClient(tracking_uri=run.watch.mlflow)
        self.id = self._open()

    @classmethod
    def enabled(cls, watch: WatchConfig) -> bool:
        return watch.mlflow is not None

    @classmethod
    def check(cls, watch: WatchConfig) -> None:
        """Raise if a tracking server does not answer; MLflow itself would retry for minutes."""
        uri = watch.mlflow or ""
        if not uri.startswith(("http://", "https://")):
            return
        try:
            urllib.request.urlopen(f"{uri.rstrip('/')}/health", timeout=TIMEOUT).close()
        except urllib.error.HTTPError:
            return  # it answers; its own client logs in
        except OSError as error:
            reason = getattr(error, "reason", error)
            reason = getattr(reason, "strerror", None) or reason
            raise RunError(
                f"watch.mlflow: the tracking server {uri} does not answer ({reason})",
                hint="start the server, or correct watch.mlflow",
            ) from None

    def scalars(self, values: dict[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        metrics = [
            self.metric(NOT_IN_A_NAME.sub("_", curve), value, now, step)
            for curve, value in values.items()
        ]
        self.client.log_batch(self.id, metrics=metrics)

    def event(self, entry: Entry) -> None:
        if entry["event"] in STATUS:
            self.client.set_terminated(self.id, STATUS[entry["event"]])

    def _open(self) -> str:
        """Find the folder's MLflow run, or create it, and return its id."""
        experiment, folder = self._open_experiment(), self.run.folder.root.resolve()
        same_folder = f"tags.`{ID_TAG}` = '{self.run.id}'"
        runs = self.client.search_runs([experiment], filter_string=same_folder, max_results=1)
        if runs:
            id: str = runs[0].info.run_id
            self.client.update_run(id, status="RUNNING")
            return id
        tags = {
            ID_TAG: self.run.id,
            "headrace.folder": str(folder),
            "headrace.plan": self.run.plan.hash,
        }
        run: Any = self.client.create_run(experiment, run_name=folder.name, tags=tags)
        return str(run.info.run_id)

    def _open_experiment(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
        experiment = self.client.get_experiment_by_name(name)
        if experiment is None:
            return str(self.client.create_experiment(name))
        return str(experiment.experiment_id)
