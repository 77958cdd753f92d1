"""The promises of every engine, over all kinds of engines: in this process, in another one, behind a URL, test doubles.

Expected log-probs are worked out here from the logits of one full forward per row.
"""

import copy
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import torch

from llmrl.endpoint import RecordingEndpoint
from llmrl.errors import ConfigError, DeadlineError, LLMRLError, RolloutError, ShapeError, WeightSyncError
from llmrl.modules.llm.engines import (
    AsyncVLLMEngine,
    Engine,
    SamplingParams,
    StopReason,
    TransformersEngine,
    VLLMEngine,
)
from llmrl.modules.llm.policies.options import generation_options
from llmrl.testing import FakeEngine, tiny_model, tiny_tokenizer
from tests.support.bigram import Bigram, BigramEngine
from tests.support.vllm import assert_rows_close, random_prompts

MARKS = {"in_process": [pytest.mark.vllm], "async": [pytest.mark.vllm, pytest.mark.slow]}
MARKS["server"] = MARKS["async"]
VLLM = ("in_process", "async", "server")
MODELS = ("transformers", "bigram", *VLLM)  # sample from a model
TRUNCATING = ("transformers", *VLLM)
VOCABULARY = len(tiny_tokenizer())
LONG = SamplingParams(max_new_tokens=1000)


@dataclass
class Case:
    """An engine, the model that it has a copy of, and another model whose weights it may be given."""

    kind: str
    engine: Any
    model: Any
    other: Any


def kinds(*names):
    """Runs a test over engines of these kinds."""
    marked = [pytest.param(name, marks=MARKS.get(name, [])) for name in names]
    return pytest.mark.parametrize("case", marked, indirect=True)


def make_engine(kind, model, request):
    tokenizer = tiny_tokenizer()
    if kind == "fake":
        answers = [torch.randint(VOCABULARY, (20,), generator=torch.Generator().manual_seed(n)) for n in range(7)]
        return FakeEngine(answers, tokenizer=tokenizer, eos_token_ids=[VOCABULARY])
    if kind == "bigram":
        return BigramEngine(copy.deepcopy(model))
    options = {"tokenizer": tokenizer, "eos_token_ids": (), "seed": 0}
    if kind == "transformers":
        return TransformersEngine(copy.deepcopy(model), pad_token_id=0, **options)
    if kind == "server":
        return VLLMEngine(request.getfixturevalue("session_server").url, eos_token_ids=(), seed=0)
    if kind == "async":
        return AsyncVLLMEngine(model, max_model_len=1024, **options)
    return VLLMEngine(model, max_model_len=256, max_num_batched_tokens=256, **options)


@pytest.fixture(scope="module")
def case(request):
    kind = request.param
    if kind == "bigram":
        model, other = Bigram(VOCABULARY), Bigram(VOCABULARY, seed=1)
    else:  # heads of 32, which vLLM's attention on a CPU needs
        options = {"architecture": "gemma" if kind == "server" else "qwen2", "heads": 2}
        model, other = (tiny_model(tiny_tokenizer(), seed=seed, **options).eval() for seed in (0, 1))
    engine = make_engine(kind, model, request)
    yield Case(kind, engine, model, other)
    engine.close()
    engine.close()  # nothing more happens
    if kind in VLLM:
        with pytest.raises(RolloutError, match=r"close\(\) was called"):
            engine.generate(make_prompts(1), SamplingParams())


def make_prompts(num, **options):
    return random_prompts(num, VOCABULARY, **options)


def lists(rows):
    return [row.tolist() for row in rows]


@torch.no_grad()
def expected_scores(model, sequences, temperature=1.0):
    """float32[T] per sequence, from a full forward."""
    rows = []
    for ids in sequences:
        logits = model.table[ids] if isinstance(model, Bigram) else model(input_ids=ids[None]).logits[0]
        log_probs = (logits / temperature).log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
        rows.append(torch.cat([torch.zeros(1), log_probs]))
    return rows


