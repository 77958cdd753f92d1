"""Scoring (``generate=False``): padding is never a token, and what was scored is written beside its log-probs."""

import pickle

import pytest
import torch
from tensordict import TensorDict, lazy_stack

from llmrl.data.llm.chat import History
from llmrl.data.ragged.padding import lengths_mask, pad_rows
from llmrl.envs.llm import ChatEnv
from llmrl.envs.llm.completions import unpadded_ids
from llmrl.envs.llm.transforms.length import response_lengths
from llmrl.errors import MissingKeyError
from llmrl.modules.llm import ChatHistory, LLMWrapperBase, Masks, Tokens, TransformersWrapper
from llmrl.testing import FakeEngine, tiny_model
from tests.support.conversations import chats, fake_policy, history_td

ROWS = [torch.arange(3, 8), torch.arange(10, 22)]


@pytest.fixture(scope="module")
def scorer(tokenizer):
    return TransformersWrapper(tiny_model(tokenizer), tokenizer=tokenizer, input_mode="tokens", generate=False)


@pytest.fixture(scope="module")
def expected(scorer):
    return scorer(TensorDict(tokens=Tokens.from_rows({"full": ROWS}), batch_size=[2]))["log_probs"].rows("full")


def padded(side="left"):
    """int64[2, 12] and bool[2, 12]"""
    sizes = [len(row) for row in ROWS]
    return pad_rows(ROWS, value=0, side=side), lengths_mask(sizes, max(sizes), side=side)


def answered(*questions):
    return History.from_chats([[*chat, {"role": "assistant", "content": "Yes."}] for chat in chats(questions)])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
@pytest.mark.parametrize("key", ["attention_mask", "mask", ("inputs", "mask")])
def test_the_attention_mask_decides_what_is_scored(scorer, expected, key, dtype, side):
    """Regression: the mask was ignored, and padding scored as tokens."""
    ids, mask = padded(side)
    td = TensorDict(tokens=TensorDict(full=ids, batch_size=[2]), batch_size=[2]).set(key, mask.to(dtype))
    log_probs = scorer.get_new_version(attention_mask_key=key)(td)["log_probs"].full
    assert log_probs.shape == ids.shape
    assert not log_probs[~mask].any()
    torch.testing.assert_close([log_probs[row][mask[row]] for row in (0, 1)], list(expected), atol=1e-5, rtol=0)


def test_distributions_leave_padding_out_by_the_attention_mask(scorer):
    ids, mask = padded()
    dist = scorer.get_dist(TensorDict(tokens=TensorDict(full=ids, batch_size=[2]), attention_mask=mask, batch_size=[2]))
    assert dist.mask.sum(1).tolist() == [len(row) - 1 for row in ROWS]
    assert not dist.mask[~mask].any()


@pytest.mark.parametrize("wrapped", [False, True], ids=["one mask", "masks"])
def test_padded_rows_that_were_stacked_lazily_are_scored_without_padding(scorer, expected, wrapped):
    """As a buffer or a collector gives them back. Regression: their padding was scored as tokens."""
    ids, mask = padded()
    masks = {"masks": Masks.from_padded({"all_attention_mask": mask})} if wrapped else {"attention_mask": mask}
    batch = TensorDict({"tokens": Tokens.from_padded({"full": ids}), **masks}, [2])
    log_probs = scorer(lazy_stack([batch[0], batch[1]]))["log_probs"].rows("full")
    for row, values in enumerate(expected):
        assert log_probs[row].shape == ids[row].shape
        torch.testing.assert_close(log_probs[row][mask[row]], values, atol=1e-5, rtol=0)


def test_the_input_key_decides_which_ids_are_scored(scorer, expected):
    """Regression: ("tokens", "full") was read, whatever ``input_key`` said."""
    td = TensorDict(tokens=Tokens.from_rows({"full": [row.flip(0) for row in ROWS]}), batch_size=[2])
    td["other"] = Tokens.from_rows({"full": ROWS})
    out = scorer.get_new_version(input_key=("other", "full"))(td)
    torch.testing.assert_close(list(out["log_probs"].rows("full")), list(expected))


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("mode", ["history", "tokens"])
def test_a_later_turn_of_padded_prompts_is_asked_without_the_padding(tokenizer, mode, stacked):
    """Regression: in tokens mode, and of rows stacked lazily, the engine was given the padding as tokens."""

    seen = []
    for pad_output in (False, True):
        engine = FakeEngine(lambda prompt: (7 * prompt.sum() + torch.arange(4)) % 100)
        options = {"input_mode": mode, "pad_output": pad_output, "generate_kwargs": {"max_new_tokens": 3}}
        policy = LLMWrapperBase(engine, tokenizer=tokenizer, **options)
        env = ChatEnv(batch_size=(2,), input_mode=mode, tokenizer=tokenizer)
        td = policy(env.reset(TensorDict(query=["Hi", "What is two and two?"], batch_size=[2])))
        td = env.step(td)["next"]
        policy(lazy_stack([td[0], td[1]]) if stacked else td)
        seen.append([prompt.tolist() for prompt in engine.prompts[-2:]])
    assert seen[0] == seen[1]
    assert len(seen[0][0]) != len(seen[0][1])


