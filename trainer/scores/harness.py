"""Score headrace models with lm-evaluation-harness (extra `headrace[eval]`).

Texts are encoded, cut and scored as in the harness's `hf` class, so a model has the same scores
here and in transformers.
"""

from __future__ import annotations

import importlib.metadata
import logging
import math
import sys
import traceback
from collections.abc import Sequence
from contextlib import redirect_stdout
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import datasets
import lm_eval.api.model
import lm_eval.api.task
from lm_eval import evaluator
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from lm_eval.models.utils import postprocess_generated_text as until_stop
from lm_eval.tasks import TaskManager
from lm_eval.tasks._index import TaskIndex
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from ...console.errors import InputError, LayoutError, RunError, UserError
from ...console.explain import nearest
from ...console.log import can_rewrite_lines
from ...dataplane.tokenizers import TextError
from ...models.model.generate import Sampling
from ..cluster.lost_ranks import LostRankError
from ..placement.team import Team
from ..weights.source import WeightSource
from .answers import GENERATE, GenerationRequest
from .config import ScoresConfig
from .index import build_index
from .likelihood import ScoredRow, batch_by_length, restore_order, score_rows
from .missing import ASKED, FAILED, INCLUDE_PATH, failure_reason
from .records import context_length

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

    from ...dataplane.tokenizers import Tokenizer
    from ...models.config.config import ModelConfig

GENERATED = 256
"""Maximum tokens in an answer, for tasks that do not say; equal to the harness's `hf` class."""
SAMPLING = ("do_sample", "temperature", "top_k", "top_p")
"""Keys in a task's `generation_kwargs` that decide how tokens are chosen."""

# The harness asks git and the machine for facts that no entry stores. Outside a repository git
# writes an error, as if the scores had failed.
evaluator.get_git_commit_hash = evaluator.add_env_info = lambda *facts: None

TaskIndex.build = staticmethod(build_index)

DEFAULTS = ("using default", "using preconfigured rule")
"""Phrases in the harness's warnings about defaults for keys that a task's YAML lacks."""

# Whoever scores weights did not write the task, and cannot act on these warnings.
logging.getLogger(lm_eval.api.task.__name__).addFilter(
    lambda record: not any(phrase in record.getMessage() for phrase in DEFAULTS)
)

if not can_rewrite_lines(sys.stderr):  # each step of a bar would be a line; ours is one a minute
    lm_eval.api.model.tqdm = lm_eval.api.task.tqdm = lambda items, **_: items
    datasets.disable_progress_bars()


