"""The LLM wrappers: what they read and write in every mode, and that the ids they write are the ids the engine saw."""

import pytest
import torch
from tensordict import TensorDict

from llmrl.data.llm.chat import History
from llmrl.modules.llm import (
    AsyncVLLMEngine,
    ChatHistory,
    StopReason,
    Text,
    Tokens,
    TransformersWrapper,
    VLLMEngine,
    token_logprobs,
    vLLMWrapper,
)
from llmrl.modules.llm.policies import LLMWrapperBase
from llmrl.modules.llm.rendering import Renderer
from llmrl.testing import FakeEngine, tiny_tokenizer
from tests.support.conversations import QUESTIONS, chats, fake_policy, history_td, rows


def input_td(mode, tokenizer, questions=QUESTIONS):
    if mode == "history":
        return history_td(chats(questions))
    prompts = Renderer(tokenizer).prompt_ids(chats(questions))
    if mode == "text":
        return TensorDict({"text": Text.from_rows({"prompt": tokenizer.batch_decode(prompts)})}, [len(questions)])
    return TensorDict({"tokens": Tokens.from_rows({"prompt": prompts})}, [len(questions)])


VLLM = pytest.param("vllm", marks=pytest.mark.vllm)
ASYNC_VLLM = pytest.param("vllm in its own process", marks=[pytest.mark.vllm, pytest.mark.slow])
BACKENDS = ["fake", "transformers", VLLM, ASYNC_VLLM]
with_weights = pytest.mark.parametrize("make_policy", ["transformers", VLLM, ASYNC_VLLM], indirect=True)
with_a_model = pytest.mark.parametrize("make_policy", ["transformers"], indirect=True)


@pytest.fixture(scope="module", params=BACKENDS)
def make_policy(model, tokenizer, request):
    """Makes a wrapper of a model, a tokenizer and options; the same for every engine."""
    engine = None
    if request.param.startswith("vllm"):
        kind = VLLMEngine if request.param == "vllm" else AsyncVLLMEngine
        engine = kind(model, tokenizer=tokenizer, seed=0, max_model_len=2048)

    def make(model, tokenizer, **options):
        options = {"tokenizer": tokenizer, "generate_kwargs": {"max_new_tokens": 5}} | options
        if request.param == "transformers":
            return TransformersWrapper(model, **options)
        if engine is not None:
            return vLLMWrapper(engine, **options)
        return LLMWrapperBase(FakeEngine(lambda prompt: (7 * prompt.sum() + torch.arange(20)) % 100), **options)

    yield make
    if engine is not None:
        engine.close()


# --- what is written --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["history", "text", "tokens"])
def test_every_mode_writes_the_same_ids_masks_and_log_probs(make_policy, model, tokenizer, mode):
    policy = make_policy(model, tokenizer, input_mode=mode, generate_kwargs={"max_new_tokens": 5, "seed": 3})
    td = policy(input_td(mode, tokenizer))
    reference = make_policy(model, tokenizer, generate_kwargs={"max_new_tokens": 5, "seed": 3})(history_td(chats()))
    assert [key for key in policy.out_keys if key not in td.keys()] == []
    for row, prompt in enumerate(Renderer(tokenizer).prompt_ids(chats())):
        response, full = rows(td, "tokens", "response")[row], rows(td, "tokens", "full")[row]
        assert torch.equal(rows(td, "tokens", "prompt")[row], prompt)
        assert torch.equal(full, torch.cat([prompt, response]))
        assert torch.equal(full, rows(reference, "tokens", "full")[row])
        assert rows(td, "masks", "all_assistant_mask")[row].tolist() == [False] * len(prompt) + [True] * len(response)
        assert rows(td, "masks", "all_attention_mask")[row].all()
        log_probs = rows(td, "log_probs", "full")[row]
        assert log_probs.dtype == torch.float32
        assert not log_probs[: len(prompt)].any()
        assert torch.equal(log_probs[len(prompt) :], rows(td, "log_probs", "response")[row])
    assert td["stop_reason"].tolist() == [StopReason.LENGTH] * 3
    assert (td["policy_version"].tolist(), td["policy_version"].dtype) == ([0, 0, 0], torch.int64)
    assert td["tokens"].padded is False


@pytest.mark.parametrize(
    ("mode", "containers"),
    [
        ("history", ["text", "masks", "tokens", "log_probs", "history"]),
        ("text", ["text", "masks", "tokens", "log_probs"]),
        ("tokens", ["masks", "tokens", "log_probs"]),
    ],
)
def test_in_and_out_keys(tokenizer, mode, containers):
    policy = fake_policy(tokenizer, ["a"], input_mode=mode)
    assert policy.in_keys == [(mode, "prompt")]
    assert policy.out_keys == [*containers, "stop_reason", "policy_version", "new_record"]
    scorer = policy.get_new_version(generate=False)
    assert scorer.in_keys == [(mode, "full")]
    assert scorer.out_keys == containers
    assert "log_probs" not in policy.get_new_version(return_log_probs=False).out_keys


