"""Command-line options of what a build does to documents, and their settings."""

from __future__ import annotations

from typing import Any, get_args

import click

from ..chat.config import FROM_TOKENIZER, SHIPPED_TEMPLATES, Learn


def apply_options(options: list[Any], function: Any) -> Any:
    """Add options to a command, in this order."""
    for option in reversed(options):
        function = option(function)
    return function


def chat_options(function: Any) -> Any:
    """Add the options for conversations."""
    options = [
        click.option(
            "--chat",
            metavar="TEMPLATE",
            help=f"Records are conversations: a Jinja file, {', '.join(SHIPPED_TEMPLATES)}, or "
            f"{FROM_TOKENIZER}.",
        ),
        click.option(
            "--chat-set",
            "chat_settings",
            multiple=True,
            metavar="NAME=VALUE",
            help="--chat: a variable of the template.",
        ),
        click.option(
            "--learn",
            type=click.Choice(get_args(Learn)),
            help="--chat: what has a loss (the turns of the assistant).",
        ),
        *_message_fields("--chat"),
    ]
    return apply_options(options, function)


def conversation_options(function: Any) -> Any:
    """Add the options for conversations whose contents are compared."""
    help_text = "Records are conversations: compare the contents of their messages."
    options = [
        click.option("--conversations", is_flag=True, help=help_text),
        *_message_fields("--conversations"),
    ]
    return apply_options(options, function)


def _message_fields(option: str) -> list[Any]:
    return [
        click.option("--messages-field", help=f"{option}: field of the messages (messages)."),
        click.option("--prompt-field", help=f"{option}: field of the user's text (prompt)."),
        click.option("--response-field", help=f"{option}: field of the answer (response)."),
    ]


def fim_options(function: Any) -> Any:
    """Add the options for fill-in-the-middle."""
    options = [
        click.option(
            "--fim",
            type=float,
            metavar="RATE",
            help="Rearrange this share of the documents for fill-in-the-middle.",
        ),
        click.option(
            "--fim-sentinels",
            metavar="PRE,SUF,MID[,EOT]",
            help="--fim: special tokens before the parts (and after the last one).",
        ),
        click.option(
            "--fim-spm",
            type=float,
            metavar="SHARE",
            help="--fim: share with the suffix first (0.5).",
        ),
        click.option(
            "--fim-seed", type=int, metavar="SEED", help="--fim: seed of the choices (0)."
        ),
    ]
    return apply_options(options, function)


def genome_options(function: Any) -> Any:
    """Add the options for genomes."""
    options = [
        click.option(
            "--window", type=int, metavar="BASES", help="Genomes: cut sequences into windows."
        ),
        click.option(
            "--stride", type=int, metavar="BASES", help="--window: from one to the next (BASES)."
        ),
        click.option(
            "--reverse-complement",
            metavar="both|SHARE",
            help="Genomes: also the other strand, or it alone of this share of the documents.",
        ),
        click.option(
            "--transcribe",
            type=click.Choice(("rna", "dna")),
            help="Genomes: write U for T (rna), or T for U (dna).",
        ),
        click.option(
            "--drop-n-runs",
            type=int,
            metavar="BASES",
            help="Genomes: leave out documents with a run of so many N.",
        ),
        click.option(
            "--lineages",
            metavar="FILE",
            help="Genomes: tags |d__…;p__…| before documents; lines of an id, a tab, a lineage.",
        ),
        click.option(
            "--lineage-dropout", type=float, metavar="SHARE", help="--lineages: ranks to leave out."
        ),
        click.option(
            "--lineage-every",
            type=int,
            metavar="BASES",
            help="--lineages: repeat the tag after so many bases (131072).",
        ),
        click.option(
            "--split-groups",
            "groups",
            metavar="FILE",
            help="--split: keep groups whole; lines of an id, a tab, a group or a split.",
        ),
        click.option(
            "--genome-seed", type=int, metavar="SEED", help="Seed of strands and dropout (0)."
        ),
    ]
    return apply_options(options, function)


def pop_genome(values: dict[str, Any]) -> dict[str, Any] | None:
    """Pop the settings for genomes from the options' values."""
    names = ["window", "stride", "lineages", "lineage_dropout", "lineage_every", "groups"]
    names += ["transcribe", "drop_n_runs"]
    settings = {name: values.pop(name) for name in names}
    settings["seed"], strands = values.pop("genome_seed"), values.pop("reverse_complement")
    if strands not in (None, "both"):
        try:
            strands = float(strands)
        except ValueError:
            raise click.UsageError(
                f"--reverse-complement {strands}: write both, or a share such as 0.5"
            ) from None
    settings["reverse_complement"] = strands
    settings = {name: value for name, value in settings.items() if value is not None}
    if settings.keys() == {"seed"}:
        raise click.UsageError("--genome-seed needs --reverse-complement or --lineage-dropout")
    return settings or None


def pop_chat(values: dict[str, Any]) -> dict[str, Any] | None:
    """Pop the settings for conversations from the options' values."""
    fields = _pop_fields(values)
    words, learn = values.pop("chat_settings"), values.pop("learn")
    if values["chat"] is None:
        flags = [f"{name}-field" for name in fields]
        flags += ["chat-set"] * bool(words) + ["learn"] * (learn is not None)
        if flags:
            raise click.UsageError(f"--{flags[0]} needs --chat")
        return None
    data = {"template": values["chat"], "fields": fields}
    data["variables"] = parse_settings("--chat-set", words)
    return data if learn is None else {**data, "learn": learn}


def pop_conversation_fields(values: dict[str, Any]) -> dict[str, str] | None:
    """Pop the fields that hold conversations from the options' values."""
    fields = _pop_fields(values)
    if values.pop("conversations"):
        return fields
    for name in fields:
        raise click.UsageError(f"--{name}-field needs --conversations")
    return None


def _pop_fields(values: dict[str, Any]) -> dict[str, str]:
    fields = {name: values.pop(f"{name}_field") for name in ("messages", "prompt", "response")}
    return {name: value for name, value in fields.items() if value is not None}


def pop_fim(values: dict[str, Any]) -> dict[str, Any] | None:
    """Pop the settings for fill-in-the-middle from the options' values."""
    names = ("sentinels", "spm", "seed")
    settings = {name: values.pop(f"fim_{name}") for name in names}
    settings = {name: value for name, value in settings.items() if value is not None}
    if values["fim"] is None:
        if settings:
            raise click.UsageError(f"--fim-{next(iter(settings))} needs --fim")
        return None
    if "sentinels" not in settings:
        raise click.UsageError(
            "--fim needs --fim-sentinels PRE,SUF,MID: special tokens of the tokenizer, as in "
            "'<|fim_prefix|>,<|fim_suffix|>,<|fim_middle|>'"
        )
    return {"rate": values["fim"], **settings, "sentinels": settings["sentinels"].split(",")}


def parse_settings(option: str, words: tuple[str, ...]) -> dict[str, Any]:
    """Parse the values NAME=VALUE of a repeated option."""
    from ...console.yaml_text import value

    settings: dict[str, Any] = {}
    for word in words:
        name, sign, text = word.partition("=")
        if not sign or not name.isidentifier() or name in settings:
            raise click.UsageError(f"{option} {word}: write NAME=VALUE, each name once")
        try:
            settings[name] = value(text, name) if text else ""
        except ValueError as error:
            raise click.UsageError(f"{option} {word}: {error}") from None
    return settings
