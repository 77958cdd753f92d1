"""Answers in the harmony format: the message of an answer is what the template would write as it was drawn."""

from typing import Any

import pytest

from llmrl.data.llm import History
from llmrl.envs.llm.tool_calls import call_format
from llmrl.modules.llm.rendering import Renderer
from llmrl.testing import tiny_tokenizer
from tests.support.conversations import fake_policy, history_td

USER = {"role": "user", "content": "What is 12+30?"}
THOUGHT = "<|channel|>analysis<|message|>12 and 30.<|end|><|start|>assistant"


def answered(answer: str, tokenizer: Any) -> dict[str, Any]:
    """The message that a wrapper makes of what a gpt-oss model wrote."""
    [chat] = fake_policy(tokenizer, [answer])(history_td([[USER]]))["history"].full.to_chats()
    return chat[-1]


@pytest.mark.parametrize(
    ("answer", "fields"),
    [
        (f"{THOUGHT}<|channel|>final<|message|>It is 42.", {"content": "It is 42.", "reasoning_content": "12 and 30."}),
        ("<|channel|>final<|message|>It is 42.", {"content": "It is 42."}),
        ("<|channel|>analysis<|message|>12 and", {"content": "", "reasoning_content": "12 and"}),
        (f"{THOUGHT * 2}<|channel|>final<|message|>42", {"content": "42", "reasoning_content": "12 and 30.\n" * 2}),
        ("It is 42.", {"content": "It is 42."}),
        ("<|channel|>commentary<|message|>Let me see.", {"content": "<|channel|>commentary<|message|>Let me see."}),
        (f"{THOUGHT}<|channel|>commentary to=functions.add <|constrain|>json<|message|>{{}}", None),
    ],
)
def test_channels_of_an_answer_become_content_and_thinking(answer: str, fields: dict[str, str] | None):
    """Regression: the channels stayed in the content, and the next turn wrote them once more inside the final channel.

    Calls stay as they were written: the tools read them.
    """
    fields = {"content": answer} if fields is None else fields
    fields = {key: value.removesuffix("\n") for key, value in fields.items()}
    message = answered(answer, tiny_tokenizer(template="gpt_oss"))
    assert message == {"role": "assistant", **fields}


def test_openais_own_template_gets_the_analysis_as_thinking():
    tokenizer = tiny_tokenizer(template="gpt_oss")
    tokenizer.chat_template = tokenizer.chat_template.replace("reasoning_content", "thinking")
    whole = f"{THOUGHT}<|channel|>final<|message|>It is 42."
    message = answered(whole, tokenizer)
    assert message == {"role": "assistant", "content": "It is 42.", "thinking": "12 and 30."}
    text = History.from_messages([USER, message]).apply_chat_template(tokenizer=tokenizer, add_generation_prompt=False)
    assert text.endswith(f"<|start|>assistant{whole}<|return|>")
    assert History.from_text(text, tokenizer=tokenizer).to_chats() == [USER, message]
    assert Renderer(tokenizer).template == Renderer(tokenizer).template, "equal templates share one codec"
    assert call_format("auto", tokenizer.chat_template).thought == "thinking"
