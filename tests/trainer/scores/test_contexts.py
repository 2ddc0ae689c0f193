"""The score of a continuation depends on its context, and not on the batch."""

from __future__ import annotations

import pytest
from lm_eval.api.instance import Instance

from headrace.dataplane.tokenizers import byte
from headrace.models.config.config import load_model_config
from headrace.models.model.model import Model
from headrace.trainer.placement.team import Team
from headrace.trainer.scores import harness
from headrace.trainer.scores.answers import batch_functions

TEXTS = [
    ("", "  wheel"),
    (" ", " wheel"),
    ("  ", "wheel"),
    ("the ", "wheel"),
    ("the mill and the ", "wheel"),
]


def test_a_blank_context_is_scored_as_an_empty_one() -> None:
    model = Model(load_model_config("tiny-transformer"))
    model.init_weights(1)
    tokenizer = byte.ByteTokenizer(byte.ByteConfig())

    def scores(texts: list[tuple[str, str]], batch_tokens: int) -> list[float]:
        team = Team(batch_functions(lambda: (model, tokenizer)))
        scorer = harness.HarnessModel(
            team, model.config, tokenizer, max_length=48, batch_tokens=batch_tokens
        )
        asked = [Instance("loglikelihood", {}, text, n) for n, text in enumerate(texts)]
        return [score for score, _ in scorer.loglikelihood(asked)]

    together, alone = scores(TEXTS, 500), scores(TEXTS, 1)
    assert together == pytest.approx(alone, abs=1e-4)
    assert together[1] == together[2] == pytest.approx(together[0], abs=1e-4)
    assert abs(together[3] - together[0]) > 1e-2, "contexts count"
