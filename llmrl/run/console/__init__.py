"""What a person sees of a run: the plan, the steps, sample conversations, the ending. Nothing here measures or decides.

Every function takes the rich Console that it writes to, so that a test can pass its own.
"""

from llmrl.run.console.conversations import Sample, print_conversations
from llmrl.run.console.lines import make_console, note, print_plan, print_summary, warn
from llmrl.run.console.numbers import format_duration, format_number
from llmrl.run.console.steps import GRPO_COLUMNS, SFT_COLUMNS, Column, StepDisplay, grpo_columns, print_table

__all__ = [
    "GRPO_COLUMNS",
    "SFT_COLUMNS",
    "Column",
    "Sample",
    "StepDisplay",
    "format_duration",
    "format_number",
    "grpo_columns",
    "make_console",
    "note",
    "print_conversations",
    "print_plan",
    "print_summary",
    "print_table",
    "warn",
]
