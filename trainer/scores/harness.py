"""Our models behind the LM interface of lm-evaluation-harness (extra `headrace[eval]`).

Texts are encoded, cut and scored as the harness's own `hf` class does it, so that a model has the
same scores here and in transformers.
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

from ...console.errors import InputError, RunError, UserError
from ...console.explain import nearest
from ...console.log import can_rewrite_lines
from ...dataplane.tokenizers import TextError
from ...models.model.generate import Sampling
from ..cluster.lost_ranks import LostRankError
from ..weights.source import WeightSource
from .answers import GENERATE, Question
from .config import ScoresConfig
from .index import build_index
from .likelihood import Row, batches, in_order, score
from .missing import ASKED, FAILED, INCLUDE_PATH, reason
from .records import context_length
from .team import Team

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

    from ...dataplane.tokenizers import Tokenizer
    from ...models.config.config import ModelConfig

GENERATED = 256
"""Most tokens of an answer, for tasks that do not say; also that of the harness's `hf` class."""
SAMPLING = ("do_sample", "temperature", "top_k", "top_p")
"""Settings of a task's `generation_kwargs` that the choice of a token depends on."""

# The harness asks git and the machine for facts that no entry keeps. Outside a repository git
# writes an error, as if the scores had failed.
evaluator.get_git_commit_hash = evaluator.add_env_info = lambda *facts: None

TaskIndex.build = staticmethod(build_index)

DEFAULTS = ("using default", "using preconfigured rule")
"""Words of the harness's warnings that say what it took where the YAML of a task is silent."""

# Whoever scores weights did not write the task, and cannot act on them.
logging.getLogger(lm_eval.api.task.__name__).addFilter(
    lambda record: not any(words in record.getMessage() for words in DEFAULTS)
)

if not can_rewrite_lines(sys.stderr):  # each step of a bar would be a line; ours is one a minute
    lm_eval.api.model.tqdm = lm_eval.api.task.tqdm = lambda items, **how: items
    datasets.disable_progress_bars()


