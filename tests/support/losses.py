"""Batches, actors and comparisons for tests of losses."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from llmrl.modules.llm.log_probs import TokenScorer, TokenScores
from llmrl.objectives import LossModule, merge_outputs, total_loss
from llmrl.objectives.base import output_fields

Step = tuple[dict[str, Tensor], dict[str, Tensor]]  # the fields of an output, and gradients by parameter


def tiny_qwen(vocab: int = 29, hidden: int = 16, layers: int = 2, tied: bool = False) -> Qwen2ForCausalLM:
    """The same random weights at every call."""
    torch.manual_seed(0)
    sizes = {"hidden_size": hidden, "intermediate_size": 3 * hidden // 2, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": tied}
    config = Qwen2Config(vocab_size=vocab, **sizes)
    return Qwen2ForCausalLM(config).eval()


def tiny_scorer(**sizes: int) -> TokenScorer:
    return TokenScorer(tiny_qwen(**sizes).double())


class Recorded(nn.Module):
    """An actor whose log-probs are a parameter; odd token ids are its most likely ones."""

    def __init__(self, log_prob_BT: Tensor) -> None:
        super().__init__()
        self.log_prob = nn.Parameter(log_prob_BT)

    def token_scores(self, input_ids, attention_mask, select, *, entropy=False):
        return TokenScores(self.log_prob.masked_fill(~select, 0.0), None, select & (input_ids % 2 == 1))


def conversation(
    index: int, prompt: int, response: int, *, group: int = 0, per_token: bool = False, dtype=torch.float64
) -> TensorDict:
    """A random row with every entry that a loss may read; ``index`` is its seed."""
    generator = torch.Generator().manual_seed(index)
    length = prompt + response
    mask = torch.arange(length) >= prompt

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    log_prob = (-3.4 + 0.3 * draw(length)) * mask
    top = draw(length, 29).log_softmax(-1).topk(3)
    ids = torch.randint(0, 29, (length,), generator=generator)
    return TensorDict(
        tokens=TensorDict(full=ids, prompt=ids[:prompt], response=ids[prompt:]),
        masks=TensorDict(all_assistant_mask=mask, all_attention_mask=torch.ones(length, dtype=torch.bool)),
        log_probs=TensorDict(full=log_prob),
        proximal_log_probs=TensorDict(full=log_prob + 0.1 * draw(length) * mask),
        next=TensorDict(
            ref_log_probs=TensorDict(full=log_prob + 0.2 * draw(length)),
            teacher_log_probs=TensorDict(full=log_prob + 0.5 * draw(length)),
        ),
        teacher_top=TensorDict(ids=top.indices.int(), log_probs=top.values),
        advantage=draw(length if per_token else 1, 1),
        group_id=torch.tensor(group),
    )


def run_step(
    loss: LossModule, *batches: TensorDictBase, normalizer=None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A whole step over the given micro-batches."""
    loss.zero_grad()
    outputs = []
    for td in batches:
        outputs.append(loss(td, normalizer))
        total_loss(outputs[-1]).backward()
    gradients = {name: p.grad.clone() for name, p in loss.named_parameters() if p.grad is not None}
    fields = output_fields(merge_outputs(outputs))
    return fields | loss.derived(fields), gradients


def assert_same_step(
    got: Step, expected: Step, *, atol: float = 1e-9, rtol: float = 1e-9, gradient: float = 1e-9
) -> None:
    (fields, gradients), (expected_fields, expected_gradients) = got, expected
    assert fields.keys() == expected_fields.keys()
    for name, value in expected_fields.items():
        torch.testing.assert_close(fields[name], value, atol=atol, rtol=rtol, msg=lambda m, n=name: f"{n}: {m}")
    for name, value in expected_gradients.items():
        torch.testing.assert_close(gradients[name], value, atol=gradient, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


def golden_columns() -> SimpleNamespace:
    """33 tokens in 8 sequences and 2 groups, float64: log-probs by their letters in `functional`, mask and rewards."""
    n = torch.tensor([6, 3, 5, 1, 2, 6, 4, 6])
    i, t = torch.arange(8)[:, None], torch.arange(6)[None]
    lo = -0.30 - 0.05 * ((3 * i + 2 * t) % 7).double()
    return SimpleNamespace(
        mask=t < n[:, None],
        lo=lo,
        lp=lo + 0.10 * (((5 * i + 3 * t) % 9) - 4).double() + 0.16 * (1 - i % 4).double(),
        lg=lo + 0.06 * (((2 * i + 7 * t) % 11) - 5).double(),
        lr=lo + 0.05 * (((7 * i + 5 * t) % 8) - 3).double(),
        reward=torch.tensor([1.0, 0.0, 0.5, 0.0, 1.0, 1.0, 1.0, 0.0], dtype=torch.float64).view(2, 4),
        group=torch.arange(8) // 4,
    )