class HarnessModel(TemplateLM):  # type: ignore[misc]  # the harness has no types
    """Adapts a model and its tokenizer to the harness's interface."""

    def __init__(
        self,
        team: Team,
        model: ModelConfig,
        tokenizer: Tokenizer,
        *,
        max_length: int,
        batch_tokens: int,
    ) -> None:
        """`team` has the functions from `answers.batch_functions`."""
        super().__init__()
        self.team = team
        self.can_pad = model.isolate_documents
        self.text_tokenizer = tokenizer
        self.max_length = max_length
        self.batch_tokens = batch_tokens
        end = tokenizer.info.end_of_document
        if end is None:
            raise InputError(
                "the tokenizer has no end-of-document token, and tasks begin their texts with it",
                hint="name a dataset whose tokenizer has one: --data URL",
            )
        self.end = int(end)

    @property
    def eot_token_id(self) -> int:
        """Token before every text; the harness's `prefix_token_id` too."""
        return self.end

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: object
    ) -> list[int]:
        """Encode a text without special tokens, whatever `add_special_tokens` says."""
        try:
            encoded = self.text_tokenizer.encode([string])
        except TextError as error:
            raise InputError(
                f"a text of the tasks cannot be tokenized ({error.why}): {string[:80]!r}",
                hint="choose tasks in the alphabet of the model's training data",
            ) from None
        ((start, end),) = pairwise(encoded.starts.tolist())
        ids: list[int] = encoded.tokens[start : end - 1].tolist()
        return ids

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: object
    ) -> list[tuple[float, bool]]:
        """Return, by continuation, its log-likelihood and whether greedy generation yields it. A
        context without tokens (the harness moves trailing blanks into the continuation) is scored
        as an empty one."""
        rows = []
        for _texts, context, continuation in requests:
            if len(continuation) > self.max_length:
                raise InputError(
                    f"a continuation has {len(continuation):,} tokens, more than --max-length "
                    f"{self.max_length:,}",
                    hint="raise --max-length",
                )
            ids = [*(context or [self.end]), *continuation][-self.max_length - 1 :]
            rows.append(ScoredRow(ids, range(len(ids) - len(continuation), len(ids))))
        scores = score_rows(self.team, rows, self.batch_tokens)
        return [(score.total, all(score.likeliest)) for score in scores]

    def loglikelihood_rolling(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-likelihoods by text. Long texts are cut into windows."""
        windows = []
        text_numbers = []
        for number, request in enumerate(requests):
            (text,) = request.args
            text_windows = get_rolling_token_windows(
                self.tok_encode(text), self.end, max_seq_len=self.max_length, context_len=1
            )
            for context, continuation in map(make_disjoint_window, text_windows):
                windows.append((None, context, continuation))
                text_numbers.append(number)
        totals = [0.0] * len(requests)
        scores = self._loglikelihood_tokens(windows)
        for number, (log_likelihood, _) in zip(text_numbers, scores, strict=True):
            totals[number] += log_likelihood
        return totals

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generate a text after each context, up to the first stop sequence."""
        if GENERATE not in self.team.functions:
            raise LayoutError(
                "a task generates texts, and ranks that share rows (--cp, --tp) cannot",
                hint="share the weights alone: --shard",
            )
        by_settings: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            by_settings.setdefault(repr(request.args[1]), []).append(number)
        batch_numbers: list[list[int]] = []
        batches: list[list[GenerationRequest]] = []
        for numbers in by_settings.values():
            settings = normalize_gen_kwargs(requests[numbers[0]].args[1], GENERATED)
            stops = tuple(handle_stop_sequences(settings.pop("until", None), eos=None))
            max_tokens = settings.pop("max_gen_toks")
            sampling = _build_sampling(settings)
            contexts = self._encode_contexts([requests[n].args[0] for n in numbers], max_tokens)
            for batch in self._generation_batches(contexts, max_tokens):
                batch_numbers.append([numbers[index] for index in batch])
                batches.append(
                    [
                        GenerationRequest(contexts[index], max_tokens, sampling, stops)
                        for index in batch
                    ]
                )
        generated = self.team.map_batches(GENERATE, batches, "generating", " texts")
        answers = [
            [until_stop(text, list(batch[0].stop_sequences), None) for text in texts]
            for batch, texts in zip(batches, generated, strict=True)
        ]
        return restore_order(batch_numbers, answers)

    def _encode_contexts(self, texts: Sequence[str], max_tokens: int) -> list[list[int]]:
        """Encode contexts, cut on the left so that `max_tokens` fit after them."""
        max_context = self.max_length - max_tokens
        if max_context < 1:
            raise InputError(
                f"a task generates {max_tokens:,} tokens, and --max-length is {self.max_length:,}",
                hint="raise --max-length",
            )
        return [(self.tok_encode(text) or [self.end])[-max_context:] for text in texts]

    def _generation_batches(
        self, contexts: Sequence[Sequence[int]], max_tokens: int
    ) -> list[list[int]]:
        """Return batches of context numbers. A model that does not isolate documents cannot pad, so
        contexts in its batches have equal lengths."""
        lengths = [len(context) + max_tokens for context in contexts]
        padded_batches = batch_by_length(lengths, self.batch_tokens)
        if self.can_pad:
            return list(padded_batches)
        batches: list[list[int]] = []
        for batch in padded_batches:
            by_length: dict[int, list[int]] = {}
            for number in batch:
                by_length.setdefault(len(contexts[number]), []).append(number)
            batches += by_length.values()
        return batches


def _build_sampling(settings: dict[str, Any]) -> Sampling:
    """Build a task's sampling: greedy, unless the task samples."""
    unknown = sorted(set(settings) - set(SAMPLING))
    if unknown:
        raise InputError(
            f"a task sets generation_kwargs.{unknown[0]}, which headrace does not know",
            hint=f"known are until, max_gen_toks, {', '.join(SAMPLING)}",
        )
    if not settings["do_sample"]:
        return Sampling(temperature=0)
    return Sampling(**{key: value for key, value in settings.items() if key != "do_sample"})


def load_tasks(names: Sequence[str], include_path: str | None) -> TaskManager:
    """Load the harness's tasks and those from a folder with YAML files, and check the names."""
    manager = TaskManager(include_path=include_path)
    for task in names:
        if task not in manager.all_tasks:
            near = nearest(task, manager.all_tasks)
            raise InputError(
                f"there is no task {task}",
                hint=(f"did you mean {near}? " if near else "")
                + "`lm_eval ls tasks` lists those of the harness; --include-path adds a folder",
            )
    return manager


def evaluate(
    team: Team,
    source: WeightSource,
    tokenizer: Tokenizer,
    config: ScoresConfig,
    manager: TaskManager,
) -> tuple[dict[str, Any], list[UserError]]:
    """Score weights that the team's ranks have loaded. Return the entry for scores.jsonl and the
    errors of failed tasks; a failure stops no further task."""
    length = context_length(source, config.max_length)
    model = HarnessModel(
        team, source.model, tokenizer, max_length=length, batch_tokens=config.batch_tokens
    )
    results: dict[str, Any] = {}
    errors: dict[str, UserError] = {}
    for task in config.tasks:
        try:
            results |= evaluate_task(model, task, config, manager)
        except LostRankError:
            raise
        except UserError as error:
            errors[task] = error
    entry = {
        "from": source.where,
        "harness": importlib.metadata.version("lm_eval"),
        "max_length": length,
        "limit": config.limit,
        "ema": config.ema,
        INCLUDE_PATH: config.include_path,
        ASKED: list(config.tasks),
        FAILED: {task: failure_reason(error) for task, error in errors.items()},
        "tasks": results,
    }
    return entry, list(errors.values())


def evaluate_task(
    model: HarnessModel, task: str, config: ScoresConfig, manager: TaskManager
) -> dict[str, Any]:
    """Compute the metrics of a task, or of a group and its tasks, by name."""
    try:
        with redirect_stdout(sys.stderr):  # the harness and tasks print notes; stdout is --json's
            evaluation = evaluator.simple_evaluate(
                model=model,
                tasks=[task],
                task_manager=manager,
                limit=config.limit,
                num_fewshot=config.num_fewshot,
                log_samples=False,
            )
    except UserError:
        raise
    except (ValueError, OSError, KeyError, TypeError, ImportError) as error:
        raise InputError(
            f"the harness failed on {task}: {type(error).__name__}: {error}",
            hint="most tasks download their data from the Hugging Face Hub at the first use; tasks "
            "of --include-path may read local files",
        ) from error
    except Exception as error:  # raised by a task's code
        raise RunError(
            f"the harness failed on {task}: {error!r}",
            where="\n" + traceback.format_exc().rstrip(),
        ) from error
    return {
        scored_task: _build_result(scored_task, metrics, evaluation)
        for scored_task, metrics in evaluation["results"].items()
    }


def _build_result(task: str, metrics: dict[str, Any], evaluation: dict[str, Any]) -> dict[str, Any]:
    """Build a task's result. Metrics keep the harness's names, such as `acc,none`."""
    return {
        "version": evaluation["versions"].get(task),
        "fewshot": evaluation["n-shot"].get(task),
        "samples": metrics["sample_len"],
        "metrics": {
            metric: float(value) if math.isfinite(value) else None
            for metric, value in metrics.items()
            if "," in metric and isinstance(value, (int, float))
        },
    }
