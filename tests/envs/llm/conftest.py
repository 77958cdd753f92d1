"""A policy that says what it is told to, in any view, without a model."""

from collections.abc import Callable, Sequence

import pytest
import torch
from tensordict import TensorDict, TensorDictBase

from llmrl.data.llm.chat import History
from llmrl.data.ragged.tensordicts import column
from llmrl.modules.llm.policies.containers import ChatHistory, Text, Tokens
from llmrl.testing import tiny_tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture
def say(tokenizer) -> Callable[[TensorDictBase, Sequence[str]], TensorDictBase]:
    """say(td, texts): the policy's turn, written in the view that the prompt came in."""

    def write(td: TensorDictBase, texts: Sequence[str]) -> TensorDictBase:
        if (history := td.get("history", None)) is not None:
            response = History.from_chats([[{"role": "assistant", "content": text}] for text in texts])
            full = history.prompt.extend(response, inplace=False, dim=-1)
            td.set("history", ChatHistory.from_rows({"prompt": history.prompt, "response": response, "full": full}))
        elif (text := td.get("text", None)) is not None:
            prompts, responses = text.rows("prompt"), [f"{t}<|im_end|>" for t in texts]
            full = [p + r for p, r in zip(prompts, responses, strict=True)]
            td.set("text", Text.from_rows({"prompt": prompts, "response": responses, "full": full}))
        else:
            prompts = td.get("tokens").rows("prompt")
            responses = [torch.tensor(tokenizer(f"{t}<|im_end|>").input_ids) for t in texts]
            full = [torch.cat(pair) for pair in zip(prompts, responses, strict=True)]
            td.set("tokens", Tokens.from_rows({"prompt": prompts, "response": responses, "full": full}))
        return td

    return write


@pytest.fixture
def answered(say):
    """answered(env, texts, **columns): ``env`` is reset with these columns, and the policy says ``texts`` in a step."""

    def step(env, texts: Sequence[str], **columns: Sequence) -> TensorDictBase:
        columns = {"query": ["?"] * len(texts), **columns}
        td = TensorDict({name: column(values) for name, values in columns.items()}, batch_size=[len(texts)])
        return env.step(say(env.reset(td), texts))

    return step
