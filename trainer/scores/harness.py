"""Our models behind the LM interface of lm-evaluation-harness (extra `headrace[eval]`).

Texts are encoded, cut and scored as the harness's own `hf` class does it, so that a model has the
same scores here and in transformers.
"""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from lm_eval.models.utils import postprocess_generated_text as until_stop
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from ...console.errors import InputError
from ...console.explain import nearest
from ...console.progress import Progress
from ...dataplane.tokenizers import TextError
from ...models.generate import Sampling, generate
from ...models.model import Model
from .likelihood import Row, batches, score

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

    from ...dataplane.tokenizers import Tokenizer

GENERATED = 256
"""Most tokens of an answer, for tasks that do not say; also that of the harness's `hf` class."""
SAMPLING = ("do_sample", "temperature", "top_k", "top_p")
"""Settings of a task's `generation_kwargs` that the choice of a token depends on."""


class HarnessModel(TemplateLM):  # type: ignore[misc]  # the harness has no types
    """A model and its tokenizer, as the harness calls them."""

    def __init__(
        self, model: Model, tokenizer: Tokenizer, *, max_length: int, batch_tokens: int
    ) -> None:
        super().__init__()
        self.model = model
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
        gives."""
        rows = []
        for _texts, context, continuation in requests:
            if len(continuation) > self.max_length:
                raise InputError(
                    f"a continuation has {len(continuation):,} tokens, more than --max-length "
                    f"{self.max_length:,}",
                    hint="raise --max-length",
                )
            ids = [*context, *continuation][-self.max_length - 1 :]
            rows.append(Row(ids, range(len(ids) - len(continuation), len(ids))))
        scores = score(self.model, rows, self.batch_tokens)
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
        texts: dict[int, str] = {}
        with Progress("generating", total=len(requests), unit=" texts") as progress:
            for numbers in alike.values():
                settings = normalize_gen_kwargs(requests[numbers[0]].args[1], GENERATED)
                until = handle_stop_sequences(settings.pop("until", None), eos=None)
                tokens = settings.pop("max_gen_toks")
                sampling = _sampling(settings)
                contexts = self._contexts([requests[n].args[0] for n in numbers], tokens)
                for batch in self._generation_batches(contexts, tokens):
                    answers = self._generate([contexts[n] for n in batch], tokens, sampling)
                    for place, answer in zip(batch, answers, strict=True):
                        texts[numbers[place]] = until_stop(answer, until, None)
                    progress.advance(len(batch))
        return [texts[number] for number in range(len(requests))]

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
        if self.model.config.isolate_documents:
            return list(made)
        cut: list[list[int]] = []
        for batch in made:
            by_length: dict[int, list[int]] = {}
            for number in batch:
                by_length.setdefault(len(contexts[number]), []).append(number)
            cut += by_length.values()
        return cut

    def _generate(
        self, contexts: Sequence[Sequence[int]], tokens: int, sampling: Sampling
    ) -> list[str]:
        vocabulary = self.text.info.vocab_size
        generated = generate(
            self.model, contexts, tokens, sampling=sampling, stop=self.end, vocab_size=vocabulary
        )
        return [
            self.text.decode(ids[:-1] if ids and ids[-1] == self.end else ids) for ids in generated
        ]


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
    model: HarnessModel,
    names: Sequence[str],
    tasks: TaskManager,
    *,
    limit: int | None,
    fewshot: int | None,
) -> dict[str, Any]:
    """Return the metrics of each task and group."""
    try:
        found = simple_evaluate(
            model=model,
            tasks=list(names),
            task_manager=tasks,
            limit=limit,
            num_fewshot=fewshot,
            log_samples=False,
        )
    except (ValueError, OSError, KeyError, TypeError, ImportError) as error:
        raise InputError(
            f"the harness failed on {', '.join(names)}: {type(error).__name__}: {error}",
            hint="most tasks download their data from the Hugging Face Hub at the first use; tasks "
            "of --include-path may read local files",
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


def version() -> str:
    return importlib.metadata.version("lm_eval")
