"""What scores turns in an env also scores batches that were collected, as the transform of a replay buffer."""

from __future__ import annotations

import pytest
from tensordict import TensorDict

from llmrl.data import LazyStackStorage, ReplayBuffer
from llmrl.envs.llm import ChatEnv, GSM8KRewardParser, IfEvalScorer
from llmrl.envs.llm.transforms import LengthPenalty, RewardFunction
from llmrl.modules.llm import LLMWrapperBase
from llmrl.testing import FakeEngine

ANSWERS = ["<answer>4</answer>", "<answer>5</answer>"]


def collected(tokenizer, *transforms):
    env = ChatEnv(batch_size=[2])
    for transform in transforms:
        env = env.append_transform(transform)
    policy = LLMWrapperBase(FakeEngine(ANSWERS, tokenizer=tokenizer), tokenizer=tokenizer)
    td = TensorDict(query="2 + 2?", answer="4", instruction_id_list="", batch_size=[2])
    td.set("instruction_id_list", [["punctuation:no_comma"]] * 2)
    td.set("kwargs", [[{}]] * 2)
    return env.step(policy(env.reset(td)))


def exact(completion, answer):
    return answer in completion


@pytest.mark.parametrize(
    "make",
    [GSM8KRewardParser, IfEvalScorer, lambda: RewardFunction(exact), lambda: LengthPenalty(budget=2, coef=0.5)],
    ids=["GSM8KRewardParser", "IfEvalScorer", "RewardFunction", "LengthPenalty"],
)
def test_a_buffer_gives_the_reward_that_the_env_would_have_given(make, tokenizer):
    """Regression: as a buffer's transform they did nothing, or copied token ids into the reward, without a word."""
    zero = RewardFunction(lambda completion: 0.0, name="zero")
    in_env = collected(tokenizer, zero, make())["next"]
    buffer = ReplayBuffer(storage=LazyStackStorage(2), transform=make(), batch_size=2)
    buffer.extend(collected(tokenizer, zero.clone()))
    for _ in range(2):  # what is stored stays as it was
        batch = buffer[:]
        assert batch["next", "reward"].tolist() == in_env["reward"].tolist()
        assert not batch["next", "done"].any()  # where conversations end was decided when they were collected
    assert in_env["reward"].flatten().tolist()[0] != 0
