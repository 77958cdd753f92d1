import inspect
import pickle
import sys

import pytest

from llmrl import errors
from llmrl.errors import LLMRLError, MissingDependencyError, MissingKeyError, did_you_mean
from llmrl.optional import check_installed, require

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


def test_an_installed_module_is_returned_even_when_its_name_is_dotted():
    assert require("os.path", extra="none", used_by="test").join("a", "b")


def test_a_missing_package_names_the_user_and_the_extra():
    expected = r"vLLMWrapper: needs the package 'no_such_engine', .*install 'llmrl\[vllm\]'"
    with pytest.raises(MissingDependencyError, match=expected):
        require("no_such_engine.worker", extra="vllm", used_by="vLLMWrapper")


def test_a_package_is_found_without_importing_it_and_a_folder_of_its_name_is_none(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "no_such_logger").mkdir()
    (tmp_path / "broken_package.py").write_text("import a_dependency_it_lacks\n")
    check_installed("broken_package", extra="x", used_by="test")
    with pytest.raises(MissingDependencyError, match=r"log=x: .*no_such_logger"):
        check_installed("no_such_logger", extra="x", used_by="log=x")


def test_a_broken_package_shows_its_own_error(tmp_path, monkeypatch):
    (tmp_path / "broken_package.py").write_text("import a_dependency_it_lacks\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_dependency_it_lacks") as caught:
        require("broken_package", extra="x", used_by="test")
    assert not isinstance(caught.value, MissingDependencyError)
    assert "broken_package" not in sys.modules
