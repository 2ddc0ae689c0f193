"""The drawing of a pipeline's schedule."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from headrace.console.html.gantt import LEFT, WIDTH, draw_pipeline
from headrace.trainer.layout.schedules import SCHEDULES
from headrace.trainer.layout.simulate import simulate


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("interleaved", 2)])
def test_every_pass_is_drawn_once_in_the_lane_of_its_stage(name: str, chunks: int) -> None:
    costs = {"forward": [1.0] * 2 * chunks, "backward": [2.0] * 2 * chunks}
    drawing = draw_pipeline(simulate(SCHEDULES[name].orders(2, chunks, 4), costs).spans)
    passes = re.findall(
        r'<rect class="pass (\w+)" x="([\d.]+)" y="([\d.]+)".*?width="([\d.]+)".*?'
        r"chunk (\d+), micro-batch (\d+)",
        drawing,
    )
    drawn = {(kind, int(chunk), int(micro)) for kind, *_, chunk, micro in passes}
    assert len(passes) == len(drawn) == 2 * 2 * chunks * 4
    lanes: dict[str, list[tuple[float, float]]] = {}
    for _, x, y, width, chunk, _ in passes:
        assert (float(y) > 0) == (int(chunk) % 2 == 1)
        lanes.setdefault(y, []).append((float(x), float(x) + float(width)))
    for lane in lanes.values():
        lane.sort()
        assert all(a[1] <= b[0] + 0.11 for a, b in pairwise(lane))
        assert lane[0][0] >= LEFT and lane[-1][1] <= WIDTH
