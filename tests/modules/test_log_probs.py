"""token_logprobs equals the naive computation, for every head, padding and dtype, and never builds [B, T, V]."""

import copy
import inspect

import pytest
import torch
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from llmrl.errors import ConfigError, ShapeError
from llmrl.modules.llm import head_scores
from llmrl.modules.llm.log_probs import TokenScorer, find_head_path, token_logprobs
from llmrl.modules.llm.packing import why_not_packed
from tests.support.causal_models import (
    SMALL,
    Bigram,
    assert_same_gradients,
    causal_lm,
    naive_scores,
    sharpened,
    weighted_gradients,
)

OPT = {"vocab_size": 37, "hidden_size": 16, "ffn_dim": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
ARCHITECTURES = {  # by model type
    "qwen2": SMALL,
    "qwen2-tied": SMALL | {"tie_word_embeddings": True},
    "llama": SMALL,
    "gpt2": {"vocab_size": 37, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32},
    "opt": OPT | {"max_position_embeddings": 32, "word_embed_proj_dim": 8},
    "gemma2": SMALL | {"head_dim": 8, "final_logit_softcapping": 0.5},
    "cohere": SMALL | {"logit_scale": 0.25},
    "granite": SMALL | {"logits_scaling": 4.0},
    "mixtral": SMALL | {"num_local_experts": 2, "num_experts_per_tok": 1},
}


def build(name: str) -> nn.Module:
    return causal_lm(name.removesuffix("-tied"), **ARCHITECTURES[name])


def batch(rows: int = 3, length: int = 9) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Right-padded ids, attention mask and response mask; the last row is full."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 37, (rows, length), generator=generator)
    lengths = torch.tensor([length - 2 * (rows - 1 - i) for i in range(rows)])
    attention = torch.arange(length)[None] < lengths[:, None]
    select = attention & (torch.arange(length)[None] >= 2)
    return ids.masked_fill(~attention, 0), attention, select


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_scores_like_its_own_logits_whatever_the_padding(name):
    model = build(name)
    ids, attention, select = batch()
    expected, expected_entropy = naive_scores(model, ids, attention, select, temperature=0.7)
    right = token_logprobs(model, ids, attention, select, temperature=0.7, chunk=4, entropy=True)
    torch.testing.assert_close(right.log_probs, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(right.entropy, expected_entropy, atol=1e-4, rtol=1e-4)

    shift = (~attention).sum(-1)
    left_of = (torch.arange(ids.shape[1])[None] - shift[:, None]) % ids.shape[1]  # rolls each row to the right
    left = token_logprobs(model, *(x.gather(1, left_of) for x in (ids, attention, select)), temperature=0.7)
    torch.testing.assert_close(left.log_probs, expected.gather(1, left_of), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["qwen2", "gemma2", "cohere", "granite", "gpt2"])
def test_common_heads_never_go_through_the_whole_model(name, monkeypatch):
    model = build(name)
    assert find_head_path(model) is not None
    monkeypatch.setattr("llmrl.modules.llm.log_probs._score_with_whole_model", None)  # calling it would fail
    token_logprobs(model, *batch())


def test_the_probe_sees_a_soft_cap_that_the_configuration_does_not_announce():
    class Capped(Qwen2ForCausalLM):
        def forward(self, **inputs):
            output = super().forward(**inputs)
            output.logits = torch.tanh(output.logits)
            return output

        forward.__signature__ = inspect.signature(Qwen2ForCausalLM.forward)

    torch.manual_seed(0)
    model = sharpened(Capped(Qwen2Config(**SMALL)))
    assert find_head_path(model) is None
    ids, attention, select = batch()
    expected, expected_entropy = naive_scores(model, ids, attention, select)
    scores = token_logprobs(model, ids, attention, select, entropy=True)
    torch.testing.assert_close(scores.log_probs, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(scores.entropy, expected_entropy, atol=1e-5, rtol=1e-5)
    expected = weighted_gradients(model, naive_scores(model, ids, attention, select))
    scores = token_logprobs(model, ids, attention, select, entropy=True)
    assert_same_gradients(weighted_gradients(model, scores), expected)


@pytest.mark.parametrize("name", ["qwen2", "qwen2-tied", "gpt2", "gemma2", "cohere", "granite"])
@pytest.mark.parametrize("with_entropy", [True, False])
def test_gradients_equal_those_of_the_full_logits(name, with_entropy):
    model = build(name)
    ids, attention, select = batch()
    expected = weighted_gradients(model, naive_scores(model, ids, attention, select, 1.3), with_entropy)
    scores = token_logprobs(model, ids, attention, select, temperature=1.3, chunk=3, entropy=with_entropy)
    assert_same_gradients(weighted_gradients(model, scores, with_entropy), expected)


def test_head_function_passes_gradcheck_in_float64():
    torch.manual_seed(0)
    head = nn.Linear(4, 7).double()
    path = head_scores.HeadPath(body=nn.Identity(), head=head, scale=1.5, softcap=2.0)
    hidden = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 7, (5,))
    spec = head_scores.HeadSpec(torch.float64, path, head_scores.HeadOptions(temperature=0.8, chunk=2, entropy=True))
    inputs = hidden, head.weight, head.bias
    assert torch.autograd.gradcheck(lambda *x: head_scores._HeadScores.apply(*x, targets, spec)[:2], inputs)


def test_a_head_with_a_bias_or_an_adapter_is_scored_and_trained():
    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            self.adapter = nn.Parameter(torch.randn(37, 16) * 0.1)

        def forward(self, hidden):
            return self.base(hidden) + hidden @ self.adapter.T

    ids, attention, select = batch()
    for change in (lambda head: nn.Linear(16, 37, bias=True), Adapted):
        model = build("qwen2")
        model.lm_head = change(model.lm_head)
        expected = weighted_gradients(model, naive_scores(model, ids, attention, select))
        scores = token_logprobs(model, ids, attention, select, chunk=3, entropy=True)
        assert_same_gradients(weighted_gradients(model, scores), expected)


def test_a_frozen_head_gets_no_gradient_and_the_body_gets_the_same():
    model = build("qwen2")
    ids, attention, select = batch()
    expected = weighted_gradients(model, naive_scores(model, ids, attention, select))
    model.zero_grad(set_to_none=True)
    model.lm_head.weight.requires_grad_(False)
    model.lm_head.weight.grad = None
    got = weighted_gradients(model, token_logprobs(model, ids, attention, select, entropy=True))
    assert "lm_head.weight" not in got
    expected.pop("lm_head.weight")
    assert_same_gradients(got, expected)


def test_bfloat16_logits_are_reduced_in_float32():
    model = build("qwen2").to(torch.bfloat16)
    ids, attention, select = batch()
    scores = token_logprobs(model, ids, attention, select, entropy=True)
    assert scores.log_probs.dtype == scores.entropy.dtype == torch.float32
    logits = model(input_ids=ids, attention_mask=attention.long()).logits  # bf16
    expected = logits[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    torch.testing.assert_close(scores.log_probs[select], expected[select[:, 1:]], atol=1e-3, rtol=0)
    scores.log_probs.sum().backward()
    assert model.lm_head.weight.grad.dtype == torch.bfloat16
    assert model.lm_head.weight.grad.abs().sum() > 0


def test_autocast_runs_the_product_in_bfloat16_and_keeps_float32_gradients():
    model = build("qwen2")
    ids, attention, select = batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = token_logprobs(model, ids, attention, select, entropy=True)
        expected = model(input_ids=ids, attention_mask=attention.long()).logits
    assert expected.dtype == torch.bfloat16
    expected = expected[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    torch.testing.assert_close(scores.log_probs[select], expected[select[:, 1:]], atol=1e-3, rtol=0)
    (scores.log_probs.sum() + scores.entropy.sum()).backward()
    assert model.lm_head.weight.grad.dtype == torch.float32


ON_GPU = pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
def test_logits_of_a_batch_never_exist_at_once(device):
    """With 50,000 tokens the logits of 1,024 positions are 98 MiB in bfloat16; here are those of 64 at a time."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = Qwen2Config(vocab_size=50_000, num_key_value_heads=1, **sizes)
    model = Qwen2ForCausalLM(config).to(device, torch.bfloat16)
    ids = torch.randint(0, 50_000, (4, 256), device=device)
    everywhere = torch.ones_like(ids, dtype=torch.bool)
    whole = 4 * 256 * 50_000 * 2
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    scores = token_logprobs(model, ids, everywhere, everywhere, chunk=64)
    scores.log_probs.mean().backward()
    if device == "cuda":
        assert torch.cuda.max_memory_allocated() - before < whole, "forwards and backwards, float32 included"
    expected = model(input_ids=ids).logits[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    torch.testing.assert_close(scores.log_probs[:, 1:], expected, atol=2e-2, rtol=0)
    assert model.lm_head.weight.grad.isfinite().all()


def test_top1_marks_the_tokens_that_greedy_decoding_would_take():
    model = build("qwen2")
    ids, attention, select = batch()
    with torch.no_grad():
        greedy = model(input_ids=ids, attention_mask=attention.long()).logits.argmax(-1)
    scores = token_logprobs(model, ids, attention, select)
    expected = torch.zeros_like(select)
    expected[:, 1:] = greedy[:, :-1] == ids[:, 1:]
    assert scores.top1.tolist() == (expected & select).tolist()
    ids[0, 3] = greedy[0, 2]  # depends on tokens 0..2 only, so it is now a hit
    assert token_logprobs(model, ids, attention, select).top1[0, 3]


def test_a_token_without_a_predecessor_scores_zero_on_either_padding_side():
    model = build("qwen2")
    ids, attention = torch.tensor([[0, 5, 6], [7, 8, 9]]), torch.tensor([[False, True, True], [True, True, True]])
    scores = token_logprobs(model, ids, attention, attention)
    assert scores.log_probs[0, 1] == scores.log_probs[1, 0] == scores.log_probs[0, 0] == 0
    assert scores.log_probs[0, 2] < 0
    assert (scores.log_probs[1, 1:] < 0).all()


@pytest.mark.parametrize("packing", ["off", "on"])
@pytest.mark.parametrize("name", ["qwen2", "qwen2-tied"])
def test_nothing_selected_still_reaches_every_parameter(name, packing):
    scorer = TokenScorer(build(name), packing=packing)
    ids, attention, select = batch()
    scores = scorer(ids, attention, torch.zeros_like(select), entropy=True)
    assert scores.log_probs.abs().sum() == 0
    scores.log_probs.sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() == 0 for p in scorer.parameters())


def test_the_scorer_is_the_function_with_a_temperature():
    model = build("qwen2")
    scorer, inputs = TokenScorer(model, temperature=0.5), batch()
    got = scorer.token_scores(*inputs)
    torch.testing.assert_close(got.log_probs, token_logprobs(model, *inputs, temperature=0.5).log_probs)
    assert got.entropy is None
    torch.testing.assert_close(scorer(*inputs, 1.0).log_probs, token_logprobs(model, *inputs).log_probs)


def test_a_head_that_is_replaced_after_the_probe_is_used():
    model = build("qwen2")
    ids, attention, select = batch()
    token_logprobs(model, ids, attention, select)
    model.lm_head = copy.deepcopy(model.lm_head)
    model.lm_head.weight.data.mul_(-1)
    expected, _ = naive_scores(model, ids, attention, select)
    torch.testing.assert_close(token_logprobs(model, ids, attention, select).log_probs, expected, atol=1e-4, rtol=1e-4)


def test_any_module_that_returns_logits_can_be_scored():
    model = Bigram()
    assert "cannot be called separately" in why_not_packed(model)
    ids, attention, select = batch()
    expected = model.table.weight.log_softmax(-1)[ids[:, :-1], ids[:, 1:]]
    for scores in (token_logprobs(model, ids, attention, select), TokenScorer(model)(ids, attention, select)):
        torch.testing.assert_close(scores.log_probs[select], expected[select[:, 1:]])


def test_wrong_arguments_name_what_must_hold():
    model = build("qwen2")
    ids, attention, select = batch()
    with pytest.raises(ShapeError, match="one shape"):
        token_logprobs(model, ids, attention[:, 1:], select)
    with pytest.raises(ConfigError, match="temperature must be above 0"):
        token_logprobs(model, ids, attention, select, temperature=0.0)
    with pytest.raises(ConfigError, match="chunk"):
        token_logprobs(model, ids, attention, select, chunk=0)
