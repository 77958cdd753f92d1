"""Conversations of several turns through a wrapper: what a later turn continues, and when it restarts."""

import pytest
import torch
from tensordict import TensorDict

from llmrl.data.llm.chat import History
from llmrl.errors import RolloutError
from llmrl.modules.llm import ChatHistory, LogProbs, Masks, Text, Tokens
from llmrl.modules.llm.rendering import Renderer
from tests.support.conversations import chats, fake_policy, history_td, rows


def carried(td, *, tool=None):
    """The next turn's prompt side, as an environment leaves it; ``tool`` adds a message to every conversation."""
    history = td["history"].full
    if tool is not None:
        history = history.extend(History.from_chats([[tool]] * len(td)), inplace=False, dim=-1)
    columns = {
        "history": ChatHistory.from_rows({"prompt": history}),
        "text": Text.from_rows({"prompt": td["text"].rows("full")}),
        "tokens": Tokens.from_rows({"prompt": rows(td, "tokens", "full"), "covered": td["tokens"].covered}),
        "masks": Masks.from_rows({"prompt_assistant_mask": rows(td, "masks", "all_assistant_mask")}),
        "log_probs": LogProbs.from_rows({"prompt": rows(td, "log_probs", "full")}),
    }
    return TensorDict(columns, td.batch_size)


def test_rows_that_start_afresh_are_rendered_among_rows_that_go_on(tokenizer):
    policy = fake_policy(tokenizer, ["one", "two", "three", "four"])
    first = policy(history_td(chats(["Hi", "Hello"])))
    td = carried(first, tool={"role": "user", "content": "more"})
    empty = torch.zeros(0, dtype=torch.int64)
    ids, mask = rows(td, "tokens", "prompt")[1], rows(td, "masks", "prompt_assistant_mask")[1]
    [new] = chats(["New"])
    asked = History.stack([History.from_messages(new), td["history"].prompt[1]])
    td["history"] = ChatHistory.from_rows({"prompt": asked})
    td["tokens"] = Tokens.from_rows({"prompt": [empty, ids], "covered": torch.tensor([0, 2])})
    td["masks"] = Masks.from_rows({"prompt_assistant_mask": [empty.bool(), mask]})
    td["log_probs"] = LogProbs.from_rows({"prompt": [empty.float(), rows(td, "log_probs", "prompt")[1]]})
    out = policy(td)
    assert torch.equal(policy.engine.prompts[2], Renderer(tokenizer).prompt_ids([new])[0])
    before, lengths = rows(first, "tokens", "full")[1], [len(answer) for answer in policy.engine.answers]
    assert torch.equal(policy.engine.prompts[3][: len(before)], before)
    assert out["text"].rows("full")[0].startswith("<|im_start|>user\nNew")
    trained = [int(mask.sum()) for mask in rows(out, "masks", "all_assistant_mask")]
    assert trained == [lengths[2], lengths[1] + lengths[3]]


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
    step = TensorDict(
        {
            "text": Text.from_rows({"prompt": [td["text"].rows("full")[0] + " more"]}),
            "tokens": Tokens.from_rows({"prompt": rows(td, "tokens", "full"), "covered": td["tokens"].covered}),
            "masks": Masks.from_rows({"prompt_assistant_mask": rows(td, "masks", "all_assistant_mask")}),
        },
        [1],
    )
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
