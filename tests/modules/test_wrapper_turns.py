"""Conversations of several turns through a wrapper: what a later turn continues, and when it begins anew."""

from __future__ import annotations

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


@pytest.mark.parametrize("pad_output", [False, True])
def test_five_turns_store_exactly_what_the_engine_saw(tokenizer, pad_output):
    answers = ["I call a tool.", "And <think>again</think>.", "Cut off here because it is long", "So", "Done: 42."]
    script = iter([answer for answer in answers for _ in range(2)])
    limit = 12
    policy = fake_policy(tokenizer, lambda prompt: next(script), generate_kwargs={"max_new_tokens": limit})
    if pad_output:
        policy = policy.get_new_version(pad_output=True)
    td = policy(history_td(chats(["Hi", "What is 12 + 30?"])))
    drawn = [[rows_of(td, "response", row)] for row in range(2)]
    for turn in range(1, 5):
        tool = {"role": "tool" if turn % 2 else "user", "content": f"result {turn}"}
        td = policy(carried_padded(td, tool=tool) if pad_output else carried(td, tool=tool))
        for row in range(2):
            drawn[row].append(rows_of(td, "response", row))
    assert [len(answer) for answer in drawn[0]].count(limit) == 1  # one turn was cut off
    for row in range(2):
        prompts = policy.engine.prompts[row::2]
        full = rows_of(td, "full", row)
        for turn, (prompt, response) in enumerate(zip(prompts, drawn[row], strict=True)):
            seen = torch.cat([prompt, response])
            assert torch.equal(full[: len(seen)], seen), f"turn {turn} is not a prefix of the stored stream"
        mask = rows_of(td, "all_assistant_mask", row, "masks")
        assert torch.equal(full[mask], torch.cat(drawn[row]))  # trained tokens are the sampled ones, of all turns
        log_probs = rows_of(td, "full", row, "log_probs")
        assert torch.equal(log_probs != 0, mask)
        text = td["text"].rows("full")[row]
        assert text == tokenizer.decode(full)
        assert "result 3" in text


def rows_of(td, field, row, container="tokens"):
    """One row without its padding."""
    value = td[container].rows(field)[row]
    if not td[container].padded:
        return value
    if field == "response":
        return value[td["masks"].all_attention_mask[row, -len(value) :]]
    return value[td["masks"].all_attention_mask[row]]


def carried_padded(td, *, tool):
    history = td["history"].full.extend(History.from_chats([[tool]] * len(td)), inplace=False, dim=-1)
    masks = {
        "prompt_assistant_mask": td["masks"].all_assistant_mask,
        "prompt_attention_mask": td["masks"].all_attention_mask,
    }
    columns = {
        "history": ChatHistory.from_rows({"prompt": history}),
        "text": Text.from_rows({"prompt": td["text"].rows("full")}),
        "tokens": Tokens.from_padded({"prompt": td["tokens"].full, "covered": td["tokens"].covered}, [len(td)]),
        "masks": Masks.from_padded(masks),
        "log_probs": LogProbs.from_padded({"prompt": td["log_probs"].full}),
    }
    return TensorDict(columns, td.batch_size)


def test_a_later_turn_equals_rendering_the_whole_conversation(tokenizer):
    policy = fake_policy(tokenizer, ["It is 42.", "Bye."])
    td = policy(carried(policy(history_td(chats(["Hi"]))), tool={"role": "user", "content": "And 7 times 6?"}))
    whole = tokenizer.apply_chat_template(
        td["history"].prompt.to_chats()[0], tokenize=False, add_generation_prompt=True
    )
    assert tokenizer.decode(policy.engine.prompts[1]) == whole
    assert td["text"].rows("prompt") == [whole]


def test_rows_that_start_afresh_are_rendered_among_rows_that_go_on(tokenizer):
    policy = fake_policy(tokenizer, ["one", "two", "three", "four"])
    first = policy(history_td(chats(["Hi", "Hello"])))
    td = carried(first, tool={"role": "user", "content": "more"})
    empty = torch.zeros(0, dtype=torch.int64)
    td["history"] = ChatHistory.from_rows(
        {"prompt": History.stack([History.from_messages(chats(["New"])[0]), td["history"].prompt[1]])}
    )
    td["tokens"] = Tokens.from_rows(
        {"prompt": [empty, rows(td, "tokens", "prompt")[1]], "covered": torch.tensor([0, 2])}
    )
    td["masks"] = Masks.from_rows(
        {"prompt_assistant_mask": [empty.bool(), rows(td, "masks", "prompt_assistant_mask")[1]]}
    )
    td["log_probs"] = LogProbs.from_rows({"prompt": [empty.float(), rows(td, "log_probs", "prompt")[1]]})
    out = policy(td)
    assert torch.equal(policy.engine.prompts[2], Renderer(tokenizer).prompt_ids(chats(["New"]))[0])
    assert torch.equal(
        policy.engine.prompts[3][: len(rows(first, "tokens", "full")[1])], rows(first, "tokens", "full")[1]
    )
    assert out["text"].rows("full")[0].startswith("<|im_start|>user\nNew")
    assert [int(mask.sum()) for mask in rows(out, "masks", "all_assistant_mask")] == [
        len(policy.engine.answers[2]),
        len(policy.engine.answers[1]) + len(policy.engine.answers[3]),
    ]


def test_asking_the_same_prompt_again_uses_the_same_ids(tokenizer):
    policy = fake_policy(tokenizer, ["one", "two", "three", "four"])
    td = policy(history_td(chats(["Hi"])))
    policy(td)
    assert torch.equal(policy.engine.prompts[0], policy.engine.prompts[1])
    later = policy(carried(td, tool={"role": "user", "content": "more"}))
    mask = rows(later, "masks", "all_assistant_mask")[0]
    again = policy(later)
    assert torch.equal(policy.engine.prompts[2], policy.engine.prompts[3])
    assert rows(again, "masks", "all_assistant_mask")[0].sum() == mask.sum() - len(policy.engine.answers[2]) + len(
        policy.engine.answers[3]
    )


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


def test_invalid_text_is_drawn_stored_and_carried_as_ids(tokenizer):
    broken = torch.tensor([*tokenizer.encode("é", add_special_tokens=False)[:1], 300, tokenizer.eos_token_id])
    policy = fake_policy(tokenizer, [broken])
    first = policy(history_td(chats(["Hi"])))
    assert "\ufffd" in first["history"].response.to_chats()[0][0]["content"]
    policy(carried(first, tool={"role": "user", "content": "again"}))
    stored = rows(first, "tokens", "full")[0]
    assert torch.equal(policy.engine.prompts[1][: len(stored)], stored)
