"""Times the rollout viewer of a run's report in Chromium, with 10,000 rollouts: opening and interactions.

    python scripts/bench/bench_rollout_viewer.py [--repeats 7] [--json FILE]

Each figure is the median of the repeats: from opening the page until it is drawn, or from an event until the changed
page is laid out. Needs llmrl[browser].
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
from importlib.util import find_spec
from pathlib import Path

from table import Row, benchmark

from llmrl.tools.browser import find_chromium

ASSETS = Path(__file__).parents[2] / "llmrl" / "report" / "assets"
ROLLOUTS, TARGET_MS, OPEN_MS = 10_000, 100.0, 1000.0
WORDS = ("the", "sum", "of", "twelve", "and", "<|im_end|>", "is", "42", "so", "\n")
TIMED = """([name, number]) => {
  const list = document.querySelector(".rv-list"), field = (name) => document.querySelector(`[name=${name}]`);
  const set = (name, value) => { field(name).value = value; field(name).dispatchEvent(new Event("input")); };
  const press = (key) => list.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
  const tabs = () => document.querySelectorAll(".rv-tabs button");
  const actions = {
    search: () => set("query", `answer ${number}`), "step filter": () => set("step", String(number % 10)),
    "reward filter": () => set("least", String(number / 20)), sort: () => set("sort", ["reward", "tokens"][number % 2]),
    "arrow key": () => press("ArrowDown"), end: () => press(["End", "Home"][number % 2]),
    group: () => tabs()[(number + 1) % 2].click(), colour: () => set("mode", ["engine", "advantage"][number % 2]),
  };
  const began = performance.now();
  actions[name]();
  document.body.getBoundingClientRect();
  const spent = performance.now() - began;
  for (const name of ["query", "least", "step"]) set(name, "");
  return spent;
}"""
OPENED = """() => new Promise((done) => requestAnimationFrame(() => setTimeout(() => done(performance.now()))))"""
ACTIONS = ("search", "step filter", "reward filter", "sort", "arrow key", "end", "group", "colour")


def page(folder: Path) -> Path:
    """Writes a page with the viewer, as in a report; conversations of every tenth group have 250 recorded tokens."""
    generator = random.Random(0)
    rollouts = []
    for number in range(ROLLOUTS):
        words = [generator.randrange(len(WORDS)) for _ in range(250)]
        numbers = [-generator.random() for _ in words]
        tokens = {"ids": words, "spans": [["assistant", 0, 250]], "trained": "1" * 250, "left_out": [250, 0]}
        row = {"step": number // 1000, "group": number // 8, "prompt_id": str(number // 8), "prompt": "What is it?"}
        row |= {"completion": f"answer {number} " + " ".join(WORDS[word] for word in words[:40]), "tool_calls": []}
        row |= {"reward": number % 7 / 7, "rewards": {}, "advantage": 0.0, "stop_reason": "eos", "version": 0}
        row |= {"tokens": number % 50, "record": tokens | {"engine": numbers, "advantage": numbers}}
        rollouts.append(row if number // 8 % 10 == 0 else row | {"record": None})
    data = {"steps": list(range(10)), "num_steps": 10, "num_rollouts": ROLLOUTS, "rollouts": rollouts}
    data |= {"vocabulary": dict(enumerate(WORDS)), "control": [5]}
    style, script = ((ASSETS / f"rollouts.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    path = folder / "page.html"
    embedded = json.dumps(data).replace("<", "\\u003c")
    path.write_text(
        f"<!doctype html><meta charset=utf-8><style>{style}</style><section id=rollouts></section><script>{script}"
        f"</script><script>renderRollouts(document.getElementById('rollouts'), {embedded})</script>",
        encoding="utf-8",
    )
    return path


def measure(repeats: int) -> list[Row]:
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox"])
        tab = browser.new_page()
        address, opened = page(Path(folder)).as_uri(), []
        for _ in range(repeats):
            tab.goto(address)
            opened.append(tab.evaluate(OPENED))
        rows = [Row(f"viewer, {ROLLOUTS:,} rollouts: opening", statistics.median(opened), OPEN_MS, "ms")]
        for name in ACTIONS:
            times = [tab.evaluate(TIMED, [name, number]) for number in range(repeats)]
            rows.append(Row(f"viewer, {ROLLOUTS:,} rollouts: {name}", statistics.median(times), TARGET_MS, "ms"))
        browser.close()
    return rows


def main(repeats: int) -> list[Row]:
    if find_spec("playwright") is None:
        print("rollout_viewer: needs the package playwright: llmrl[browser]")
        return []
    return measure(repeats)


if __name__ == "__main__":
    benchmark(main, __doc__, repeats=(7, "of each interaction"))