def expected_log_probs(model, prompts, generation, temperature=1.0):
    full = [torch.cat(row) for row in zip(prompts, generation.ids, strict=True)]
    scores = expected_scores(model, full, temperature)
    return [score[len(prompt) :] for score, prompt in zip(scores, prompts, strict=True)]


# --- shape of the answer ----------------------------------------------------------------------------------------------


@kinds("fake", *MODELS)
def test_a_call_answers_every_prompt_and_ends_rows_at_stop_ids_or_the_limit(case):
    assert isinstance(case.engine, Engine)
    stops = tuple(range(0, VOCABULARY, 20))
    generation = case.engine.generate(make_prompts(20), SamplingParams(max_new_tokens=12, stop_token_ids=stops))
    assert {StopReason.EOS, StopReason.LENGTH} == set(generation.stop_reasons)
    assert len(generation.ids) == 20
    assert generation.plain_log_probs is None
    assert generation.version == case.engine.version
    for ids, log_probs, reason in zip(generation.ids, generation.log_probs, generation.stop_reasons, strict=True):
        assert (ids.dtype, log_probs.dtype, len(ids)) == (torch.int64, torch.float32, len(log_probs))
        is_stop = [value in stops for value in ids.tolist()]
        assert not any(is_stop[:-1])  # the stop token is kept, and nothing follows it
        assert is_stop[-1] == (reason is StopReason.EOS)
        assert reason is StopReason.EOS or len(ids) == 12


@kinds("fake", *MODELS)
def test_an_empty_call_has_an_empty_answer(case):
    generation = case.engine.generate([], SamplingParams())
    assert (generation.ids, generation.log_probs, generation.stop_reasons) == ([], [], [])
    assert case.engine.score([]) == []


@kinds(*MODELS)
def test_what_is_not_a_row_of_ids_or_lacks_a_seed_is_refused(case):
    for prompt in (torch.zeros(0, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int64)):
        with pytest.raises(ShapeError, match="non-empty int64"):
            case.engine.generate([prompt], SamplingParams())
    with pytest.raises(ShapeError, match="one seed per prompt"):
        case.engine.generate(make_prompts(2), SamplingParams(), seeds=[1])


@kinds("transformers", *VLLM)
def test_an_unknown_id_fails_alone(case):
    with pytest.raises(LLMRLError, match="vocabulary"):
        case.engine.generate([torch.tensor([10**6])], SamplingParams(max_new_tokens=2))
    assert len(case.engine.generate(make_prompts(4), SamplingParams(max_new_tokens=2)).ids) == 4


@kinds("transformers", *VLLM)
def test_what_is_heard_while_it_is_sampled_is_the_answer_and_a_row_that_is_not_wanted_ends(case):
    heard = [([], []) for _ in range(3)]

    def hear(row, ids, log_probs):
        heard[row][0].extend(ids)
        heard[row][1].extend(log_probs)
        return row != 1 or len(heard[1][0]) < 5

    assert case.engine.streams
    given = {"params": SamplingParams(max_new_tokens=120, ignore_eos=True), "seeds": [1, 2, 3]}
    whole = case.engine.generate(make_prompts(3), **given)
    drawn = case.engine.generate(make_prompts(3), **given, hear=hear)
    for row, ((ids, log_probs), expected) in enumerate(zip(heard, whole.ids, strict=True)):
        assert drawn.ids[row].tolist() == expected[: len(drawn.ids[row])].tolist()
        assert ids == drawn.ids[row][: len(ids)].tolist()
        assert torch.allclose(torch.tensor(log_probs), drawn.log_probs[row][: len(ids)], atol=1e-6)
    assert [len(ids) for ids, _ in heard[::2]] == [120, 120]
    assert 5 <= len(heard[1][0]) <= len(drawn.ids[1]) < 120
    assert drawn.stop_reasons == [StopReason.LENGTH, StopReason.ABORT, StopReason.LENGTH]


# --- log-probs --------------------------------------------------------------------------------------------------------


