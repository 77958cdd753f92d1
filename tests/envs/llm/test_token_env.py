"""Environments of flat text and ids: steps, ends, and the numbers of prefixes."""

import pytest
import torch
from tensordict import TensorDict

from llmrl.envs import check_env_specs
from llmrl.envs.llm import LLMEnv, LLMHashingEnv
from llmrl.envs.llm.token_env import prefix_hash
from llmrl.errors import ConfigError, MissingKeyError, ShapeError
from tests.support.refusals import refusals

PROMPTS = torch.tensor([[5, 6, 7], [8, 9, 7]])


def test_a_step_appends_ids_and_lengthens_the_mask():
    env = LLMEnv(from_text=False, batch_size=[2])
    mask = torch.tensor([[False, True, True], [True, True, True]])
    td = env.reset(TensorDict(tokens=PROMPTS, attention_mask=mask, batch_size=[2]))
    td["tokens_response"] = torch.tensor([[1, 2], [3, 4]])
    after = env.step(td)["next"]
    assert after["tokens"].tolist() == [[5, 6, 7, 1, 2], [8, 9, 7, 3, 4]]
    assert after["attention_mask"].tolist() == [[False, True, True, True, True], [True] * 5]
    assert not after["done"].any()
    assert "reward" not in after
    td = env.step_mdp(td)
    td["tokens_response"] = torch.tensor([[1], [1]])
    assert env.step(td)["next", "tokens"].shape == (2, 6)


def test_the_mask_is_made_where_none_is_given_and_left_out_where_none_is_wanted():
    td = TensorDict(tokens=PROMPTS, batch_size=[2])
    assert LLMEnv(from_text=False, batch_size=2).reset(td)["attention_mask"].all()
    assert "attention_mask" not in LLMEnv(from_text=False, has_attention=False, batch_size=2).reset(td)


def test_an_end_token_in_the_action_ends_the_row_and_one_in_the_prompt_does_not():
    env = LLMEnv(from_text=False, assign_done=True, assign_reward=True, eos_token_id=7, batch_size=[2])
    td = env.reset(TensorDict(tokens=PROMPTS, batch_size=[2]))
    assert not td["done"].any()
    td["tokens_response"] = torch.tensor([[1, 7], [3, 4]])
    after = env.step(td)["next"]
    assert after["done"].tolist() == after["terminated"].tolist() == [[True], [False]]
    assert torch.equal(after["reward"], torch.zeros(2, 1, 1))


@pytest.mark.parametrize("options", [{}, {"assign_reward": True, "assign_done": True}])
def test_the_specs_of_text_and_of_ids_are_kept(options):
    texts = TensorDict(text=["x", "y"], batch_size=[2])
    speak = LLMEnv(batch_size=[2], **options)
    check_env_specs(speak, tensordict=texts, policy=lambda td: td.set("text_response", [" a", " b"]))
    draw = LLMEnv(batch_size=[2], from_text=False, vocab_size=10, **options)
    ids = TensorDict(tokens=PROMPTS, batch_size=[2])
    check_env_specs(draw, tensordict=ids, policy=lambda td: td.set("tokens_response", torch.randint(10, (2, 3))))


def test_prompts_come_from_a_dataloader_as_text_or_tokenised(tokenizer):
    rows = [{"text": "Hi"}, {"text": "What is 2+2?"}]
    env = LLMEnv.from_dataloader(rows, batch_size=2, repeats=2, group_repeats=True)
    td = env.reset()
    assert td.get("text").tolist() == ["Hi", "Hi", "What is 2+2?", "What is 2+2?"]
    assert td["group_id"].tolist() == [0, 0, 1, 1]
    ids = LLMEnv.from_dataloader(rows, batch_size=2, from_text=False, tokenizer=tokenizer)
    td = ids.reset()
    kept = [tokenizer.decode(row[mask]) for row, mask in zip(td["tokens"], td["attention_mask"], strict=True)]
    assert kept == ["Hi", "What is 2+2?"]
    td["tokens_response"] = torch.tensor([[1], [2]])
    assert ids.step(td)["next", "tokens"][:, -1].tolist() == [1, 2]
    given = LLMEnv.from_dataloader([{"tokens": torch.arange(3)}], batch_size=2, from_text=False)
    assert given.reset()["tokens"].tolist() == [[0, 1, 2]] * 2


