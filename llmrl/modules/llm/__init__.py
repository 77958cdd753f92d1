"""Language models as policies: rendering conversations, engines that sample, wrappers that read and write TensorDicts."""

from __future__ import annotations

from llmrl.modules.llm.rendering import Rendered, Renderer, TemplateReport

__all__ = ["Rendered", "Renderer", "TemplateReport"]
