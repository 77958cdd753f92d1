"""The LLM wrappers: what they read and write in every mode, and that the ids they write are the ids the engine saw."""

from __future__ import annotations

import gc
import inspect
import pickle

import pytest
import torch
from tensordict import TensorDict

from llmrl.data.llm.chat import History
from llmrl.errors import ConfigError, MissingKeyError, RolloutError, ShapeError
from llmrl.modules.llm import (
    AsyncVLLMEngine,
    ChatHistory,
    LogProbs,
    Masks,
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
from llmrl.padding import lengths_mask, pad_rows
from llmrl.testing import FakeEngine, ScriptedPolicy, tiny_model, tiny_tokenizer

# name -> a value to start from, another one; what a backend decides is left out
ARGUMENTS = {
    "input_mode": ("history", "text"),
    "input_key": (("history", "prompt"), ("talk", "prompt")),
    "attention_mask_key": ("mask", "other_mask"),
    "generate": (True, False),
    "generate_kwargs": ({"temperature": 0.5}, {"temperature": 0.7}),
    "tokenizer_kwargs": ({}, None),
    "pad_output": (True, False),
    "inplace": (False, "empty"),
    "layout": (torch.strided, None),
    "num_samples": (2, 3),
    "chat_template_name": (None, "chatml_format"),
    "chat_template": (None, tiny_tokenizer().chat_template + " "),
    "return_log_probs": (True, None),
    "history_key": ("talk", "history"),
    "text_key": ("words", "text"),
    "tokens_key": ("ids", "tokens"),
    "masks_key": ("which", "masks"),
    "log_probs_key": ("scores", "log_probs"),
    "batching": (True, None),
    "min_batch_size": (2, 1),
    "max_batch_size": (8, None),
    "batching_timeout": (0.01, 1.0),
    "prefer_tokens": (False, True),
}
QUESTIONS = ["Hi", "What is 12 + 30?", "Think step by step."]


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer):
    return tiny_model(tokenizer, hidden_size=32, heads=1)  # vLLM on a CPU needs heads of at least 32


def chats(questions=QUESTIONS):
    return [[{"role": "user", "content": question}] for question in questions]


def history_td(conversations):
    return TensorDict(
        {"history": ChatHistory.from_rows({"prompt": History.from_chats(conversations)})}, [len(conversations)]
    )


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
    """What makes a wrapper, given a model, a tokenizer and options; the same for every engine."""
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


def fake_policy(tokenizer, answers, **options):
    return LLMWrapperBase(FakeEngine(answers, tokenizer=tokenizer), tokenizer=tokenizer, **options)


def rows(td, *key):
    return td.get(key, as_list=True)


def carried(td, *, tool=None):
    """The next turn's prompt side, as an environment leaves it; ``tool`` adds a message to every conversation."""
    history = td["history"].full
    if tool is not None:
        history = history.extend(History.from_chats([[tool]] * len(td)), inplace=False, dim=-1)
    columns = {
        "history": ChatHistory.from_rows({"prompt": history}),
        "text": Text.from_rows({"prompt": td["text"].rows("full")}),
        "tokens": Tokens.from_rows({"prompt": rows(td, "tokens", "full"), "covered": td["tokens"].covered}),
        "masks": Masks.from_rows({"prompt_assistant_mask": rows(td, "masks", "all_assistant_mask")}),
        "log_probs": LogProbs.from_rows({"prompt": rows(td, "log_probs", "full")}),
    }
    return TensorDict(columns, td.batch_size)


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
    assert td["policy_version"].tolist() == [0, 0, 0]
    assert td["policy_version"].dtype == torch.int64
    assert td["tokens"].padded is False


@pytest.mark.parametrize(
    ("mode", "generating", "scoring"),
    [
        ("history", ["text", "masks", "tokens", "log_probs", "history"], ["masks", "tokens", "log_probs"]),
        ("text", ["text", "masks", "tokens", "log_probs"], ["masks", "tokens", "log_probs"]),
        ("tokens", ["masks", "tokens", "log_probs"], ["masks", "tokens", "log_probs"]),
    ],
)
def test_in_and_out_keys(tokenizer, mode, generating, scoring):
    policy = fake_policy(tokenizer, ["a"], input_mode=mode)
    assert policy.in_keys == [(mode, "prompt")]
    assert policy.out_keys == [*generating, "stop_reason", "policy_version", "new_record"]
    scorer = policy.get_new_version(generate=False)
    assert scorer.in_keys == [(mode, "full")]
    assert scorer.out_keys == scoring
    assert "log_probs" not in policy.get_new_version(return_log_probs=False).out_keys


