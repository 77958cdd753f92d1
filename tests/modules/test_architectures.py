"""One forward for every family: generating, scoring and training log-probs agree, wherever the padding is."""

import pytest
import torch
from tensordict import TensorDict

from llmrl.data.ragged.padding import lengths_mask, pad_rows
from llmrl.modules.llm import Tokens, TransformersWrapper
from llmrl.testing import tiny_model

FAMILIES = ["gpt2", "llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text", "mixtral", "qwen2_moe"]
LENGTHS = (3, 11, 6)
NEW_TOKENS = 12  # prompts and responses are longer than the window of the Gemma models


def sharpened(model, factor=4.0):
    """Weights far enough from 0 that a wrong position or mask moves log-probs by tenths and not by thousandths."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(factor)
    return model


def make_policy(tokenizer, family, dtype=torch.float32, **options):
    model = sharpened(tiny_model(tokenizer, architecture=family, hidden_size=32, heads=2)).to(dtype)
    generate_kwargs = {"max_new_tokens": NEW_TOKENS} | options.pop("generate_kwargs", {})
    options = {"tokenizer": tokenizer, "input_mode": "tokens", "generate_kwargs": generate_kwargs} | options
    return TransformersWrapper(model, **options)


def prompts():
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(1, 400, (length,), generator=generator) for length in LENGTHS]
    return TensorDict({"tokens": Tokens.from_rows({"prompt": rows}), "seed": torch.arange(3)}, [3])


def scored(policy, td, side):
    """Log-probs of each row's sampled tokens by ``token_scores``; side None: each row alone, without any padding."""
    full, masks = td["tokens"].rows("full"), td["masks"].rows("all_assistant_mask")
    if side is None:
        ones = [torch.ones(1, len(row), dtype=torch.bool) for row in full]
        parts = zip(full, ones, masks, strict=True)
        scores = [policy.token_scores(row[None], one, mask[None]).log_probs[0] for row, one, mask in parts]
    else:
        ids = pad_rows(full, value=policy.pad_token_id, side=side)
        attention = lengths_mask([len(row) for row in full], ids.shape[1], side=side)
        padded = policy.token_scores(ids, attention, pad_rows(masks, side=side)).log_probs
        scores = [row[kept] for row, kept in zip(padded, attention, strict=True)]
    return [row[mask].detach() for row, mask in zip(scores, masks, strict=True)]


@pytest.mark.parametrize("family", FAMILIES)
def test_left_right_and_no_padding_give_the_same_log_probs(tokenizer, family):
    policy = make_policy(tokenizer, family)
    td = policy(prompts())
    unpadded = policy.get_new_version(pad_model_input=False)
    again = unpadded(prompts())
    sampled = [row[row != 0] for row in td["log_probs"].rows("full")]
    ways = {side: scored(policy, td, side) for side in ("left", "right", None)}
    engine_scores = unpadded.get_new_version(generate=False, inplace=False)(td)["log_probs"].rows("full")
    for row in range(3):
        assert torch.equal(td["tokens"].rows("full")[row], again["tokens"].rows("full")[row])
        mask = td["masks"].rows("all_assistant_mask")[row]
        assert len(sampled[row]) == int(mask.sum())
        torch.testing.assert_close(again["log_probs"].rows("full")[row][mask], sampled[row], atol=1e-4, rtol=0)
        torch.testing.assert_close(engine_scores[row][mask].detach(), sampled[row], atol=1e-4, rtol=0)
        for side, scores in ways.items():
            torch.testing.assert_close(scores[row], sampled[row], atol=1e-4, rtol=0, msg=f"{family}, padded {side}")


def test_a_wrong_position_would_be_seen(tokenizer):
    """The tolerance is far below what a shifted position does."""
    policy = make_policy(tokenizer, "gpt2")
    td = policy(prompts())
    [ids, *_], [mask, *_] = td["tokens"].rows("full"), td["masks"].rows("all_assistant_mask")
    attention = torch.ones(1, len(ids), dtype=torch.bool)
    shifted = policy.scorer(ids[None], attention, mask[None], position_ids=torch.arange(len(ids))[None] + 5)
    assert (shifted.log_probs[0][mask] - scored(policy, td, None)[0]).abs().max() > 1e-2


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "qwen2_moe"])
def test_gradients_do_not_depend_on_the_side_of_the_padding(tokenizer, family):
    policy = make_policy(tokenizer, family)
    td = policy(prompts())
    full, masks = td["tokens"].rows("full"), td["masks"].rows("all_assistant_mask")
    gradients = []
    for side in ("left", "right"):
        ids = pad_rows(full, value=policy.pad_token_id, side=side)
        attention = lengths_mask([len(row) for row in full], ids.shape[1], side=side)
        total = policy.token_scores(ids, attention, pad_rows(masks, side=side)).log_probs.sum()
        gradients.append(torch.autograd.grad(total, policy.model.get_input_embeddings().weight)[0])
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)


def errors_of_bfloat16(policy, td, exact, draws=8):
    """|error| [draws, tokens] of a float32 policy whose modules' outputs are off by as much as bfloat16 rounds them."""
    generator = torch.Generator().manual_seed(0)
    unit_roundoff = torch.finfo(torch.bfloat16).eps / 2

    def disturb(module, inputs, output):
        return output * (1 + unit_roundoff * (2 * torch.rand(output.shape, generator=generator) - 1))

    leaves = [module for module in policy.model.modules() if not list(module.children()) and list(module.parameters())]
    hooks = [leaf.register_forward_hook(disturb) for leaf in leaves]
    errors = torch.stack([(torch.cat(scored(policy, td, "right")) - exact).abs() for _ in range(draws)])
    for hook in hooks:
        hook.remove()
    return errors


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.3])
def test_bfloat16_log_probs_differ_by_the_rounding_of_the_model_alone(tokenizer, temperature):
    """Decoding, a full forward and the forward of another batch each round differently; the softmax adds nothing."""
    policy = make_policy(tokenizer, "qwen3", torch.bfloat16, generate_kwargs={"temperature": temperature})
    td = policy(prompts())
    decoded = torch.cat([row[row != 0] for row in td["log_probs"].rows("full")])
    batch, again, alone = (torch.cat(scored(policy, td, side)) for side in ("right", "right", None))
    assert torch.equal(batch, again)  # one model, one batch: the ratio is 1, exactly
    reference = make_policy(tokenizer, "qwen3", generate_kwargs={"temperature": temperature})
    reference.model.load_state_dict(policy.model.state_dict())
    exact = torch.cat(scored(reference, td, "right"))
    expected = errors_of_bfloat16(reference, td, exact)
    for log_probs in (decoded, batch, alone):
        assert log_probs.dtype == torch.float32
        assert (log_probs.bfloat16() != log_probs).any(), "computed in float32, not rounded afterwards"
        errors = (log_probs - exact).abs()
        # Kernels also round between the modules' outputs, which are all that the simulation rounds.
        assert errors.mean() < 3 * expected.mean()
        assert errors.max() < 3 * expected.max()