class HarnessModel(TemplateLM):  # type: ignore[misc]  # the harness has no types
    """A model and its tokenizer, as the harness calls them."""

    def __init__(
        self,
        team: Team,
        model: ModelConfig,
        tokenizer: Tokenizer,
        *,
        max_length: int,
        batch_tokens: int,
    ) -> None:
        """`team` has the works of `works_of`, in answers.py."""
        super().__init__()
        self.team = team
        self.pads = model.isolate_documents
        self.text = tokenizer
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
        """The token before every text: the harness's `prefix_token_id` too."""
        return self.end

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: object
    ) -> list[int]:
        """Return the ids of a text. No token is put around it, whatever `add_special_tokens`."""
        try:
            encoded = self.text.encode([string])
        except TextError as error:
            raise InputError(
                f"a text of the tasks cannot be tokenized ({error.why}): {string[:80]!r}",
                hint="choose tasks in the alphabet of the model's training data",
            ) from None
        ((first, last),) = pairwise(encoded.starts.tolist())
        ids: list[int] = encoded.tokens[first : last - 1].tolist()
        return ids

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: object
    ) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation, and whether it is what greedy generation
        gives. A context without tokens (the harness moves the blanks at its end into the
        continuation) is scored as an empty one."""
        rows = []
        for _texts, context, continuation in requests:
            if len(continuation) > self.max_length:
                raise InputError(
                    f"a continuation has {len(continuation):,} tokens, more than --max-length "
                    f"{self.max_length:,}",
                    hint="raise --max-length",
                )
            ids = [*(context or [self.end]), *continuation][-self.max_length - 1 :]
            rows.append(Row(ids, range(len(ids) - len(continuation), len(ids))))
        scores = score(self.team, rows, self.batch_tokens)
        return [(each.total, all(each.likeliest)) for each in scores]

    def loglikelihood_rolling(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-likelihood of each whole text; long texts are cut into windows."""
        windows = []
        owners = []
        for number, request in enumerate(requests):
            (text,) = request.args
            cut = get_rolling_token_windows(
                self.tok_encode(text), self.end, max_seq_len=self.max_length, context_len=1
            )
            for context, continuation in map(make_disjoint_window, cut):
                windows.append((None, context, continuation))
                owners.append(number)
        totals = [0.0] * len(requests)
        for number, (total, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[number] += total
        return totals

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the text that follows each context, up to the first stop sequence."""
        alike: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            alike.setdefault(repr(request.args[1]), []).append(number)
        cut: list[list[int]] = []
        questions: list[list[Question]] = []
        for numbers in alike.values():
            settings = normalize_gen_kwargs(requests[numbers[0]].args[1], GENERATED)
            until = tuple(handle_stop_sequences(settings.pop("until", None), eos=None))
            tokens = settings.pop("max_gen_toks")
            how = {"tokens": tokens, "sampling": _sampling(settings), "until": until}
            contexts = self._contexts([requests[n].args[0] for n in numbers], tokens)
            for batch in self._generation_batches(contexts, tokens):
                cut.append([numbers[place] for place in batch])
                questions.append([Question(contexts[place], **how) for place in batch])
        answers = self.team.ask(GENERATE, questions, "generating", " texts")
        found = [
            [until_stop(text, list(asked[0].until), None) for text in texts]
            for asked, texts in zip(questions, answers, strict=True)
        ]
        return in_order(cut, found)

    def _contexts(self, texts: Sequence[str], tokens: int) -> list[list[int]]:
        """Return the ids of contexts, cut on the left so that the answer has room."""
        room = self.max_length - tokens
        if room < 1:
            raise InputError(
                f"a task generates {tokens:,} tokens, and --max-length is {self.max_length:,}",
                hint="raise --max-length",
            )
        return [(self.tok_encode(text) or [self.end])[-room:] for text in texts]

    def _generation_batches(
        self, contexts: Sequence[Sequence[int]], tokens: int
    ) -> list[list[int]]:
        """Return the numbers of the contexts of each batch. A model that does not isolate documents
        cannot pad, so its batches hold contexts of one length."""
        made = batches([len(context) + tokens for context in contexts], self.batch_tokens)
        if self.pads:
            return list(made)
        cut: list[list[int]] = []
        for batch in made:
            by_length: dict[int, list[int]] = {}
            for number in batch:
                by_length.setdefault(len(contexts[number]), []).append(number)
            cut += by_length.values()
        return cut


def _sampling(settings: dict[str, Any]) -> Sampling:
    """Return the sampling of a task; greedy, if it does not sample."""
    unknown = sorted(set(settings) - set(SAMPLING))
    if unknown:
        raise InputError(
            f"a task sets generation_kwargs.{unknown[0]}, which headrace does not know",
            hint=f"known are until, max_gen_toks, {', '.join(SAMPLING)}",
        )
    if not settings["do_sample"]:
        return Sampling(temperature=0)
    chosen = {name: value for name, value in settings.items() if name != "do_sample"}
    return Sampling(**chosen)


def load_tasks(names: Sequence[str], include_path: str | None) -> TaskManager:
    """Return the harness's tasks, with those of a folder of YAML files; check the names."""
    tasks = TaskManager(include_path=include_path)
    for name in names:
        if name not in tasks.all_tasks:
            near = nearest(name, tasks.all_tasks)
            raise InputError(
                f"there is no task {name}",
                hint=(f"did you mean {near}? " if near else "")
                + "`lm_eval ls tasks` lists those of the harness; --include-path adds a folder",
            )
    return tasks


def evaluate(
    team: Team, source: WeightSource, tokenizer: Tokenizer, config: ScoresConfig, tasks: TaskManager
) -> tuple[dict[str, Any], list[UserError]]:
    """Score weights, which the ranks of the team have. Return the entry of scores.jsonl, and the
    errors of tasks that failed: the others are scored."""
    length = context_length(source, config.max_length)
    model = HarnessModel(
        team, source.model, tokenizer, max_length=length, batch_tokens=config.batch_tokens
    )
    found: dict[str, Any] = {}
    errors: dict[str, UserError] = {}
    for name in config.tasks:
        try:
            found |= metrics_of(model, name, config, tasks)
        except LostRankError:
            raise
        except UserError as error:
            errors[name] = error
    entry = {
        "from": source.where,
        "harness": importlib.metadata.version("lm_eval"),
        "max_length": length,
        "limit": config.limit,
        "ema": config.ema,
        INCLUDE_PATH: config.include_path,
        ASKED: list(config.tasks),
        FAILED: {name: reason(error) for name, error in errors.items()},
        "tasks": found,
    }
    return entry, list(errors.values())


def metrics_of(
    model: HarnessModel, name: str, config: ScoresConfig, tasks: TaskManager
) -> dict[str, Any]:
    """Return the metrics of a task, or of a group and its tasks."""
    try:
        with redirect_stdout(sys.stderr):  # of --json: the harness and tasks print notes
            found = evaluator.simple_evaluate(
                model=model,
                tasks=[name],
                task_manager=tasks,
                limit=config.limit,
                num_fewshot=config.num_fewshot,
                log_samples=False,
            )
    except UserError:
        raise
    except (ValueError, OSError, KeyError, TypeError, ImportError) as error:
        raise InputError(
            f"the harness failed on {name}: {type(error).__name__}: {error}",
            hint="most tasks download their data from the Hugging Face Hub at the first use; tasks "
            "of --include-path may read local files",
        ) from error
    except Exception as error:  # code of a task
        raise RunError(
            f"the harness failed on {name}: {error!r}",
            where="\n" + traceback.format_exc().rstrip(),
        ) from error
    return {name: _entry(name, metrics, found) for name, metrics in found["results"].items()}


def _entry(name: str, metrics: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Return the entry of one task: the harness's names of metrics, `acc,none` and the like."""
    return {
        "version": found["versions"].get(name),
        "fewshot": found["n-shot"].get(name),
        "samples": metrics["sample_len"],
        "metrics": {
            metric: float(value) if math.isfinite(value) else None
            for metric, value in metrics.items()
            if "," in metric and isinstance(value, (int, float))
        },
    }