def test_the_views_say_what_was_answered(tokenizer):
    td = fake_policy(tokenizer, ["It is 42.", "Fine."])(history_td(chats(QUESTIONS[:2])))
    assert td["history"].full.to_chats()[1] == [*chats()[1], {"role": "assistant", "content": "Fine."}]
    assert td["history"].response.to_chats() == [
        [{"role": "assistant", "content": "It is 42."}],
        [{"role": "assistant", "content": "Fine."}],
    ]
    text = td["text"]
    assert text.rows("response") == ["It is 42.<|im_end|>", "Fine.<|im_end|>"]
    assert text.rows("prompt")[0] == tokenizer.apply_chat_template(
        chats()[0], tokenize=False, add_generation_prompt=True
    )
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


def test_a_single_conversation_keeps_its_shape(make_policy, model, tokenizer):
    policy = make_policy(model, tokenizer)
    td = policy(TensorDict({"history": ChatHistory(prompt=History.from_messages(chats()[0]))}, []))
    assert td.batch_size == ()
    full = td.get(("tokens", "full"))
    assert isinstance(full, torch.Tensor)
    assert full.ndim == 1
    assert isinstance(td["text"].response, str)
    assert td["history"].full.shape == (2,)
    assert td["stop_reason"].shape == ()


def test_a_batch_of_two_dimensions_keeps_its_shape(tokenizer):
    flat = [*chats(), *chats(["Once", "Twice", "Thrice"])]
    history = History.stack([History.from_chats(flat[:3]), History.from_chats(flat[3:])])
    td = TensorDict(
        {"history": ChatHistory.from_rows({"prompt": [*history[0].unbind(0), *history[1].unbind(0)]}, [2, 3])}, [2, 3]
    )
    td = fake_policy(tokenizer, ["one", "two", "three", "four", "five", "six"])(td)
    assert td["stop_reason"].shape == (2, 3)
    assert td[1, 2]["text"].response == "six<|im_end|>"
    assert td[1, 2]["history"].full.to_chats() == [*flat[5], {"role": "assistant", "content": "six"}]


@pytest.mark.parametrize("mode", ["history", "text", "tokens"])
def test_padded_output(make_policy, model, tokenizer, mode):
    policy = make_policy(
        model, tokenizer, input_mode=mode, pad_output=True, generate_kwargs={"max_new_tokens": 5, "seed": 1}
    )
    td = policy(input_td(mode, tokenizer))
    ragged = make_policy(model, tokenizer, generate_kwargs={"max_new_tokens": 5, "seed": 1})(history_td(chats()))
    tokens, masks, log_probs = td["tokens"], td["masks"], td["log_probs"]
    assert tokens.padded
    assert masks.padded
    shape = (3, tokens.prompt.shape[1] + tokens.response.shape[1])
    for value in (tokens.full, masks.all_attention_mask, masks.all_assistant_mask, log_probs.full):
        assert value.shape == shape
    for row in range(3):
        kept = masks.all_attention_mask[row]
        assert torch.equal(tokens.full[row][kept], rows(ragged, "tokens", "full")[row])
        assert torch.equal(masks.all_assistant_mask[row][kept], rows(ragged, "masks", "all_assistant_mask")[row])
        torch.testing.assert_close(log_probs.full[row][kept], rows(ragged, "log_probs", "full")[row])
        assert torch.equal(masks.all_assistant_mask[row].nonzero()[0], torch.tensor([tokens.prompt.shape[1]]))
    scored = policy.get_new_version(generate=False)(td.copy())
    torch.testing.assert_close(
        scored["log_probs"].full[masks.all_assistant_mask], log_probs.full[masks.all_assistant_mask], atol=1e-5, rtol=0
    )


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


def test_an_inplace_call_does_not_change_the_prompt(tokenizer):
    td = history_td(chats())
    fake_policy(tokenizer, ["a"])(td)
    assert td["history"].prompt.to_chats() == chats()


