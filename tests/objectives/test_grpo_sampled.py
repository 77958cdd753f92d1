"""The loss reads what the policy sampled: right after sampling every ratio is 1."""

import pytest
import torch

from llmrl.modules.llm.policies import TransformersWrapper
from llmrl.objectives.llm import GRPOLoss, count_step
from llmrl.testing import tiny_model, tiny_tokenizer
from tests.support.conversations import chats, history_td


@pytest.mark.parametrize("pad_output", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.5},
        {"temperature": 1.0},
        {"temperature": 1.3},
        {"temperature": 0.8, "top_p": 0.6},
        {"temperature": 0.8, "top_k": 4},
        {"temperature": 0.8, "min_p": 0.95},
    ],
    ids=str,
)
def test_a_policy_wrapper_samples_and_is_its_own_actor(options, pad_output):
    tokenizer = tiny_tokenizer()
    options, model = {"max_new_tokens": 6, **options}, tiny_model(tokenizer)
    policy = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs=options, pad_output=pad_output)
    td = policy(history_td(chats(["1+2", "say something longer", "3"])))
    td["advantage"] = torch.tensor([1.0, -1.0, 0.5]).view(3, 1, 1)
    for proximal in ("behaviour", "detach"):
        loss = GRPOLoss(policy, proximal=proximal)
        output = loss(td)
        assert output.tokens == count_step(td).tokens > 0
        assert output.mismatch_max.item() == pytest.approx(0, abs=1e-5)
        assert output.ratio_max.item() == pytest.approx(1, abs=1e-5)
    output.loss_objective.backward()
    assert sum(p.grad.abs().sum() for p in loss.parameters()) > 0
    if len(options) > 2:  # the cut was a real one
        columns = (td.get(("log_probs", name), as_list=True) for name in ("full", "plain"))
        assert any((full - plain).max() > 0.1 for full, plain in zip(*columns, strict=True))
