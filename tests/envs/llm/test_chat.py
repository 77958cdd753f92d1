"""ChatEnv keeps a conversation in three views; DatasetChatEnv starts it from data and ends it."""

import pytest
import torch
from tensordict import TensorDict

from llmrl.data.llm.chat import History
from llmrl.data.ragged.tensordicts import column
from llmrl.envs import check_env_specs
from llmrl.envs.llm import ChatEnv, DatasetChatEnv, GSM8KEnv, make_gsm8k_env
from llmrl.envs.llm.transforms import EndOfData, PolicyVersion, RewardFunction
from llmrl.errors import ConfigError, DataError, MissingKeyError
from llmrl.modules.llm.policies.containers import LogProbs, Masks, Tokens
from tests.support.conversations import fake_policy
from tests.support.refusals import refusals


def query(*texts):
    return TensorDict(query=column(texts), batch_size=[len(texts)])


def test_step_carries_every_view_and_the_bookkeeping_of_the_stream(say):
    env = ChatEnv(batch_size=[1])
    td = say(env.reset(query("2 + 2?")), ["4"])
    ids, mask = torch.arange(5), torch.tensor([False, False, False, True, True])
    td.set("tokens", Tokens.from_rows({"full": [ids], "covered": [torch.tensor(2)]}))
    td.set("log_probs", LogProbs.from_rows({"full": [-torch.arange(5.0)]}))
    td.set("masks", Masks.from_rows({"all_assistant_mask": [mask], "all_attention_mask": [mask | True]}))
    after = env.step(td)["next"]
    assert torch.equal(after["tokens"].rows("prompt")[0], ids)
    assert after["tokens"].rows("covered")[0] == 2
    assert after["log_probs"].rows("prompt")[0].tolist() == [0, -1, -2, -3, -4]
    assert torch.equal(after["masks"].rows("prompt_assistant_mask")[0], mask)


def test_a_query_may_be_messages_or_a_history_and_keeps_its_own_system_prompt():
    env = ChatEnv(batch_size=[2], system_prompt="Be brief.")
    own = [{"role": "system", "content": "Be long."}, {"role": "user", "content": "Hi"}]
    given = History.from_messages([{"role": "user", "content": "Hello"}])
    chats = env.reset(query(own, given))["history"].prompt.to_chats()
    assert [[message["content"] for message in chat] for chat in chats] == [["Be long.", "Hi"], ["Be brief.", "Hello"]]


test_what_cannot_work_is_refused = refusals(
    (ValueError, "batch_size .*number of conversations", lambda: ChatEnv(batch_size=[])),
    (ValueError, "Did you mean 'text'", lambda: ChatEnv(input_mode="txt")),
    (ValueError, "needs a tokenizer", lambda: ChatEnv(input_mode="tokens")),
    (MissingKeyError, "'query'; keys present: none", lambda: ChatEnv().reset()),
    (MissingKeyError, r"\('history', 'full'\).*has prompt", lambda: ChatEnv().step(ChatEnv().reset(query("a")))),
    (DataError, "row 2 .*prompt column", lambda: DatasetChatEnv(dataset=[{"question": "a"}, {"quesion": "b"}])),
    (DataError, "at least one row", lambda: DatasetChatEnv(dataset=[])),
)


def test_dataset_env_ends_after_its_turns_and_then_starts_the_next_rows(say):
    rows = [{"question": str(n), "answer": str(n)} for n in range(4)]
    env = DatasetChatEnv(dataset=rows, num_envs=2, shuffle=False, max_steps=2)
    td = env.reset()
    td = env.step(say(td, ["x", "y"]))
    assert not td["next", "done"].any()
    assert td["next", "step_count"].flatten().tolist() == [1, 1]
    td = env.step_mdp(td)
    assert td.get("query").tolist() == ["0", "1"]  # a step carries the columns along
    assert td["group_id"].tolist() == [0, 1]
    td = env.step(say(td, ["x", "y"]))
    assert td["next", "truncated"].all()
    assert not td["next", "terminated"].any()
    assert env.reset().get("query").tolist() == ["2", "3"]


def test_an_epoch_end_is_a_typed_end_and_the_last_batch_may_be_smaller():
    rows = [{"prompt": letter} for letter in "abc"]
    env = DatasetChatEnv(dataset=rows, num_envs=2, shuffle=False, epochs=1)
    assert [env.reset().get("query").tolist() for _ in range(2)] == [["a", "b"], ["c"]]
    with pytest.raises(EndOfData, match="all 1 epochs"):
        env.reset()
    env.reset_dataloader()
    assert env.reset().get("query").tolist() == ["a", "b"]


def test_prompts_need_not_be_called_query():
    env = DatasetChatEnv(dataset=[{"task": "a", "gold": 7}], data_key="ask", prompt_column="task", answer_column="gold")
    td = env.reset()
    assert (td.get("ask").tolist(), td.get("answer").tolist()) == (["a"], ["7"])
    assert td["history"].prompt.to_chats() == [[{"role": "user", "content": "a"}]]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("mode", ["history", "text", "tokens"])
def test_a_rollout_through_resets_starts_every_conversation_with_a_stream_of_its_own(mode, padded, tokenizer):
    policy = fake_policy(tokenizer, ["a", "b c", "d"], input_mode=mode, pad_output=padded)
    rows = [{"prompt": f"q{n}"} for n in range(9)]
    env = DatasetChatEnv(dataset=rows, num_envs=2, shuffle=False, max_steps=2, input_mode=mode, tokenizer=tokenizer)
    batch = env.rollout(6, policy, break_when_any_done=False)
    for row in (batch[b, t] for b in range(2) for t in range(6)):
        full = row["tokens"].full
        text = tokenizer.decode(full[row["masks"].all_attention_mask] if padded else full)
        assert text.startswith("<|im_start|>user")
        assert text.count("<|im_start|>user") == text.count(f"user\n{row['query']}<|im_end|>") == 1


