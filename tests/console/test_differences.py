from __future__ import annotations

from headrace.console.differences import differences


def test_each_changed_value_is_a_line() -> None:
    before = {"phases": {"stable": {"weights": {"web": 0.7, "code": 0.3}}}}
    after = {"phases": {"stable": {"weights": {"web": 0.6, "code": 0.3, "new": 0.1}}}}
    assert list(map(str, differences(before, after, "mixture"))) == [
        "mixture.phases.stable.weights.web: 0.7 there, 0.6 here",
        "mixture.phases.stable.weights.new: None there, 0.1 here",
    ]


def test_equal_values_give_no_line() -> None:
    assert differences({"lr": 1e-3, "betas": (0.9, 0.95)}, {"lr": 1e-3, "betas": [0.9, 0.95]}) == []