# --- log-probs: generation and scoring agree --------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.3])
def test_the_ratio_right_after_sampling_is_one(make_policy, model, tokenizer, temperature):
    policy = make_policy(model, tokenizer, generate_kwargs={"max_new_tokens": 6, "temperature": temperature})
    td = policy(history_td(chats()))
    if policy.scorer is not None:
        keys = (("tokens", "full"), ("log_probs", "full"), ("masks", "all_assistant_mask"))
        ids, old, select = (pad_rows(rows(td, *key)) for key in keys)
        attention = lengths_mask([len(row) for row in rows(td, "tokens", "full")], ids.shape[1])
        new = policy.token_scores(ids, attention, select).log_probs
        assert new.requires_grad
        torch.testing.assert_close((new - old).exp(), torch.ones_like(old), atol=1e-5, rtol=0)
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
    td["history"] = ChatHistory.from_rows(
        {"full": History.from_chats([[*chats()[0], {"role": "assistant", "content": "x"}]])}
    )
    td["tokens"] = Tokens.from_rows({"full": [stream]})
    scorer = make_policy(model, tokenizer, generate=False)
    out = scorer(td)
    assert torch.equal(rows(out, "tokens", "full")[0], stream)
    expected = token_logprobs(model, stream[None], torch.ones(1, 1000).bool(), torch.ones(1, 1000).bool()).log_probs[0]
    torch.testing.assert_close(rows(out, "log_probs", "full")[0], expected, atol=1e-5, rtol=0)


def test_invalid_text_is_drawn_stored_and_carried_as_ids(tokenizer):
    broken = torch.tensor([*tokenizer.encode("é", add_special_tokens=False)[:1], 300, tokenizer.eos_token_id])
    policy = fake_policy(tokenizer, [broken])
    first = policy(history_td(chats(["Hi"])))
    assert "\ufffd" in first["history"].response.to_chats()[0][0]["content"]
    policy(carried(first, tool={"role": "user", "content": "again"}))
    stored = rows(first, "tokens", "full")[0]
    assert torch.equal(policy.engine.prompts[1][: len(stored)], stored)


@pytest.mark.parametrize("mode", ["history", "text", "tokens"])
def test_scoring_without_tokens_encodes_the_conversation(make_policy, model, tokenizer, mode):
    whole = [[*chat, {"role": "assistant", "content": "It is 42."}] for chat in chats()]
    rendered = Renderer(tokenizer).render(whole)
    if mode == "history":
        td = TensorDict({"history": ChatHistory.from_rows({"full": History.from_chats(whole)})}, [3])
    elif mode == "text":
        td = TensorDict({"text": Text.from_rows({"full": tokenizer.batch_decode([row.ids for row in rendered])})}, [3])
    else:
        td = TensorDict({"tokens": Tokens.from_rows({"full": [row.ids for row in rendered]})}, [3])
    policy = make_policy(model, tokenizer, input_mode=mode, generate=False)
    out = policy(td)
    for row in range(3):
        assert torch.equal(rows(out, "tokens", "full")[row], rendered[row].ids)
        assert rows(out, "log_probs", "full")[row].requires_grad == (policy.scorer is not None)
        if mode == "history":
            assert torch.equal(rows(out, "masks", "all_assistant_mask")[row], rendered[row].assistant_mask)
    if mode != "tokens":
        assert out["text"].response is None if mode == "text" else "text" not in out.keys()


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


# --- several turns ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pad_output", [False, True])
def test_five_turns_store_exactly_what_the_engine_saw(tokenizer, pad_output):
    answers = ["I call a tool.", "And <think>again</think>.", "Cut off here because it is long", "So", "Done: 42."]
    script = iter([answer for answer in answers for _ in range(2)])
    limit = 12
    policy = fake_policy(tokenizer, lambda prompt: next(script), generate_kwargs={"max_new_tokens": limit})
    if pad_output:
        policy = policy.get_new_version(pad_output=True)
    td = policy(history_td(chats(["Hi", "What is 12 + 30?"])))
    drawn = [[rows_of(td, "response", row)] for row in range(2)]
    for turn in range(1, 5):
        tool = {"role": "tool" if turn % 2 else "user", "content": f"result {turn}"}
        td = policy(carried_padded(td, tool=tool) if pad_output else carried(td, tool=tool))
        for row in range(2):
            drawn[row].append(rows_of(td, "response", row))
    assert [len(answer) for answer in drawn[0]].count(limit) == 1  # one turn was cut off
    for row in range(2):
        prompts = policy.engine.prompts[row::2]
        full = rows_of(td, "full", row)
        for turn, (prompt, response) in enumerate(zip(prompts, drawn[row], strict=True)):
            seen = torch.cat([prompt, response])
            assert torch.equal(full[: len(seen)], seen), f"turn {turn} is not a prefix of the stored stream"
        mask = rows_of(td, "all_assistant_mask", row, "masks")
        assert torch.equal(full[mask], torch.cat(drawn[row]))  # trained tokens are the sampled ones, of all turns
        log_probs = rows_of(td, "full", row, "log_probs")
        assert torch.equal(log_probs != 0, mask)
        text = td["text"].rows("full")[row]
        assert text == tokenizer.decode(full)
        assert "result 3" in text


