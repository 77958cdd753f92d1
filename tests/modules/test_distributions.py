"""``get_dist``: the categorical over the vocabulary at the chosen tokens, against the whole logits tensor."""

import pytest
import torch
from tensordict import TensorDict

from llmrl.data.llm.chat import History
from llmrl.data.ragged.padding import lengths_mask
from llmrl.errors import ConfigError, MissingKeyError, ShapeError
from llmrl.modules.llm import ChatHistory, LLMWrapperBase, Masks, Tokens, TransformersWrapper
from llmrl.modules.llm.policies import scoring
from llmrl.modules.llm.policies.base import Backend
from llmrl.modules.llm.policies.scoring import TokenCategorical
from llmrl.testing import FakeEngine, tiny_model
from tests.support.causal_models import Bigram
from tests.support.conversations import chats, fake_policy, history_td

TEMPERATURE = 0.7
THREE_IDS = TensorDict({"tokens": Tokens.from_rows({"full": [torch.arange(3)]})}, [1])


@pytest.fixture(scope="module")
def model(tokenizer):
    return tiny_model(tokenizer, hidden_size=32, heads=2)


@pytest.fixture
def policy(model, tokenizer):
    options = {"max_new_tokens": 5, "temperature": TEMPERATURE, "seed": 0}
    return TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs=options)


def answered(policy, *questions):
    return policy(history_td(chats(questions)))


@pytest.fixture
def td(policy):
    return answered(policy, "Hi", "What is 12 + 30?")


def whole_log_probs(model, ids):
    """float32[T, V]: entry t is the distribution of token t; that of the first is not used."""
    logits = model(input_ids=ids[None]).logits[0].detach() / TEMPERATURE
    return torch.cat([logits[:1], logits[:-1]]).log_softmax(-1)


def unpadded(values, td):
    return [row[: len(ids)] for row, ids in zip(values, td["tokens"].rows("full"), strict=True)]


def attention_of(td):
    lengths = [len(ids) for ids in td["tokens"].rows("full")]
    return lengths_mask(lengths, max(lengths))


def test_it_is_the_softmax_of_the_logits_at_every_token(policy, model, td):
    dist = policy.get_dist(td)
    assert dist.batch_shape == dist.tokens.shape == dist.mask.shape
    assert dist.logits.shape == (sum(len(ids) - 1 for ids in td["tokens"].rows("full")), model.config.vocab_size)
    assert dist.logits.dtype == torch.float32
    columns = [unpadded(values, td) for values in (dist.log_prob(dist.tokens), dist.entropy(), dist.mode, dist.mask)]
    for ids, log_prob, entropy, mode, mask in zip(td["tokens"].rows("full"), *columns, strict=True):
        expected = whole_log_probs(model, ids)
        assert mask.tolist() == [False] + [True] * (len(ids) - 1)
        assert (log_prob[0], entropy[0], mode[0]) == (0, 0, ids[0])
        torch.testing.assert_close(log_prob[1:], expected.gather(1, ids[:, None])[1:, 0], atol=1e-5, rtol=0)
        torch.testing.assert_close(entropy[1:], -(expected.exp() * expected).sum(-1)[1:], atol=1e-5, rtol=0)
        assert torch.equal(mode[1:], expected.argmax(-1)[1:])


def test_logits_made_in_parts_are_the_same(policy, monkeypatch, td):
    whole = policy.get_dist(td).logits.detach()
    monkeypatch.setattr(scoring, "_ROWS_AT_A_TIME", 7)
    with torch.no_grad():
        parts = policy.get_dist(td)
    assert len(parts.logits) % 7
    torch.testing.assert_close(parts.logits, whole, atol=1e-5, rtol=0)
    torch.testing.assert_close(parts.entropy(), policy.get_dist(td).entropy().detach(), atol=1e-5, rtol=0)


