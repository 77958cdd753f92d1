"""The site of the documents is built without a warning: no broken link, no page that is left out."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_has_every_page_and_package(tmp_path):
    command = [sys.executable, "-m", "sphinx", "-b", "html", "-W", "--keep-going", "-q", "-d", tmp_path / "trees"]
    built = subprocess.run(
        [*command, "docs", tmp_path / "site"],
        cwd=ROOT,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert (built.returncode, built.stderr) == (0, "")
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert {path.stem for path in (tmp_path / "site").glob("*.html")} >= pages
    start = (tmp_path / "site/index.html").read_text()
    assert 'href="quickstart.html"' in start, "links of the README go to pages"
    losses = (tmp_path / "site/api/llmrl.objectives.llm.html").read_text()
    assert 'id="llmrl.objectives.llm.GRPOLoss.forward"' in losses
    assert "dppo" in losses
    assert "fonts.googleapis" not in start + losses
