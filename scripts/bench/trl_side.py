"""TRL's trainers in a benchmark: settings without logging and saving, and a hook between two steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["LEARNING_RATE", "QUIET", "train"]

LEARNING_RATE = 1e-5
QUIET = {
    "learning_rate": LEARNING_RATE,
    "lr_scheduler_type": "constant",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "max_steps": 1_000_000,
    "logging_strategy": "no",
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}


def train(trainer: Any, clock: Callable[[], float], between: Callable[[float], bool]) -> None:
    """Trains; calls ``between`` with the seconds of each step, and stops when it returns False."""
    from transformers import PrinterCallback, TrainerCallback

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.start = clock()

        def on_step_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> Any:
            control.should_training_stop = not between(clock() - self.start)
            self.start = clock()
            return control

    trainer.remove_callback(PrinterCallback)  # it would print a summary in the middle of the table
    trainer.add_callback(Clock())
    trainer.train()
