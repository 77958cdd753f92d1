"""UserTurn: messages between the turns of the policy, ends of conversations, and failures of the user."""

import threading

import pytest
import torch
from tensordict import TensorDict
from transformers import GPT2Config, GPT2LMHeadModel

from llmrl.collectors.llm import LLMCollector
from llmrl.envs.llm import ChatEnv, DatasetChatEnv
from llmrl.envs.llm.transforms import RewardFunction, UserTurn
from llmrl.errors import ConfigError
from llmrl.modules.llm import TransformersWrapper
from llmrl.modules.llm.engines import StopReason
from llmrl.testing import ScriptedPolicy, tiny_model, tiny_tokenizer
from tests.support.refusals import refusals

ROWS = [{"question": "a", "answer": "1"}, {"question": "b", "answer": "2"}]


def talk(user, replies, *, rows=ROWS, turns=4):
    """All turns, and what the conversations came to."""
    env = DatasetChatEnv(dataset=rows, num_envs=len(rows), shuffle=False, max_steps=turns).append_transform(user)
    env.append_transform(RewardFunction(len))
    td, policy, steps = env.reset(), ScriptedPolicy(replies), []
    while True:
        td = env.step(policy(td))
        steps.append(td)
        if td["next", "done"].all():
            return steps, td["next", "history"].prompt.to_chats()
        td = env.step_mdp(td)


def test_a_reply_is_the_next_message_and_none_ends_the_conversation():
    asked = []

    def reply(messages):
        asked.append([message["content"] for message in messages])
        return "more" if len(messages) < 4 else None

    steps, chats = talk(UserTurn(reply), ["x", "y"], rows=ROWS[:1])
    assert asked == [["a", "x"], ["a", "x", "more", "y"]]
    assert [message["role"] for message in chats[0]] == ["user", "assistant", "user", "assistant"]
    assert [step["next", "terminated"].item() for step in steps] == [False, True]
    assert not steps[-1]["next", "truncated"].any()


def test_the_user_is_not_asked_once_the_conversation_is_over():
    asked = []
    steps, chats = talk(UserTurn(lambda messages: asked.append(1) or "more"), ["x"], rows=ROWS[:1], turns=2)
    assert len(asked) == 1, "the second turn is the last"
    assert steps[-1]["next", "truncated"].item()
    assert chats[0][-1]["role"] == "assistant"


@pytest.mark.parametrize("value", [3, ["more"], RuntimeError("gone")])
def test_a_failed_reply_leaves_its_conversation_without_reward_and_the_others_alone(value):
    def reply(messages, answer):
        if answer == "2":
            return None
        if isinstance(value, Exception):
            raise value
        return value

    user = UserTurn(reply, retries=1)
    [step], _ = talk(user, ["xyz"])
    after = step["next"]
    assert after["truncated"].flatten().tolist() == [True, False]
    assert after["terminated"].flatten().tolist() == [False, True]
    assert (after["reward"].flatten().isnan().tolist(), after["reward"][1].item()) == ([True, False], 3.0)
    assert user.first_error
    assert user.counters == {"replies": 0, "ended": 1, "failed": 1, "retries": int(isinstance(value, Exception))}


def test_a_reply_that_never_comes_fails_at_the_deadline():
    never = threading.Event()
    user = UserTurn(lambda messages: never.wait(60) and None, deadline_s=0.2)
    [step], _ = talk(user, ["x"])
    never.set()
    assert step["next", "reward"].isnan().all()
    assert user.first_error == "the user did not answer within 0.2 s"


def in_tokens_mode():
    return ChatEnv(input_mode="tokens", tokenizer=tiny_tokenizer()).append_transform(UserTurn(lambda messages: None))


NEAR_NAME = r"'anser' must be a column.*Did you mean 'answer'"
test_settings_and_functions_that_cannot_be_used_are_refused = refusals(
    (ConfigError, r"input_mode='history'.*got 'tokens'", in_tokens_mode),
    (ConfigError, NEAR_NAME, lambda: talk(UserTurn(lambda messages, anser: None), ["x"])),
    (ConfigError, "retries must be at least 0", lambda: UserTurn(lambda messages: None, retries=-1)),
    (ConfigError, "concurrency must be at least 1", lambda: UserTurn(lambda messages: None, concurrency=0)),
    (ConfigError, "first parameter .*messages", lambda: UserTurn(lambda *, messages: None)),
    (ConfigError, "must be a function: got a str", lambda: UserTurn("reply")),
)


def test_a_copy_counts_for_itself():
    user = UserTurn(lambda messages: None)
    other = user.clone()
    env = ChatEnv(batch_size=[1]).append_transform(other)
    env.step(ScriptedPolicy(["x"])(env.reset(TensorDict(query="q", batch_size=[1]))))
    assert (user.counters["ended"], other.counters["ended"]) == (0, 1)


@pytest.mark.parametrize("positions", ["learned", "rotary"])
@pytest.mark.parametrize("concurrent", [False, True])
def test_a_conversation_that_outgrows_the_context_ends_as_truncated_and_the_others_go_on(positions, concurrent):
    """Regression: one long reply was an error of the whole batch, or trained a row of any length."""
    tokenizer = tiny_tokenizer()
    torch.manual_seed(0)  # of the random weights: with others an answer may end before its limit
    if positions == "learned":
        sizes = {"n_positions": 96, "n_embd": 32, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
        model, limit = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **sizes)), {}
    else:
        model, limit = tiny_model(tokenizer), {"max_conversation_tokens": 96}
    policy = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 24, "seed": 0}, **limit)
    assert policy.context_length == 96

    def reply(messages, answer):
        return "word " * (400 if answer == "0" else 2)

    rows = [{"query": f"{n}?", "answer": str(n % 4)} for n in range(8)]
    env = DatasetChatEnv(dataset=rows, num_envs=8, shuffle=False, seed=0, max_steps=3).append_transform(UserTurn(reply))
    options = {"async_envs": True, "dialog_turns_per_batch": 16} if concurrent else {"dialog_turns_per_batch": 24}
    collector = LLMCollector(env, policy=policy, yield_only_last_steps=True, **options)
    batch = next(iter(collector)) if concurrent else collector.rollout()
    collector.shutdown()
    lengths = [len(row) for row in batch.get(("tokens", "full"), as_list=True)]
    sampled = [int(row.sum()) for row in batch.get(("masks", "all_assistant_mask"), as_list=True)]
    long = [answer == "0" for answer in batch.get("answer").tolist()]
    assert max(lengths) <= 96
    assert {count for count, is_long in zip(sampled, long, strict=True) if is_long} == {24}, "its first answer is kept"
    assert min(count for count, is_long in zip(sampled, long, strict=True) if not is_long) > 24
    assert batch["next", "truncated"].all()
    ended = batch["stop_reason"].flatten()[torch.tensor(long)]
    assert (ended == StopReason.LENGTH).all()


@pytest.mark.parametrize("mode", ["history", "text", "tokens"])
@pytest.mark.parametrize("pad_output", [False, True])
def test_a_first_prompt_without_room_ends_its_own_conversation(mode, pad_output):
    tokenizer = tiny_tokenizer()
    options = {"input_mode": mode, "pad_output": pad_output, "max_conversation_tokens": 40}
    policy = TransformersWrapper(tiny_model(tokenizer), tokenizer=tokenizer, **options)
    env = ChatEnv(batch_size=[2], input_mode=mode, tokenizer=None if mode == "history" else tokenizer)
    out = env.step(policy(env.reset(TensorDict(query=["hi", "word " * 100], batch_size=[2]))))
    assert out["next", "truncated"].flatten().tolist() == [False, True]