def test_the_views_say_what_was_answered(tokenizer):
    td = fake_policy(tokenizer, ["It is 42.", "Fine."])(history_td(chats(QUESTIONS[:2])))
    assert td["history"].full.to_chats()[1] == [*chats()[1], {"role": "assistant", "content": "Fine."}]
    answers = [[{"role": "assistant", "content": content}] for content in ("It is 42.", "Fine.")]
    assert td["history"].response.to_chats() == answers
    text = td["text"]
    assert text.rows("response") == ["It is 42.<|im_end|>", "Fine.<|im_end|>"]
    prompt = tokenizer.apply_chat_template(chats()[0], tokenize=False, add_generation_prompt=True)
    assert text.rows("prompt")[0] == prompt
    assert text.rows("full") == [p + r for p, r in zip(text.rows("prompt"), text.rows("response"), strict=True)]
    assert td["stop_reason"].tolist() == [StopReason.EOS] * 2
    assert td["tokens"].covered.tolist() == [2, 2]


def test_a_truncated_answer_is_not_complete(tokenizer):
    policy = fake_policy(tokenizer, ["Hello there, how are you?", "4"], generate_kwargs={"max_new_tokens": 3})
    td = policy(history_td(chats(QUESTIONS[:2])))
    assert td["stop_reason"].tolist() == [StopReason.LENGTH, StopReason.EOS]
    assert td["history"].response[0].is_complete == [False]
    assert td["history"].response[1].is_complete == [True]
    assert "<|im_end|>" not in td["text"].rows("response")[0]


@with_weights
def test_several_samples_per_prompt(make_policy, model, tokenizer):
    policy = make_policy(model, tokenizer, num_samples=4)
    td = input_td("history", tokenizer)
    out = policy(td)
    assert out.batch_size == (3, 4)
    assert "tokens" not in td.keys()
    assert len({tuple(out[1, sample]["tokens"].full.tolist()) for sample in range(4)}) == 4
    assert out[2, 3]["history"].full.to_chats()[0] == chats()[2][0]
    assert policy(input_td("history", tokenizer)[0]).batch_size == (4,)


def test_where_the_output_goes(tokenizer):
    policy = fake_policy(tokenizer, ["a"])
    td = history_td(chats())
    td["answer"] = torch.arange(3)
    assert policy(td) is td
    new = policy.get_new_version(inplace=False)(td)
    assert new is not td
    assert "answer" not in new.keys()
    assert "answer" not in policy.get_new_version(inplace="empty")(td).keys()


# --- log-probs: generation and scoring agree --------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.3])
def test_the_ratio_right_after_sampling_is_one(make_policy, model, tokenizer, temperature):
    policy = make_policy(model, tokenizer, generate_kwargs={"max_new_tokens": 6, "temperature": temperature})
    td = policy(history_td(chats()))
    scored = policy.get_new_version(generate=False)(td.copy())
    for row in range(3):
        mask = rows(td, "masks", "all_assistant_mask")[row]
        new_row = rows(scored, "log_probs", "full")[row]
        torch.testing.assert_close(new_row[mask], rows(td, "log_probs", "full")[row][mask], atol=1e-5, rtol=0)
        assert new_row[0] == 0
        assert (new_row[1:] < 0).all()


@with_weights
def test_truncation_keeps_the_plain_log_probs_beside_the_sampled_ones(make_policy, model, tokenizer):
    policy = make_policy(model, tokenizer, generate_kwargs={"max_new_tokens": 6, "top_k": 3, "temperature": 0.8})
    td = policy(history_td(chats()))
    with torch.no_grad():
        scored = policy.get_new_version(generate=False)(td.copy())
    for row in range(3):
        mask = rows(td, "masks", "all_assistant_mask")[row]
        plain, sampled = (rows(td, "log_probs", name)[row][mask] for name in ("plain", "full"))
        torch.testing.assert_close(plain, rows(scored, "log_probs", "full")[row][mask], atol=1e-5, rtol=0)
        assert (sampled > plain).all()


