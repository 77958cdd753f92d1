"""VLLMEngine in this process: what it samples and scores, against the Transformers library on the same weights."""

from __future__ import annotations

import pytest
import torch

from llmrl.errors import ConfigError, RolloutError, ShapeError
from llmrl.modules.llm.engines import Engine, SamplingParams, StopReason, TransformersEngine, VLLMEngine
from llmrl.modules.llm.policies.options import generation_options
from llmrl.testing import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer):
    return tiny_model(tokenizer, heads=2)  # vLLM's attention on a CPU needs heads of at least 32


@pytest.fixture(scope="module")
def failures(model, tokenizer):
    """Why engines could not be built in this process, before the one that is tested here."""
    errors = []
    for options in ({"kv_cache_memory_bytes": 1}, {"logprobs_mode": "raw_logits"}):
        with pytest.raises(Exception, match=r"memory|logprobs_mode") as caught:
            VLLMEngine(model, tokenizer=tokenizer, max_model_len=128, **options)
        errors.append(caught.value)
    return errors


@pytest.fixture(scope="module")
def engine(model, tokenizer, failures):
    options = {"max_model_len": 128, "max_num_batched_tokens": 256}
    engine = VLLMEngine(model, tokenizer=tokenizer, eos_token_ids=(), seed=0, **options)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def reference(model):
    return TransformersEngine(model, eos_token_ids=(), pad_token_id=0)


def make_prompts(num, vocabulary=478, seed=0, shortest=2, longest=9):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (num,), generator=generator).tolist()
    return [torch.randint(1, vocabulary, (length,), generator=generator) for length in lengths]


def scored_by(reference, prompts, generation, temperature):
    """The log-probs of the drawn ids from full forwards of the Transformers library."""
    full = [torch.cat(pair) for pair in zip(prompts, generation.ids, strict=True)]
    scores = reference.score(full, temperature=temperature)
    return [score[len(prompt) :] for score, prompt in zip(scores, prompts, strict=True)]


def assert_close(rows, expected, atol=1e-5):
    for row, other in zip(rows, expected, strict=True):
        assert row.dtype == torch.float32
        torch.testing.assert_close(row, other, atol=atol, rtol=0)


def test_it_follows_the_protocol(engine):
    assert isinstance(engine, Engine)


def test_an_engine_can_be_built_after_others_could_not(failures, engine):
    """Regression: the process groups of the first that failed stayed open, in vLLM's construction and after it."""
    assert [type(error) for error in failures] == [ValueError, ConfigError]
    assert len(engine.generate(make_prompts(2), SamplingParams(max_new_tokens=3)).ids) == 2


# --- log-probs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.3])
def test_log_probs_are_those_of_the_sampling_distribution(engine, reference, temperature):
    prompts = make_prompts(6)
    generation = engine.generate(prompts, SamplingParams(max_new_tokens=7, temperature=temperature))
    assert generation.plain_log_probs is None
    assert [len(ids) for ids in generation.ids] == [7] * 6
    assert_close(generation.log_probs, scored_by(reference, prompts, generation, temperature))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.3])
def test_scores_are_those_of_the_temperature(engine, reference, temperature):
    rows = make_prompts(5, longest=40)
    masks = [torch.arange(len(row)) % 2 == 0 for row in rows]
    assert_close(engine.score(rows, temperature=temperature), reference.score(rows, temperature=temperature))
    masked = engine.score(rows, temperature=temperature, masks=masks)
    assert_close(masked, reference.score(rows, temperature=temperature, masks=masks))
    assert_close(engine.score(rows), reference.score(rows))  # the temperature of one call is gone in the next


@pytest.mark.parametrize(
    "truncation",
    [{"top_p": 0.5}, {"top_k": 5}, {"min_p": 0.8}, {"repetition_penalty": 3.0}, {"top_p": 0.0}],
    ids=lambda t: "{}={}".format(*next(iter(t.items()))),
)
def test_truncated_sampling_keeps_both_log_probs(engine, reference, truncation):
    prompts = make_prompts(6)
    params = SamplingParams(max_new_tokens=7, temperature=0.7, **truncation)
    generation = engine.generate(prompts, params)
    assert_close(generation.plain_log_probs, scored_by(reference, prompts, generation, 0.7))
    if "repetition_penalty" not in truncation:  # the mass of what was cut goes to what stays
        pairs = zip(generation.log_probs, generation.plain_log_probs, strict=True)
        assert min((drawn - plain).min() for drawn, plain in pairs) > 1e-3
    if truncation == {"top_p": 0.0}:
        assert not torch.cat(generation.log_probs).any()  # one token is left


