"""The arguments of the wrappers: what each changes, what a new version keeps, and what is refused with a reason."""

import gc
import inspect
import pickle

import pytest
import torch
from tensordict import TensorDict

from llmrl.data.llm.chat import History
from llmrl.errors import ConfigError, DataError, ShapeError
from llmrl.modules.llm import ChatHistory, StopReason, Text, Tokens, TransformersWrapper, vLLMWrapper
from llmrl.modules.llm.engines.vllm.core import request_options
from llmrl.modules.llm.policies import LLMWrapperBase
from llmrl.modules.llm.policies.options import generation_options
from llmrl.testing import FakeEngine, tiny_model, tiny_tokenizer
from tests.support.conversations import chats, fake_policy, history_td, rows
from tests.support.refusals import refusals

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


def test_a_new_version_keeps_everything_it_was_not_told_to_change(model, tokenizer):
    options = {"text_key": "words", "pad_output": True, "inplace": False, "prefer_tokens": False}
    options |= {"generate_kwargs": {"max_new_tokens": 4, "temperature": 0.5}}
    policy = TransformersWrapper(model, tokenizer=tokenizer, **options)
    policy.engine.update_weights(None, version=7)
    scorer = policy.get_new_version(generate=False)
    back = scorer.get_new_version(generate=True)
    for version in (scorer, back):
        assert version.model is model
        assert version.engine is policy.engine
        assert version.scorer is policy.scorer
        assert (version.keys, version.temperature) == (policy.keys, 0.5)
        assert (version.pad_output, version.inplace, version.prefer_tokens) == (True, False, False)
    assert scorer.in_keys == [("history", "full")]
    assert back.in_keys == [("history", "prompt")]
    assert back.options == policy.options
    assert back(history_td(chats()))["policy_version"].tolist() == [7, 7, 7]
    assert policy.get_new_version(pad_model_input=False).engine.version == 7
    with pytest.raises(ConfigError, match="Did you mean 'pad_output'"):
        policy.get_new_version(pad_outputs=True)


@pytest.mark.parametrize("name", sorted(ARGUMENTS))
def test_a_new_version_keeps_every_argument(tokenizer, name):
    """Whatever is changed, the other 25 stay; and what is changed, changes."""
    policy = fake_policy(tokenizer, ["a"], **{k: v for k, (v, _) in ARGUMENTS.items()})
    version = policy.get_new_version(**{name: ARGUMENTS[name][1]})
    assert vars(version.settings) == {**vars(policy.settings), name: ARGUMENTS[name][1]}
    assert version.tokenizer is tokenizer


def test_a_pickled_policy_answers_alike(model, tokenizer):
    options = {"generate_kwargs": {"max_new_tokens": 5, "seed": 3}, "batching": True}
    policy = TransformersWrapper(model, tokenizer=tokenizer, **options)
    other = pickle.loads(pickle.dumps(policy))
    ours, theirs = (rows(one(history_td(chats())), "tokens", "full")[2].tolist() for one in (policy, other))
    assert theirs == ours


