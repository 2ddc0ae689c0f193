"""Rows that ranks share: scores and states of a model, for comparison with one process."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from headrace.dataplane.tokenizers.byte import ByteConfig, ByteTokenizer
from headrace.models.config.config import ModelConfig
from headrace.models.model.model import Model
from headrace.trainer.inference import rows
from headrace.trainer.inference.embed import EMBED, Embedder, Sequences, embed
from headrace.trainer.inference.ranks import choose_layout
from headrace.trainer.layout.groups import create_groups
from headrace.trainer.scores.team import Team


def build_model(config: ModelConfig, cp: int) -> Model:
    model = Model(config)
    model.init_weights(1)
    if cp > 1:
        layout = choose_layout(config, cp)
        model.shard(create_groups(layout, "cpu", timedelta(minutes=5)).axes)
    return model.eval()


def compute(
    config: ModelConfig, cp: int, batch: Sequence[Sequence[int]], layers: Sequence[str]
) -> dict[str, Any]:
    model = build_model(config, cp)
    ids = [np.array(row, np.int32) for row in batch]
    first, states = rows.token_states(model, layers, ids)
    return {
        "scores": rows.score_batch(model, ids),
        "means": rows.mean_states(model, layers, ids),
        "first": first,
        "states": states,
    }


def embed_tokens(config: ModelConfig, cp: int, file: str, layers: Sequence[str], out: str) -> None:
    model = build_model(config, cp)
    team = Team({EMBED: Embedder(model, layers, True, Path(out))}, members=cp)
    sequences = Sequences(file, ByteTokenizer(ByteConfig()), 40, 60)
    team.lead(lambda: embed(team, sequences, Path(out), 0, 8))