def test_truncated_log_probs_are_those_of_what_was_left(engine, model):
    """Top-k 5 at temperature 0.7, by hand: the softmax over the five largest logits."""
    prompt = make_prompts(1)[0]
    generation = engine.generate([prompt], SamplingParams(max_new_tokens=1, temperature=0.7, top_k=5))
    with torch.no_grad():
        logits = model(prompt[None]).logits[0, -1] / 0.7
    values, kept = logits.topk(5)
    expected = values.log_softmax(-1)[kept == generation.ids[0]]
    torch.testing.assert_close(generation.log_probs[0], expected, atol=1e-5, rtol=0)


def test_a_penalised_greedy_row_says_what_the_penalised_distribution_says(engine, reference):
    prompts, params = make_prompts(4), SamplingParams(max_new_tokens=6, temperature=0.0, repetition_penalty=2.0)
    ours, theirs = engine.generate(prompts, params), reference.generate(prompts, params)
    assert [ids.tolist() for ids in ours.ids] == [ids.tolist() for ids in theirs.ids]
    assert_close(ours.log_probs, theirs.log_probs)
    assert_close(ours.plain_log_probs, theirs.plain_log_probs)


def test_greedy_equals_the_transformers_engine(engine, reference):
    prompts, params = make_prompts(5), SamplingParams(max_new_tokens=12, temperature=0.0)
    ours, theirs = engine.generate(prompts, params), reference.generate(prompts, params)
    assert [ids.tolist() for ids in ours.ids] == [ids.tolist() for ids in theirs.ids]
    assert_close(ours.log_probs, theirs.log_probs)


# --- token truth ------------------------------------------------------------------------------------------------------


def test_random_ids_go_in_and_come_out_as_they_are(engine, reference, tokenizer):
    """Ids that are no text: halves of characters, markers, white space. What was read is what is scored."""
    rows = make_prompts(200, len(tokenizer), seed=1, longest=30)
    assert sum("\ufffd" in text for text in tokenizer.batch_decode(rows)) > 100
    generation = engine.generate(rows, SamplingParams(max_new_tokens=4))
    assert_close(generation.log_probs, scored_by(reference, rows, generation, 1.0))


# --- rows are independent ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [{}, {"top_p": 0.9}, {"repetition_penalty": 1.5}], ids=["plain", "top_p", "penalty"])
def test_a_row_does_not_depend_on_its_batch(engine, params):
    prompts = make_prompts(9)
    prompts[4] = prompts[1]
    seeds = [11, 12, 13, 14, 15, 16, 17, 18, -1]
    sampling = SamplingParams(max_new_tokens=16, temperature=1.3, stop_token_ids=tuple(range(0, 478, 9)), **params)
    together = engine.generate(prompts, sampling, seeds=seeds)
    assert len({len(ids) for ids in together.ids}) > 2  # rows ended at different steps
    assert together.ids[1].tolist() != together.ids[4].tolist()
    for row, seed in enumerate(seeds):
        alone = engine.generate([prompts[row]], sampling, seeds=[seed])
        assert alone.ids[0].tolist() == together.ids[row].tolist()
        assert alone.stop_reasons[0] == together.stop_reasons[row]
        assert_close(alone.log_probs, together.log_probs[row : row + 1])


def test_prompts_of_more_tokens_than_the_engine_takes_at_once_keep_their_seeds(engine):
    prompts = make_prompts(24, shortest=20, longest=60)  # about 960 tokens, 256 at a time
    params, seeds = SamplingParams(max_new_tokens=4), list(range(24))
    together = engine.generate(prompts, params, seeds=seeds)
    alone = [engine.generate([prompt], params, seeds=[seed]) for prompt, seed in zip(prompts, seeds, strict=True)]
    assert [row.tolist() for row in together.ids] == [one.ids[0].tolist() for one in alone]


def test_every_bit_of_a_seed_counts(engine):
    """torch's generator on a CPU reads the lower half of a seed only."""
    seeds = [3, 3 + (1 << 32), 3 + (1 << 40), 3 - (1 << 62), (3 << 70) + 3]
    generation = engine.generate([torch.tensor([1, 2])] * 5, SamplingParams(max_new_tokens=8), seeds=seeds)
    assert len({tuple(ids.tolist()) for ids in generation.ids[:4]}) == 4
    assert generation.ids[4].tolist() == generation.ids[0].tolist()  # beyond 64 bits nothing counts


