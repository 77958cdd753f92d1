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

COLUMNS = (Column("reward", "reward/mean", spread="reward/std"), Column("tok/s", "perf/gen_tok_s", "count"))


def plain(width: int = 60, encoding: str = "utf-8") -> Console:
    return Console(file=io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True), width=width)


def terminal(width: int = 100) -> Console:
    return Console(
        file=io.StringIO(), width=width, force_terminal=True, force_interactive=True, color_system="standard"
    )


def shown(show, *arguments, console: Console | None = None, **options) -> list[str]:
    """The lines that a function writes to a console which is not a terminal."""
    console = console or plain()
    show(console, *arguments, **options)
    return written(console).splitlines()


def written(console: Console) -> str:
    if isinstance(console.file, io.StringIO):
        return console.file.getvalue()
    return console.file.buffer.getvalue().decode(console.encoding)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_off_a_terminal_each_step_is_one_line_under_a_header():
    console, clock = plain(width=20), Clock()  # narrower than a line: it is not folded
    with StepDisplay(3, COLUMNS, console=console, clock=clock) as display:
        for step in (1, 2):
            clock.now += 60
            display.step(step, {"reward/mean": 0.25 * step, "reward/std": 0.5, "perf/gen_tok_s": 18_400.0})
        display.step(3, {"reward/mean": 1.0}, summary="eval ✓")
    assert written(console).splitlines() == [
        "  step           reward   tok/s       eta",
        "     1        .250±.500   18.4k    2m 00s",
        "     2        .500±.500   18.4k    1m 00s",
        "     3                1       -        0s  eval ✓",
    ]


def test_off_a_terminal_columns_stay_in_place_whatever_the_values():
    console = plain()
    with StepDisplay(9, GRPO_COLUMNS, console=console, clock=Clock()) as display:
        display.step(1, {column.metric: 123456.789 for column in GRPO_COLUMNS if column.kind != "percent"})
        display.step(2, {column.metric: -1e-9 for column in GRPO_COLUMNS})
        display.step(3, {column.metric: float("nan") for column in GRPO_COLUMNS})
    legend, *table = written(console).splitlines()
    assert "· kl: trainer from engine · ent: entropy per token · |g|: gradient norm ·" in legend
    assert len({len(line) for line in table}) == 1
    assert "-1e-09" not in table[2].split()[6], "a rounding error of the divergence is 0"


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


def test_the_plan_is_aligned_and_keeps_further_lines_under_the_first():
    lines = shown(print_plan, "grpo", [("machine", "cpu"), ("batch", "8 x 8\n[64]")], right="runs/a")
    assert lines == ["grpo" + " " * 50 + "runs/a", "machine   cpu", "batch     8 x 8", "          [64]"]


def test_a_console_that_cannot_write_a_character_gets_another():
    console = plain(encoding="ascii")
    print_plan(console, "grpo · tiny", [])
    print_conversations(console, [Sample([("a", True)])])
    assert "grpo - tiny\n" in written(console)
    assert "<<a>>" in written(console)


def test_trained_tokens_are_bracketed_off_a_terminal_and_coloured_on_one():
    sample = Sample(
        [("1 + 1 [/INST]? ", False), ("it", True), (" is 2", True), (" ok", False)], reward=1.0, advantage=-0.5
    )
    lines = shown(print_conversations, [sample])
    assert lines[1].startswith("1 + 1 [/INST]? «it is 2» ok")
    assert lines[1].endswith("reward 1")
    assert lines[2].endswith("advantage -.500")
    console = terminal()
    print_conversations(console, [sample])
    assert "\x1b[1;32mit is 2\x1b[0m" in written(console)


def test_what_a_model_wrote_cannot_steer_the_terminal():
    console = terminal()
    print_conversations(console, [Sample([("\x1b[2Jgone\x07", True)])])
    assert "\\x1b[2Jgone\\x07" in written(console)
    assert "\x1b[2J" not in written(console)


def test_long_conversations_lose_their_middle_and_say_how_much():
    sample = Sample([("a" * 50, False), ("b" * 50, True)])
    lines = shown(print_conversations, [sample], max_chars=20, console=plain(width=200))
    assert f"{'a' * 10} [... 80 characters ...] «{'b' * 10}»" in "\n".join(lines)


def test_the_summary_shows_before_and_after():
    changes = [("sums", 0.25, 0.5), ("late", None, 0.5), ("nll", 2.0, 1.5)]
    assert shown(print_summary, ["3 steps"], changes=changes) == [
        "done      3 steps",
        "sums      .250 -> .500 (+.250)",
        "late      - -> .500",
        "nll       2 -> 1.5 (-.500)",
    ]


def test_a_long_name_widens_the_column_of_labels():
    lines = shown(print_summary, ["3 steps"], changes=[("eval/gsm8k-test", 0.25, 0.5)])
    assert lines == ["done             3 steps", "eval/gsm8k-test  .250 -> .500 (+.250)"]


def test_a_table_of_recorded_steps_leaves_out_columns_without_values():
    lines = shown(print_table, COLUMNS, [{"step": 1, "perf/gen_tok_s": 10.0}, {"step": 2, "perf/gen_tok_s": None}])
    assert lines == ["  step   tok/s", "     1      10", "     2       -"]


@pytest.mark.parametrize("column", GRPO_COLUMNS, ids=lambda column: column.label)
def test_every_column_shows_a_metric_that_exists(column):
    assert column.metric in METRICS


def test_only_a_run_with_tools_has_a_column_for_calls():
    assert grpo_columns(tools=True) == GRPO_COLUMNS
    assert [column.label for column in GRPO_COLUMNS if column not in grpo_columns(tools=False)] == ["calls"]
