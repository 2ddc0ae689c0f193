"""Command-line options of `tokenize`, and the configurations made from them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import click

from .builder.options import apply_options, parse_settings, pop_chat, pop_fim, pop_genome
from .executors import ExecutorKind
from .sources import CORPUS_FORMATS
from .sources.fields import FIELD_KINDS
from .sources.format import OnError, TextDocuments

if TYPE_CHECKING:
    from .builder.build import BuildConfig

T = TypeVar("T")

ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "0": "\0", "\\": "\\"}

TOKENIZER_OPTIONS = {
    "byte": ("special", "dna", "masked_weight", "max_foreign", "mask_control_tags", "mask_n_runs"),
    "bpe": ("end_of_document",),
}
"""Options that only one kind of tokenizer has."""

on_error_option = click.option(
    "--on-error",
    type=click.Choice(get_args(OnError)),
    default="fail",
    show_default=True,
    help="Stop at a bad record, or leave it out.",
)


def join_words(
    context: click.Context, option: click.Parameter, words: tuple[str, ...]
) -> str | None:
    """Callback of an option that takes names separated by commas, once or several times."""
    return ",".join(words) or None


keep_option = click.option(
    "--keep",
    multiple=True,
    callback=join_words,
    metavar="NAME[:TYPE][?],…",
    help=f"Fields or columns to keep for each document ({', '.join(FIELD_KINDS)}); ?: a record "
    "without the field has null.",
)


def special_option(kind: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the option for special-token names; its help begins with `kind`."""

    def split(context: click.Context, option: click.Parameter, words: tuple[str, ...]) -> Any:
        names = tuple(name.strip() for word in words for name in word.split(","))
        if "" in names or len(set(names)) < len(names):
            raise click.BadParameter(f"{','.join(words)!r} has an empty name, or one twice.")
        return names

    return click.option(
        "--special",
        multiple=True,
        metavar="TOKEN,…",
        callback=split,
        help=f"{kind}special tokens; may be given several times; the first one ends documents.",
    )


def screen_options(function: Any) -> Any:
    """Add the options that decide which documents stay."""
    options = [
        click.option(
            "--drop",
            multiple=True,
            metavar="LIST",
            help="Leave these documents out: ids, or input hashes and record numbers.",
        ),
        click.option(
            "--filter", metavar="MODULE:FUNCTION", help="Function that keeps or drops a document."
        ),
        click.option(
            "--filter-set",
            "filter_settings",
            multiple=True,
            metavar="NAME=VALUE",
            help="--filter: a keyword argument of the function.",
        ),
        click.option(
            "--decontaminate",
            multiple=True,
            metavar="EVALS",
            help="Leave out documents with an n-gram of these evaluations.",
        ),
        click.option(
            "--contaminated",
            type=click.Choice(["drop", "cut"]),
            help="--decontaminate: drop such documents (the default), or cut the n-grams out.",
        ),
    ]
    return evaluation_options(apply_options(options, function))


def evaluation_options(function: Any) -> Any:
    """Add the options for reading evaluations."""
    options = [
        click.option("--ngram", type=int, metavar="N", help="Words in a row that count (13)."),
        click.option(
            "--eval-fields",
            multiple=True,
            callback=join_words,
            metavar="NAME,…",
            help="Fields of evaluations (all their strings).",
        ),
        click.option(
            "--match-short",
            type=int,
            metavar="N",
            help="Look for whole documents of evaluations from N words on.",
        ),
    ]
    return apply_options(options, function)


