"""A wrong answer becomes a reason to think again; a right one, a limit and a failed reward stay what they are."""

import math

import pytest
import torch
from tensordict import TensorDict

from llmrl.envs import StepCounter, Transform
from llmrl.envs.llm import ChatEnv, GSM8KEnv, GSM8KRewardParser
from llmrl.envs.llm.transforms import AddThinkingPrompt, ToolTransform
from llmrl.envs.llm.transforms.thinking import ADDRESSED, EGOCENTRIC
from llmrl.errors import ConfigError, MissingKeyError
from llmrl.testing import ScriptedPolicy, tiny_tokenizer
from tests.support.conversations import fake_policy, rows
from tests.support.refusals import refusals

TOKENIZER = tiny_tokenizer()
WRONG = "<think>2 + 2 is 5</think><answer>5</answer>"
RIGHT = "<think>2 + 2 is 4</think><answer>4</answer>"


def wrong(row):
    return row["reward"] < 1


def gsm8k(num_envs=1, max_steps=10, **options):
    env = GSM8KEnv(dataset=[{"question": "2 + 2?", "answer": "Add. #### 4"}], num_envs=num_envs, max_steps=max_steps)
    return env.append_transform(AddThinkingPrompt(wrong, **options))


def answered(env, *answers):
    return env.step(ScriptedPolicy(list(answers))(env.reset()))["next"]


def messages(after):
    return after["history"].prompt.to_chats()[0]


@pytest.mark.parametrize("zero_reward", [None, False])
@pytest.mark.parametrize("undo_done", [True, False])
def test_a_wrong_answer_is_edited_into_a_doubt(undo_done, zero_reward):
    after = answered(gsm8k(undo_done=undo_done, zero_reward=zero_reward), WRONG)
    assert after["history"].prompt.shape == (1, 3)
    assert messages(after)[-1] == {"role": "assistant", "content": f"<think>2 + 2 is 5</think>{EGOCENTRIC[0]}"}
    assert after["reward"].item() == pytest.approx(0.0 if zero_reward is None else 0.1)
    assert after["done"].item() == after["terminated"].item() == (not undo_done)


@pytest.mark.parametrize("role", ["assistant", "user"])
def test_or_it_is_answered_by_a_message(role):
    after = answered(gsm8k(edit_last_turn=False, role=role), WRONG)
    assert after["history"].prompt.shape == (1, 4)
    asked = (EGOCENTRIC if role == "assistant" else ADDRESSED)[0]
    assert messages(after)[-1] == {"role": role, "content": asked}
    assert after["history"].prompt[0, -1].is_complete == (role == "user")
    assert after["reward"].item() == pytest.approx(0.1)  # zero_reward follows edit_last_turn
    assert not after["done"].item()


def test_only_the_last_answer_block_goes_and_without_one_the_doubt_comes_at_the_end():
    env = gsm8k(prompt="Hm.")
    two = "<answer>1</answer> or <answer>5</answer> so"
    assert messages(answered(env, two))[-1]["content"] == "<answer>1</answer> or Hm."
    assert messages(answered(env, "It is 5.<|im_end|>"))[-1]["content"] == "It is 5.Hm."


def test_a_conversation_that_a_limit_ended_stays_ended_and_as_it_is():
    after = answered(gsm8k(max_steps=1), WRONG)
    assert after["done"].item()
    assert after["truncated"].item()
    assert after["reward"].item() == pytest.approx(0.1)
    assert messages(after)[-1]["content"] == WRONG


class Score(Transform):
    def __init__(self, *values):
        super().__init__()
        self.values = values

    def _step(self, td, next_td):
        return next_td.set("reward", torch.tensor(self.values).view(-1, 1, 1))


def test_a_reward_that_failed_is_not_made_a_zero():
    env = ChatEnv(batch_size=[2]).append_transform(Score(math.nan, 0.5))
    env = env.append_transform(AddThinkingPrompt(lambda _: 1))
    td = env.reset(TensorDict(query="?", batch_size=[2]))
    assert str(env.step(ScriptedPolicy(["a"])(td))["next", "reward"].flatten().tolist()) == "[nan, 0.0]"


def turns(mode, answers, pad_output=False, **options):
    env = ChatEnv(batch_size=[2], input_mode=mode, tokenizer=TOKENIZER)
    env = env.append_transform(GSM8KRewardParser(tokenizer=TOKENIZER)).append_transform(StepCounter(8))
    env.append_transform(AddThinkingPrompt(wrong, prompt="Hm.", tokenizer=TOKENIZER, **options))
    sampling = {"max_new_tokens": 99}
    policy = fake_policy(TOKENIZER, answers, input_mode=mode, pad_output=pad_output, generate_kwargs=sampling)
    td = env.reset(TensorDict(query=["2 + 2?", "What is 2 + 2?"], answer="#### 4", batch_size=[2]))
    first = env.step(policy(td))
    return first, policy(env.step_mdp(first)), policy.engine


