import inspect
import pickle

import pytest

from llmrl import errors
from llmrl.errors import LLMRLError, MissingDependencyError, MissingKeyError, did_you_mean

CLASSES = [
    value
    for value in vars(errors).values()
    if inspect.isclass(value) and issubclass(value, LLMRLError) and value is not LLMRLError
]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_error_is_also_a_standard_library_error_and_survives_pickling(cls):
    assert len(cls.__bases__) == 2
    assert cls.__bases__[1].__module__ == "builtins"
    assert cls.__name__ in errors.__all__
    error = pickle.loads(pickle.dumps(cls("who: what must hold: got 1, expected 2.")))
    assert type(error) is cls
    assert str(error) == "who: what must hold: got 1, expected 2."


def test_a_missing_key_error_reads_as_a_sentence():
    assert str(MissingKeyError("loss: 'a' is missing")) == "loss: 'a' is missing"  # a plain KeyError would quote it


def test_a_missing_dependency_keeps_the_module_name_through_pickling():
    error = pickle.loads(pickle.dumps(MissingDependencyError("m", name="vllm")))
    assert error.name == "vllm"


def test_near_suggests_only_what_is_close():
    assert did_you_mean("lerning_rate", ["learning_rate", "warmup"]) == " Did you mean 'learning_rate'?"
    assert did_you_mean("temperature", ["lr", "steps"]) == ""
    assert did_you_mean("lr", []) == ""