def rows_of(td, field, row, container="tokens"):
    """One row without its padding."""
    value = td[container].rows(field)[row]
    if not td[container].padded:
        return value
    if field == "response":
        return value[td["masks"].all_attention_mask[row, -len(value) :]]
    return value[td["masks"].all_attention_mask[row]]


def carried_padded(td, *, tool):
    history = td["history"].full.extend(History.from_chats([[tool]] * len(td)), inplace=False, dim=-1)
    masks = {
        "prompt_assistant_mask": td["masks"].all_assistant_mask,
        "prompt_attention_mask": td["masks"].all_attention_mask,
    }
    columns = {
        "history": ChatHistory.from_rows({"prompt": history}),
        "text": Text.from_rows({"prompt": td["text"].rows("full")}),
        "tokens": Tokens.from_padded({"prompt": td["tokens"].full, "covered": td["tokens"].covered}, [len(td)]),
        "masks": Masks.from_padded(masks),
        "log_probs": LogProbs.from_padded({"prompt": td["log_probs"].full}),
    }
    return TensorDict(columns, td.batch_size)


def test_a_later_turn_equals_rendering_the_whole_conversation(tokenizer):
    policy = fake_policy(tokenizer, ["It is 42.", "Bye."])
    td = policy(carried(policy(history_td(chats(["Hi"]))), tool={"role": "user", "content": "And 7 times 6?"}))
    whole = tokenizer.apply_chat_template(
        td["history"].prompt.to_chats()[0], tokenize=False, add_generation_prompt=True
    )
    assert tokenizer.decode(policy.engine.prompts[1]) == whole
    assert td["text"].rows("prompt") == [whole]


def test_rows_that_start_afresh_are_rendered_among_rows_that_go_on(tokenizer):
    policy = fake_policy(tokenizer, ["one", "two", "three", "four"])
    first = policy(history_td(chats(["Hi", "Hello"])))
    td = carried(first, tool={"role": "user", "content": "more"})
    empty = torch.zeros(0, dtype=torch.int64)
    td["history"] = ChatHistory.from_rows(
        {"prompt": History.stack([History.from_messages(chats(["New"])[0]), td["history"].prompt[1]])}
    )
    td["tokens"] = Tokens.from_rows(
        {"prompt": [empty, rows(td, "tokens", "prompt")[1]], "covered": torch.tensor([0, 2])}
    )
    td["masks"] = Masks.from_rows(
        {"prompt_assistant_mask": [empty.bool(), rows(td, "masks", "prompt_assistant_mask")[1]]}
    )
    td["log_probs"] = LogProbs.from_rows({"prompt": [empty.float(), rows(td, "log_probs", "prompt")[1]]})
    out = policy(td)
    assert torch.equal(policy.engine.prompts[2], Renderer(tokenizer).prompt_ids(chats(["New"]))[0])
    assert torch.equal(
        policy.engine.prompts[3][: len(rows(first, "tokens", "full")[1])], rows(first, "tokens", "full")[1]
    )
    assert out["text"].rows("full")[0].startswith("<|im_start|>user\nNew")
    assert [int(mask.sum()) for mask in rows(out, "masks", "all_assistant_mask")] == [
        len(policy.engine.answers[2]),
        len(policy.engine.answers[1]) + len(policy.engine.answers[3]),
    ]


def test_asking_the_same_prompt_again_uses_the_same_ids(tokenizer):
    policy = fake_policy(tokenizer, ["one", "two", "three", "four"])
    td = policy(history_td(chats(["Hi"])))
    policy(td)
    assert torch.equal(policy.engine.prompts[0], policy.engine.prompts[1])
    later = policy(carried(td, tool={"role": "user", "content": "more"}))
    mask = rows(later, "masks", "all_assistant_mask")[0]
    again = policy(later)
    assert torch.equal(policy.engine.prompts[2], policy.engine.prompts[3])
    assert rows(again, "masks", "all_assistant_mask")[0].sum() == mask.sum() - len(policy.engine.answers[2]) + len(
        policy.engine.answers[3]
    )