@kinds(*MODELS)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.3])
def test_log_probs_are_those_of_the_sampling_distribution(case, temperature):
    prompts = make_prompts(6)
    generation = case.engine.generate(prompts, SamplingParams(max_new_tokens=7, temperature=temperature))
    expected = expected_log_probs(case.model, prompts, generation, temperature)
    assert_rows_close(generation.log_probs, expected, atol=1e-5)
    assert all(row[0] < 0 for row in generation.log_probs)  # the first token has a log-prob like every other


@kinds("fake", *MODELS)
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_scores_are_those_of_the_temperature_and_masked(case, temperature):
    rows = make_prompts(5, longest=40)
    masks = [torch.arange(len(row)) % 2 == 0 for row in rows]
    if case.kind == "server" and temperature != 1.0:
        with pytest.raises(ConfigError, match="temperature 1 only"):
            case.engine.score(rows, temperature=temperature)
        return
    scores = case.engine.score(rows, temperature=temperature)
    if case.kind != "fake":
        assert_rows_close(scores, expected_scores(case.model, rows, temperature), atol=1e-5)
    assert all(row[0] == 0 for row in scores)
    masked = case.engine.score(rows, temperature=temperature, masks=masks)
    assert_rows_close(masked, [row * mask for row, mask in zip(scores, masks, strict=True)], atol=1e-5)
    plain = case.engine.score(rows)  # the temperature of one call is gone in the next
    assert case.kind == "fake" or assert_rows_close(plain, expected_scores(case.model, rows), atol=1e-5) is None


@kinds(*TRUNCATING)
@pytest.mark.parametrize(
    "truncation",
    [{"top_p": 0.5}, {"top_k": 5}, {"min_p": 0.8}, {"repetition_penalty": 3.0}, {"top_p": 0.0}],
    ids=lambda t: "{}={}".format(*next(iter(t.items()))),
)
def test_truncated_sampling_keeps_both_log_probs(case, truncation):
    temperature = 1.0 if case.kind == "server" else 0.7
    prompts = make_prompts(6)
    params = SamplingParams(max_new_tokens=7, temperature=temperature, **truncation)
    generation = case.engine.generate(prompts, params)
    assert_rows_close(generation.plain_log_probs, expected_log_probs(case.model, prompts, generation, temperature))
    if "repetition_penalty" not in truncation:  # the mass of what was cut goes to what stays
        pairs = zip(generation.log_probs, generation.plain_log_probs, strict=True)
        assert min((drawn - plain).min() for drawn, plain in pairs) > 1e-3
    if truncation == {"top_p": 0.0}:
        assert not torch.cat(generation.log_probs).any()  # one token is left
    if truncation == {"top_k": 5}:  # by hand: the softmax over the five largest logits
        with torch.no_grad():
            values, kept = (case.model(prompts[0][None]).logits[0, -1] / temperature).topk(5)
        first = values.log_softmax(-1)[kept == generation.ids[0][0]]
        torch.testing.assert_close(generation.log_probs[0][:1], first, atol=1e-5, rtol=0)


@kinds(*TRUNCATING)
@pytest.mark.parametrize("penalty", [1.0, 2.0])
def test_greedy_is_the_same_on_every_engine(case, penalty):
    """With a penalty the log-probs are those of the penalised distribution."""
    prompts = make_prompts(5)
    params = SamplingParams(max_new_tokens=12, temperature=0.0, repetition_penalty=penalty)
    reference = TransformersEngine(case.model, eos_token_ids=(), pad_token_id=0).generate(prompts, params)
    generation = case.engine.generate(prompts, params)
    assert lists(generation.ids) == lists(reference.ids)
    assert_rows_close(generation.log_probs, reference.log_probs)
    if penalty != 1.0:
        assert_rows_close(generation.plain_log_probs, reference.plain_log_probs)


