"""The page in a real browser: what is drawn, and what cursor, keyboard and switches do."""

from __future__ import annotations

import json
import math
import threading
from itertools import pairwise

import pytest

import llmrl.report.watch as watch_module
from llmrl.report import write_report
from llmrl.report.comparison import compare
from llmrl.report.watch import ReportServer
from tests.support.processes import wait_until
from tests.support.runs import evaluation, make_run

pytestmark = pytest.mark.slow
HOSTILE = "</script><img src=x onerror=alert(1)>\u202egnp\ud800"


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    changes = {"curriculum/level": lambda x: float(x > 0.5)}
    return write_report(make_run(tmp_path_factory.mktemp("run") / "try1", changes=changes, rollouts=3).path)


def chart(page, title):
    return page.locator("article.chart").filter(has=page.get_by_role("heading", name=title, exact=True))


def test_every_chart_is_drawn_inside_its_box(open_page, report):
    page = open_page(report)
    assert page.title() == "try1 · llmrl"
    assert page.locator("article.chart").count() >= 10
    assert "Constant:" in page.locator("#constant").inner_text()
    faults = page.evaluate("""() => [...document.querySelectorAll("svg.plot")].filter((plot) => {
        const paths = [...plot.querySelectorAll("path.line, path.area")].map((path) => path.getAttribute("d"));
        return !paths.length || paths.some((d) => !d || /NaN|Infinity/.test(d));
    }).map((plot) => plot.getAttribute("aria-label"))""")
    assert faults == []
    assert chart(page, "Evaluation: sums").locator("path.whisker").count() == 3
    assert chart(page, "Time per step").locator("path.area").count() == 5
    assert chart(page, "Reward").locator("path.band").count() == 1
    assert chart(page, "Reward").locator("text.event").all_text_contents() == ["level 1"]
    assert chart(page, "Entropy").locator("line.event").count() == 0
    assert page.locator("#rollouts").inner_text().strip()
    assert page.get_by_role("cell", name="optim.lr", exact=True).first.is_visible()


def test_the_pointer_shows_one_step_in_all_charts(open_page, report):
    page = open_page(report)
    plot = chart(page, "Reward").locator("svg.plot")
    box = plot.bounding_box()
    page.mouse.move(box["x"] + 52 + (box["width"] - 64) / 2, box["y"] + 80)
    at = chart(page, "Reward").locator(".at")
    wait_until(lambda: at.inner_text() != "")
    said = {chart(page, title).locator(".at").inner_text() for title in ("Reward", "Entropy", "Time per step")}
    assert said in ({"step 20"}, {"step 21"})
    assert chart(page, "Evaluation: sums").locator(".at").inner_text() == "step 20", "the nearest that it has"
    assert chart(page, "Time per step").locator(".legend").inner_text().split()[:3] == ["generate", "4", "s"]
    assert chart(page, "KL").locator("line.cursor").get_attribute("visibility") == "visible"
    page.mouse.move(5, 5)
    wait_until(lambda: at.inner_text() == "")


def test_the_keyboard_moves_the_cursor_and_says_the_values(open_page, report):
    page = open_page(report)
    plot = chart(page, "KL").locator("svg.plot")
    plot.focus()
    for key, said in {"Home": "step 1:", "ArrowRight": "step 2:", "PageDown": "step 1:", "End": "step 40:"}.items():
        page.keyboard.press(key)
        wait_until(lambda said=said: plot.get_attribute("aria-valuetext").startswith(said))
    assert plot.get_attribute("aria-valuetext").startswith("step 40: from the reference ")
    assert (plot.get_attribute("role"), plot.get_attribute("aria-valuemax")) == ("slider", "40")


def test_a_stretch_is_shown_by_dragging_and_all_of_it_again(open_page, report):
    page = open_page(report)
    plot = chart(page, "Reward").locator("svg.plot")
    box = plot.bounding_box()
    page.mouse.move(box["x"] + 100, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + 160, box["y"] + 60)
    page.mouse.up()
    wait_until(page.get_by_role("button", name="all steps").is_visible)
    plot.focus()
    page.keyboard.press("Home")
    wait_until(lambda: 1 < int(plot.get_attribute("aria-valuenow")) < 20)
    page.get_by_role("button", name="all steps").click()
    plot.focus()
    page.keyboard.press("Home")
    wait_until(lambda: plot.get_attribute("aria-valuenow") == "1")