def test_a_running_padded_conversation_goes_on_beside_a_new_one(tokenizer):
    policy = fake_policy(tokenizer, ["a", "b c"], pad_output=True)
    engine = policy.engine
    env = DatasetChatEnv(dataset=[{"prompt": "q"}], num_envs=2, max_steps=None)
    td = env.step_mdp(env.step(policy(env.reset())))
    td["_reset"] = torch.tensor([[True], [False]])
    td = policy(env.reset(td))
    assert torch.equal(engine.prompts[2], engine.prompts[0])  # a new conversation, of the same question
    whole = torch.cat([engine.prompts[1], engine.answers[1]])
    assert torch.equal(engine.prompts[3][: len(whole)], whole)


@pytest.mark.parametrize("pad_output", [False, True], ids=["ragged", "padded"])
@pytest.mark.parametrize("mode", ["history", "text", "tokens"])
def test_what_a_policy_leaves_and_the_env_carries_is_declared(mode, pad_output, tokenizer):
    env = ChatEnv(batch_size=[2], input_mode=mode, tokenizer=tokenizer)
    policy = fake_policy(tokenizer, ["4", "It is 4."], input_mode=mode, pad_output=pad_output)
    check_env_specs(env, tensordict=TensorDict(query=["2 + 2?", "What is 2 + 2?"], batch_size=[2]), policy=policy)
    declared = {*env.full_observation_spec.keys(), *env.full_state_spec.keys(), *env.full_action_spec.keys()}
    assert {"text", "tokens", "masks", "log_probs"} <= declared


def test_every_column_that_a_conversation_starts_from_is_declared(tokenizer):
    rows = [{"question": "2 + 2?", "answer": "4", "ids": torch.arange(3)}]
    env = DatasetChatEnv(dataset=rows, num_envs=2, seed=0, max_steps=3, tokenizer=tokenizer)
    for transform in (PolicyVersion("uuid"), RewardFunction(lambda completion, answer: 1.0)):
        env.append_transform(transform)
    check_env_specs(env, policy=fake_policy(tokenizer, ["4"]))
    assert env.full_state_spec["ids"].shape == (2, 3)
    assert {"query", "answer", "group_id", "seed"} <= set(env.full_state_spec.keys())


@pytest.mark.parametrize("mode", ["history", "text", "tokens"])
@pytest.mark.parametrize("key", ["text", "tokens", "history", "masks"])
def test_what_the_user_says_may_stand_under_the_name_of_a_view(mode, key, tokenizer):
    """Regression: a column of prompts under "text" was taken for what a policy left there."""
    env = ChatEnv(batch_size=[2], input_mode=mode, tokenizer=tokenizer, data_key=key)
    policy = fake_policy(tokenizer, ["4", "6"], input_mode=mode)
    asked = TensorDict({key: ["2 + 2?", "3 + 3?"]}, batch_size=[2])
    td = env.reset(asked)
    assert set(td.keys()) - {"done", "terminated", "truncated"} == {mode, key}
    same = ChatEnv(batch_size=[2], input_mode=mode, tokenizer=tokenizer)
    other = policy(same.reset(query("2 + 2?", "3 + 3?")))
    assert policy(td)["tokens"].rows("full")[1].equal(other["tokens"].rows("full")[1])
    assert env.rollout(2, policy, tensordict=asked).shape == (2, 2)


@pytest.mark.parametrize("mode", ["history", "text", "tokens"])
def test_without_a_policy_an_answer_of_letters_goes_on_from_the_prompt(mode, tokenizer):
    rows = [{"question": "2 + 2?", "answer": "4"}]
    env = DatasetChatEnv(dataset=rows, num_envs=2, input_mode=mode, tokenizer=tokenizer, max_steps=3)
    env.append_transform(RewardFunction(lambda completion: len(completion)))
    env.check_env_specs()
    env.set_seed(3)
    turns = []
    batch = env.rollout(5, callback=lambda _, td: turns.append(td.get(mode)))
    assert batch["next", "reward"].tolist() == [[[[8.0]]] * 3] * 2
    assert env.full_reward_spec["reward"].shape == (2, 1, 1)
    sizes = [len(turn.rows(field)[0]) for turn in turns for field in ("prompt", "full")]
    assert sizes == sorted(sizes)
    assert sizes[1] == sizes[2] > sizes[0]
    env.set_seed(3)
    assert str(env.rand_step().get(mode).rows("response")) == str(turns[0].rows("response"))
    with pytest.raises(MissingKeyError, match="reset the env first"):
        env.rand_action()


def test_the_arguments_of_a_data_loader_are_taken_and_ray_is_refused_by_its_value():
    rows = [{"question": "2 + 2?", "answer": "#### 4"}]
    taken = {"batch_size_dl": 4, "apply_template": True, "ray_backend": False, "dataloader_actor_name": None}
    for kind in (DatasetChatEnv, GSM8KEnv):
        assert kind(dataset=rows, **taken).reset()["history"].prompt.to_chats()[0][-1]["content"] == "2 + 2?"
        for wrong in ({"ray_backend": True}, {"dataloader_actor_name": "loader"}, {"batch_size_dl": 0}):
            with pytest.raises(ConfigError, match=f"{kind.__name__}: .*{next(iter(wrong))}"):
                kind(dataset=rows, **wrong)
    assert make_gsm8k_env(rows, 1, 2, 8, 0).reset().get("answer").tolist() == ["#### 4"]
