"""A turn that cannot continue the stream of the turn before starts a training record of its own."""

import logging

import pytest
import torch
from tensordict import TensorDict

from llmrl.data.llm.chat import History
from llmrl.data.ragged.tensordicts import column
from llmrl.envs.llm import ChatEnv
from llmrl.errors import ConfigError, RewriteError
from llmrl.modules.llm import ChatHistory, Tokens
from llmrl.testing import tiny_tokenizer
from tests.support.conversations import fake_policy, history_td, prompt_after, rows

THINKING = "<think>\nTwo and two.\n</think>\n\nIt is 4."
SILENT_TWICE = (  # an answer is hidden as soon as the model is asked again
    "{% for m in messages %}{% if m.role != 'assistant' or not add_generation_prompt %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer(template="qwen3")


def talk(policy, num_turns, questions=("What is 2+2?",), said="And now?", edit=None):
    """The turns of a rollout in a ChatEnv whose user says the same again and again; ``edit(next_td)`` changes more."""
    env = ChatEnv(batch_size=[len(questions)])
    td = env.reset(TensorDict(query=column(list(questions)), batch_size=[len(questions)]))
    turns = []
    for _ in range(num_turns):
        td = env.step(policy(td))
        turns.append(td)
        if said is not None:
            more = [[{"role": "user", "content": said}]] * len(questions)
            td["next"].set("history", prompt_after(td["next", "history"].prompt, more))
        if edit is not None:
            edit(td["next"])
        td = env.step_mdp(td)
    return turns


def flags(turns):
    return [turn["new_record"].tolist() for turn in turns]


def trained(td, row=0):
    return rows(td, "tokens", "full")[row][rows(td, "masks", "all_assistant_mask")[row]]


@pytest.mark.parametrize("pad_output", [False, True])
def test_a_turn_that_drops_thinking_starts_anew_with_nothing_of_the_old_stream(tokenizer, pad_output):
    options = {"pad_output": pad_output, "generate_kwargs": {"top_k": 5}}
    policy = fake_policy(tokenizer, [THINKING, THINKING + " Still."], **options)
    turns = talk(policy, 3)
    assert flags(turns) == [[True], [True], [True]]
    for number, turn in enumerate(turns):
        [drawn] = rows(turn, "tokens", "response")
        chat = turn["history"].prompt.to_chats()[0]
        assert torch.equal(policy.engine.prompts[number], policy.renderer.prompt_ids([chat])[0])
        assert "think" not in tokenizer.decode(policy.engine.prompts[number])
        assert torch.equal(trained(turn), drawn)
        for name in ("full", "plain"):
            [values] = rows(turn, "log_probs", name)
            assert int((values != 0).sum()) == len(drawn)
            assert not values[: -len(drawn)].any()
        assert turn["text"].rows("full")[0] == tokenizer.decode(rows(turn, "tokens", "full")[0])
        assert turn["history"].full.to_chats()[0][1]["content"] == THINKING  # the view keeps everything


def test_it_is_counted_and_said_once(tokenizer, caplog):
    policy = fake_policy(tokenizer, [THINKING])
    with caplog.at_level(logging.WARNING):
        talk(policy, 3, ["a", "b"])
    assert policy.counters == {"rewritten": 4}
    [record] = caplog.records
    assert "'qwen3' rewrites the past" in record.message
    assert "starts a new record" in record.message


def test_rows_of_one_batch_may_differ(tokenizer):
    answers = [THINKING, "It is 4.", "Five.", THINKING, "Six.", "Seven."]
    policy = fake_policy(tokenizer, answers)
    turns = talk(policy, 3, ["think", "do not"])
    assert flags(turns) == [[True, True], [True, False], [False, True]]
    assert policy.counters == {"rewritten": 2}
    engine = policy.engine.prompts
    first, second = rows(turns[2], "tokens", "full")
    assert torch.equal(first[: len(engine[4])], engine[4])
    assert torch.equal(second[: len(engine[5])], engine[5])
    assert tokenizer.decode(trained(turns[2], 0)) == "Five.<|im_end|>Six.<|im_end|>"
    assert tokenizer.decode(trained(turns[2], 1)) == "Seven.<|im_end|>"
    assert tokenizer.decode(trained(turns[1], 1)) == f"It is 4.<|im_end|>{THINKING}<|im_end|>"
    masks = [mask.tolist() for mask in rows(turns[2], "masks", "all_assistant_mask")]
    assert [(row != 0).tolist() for row in rows(turns[2], "log_probs", "full")] == masks


@pytest.mark.parametrize(
    ("family", "answer", "options", "expected"),
    [
        *[(family, THINKING, {}, [[True], [False], [False]]) for family in ("qwen", "llama3", "gemma")],
        ("gpt_oss", "<|channel|>final<|message|>It is 4.", {}, [[True], [True], [True]]),
        ("qwen", "It is 4.", {"prefer_tokens": False}, [[True], [True], [True]]),
    ],
)
def test_the_template_decides_how_many_records_there_are(family, answer, options, expected):
    policy = fake_policy(tiny_tokenizer(template=family), [answer], **options)
    assert flags(talk(policy, 3)) == expected
    assert policy.counters == {"rewritten": 2 * (family == "gpt_oss")}


def test_a_template_that_hides_answers_without_a_new_message_is_seen_too():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = SILENT_TWICE
    policy = fake_policy(tokenizer, ["It is 4."])
    assert flags(talk(policy, 2, said=None)) == [[True], [True]]
    assert torch.equal(*policy.engine.prompts)


def test_it_can_be_an_error_that_names_the_way_out(tokenizer):
    policy = fake_policy(tokenizer, [THINKING], prefer_tokens="always")
    with pytest.raises(RewriteError, match=r"row 0 does not .*'qwen3' rewrites the past.*env.on_rewrite=new_record"):
        talk(policy, 2)
    assert flags(talk(fake_policy(tokenizer, ["It is 4."], prefer_tokens="always"), 2)) == [[True], [False]]
    with pytest.raises(ConfigError, match="prefer_tokens must be True, False or 'always'"):
        fake_policy(tokenizer, ["a"], prefer_tokens="never")


def test_a_transform_that_edits_the_past_drops_the_tokens_and_starts_a_record():
    policy = fake_policy(tiny_tokenizer(), ["It is 4.", "It is 5.", "Six."])

    def forget(next_td):
        again = {"role": "user", "content": "Begin again."}
        chats = [[chat[0], again] for chat in next_td["history"].prompt.to_chats()]
        next_td.set("history", ChatHistory.from_rows({"prompt": History.from_chats(chats)}))
        del next_td["tokens"]

    turns = talk(policy, 3, edit=forget)
    assert flags(turns) == [[True], [True], [True]]
    for number, turn in enumerate(turns):
        assert len(turn["history"].prompt.to_chats()[0]) == (2 if number else 1)
        assert torch.equal(trained(turn), rows(turn, "tokens", "response")[0])
        assert turn["text"].rows("prompt")[0].count("Begin again.") == (1 if number else 0)


def test_a_transform_can_end_the_record_of_single_rows():
    policy = fake_policy(tiny_tokenizer(), ["one", "two", "three", "four"])

    def forget_first(next_td):
        tokens = next_td["tokens"]
        ids = [tokens.rows("prompt")[0][:0], *tokens.rows("prompt")[1:]]
        next_td.set("tokens", Tokens.from_rows({"prompt": ids, "covered": tokens.covered}))

    turns = talk(policy, 2, ["a", "b"], edit=forget_first)
    assert flags(turns) == [[True, True], [True, False]]
    decode, asked = policy.tokenizer.decode, turns[1]["history"].prompt.to_chats()
    assert [decode(trained(turns[1], row)) for row in range(2)] == ["three<|im_end|>", "two<|im_end|>four<|im_end|>"]
    assert torch.equal(policy.engine.prompts[2], policy.renderer.prompt_ids(asked)[0])  # rendered anew
    before = rows(turns[0], "tokens", "full")[1]
    assert torch.equal(policy.engine.prompts[3][: len(before)], before)
    assert turns[1]["text"].rows("full") == [decode(ids) for ids in rows(turns[1], "tokens", "full")]


def test_samples_of_a_prompt_share_the_flag(tokenizer):
    policy = fake_policy(tokenizer, [THINKING])
    [turn] = talk(policy, 1)
    more = policy.get_new_version(num_samples=3)
    root = ChatEnv(batch_size=[1]).step_mdp(turn)
    assert more(root)["new_record"].tolist() == [[True] * 3]
    root["history"] = ChatHistory.from_rows({"prompt": turn["next", "history"].prompt[:, :2]})
    assert more(root)["new_record"].tolist() == [[False] * 3]


@pytest.mark.parametrize("pad_output", [False, True])
def test_a_truncated_answer_is_continued_where_no_message_follows(pad_output):
    tokenizer = tiny_tokenizer()
    begun = torch.tensor(tokenizer("It is").input_ids)
    policy = fake_policy(tokenizer, [begun, " 4."], pad_output=pad_output)
    first, second = talk(policy, 2, said=None)
    assert flags([first, second]) == [[True], [False]]
    [whole] = first["tokens"].rows("full")
    assert torch.equal(policy.engine.prompts[1], whole)  # bit for bit, and nothing behind it
    answer = {"role": "assistant", "content": "It is 4."}
    assert second["history"].full.to_chats() == [[{"role": "user", "content": "What is 2+2?"}, answer]]
    assert second["history"].response.to_chats() == [[{"role": "assistant", "content": " 4."}]]
    assert tokenizer.decode(trained(second)) == "It is 4.<|im_end|>"
    assert second["text"].rows("full") == [tokenizer.decode(second["tokens"].rows("full")[0])]
    # then the user speaks
    td = ChatEnv(batch_size=[1]).step_mdp(second)
    td["history"] = prompt_after(second["next", "history"].prompt, [[{"role": "user", "content": "And 3+3?"}]])
    third = policy(td)
    assert third["new_record"].tolist() == [False]
    assert tokenizer.decode(policy.engine.prompts[2]).endswith(
        "It is 4.<|im_end|>\n<|im_start|>user\nAnd 3+3?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_an_unfinished_prompt_converts_to_the_ids_that_the_policy_is_given():
    tokenizer = tiny_tokenizer()
    policy = fake_policy(tokenizer, ["4."])
    chat = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "It is ", "is_complete": False}]
    td = policy(history_td([chat]))
    converted = td["history"].to_tokens(tokenizer)
    assert torch.equal(converted.rows("prompt")[0], policy.engine.prompts[0])
    assert tokenizer.decode(converted.rows("response")[0]).startswith("4.<|im_end|>")


def test_a_chain_of_tool_calls_keeps_its_thinking_and_its_record(tokenizer):
    policy = fake_policy(tokenizer, [THINKING])
    env = ChatEnv(batch_size=[1])
    td = env.step(policy(env.reset(TensorDict(query=column(["2+2?"]), batch_size=[1]))))
    td["next"].set("history", prompt_after(td["next", "history"].prompt, [[{"role": "tool", "content": "4"}]]))
    after = policy(env.step_mdp(td))
    assert after["new_record"].tolist() == [False]
    assert tokenizer.decode(trained(after)) == f"{THINKING}<|im_end|>" * 2
    assert policy.counters == {"rewritten": 0}
