"""The commands `mixtures prove` and `mixtures verify`."""

from __future__ import annotations

import click

from ...console import command


@click.command(cls=command.Command)
@click.argument("run")
@click.option("--document", metavar="ID", help="Prove where it stood: its id, or `number:N`.")
@click.option("--source", metavar="NAME", help="The document's source.")
@click.option(
    "--step",
    type=click.IntRange(min=1),
    help="Of the weights after so many steps, as a checkpoint is named [the newest].",
)
@click.option("--out", metavar="PROOF.json", type=click.Path(), help="Write the proof there.")
@command.json_option
def prove(
    run: str,
    document: str | None,
    source: str | None,
    step: int | None,
    out: str | None,
    as_json: bool,
) -> None:
    """Commit to a run, or prove in which of its rows a document stood.

    Without --document: print the hash of the plan and of the ledger so far. Publish it: a later
    proof holds against everybody who trusts that you published it then.

    \b
    Examples:
      mixtures prove runs/first
      mixtures prove runs/first --document web-17 --out proof.json
      mixtures verify proof.json

    More: docs/mixtures.md, section Prove
    """
    from ...dataplane.runlog import ledger
    from .proof import open_run, prove_document

    if (document is None) != (out is None):
        raise click.UsageError("give --document and --out together")
    if document is None or out is None:
        opened, newest = open_run(run, step)
        commitment = ledger.commit(str(opened.ledger), opened.plan.learnt_hash, newest.step)
        if as_json:
            command.emit({"run": run, "step": newest.step, "commitment": commitment})
        else:
            click.echo(f"{commitment}  {run}, through step {newest.step:,}")
        return
    proof = prove_document(run, document, source, step)
    size = proof.save(out)
    rows = len({exposure["row"] for exposure in proof.answer["exposures"]})
    command.say(
        f"wrote {out} ({size:,} bytes): {rows:,} row{'s' * (rows != 1)} through step "
        f"{proof.step:,} hold the document; trust {proof.commitment}"
    )
    if as_json:
        command.emit({"file": out, "rows": rows, "commitment": proof.commitment})


@click.command(cls=command.Command)
@click.argument("file", metavar="PROOF.json", type=click.Path())
@click.option("--run", metavar="FOLDER", help="Folder or URL of plan.json and ledger.jsonl.")
@click.option("--data", metavar="URL", help="Dataset with manifest.json and tables.")
@click.option("--trust", metavar="HASH", help="The commitment that the run's owner published.")
@command.json_option
def verify(file: str, run: str | None, data: str | None, trust: str | None, as_json: bool) -> None:
    """Check a proof of `mixtures prove`, without a shard.

    It needs the run's plan and ledger, and the dataset's manifest and tables.

    \b
    Example:
      mixtures verify proof.json --run published/run --data published/web --trust 5d0c…

    More: docs/mixtures.md, section Prove
    """
    from .proof import DocumentProof
    from .verify import verify_proof

    proof = DocumentProof.load(file)
    verify_proof(proof, run=run, data=data, trusted=trust)
    answer, exposures = proof.answer, proof.answer["exposures"]
    rows = sorted({exposure["row"] for exposure in exposures})
    if as_json:
        trusted = {"commitment": proof.commitment, "is_trusted": trust is not None}
        command.emit({**trusted, "through_step": proof.step, "answer": answer})
        return
    id = "" if answer["id"] is None else f" ({answer['id']})"
    steps = ", ".join(f"{step.step:,}" for step in proof.steps)
    stood = f"in rows {', '.join(map(str, rows))} (steps {steps})" if rows else "in no row"
    click.echo(
        f"document {answer['document']:,}{id} of {answer['source']}, {answer['tokens']:,} tokens: "
        f"{stood}{', and in no other' if rows else ''}, through step {proof.step:,} of the plan "
        f"{proof.plan}"
    )
    command.say(
        f"the commitment is the trusted one: {trust}"
        if trust
        else f"this holds if the run's owner published the commitment {proof.commitment}"
    )