def test_text_mode_tokenises_only_what_was_appended(tokenizer):
    policy = fake_policy(tokenizer, [torch.tensor([300, 301, 302]), "end"], input_mode="text")
    td = policy(TensorDict({"text": Text.from_rows({"prompt": ["Hello "]})}, [1]))
    step = TensorDict(
        {
            "text": Text.from_rows({"prompt": [td["text"].rows("full")[0] + " more"]}),
            "tokens": Tokens.from_rows({"prompt": rows(td, "tokens", "full"), "covered": td["tokens"].covered}),
            "masks": Masks.from_rows({"prompt_assistant_mask": rows(td, "masks", "all_assistant_mask")}),
        },
        [1],
    )
    policy(step)
    added = tokenizer.encode(" more", add_special_tokens=False)
    assert policy.engine.prompts[1].tolist() == [*rows(td, "tokens", "full")[0].tolist(), *added]
    assert int(rows(step, "masks", "all_assistant_mask")[0].sum()) == 3 + len(policy.engine.answers[1])


def test_a_conversation_that_lost_messages_is_an_error(tokenizer):
    policy = fake_policy(tokenizer, ["one"])
    td = carried(policy(history_td(chats(["Hi"]))))
    td["history"] = ChatHistory.from_rows({"prompt": History.from_chats(chats(["Hi"]))})
    with pytest.raises(RolloutError, match="only grows"):
        policy(td)


def test_prefer_tokens_false_renders_anew(tokenizer):
    policy = fake_policy(tokenizer, [torch.tensor([300, 301])], prefer_tokens=False)
    td = carried(policy(history_td(chats(["Hi"]))), tool={"role": "user", "content": "more"})
    policy(td)
    assert torch.equal(policy.engine.prompts[1], policy.renderer.prompt_ids(td["history"].prompt.to_chats())[0])
    assert int(rows(td, "masks", "all_assistant_mask")[0].sum()) == 2


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


# --- settings ---------------------------------------------------------------------------------------------------------


@with_a_model
def test_a_new_version_keeps_everything_it_was_not_told_to_change(make_policy, model, tokenizer):
    policy = make_policy(
        model,
        tokenizer,
        generate_kwargs={"max_new_tokens": 4, "temperature": 0.5},
        text_key="words",
        pad_output=True,
        inplace=False,
        prefer_tokens=False,
    )
    policy.engine.update_weights(None, version=7)
    scorer = policy.get_new_version(generate=False)
    back = scorer.get_new_version(generate=True)
    for version in (scorer, back):
        assert version.model is model
        assert version.engine is policy.engine
        assert version.scorer is policy.scorer
        assert version.keys == policy.keys
        assert version.temperature == 0.5
        assert (version.pad_output, version.inplace, version.prefer_tokens) == (True, False, False)
    assert scorer.in_keys == [("history", "full")]
    assert back.in_keys == [("history", "prompt")]
    assert back.options == policy.options
    assert back(history_td(chats()))["policy_version"].tolist() == [7, 7, 7]
    assert policy.get_new_version(pad_model_input=False).engine.version == 7
    with pytest.raises(ConfigError, match="Did you mean 'pad_output'"):
        policy.get_new_version(pad_outputs=True)


def test_options_of_one_call_override_single_options(make_policy, model, tokenizer):
    policy = make_policy(model, tokenizer, generate_kwargs={"max_new_tokens": 4, "temperature": 0.7})
    td = policy(history_td(chats()), generate_kwargs={"max_new_tokens": 2})
    assert {len(row) for row in rows(td, "tokens", "response")} == {2}
    assert policy.temperature == 0.7
    a, b = (policy(history_td(chats()), generate_kwargs={"temperature": 0.0}) for _ in range(2))
    assert torch.equal(rows(a, "tokens", "full")[1], rows(b, "tokens", "full")[1])
    assert len(rows(a, "tokens", "response")[1]) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temprature": 1.0}, "unknown option 'temprature'. Did you mean 'temperature'"),
        ({"num_beams": 4}, "num_beams must be 1"),
        ({"temperature": -0.1}, "temperature must be non-negative"),
        ({"top_p": 2.0}, r"top_p must be within \[0, 1\]"),
        ({"top_k": -5}, "top_k must be positive"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be positive"),
        ({"do_sample": False, "temperature": 0.7}, "greedy decoding .* needs temperature 0"),
        ({"do_sample": True, "temperature": 0.0}, "temperature above 0"),
        ({"num_return_sequences": 0}, "num_return_sequences must be positive"),
    ],
)
def test_generation_options_are_checked_at_construction(tokenizer, options, message):
    with pytest.raises(ConfigError, match=message):
        fake_policy(tokenizer, ["a"], generate_kwargs=options)