def test_padded_rows_that_were_stacked_lazily_keep_the_lengths_of_their_answers(tokenizer):
    td = fake_policy(tokenizer, ["Yes.", "Not at all."], pad_output=True)(history_td(chats(["Hi"] * 2)))
    expected = td["masks"].all_assistant_mask.sum(1).tolist()
    assert expected[0] < expected[1]
    for batch in (td, lazy_stack([td[0], td[1]])):
        assert response_lengths(batch, "test").tolist() == expected
        assert list(map(len, unpadded_ids(batch, "response"))) == expected


@pytest.mark.parametrize("pad_output", [False, True])
@pytest.mark.parametrize("inplace", [True, False, "empty"])
@pytest.mark.parametrize("mode", ["history", "text", "tokens"])
def test_what_was_scored_is_written_beside_its_log_probs(tokenizer, mode, inplace, pad_output):
    full = ChatHistory.from_rows({"full": answered("Hi", "How are you?")})
    ids = full.to_tokens(tokenizer)
    given = {"history": full, "text": full.to_text(tokenizer), "tokens": ids}[mode]
    options = {"input_mode": mode, "generate": False, "inplace": inplace, "pad_output": pad_output}
    policy = fake_policy(tokenizer, ["x"], **options)
    out = policy(TensorDict({mode: given}, [2]))
    assert [key for key in policy.out_keys if key not in out.keys()] == []
    for row, real in enumerate(out["masks"].rows("all_attention_mask")):
        assert torch.equal(out["tokens"].rows("full")[row][real], ids.rows("full")[row])
    if mode != "tokens":
        text = out["text"]
        assert text.rows("full") == full.to_text(tokenizer).rows("full")
        assert text.prompt is text.response is None
    if mode == "history":
        assert out["history"].chats("full") == full.chats("full")


@pytest.mark.parametrize("inplace", [True, False, "empty"])
def test_scoring_an_answered_batch_keeps_its_prompts_and_responses(tokenizer, inplace):
    policy = fake_policy(tokenizer, ["Yes.", "No."])
    td = policy(history_td(chats(["Hi"] * 2)))
    out = policy.get_new_version(generate=False, inplace=inplace)(td.copy())
    assert out["text"].rows("response") == ["Yes.<|im_end|>", "No.<|im_end|>"]
    assert out["history"].chats("prompt") == chats(["Hi"] * 2)
    for name in ("all_attention_mask", "all_assistant_mask"):
        pairs = zip(out["masks"].rows(name), td["masks"].rows(name), strict=True)
        assert all(torch.equal(got, want) for got, want in pairs)


def test_text_is_made_of_the_ids_where_only_those_are_there(tokenizer):
    tokens = ChatHistory.from_rows({"full": answered("Hi")}).to_tokens(tokenizer)
    out = fake_policy(tokenizer, ["x"], generate=False)(TensorDict(tokens=tokens, batch_size=[1]))
    assert out["text"].rows("full") == tokens.to_text(tokenizer).rows("full")
    assert "history" not in out.keys()


def test_a_wrapper_shows_the_keys_and_options_that_it_uses(tokenizer):
    keys = {f"{name}_key": f"my_{name}" for name in ("history", "text", "tokens", "masks", "log_probs")}
    options = {"max_tokens": 7, "stop": ["."], "temperature": 0.5}
    policy = fake_policy(tokenizer, ["x"], input_mode="text", generate_kwargs=options, **keys)
    assert {name: getattr(policy, name) for name in keys} == keys
    assert policy.input_mode == "text"
    assert policy.generate_kwargs == {"max_new_tokens": 7, "stop_sequences": ["."], "temperature": 0.5}
    assert policy.get_new_version(generate_kwargs=None).generate_kwargs == {}


def test_a_missing_input_is_a_key_error_and_a_value_error(tokenizer):
    policy = fake_policy(tokenizer, ["x"])
    for kind in (MissingKeyError, KeyError, ValueError):
        with pytest.raises(kind, match=r"Expected .*'history', 'prompt'.* key in the input") as caught:
            policy(TensorDict(answer=torch.zeros(1), batch_size=[1]))
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
