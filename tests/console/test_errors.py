"""Errors say what failed, where and how to fix it, and can be sent between processes."""

import pickle

import pytest

from headrace.console import errors
from headrace.console.errors import (
    ConfigError,
    ConfigProblem,
    MisuseError,
    PlanError,
    SeveralErrors,
    UserError,
    run_all,
)

KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type)
    and issubclass(kind, UserError)
    and kind not in (ConfigError, SeveralErrors)
]


def test_message_place_and_hint_are_on_separate_lines() -> None:
    error = UserError("the disk is full", where="/data", hint="free some space")
    assert str(error) == "the disk is full\n  where: /data\n  hint:  free some space"
    assert str(UserError("the disk is full")) == "the disk is full"


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_can_be_pickled(kind: type[UserError]) -> None:
    error = pickle.loads(pickle.dumps(kind("what", where="where", hint="hint")))
    assert type(error) is kind
    assert (error.message, error.where, error.hint) == ("what", "where", "hint")
    assert str(error) == str(kind("what", where="where", hint="hint"))
    assert error.args == ("what",)


def test_a_configuration_error_can_be_pickled() -> None:
    error = ConfigError("run.yaml", [ConfigProblem("lr", "is required", 3)], hint="add it")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is ConfigError
    assert str(copy) == str(error)
    assert (copy.source, copy.problems) == ("run.yaml", error.problems)


def test_problems_are_counted_and_sorted_by_line() -> None:
    error = ConfigError("run.yaml", [ConfigProblem("b", "two", 9), ConfigProblem("a", "one", 2)])
    assert str(error) == "2 problems in run.yaml\n  line 2: a: one\n  line 9: b: two"
    assert str(ConfigError("x", [ConfigProblem("", "bad")])) == "1 problem in x\n  bad"


def test_the_docstring_lists_all_errors() -> None:
    assert errors.__doc__ is not None
    for kind in [*KINDS, ConfigError]:
        assert kind.__name__ in errors.__doc__


def test_errors_of_independent_steps_are_raised_together() -> None:
    def fail(error: UserError) -> None:
        raise error

    assert run_all(lambda: 1, lambda: 2) == [1, 2]
    plan = PlanError("no rows", hint="give some")
    with pytest.raises(PlanError, match="no rows"):
        run_all(lambda: 1, lambda: fail(plan), lambda: fail(plan))
    with pytest.raises(SeveralErrors) as caught:
        run_all(lambda: fail(plan), lambda: fail(MisuseError("no word")))
    assert str(caught.value) == "no rows\n  hint:  give some\nerror: no word"
    assert caught.value.exit_code == 2
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
