"""What a policy sampled is what the loss reads: right after sampling every ratio is 1."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from llmrl.data.llm.chat import History
from llmrl.modules.llm.policies import ChatHistory, TransformersWrapper
from llmrl.objectives.llm import GRPOLoss, count_step
from llmrl.testing import tiny_model, tiny_tokenizer


@pytest.mark.parametrize("cut", [{"top_p": 0.6}, {"top_k": 4}, {"min_p": 0.95}])
def test_after_sampling_from_a_cut_distribution_every_ratio_is_one(cut):
    tokenizer = tiny_tokenizer()
    policy = TransformersWrapper(
        tiny_model(tokenizer), tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 6, "temperature": 0.8, **cut}
    )
    prompts = ChatHistory(
        prompt=History.from_chats([[{"role": "user", "content": c}] for c in ("1+2", "7")]), batch_size=[2]
    )
    td = policy(TensorDict(history=prompts, batch_size=[2]))
    td["advantage"] = torch.tensor([1.0, -1.0]).view(2, 1, 1)
    output = GRPOLoss(policy)(td)
    assert output.ratio_max.item() == pytest.approx(1, abs=1e-5)
    assert output.mismatch_max.item() == pytest.approx(0, abs=1e-5)
    kept = zip(td.get(("log_probs", "full"), as_list=True), td.get(("log_probs", "plain"), as_list=True), strict=True)
    assert any((full - plain).max() > 0.1 for full, plain in kept)  # the cut was a real one


@pytest.mark.parametrize("pad_output", [False, True])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.3])
def test_a_policy_wrapper_samples_and_is_its_own_actor(temperature, pad_output):
    tokenizer = tiny_tokenizer()
    policy = TransformersWrapper(
        tiny_model(tokenizer),
        tokenizer=tokenizer,
        generate_kwargs={"max_new_tokens": 6, "temperature": temperature},
        pad_output=pad_output,
    )
    chats = [[{"role": "user", "content": content}] for content in ("1+2", "say something longer", "3")]
    prompts = ChatHistory(prompt=History.from_chats(chats), batch_size=[3])
    td = policy(TensorDict(history=prompts, batch_size=[3]))
    td["advantage"] = torch.tensor([1.0, -1.0, 0.5]).view(3, 1, 1)
    loss = GRPOLoss(policy, proximal="detach")
    output = loss(td)
    assert output.tokens == count_step(td).tokens > 0
    assert output.mismatch_max.item() == pytest.approx(0, abs=1e-5)
    assert output.ratio_max.item() == pytest.approx(1, abs=1e-5)
    output.loss_objective.backward()
    assert sum(p.grad.abs().sum() for p in loss.parameters()) > 0
