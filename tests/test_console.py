"""What the console prints: off a terminal as one golden text, on a terminal what only a terminal has."""

import io

import pytest
from rich.console import Console

from llmrl.run.console import (
    GRPO_COLUMNS,
    Column,
    Sample,
    StepDisplay,
    grpo_columns,
    make_console,
    print_conversations,
    print_plan,
    print_summary,
    print_table,
    warn,
)
from llmrl.run.metrics import METRICS
from tests.support.golden import check_golden

COLUMNS = (Column("reward", "reward/mean", spread="reward/std"), Column("tok/s", "perf/gen_tok_s", "count"))


def plain(width: int = 60, encoding: str = "utf-8") -> Console:
    return Console(file=io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True), width=width)


def terminal(width: int = 100) -> Console:
    return Console(
        file=io.StringIO(), width=width, force_terminal=True, force_interactive=True, color_system="standard"
    )


def written(console: Console) -> str:
    if isinstance(console.file, io.StringIO):
        return console.file.getvalue()
    return console.file.buffer.getvalue().decode(console.encoding)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_what_is_printed_off_a_terminal():
    """The plan is aligned; each step is one line under a header, whatever its values, and is not folded."""
    console, narrow, ascii_only, clock = plain(), plain(width=20), plain(encoding="ascii"), Clock()
    print_plan(console, "grpo", [("machine", "cpu"), ("batch", "8 x 8\n[64]")], right="runs/a")
    with StepDisplay(3, COLUMNS, console=narrow, clock=clock) as display:
        for step in (1, 2):
            clock.now += 60
            display.step(step, {"reward/mean": 0.25 * step, "reward/std": 0.5, "perf/gen_tok_s": 18_400.0})
        display.step(3, {"reward/mean": 1.0}, summary="eval ✓")
    with StepDisplay(9, GRPO_COLUMNS, console=console, clock=clock) as display:
        display.step(1, {column.metric: 123456.789 for column in GRPO_COLUMNS if column.kind != "percent"})
        display.step(2, {column.metric: -1e-9 for column in GRPO_COLUMNS})
        display.step(3, {column.metric: float("nan") for column in GRPO_COLUMNS})
    pieces = [("1 + 1 [/INST]? ", False), ("it", True), (" is 2", True), (" ok", False)]
    print_conversations(console, [Sample(pieces, reward=1.0, advantage=-0.5)])
    print_conversations(console, [Sample([("a" * 50, False), ("b" * 50, True)])], max_chars=20)
    changes = [("sums", 0.25, 0.5), ("late", None, 0.5), ("nll", 2.0, 1.5)]
    print_summary(console, ["3 steps"], changes=changes)
    print_summary(console, ["3 steps"], changes=[("eval/gsm8k-test", 0.25, 0.5)])  # widens the column of labels
    print_table(console, COLUMNS, [{"step": 1, "perf/gen_tok_s": 10.0}, {"step": 2, "perf/gen_tok_s": None}])
    print_plan(ascii_only, "grpo · tiny", [])
    print_conversations(ascii_only, [Sample([("a", True)])])
    check_golden("console", "".join(map(written, (console, narrow, ascii_only))))


def test_on_a_terminal_warnings_stand_above_the_panel_and_are_printed_once():
    console, clock = terminal(), Clock()
    with StepDisplay(2, COLUMNS, console=console, title="grpo", clock=clock) as display:
        clock.now += 1
        display.step(1, {"reward/mean": 0.25})
        warn(console, "3 rollouts [dropped]")
        clock.now += 1
        display.step(2, {"reward/mean": 0.75}, summary="eval .604")
    text = written(console)
    assert text.count("3 rollouts [dropped]") == 1
    assert "step 2: eval .604" in text
    assert "2/2" in text
    assert text.index("3 rollouts") < text.rindex("╭")  # the panel was drawn again below it


def test_on_a_terminal_trained_tokens_are_coloured_and_what_a_model_wrote_cannot_steer_it():
    console = terminal()
    print_conversations(console, [Sample([("1 + 1? ", False), ("it is ", True), ("\x1b[2Jgone\x07", True)])])
    assert "\x1b[1;32mit is \\x1b[2Jgone\\x07\x1b[0m" in written(console)
    assert "\x1b[2J" not in written(console)


def test_the_display_is_closed_when_the_loop_raises():
    console = terminal()
    display = StepDisplay(2, COLUMNS, console=console)
    with pytest.raises(RuntimeError), display:
        raise RuntimeError
    console.print("after")
    assert written(console).endswith("after\n")
    assert "\x1b[?25h" in written(console)  # the cursor is back


def test_the_time_left_of_a_resumed_run_counts_only_what_remains():
    clock = Clock()
    display = StepDisplay(10, COLUMNS, console=plain(), start=6, clock=clock)
    clock.now += 5
    display.step(7, {})
    assert display.seconds_left == 15.0


def test_other_ranks_print_nothing(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    console = make_console()
    print_plan(console, "grpo", [("machine", "cpu")])
    with StepDisplay(1, COLUMNS, console=console) as display:
        display.step(1, {})
        warn(console, "unseen")
    print_summary(console, ["1 step"])
    assert capsys.readouterr().out == ""


def test_every_column_shows_a_metric_that_exists_and_only_a_run_with_tools_has_one_for_calls():
    assert [column.label for column in GRPO_COLUMNS if column.metric not in METRICS] == []
    assert grpo_columns(tools=True) == GRPO_COLUMNS
    assert [column.label for column in GRPO_COLUMNS if column not in grpo_columns(tools=False)] == ["calls"]
