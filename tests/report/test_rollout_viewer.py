"""The rollout viewer in Chromium: filters, order, hover, keyboard, and that no text of a model runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ASSETS = Path(__file__).parents[2] / "llmrl" / "report" / "assets"
HOSTILE = [
    "<script>window.hacked = 1</script>",
    '"><img src=x onerror="window.hacked = 2">',
    "</script><script>window.hacked = 3</script>",
    "<svg onload=window.hacked=4>",
    "javascript:window.hacked=5",
    "abc\u202edcba",
    "lone \ud800 surrogate",
    "nul \0 and \x1b[31m bell \x07",
    "zero\u200bwidth \u2028 line",
    "__proto__",
]


def rollout(step, number, **changes):
    """A conversation of three answer tokens in a group of two."""
    row = {
        "step": step,
        "group": number // 2,
        "prompt_id": f"p{number // 2}",
        "prompt": f"What is {number}?",
        "completion": f"answer {number}",
        "reward": number / 10,
        "rewards": {"exact": number / 10},
        "columns": {"answer": f"right {number}"},
        "advantage": 0.5,
        "stop_reason": "length" if number % 3 == 0 else "eos",
        "version": step - 1,
        "tokens": 10 + number,
        "tool_calls": [],
        "record": {
            "ids": [9, 3, 1, 2, 4],
            "spans": [["user", 0, 2], ["assistant", 0, 3]],
            "trained": "00110",
            "left_out": [5, 0],
            "engine": [None, None, -0.5, -2.0, -0.25],
            "trainer": [None, None, -0.75, -2.0, None],
            "advantage": [None, None, 0.5, 0.5, None],
            "ratio": [None, None, 0.7788, 1.0, None],
        },
    }
    return row | changes


def call(outcome="ok", **changes):
    fields = {"turn": 0, "name": "calculator", "arguments": '{"expression": "1+1"}', "result": "2", "seconds": 0.25}
    return fields | {"outcome": outcome} | changes


def model_call(row=0, parent=-1, **changes):
    fields = {"question": "2+2?", "answer": "4", "prompt_tokens": 7, "tokens": 3, "stop_reason": "eos", "why": ""}
    return fields | {"row": row, "parent": parent} | changes


def data_of(rollouts, vocabulary=None):
    steps = sorted({row["step"] for row in rollouts})
    words = {1: "The", 2: " end", 3: "a\nb", 4: "<|im_end|>", 9: "<|im_start|>"} | (vocabulary or {})
    counts = {"num_steps": len(steps), "num_rollouts": len(rollouts)}
    return {"steps": steps, **counts, "rollouts": rollouts, "vocabulary": words, "control": [4, 9]}


@pytest.fixture
def show(open_page, tmp_path):
    """Opens a page with the viewer of these rollouts, as a report has it."""

    def show(data, width=1200):
        path = tmp_path / "page.html"
        embedded = json.dumps(data).replace("<", "\\u003c")
        path.write_text(
            "<!doctype html><meta charset=utf-8><meta http-equiv=Content-Security-Policy content=\"default-src 'none'; "
            "script-src 'nonce-a'; style-src 'unsafe-inline'\">"
            f"<style>{(ASSETS / 'rollouts.css').read_text()}</style><section id=highlights></section>"
            "<section id=rollouts></section>"
            f"<script type=application/json id=rollouts-data>{embedded}</script>"
            f"<script nonce=a>{(ASSETS / 'rollouts.js').read_text()}</script><script nonce=a>"
            "const data = JSON.parse(document.getElementById('rollouts-data').textContent);"
            "const [rollouts, highlights] = ['rollouts', 'highlights'].map((id) => document.getElementById(id));"
            "renderRollouts(rollouts, data, highlights);</script>",
            encoding="utf-8",
        )
        return open_page(path, width=width)

    return show


def cards(page, fact):
    """The step (0) or the reward (1) of each conversation that stands beside others."""
    return [text.split(" · ")[fact] for text in page.locator(".rv-card > button").all_text_contents()]


def rows(page):
    return page.locator("[role=option] .rv-start").all_text_contents()


def test_rollouts_are_filtered_by_each_of_their_facts(show):
    many = [rollout(step, number) for step in (1, 5) for number in range(6)]
    many[0]["tool_calls"], many[1]["tool_calls"] = [call()], [call("timeout", result="Error: no answer")]
    many[2]["reward"] = None
    del many[0]["record"]
    page = show(data_of(many))
    assert "null" not in page.locator("#rollouts").inner_text()
    assert page.locator("[aria-selected=true] .rv-start").text_content() == "answer 1", "the first with tokens"
    count = page.locator(".rv-count")

    def filtered(name, value, expected):
        control = page.locator(f".rv-bar [name={name}]")
        choose = control.select_option if control.evaluate("node => node.tagName") == "SELECT" else control.fill
        before = control.input_value()
        choose(value)
        assert count.text_content() == f"{expected} of 12", name
        choose(before)

    filtered("step", "5", 6)
    filtered("stop", "length", 4)
    filtered("tools", "called", 2)
    filtered("tools", "failed", 1)
    filtered("tools", "none", 10)
    filtered("record", "yes", 11)
    filtered("least", "0.4", 4)
    filtered("most", "0.4", 9)  # what failed has no reward
    filtered("shortest", "14", 4)
    filtered("longest", "10", 2)
    filtered("query", "ANSWER 3", 2)
    filtered("query", "what is 4?", 2)
    filtered("query", "no answer", 1)
    filtered("query", "nowhere", 0)
    assert count.text_content() == "12 of 12"


def test_the_order_follows_what_is_asked_and_a_missing_reward_is_last(show):
    page = show(data_of([rollout(1, number, reward=reward) for number, reward in enumerate((0.5, None, 1.0, 0.0))]))
    assert rows(page) == ["answer 0", "answer 1", "answer 2", "answer 3"]
    page.locator("[name=sort]").select_option("reward")
    assert rows(page) == ["answer 3", "answer 0", "answer 2", "answer 1"]
    page.locator("[name=descending]").check()
    assert rows(page) == ["answer 2", "answer 0", "answer 3", "answer 1"]


def test_hover_and_focus_show_the_numbers_of_a_token(show):
    page = show(data_of([rollout(1, 0)]))
    tip, tokens = page.locator(".rv-tip"), page.locator(".rv-token")
    assert tokens.all_text_contents() == ["<|im_start|>", "a⏎\nb", "The", "\u200b·end", "<|im_end|>"]
    assert page.locator(".rv-control").all_text_contents() == ["<|im_start|>", "<|im_end|>"]
    assert tip.is_hidden()
    tokens.nth(2).hover()
    said = {row.split("\n")[0]: row.split("\n")[1] for row in tip.locator(".rv-dl > div").all_inner_texts()}
    assert said == {
        "id": "1",
        "text": "The",
        "message": "assistant, turn 1",
        "trained": "yes",
        "log-prob of the engine": "-0.5",
        "log-prob of the trainer": "-0.75",
        "trainer minus engine": "-0.25",
        "advantage": "0.5",
        "ratio": "0.7788",
        "entropy": "none",
    }
    page.mouse.move(1, 1)
    assert tip.is_hidden()
    page.locator(".rv-list").focus()
    page.keyboard.press("Enter")
    page.keyboard.press("ArrowRight")
    assert "a⏎b" in tip.inner_text()
    assert page.evaluate("document.activeElement.getAttribute('aria-describedby')") == "rv-tip"
    page.keyboard.press("End")
    assert "<|im_end|>" in tip.inner_text()


def test_tokens_are_coloured_by_the_chosen_value_with_a_legend(show):
    page = show(data_of([rollout(1, 0)]))

    def colours(mode):
        page.locator("[name=mode]").select_option(mode)
        return [token.evaluate("node => node.style.backgroundColor") for token in page.locator(".rv-token").all()]

    trained = colours("trained")
    assert trained[:2] == ["", ""]
    assert trained[2] == trained[3] != trained[4] != ""
    engine = colours("engine")
    assert [colour[:16] for colour in engine] == ["", "", *["rgba(230, 120, 0"] * 3]
    assert len(set(engine[2:])) == 3
    assert colours("difference")[2].startswith("rgba(230")  # the trainer finds it less likely
    assert colours("advantage")[2].startswith("rgba(0, 114")
    assert colours("entropy") == [""] * 5
    page.locator("[name=mode]").select_option("engine")
    assert page.locator(".rv-legend").inner_text().split() == ["-2", "0"]


def test_the_keyboard_moves_through_the_list_and_finds_the_search(show):
    page = show(data_of([rollout(1, number) for number in range(100)]))
    page.keyboard.press("/")
    page.keyboard.type("answer 7")
    assert page.locator(".rv-count").text_content() == "11 of 100"
    page.keyboard.press("Escape")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    assert page.locator("[aria-selected=true] .rv-start").text_content() == "answer 71"
    assert page.locator(".rv-text").last.text_content()
    page.keyboard.press("End")
    assert page.locator("[aria-selected=true] .rv-start").text_content() == "answer 79"
    active = page.locator(".rv-list").get_attribute("aria-activedescendant")
    assert page.locator(f"#{active}").get_attribute("aria-selected") == "true"


def test_a_group_and_the_same_prompt_at_another_step_stand_side_by_side(show):
    page = show(data_of([rollout(step, number) for step in (1, 5, 9) for number in range(4)]))
    page.get_by_role("button", name="group of 2").click()
    assert cards(page, 1) == ["reward 0", "reward 0.1"]
    assert page.locator(".rv-card .rv-token").count() == 6  # the prompt is shown once
    page.get_by_role("button", name="other steps (4)").click()
    assert cards(page, 0) == ["step 1", "step 9", "step 9"]
    page.locator("[name=other]").select_option("5")
    assert cards(page, 0) == ["step 1", "step 5", "step 5"]
    page.locator(".rv-card > button").nth(2).click()
    assert page.locator("[aria-selected=true] .rv-facts").text_content().startswith("step 5 · reward 0.1")


def test_three_rollouts_of_the_last_step_stand_at_the_top_and_open_in_the_viewer(show):
    rollouts = [rollout(step, number, advantage=2.0 if number == 1 else 0.5) for step in (1, 5) for number in range(4)]
    page = show(data_of(rollouts))
    labels = page.locator("#highlights .label").all_text_contents()
    assert [label.split(" ")[0] for label in labels] == ["best", "worst", "most"]
    assert page.locator("#highlights .rv-answer").all_text_contents() == ["answer 3", "answer 0", "answer 1"]
    assert page.locator("#highlights .rv-meter i").first.evaluate("fill => fill.style.width") == "100%"
    page.locator("#highlights button").last.click()
    assert page.locator("[aria-selected=true] .rv-start").text_content() == "answer 1"
    assert page.locator("[aria-selected=true] .rv-prompt").text_content() == "What is 1?"


def test_a_rollout_has_an_address_and_is_copied_as_json(show):
    page = show(data_of([rollout(step, number) for step in (1, 5) for number in range(4)]))
    page.evaluate("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    page.locator(".rv-row").nth(7).click()
    page.get_by_role("button", name="copy as JSON").click()
    page.get_by_role("button", name="copied").wait_for()
    assert json.loads(page.evaluate("window.copied"))["completion"] == "answer 3"
    page.get_by_role("button", name="copy link").click()
    page.wait_for_function("window.copied.includes('#rollout=5.1.1')")
    page.goto(page.evaluate("window.copied"))
    page.reload()
    assert page.locator("[aria-selected=true] .rv-start").text_content() == "answer 3"


def test_the_columns_of_the_data_stand_with_the_facts(show):
    page = show(data_of([rollout(1, 3)]))
    assert "data: answer right 3" in " ".join(page.locator(".rv-detail .rv-dl").first.inner_text().split())


def test_a_long_system_message_is_folded(show):
    ids = [3] * 150 + [1, 2]
    record = {
        "ids": ids,
        "spans": [["system", 0, 150], ["assistant", 0, 2]],
        "trained": "0" * 150 + "11",
        "left_out": [152, 0],
    }
    page = show(data_of([rollout(1, 0, record=record)]))
    assert page.locator(".rv-detail summary").text_content() == "system, 150 tokens"
    assert [token.is_visible() for token in page.locator(".rv-token").all()[149:]] == [False, True, True]


def test_calls_are_folded_behind_the_turn_that_made_them(show):
    spans = [["user", 0, 1], ["assistant", 0, 1], ["tool", 1, 1], ["assistant", 1, 2]]
    row = rollout(1, 0, tool_calls=[call(), call("timeout", turn=1, result="Error: slow")])
    row["record"]["spans"] = spans
    page = show(data_of([row]))
    order = page.locator(".rv-detail > .rv-turn, .rv-detail > .rv-call").evaluate_all(
        "nodes => nodes.map(node => node.firstChild.textContent)"
    )
    first, second = "calculator · ok · 0.25 s", "calculator · timeout · 0.25 s"
    assert order == ["user", "assistant", first, "tool", "assistant", second]
    result = page.locator(".rv-call .rv-text").nth(1)
    assert not result.is_visible()
    page.locator(".rv-call summary").first.click()
    assert (result.is_visible(), result.text_content()) == (True, "2")


def test_the_calls_of_an_agent_say_what_they_continue_and_which_row_trains_them(show):
    calls = [model_call(), model_call(1, 0, question="x" * 100), model_call(-1, why="of another conversation")]
    calls += [model_call(0, 0), model_call(0, 3)]
    one = rollout(1, 0, model_calls=calls, num_model_calls=60, untrained="not trained: it failed")
    page = show(data_of([one]))
    head, *lines = page.locator(".rv-turn > summary, .rv-call > summary").all_text_contents()
    rows = "60 calls of the model, 2 rows · the conversation below is row 2, and blue what it trains"
    assert head == f"{rows} · the first 5 are shown · not trained: it failed"
    asked = "7 prompt tokens · 3 sampled · eos"
    assert lines == [
        f"call 1 · row 1 · {asked} · 2+2?",
        f"call 2 after 1 · row 2 · {asked} · {'x' * 60}",
        f"call 3 · no row: of another conversation · {asked} · 2+2?",
        f"call 4 after 1 · row 1 · {asked} · 2+2?",
        f"call 5 after 4 · row 1 · {asked} · 2+2?",
    ]
    indents = page.locator(".rv-call").evaluate_all("nodes => nodes.map(node => node.style.marginLeft)")
    assert indents == ["1rem", "2.5rem", "1rem", "2.5rem", "2.5rem"], "two calls continue the first"


def test_no_text_of_a_model_runs_and_hidden_letters_are_seen(show):
    hostile = [rollout(1, number) for number in range(len(HOSTILE))]
    for row, text in zip(hostile, HOSTILE, strict=True):
        row |= {"prompt": text, "completion": text, "prompt_id": text, "stop_reason": text, "rewards": {text: 1.0}}
        row["tool_calls"] = [call(text, name=text, arguments=text, result=text)]
        row |= {"model_calls": [model_call(-1, question=text, answer=text, why=text, stop_reason=text)]}
        row |= {"num_model_calls": 1, "untrained": ""}
        row["record"]["spans"] = [[text, 0, 2], ["assistant", 0, 3]]
    without = [rollout(1, 50 + number, completion=text, record=None) for number, text in enumerate(HOSTILE)]
    page = show(data_of(hostile + without, {1: HOSTILE[1], 2: HOSTILE[5]}))
    page.locator(".rv-list").focus()
    seen = ""
    for _ in range(len(hostile + without)):
        page.locator(".rv-token:visible, .rv-text:visible").first.hover()
        seen += page.locator("#rollouts").inner_text()
        page.keyboard.press("ArrowDown")
    for name in ("group of", "other steps"):
        if page.get_by_role("button", name=name).is_enabled():
            page.get_by_role("button", name=name).click()
    assert page.evaluate("window.hacked") is None
    assert page.locator("#rollouts").locator("script, img, svg, iframe, a, [onerror], [onload]").count() == 0
    assert "\u202e" not in seen
    assert all(mark in seen for mark in ("⟨U+202E⟩", "⟨U+D800⟩", "␀", "␛", "␇", "⟨U+2028⟩", "</script><script>"))


def test_a_million_tokens_and_ten_thousand_rollouts_draw_what_is_in_sight(show):
    count = 10**6
    long = rollout(1, 0, tokens=count, completion="x" * 10**6)
    long["record"] = {
        "ids": [1] * count,
        "spans": [["assistant", 0, count]],
        "trained": "1" * count,
        "left_out": [count, 0],
        "engine": [-1] * count,
    }
    many = [rollout(1, number) for number in range(1, 10_000)]
    for row in many[1:]:
        row["record"] = None
    page = show(data_of([long, *many]))
    nodes = page.evaluate("document.querySelectorAll('#rollouts *').length")
    assert nodes < 3000 + 400
    assert "3000 tokens are shown here" in page.locator(".rv-detail").inner_text()
    page.locator(".rv-list").focus()
    for key in ("End", "Home", "PageDown"):
        page.keyboard.press(key)
        assert page.locator("[role=option]").count() < 40
    page.locator("[name=query]").fill("answer 99")
    assert page.locator(".rv-count").text_content() == "111 of 10000"


def test_new_data_keep_filters_and_selection_and_none_leave_nothing(show):
    page = show(data_of([rollout(1, number) for number in range(4)]))
    page.locator("[name=query]").fill("answer")
    page.locator("[role=option]").nth(2).click()
    again = "renderRollouts(document.getElementById('rollouts'), {...data, rollouts: data.rollouts.slice(1)})"
    page.evaluate(f"() => {again}")
    assert page.locator("[name=query]").input_value() == "answer"
    assert page.locator("[aria-selected=true] .rv-start").text_content() == "answer 2"
    page.evaluate("renderRollouts(document.getElementById('rollouts'), null)")
    assert page.locator("#rollouts *").count() == 0
    page.keyboard.press("/")


@pytest.mark.parametrize("rollouts", [[rollout(1, 0)], []])
def test_steps_whose_files_cannot_be_read_are_named(show, rollouts):
    page = show(data_of(rollouts) | {"unreadable": [3, 9]})
    assert "The rollouts of step 3, 9 cannot be read" in page.locator("#rollouts").inner_text()


def test_the_viewer_fits_a_narrow_page(show):
    page = show(data_of([rollout(1, number) for number in range(4)]), width=380)
    page.get_by_role("button", name="group of 2").click()
    assert page.evaluate("document.documentElement.scrollWidth") <= 380
