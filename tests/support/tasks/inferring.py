"""Rows and weights that ranks share: a model's scores and states, to compare with one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from headrace.dataplane.tokenizers.byte import ByteConfig, ByteTokenizer
from headrace.models.config.config import ModelConfig
from headrace.models.config.options.precision import Precision, default_precision
from headrace.models.model.generate import Sampling
from headrace.models.model.model import initial_weights
from headrace.models.weights import Weights
from headrace.trainer.checkpoints.fragments import Fragment
from headrace.trainer.engines.pieces import local
from headrace.trainer.inference import rows
from headrace.trainer.inference.embed import EMBED, Embedder, Sequences, embed
from headrace.trainer.placement.placement import Placement
from headrace.trainer.placement.ranks import RowRanks, place_ranks
from headrace.trainer.scores import answers
from headrace.trainer.scores.likelihood import ScoredRow, score_rows

SCORE = "score"


@dataclass(frozen=True)
class DrawnWeights:
    """A source of weights that were never trained."""

    model: ModelConfig
    where = "nowhere"

    def weights(self) -> Weights:
        return initial_weights(self.model, 1)

    def fill(self, fragments: Sequence[Fragment], group: dist.ProcessGroup | None) -> None:
        weights = self.weights()
        for fragment in fragments:
            fragment.take(weights[fragment.parameter])


def join(config: ModelConfig, degrees: dict[str, int], precision: Precision | None) -> RowRanks:
    """Place the model on all ranks; without degrees, on this one alone."""
    placement = Placement.choose(config, precision or default_precision("cpu"), "cpu", **degrees)
    return place_ranks(placement) if degrees else RowRanks(placement)


def compute(
    config: ModelConfig,
    degrees: dict[str, int],
    batch: Sequence[Sequence[int]],
    layers: Sequence[str],
    precision: Precision | None = None,
) -> dict[str, Any]:
    ranks = join(config, degrees, precision)
    model = ranks.load(DrawnWeights(config))
    ids = [np.array(row, np.int32) for row in batch]
    held = sum(local(weight).nbytes for weight in model.parameters())
    gathered: list[int] = []
    for block in model.typed_blocks():
        block.register_forward_pre_hook(
            lambda *_: gathered.append(
                sum(local(weight).nbytes for weight in model.parameters()) - held
            )
        )
    first, states = rows.token_states(model, layers, ids)

    def score(batch: Sequence[rows.Ids]) -> list[float]:
        return rows.score_batch(model, batch)

    team = ranks.team({SCORE: score}, idle=score)
    alone = [[row] for row in ids]  # not a multiple of the ranks
    return {
        **answer(ranks, config, batch),
        "scores": rows.score_batch(model, ids),
        "alone": team.lead(lambda: team.map_batches(SCORE, alone, "scoring", " rows")),
        "means": rows.mean_states(model, layers, ids),
        "first": first,
        "states": states,
        "held": held,
        "gathered": max(gathered),
    }


def answer(ranks: RowRanks, config: ModelConfig, batch: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Score every second token as `trainer eval` and `recall` do, and generate texts if the ranks
    can, on rank 0."""
    team = answers.rank_team(ranks, DrawnWeights(config), ByteTokenizer(ByteConfig()))
    scored = [ScoredRow(row, range(1, len(row), 2)) for row in batch]
    sampling = Sampling(temperature=0.9, seed=3)
    requests = [  # each ends after another number of tokens
        [answers.GenerationRequest(row[:length], 9, sampling, (chr(row[0]),))]
        for length, row in enumerate(batch, start=3)
    ]
    generates = answers.GENERATE in team.functions
    return {
        "tokens": team.lead(lambda: score_rows(team, scored, 70)),
        "texts": generates
        and team.lead(lambda: team.map_batches(answers.GENERATE, requests, "generating", " texts")),
    }


def embed_tokens(
    config: ModelConfig, degrees: dict[str, int], file: str, layers: Sequence[str], out: str
) -> None:
    ranks = join(config, degrees, None)
    embedder = Embedder(ranks.load(DrawnWeights(config)), layers, True, Path(out))
    team = ranks.team({EMBED: embedder}, idle=embedder.discard)
    sequences = Sequences(file, ByteTokenizer(ByteConfig()), 40, 60)
    team.lead(lambda: embed(team, sequences, Path(out), 0, 8))
