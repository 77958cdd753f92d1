"""`BrowserTransform`: a web page for each conversation. The browser is `llmrl.tools.browser`'s."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llmrl.envs.llm.tool_calls import CallFormat
from llmrl.envs.llm.transforms.tools import ToolTransform
from llmrl.tools.browser import BrowserTool

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["BrowserTransform"]


class BrowserTransform(ToolTransform):
    """A `ToolTransform` with a browser: navigate, click, type, extract and scroll, in a page of the conversation's own.

    Raises  ConfigError for a domain that is not a plain host name; MissingDependencyError without Playwright

    allowed_domains  exact host names: of pages, of what they load and of redirects, no sub-domain implied; None: all
    headless         False shows the window
    timeout          seconds for one action
    tool_name        the role of the messages
    format           how the model writes calls: by default ``<tool>browser`` line end
                     ``{"action": "navigate", "url": ...}</tool>``, of which a system prompt has to tell it
                     (:meth:`instructions`); with "auto" the chat template does
    """

    def __init__(
        self,
        allowed_domains: Sequence[str] | None = None,
        headless: bool = True,
        timeout: float = 30.0,
        tokenizer: PreTrainedTokenizerBase | None = None,
        tool_name: str = "tool",
        *,
        format: str | CallFormat = "tagged",
        max_calls_per_turn: int = 8,
        max_result_chars: int = 4000,
        max_tool_turns: int | None = None,
        end_without_call: bool = True,
        declare: bool | None = None,
    ):
        super().__init__(
            [BrowserTool(allowed_domains, headless=headless, timeout_s=timeout)],
            format=format,
            timeout_s=timeout,
            max_calls_per_turn=max_calls_per_turn,
            max_result_chars=max_result_chars,
            max_tool_turns=max_tool_turns,
            end_without_call=end_without_call,
            declare=declare,
            role=tool_name,
            tokenizer=tokenizer,
        )