@kinds(*VLLM)
def test_random_ids_go_in_and_come_out_as_they_are(case):
    """Ids that are no text: halves of characters, markers, white space."""
    rows = make_prompts(60, seed=1, longest=30)
    assert sum("\ufffd" in text for text in tiny_tokenizer().batch_decode(rows)) > 30
    generation = case.engine.generate(rows, SamplingParams(max_new_tokens=4))
    assert_rows_close(generation.log_probs, expected_log_probs(case.model, rows, generation))


# --- rows are independent ---------------------------------------------------------------------------------------------


@kinds(*MODELS)
@pytest.mark.parametrize("params", [{}, {"top_p": 0.9}, {"repetition_penalty": 1.5}], ids=["plain", "top_p", "penalty"])
def test_a_row_does_not_depend_on_its_batch(case, params):
    if params and case.kind == "bigram":
        with pytest.raises(ConfigError, match="neither truncation"):
            case.engine.generate(make_prompts(1), SamplingParams(**params))
        return
    prompts = make_prompts(9)
    prompts[4] = prompts[1]
    seeds = [11, 12, 13, 14, 15, 16, 17, 18, -1]
    temperature = 1.0 if case.kind == "server" else 1.3
    stops = tuple(range(0, VOCABULARY, 9))
    sampling = SamplingParams(max_new_tokens=16, temperature=temperature, stop_token_ids=stops, **params)
    together = case.engine.generate(prompts, sampling, seeds=seeds)
    assert len({len(ids) for ids in together.ids}) > 2  # rows ended at different steps
    assert together.ids[1].tolist() != together.ids[4].tolist()
    for row, seed in enumerate(seeds):
        alone = case.engine.generate([prompts[row]], sampling, seeds=[seed])
        assert alone.ids[0].tolist() == together.ids[row].tolist()
        assert alone.stop_reasons[0] == together.stop_reasons[row]
        assert_rows_close(alone.log_probs, together.log_probs[row : row + 1])


@kinds(*VLLM)
def test_prompts_of_more_tokens_than_vllm_takes_at_once_keep_their_seeds(case):
    prompts = make_prompts(24, shortest=20, longest=60)  # about 960 tokens; 256 at a time in this process
    params = SamplingParams(max_new_tokens=4)
    together = case.engine.generate(prompts, params, seeds=range(24))
    alone = [case.engine.generate([prompt], params, seeds=[seed]) for seed, prompt in enumerate(prompts)]
    assert lists(together.ids) == [one.ids[0].tolist() for one in alone]


@kinds(*TRUNCATING)
def test_every_bit_of_a_seed_counts(case):
    """torch's generator on a CPU reads the lower half of a seed only."""
    seeds = [3, 3 + (1 << 32), 3 + (1 << 40), 3 - (1 << 62), (3 << 70) + 3]
    generation = case.engine.generate([torch.tensor([1, 2])] * 5, SamplingParams(max_new_tokens=8), seeds=seeds)
    assert len({tuple(ids.tolist()) for ids in generation.ids[:4]}) == 4
    assert generation.ids[4].tolist() == generation.ids[0].tolist()  # beyond 64 bits nothing counts


@kinds(*TRUNCATING)
def test_own_seeds_continue_after_a_reload_and_the_global_generator_is_left_alone(case):
    prompts, params, engine = make_prompts(3), SamplingParams(max_new_tokens=5), case.engine
    before = torch.get_rng_state()
    first = engine.generate(prompts, params)
    state = engine.state_dict()
    second = engine.generate(prompts, params)
    assert lists(first.ids) != lists(second.ids)
    engine.load_state_dict(state)
    assert lists(engine.generate(prompts, params).ids) == lists(second.ids)
    assert torch.equal(torch.get_rng_state(), before)


@kinds("transformers", "in_process")
def test_sampled_frequencies_match_the_probabilities(case):
    prompt = torch.tensor([5, 6, 7])
    generation = case.engine.generate([prompt] * 1500, SamplingParams(max_new_tokens=1, top_k=4), seeds=range(1500))
    with torch.no_grad():
        values, kept = case.model(prompt[None]).logits[0, -1].topk(4)
    counts = torch.bincount(torch.cat(generation.ids), minlength=VOCABULARY)[kept] / 1500
    torch.testing.assert_close(counts, values.softmax(-1), atol=0.05, rtol=0)  # 4 standard deviations