def test_legacy_option_names(tokenizer):
    policy = fake_policy(
        tokenizer, ["Hello there, you"], generate_kwargs={"max_tokens": 2, "n": 3, "max_new_tokens": 50}
    )
    out = policy(history_td(chats()))
    assert out.batch_size == (3, 3)
    assert len(out[0, 0]["tokens"].response) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input_mode": "histroy"}, "Did you mean 'history'"),
        ({"generate": False, "return_log_probs": False}, "return_log_probs must be True"),
        ({"num_samples": 2, "inplace": True}, "inplace must not be True"),
        ({"num_samples": 2, "generate_kwargs": {"n": 3}}, "name one thing"),
        ({"layout": torch.jagged}, "as_nested_tensor"),
        ({"inplace": "all"}, "inplace must be"),
        ({"tokenizer_kwargs": {"padding": True}}, "must not set padding"),
        ({"device": "cpu"}, "decided by the engine"),
    ],
)
def test_settings_that_cannot_be_honoured_are_errors(tokenizer, options, message):
    with pytest.raises(ConfigError, match=message):
        fake_policy(tokenizer, ["a"], **options)


def test_what_is_missing_or_of_another_kind_is_named(model, tokenizer):
    policy = fake_policy(tokenizer, ["a"])
    with pytest.raises(MissingKeyError, match=r"Expected '\('history', 'prompt'\)' key"):
        policy(TensorDict({"query": torch.zeros(2)}, [2]))
    with pytest.raises(TypeError, match="Expected History object"):
        fake_policy(tokenizer, ["a"], input_key="query")(TensorDict({"query": torch.zeros(2)}, [2]))
    with pytest.raises(ShapeError, match="at least one row"):
        policy(TensorDict({}, [0]))
    with pytest.raises(ConfigError, match="must be an Engine"):
        LLMWrapperBase(model, tokenizer=tokenizer)
    with pytest.raises(ConfigError, match="gradients need a model"):
        policy.token_scores(*(torch.ones(1, 2, dtype=torch.int64),) * 3)


def test_tokens_mode_needs_no_tokenizer_and_reads_a_dense_prompt_by_its_mask(model):
    policy = TransformersWrapper(model, input_mode="tokens", generate_kwargs={"max_new_tokens": 3, "temperature": 0.0})
    eos = model.config.eos_token_id
    prompt = torch.tensor([[eos, 5, 6, 7], [eos, eos, 8, eos]])
    mask = torch.tensor([[False, True, True, True], [False, False, True, True]])
    td = TensorDict({"tokens": TensorDict({"prompt": prompt}, [2]), "attention_mask": mask}, [2])
    out = policy(td.copy())
    assert [row.tolist() for row in rows(out, "tokens", "prompt")] == [[5, 6, 7], [8, eos]]
    alone = policy(TensorDict({"tokens": Tokens.from_rows({"prompt": [torch.tensor([8, eos])]})}, [1]))
    assert torch.equal(rows(alone, "tokens", "full")[0], rows(out, "tokens", "full")[1])


def test_custom_keys_and_input_key(tokenizer):
    policy = fake_policy(tokenizer, ["yes"], tokens_key="ids", history_key="talk", input_key="start")
    td = policy(TensorDict({"start": History.from_chats(chats())}, [3]))
    assert {"ids", "talk", "text", "masks", "log_probs"} <= set(td.keys())
    assert td["talk"].response.to_chats()[0][0]["content"] == "yes"


def test_text_and_history_mode_options_of_the_tokenizer(tokenizer):
    policy = fake_policy(tokenizer, ["yes"], generate_kwargs={"skip_special_tokens": True})
    assert policy(history_td(chats()))["text"].rows("response") == ["yes"] * 3
    named = fake_policy(
        tokenizer,
        ["yes"],
        chat_template="{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}[assistant]",
    )
    assert named(history_td(chats()))["text"].rows("prompt")[0] == "[user]Hi<|im_end|>[assistant]"