OPTIONS = [  # of generation, for every engine, and words of the message
    ({"temprature": 1.0}, "'temprature'.* 'temperature'"),
    ({"num_beams": 4}, "num_beams must be 1"),
    ({"temperature": -0.1}, "temperature must be non-negative"),
    ({"top_p": 2.0}, r"top_p must be within \[0, 1\]"),
    ({"top_k": -5}, "top_k must be positive"),
    ({"repetition_penalty": 0.0}, "repetition_penalty must be positive"),
    ({"do_sample": False, "temperature": 0.7}, "greedy decoding .* needs temperature 0"),
    ({"do_sample": True, "temperature": 0.0}, "temperature above 0"),
    ({"num_return_sequences": 0}, "num_return_sequences must be a positive integer"),
    ({"num_return_sequences": 2.5}, "num_return_sequences must be a positive integer"),
    ({"max_new_tokens": 2.5}, "max_new_tokens must be an integer: got 2.5"),
    ({"max_new_tokens": True}, "max_new_tokens must be an integer: got True"),
    ({"top_k": 2.5}, "top_k must be an integer"),
    ({"temperature": "1"}, "temperature must be a number: got '1'"),
    ({"stop_sequences": [1, 2]}, "stop_strings must be a sequence of non-empty strings"),
    ({"stop_token_ids": ["</s>"]}, "stop_token_ids must be integers"),
    ({"seed": "a"}, "seed must be an integer"),
]
OF_VLLM = [
    ({"presence_penalty": 3}, r"presence_penalty .*\[-2, 2\]: got 3"),
    ({"min_tokens": 1.5}, "min_tokens .*non-negative integer: got 1.5"),
    ({"allowed_token_ids": ["a"]}, "allowed_token_ids must be token ids"),
    ({"best_of": 4}, "best_of=4 is not supported: .*picked"),
    ({"truncate_prompt_tokens": 5}, "is not supported: the model would see other ids"),
    ({"include_stop_str_in_output": False}, "is not supported: a response holds all sampled tokens"),
    ({"prompt_logprobs": 1}, "is not supported: a wrapper with generate=False"),
    ({"presence_penalti": 0.1}, "'presence_penalti'.* 'presence_penalty'"),
]
SETTINGS = [  # of the wrapper
    ({"input_mode": "histroy"}, "Did you mean 'history'"),
    ({"generate": False, "return_log_probs": False}, "return_log_probs must be True"),
    ({"num_samples": 2, "inplace": True}, "inplace must not be True"),
    ({"num_samples": 2, "generate_kwargs": {"n": 3}}, "mean the same"),
    ({"layout": torch.jagged}, "as_nested_tensor"),
    ({"inplace": "all"}, "inplace must be"),
    ({"tokenizer_kwargs": {"padding": True}}, "must not set padding"),
    ({"device": "cpu"}, "decided by the engine"),
    ({"generate": "no"}, "generate must be True or False: got 'no'"),
    ({"num_samples": True}, "num_samples must be a positive integer: got True"),
    ({"text_key": "history"}, "each container must have its own key"),
    ({"tokenizer_kwargs": {"tools_given": True}}, "does not use the variable"),
    ({"min_batch_size": 3, "max_batch_size": 2}, "must not exceed max_batch_size: got 3 and 2"),
    ({"min_batch_size": 0}, "min_batch_size must be a positive integer"),
    ({"max_batch_size": -1}, "max_batch_size must be a positive integer"),
    ({"min_batch_size": 1.5}, "min_batch_size .*integer: got 1.5"),
    ({"batching": True, "batching_timeout": "1"}, "at least 0 seconds: got '1'"),
    ({"batching": True, "batching_timeout": -1.0}, "at least 0 seconds"),
    ({"batching": False, "max_batch_size": 2}, "batching=False must come without"),
    ({"max_conversation_tokens": 0}, "max_conversation_tokens must be at least 2: got 0"),
]
test_settings_that_cannot_be_honoured_are_errors_at_construction = refusals(
    *((ConfigError, words, lambda own=own: fake(generate_kwargs=own)) for own, words in OPTIONS),
    *(
        (ConfigError, words, lambda own=own: vLLMWrapper("no/model", input_mode="tokens", generate_kwargs=own))
        for own, words in OF_VLLM
    ),
    *((ConfigError, words, lambda own=own: fake(**own)) for own, words in SETTINGS),
)


def test_legacy_option_names_and_single_stops(tokenizer):
    options = {"max_tokens": 2, "n": 3, "max_new_tokens": 50, "stop_token_ids": 5, "stop_sequences": "b"}
    policy = fake_policy(tokenizer, ["Hello there, you"], generate_kwargs=options)
    out = policy(history_td(chats()))
    assert (out.batch_size, len(out[0, 0]["tokens"].response)) == ((3, 3), 2)
    assert (policy.options.params.stop_token_ids, policy.options.params.stop_strings) == ((5,), ("b",))


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
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}[assistant]"
    named = fake_policy(tokenizer, ["yes"], chat_template=template)
    assert named(history_td(chats()))["text"].rows("prompt")[0] == "[user]Hi<|im_end|>[assistant]"