def pop_evaluations(values: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Pop the settings for evaluations from the options' values."""
    fields = values.pop("eval_fields")
    options = {
        "ngram": values.pop("ngram"),
        "fields": None if fields is None else [name.strip() for name in fields.split(",")],
        "match_short": values.pop("match_short"),
    }
    settings = {name: value for name, value in options.items() if value is not None}
    if settings and not names:
        option = {"fields": "eval-fields"}.get(name := next(iter(settings)), name.replace("_", "-"))
        raise click.UsageError(f"--{option} needs --decontaminate")
    return {"evaluations": list(names), **settings}


def source_options(function: Any) -> Any:
    """Add the options for reading a corpus."""
    options = [
        click.option(
            "--input-format",
            default="auto",
            show_default=True,
            metavar="FORMAT",
            help=f"{', '.join(CORPUS_FORMATS)}; auto: by the endings of the files.",
        ),
        click.option("--text-field", help="Field or column of the text (text)."),
        click.option("--id-field", help="Field or column of the corpus' own document id."),
        click.option(
            "--text-documents",
            type=click.Choice(get_args(TextDocuments)),
            help="What one document of a plain text is (file).",
        ),
        click.option(
            "--separator",
            help="Separator of documents in a plain text (\\n\\n); \\n, \\t, \\r, \\0 are escapes.",
        ),
    ]
    return apply_options(options, function)


def tokenizer_options(function: Any) -> Any:
    """Add the options for tokenizing."""
    options = [
        click.option(
            "--tokenizer",
            required=True,
            metavar="byte|FILE",
            help="byte, or a tokenizer.json (a path, a URL, or hf://OWNER/NAME@COMMIT).",
        ),
        click.option("--dna", is_flag=True, help="byte: lower-case bases get a lower loss weight."),
        click.option("--masked-weight", type=float, help="--dna: this loss weight (0.1)."),
        click.option(
            "--max-foreign",
            type=float,
            help="--dna: largest share of a document that is no nucleotide sequence (0.1).",
        ),
        click.option(
            "--mask-control-tags",
            is_flag=True,
            help="byte: no loss on @, # and phylogenetic tags (|d__…|).",
        ),
        click.option(
            "--mask-n-runs",
            type=int,
            metavar="BASES",
            help="--dna: no loss on runs of so many N.",
        ),
        special_option("byte: "),
        click.option("--end-of-document", metavar="TOKEN", help="FILE: token that ends documents."),
        click.option(
            "--parse-special",
            is_flag=True,
            help="Encode special tokens found in the text as special tokens.",
        ),
        on_error_option,
    ]
    return apply_options(options, function)


def executor_options(function: Any) -> Any:
    """Add the options for running tasks."""
    options = [
        click.option(
            "--engine",
            type=click.Choice(get_args(ExecutorKind)),
            default="local",
            show_default=True,
            help="Run tasks on this machine, or on a Ray cluster.",
        ),
        click.option("--workers", type=int, help="local: number of processes (one per core)."),
        click.option("--address", help="ray: address of the cluster (started on this machine)."),
    ]
    return apply_options(options, function)


def pop_executor(values: dict[str, Any]) -> dict[str, Any]:
    """Pop the executor's settings from the options' values."""
    return {
        "kind": values.pop("engine"),
        "workers": values.pop("workers"),
        "address": values.pop("address"),
    }


def pop_source(values: dict[str, Any]) -> dict[str, Any]:
    """Pop the settings for reading the corpus from the options' values."""
    separator = values.pop("separator")
    settings = {name: values.pop(name) for name in ("text_field", "id_field", "text_documents")}
    if separator is not None:
        if settings["text_documents"] != "separator":
            raise click.UsageError("--separator needs --text-documents separator")
        settings["separator"] = _unescape("--separator", separator)
    if (kept_words := values.pop("keep", None)) is not None:
        settings["keep"] = [parse_kept_field(word) for word in kept_words.split(",")]
    if (name := values.pop("input_format")) not in ("auto", *CORPUS_FORMATS):
        known = ", ".join(CORPUS_FORMATS)
        raise click.UsageError(f"--input-format {name}: no such format; known: auto, {known}")
    return {
        "format": name,
        **{name: value for name, value in settings.items() if value is not None},
    }


def parse_kept_field(word: str) -> dict[str, Any]:
    field = word.strip()
    optional = {"optional": True} if field.endswith("?") else {}
    name, colon, kind = field.removesuffix("?").rpartition(":")
    if not colon:
        return {"name": kind, **optional}
    if kind not in FIELD_KINDS:
        known = ", ".join(FIELD_KINDS)
        raise click.UsageError(f"--keep {word}: no such type `{kind}`; known: {known}")
    return {"name": name, "type": kind, **optional}


def _pop_tokenizer(values: dict[str, Any]) -> dict[str, Any]:
    """Pop the tokenizer and its settings. An option for the other kind of tokenizer raises
    UsageError, because it would have no effect."""
    kind = "byte" if values["tokenizer"] == "byte" else "bpe"
    settings: dict[str, dict[str, Any]] = {"byte": {}, "bpe": {}}
    for option_kind, names in TOKENIZER_OPTIONS.items():
        for name in names:
            value = values.pop(name)
            if value is None or value is False or value == ():
                continue
            if option_kind != kind:
                required_tokenizer = (
                    "--tokenizer byte" if option_kind == "byte" else "a tokenizer.json"
                )
                raise click.UsageError(
                    f"--{name.replace('_', '-')} is for {required_tokenizer} only"
                )
            settings[option_kind]["special_tokens" if name == "special" else name] = value
    byte_settings = settings["byte"].keys()
    if "masked_weight" in byte_settings and "dna" not in byte_settings:
        raise click.UsageError("--masked-weight needs --dna")
    if "max_foreign" in byte_settings and not byte_settings & {"dna", "mask_control_tags"}:
        raise click.UsageError("--max-foreign needs --dna or --mask-control-tags")
    if "mask_n_runs" in byte_settings and not byte_settings & {"dna", "mask_control_tags"}:
        raise click.UsageError("--mask-n-runs needs --dna or --mask-control-tags")
    settings[kind]["parse_special"] = values.pop("parse_special")
    return {"tokenizer": values.pop("tokenizer"), kind: settings[kind]}


def build_checked(kind: type[T], data: dict[str, Any]) -> T:
    """Build a configuration from options' values; raise MisuseError if they are invalid."""
    from ..console.config import build
    from ..console.errors import ConfigError, MisuseError

    try:
        return build(kind, data, source="the command line")
    except ConfigError as error:
        raise MisuseError(error.message, hint=error.hint) from None


def _unescape(option: str, text: str) -> str:
    """Replace backslash escapes, for characters that are hard to type in a shell."""

    def letter(match: re.Match[str]) -> str:
        if match[1] not in ESCAPES:
            raise click.UsageError(
                f"{option} {text}: a backslash must be followed by n, t, r, 0 or another backslash"
            )
        return ESCAPES[match[1]]

    return re.sub(r"\\(.?)", letter, text, flags=re.DOTALL)


def build_config(values: dict[str, Any]) -> BuildConfig:
    """Build the configuration for `build`, or for `count`, which has fewer options."""
    from .builder.build import BuildConfig

    splits = _splits(values.pop("split", ()))
    if "filter_settings" in values:
        if values["filter_settings"] and values["filter"] is None:
            raise click.UsageError("--filter-set needs --filter")
        values["filter_settings"] = parse_settings("--filter-set", values["filter_settings"])
    if "decontaminate" in values:
        names, action = values.pop("decontaminate"), values.pop("contaminated")
        if action is not None and not names:
            raise click.UsageError("--contaminated needs --decontaminate")
        evaluations = pop_evaluations(values, names)
        if names:
            values |= {"decontaminate": evaluations, "contaminated": action or "drop"}
    if "fim" in values:
        values["fim"] = pop_fim(values)
    if "genome_seed" in values:
        values["genome"] = pop_genome(values)
    if "chat" in values:
        values["chat"] = pop_chat(values)
    if "shard_size" in values:
        values["shard_size"] = parse_bytes(values["shard_size"], "--shard-size")
    if values.get("shuffle_memory") is not None:
        values["shuffle_memory"] = parse_bytes(values["shuffle_memory"], "--shuffle-memory")
    data = {
        "source": pop_source(values),
        **_pop_tokenizer(values),
        "splits": splits,
        "engine": pop_executor(values),
        **values,
    }
    return build_checked(BuildConfig, data)


def _splits(words: tuple[str, ...]) -> dict[str, float]:
    from .builder.settings import check_splits

    splits: dict[str, float] = {}
    for word in words:
        name, _, fraction = word.partition("=")
        try:
            number = float(fraction)
        except ValueError:
            raise click.UsageError(
                f"--split {word}: write NAME=FRACTION, as in val=0.001"
            ) from None
        if name in splits:
            raise click.UsageError(f"--split {word}: `{name}` is given twice")
        splits[name] = number
    try:
        check_splits(splits)
    except ValueError as error:
        raise click.UsageError(f"--split: {error}") from None
    return splits


def parse_bytes(text: str, option: str) -> int:
    """Parse a size such as 64Mi or 64MB."""
    from ..console.yaml_text import size

    try:
        return size(text)
    except ValueError as error:
        raise click.UsageError(f"{option}: {error}") from None
