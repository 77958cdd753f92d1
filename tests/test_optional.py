import sys

import pytest

from llmrl.errors import MissingDependencyError
from llmrl.optional import check_installed, require


def test_an_installed_module_is_returned_even_when_its_name_is_dotted():
    assert require("os.path", extra="none", used_by="test").join("a", "b")


def test_a_missing_package_names_the_user_and_the_extra():
    with pytest.raises(MissingDependencyError, match=r"vLLMWrapper: .*no_such_engine.*install 'llmrl\[vllm\]'"):
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