def test_the_policy_knows_its_collector_without_keeping_it(tokenizer):
    class Collector:
        pass

    policy, collector = fake_policy(tokenizer, ["a"]), Collector()
    assert policy.collector is None
    policy.register_collector(collector)
    assert policy.collector is collector
    assert pickle.loads(pickle.dumps(policy)).collector is None
    del collector
    gc.collect()
    assert policy.collector is None


def test_the_arguments_are_the_documented_ones():
    names = set(inspect.signature(LLMWrapperBase).parameters)
    own = {"model", "tokenizer", "device", "pad_model_input", "max_conversation_tokens"}
    assert names == {*ARGUMENTS, *own}
    assert len(names) == 28
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


def test_options_of_vllm_are_known_to_its_wrapper_alone(tokenizer, model):
    handed_on = {"presence_penalty": 0.5, "frequency_penalty": -0.5, "min_tokens": 2, "allowed_token_ids": [1, 2]}
    neutral = {"detokenize": False, "include_stop_str_in_output": True, "best_of": None, "bad_words": []}
    params = generation_options(handed_on | neutral | {"ignore_eos": True}, vllm=True).params
    assert dict(params.extra) == handed_on
    assert (params.ignore_eos, params.truncates) == (True, True)
    request = request_options(params, stop_token_ids=(9,))
    assert {name: request[name] for name in handed_on} == handed_on
    assert request["stop_token_ids"] == []
    with pytest.raises(ConfigError, match=r"'min_tokens'.*vLLM-specific option"):
        TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs={"min_tokens": 2})
    with pytest.raises(ConfigError, match="presence_penalty is an option of another engine"):
        TransformersWrapper(model, tokenizer=tokenizer).engine.generate([torch.tensor([1])], params)


def test_an_ignored_end_of_sequence_ends_nothing_and_stays_in_the_text(tokenizer, model):
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    options = {"max_new_tokens": 20, "temperature": 2.0, "seed": 0}
    many = history_td(chats() * 40)
    kept = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs=options)(many.copy())
    ignored = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs=options | {"ignore_eos": True})(many)
    ended = [row for row, ids in enumerate(kept["tokens"].rows("response")) if end in ids]
    assert ended
    for row in ended:
        short, long = (td["tokens"].rows("response")[row].tolist() for td in (kept, ignored))
        assert long[: len(short)] == short
        assert len(long) == 20
        assert "<|im_end|>" in ignored["text"].rows("response")[row]
    assert set(ignored["stop_reason"].tolist()) == {StopReason.LENGTH}


@pytest.mark.parametrize("wrong", [99999, -1])
@pytest.mark.parametrize("enabled", [True, False], ids=["grad", "no grad"])
def test_ids_outside_the_vocabulary_are_named_before_the_model_sees_them(model, wrong, enabled):
    ids = torch.tensor([[1, 2, wrong]])
    policy = TransformersWrapper(model, input_mode="tokens")
    scorer = policy.get_new_version(generate=False)
    with torch.set_grad_enabled(enabled):
        for call in (scorer, policy.get_dist):
            with pytest.raises(ShapeError, match=r"within the model's vocabulary of \d+: got .*tokenizer"):
                call(TensorDict({"tokens": {"full": ids}}, [1]))
        with pytest.raises(ShapeError, match="within the model's vocabulary"):
            policy(TensorDict({"tokens": {"prompt": ids}}, [1]))


def fake(**options):
    return fake_policy(tiny_tokenizer(), ["a"], **options)


def of_ids(**options):
    return TransformersWrapper(tiny_model(hidden_size=16, heads=2), input_mode="tokens", **options)


def ids_td(field, ids, **more):
    return TensorDict({"tokens": {field: ids}, **more}, [len(ids)])


def conversations(field):
    answered = [[*chat, {"role": "assistant", "content": "a"}] for chat in chats()]
    return ChatHistory.from_rows({field: History.from_chats(answered)})


