"""Conversations of several turns through a wrapper: what a later turn continues, and when it restarts."""

import pytest
import torch
from tensordict import TensorDict

from llmrl.data.llm.chat import History
from llmrl.envs.llm.chat import next_prompt
from llmrl.errors import RolloutError
from llmrl.modules.llm import ChatHistory, Text
from tests.support.conversations import chats, fake_policy, history_td, prompt_after, rows


def carried(td, *, tool=None):
    """The next turn's prompt side, as an environment leaves it; ``tool`` adds a message to every conversation."""
    after = TensorDict(next_prompt(td), td.batch_size)
    if tool is not None:
        after["history"] = prompt_after(after["history"].prompt, [[tool]] * len(td))
    return after


def test_asking_the_same_prompt_again_uses_the_same_ids(tokenizer):
    policy = fake_policy(tokenizer, ["one", "two", "three", "four"])
    td = policy(history_td(chats(["Hi"])))
    policy(td)
    assert torch.equal(policy.engine.prompts[0], policy.engine.prompts[1])
    later = policy(carried(td, tool={"role": "user", "content": "more"}))
    before = int(rows(later, "masks", "all_assistant_mask")[0].sum())
    [mask] = rows(policy(later), "masks", "all_assistant_mask")
    assert torch.equal(policy.engine.prompts[2], policy.engine.prompts[3])
    assert mask.sum() == before - len(policy.engine.answers[2]) + len(policy.engine.answers[3])


def test_text_mode_tokenises_only_what_was_appended(tokenizer):
    policy = fake_policy(tokenizer, [torch.tensor([300, 301, 302]), "end"], input_mode="text")
    td = policy(TensorDict({"text": Text.from_rows({"prompt": ["Hello "]})}, [1]))
    step = carried(td)
    step["text"] = Text.from_rows({"prompt": [td["text"].rows("full")[0] + " more"]})
    policy(step)
    added = tokenizer.encode(" more", add_special_tokens=False)
    assert policy.engine.prompts[1].tolist() == [*rows(td, "tokens", "full")[0].tolist(), *added]
    assert int(rows(step, "masks", "all_assistant_mask")[0].sum()) == 3 + len(policy.engine.answers[1])


def test_a_conversation_that_lost_messages_is_an_error(tokenizer):
    policy = fake_policy(tokenizer, ["one"])
    td = carried(policy(history_td(chats(["Hi"]))))
    td["history"] = ChatHistory.from_rows({"prompt": History.from_chats(chats(["Hi"]))})
    with pytest.raises(RolloutError, match="only grows"):
        policy(td)


def test_prefer_tokens_false_renders_anew(tokenizer):
    policy = fake_policy(tokenizer, [torch.tensor([300, 301])], prefer_tokens=False)
    td = carried(policy(history_td(chats(["Hi"]))), tool={"role": "user", "content": "more"})
    policy(td)
    assert torch.equal(policy.engine.prompts[1], policy.renderer.prompt_ids(td["history"].prompt.to_chats())[0])
    assert int(rows(td, "masks", "all_assistant_mask")[0].sum()) == 2
