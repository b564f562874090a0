"""Pins that every error survives pickling and that the exit code's root, InputError, covers what users can fix.

Without it an error raised in a worker process or stored by the orchestrator would come back as another error.
"""

import inspect
import pickle

import pytest

from rollouts_core import errors

ALL_ERRORS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass)]


@pytest.mark.parametrize("kind", ALL_ERRORS)
def test_an_error_survives_pickling(kind: type[Exception]) -> None:
    restored = pickle.loads(pickle.dumps(kind("what was expected, what was found")))
    assert type(restored) is kind
    assert str(restored) == "what was expected, what was found"


@pytest.mark.parametrize("kind", ALL_ERRORS)
def test_every_error_belongs_to_the_package(kind: type[Exception]) -> None:
    assert issubclass(kind, errors.RolloutsError)


@pytest.mark.parametrize("kind", [errors.ConfigError, errors.DataError, errors.CheckpointError, errors.RewardError])
def test_what_the_user_can_fix_is_an_input_error(kind: type[Exception]) -> None:
    assert issubclass(kind, errors.InputError)


@pytest.mark.parametrize("kind", [errors.EngineError, errors.WeightSyncError, errors.TrainingError])
def test_what_the_user_cannot_fix_is_no_input_error(kind: type[Exception]) -> None:
    assert not issubclass(kind, errors.InputError)


def test_only_an_unavailable_engine_is_worth_asking_again() -> None:
    assert not issubclass(errors.WeightSyncError, errors.EngineUnavailableError)
