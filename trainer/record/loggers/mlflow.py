"""MLflow: `watch.mlflow: URI` of a tracking server, or a folder (extra `headrace[mlflow]`).

MLflow's own environment variables apply: MLFLOW_EXPERIMENT_NAME, and those of a server's login.
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
"""Tag by which a start finds the MLflow run of its folder."""
TIMEOUT = 10.0
"""Seconds in which a tracking server must answer before a run starts."""
STATUS = {"finish": "FINISHED", "stop": "KILLED", "fail": "FAILED"}
NOT_IN_A_NAME = re.compile(r"[^\w\-./ ]")
"""Characters that MLflow refuses in the name of a metric."""


class MLflow(ScalarLogger):
    """One MLflow run for a run's folder; each start continues it."""

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
        named = ((NOT_IN_A_NAME.sub("_", name), value) for name, value in values.items())
        metrics = [self.metric(name, value, now, step) for name, value in named]
        self.client.log_batch(self.id, metrics=metrics)

    def event(self, entry: Entry) -> None:
        if entry["event"] in STATUS:
            self.client.set_terminated(self.id, STATUS[entry["event"]])

    def _open(self) -> str:
        """Return the id of the folder's MLflow run. The first start makes it."""
        experiment, folder = self._experiment(), self.run.folder.root.resolve()
        ours = f"tags.`{ID_TAG}` = '{self.run.id}'"
        earlier = self.client.search_runs([experiment], filter_string=ours, max_results=1)
        if earlier:
            id: str = earlier[0].info.run_id
            self.client.update_run(id, status="RUNNING")
            return id
        tags = {
            ID_TAG: self.run.id,
            "headrace.folder": str(folder),
            "headrace.plan": self.run.plan.hash,
        }
        made: Any = self.client.create_run(experiment, run_name=folder.name, tags=tags)
        return str(made.info.run_id)

    def _experiment(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
        there = self.client.get_experiment_by_name(name)
        made = self.client.create_experiment(name) if there is None else there.experiment_id
        return str(made)