def test_gradients_flow_where_they_are_enabled(policy, model, td):
    dist = policy.get_dist(td, masking_strategy="rlhf")
    through = policy.token_scores(dist.tokens, attention_of(td), dist.mask).log_probs.sum()
    weight = model.get_input_embeddings().weight
    [ours] = torch.autograd.grad(dist.log_prob(dist.tokens).sum(), weight)
    [expected] = torch.autograd.grad(through, weight)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)
    with torch.no_grad():
        assert not policy.get_dist(td).logits.requires_grad


def test_what_is_chosen(policy, td):
    full, assistant = td["tokens"].rows("full"), td["masks"].rows("all_assistant_mask")
    by_mask = {name: unpadded(policy.get_dist(td, masking_strategy=name).mask, td) for name in ("sft", "rlhf")}
    # without a mask too: in one turn the response is what the assistant wrote
    by_mask["response"] = unpadded(policy.get_dist(td.select("tokens"), masking_strategy="sft").mask, td)
    for masks in by_mask.values():
        assert [mask.tolist() for mask in masks] == [mask.tolist() for mask in assistant]
    own = [torch.arange(len(ids)) == len(ids) - 2 for ids in full]
    chosen = policy.get_dist(td, mask=own)
    assert [mask.nonzero().flatten().tolist() for mask in unpadded(chosen.mask, td)] == [[len(i) - 2] for i in full]
    assert len(chosen.logits) == 2  # and nothing else is kept


def test_a_rendered_conversation_needs_no_tokens(policy, tokenizer):
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    td = TensorDict({"history": ChatHistory.from_rows({"full": History.from_chats([chat])})}, [1])
    dist = policy.get_dist(td, masking_strategy="rlhf")
    assert tokenizer.decode(dist.tokens[dist.mask]) == "Hello<|im_end|>"
    assert "tokens" not in td.keys()


@pytest.mark.parametrize("strategy", ["generic", "rlhf", "sft"])
def test_padded_batches_keep_their_layout(policy, strategy):
    ragged = answered(policy, "Hi", "What is 12 + 30?")
    policy.seed = 0
    td = answered(policy.get_new_version(pad_output=True), "Hi", "What is 12 + 30?")
    dist, expected = (policy.get_dist(batch, masking_strategy=strategy) for batch in (td, ragged))
    assert dist.tokens.shape == td["tokens"].full.shape
    kept = td["masks"].all_attention_mask
    log_prob, reference = dist.log_prob(dist.tokens), unpadded(expected.log_prob(expected.tokens), ragged)
    for row in range(2):
        torch.testing.assert_close(log_prob[row][kept[row]], reference[row], atol=1e-4, rtol=0)
    own = policy.get_dist(td, mask=td["masks"].all_assistant_mask)
    assert torch.equal(own.mask, td["masks"].all_assistant_mask)
    if strategy == "sft":
        del td["masks", "all_assistant_mask"]
        assert torch.equal(policy.get_dist(td, masking_strategy="sft").mask, dist.mask)


@pytest.mark.parametrize("pad_output", [False, True])
@pytest.mark.parametrize("batch_size", [(), (2,), (2, 3)])
def test_the_shape_is_that_of_the_batch(policy, batch_size, pad_output):
    policy = policy.get_new_version(input_mode="tokens", pad_output=pad_output)
    prompts = [torch.arange(row + 2) + 5 for row in range(torch.Size(batch_size).numel())]
    td = policy(TensorDict({"tokens": Tokens.from_rows({"prompt": prompts}, batch_size)}, batch_size))
    dist = policy.get_dist(td)
    longest = max(len(prompt) for prompt in prompts) + 5
    assert dist.log_prob(dist.tokens).shape == (*batch_size, longest)
    assert dist.entropy().shape == dist.mode.shape == dist.sample().shape == (*batch_size, longest)
    assert dist.sample((4,)).shape == (4, *batch_size, longest)