# --- how rows end -----------------------------------------------------------------------------------------------------


@kinds(*TRUNCATING)
def test_only_the_ids_it_was_given_end_a_response(case):
    """The model's own end-of-sequence id is a token like any other where the engine was given none."""
    eos, prompts = tiny_tokenizer().eos_token_id, make_prompts(300, longest=4)
    params = {"max_new_tokens": 12, "temperature": 2.0}
    free = case.engine.generate(prompts, SamplingParams(**params), seeds=range(300))
    rows = [row for row, ids in enumerate(free.ids) if eos in ids[:-1]]
    assert rows  # 3600 draws over 478 ids
    assert {len(free.ids[row]) for row in rows} == {12}
    stopping = SamplingParams(**params, stop_token_ids=(eos,))
    ended = case.engine.generate([prompts[row] for row in rows], stopping, seeds=rows)
    assert set(ended.stop_reasons) == {StopReason.EOS}
    for row, ids in zip(rows, ended.ids, strict=True):
        assert ids.tolist() == free.ids[row].tolist()[: len(ids)]


@kinds(*TRUNCATING)
def test_stop_strings_end_a_row_at_the_token_that_completes_them(case):
    tokenizer, prompts = tiny_tokenizer(), make_prompts(12)
    free = case.engine.generate(prompts, SamplingParams(max_new_tokens=10), seeds=range(12))
    row = next(row for row, ids in enumerate(free.ids) if "\ufffd" not in tokenizer.decode(ids[2:5]))
    stop = tokenizer.decode(free.ids[row][2:5])
    stopped = case.engine.generate(prompts, SamplingParams(max_new_tokens=10, stop_strings=(stop,)), seeds=range(12))
    ids = stopped.ids[row].tolist()
    assert ids == free.ids[row].tolist()[: len(ids)]
    assert stop in tokenizer.decode(ids)
    assert stop not in tokenizer.decode(ids[:-1])
    assert stopped.stop_reasons[row] is StopReason.STOP_STRING
    assert len(stopped.log_probs[row]) == len(ids)


@kinds(*TRUNCATING)
def test_special_tokens_can_be_stop_strings(case):
    tokenizer = tiny_tokenizer()
    mark = tokenizer.decode([tokenizer.eos_token_id])
    params = SamplingParams(max_new_tokens=16, temperature=2.0, stop_strings=(mark,))
    stopped = case.engine.generate(make_prompts(200, longest=4), params, seeds=range(200))
    ended = [ids[-1].item() for ids, why in zip(stopped.ids, stopped.stop_reasons, strict=True) if why.natural]
    assert set(ended) == {tokenizer.eos_token_id}


@kinds(*VLLM)
def test_a_response_that_fills_the_context_is_a_truncation(case):
    length = case.engine.max_length
    prompts = [torch.arange(length - 2) % (VOCABULARY - 1) + 1]
    generation = case.engine.generate(prompts, SamplingParams(max_new_tokens=50, top_k=5))
    assert generation.stop_reasons == [StopReason.LENGTH]
    assert len(generation.ids[0]) == 2  # one token is kept free, so that all of it can be scored
    assert_rows_close(generation.plain_log_probs, expected_log_probs(case.model, prompts, generation))
    with pytest.raises(ShapeError, match=rf"at most {length - 1} tokens .*: got {length} in row 1"):
        case.engine.generate([torch.tensor([1]), torch.ones(length, dtype=torch.int64)], SamplingParams())


