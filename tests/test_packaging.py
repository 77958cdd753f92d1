"""An installed llmrl has everything that a checkout has."""

import shutil
import subprocess
import sys
import zipfile
from importlib import resources
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = {"llmrl": "llmrl"} | {f"llmrl.{name}": name for name in ("chat_templates", "tools", "recipes")}


def test_every_folder_with_code_is_a_package():
    for package, folder in FOLDERS.items():
        for path in (ROOT / folder).rglob("*.py"):
            assert (path.parent / "__init__.py").exists(), f"{path} would be left out of {package}"


def test_the_folders_outside_llmrl_are_linked_into_it():
    for package, folder in FOLDERS.items():
        assert (ROOT / package.replace(".", "/")).resolve() == ROOT / folder


@pytest.mark.parametrize(("package", "suffix"), [("llmrl.chat_templates", ".jinja"), ("llmrl.recipes", ".yaml")])
def test_data_files_are_found_where_they_are_installed(package, suffix):
    assert [entry for entry in resources.files(package).iterdir() if entry.name.endswith(suffix)]


def run(script: str, *arguments: str, cwd: Path) -> str:
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_wheel_holds_every_module_and_data_file_and_runs_away_from_the_checkout(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for folder in FOLDERS.values():
        shutil.copytree(ROOT / folder, source / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source / name)
    # setuptools itself, not pip: the environment may have been made without pip, and nothing is to be downloaded
    build = "import setuptools.build_meta as backend, sys; print(backend.build_wheel(sys.argv[1]))"
    run(build, str(tmp_path), cwd=source)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for package, folder in FOLDERS.items():
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".jinja", ".yaml", ".typed", ".html", ".css", ".js"):
                assert f"{package.replace('.', '/')}/{path.relative_to(ROOT / folder).as_posix()}" in names
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    script = (
        "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in repr(f).lower()]; "
        f"sys.path.insert(0, {str(site)!r}); from llmrl.run.config import recipe_names; import llmrl, llmrl.tools; "
        "print(llmrl.__file__, llmrl.tools.__file__, *recipe_names())"
    )
    package_file, tools_file, *recipes = run(script, cwd=tmp_path).split()
    assert package_file == str(site / "llmrl" / "__init__.py")
    assert tools_file == str(site / "llmrl" / "tools" / "__init__.py")
    assert recipes == sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))