@with_weights
def test_scoring_reads_the_tokens_and_not_the_text(make_policy, model, tokenizer):
    """1,000 random ids, most of them no valid text: what is scored is what was written, bit for bit."""
    stream = torch.randint(0, len(tokenizer), (1000,), generator=torch.Generator().manual_seed(0))
    assert "\ufffd" in tokenizer.decode(stream)
    td = history_td(chats(["Hi"]))
    answered = History.from_chats([[*chats()[0], {"role": "assistant", "content": "x"}]])
    td["history"] = ChatHistory.from_rows({"full": answered})
    td["tokens"] = Tokens.from_rows({"full": [stream]})
    scorer = make_policy(model, tokenizer, generate=False)
    out = scorer(td)
    assert torch.equal(rows(out, "tokens", "full")[0], stream)
    expected = token_logprobs(model, stream[None], torch.ones(1, 1000).bool(), torch.ones(1, 1000).bool()).log_probs[0]
    torch.testing.assert_close(rows(out, "log_probs", "full")[0], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("mode", ["history", "text", "tokens"])
def test_scoring_without_tokens_encodes_the_conversation(make_policy, model, tokenizer, mode):
    whole = [[*chat, {"role": "assistant", "content": "It is 42."}] for chat in chats()]
    rendered = Renderer(tokenizer).render(whole)
    ids = [row.ids for row in rendered]
    forms = {
        "history": ChatHistory.from_rows({"full": History.from_chats(whole)}),
        "text": Text.from_rows({"full": tokenizer.batch_decode(ids)}),
        "tokens": Tokens.from_rows({"full": ids}),
    }
    policy = make_policy(model, tokenizer, input_mode=mode, generate=False)
    out = policy(TensorDict({mode: forms[mode]}, [3]))
    for row in range(3):
        assert torch.equal(rows(out, "tokens", "full")[row], ids[row])
        assert rows(out, "log_probs", "full")[row].requires_grad == (policy.scorer is not None)
        if mode == "history":
            assert torch.equal(rows(out, "masks", "all_assistant_mask")[row], rendered[row].assistant_mask)


def test_pad_equal_to_eos_gives_the_same_result(make_policy, model):
    results = []
    for pad in ("<|endoftext|>", "<|im_end|>"):
        tokenizer = tiny_tokenizer()
        tokenizer.pad_token = pad
        policy = make_policy(model, tokenizer, pad_output=True, generate_kwargs={"max_new_tokens": 8, "seed": 0})
        td = policy(history_td(chats(["Hi <|im_end|> you", *QUESTIONS])))
        results.append((td["masks"].all_attention_mask, td["masks"].all_assistant_mask, td["log_probs"].full))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


@with_weights
def test_a_stop_string_within_the_end_marker_leaves_a_natural_end_natural(make_policy, model, tokenizer):
    """Regression: vLLM called it a stop string, and the marker stayed in the content."""
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    options = {"max_new_tokens": 40, "temperature": 2.0, "seed": 0, "stop_sequences": ["<|im_end|>", "im_end"]}
    td = make_policy(model, tokenizer, generate_kwargs=options)(history_td(chats(["Hi"] * 64)))
    ended = [row for row, ids in enumerate(td["tokens"].rows("response")) if ids[-1] == end]
    assert ended
    for row in ended:
        assert td["stop_reason"][row] == StopReason.EOS
        assert td["text"].rows("response")[row].endswith("<|im_end|>")
        [message] = td["history"].chats("response")[row]
        assert "im_end" not in message["content"]


# --- seeds ------------------------------------------------------------------------------------------------------------


@with_weights
def test_seeds_of_the_batch_decide_what_is_drawn(make_policy, model, tokenizer):
    policy = make_policy(model, tokenizer)
    td = history_td(chats(["Hi", "Hi"]))
    td["seed"] = torch.tensor([7, 8])
    both = rows(policy(td), "tokens", "response")
    one = history_td(chats(["Hi"]))
    one["seed"] = torch.tensor([8])
    assert torch.equal(rows(policy(one), "tokens", "response")[0], both[1])
    assert not torch.equal(both[0], both[1])


@with_weights
def test_the_wrappers_seed_repeats_the_run(make_policy, model, tokenizer):
    policy = make_policy(model, tokenizer)
    policy.seed = 5
    first = [rows(policy(history_td(chats())), "tokens", "full")[0].tolist() for _ in range(2)]
    policy.seed = 5
    second = [rows(policy(history_td(chats())), "tokens", "full")[0].tolist() for _ in range(2)]
    assert first == second
    assert first[0] != first[1]


# --- batch shapes -----------------------------------------------------------------------------------------------------


def shaped_td(mode, tokenizer, batch_size):
    """A batch of that shape: one question per row, of different lengths."""
    count = torch.Size(batch_size).numel()
    flat = input_td(mode, tokenizer, [f"Question {'long ' * row}{row}" for row in range(count)])
    if batch_size == ():
        return flat[0]
    return flat.reshape(*batch_size) if len(batch_size) > 1 else flat


@pytest.mark.parametrize("pad_output", [False, True], ids=["ragged", "padded"])
@pytest.mark.parametrize("num_samples", [None, 2])
@pytest.mark.parametrize("batch_size", [(), (1,), (3,), (2, 2)], ids=str)
@pytest.mark.parametrize("mode", ["history", "text", "tokens"])
def test_every_batch_shape_generates_and_scores(
    make_policy, tokenizer, model, mode, batch_size, num_samples, pad_output
):
    policy = make_policy(model, tokenizer, input_mode=mode, num_samples=num_samples, pad_output=pad_output)
    policy.seed = 0
    td = policy(shaped_td(mode, tokenizer, batch_size))
    shape = batch_size if num_samples is None else (*batch_size, num_samples)
    assert td.batch_size == shape
    assert td["stop_reason"].shape == td["policy_version"].shape == shape
    count = torch.Size(shape).numel()
    prompts, fulls = td["tokens"].rows("prompt"), td["tokens"].rows("full")
    assert len(fulls) == count
    expected = Renderer(tokenizer).prompt_ids(chats([f"Question {'long ' * row}{row}" for row in range(count)]))
    kept = td["masks"].rows("all_attention_mask")
    for row, (prompt, full, real) in enumerate(zip(prompts, fulls, kept, strict=True)):
        want = expected[row // (num_samples or 1)]
        assert torch.equal(full[real][: len(want)], want)
        assert torch.equal(prompt[len(prompt) - len(want) :], want)
    for container, fields in (("tokens", ("full",)), ("masks", ("all_assistant_mask",)), ("log_probs", ("full",))):
        for field in fields:  # every value per token has one shape
            assert [row.shape for row in td[container].rows(field)] == [row.shape for row in fulls]
            if pad_output:
                assert td[container].get(field).shape[:-1] == shape
    if mode != "tokens":
        assert len(td["text"].rows("full")) == count
    scored = policy.get_new_version(generate=False, num_samples=None, inplace=False)(td)
    assert scored.batch_size == shape
    columns = (td["masks"].rows("all_assistant_mask"), td["log_probs"].rows("full"), scored["log_probs"].rows("full"))
    for mask, sampled, again in zip(*columns, strict=True):
        assert again.shape == sampled.shape
        torch.testing.assert_close(again[mask].detach(), sampled[mask], atol=1e-5, rtol=0)


# --- options of one call ----------------------------------------------------------------------------------------------


def test_options_of_one_call_override_single_options(make_policy, model, tokenizer):
    options = {"max_new_tokens": 4, "temperature": 0.7, "ignore_eos": True}  # every row reaches its limit
    policy = make_policy(model, tokenizer, generate_kwargs=options)
    td = policy(history_td(chats()), generate_kwargs={"max_new_tokens": 2})
    assert {len(row) for row in rows(td, "tokens", "response")} == {2}
    assert policy.temperature == 0.7
    a, b = (policy(history_td(chats()), generate_kwargs={"temperature": 0.0}) for _ in range(2))
    assert torch.equal(rows(a, "tokens", "full")[1], rows(b, "tokens", "full")[1])
    assert len(rows(a, "tokens", "response")[1]) == 4


@pytest.mark.parametrize("mode", ["history", "text", "tokens"])
def test_padded_output(make_policy, model, tokenizer, mode):
    options = {"generate_kwargs": {"max_new_tokens": 5, "seed": 1}}
    policy = make_policy(model, tokenizer, input_mode=mode, pad_output=True, **options)
    td = policy(input_td(mode, tokenizer))
    ragged = make_policy(model, tokenizer, **options)(history_td(chats()))
    tokens, masks, log_probs = td["tokens"], td["masks"], td["log_probs"]
    assert (tokens.padded, masks.padded) == (True, True)
    assert tokens.full.shape == (3, tokens.prompt.shape[1] + tokens.response.shape[1])
    for row in range(3):
        kept = masks.all_attention_mask[row]
        assert torch.equal(tokens.full[row][kept], rows(ragged, "tokens", "full")[row])
        assert torch.equal(masks.all_assistant_mask[row][kept], rows(ragged, "masks", "all_assistant_mask")[row])
        torch.testing.assert_close(log_probs.full[row][kept], rows(ragged, "log_probs", "full")[row])
        assert torch.equal(masks.all_assistant_mask[row].nonzero()[0], torch.tensor([tokens.prompt.shape[1]]))
    scored, mask = policy.get_new_version(generate=False)(td.copy()), masks.all_assistant_mask
    torch.testing.assert_close(scored["log_probs"].full[mask], log_probs.full[mask], atol=1e-5, rtol=0)