@kinds(*VLLM)
def test_vllms_own_options_change_what_is_drawn_and_keep_log_probs_true(case):
    prompts = make_prompts(4)
    options = {"allowed_token_ids": [5, 6, 7], "presence_penalty": 1.5, "logit_bias": {5: 2.0}, "min_tokens": 3}
    params = generation_options({"max_new_tokens": 6, "stop_token_ids": [7]} | options, vllm=True).params
    generation = case.engine.generate(prompts, params, seeds=range(4))
    assert {token for ids in generation.ids for token in ids.tolist()} <= {5, 6, 7}
    assert min(map(len, generation.ids)) >= 4  # none of the first three ends it
    assert_rows_close(generation.plain_log_probs, expected_log_probs(case.model, prompts, generation))
    with pytest.raises(ConfigError, match=r"at least 0.01: got 0.001"):
        case.engine.generate(prompts, SamplingParams(temperature=0.001))


@kinds(*VLLM)
def test_a_call_past_its_deadline_ends_and_leaves_nothing_in_the_engine(case):
    case.engine.timeout_s = 0.05
    try:
        with pytest.raises(DeadlineError, match=r"must (begin|end|answer)"):
            case.engine.generate(make_prompts(3), LONG)
    finally:
        case.engine.timeout_s = None
    assert len(case.engine.generate(make_prompts(3), SamplingParams(max_new_tokens=2)).ids) == 3


# --- weights ----------------------------------------------------------------------------------------------------------


@kinds("fake", *MODELS)
def test_new_weights_move_the_version_and_are_computed_with(case):
    engine, rows, first = case.engine, make_prompts(4), case.engine.version
    for version, model in ((first + 3, case.other), (first + 4, case.model)):
        engine.update_weights(model.state_dict(), version=version)
        assert engine.version == version
        generation = engine.generate(rows, SamplingParams(max_new_tokens=4))
        assert generation.version == version
        if case.kind != "fake":
            assert_rows_close(engine.score(rows), expected_scores(model, rows))
            assert_rows_close(generation.log_probs, expected_log_probs(model, rows, generation))


@kinds(*MODELS)
@pytest.mark.parametrize("fault", ["unknown", "missing", "shape"])
def test_a_faulty_update_names_the_weight_and_changes_nothing(case, fault):
    engine, rows, version = case.engine, make_prompts(4), case.engine.version
    weights = dict(case.other.state_dict())
    name = "table" if case.kind == "bigram" else "model.layers.1.mlp.up_proj.weight"
    if fault == "unknown":
        weights[f"{name}s"] = weights[name]
    elif fault == "missing":
        del weights[name]
    else:
        weights[name] = weights[name][:-1]
    with pytest.raises(WeightSyncError, match=name):
        engine.update_weights(weights, version=version + 1)
    assert engine.generate(rows, SamplingParams(max_new_tokens=2)).version == engine.version == version
    assert_rows_close(engine.score(rows), expected_scores(case.model, rows))


@kinds("transformers", *VLLM)
def test_agents_that_ask_at_the_same_time_get_rows_of_the_ids_that_were_sampled(case):
    pytest.importorskip("uvicorn", reason="the extra serve")

    def agent(number):
        key, messages, sampled = endpoint.begin(group=number), [{"role": "user", "content": f"task {number}"}], []
        for _ in range(3):
            body = {"messages": messages, "return_token_ids": True}
            url, headers = f"{endpoint.base_url}/chat/completions", {"authorization": f"Bearer {key}"}
            [choice] = httpx.post(url, json=body, headers=headers, timeout=120).json()["choices"]
            sampled += choice["token_ids"]
            messages = [*messages, choice["message"], {"role": "user", "content": "more"}]
        return sampled, endpoint.finish(key, 1.0)

    params = SamplingParams(max_new_tokens=8)
    with RecordingEndpoint(case.engine, tiny_tokenizer(), params=params) as endpoint, ThreadPoolExecutor(4) as pool:
        for sampled, rows in pool.map(agent, range(8)):
            keys = (("tokens", "full"), ("masks", "all_assistant_mask"), ("log_probs", "full"))
            [ids], [mask], [log_probs] = (rows.get(key, as_list=True) for key in keys)
            assert ids[mask].tolist() == sampled
            assert_rows_close([log_probs[mask]], [expected_scores(case.model, [ids])[0][mask]])