def test_the_engines_own_seeds_continue_after_a_reload(engine):
    prompts, params = make_prompts(3), SamplingParams(max_new_tokens=5)
    first = engine.generate(prompts, params)
    state = engine.state_dict()
    second = engine.generate(prompts, params)
    assert [ids.tolist() for ids in first.ids] != [ids.tolist() for ids in second.ids]
    engine.load_state_dict(state)
    assert [ids.tolist() for ids in engine.generate(prompts, params).ids] == [ids.tolist() for ids in second.ids]


def test_sampled_frequencies_match_the_probabilities(engine, model):
    """The mean log-prob of many draws is minus the entropy of the distribution that they are drawn from."""
    prompt = torch.tensor([5, 6, 7])
    generation = engine.generate([prompt] * 1500, SamplingParams(max_new_tokens=1, top_k=4), seeds=range(1500))
    with torch.no_grad():
        values, kept = model(prompt[None]).logits[0, -1].topk(4)
    counts = torch.bincount(torch.cat(generation.ids), minlength=478)[kept] / 1500
    torch.testing.assert_close(counts, values.softmax(-1), atol=0.05, rtol=0)  # 4 standard deviations


def test_a_call_leaves_the_global_generator_alone(engine):
    before = torch.get_rng_state()
    engine.generate(make_prompts(2), SamplingParams(max_new_tokens=3))
    assert torch.equal(torch.get_rng_state(), before)


# --- how rows end -----------------------------------------------------------------------------------------------------


def test_stop_reasons_and_lengths(engine):
    stops = tuple(range(0, 478, 20))
    generation = engine.generate(make_prompts(20), SamplingParams(max_new_tokens=12, stop_token_ids=stops))
    assert {StopReason.EOS, StopReason.LENGTH} == set(generation.stop_reasons)
    for ids, log_probs, reason in zip(generation.ids, generation.log_probs, generation.stop_reasons, strict=True):
        assert len(ids) == len(log_probs)
        is_stop = [value in stops for value in ids.tolist()]
        if reason is StopReason.EOS:
            assert is_stop == [False] * (len(ids) - 1) + [True]  # the stop token is kept, and nothing follows it
        else:
            assert len(ids) == 12
            assert not any(is_stop)


def test_only_the_ids_it_was_given_end_a_response(engine, tokenizer):
    """The model's own end-of-sequence id is none of them here: drawn by force it is a token like any other."""
    prompts, eos = make_prompts(300, longest=4), tokenizer.eos_token_id
    free = engine.generate(prompts, SamplingParams(max_new_tokens=12, temperature=2.0), seeds=range(300))
    rows = [row for row, ids in enumerate(free.ids) if eos in ids[:-1]]
    assert rows  # 3600 draws over 478 ids
    assert {len(free.ids[row]) for row in rows} == {12}
    params = SamplingParams(max_new_tokens=12, temperature=2.0, stop_token_ids=(eos,))
    ended = engine.generate([prompts[row] for row in rows], params, seeds=rows)
    assert set(ended.stop_reasons) == {StopReason.EOS}
    for row, ids in zip(rows, ended.ids, strict=True):
        assert ids.tolist() == free.ids[row].tolist()[: len(ids)]


def test_stop_strings_end_a_row_at_the_token_that_completes_them(engine, tokenizer):
    prompts = make_prompts(12)
    free = engine.generate(prompts, SamplingParams(max_new_tokens=10), seeds=range(12))
    row = next(row for row, ids in enumerate(free.ids) if "\ufffd" not in tokenizer.decode(ids[2:5]))
    stop = tokenizer.decode(free.ids[row][2:5])
    stopped = engine.generate(prompts, SamplingParams(max_new_tokens=10, stop_strings=(stop,)), seeds=range(12))
    ids = stopped.ids[row].tolist()
    assert ids == free.ids[row].tolist()[: len(ids)]
    assert stop in tokenizer.decode(ids)
    assert stop not in tokenizer.decode(ids[:-1])
    assert stopped.stop_reasons[row] is StopReason.STOP_STRING
    assert len(stopped.log_probs[row]) == len(ids)


def test_special_tokens_can_be_stop_strings(engine, tokenizer):
    prompts, mark = make_prompts(200, longest=4), tokenizer.decode([tokenizer.eos_token_id])
    params = SamplingParams(max_new_tokens=16, temperature=2.0, stop_strings=(mark,))
    stopped = engine.generate(prompts, params, seeds=range(200))
    ended = [ids[-1].item() for ids, why in zip(stopped.ids, stopped.stop_reasons, strict=True) if why.natural]
    assert set(ended) == {tokenizer.eos_token_id}


