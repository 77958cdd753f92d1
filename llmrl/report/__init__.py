"""Pages about runs: ``report.html`` in a run's folder, the live page of ``llmrl watch``, comparisons of runs."""

from typing import TYPE_CHECKING

from llmrl.lazy import on_demand

if TYPE_CHECKING:
    from llmrl.report.page import write_report
else:
    __getattr__, __dir__ = on_demand(__name__)

__all__ = ["write_report"]
