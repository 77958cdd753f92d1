"""Console output of a run: plan, steps, sample conversations, summary. Functions take the Console to write to."""

from typing import TYPE_CHECKING

from llmrl.lazy import on_demand

if TYPE_CHECKING:
    from llmrl.run.console.conversations import Sample, print_conversations
    from llmrl.run.console.lines import Finding, make_console, note, print_findings, print_plan, print_summary, warn
    from llmrl.run.console.numbers import format_duration, format_number
    from llmrl.run.console.steps import (
        DPO_COLUMNS,
        GRPO_COLUMNS,
        REWARD_COLUMNS,
        SFT_COLUMNS,
        Column,
        StepDisplay,
        grpo_columns,
        print_table,
    )
else:
    __getattr__, __dir__ = on_demand(__name__)

__all__ = [
    "DPO_COLUMNS",
    "GRPO_COLUMNS",
    "REWARD_COLUMNS",
    "SFT_COLUMNS",
    "Column",
    "Finding",
    "Sample",
    "StepDisplay",
    "format_duration",
    "format_number",
    "grpo_columns",
    "make_console",
    "note",
    "print_conversations",
    "print_findings",
    "print_plan",
    "print_summary",
    "print_table",
    "warn",
]