NOT_ONE_EACH = r"one value per row of a batch of \[\]: got 3; usually the batch_size"
ONES, NO_IDS = torch.ones(2, 3, dtype=torch.int64), torch.zeros(2, 0, dtype=torch.int64)
ONE_ROW, ONE_SEED = r"at least one row: got \[", "'seed' must be one integer per row"
test_what_a_wrapper_cannot_read_or_change_is_named = refusals(
    (TypeError, "the input must be a TensorDict: got dict", lambda: fake()({"history": None})),
    (TypeError, "Expected History object", lambda: fake(input_key="x")(TensorDict({"x": torch.zeros(2)}, [2]))),
    (TypeError, r"int64\[P\] per row .*got torch.float32 \[3\]", lambda: of_ids()(ids_td("prompt", torch.rand(2, 3)))),
    (TypeError, r"int64\[P\] per row .*got torch.bool \[3\]", lambda: of_ids()(ids_td("prompt", ONES.bool()))),
    (ShapeError, ONE_ROW, lambda: fake()(TensorDict({}, (0,)))),
    (ShapeError, ONE_ROW, lambda: fake(generate=False)(TensorDict({}, (2, 0)))),
    (ShapeError, ONE_ROW, lambda: of_ids().get_dist(TensorDict({}, (0,)))),
    (ShapeError, "non-empty int64", lambda: of_ids(generate=False)(ids_td("full", NO_IDS))),
    (ShapeError, "non-empty int64", lambda: of_ids().get_dist(ids_td("full", NO_IDS))),
    (
        ShapeError,
        r"must have the shape of .*: got \[2, 2\] for \[2, 3\]",
        lambda: of_ids()(ids_td("prompt", ONES, attention_mask=torch.ones(2, 2))),
    ),
    (
        ShapeError,
        r"'attention_mask' must have the shape of .*: got \[2, 2\] for \[2, 3\]",
        lambda: of_ids(generate=False)(ids_td("full", ONES, attention_mask=torch.ones(2, 2))),
    ),
    *(
        (TypeError, words, lambda mode=mode, wrong=wrong: fake(input_mode=mode)(TensorDict({mode: wrong}, [])))
        for mode, wrong, words in (
            ("history", "Hi", "Expected History .*got str"),
            ("history", torch.zeros(1), "Expected History .*got Tensor"),
            ("history", ChatHistory(prompt="Hi"), "Expected History .*got str"),
            ("history", ChatHistory(prompt=torch.zeros(1)), "Expected History .*got Tensor"),
            ("history", Text(prompt="Hi"), "Expected History .*got str"),
            ("text", "Hi", "Expected str .*got str in its place"),
            ("tokens", torch.zeros(1), "Expected int64.*got Tensor in its place"),
        )
    ),
    (ShapeError, ONE_SEED, lambda: fake()(history_td(chats()).set("seed", torch.ones(3)))),
    (ShapeError, ONE_SEED, lambda: fake()(history_td(chats()).set("seed", torch.ones(3, 2).long()))),
    # Regression: the error came from the log-probs, after generating.
    (ShapeError, NOT_ONE_EACH, lambda: fake()(TensorDict({"history": conversations("prompt")}, []))),
    (ShapeError, NOT_ONE_EACH, lambda: fake(generate=False)(TensorDict({"history": conversations("full")}, []))),
    (ConfigError, "must be a subclass of .*Engine", lambda: LLMWrapperBase(tiny_model(), tokenizer=tiny_tokenizer())),
    (ConfigError, "gradients need a model", lambda: fake().token_scores(ONES, ONES, ONES)),
    (
        ConfigError,
        "this wrapper scores",
        lambda: fake(generate=False)(history_td(chats()), generate_kwargs={"max_new_tokens": 1}),
    ),
    *(
        (ConfigError, f"belongs to the wrapper.*{to}", lambda own=own: fake()(history_td(chats()), generate_kwargs=own))
        for own, to in (({"n": 2}, "num_samples"), ({"logprobs": True}, "return_log_probs"), ({"seed": 1}, "policy.se"))
    ),
    (
        DataError,
        "TransformersWrapper: model no/folder: cannot be loaded",
        lambda: TransformersWrapper("no/folder", tokenizer=tiny_tokenizer()),
    ),
    (DataError, "TransformersWrapper: tokenizer of no/folder: cannot be", lambda: of_ids(tokenizer="no/folder")),
)