test_what_an_env_cannot_do_is_refused = refusals(
    (ConfigError, "as_llm_data must be False", lambda: LLMEnv(as_llm_data=True)),
    (ConfigError, "from_text=False and assign_done=True", lambda: LLMEnv(eos_token_id=7)),
    (ConfigError, "belong to from_text=False", lambda: LLMEnv(vocab_size=7)),
    (ConfigError, "belongs to from_text=True", lambda: LLMEnv(from_text=False, str_key="text")),
    (ConfigError, "number of prompts", lambda: LLMEnv(batch_size=[])),
    (MissingKeyError, "'text'.*keys present: 'txt'", lambda: LLMEnv().reset(TensorDict(txt=["a"], batch_size=[1]))),
    (MissingKeyError, "add a DataLoadingPrimer", lambda: LLMEnv().reset()),
    (ConfigError, "number of tokens", lambda: LLMHashingEnv(text_output=False)),
    (ConfigError, "text_output needs a tokenizer", lambda: LLMHashingEnv(10)),
    (ConfigError, "give one to the env", lambda: LLMHashingEnv(10, text_output=False).make_tensordict("a")),
    (MissingKeyError, "reads 'observation'", lambda: LLMHashingEnv(10, text_output=False).reset()),
)


def test_equal_prefixes_share_a_number_however_they_were_split():
    env = LLMHashingEnv(10, text_output=False)
    whole = env.reset(TensorDict(observation=PROMPTS, batch_size=[2]))
    td = env.reset(TensorDict(observation=PROMPTS[:, :1], batch_size=[2]))
    for place in (1, 2):
        td["action"] = PROMPTS[:, place : place + 1]
        td = env.step_mdp(env.step(td))
    assert torch.equal(td["hashing"], whole["hashing"])
    assert torch.equal(td["observation"], PROMPTS)
    assert whole["hashing"].shape == (2, 1)
    assert whole["hashing"][0] != whole["hashing"][1]


def test_text_and_batches_of_any_shape_are_written(tokenizer):
    env = LLMHashingEnv(tokenizer=tokenizer)
    td = env.make_tensordict("2+2=")
    assert td.batch_size == ()
    td["action"] = torch.tensor(tokenizer("4").input_ids)[:1]
    after = env.step(td)["next"]
    assert (after["text"], after["hashing"].shape) == ("2+2=4", (1,))
    assert torch.equal(after["hashing"], env.make_tensordict(["2+2=4"])["hashing"][0])
    grid = env.reset(TensorDict(observation=PROMPTS.expand(3, 2, 3), batch_size=[3, 2]))
    assert grid["hashing"].shape == (3, 2, 1)
    assert torch.equal(grid["hashing"][0], grid["hashing"][2])
    with pytest.raises(ShapeError, match="as many tokens: got"):
        env.make_tensordict(["2", "2 + 2 and more"])


def test_the_specs_of_the_hashing_env_are_kept(tokenizer):
    check_env_specs(LLMHashingEnv(10, text_output=False), tensordict=TensorDict(observation=PROMPTS[0], batch_size=[]))
    env = LLMHashingEnv(tokenizer=tokenizer)
    check_env_specs(env, tensordict=TensorDict(observation=PROMPTS[0], batch_size=[]))
    check_env_specs(env, tensordict=TensorDict(observation=PROMPTS, batch_size=[2]))


def test_a_custom_hash_is_used():
    env = LLMHashingEnv(10, text_output=False, hashing_module=lambda pair: pair[..., :1] * 10 + pair[..., 1:])
    assert env.reset(TensorDict(observation=PROMPTS, batch_size=[2]))["hashing"].tolist() == [[567], [897]]


def test_the_numbers_are_splitmix64s_and_so_the_same_everywhere():
    def mixed(value):  # in Python's whole numbers
        value = (value + 0x9E3779B97F4A7C15) % 2**64
        value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
        return (value ^ (value >> 31)) % 2**63

    pairs = [(0, 1), (7, 151_000), (2**62 + 5, 0), (2**63 - 1, 31)]
    assert prefix_hash(torch.tensor(pairs)).flatten().tolist() == [mixed(before ^ mixed(ids)) for before, ids in pairs]
