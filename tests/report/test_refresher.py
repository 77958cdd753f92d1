"""The report of a run that trains: begun now and then in a process of its own, and never in the way."""

from __future__ import annotations

import pytest

import llmrl.report.refresher as module
from llmrl.report.refresher import ReportRefresher
from tests.support.processes import wait_until
from tests.support.runs import make_run


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(module, "PAUSE_S", 0.0)


def finish(refresher):
    """Waits for the process; the next `refresh` takes its result."""
    process = refresher._process
    wait_until(lambda: process.poll() is not None)
    return process


def test_a_page_is_written_beside_the_run_one_at_a_time_and_for_a_small_share_of_the_time(tmp_path, at_once):
    run, warnings = make_run(tmp_path / "a", 3), []
    with ReportRefresher(run.path, warnings.append) as refresher:
        refresher.refresh()
        first = refresher._process
        refresher.refresh()
        assert refresher._process is first, "one at a time"
        finish(refresher)
        assert (run.path / "report.html").is_file()
        began = refresher._began
        assert refresher._finished(first)
        assert refresher._next - began > 1, "a hundred times the seconds of a start of Python at least"
    assert warnings == []


def test_no_page_is_begun_in_the_first_half_minute_and_the_end_writes_one(tmp_path):
    run = make_run(tmp_path / "a", 3)
    with ReportRefresher(run.path, pytest.fail) as refresher:
        refresher.refresh()
        assert refresher._process is None
        assert not (run.path / "report.html").exists()
    assert (run.path / "report.html").is_file()


def test_a_failure_is_one_warning_and_no_error(tmp_path, at_once):
    run, warnings = make_run(tmp_path / "a", 3), []
    run.metrics.write_text("damaged\n" + run.metrics.read_text())
    with ReportRefresher(run.path, warnings.append) as refresher:
        refresher.refresh()
        assert refresher._finished(finish(refresher))
    assert len(warnings) == 2, "of the process, and of the end"
    for warning in warnings:
        assert "report.html was not written: " in warning
        assert "metrics.jsonl:1: must be a JSON object" in warning


def test_a_process_that_hangs_is_killed_at_its_deadline(tmp_path, at_once, monkeypatch):
    run, warnings = make_run(tmp_path / "a", 3), []
    monkeypatch.setattr(module, "DEADLINE_S", 0.0)
    monkeypatch.setattr(module, "_SCRIPT", "import time; time.sleep(600)")
    with ReportRefresher(run.path, warnings.append) as refresher:
        refresher.refresh()
        refresher.refresh()
        finish(refresher)
        refresher.refresh()
        assert "ended by signal 9" in warnings[0]


def test_the_end_does_not_wait_for_an_older_page(tmp_path, at_once, monkeypatch):
    run = make_run(tmp_path / "a", 3)
    monkeypatch.setattr(module, "_SCRIPT", "import time; time.sleep(600)")
    with ReportRefresher(run.path, pytest.fail) as refresher:
        refresher.refresh()
        process = refresher._process
    assert process.returncode == -9
    assert (run.path / "report.html").is_file()
