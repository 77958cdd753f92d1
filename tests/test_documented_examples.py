"""The examples of the public documents of the LLM interface, on a local tokenizer and model."""

from __future__ import annotations

import re

import pytest
import torch
from tensordict import TensorDict

from llmrl.data.llm import History, add_chat_template
from llmrl.data.llm.templates import _BUILT_IN
from llmrl.envs.llm import ChatEnv, DatasetChatEnv
from llmrl.envs.llm.transforms import PythonInterpreter
from llmrl.modules.llm import Masks
from llmrl.testing import ScriptedPolicy, tiny_tokenizer

ASKED = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi there!"}]
TWO_TURNS = [
    *ASKED,
    {"role": "user", "content": "How are you?"},
    {"role": "assistant", "content": "I'm doing well, thanks!"},
]


@pytest.fixture
def tokenizer():
    return tiny_tokenizer()


def test_the_three_tests_of_a_template_of_your_own(tokenizer, monkeypatch):
    monkeypatch.setattr("llmrl.data.llm.templates._TEMPLATES", dict(_BUILT_IN))
    template = (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
        "{% if message['role'] == 'assistant' %}"
        "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}"
        "{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )

    def parse(text: str) -> list[dict[str, str]]:
        pieces = re.findall(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", text, re.DOTALL)
        return [{"role": role, "content": content} for role, content in pieces]

    add_chat_template("my_model", template, inverse_parser=parse, model_family_keywords=["my_model"])
    named = {"tokenizer": tokenizer, "chat_template_name": "my_model", "add_generation_prompt": False}
    history = History.from_chats([ASKED])
    result = history.apply_chat_template(**named, return_dict=True, return_assistant_tokens_mask=True)
    assert result["assistant_masks"].shape[0] == 1
    assert result["assistant_masks"].sum() > 0
    custom = History.from_chats([TWO_TURNS]).apply_chat_template(**named, tokenize=False)
    own = {"tokenizer": tokenizer, "add_generation_prompt": False, "chat_template": tokenizer.chat_template}
    assert History.from_chats([TWO_TURNS]).apply_chat_template(**own, tokenize=False) == custom
    [formatted] = history.apply_chat_template(**named, tokenize=False)
    parsed = History.from_text([formatted], chat_template_name="my_model")
    assert (parsed.role, parsed.content) == (history.role, history.content)


def test_the_python_interpreter(tokenizer):
    base = ChatEnv(
        tokenizer=tokenizer,
        system_prompt="You can execute Python code.",
        user_role="user",
        system_role="system",
        batch_size=[1],
        data_key="text",
    )
    env = base.append_transform(PythonInterpreter(sandbox="subprocess", timeout=60))
    env.set_seed(0)
    td = env.reset(TensorDict(text="Write a function that squares.", batch_size=[1]))
    action = "Here:\n```python\ndef square(x):\n    return x * x\nprint('of 2:', square(2))\n```\n"
    after, _ = env.step_and_maybe_reset(ScriptedPolicy([action])(td))
    [text] = after["next", "history"].prompt.apply_chat_template(tokenizer=tokenizer)
    assert "Code block 1 executed successfully:\nof 2: 4\n" in text
    assert text.endswith("<|im_start|>assistant\n")
    env.close()


def test_columns_and_loader_arguments_of_a_dataset():
    rows = [{"prompt": "2 + 2?"}]
    env = DatasetChatEnv(dataset=rows, data_key="text", batch_size_dl=4, apply_template=True)
    td = env.reset()
    assert td["history"].prompt.to_chats() == [[{"role": "user", "content": "2 + 2?"}]]


def test_older_names_of_the_masks():
    mask = torch.tensor([True, False])
    masks = Masks.from_rows({"all_attention_mask": [mask], "all_assistant_mask": [~mask]})[0]
    assert masks.attention_mask_all.tolist() == [True, False]
    assert masks.assistant_mask_all.tolist() == [False, True]
    assert Masks().assistant_mask_all is None
