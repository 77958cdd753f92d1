"""An installed llmrl has everything that a checkout has."""

import shutil
import subprocess
import sys
import sysconfig
import zipfile
from importlib import resources
from pathlib import Path

import pytest

from tests.support.documents import EXAMPLES

ROOT = Path(__file__).parent.parent
# mypy reads what is imported, and the inner parts of torch and transformers take it a minute.
INNER = "transformers datasets sympy torch._dynamo torch._export torch._functorch torch._inductor torch._subclasses "
INNER += "torch.ao torch.distributed torch.export torch.fx torch.onnx"
MYPY_SETTINGS = f"""
[mypy]
ignore_missing_imports = True
[mypy-{",".join(f"{name}.*" for name in INNER.split())}]
follow_imports = skip
"""
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


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A copy of what is packaged, in which builds may leave files."""
    source = tmp_path_factory.mktemp("source")
    for folder in (*FOLDERS.values(), "src"):
        shutil.copytree(ROOT / folder, source / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    return source


def build(kind: str, source: Path, site: Path) -> set[str]:
    """Installs llmrl in ``site`` as pip does, from a "wheel" or "editable". Returns the names of the wheel's files."""
    # setuptools itself, not pip: the environment may have been made without pip, and nothing is to be downloaded
    script = f"import setuptools.build_meta as backend, sys; print(backend.build_{kind}(sys.argv[1]))"
    wheel = site / run(script, str(site), cwd=source).split()[-1]
    with zipfile.ZipFile(wheel) as files:
        files.extractall(site)
        return set(files.namelist())


@pytest.mark.slow
def test_a_wheel_holds_every_module_and_data_file_and_runs_away_from_the_checkout(source, tmp_path):
    names = build("wheel", source, tmp_path)
    for package, folder in FOLDERS.items():
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".jinja", ".yaml", ".typed", ".html", ".css", ".js"):
                assert f"{package.replace('.', '/')}/{path.relative_to(ROOT / folder).as_posix()}" in names
    script = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from llmrl.run.config import recipe_names; "
        "import llmrl, llmrl.tools; print(llmrl.__file__, llmrl.tools.__file__, *recipe_names())"
    )
    package_file, tools_file, *recipes = run(script, cwd=tmp_path).split()
    assert package_file == str(tmp_path / "llmrl" / "__init__.py")
    assert tools_file == str(tmp_path / "llmrl" / "tools" / "__init__.py")
    assert recipes == sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))


ELSEWHERE = ("import verifiers", "from agents import")  # packages that are not installed here


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["editable", "wheel"])
def test_type_checkers_accept_the_programs_of_the_documents(kind, source, tmp_path, tmp_path_factory):
    venv = tmp_path / "venv"
    run("import sys, venv; venv.create(sys.argv[1])", str(venv), cwd=tmp_path)
    site = next(venv.glob("lib/python*/site-packages"))
    build(kind, source, site)
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))  # whose own .pth files are not read from here
    programs = [shutil.copy(ROOT / "recipes/grpo_minimal.py", tmp_path)]
    for example in EXAMPLES:
        if example.name.endswith(".py") and not any(name in example.text for name in ELSEWHERE):
            programs.append(tmp_path / example.name)
            programs[-1].write_text(example.text)
    python, cache = str(venv / "bin/python"), tmp_path_factory.getbasetemp() / "mypy_cache"
    (tmp_path / "mypy.ini").write_text(MYPY_SETTINGS)
    for checker in (
        ["pyright", "--pythonpath", python],
        ["mypy", "--python-executable", python, "--cache-dir", str(cache)],
    ):
        command = [sys.executable, "-m", *checker, *map(str, programs)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, done.stdout + done.stderr
