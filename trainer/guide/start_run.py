"""The steps of `headrace start`, which skip what an earlier start has finished."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from ...console import command
from ...console.commands import survey_corpus
from ...console.errors import InputError, LayoutError, MisuseError, StorageError, file_fault
from ...console.explain import path_hint
from ...console.progress import format_bytes, format_duration, format_number
from ...dataplane.datasets import manifest as manifests
from ...models.conversion.keys import LENGTH
from ..cluster.ranks import INTERRUPTED
from ..folders.folder import RunFolder
from ..folders.request_folder import RequestFolder
from ..layout.devices import choose_device
from . import sizing
from .shell import Shell, has_finished, note
from .sizing import Budget, Candidate, Trial
from .trials import CHECKPOINTS, STEPS, Trials

FEW_DOCUMENTS, MANY_DOCUMENTS = 200, 2_000
"""With fewer documents, none are held out; with many, a hundredth is."""
MIN_TOKENS = 10_000
SEQ_LENS = {"cpu": 512, "cuda": 2048}
LONGER_ROWS = 2
"""Factor of rows of bytes or conversations: a token is shorter, a document should not be cut."""
DATASET_BYTES = 2
"""Bytes of a dataset in a byte of its corpus, at most: an id of each byte."""
TRAINING_SHARE = 0.9
"""Share of the time for steps; the rest starts the run, evaluates and saves."""
MIN_SHARE = 0.25
"""Share of the time that the run has after long trials."""
CHECKPOINT_SECONDS = 600
TUNING_RATE, CONTINUED_RATE = 2e-5, 1e-4
"""Learning rates for given weights: on conversations, and on text."""


@dataclass(frozen=True, kw_only=True)
class Start:
    folder: str
    out: Path
    hours: float
    weights: str | None
    text_field: str | None
    input_format: str | None
    on_error: str
    board: bool

    @cached_property
    def shell(self) -> Shell:
        return Shell(Path(), "headrace start")

    @cached_property
    def device(self) -> Literal["cpu", "cuda"]:
        return choose_device("auto")

    @cached_property
    def corpus(self) -> Any:
        """What the folder holds (tokenize/corpus/survey.py)."""
        config = {"text_field": self.text_field, "format": self.input_format}
        settings = {key: value for key, value in config.items() if value is not None}
        return survey_corpus(self.folder, MANY_DOCUMENTS, **settings)

    @property
    def data(self) -> Path:
        return self.out / "data"

    @property
    def run_folder(self) -> RunFolder:
        return RunFolder(self.out / "run")

    def run(self) -> int:
        """Do what is left to do, and return the exit code."""
        self._check()
        request = {
            "folder": str(Path(self.folder).resolve()),
            "hours": self.hours,
            "weights": self.weights,
        }
        folder = RequestFolder(self.out, "start", before=())
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(folder.locked())
            except OSError as error:
                raise StorageError(
                    f"cannot make {self.out}: {file_fault(error)[0]}", hint="choose another --out"
                ) from None
            if folder.read_stored(request) is None:
                folder.store(request)
            code = 0 if has_finished(self.run_folder) else self._train()
        if code == 0:
            command.say(
                f"\ndone: {self.run_folder.report}\n"
                f"  mixtures audit {self.run_folder.root} --step 1    # what it saw, proved\n"
                f"  trainer sample {self.run_folder.root} --prompt TEXT\n"
                f"  trainer board {self.run_folder.root}"
            )
        return code

    def _check(self) -> None:
        """Raise for a folder that cannot be trained on, before anything is written."""
        folder = Path(self.folder)
        if not folder.exists():
            hint = path_hint(folder, "name a folder of documents, or a file")
            raise InputError(f"there is no {folder}", hint=hint)
        if self.out.resolve().is_relative_to(folder.resolve()):
            raise MisuseError(
                f"the output folder {self.out} is in {folder}, whose files are the corpus",
                hint=f"choose another: --out ../{folder.resolve().name}-run",
            )
        if self.corpus.conversations and self.weights is None:
            raise MisuseError(
                f"{folder} holds conversations, which fine-tune given weights",
                hint="name the folder of the weights: --weights FOLDER; or a field that is plain "
                "text: --text-field NAME",
            )
        if self._is_dna and len(self.corpus.formats) > 1:
            raise MisuseError(
                f"{folder} holds several kinds of documents: {', '.join(self.corpus.formats)}",
                hint="genomes are read as bytes, and text is not: name a folder of one kind",
            )
        if self.weights is not None and not self._weights_tokenizer.exists():
            hint = path_hint(Path(self.weights), "name a folder of transformers")
            raise InputError(f"there is no {self._weights_tokenizer}", hint=hint)
        existing = next(path for path in (self.out, *self.out.resolve().parents) if path.exists())
        needed, free = DATASET_BYTES * self.corpus.size, shutil.disk_usage(existing).free
        if needed > free and not self.run_folder.begun:
            raise StorageError(
                f"a dataset of {folder} may need {format_bytes(needed)}, and {self.out} has "
                f"{format_bytes(free)} left",
                hint="free space there, or choose another --out",
            )

    @property
    def _is_dna(self) -> bool:
        return "fasta" in self.corpus.formats

    @property
    def _weights_tokenizer(self) -> Path:
        return Path(self.weights or "") / "tokenizer.json"

    def _train(self) -> int:
        run = self.run_folder
        if run.begun:
            note("go on with the run")
            words = ["trainer", "resume", str(run.root)]
        else:
            words = self._choose(self._build())
        with contextlib.ExitStack() as stack:
            if self.board:
                run.root.mkdir(exist_ok=True)
                stack.enter_context(self.shell.background("trainer", "board", str(run.root)))
            return self.shell.run(*words, expected=(0, INTERRUPTED))

    def _build(self) -> str:
        """Build the dataset, and return the URL that the run reads."""
        documents = ("--input-format", self.input_format, "--text-field", self.text_field)
        source = [
            word
            for option, value in zip(documents[::2], documents[1::2], strict=True)
            if value is not None
            for word in (option, value)
        ]
        source += ["--on-error", "skip"] if self.on_error == "skip" else []
        tokenizer = ["--tokenizer", str(self.out / "tokenizer.json")]
        if self.weights is not None:
            tokenizer = ["--tokenizer", str(self._weights_tokenizer)]
        elif self._is_dna:
            tokenizer = ["--tokenizer", "byte", "--dna"]
        elif not (self.out / "tokenizer.json").exists():
            note("train a tokenizer on this text")
            vocab = sizing.choose_vocab_size(self.corpus.size, self.device)
            words = ["--vocab-size", str(vocab), "--out", tokenizer[1], *source]
            self.shell.run("tokenize", "train", self.folder, *words)
        note("build the dataset")
        held_out = self.corpus.documents >= FEW_DOCUMENTS
        if held_out:
            share = 0.01 if self.corpus.documents >= MANY_DOCUMENTS else 0.05
            source += ["--split", f"val={share}"]
        dataset = self.data / "train" if held_out else self.data
        if self.corpus.conversations:
            source += ["--chat", self._chat_template(), "--pack", str(self._row_length)]
            dataset /= f"packed-{self._row_length}"
        self.shell.run(
            "tokenize", "build", self.folder, *tokenizer, *source, "--out", str(self.data)
        )
        return str(dataset)

    def _chat_template(self) -> str:
        """Return `tokenizer` if the weights have a template of their own."""
        folder = Path(self.weights or "")
        settings = folder / "tokenizer_config.json"
        if (folder / "chat_template.jinja").exists() or (
            settings.exists() and '"chat_template"' in settings.read_text()
        ):
            return "tokenizer"
        return "chatml"

    @property
    def _row_length(self) -> int:
        """Tokens of a row; at most the longest context of given weights."""
        longer = self._is_dna or self.corpus.conversations
        length = SEQ_LENS[self.device] * (LONGER_ROWS if longer else 1)
        config = Path(self.weights or "") / "config.json"
        if self.weights is None or not config.exists():
            return length
        longest: int = json.loads(config.read_text()).get(LENGTH, length)
        return min(length, longest)

    def _choose(self, dataset: str) -> list[str]:
        """Choose model, layout and tokens by trials, write the mixture, and return the run's
        command."""
        began, seconds = time.monotonic(), self.hours * 3600
        manifest = manifests.load(dataset)
        if manifest.tokens < MIN_TOKENS:
            raise InputError(
                f"{self.folder} holds {manifest.tokens:,} tokens to train on, and a run needs "
                f"{MIN_TOKENS:,}",
                hint="add documents",
            )
        is_packed = self.corpus.conversations
        longest = 1 << (manifest.tokens // 16).bit_length() - 1
        seq_len = self._row_length if is_packed else min(self._row_length, longest)
        trials = Trials(self.shell, self.out / "trials", dataset, seq_len, self.device)
        trials.folder.mkdir(exist_ok=True)

        def budget() -> Budget:
            remaining = max(seconds - (time.monotonic() - began), MIN_SHARE * seconds)
            epochs = sizing.MAX_EPOCHS if self.weights is None else sizing.TUNING_EPOCHS
            return Budget(TRAINING_SHARE * remaining, manifest.tokens, epochs)

        note(f"measure how fast this machine trains: {STEPS} steps of real models, never resumed")
        choice = sizing.choose(
            self._candidates(trials, manifest.tokenizer.vocab_size), trials.measure, budget
        )
        if choice is None:
            raise LayoutError(
                f"no model can be trained here: {trials.refused}",
                hint="`headrace doctor` shows what this machine has",
            )
        candidate, trial = choice
        tokens = budget().tokens(trial.tokens_per_second)
        spent = time.monotonic() - began
        note(
            f"chosen: {candidate.name}, {format_number(candidate.parameters)} parameters, "
            f"{format_number(tokens)} tokens ({tokens / manifest.tokens:.1f} times the dataset): "
            f"{format_duration(tokens / trial.tokens_per_second)} at the measured "
            f"{format_number(trial.tokens_per_second)} tokens a second; the trials took "
            f"{format_duration(spent)} of {format_duration(seconds)}"
        )
        layout = trial.layout
        batch = sizing.choose_batch(tokens, layout.processes, seq_len)
        layout = replace(layout, micro_batch=min(layout.micro_batch, batch // layout.processes))
        mixture = self.out / "mixture.yaml"
        self.shell.run(
            *("mixtures", "new", dataset, "--tokens", str(tokens), "--seq-len", str(seq_len)),
            *("--batch", str(batch), "--out", str(mixture), "--force"),
        )
        return [
            *("trainer", "run", "--mixture", str(mixture), *candidate.words),
            *("--out", str(self.run_folder.root), *layout.words),
            *self._settings(candidate, trial, tokens, batch, seq_len),
        ]

    def _candidates(self, trials: Trials, vocab_size: int) -> list[Candidate]:
        from ..accounting.memory import parameters

        candidates = sizing.list_sizes(vocab_size)
        if self.weights is not None:
            candidates = [Candidate("weights", None, (f"init_from.path={self.weights}",))]
        return [
            replace(candidate, parameters=parameters(trials.resolve(candidate))["parameters"])
            for candidate in candidates
        ]

    def _settings(
        self, candidate: Candidate, trial: Trial, tokens: int, batch: int, seq_len: int
    ) -> list[str]:
        """Return overrides for the run's rate, evaluations and checkpoints."""
        steps, seconds = max(tokens // batch, 1), batch / trial.tokens_per_second
        rate = sizing.learning_rate(candidate.parameters)
        if self.weights is not None:
            rate = TUNING_RATE if self.corpus.conversations else CONTINUED_RATE
        settings = [
            f"optimizer.lr={rate:g}",
            f"checkpoints.every={min(max(int(CHECKPOINT_SECONDS / seconds), 1), steps)}",
            f"checkpoints.keep_last={CHECKPOINTS - 1}",
            "watch.not_finite=skip",
        ]
        if (self.data / "val").exists():
            every = sizing.evaluation_interval(steps, batch // seq_len)
            settings += [f"evaluate.every={every}", f"evaluate.rows={sizing.EVALUATED_ROWS}"]
        return settings