def test_the_logarithmic_scale_and_smoothing_are_switches(open_page, report):
    page = open_page(report)
    plot = chart(page, "KL").locator("svg.plot")
    linear = plot.locator("path.line").last.get_attribute("d")
    button = page.get_by_role("button", name="log scale")
    button.press("Enter")
    assert button.get_attribute("aria-pressed") == "true"
    assert plot.get_attribute("data-scale") == "log"
    heights = [float(point.split(" ")[1]) for point in plot.locator("path.line").last.get_attribute("d")[1:].split("L")]
    steps = [below - above for below, above in pairwise(heights)]
    assert max(steps) - min(steps) < 0.3, "an exponential is a straight line"
    assert chart(page, "Time per step").locator("svg.plot").get_attribute("data-scale") == "linear"
    button.press("Enter")
    assert plot.locator("path.line").last.get_attribute("d") == linear
    page.get_by_label("smoothing").fill("0.9")
    assert plot.locator("path.line").count() == 4, "each line raw and smoothed"
    assert plot.locator("path.line.raw").last.get_attribute("d") == linear


def test_colours_follow_the_system_and_the_switch(open_page, report):
    background = "getComputedStyle(document.body).backgroundColor"
    light, dark = open_page(report), open_page(report, scheme="dark")
    assert light.evaluate(background) == "rgb(251, 251, 250)"
    assert dark.evaluate(background) == "rgb(20, 23, 27)"
    dark.get_by_role("button", name="switch to light colours").press("Enter")
    assert dark.evaluate(background) == light.evaluate(background)
    dark.reload()
    assert dark.evaluate(background) == light.evaluate(background), "it is remembered"


def test_nothing_is_wider_than_a_narrow_screen(open_page, report):
    page = open_page(report, width=360)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_text_of_a_run_is_text(open_page, tmp_path):
    run = make_run(tmp_path / "a", 3)
    row = {"step": 4, f"reward/{HOSTILE}/mean": 1.0, HOSTILE: 2.0, "policy/loss": 0.1}
    run.metrics.write_text(run.metrics.read_text() + json.dumps(row) + "\n")
    run.write_info({**run.read_info(), "recipe": HOSTILE, "plan": [[HOSTILE, HOSTILE]]})
    page = open_page(write_report(run.path))
    assert page.locator("img").count() == 0
    said = page.locator("#subtitle").inner_text()
    assert "<img src=x onerror=alert(1)>[U+202E]gnp[U+D800]" in said
    assert "\u202e" not in page.locator("body").inner_text()


def test_a_run_without_steps_and_one_of_a_single_step_have_pages(open_page, tmp_path):
    (tmp_path / "empty").mkdir()
    page = open_page(write_report(tmp_path / "empty"))
    assert "No step is finished yet." in page.locator("body").inner_text()
    page = open_page(write_report(make_run(tmp_path / "one", 1).path))
    assert chart(page, "Reward").locator("circle").count() == 1


def test_compared_runs_have_a_line_each(open_page, tmp_path):
    runs = [make_run(tmp_path / name, steps).path for name, steps in (("a", 20), ("b", 30))]
    compare(runs, html=tmp_path / "both.html")
    page = open_page(tmp_path / "both.html")
    assert chart(page, "Reward").locator(".plot path.line").count() == 2
    assert chart(page, "Reward").locator(".legend span").all_inner_texts()[0].startswith("a")
    assert chart(page, "Evaluation: sums").locator("path.whisker").count() == 6


def test_a_watched_page_gets_new_steps_by_itself(open_page, tmp_path, monkeypatch):
    monkeypatch.setattr(watch_module, "SHARE", math.inf)
    run = make_run(tmp_path / "a", 3)
    server = ReportServer(run.path)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        page = open_page(server.url)
        page.get_by_text("All metrics").click()
        assert page.locator(".card .value").first.inner_text() == "0.5 → 0.9"
        with run.metrics.open("a") as file:
            file.write(json.dumps({"step": 4, **evaluation(0.75)}) + "\n")
        wait_until(lambda: page.locator(".card .value").first.inner_text() == "0.5 → 0.75")
        assert page.locator("details").last.get_attribute("open") is not None, "what was opened stays open"
    finally:
        server.shutdown()
        server.server_close()
        page.goto("about:blank")