def test_vllms_own_options_bend_what_is_drawn_and_keep_log_probs_true(engine, reference):
    prompts = make_prompts(4)
    options = {"allowed_token_ids": [5, 6, 7], "presence_penalty": 1.5, "logit_bias": {5: 2.0}, "min_tokens": 3}
    params = generation_options({"max_new_tokens": 6, "stop_token_ids": [7]} | options, vllm=True).params
    generation = engine.generate(prompts, params, seeds=range(4))
    assert {token for ids in generation.ids for token in ids.tolist()} <= {5, 6, 7}
    assert min(map(len, generation.ids)) >= 4  # none of the first three ends it
    assert_close(generation.plain_log_probs, scored_by(reference, prompts, generation, 1.0))
    for sampled, plain in zip(generation.log_probs, generation.plain_log_probs, strict=True):
        assert (sampled > plain).all()


def test_a_response_that_fills_the_context_is_a_truncation(engine):
    prompt = torch.arange(1, 126)
    generation = engine.generate([prompt], SamplingParams(max_new_tokens=50))
    assert len(generation.ids[0]) == 128 - 1 - 125  # one token is kept free for scoring
    assert generation.stop_reasons == [StopReason.LENGTH]


def test_a_truncated_distribution_can_fill_the_context_too(engine, reference):
    prompts = [torch.arange(1, 126)]
    generation = engine.generate(prompts, SamplingParams(max_new_tokens=50, top_k=5, temperature=0.7))
    assert generation.stop_reasons == [StopReason.LENGTH]
    assert_close(generation.plain_log_probs, scored_by(reference, prompts, generation, 0.7))
    full = torch.cat([prompts[0], generation.ids[0]])
    assert len(engine.score([full])[0]) == engine.max_length == 127


def test_an_aborted_row_is_never_a_natural_stop(engine, monkeypatch):
    inner = engine.core.llm.llm_engine
    step, steps = inner.step, iter(range(100))

    def step_and_abort():
        if next(steps) == 3:
            inner.abort_request([list(inner.output_processor.request_states)[1]], internal=True)
        return step()

    prompts, params = make_prompts(3), SamplingParams(max_new_tokens=9, top_k=20)
    whole = engine.generate(prompts, params, seeds=range(3))
    monkeypatch.setattr(inner, "step", step_and_abort)
    generation = engine.generate(prompts, params, seeds=range(3))
    assert generation.stop_reasons == [StopReason.LENGTH, StopReason.ABORT, StopReason.LENGTH]
    assert not StopReason.ABORT.natural
    assert [len(row) for row in generation.plain_log_probs] == [9, 0, 9]
    for row in (0, 2):
        assert torch.equal(generation.ids[row], whole.ids[row])


# --- what it refuses --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [torch.zeros(0, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int64)])
def test_a_prompt_must_be_a_row_of_ids(engine, prompt):
    with pytest.raises(ShapeError, match="non-empty int64"):
        engine.generate([prompt], SamplingParams())


def test_what_cannot_be_honoured_is_said_before_anything_runs(engine):
    with pytest.raises(ShapeError, match=r"at most 126 tokens \(max_model_len=128\): got 127 in row 1"):
        engine.generate([torch.tensor([1]), torch.arange(127)], SamplingParams())
    with pytest.raises(ShapeError, match="one seed per prompt"):
        engine.generate(make_prompts(2), SamplingParams(), seeds=[1])
    with pytest.raises(ConfigError, match=r"temperature must be 0 or at least 0.01: got 0.001"):
        engine.generate(make_prompts(1), SamplingParams(temperature=0.001))
    empty = engine.generate([], SamplingParams(top_k=3))
    assert (empty.ids, empty.plain_log_probs) == ([], [])


def test_a_failed_call_leaves_nothing_for_the_next_one(engine, monkeypatch):
    inner, prompts, params = engine.core.llm.llm_engine, make_prompts(4), SamplingParams(max_new_tokens=6)
    before = engine.generate(prompts, params, seeds=range(4))

    def fail():
        raise RuntimeError("out of blocks")

    with monkeypatch.context() as patch:
        patch.setattr(inner, "step", fail)
        with pytest.raises(RolloutError, match="generating failed: RuntimeError: out of blocks"):
            engine.generate(make_prompts(6, seed=9), params)
    after = engine.generate(prompts, params, seeds=range(4))
    assert [ids.tolist() for ids in after.ids] == [ids.tolist() for ids in before.ids]
    with pytest.raises(RolloutError, match=r"generating failed: VLLMValidationError: .* out of vocabulary"):
        engine.generate([torch.tensor([10**6])], params)
    assert len(engine.generate(prompts, params).ids) == 4
