"""Weights & Biases: `watch.wandb: PROJECT` (extra `headrace[wandb]`)."""

from __future__ import annotations

import contextlib
import netrc
import os
from pathlib import Path
from urllib.parse import urlsplit

from ....console.errors import RunError
from ..config import WatchConfig
from ..logger import LoggedRun, ScalarLogger

SERVER = "https://api.wandb.ai"
OFFLINE = ("offline", "disabled", "dryrun")
"""Values for WANDB_MODE that need no API key."""


class WeightsAndBiases(ScalarLogger):
    """Logs to one page per folder, which each start continues."""

    package = "wandb"

    def __init__(self, run: LoggedRun) -> None:
        import wandb

        super().__init__(run)
        folder = run.folder.root
        self.page = wandb.init(
            project=run.watch.wandb,
            name=folder.name,
            id=run.id,
            resume="allow",
            dir=str(folder),
        )

    @classmethod
    def enabled(cls, watch: WatchConfig) -> bool:
        return watch.wandb is not None

    @classmethod
    def check(cls, watch: WatchConfig) -> None:
        """Raise without an API key; wandb would ask for one on the terminal."""
        if os.environ.get("WANDB_MODE") in OFFLINE or os.environ.get("WANDB_API_KEY"):
            return
        host = urlsplit(os.environ.get("WANDB_BASE_URL", SERVER)).hostname or ""
        file = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
        with contextlib.suppress(OSError, netrc.NetrcParseError):
            if netrc.netrc(file).authenticators(host) is not None:
                return
        raise RunError(
            f"watch.wandb is set, and there is no API key for {host} (WANDB_API_KEY, {file})",
            hint="run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline",
        )

    def scalars(self, values: dict[str, float], step: int) -> None:
        self.page.log(values, step=step)

    def close(self) -> None:
        self.page.finish()