def test_samples_follow_the_probabilities_and_leave_other_tokens_alone():
    probabilities = torch.tensor([[0.5, 0.0, 0.3, 0.2], [0.0, 0.0, 0.0, 1.0]])
    mask, tokens = torch.tensor([[False, True, True]]), torch.tensor([[9, 0, 0]])
    dist = TokenCategorical(probabilities.log(), tokens, mask)
    torch.manual_seed(0)
    drawn = dist.sample((20_000,))
    assert (drawn[:, 0, 0] == 9).all()
    assert (drawn[:, 0, 2] == 3).all()
    counts = torch.bincount(drawn[:, 0, 1], minlength=4) / 20_000
    torch.testing.assert_close(counts, probabilities[0], atol=0.015, rtol=0)  # 4 standard deviations of 0.5
    assert dist.entropy()[0].isfinite().all()
    assert dist.entropy()[0, 2] == 0
    assert torch.equal(dist.log_prob(drawn)[:, 0, 2], torch.zeros(20_000))


def test_an_empty_selection_is_allowed(policy, td):
    dist = policy.get_dist(td, mask=[torch.zeros(len(ids), dtype=torch.bool) for ids in td["tokens"].rows("full")])
    assert torch.equal(dist.sample(), dist.tokens)
    assert not dist.log_prob(dist.tokens).any()


def test_a_model_of_one_piece_is_called_as_it_is():
    class Wrapper(LLMWrapperBase):
        def _build(self, model):
            scorer = torch.nn.Module()
            scorer.model = model
            return Backend(FakeEngine([torch.tensor([1])]), scorer, 0)

    whole = Bigram(12)
    policy = Wrapper(whole, input_mode="tokens", generate=False)
    ids = torch.tensor([3, 4, 5])
    dist = policy.get_dist(TensorDict({"tokens": Tokens.from_rows({"full": [ids]})}, [1]))
    torch.testing.assert_close(dist.logits, whole.table(ids[:2]))


def test_an_engine_without_logits_says_what_to_use_instead(tokenizer):
    with pytest.raises(
        NotImplementedError, match=r"FakeEngine gives only log-probs.*get_new_version\(generate=False\)"
    ):
        fake_policy(tokenizer, ["a"]).get_dist(THREE_IDS)


def test_what_does_not_fit_is_named(policy):
    td = answered(policy, "Hi")
    length = len(td["tokens"].rows("full")[0])
    with pytest.raises(ConfigError, match="Did you mean 'rlhf'"):
        policy.get_dist(td, masking_strategy="rlfh")
    with pytest.raises(ShapeError, match=rf"got rows of \[\(5,\)\], expected rows of \[\({length},\)\]; usually"):
        policy.get_dist(td, mask=[torch.ones(5, dtype=torch.bool)])
    as_lists = [[position > 1 for position in range(length)]]
    assert policy.get_dist(td, mask=as_lists).mask.sum() == length - 2
    with pytest.raises(MissingKeyError, match=r"'all_assistant_mask'.*use 'generic'"):
        policy.get_dist(THREE_IDS, masking_strategy="rlhf")
    dist = policy.get_dist(td)
    with pytest.raises(ShapeError, match="must end in the shape of the tokens"):
        dist.log_prob(dist.tokens[:, :-1])


def test_one_row_of_a_padded_batch_keeps_its_padding(policy):
    td = answered(policy.get_new_version(pad_output=True), "Hi", "What is 12 + 30?")
    row = td[0]
    assert not row["masks"].all_attention_mask.all()
    dist = policy.get_dist(row, masking_strategy="rlhf")
    assert torch.equal(dist.mask, row["masks"].all_assistant_mask)
    scored = policy.get_new_version(generate=False, inplace=False)(row)
    assert scored["log_probs"].full.shape == row["tokens"].full.shape
    assert isinstance(row["masks"], Masks)
    torch.testing.assert_close(scored["log_probs"].full[dist.mask], row["log_probs"].full[dist.mask], atol=1e-5, rtol=0)
