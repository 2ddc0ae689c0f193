"""Open a run's folder and read its facts and settings, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ....console.errors import RunError, UserError
from ....dataplane.order.plan import Plan, PlanSource
from ....dataplane.runlog import writer as lines
from ....dataplane.storage import storage
from ....trainer.accounting import about, measured
from ....trainer.folders.folder import RunFolder
from ....trainer.loop.batches import RunPlan
from ....trainer.loop.synthetic import SyntheticConfig, SyntheticPlan
from ...board.byte_sizes import ByteSizes
from ...board.runs import read_settings


@dataclass(frozen=True)
class StoredRun:
    folder: RunFolder
    name: str
    """Name on the page: the end of the folder's path that no other run on the page shares."""
    about: dict[str, Any]
    """Facts that torch counts."""
    settings: dict[str, Any]
    """All settings by dotted path: the run's, its model's and its mixture's."""
    plan: RunPlan

    @classmethod
    def open(cls, folder: RunFolder, name: str | None = None) -> StoredRun:
        folder.check_is_run()
        facts, settings = about.load_facts(folder), read_settings(str(folder.root))
        return cls(
            folder=folder,
            name=name or folder.root.resolve().name,
            about=facts,
            settings=settings,
            plan=_plan(folder, settings, facts),
        )

    @property
    def tokenizer(self) -> str:
        """Identity of the run's tokens."""
        plan = self.plan
        return plan.tokenizer if isinstance(plan, Plan) else f"synthetic {plan.vocab_size}"

    @property
    def sources(self) -> Sequence[PlanSource]:
        return self.plan.sources if isinstance(self.plan, Plan) else ()

    @property
    def held_out_sources(self) -> Sequence[PlanSource]:
        name = self.about["held_out"]
        file = self.folder.root / name if name else None
        return Plan.load(file).sources if file is not None and file.exists() else ()

    @cached_property
    def sizes(self) -> ByteSizes | None:
        """Bytes per token by source. None if a dataset is not on this machine: a run's page must
        not wait for a store."""
        sources = [*self.sources, *self.held_out_sources]
        if not self.sources or not all(storage.is_local(source.url) for source in sources):
            return None
        try:
            return self.measured_sizes()
        except UserError:
            return None

    def measured_sizes(self) -> ByteSizes:
        """Read the bytes per token by source from the datasets."""
        if not self.sources:
            raise UserError(f"the rows of {self.name} are synthetic and have no bytes")
        trained, held_out = (
            {source.name: source.url for source in sources}
            for sources in (self.sources, self.held_out_sources)
        )
        return ByteSizes.measure(trained, held_out)

    @cached_property
    def measured(self) -> dict[str, Any] | None:
        """Measured and predicted seconds and bytes, for a run with a layout plan."""
        if self.folder.measured.exists():
            return measured.read(self.folder.measured)
        events = (entry["event"] for entry in lines.read(self.folder.events))
        if not self.folder.layout.exists() or measured.EVENT not in events:
            return None
        from ....trainer.run.stored import read_run

        return measured.compare_run(read_run(self.folder))


def _plan(folder: RunFolder, settings: dict[str, Any], facts: dict[str, Any]) -> RunPlan:
    if folder.plan.exists():
        return Plan.load(folder.plan)
    keys = ("steps", "seq_len", "batch_rows", "warmup")
    fields: dict[str, Any] = {key: settings.get(f"synthetic.{key}") for key in keys}
    if None in fields.values():
        raise RunError(
            f"{folder.root} has neither a plan nor synthetic rows",
            hint="restore its plan.json from a copy",
        )
    return SyntheticPlan(SyntheticConfig(**fields), facts["model"]["vocab_size"], settings["seed"])