def test_scripted_policy_answers_histories(tokenizer):
    td = ScriptedPolicy(lambda chat: chat[-1]["content"].upper())(history_td(chats()))
    assert td["history"].full.to_chats()[1][-1] == {"role": "assistant", "content": "WHAT IS 12 + 30?"}
    assert td["stop_reason"].tolist() == [StopReason.EOS] * 3


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


@pytest.mark.parametrize("batch_size", [(0,), (2, 0)], ids=str)
@pytest.mark.parametrize("generate", [True, False])
def test_an_empty_batch_is_an_error(tokenizer, batch_size, generate):
    policy = fake_policy(tokenizer, ["a"], generate=generate)
    with pytest.raises(ShapeError, match=r"at least one row: got \["):
        policy(TensorDict({}, batch_size))


# --- collectors, pickling, options of one call ------------------------------------------------------------------------


class Collector:
    pass


def test_the_policy_knows_its_collector_without_keeping_it(tokenizer):
    policy, collector = fake_policy(tokenizer, ["a"]), Collector()
    assert policy.collector is None
    policy.register_collector(collector)
    assert policy.collector is collector
    assert pickle.loads(pickle.dumps(policy)).collector is None
    del collector
    gc.collect()
    assert policy.collector is None


@with_a_model
def test_a_pickled_policy_answers_alike(make_policy, model, tokenizer):
    policy = make_policy(model, tokenizer, generate_kwargs={"max_new_tokens": 5, "seed": 3}, batching=True)
    other = pickle.loads(pickle.dumps(policy))
    assert rows(other(history_td(chats())), "tokens", "full")[2].tolist() == (
        rows(policy(history_td(chats())), "tokens", "full")[2].tolist()
    )


@pytest.mark.parametrize(
    ("option", "instead"),
    [({"n": 2}, "num_samples"), ({"logprobs": True}, "return_log_probs"), ({"seed": 1}, "policy.seed")],
)
def test_one_call_cannot_change_what_belongs_to_the_wrapper(tokenizer, option, instead):
    with pytest.raises(ConfigError, match=rf"belongs to the wrapper.*{instead}"):
        fake_policy(tokenizer, ["a"])(history_td(chats()), generate_kwargs=option)


@pytest.mark.parametrize("name", sorted(ARGUMENTS))
def test_a_new_version_keeps_every_argument(tokenizer, name):
    """Whatever is changed, the other 25 stay; and what is changed, changes."""
    policy = fake_policy(tokenizer, ["a"], **{k: v for k, (v, _) in ARGUMENTS.items()})
    version = policy.get_new_version(**{name: ARGUMENTS[name][1]})
    assert version._settings == {**policy._settings, name: ARGUMENTS[name][1]}
    assert version.tokenizer is tokenizer


def test_the_arguments_are_the_documented_ones():
    names = set(inspect.signature(LLMWrapperBase).parameters)
    assert names == {*ARGUMENTS, "model", "tokenizer", "device", "pad_model_input"}
    assert len(names) == 27
    assert set(inspect.signature(TransformersWrapper).parameters) == names


@pytest.mark.parametrize("mode", ["text", "tokens"])
def test_a_prompt_may_stand_in_a_plain_nested_tensordict(mode):
    """Regression: ``TensorDict({("tokens", "prompt"): ids})`` was an AttributeError of a dict."""
    tokenizer = tiny_tokenizer()
    ids = torch.tensor([tokenizer("2+2=").input_ids] * 2)
    prompt = ["2+2=", "2+2="] if mode == "text" else ids
    policy = LLMWrapperBase(FakeEngine(["4"], tokenizer=tokenizer), tokenizer=tokenizer, input_mode=mode)
    td = policy(TensorDict({(mode, "prompt"): prompt}, batch_size=[2]))
    assert [row.tolist() for row in td["tokens"].rows("prompt")] == ids.tolist()
    assert [tokenizer.decode(row) for row in td["tokens"].rows("full")] == ["2+2=4<|im_end|>"] * 2
    scored = policy.get_new_version(generate=False)(TensorDict({("tokens", "full"): ids}, batch_size=[2]))
    assert scored["log_probs"].full.shape == ids.shape
