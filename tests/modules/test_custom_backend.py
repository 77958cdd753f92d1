"""The policy over an engine of one's own (tests/support/bigram.py): an engine knows ids, the subclass of the wrapper
says how to make it, and modes, templates, padding, multi-turn streams, batching and losses come with the wrapper.
"""

import pytest
import torch
from tensordict import TensorDict

from llmrl.data.ragged.tensordicts import column
from llmrl.envs.llm import ChatEnv
from llmrl.envs.utils import step_mdp
from llmrl.errors import ConfigError
from llmrl.objectives.llm import GRPOLoss
from tests.support.bigram import Bigram, BigramWrapper
from tests.support.conversations import chats, history_td


def make_policy(tokenizer, **options):
    options = {"generate_kwargs": {"max_new_tokens": 8, "seed": 0, "temperature": 0.8}} | options
    return BigramWrapper(Bigram(len(tokenizer)), tokenizer=tokenizer, **options)


@pytest.mark.parametrize("pad_output", [False, True])
def test_conversations_and_the_loss_work_as_with_any_other(tokenizer, pad_output):
    policy = make_policy(tokenizer, pad_output=pad_output)
    env = ChatEnv(batch_size=[2])
    td = env.reset(TensorDict(query=column(["Hi", "What is 2+2?"]), batch_size=[2]))
    td = env.step(policy(step_mdp(env.step(policy(td)))))
    td["advantage"] = torch.tensor([1.0, -1.0]).reshape(2, 1, 1)
    output = GRPOLoss(policy)(td)
    torch.testing.assert_close(output.ESS, torch.tensor(1.0))  # every ratio is 1
    output.loss_objective.backward()
    assert policy.scorer.model.table.grad.abs().sum() > 0


def test_what_it_cannot_do_it_says(tokenizer):
    policy = make_policy(tokenizer, generate_kwargs={"top_k": 3})
    with pytest.raises(ConfigError, match="neither truncation nor stop strings"):
        policy(history_td(chats(["Hi"])))