@pytest.mark.parametrize("pad_output", [False, True], ids=["ragged", "padded"])
@pytest.mark.parametrize("mode", ["history", "text", "tokens"])
def test_an_edited_turn_starts_a_record_in_which_it_is_not_trained(mode, pad_output):
    first, second, engine = turns(mode, [WRONG, RIGHT, "4", "4"], pad_output)
    assert first["next", "done"].flatten().tolist() == [False, True]
    assert second["new_record"].tolist() == [True, False]
    seen = TOKENIZER.decode(engine.prompts[2])
    assert "<think>2 + 2 is 5</think>Hm." in seen
    assert "<answer>5" not in seen
    columns = (("tokens", "full"), ("masks", "all_assistant_mask"), ("masks", "all_attention_mask"))
    turns_of = zip(*(rows(second, *key) for key in columns), strict=True)
    trained = [TOKENIZER.decode(ids[wrote & kept]) for ids, wrote, kept in turns_of]
    assert trained == ["4<|im_end|>", f"{RIGHT}<|im_end|>4<|im_end|>"]  # the other row goes on


@pytest.mark.parametrize("mode", ["history", "text", "tokens"])
def test_an_appended_message_continues_the_stream(mode):
    first, second, engine = turns(mode, [WRONG, WRONG, "4", "4"], edit_last_turn=False, role="user")
    assert second["new_record"].tolist() == [False, False]
    for row, before in enumerate(rows(first, "tokens", "full")):
        assert torch.equal(engine.prompts[2 + row][: len(before)], before)
        assert TOKENIZER.decode(engine.prompts[2 + row][len(before) :]).count("Hm.") == 1


@pytest.mark.parametrize("family", ["qwen", "qwen3", "llama3", "gemma", "mistral", "deepseek"])
def test_the_policy_goes_on_with_its_edited_message_and_every_mode_shows_the_engine_the_same_ids(family):
    tokenizer = tiny_tokenizer(template=family)
    lead = " " if family == "mistral" else ""  # what the template writes before an answer, its models write
    prompts = {}
    for mode in ("history", "text", "tokens"):
        env = ChatEnv(batch_size=[1], input_mode=mode, tokenizer=tokenizer)
        env = env.append_transform(Score(0.0)).append_transform(AddThinkingPrompt(wrong, prompt="Hm."))
        policy = fake_policy(tokenizer, [lead + WRONG, " No: 4", "4"], input_mode=mode)
        td = env.reset(TensorDict(query="2 + 2?", batch_size=[1]))
        for _ in range(3):
            td = env.step(policy(td))
            if mode == "history":
                said = [message["content"] for message in td["history"].full.to_chats()[0][1:]]
            td = env.step_mdp(td)
        prompts[mode] = [ids.tolist() for ids in policy.engine.prompts]
    first, second, third = (tokenizer.decode(ids) for ids in prompts["history"])
    assert second == f"{first}{lead}<think>2 + 2 is 5</think>Hm."
    assert third == f"{second} No: 4Hm."
    assert prompts["history"] == prompts["text"] == prompts["tokens"]
    assert said == ["<think>2 + 2 is 5</think>Hm. No: 4Hm.4"]  # one message


def test_a_thought_of_its_own_behind_the_answer_is_gone_on_with():
    first, second, engine = turns("history", [WRONG, WRONG, " 4", " 4"], edit_last_turn=False)
    for row, before in enumerate(rows(first, "tokens", "full")):
        added = TOKENIZER.decode(engine.prompts[2 + row][len(before) :])
        assert added == "\n<|im_start|>assistant\nHm."
    assert second["history"].full.to_chats()[0][-1] == {"role": "assistant", "content": "Hm. 4"}


def test_what_a_tool_said_to_the_answer_is_not_in_the_edited_conversation():
    env = GSM8KEnv(dataset=[{"question": "2 + 2?", "answer": "#### 4"}], max_steps=10)
    env.append_transform(ToolTransform(["calculator"], end_without_call=False))
    env.append_transform(AddThinkingPrompt(wrong, prompt="Hm."))
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "2+3"}}</tool_call>'
    chat = messages(answered(env, f"{call}<answer>5</answer>"))
    assert [message["role"] for message in chat] == ["system", "user", "assistant"]
    assert chat[-1]["content"] == f"{call}Hm."


def test_random_prompts_follow_the_seed_and_a_saved_state():
    def drawn(transform, count):
        return [transform._prompt() for _ in range(count)]

    first, second = (AddThinkingPrompt(wrong, random_prompt=True) for _ in range(2))
    for transform in (first, second):
        transform._set_seed(3)
    whole = drawn(first, 12)
    assert len(set(whole)) == 3
    assert drawn(second, 5) == whole[:5]
    other = AddThinkingPrompt(wrong, random_prompt=True)
    other.load_state_dict(second.state_dict())
    assert drawn(other, 7) == whole[5:]


test_settings_that_contradict_each_other_are_refused = refusals(
    (ConfigError, "leave prompt out", lambda: AddThinkingPrompt(wrong, "Hm.", random_prompt=True)),
    (ConfigError, "edit_last_turn=False", lambda: AddThinkingPrompt(wrong, role="user")),
    (ConfigError, "cond must be a function", lambda: AddThinkingPrompt("reward < 1")),
    (MissingKeyError, "a conversation in 'next'", lambda: AddThinkingPrompt(wrong)._step(TensorDict(), TensorDict())),
)
