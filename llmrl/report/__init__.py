"""Pages about runs: ``report.html`` in a run's folder, the live page of ``llmrl watch``, comparisons of runs."""

from llmrl.report.page import write_report

__all__ = ["write_report"]
