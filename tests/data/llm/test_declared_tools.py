"""Tools that the first message of a conversation declares reach the template's own ``tools``."""

import pytest
import torch

from llmrl.data.llm import History
from llmrl.errors import TemplateError
from llmrl.modules.llm import Renderer
from llmrl.testing import tiny_tokenizer

TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
OTHER = {"type": "function", "function": {"name": "sub", "description": "Subtracts.", "parameters": {}}}
ASK = {"role": "user", "content": "1+1?"}


def declaring(*tools, system=None):
    first = {"role": "system", "content": system} if system else dict(ASK)
    return [{**first, "tools": list(tools)}, *([ASK] if system else [])]


@pytest.mark.parametrize("system", [None, "Help."])
def test_declared_tools_render_as_given_tools_do(system):
    tokenizer = tiny_tokenizer()
    chat = declaring(TOOL, system=system)
    plain = [{key: value for key, value in message.items() if key != "tools"} for message in chat]
    expected = tokenizer.apply_chat_template(plain, tools=[TOOL], add_generation_prompt=True, tokenize=False)
    assert '"name": "add"' in expected
    [ids] = Renderer(tokenizer).prompt_ids([chat])
    assert tokenizer.decode(ids) == expected
    assert History.from_messages(chat).apply_chat_template(tokenizer=tokenizer) == expected


def test_conversations_of_a_batch_may_declare_different_tools_or_none():
    tokenizer = tiny_tokenizer()
    renderer = Renderer(tokenizer)
    chats = [declaring(TOOL), [ASK], declaring(OTHER), declaring(TOOL, OTHER)]
    together = renderer.prompt_ids(chats)
    for ids, chat in zip(together, chats, strict=True):
        assert torch.equal(ids, renderer.prompt_ids([chat])[0])
    texts = [tokenizer.decode(ids) for ids in together]
    declared = [[name for name in ("add", "sub") if f'"{name}"' in text] for text in texts]
    assert declared == [["add"], [], ["sub"], ["add", "sub"]]


def test_what_is_trained_of_a_conversation_that_declares_tools_is_the_answer():
    tokenizer = tiny_tokenizer()
    [row] = Renderer(tokenizer).render([[*declaring(TOOL), {"role": "assistant", "content": "2"}]])
    assert '"add"' in tokenizer.decode(row.ids)
    assert tokenizer.decode(row.ids[row.assistant_mask]) == "2<|im_end|>"


def test_tools_and_calls_that_a_template_does_not_use_are_refused_and_not_dropped():
    """Regression: ChatML wrote an empty answer where a tool was called, and said nothing of the tools it was given."""
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    calling = {"role": "assistant", "content": "", "tool_calls": [call]}
    renderer = Renderer(tiny_tokenizer(template="chatml_format"))
    with pytest.raises(TemplateError, match=r"message 1 .*role 'assistant': .*not use tool_calls"):
        renderer.render([[ASK, calling]])
    for chat, tools in ((declaring(TOOL), None), ([ASK], [TOOL])):
        with pytest.raises(TemplateError, match="does not use tools; describe them"):
            renderer.prompt_ids([chat], tools=tools)
