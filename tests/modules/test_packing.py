"""Packed rows score exactly like padded ones and see nothing of each other, or the model is not packed at all."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDictBase, lazy_stack
from torch import nn
from transformers import AutoModelForCausalLM, masking_utils

from llmrl.data.ragged.padding import lengths_mask, pad_rows
from llmrl.errors import ConfigError, ShapeError
from llmrl.modules.llm import packing as module
from llmrl.modules.llm import shared_prefixes
from llmrl.modules.llm.log_probs import TokenScorer, find_head_path, token_logprobs
from llmrl.modules.llm.packing import lay_out, pack, why_not_packed
from llmrl.modules.llm.shared_prefixes import can_share_prefixes, group_rows, share_prefixes
from llmrl.objectives.llm import SFTLoss
from llmrl.train.data.lengths import RowLengths
from llmrl.train.distributed import Session
from llmrl.train.settings import SFTConfig
from llmrl.train.updater import Updater
from tests.support.causal_models import (
    SMALL,
    VOCABULARY,
    assert_same_gradients,
    causal_lm,
    naive_scores,
    weighted_gradients,
)
from tests.support.losses import conversation

GROUPED = SMALL | {"num_key_value_heads": 1}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 1, "eos_token_id": 2}
DENSE = {  # by model type
    "gpt2": GPT2 | {"n_positions": 16},  # as long as the longest row, no longer
    "llama": GROUPED,
    "qwen2": GROUPED,
    "qwen3": GROUPED | {"head_dim": 8},
}
MODELS = DENSE | {
    "gemma2": GROUPED | {"head_dim": 8, "sliding_window": 4},  # shorter than the rows
    "mixtral": GROUPED | {"num_local_experts": 3, "num_experts_per_tok": 2},
}
LENGTHS = [2, 16, 3, 7, 1, 5, 9, 4]


def build(name: str, attention: str = "sdpa") -> nn.Module:
    model = causal_lm(name, **MODELS[name])
    model.set_attn_implementation(attention)
    return model


def sequences(lengths: list[int] = LENGTHS, seed: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in lengths]


def padded(rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, attention mask, and a selection of all tokens but every fifth."""
    ids = pad_rows(rows)
    attention = lengths_mask([len(row) for row in rows], ids.shape[1])
    return ids, attention, attention & (torch.arange(ids.shape[1]) % 5 != 3)


def shapes_seen(model: nn.Module) -> list[tuple[int, ...]]:
    """The shape of the ids of each call of the model's body from now on, but those that test what it can."""
    can_share_prefixes(model, "auto")
    seen: list[tuple[int, ...]] = []
    find_head_path(model).body.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(tuple((*args, kwargs.get("input_ids"))[0].shape)), with_kwargs=True
    )
    return seen


# ------------------------------------------------------------------------------------------------------------- layout


@given(st.lists(st.integers(0, 20), min_size=1, max_size=12), st.integers(0, 30))
@settings(max_examples=60, deadline=None)
def test_every_token_is_packed_once_and_comes_back(lengths: list[int], spare: int):
    rows = sequences(lengths)
    budget = max(lengths) + spare
    packed = pack(rows, budget)
    assert packed.input_ids.shape == packed.position_ids.shape == packed.segment_ids.shape
    assert packed.input_ids.shape[1] <= max(budget, 1)
    assert packed.index.unique().numel() == sum(lengths)
    unpacked = [packed.unpack(column) for column in (packed.input_ids, packed.position_ids, packed.segment_ids)]
    for number, (row, ids, positions, segments) in enumerate(zip(rows, *unpacked, strict=True)):
        assert ids.tolist() == row.tolist()
        assert positions.tolist() == list(range(len(row)))
        assert set(segments.tolist()) <= {number}
    for places in packed.index.split(lengths):  # a sequence is in one piece, in one pack
        assert (places.diff() == 1).all()
        assert (places // packed.input_ids.shape[1]).unique().numel() <= 1
    filling = packed.segment_ids == -1
    assert int(filling.sum()) == packed.input_ids.numel() - sum(lengths)
    assert not packed.position_ids[filling].any()


def test_packs_are_well_filled():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.empty(200).log_normal_(5.5, 0.7, generator=generator).clamp(64, 1024).int().tolist()
    layout = lay_out(lengths)
    assert layout.width == max(lengths)
    assert layout.num_tokens < 1.05 * sum(lengths)


def test_a_sequence_longer_than_the_budget_and_no_sequence_are_refused():
    with pytest.raises(ConfigError, match="budget of 8 tokens and a sequence of 16"):
        pack(sequences(), 8)
    with pytest.raises(ShapeError, match="at least one sequence"):
        pack([])


# ------------------------------------------------------------------------------------------------------ same as padded


# Gemma 2 caps its attention scores, which SDPA cannot: newer versions of Transformers refuse the combination.
KERNELS = [(name, attention) for name in MODELS for attention in ("sdpa", "eager")[name == "gemma2" :]]


@pytest.mark.parametrize(("name", "attention"), KERNELS)
def test_packed_equals_one_by_one_in_log_probs_entropy_and_gradients(name: str, attention: str):
    model = build(name, attention)
    assert why_not_packed(model) is None
    rows = sequences()
    ids, mask, select = padded(rows)
    for _ in range(3):
        expected = naive_scores(model, ids, mask, select)
        seen = shapes_seen(model)
        scores = token_logprobs(model, ids, mask, select, entropy=True, packing="on")
        assert seen == [(3, 16)], "the body must see three packs, not eight padded rows"
        torch.testing.assert_close(scores.log_probs, expected[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(scores.entropy, expected[1], atol=1e-5, rtol=1e-5)
        unpacked = token_logprobs(model, ids, mask, select, packing="off")
        assert scores.top1.tolist() == unpacked.top1.tolist()
        got = weighted_gradients(model, scores)
        assert_same_gradients(got, weighted_gradients(model, expected))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 1e-2 * parameter.grad.sign()


def test_padding_on_the_left_and_in_the_middle_is_packed_away():
    model = TokenScorer(build("qwen2")).model
    rows = sequences([6, 3, 9])
    ids, mask = torch.zeros(3, 12, dtype=torch.int64), torch.zeros(3, 12, dtype=torch.bool)
    for i, places in enumerate(([6, 7, 8, 9, 10, 11], [2, 3, 4], [0, 1, 2, 5, 6, 7, 8, 9, 11])):  # the last has holes
        ids[i, places], mask[i, places] = rows[i], True
    seen = shapes_seen(model)
    on = token_logprobs(model, ids, mask, mask, entropy=True, packing="on")
    off = token_logprobs(model, ids, mask, mask, entropy=True, packing="off")
    assert seen == [(2, 9), (3, 12)]
    torch.testing.assert_close(on[:2], off[:2], atol=1e-5, rtol=1e-5)


@given(st.lists(st.integers(2, 9), min_size=2, max_size=5), st.data())
@settings(max_examples=25, deadline=None)
@pytest.mark.parametrize("name", DENSE)
def test_perturbing_one_packed_row_leaves_the_others_bit_for_bit(name: str, lengths: list[int], data: st.DataObject):
    model = build(name)
    rows = sequences(lengths)
    ids, mask, _ = padded(rows)
    changed = data.draw(st.integers(0, len(rows) - 1))
    before = token_logprobs(model, ids, mask, mask, packing="on").log_probs
    ids[changed, : lengths[changed]] = (rows[changed] - 3 + 11) % (VOCABULARY - 3) + 3
    after = token_logprobs(model, ids, mask, mask, packing="on").log_probs
    others = torch.arange(len(rows)) != changed
    assert torch.equal(before[others], after[others])
    assert (before[changed, 1:] - after[changed, 1:]).abs().sum() > 1e-3


def conversations() -> TensorDictBase:
    lengths = [(2, 3), (1, 14), (3, 1), (4, 0), (2, 6)]
    return lazy_stack([conversation(i, *pair, group=i // 2, dtype=torch.float32) for i, pair in enumerate(lengths)])


# ------------------------------------------------------------------------------------------------------ when it is done


def test_auto_packs_where_a_fifth_of_the_tokens_is_saved():
    scorer = TokenScorer(build("qwen2"))
    seen = shapes_seen(scorer.model)
    for lengths in ([10, 10, 10, 9], [10, 8, 2, 3], [10, 6, 6, 6], [1], []):
        ids, mask, _ = padded(sequences(lengths or [4]))
        mask &= bool(lengths)
        scorer(ids, mask, mask)
    # nothing to save; saves a half; saves tokens but no pack takes two of the rows; a row alone; nothing but padding
    assert seen == [(4, 10), (3, 10), (4, 10), (1, 1), (1, 4)]


def test_on_off_and_a_call_of_its_own():
    model = build("qwen2")
    scorer = TokenScorer(model, packing="off")
    seen = shapes_seen(model)
    ids, mask, _ = padded(sequences([8, 2, 2]))
    scorer(ids, mask, mask)
    assert seen == [(3, 8)], "nothing is tried where nothing will be packed"
    scorer.use_packing("on")
    seen.clear()
    scorer(ids, mask, mask)
    scorer(ids, mask, mask, packing="off")
    scorer(ids, mask, mask, packing="auto")
    positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
    scorer(ids, mask, mask, position_ids=positions, packing=None)
    assert seen == [(2, 8), (3, 8), (2, 8), (3, 8)]
    with pytest.raises(ConfigError, match="must not get position_ids"):
        token_logprobs(scorer.model, ids, mask, mask, position_ids=positions, packing="on")
    with pytest.raises(ConfigError, match="one of auto, on, off"):
        scorer.use_packing("yes")


def test_flash_attention_gets_one_row_without_filling(monkeypatch: pytest.MonkeyPatch):
    model = build("qwen2")
    ids, mask, select = padded(sequences())
    expected = token_logprobs(model, ids, mask, select).log_probs
    monkeypatch.setattr(module, "has_varlen_attention", lambda model: True)
    seen = shapes_seen(model)
    found = token_logprobs(model, ids, mask, select, packing="auto").log_probs
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert seen[-1] == (1, sum(LENGTHS))


@pytest.mark.parametrize("in_autocast", [False, True])
@pytest.mark.parametrize("name", DENSE)
def test_bfloat16_is_packed_too(name: str, in_autocast: bool):
    model = build(name)
    ids, mask, select = padded(sequences())
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=in_autocast):
        model = model if in_autocast else model.bfloat16()
        on, off = (token_logprobs(model, ids, mask, select, packing=packing).log_probs for packing in ("on", "off"))
    assert on.dtype == torch.float32
    assert (on - off).abs().mean() < 0.02 * off[select].abs().mean()


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_steps_of_the_recipes_have_one_switch_and_one_result(tmp_path, tied):
    optim = {"lr": 5e-3, "schedule": "constant"}
    config = SFTConfig(model={}, data={"path": "sums"}, optim=optim, tokens_per_microbatch=64)
    causal_lm("qwen2", **GROUPED, tie_word_embeddings=tied).save_pretrained(tmp_path)
    results = []
    with Session(config) as session:
        for packing in ("off", "on", "auto"):
            model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
            settings = config.model_copy(update={"packing": packing})
            updater = Updater(session, TokenScorer(model), settings, steps=4)
            seen = shapes_seen(model)
            metrics = [updater.step(SFTLoss(updater.scorer), conversations(), step) for step in (1, 2, 3, 4)]
            results.append((seen, [row[name] for row in metrics for name in ("loss", "grad_norm")]))
    assert [seen for seen, _ in results] == [4 * [(4, 8), (1, 15)], 4 * [(3, 8), (1, 15)], 4 * [(3, 8), (1, 15)]]
    for _, found in results[1:]:
        assert found == pytest.approx(results[0][1], abs=1e-5, rel=1e-5)
    assert found[6] < found[0] - 0.1, "the weights have moved"


# ---------------------------------------------------------------------------------------------- models that do not pack


def assert_stays_padded(model: nn.Module, reason: str) -> None:
    ids, mask, select = padded(sequences())
    assert reason in why_not_packed(model)
    seen = shapes_seen(model)
    scores = TokenScorer(model).token_scores(ids, mask, select)
    assert seen == [tuple(ids.shape)]
    torch.testing.assert_close(scores.log_probs, token_logprobs(model, ids, mask, select).log_probs)
    with pytest.raises(ConfigError, match=f"'on' needs a model that keeps packed rows apart: .*{reason}"):
        TokenScorer(model, packing="on")


def test_a_model_that_counts_positions_itself_is_padded():
    sizes = {"ffn_dim": 24, "max_position_embeddings": 64, "word_embed_proj_dim": 16}
    assert_stays_padded(causal_lm("opt", **SMALL, **sizes), "a packed row")


def test_a_transformers_that_does_not_see_packs_in_position_ids_is_noticed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda position_ids: None)
    assert_stays_padded(build("qwen2"), "attends to its neighbour")


def test_a_mask_without_its_causal_part_is_noticed(monkeypatch: pytest.MonkeyPatch):
    model = build("qwen2")
    body = find_head_path(model).body
    forward = body.forward

    def within_rows_only(input_ids, attention_mask=None, position_ids=None, use_cache=False):
        if attention_mask is None:
            segment = (position_ids[0].diff(prepend=position_ids[0, :1]) != 1).cumsum(0)
            attention_mask = (segment[:, None] == segment)[None, None]
        return forward(input_ids, attention_mask, position_ids, use_cache=use_cache)

    monkeypatch.setattr(body, "forward", within_rows_only)
    assert_stays_padded(model, "other hidden states than a padded one")


def test_attention_in_fixed_chunks_is_not_tried():
    model = build("qwen2")
    assert find_head_path(model) is not None
    model.config.layer_types = ["chunked_attention", "full_attention"]
    assert "fixed positions" in why_not_packed(model)


def test_a_model_that_fails_without_a_mask_is_padded(monkeypatch: pytest.MonkeyPatch):
    model = build("qwen2")
    body = find_head_path(model).body
    forward = body.forward

    def needs_a_mask(input_ids, attention_mask=None, position_ids=None, use_cache=False):
        return forward(input_ids, attention_mask.long(), position_ids, use_cache=use_cache)

    monkeypatch.setattr(body, "forward", needs_a_mask)
    assert_stays_padded(model, "it fails on packed rows: AttributeError")


def test_trying_a_model_leaves_its_mode_and_the_random_state_alone():
    model = build("gpt2").train()
    model.transformer.h[0].eval()
    modes, state = [m.training for m in model.modules()], torch.get_rng_state()
    assert why_not_packed(model) is None
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)


def test_a_model_is_tried_again_under_another_attention():
    model = build("qwen2")
    seen = shapes_seen(model)
    assert why_not_packed(model) is None
    assert not seen, "known"
    model.set_attn_implementation("eager")
    assert why_not_packed(model) is why_not_packed(model) is None
    assert len(seen) == 3, "packed, with another row between, padded"


# ---------------------------------------------------------------------------------------------- beginnings in common


@pytest.fixture
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models share beginnings too."""
    monkeypatch.setattr(shared_prefixes, "LEAST_HIDDEN_SIZE", 0)


def with_common_beginnings() -> list[torch.Tensor]:
    """Answers to two prompts with one system prompt, in any order, of which two are equal and one is empty."""
    system, first, second, *answers = sequences([3, 6, 4, 5, 1, 7, 3, 2], seed=5)
    prompts = [torch.cat([system, first]), torch.cat([system, second])]
    rows = [torch.cat([prompts[number % 2], answer]) for number, answer in enumerate(answers)]
    return [*rows, rows[0].clone(), prompts[1]]


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("name", "attention"), [(n, a) for n in DENSE for a in ("sdpa", "eager")])
def test_rows_with_common_beginnings_equal_separate_ones(tmp_path, name: str, attention: str, tied: bool):
    causal_lm(name, **MODELS[name], tie_word_embeddings=tied).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=attention).eval()
    ids, mask, select = padded(with_common_beginnings())
    for _ in range(3):
        expected = naive_scores(model, ids, mask, select)
        seen = shapes_seen(model)
        scores = token_logprobs(model, ids, mask, select, entropy=True, packing="auto")
        assert [shape[0] * shape[1] for shape in seen] == [2 * (9 + 5 + 7 + 2 + 5)], (
            "two packs, as wide as the group that has more tokens"
        )
        torch.testing.assert_close(scores.log_probs, expected[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(scores.entropy, expected[1], atol=1e-5, rtol=1e-5)
        assert_same_gradients(weighted_gradients(model, scores), weighted_gradients(model, expected))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 1e-2 * parameter.grad.sign()


@given(st.lists(st.lists(st.integers(0, 2), max_size=7), min_size=2, max_size=9), st.integers(1, 20))
@settings(max_examples=200, deadline=None)
def test_groups_of_rows_begin_alike_and_save_tokens(rows: list[list[int]], width: int):
    groups = group_rows(rows, width)
    assert sorted(row for group in groups for row in group.rows) == list(range(len(rows)))
    for group in groups:
        members = [rows[row] for row in group.rows]
        assert all(row[: group.common] == members[0][: group.common] for row in members)
        assert group.num_tokens == sum(map(len, members)) - (len(members) - 1) * group.common
        assert len(members) == 1 or group.num_tokens <= width
    assert sum(group.num_tokens for group in groups) <= sum(map(len, rows))


@pytest.mark.usefixtures("any_size")
def test_beginnings_are_shared_only_where_the_model_reads_such_a_mask_and_a_fifth_is_saved(monkeypatch):
    rows = with_common_beginnings()
    ids, mask, _ = padded(rows)
    assert share_prefixes(build("qwen2"), ids, mask, "auto") is not None
    assert share_prefixes(build("qwen2"), ids, mask, "off") is None
    assert share_prefixes(build("qwen2"), *padded(sequences())[:2], "auto") is None
    assert share_prefixes(build("gemma2", "eager"), ids, mask, "auto") is None, "it has a window"
    model = build("qwen2")
    forward = find_head_path(model).body.forward
    monkeypatch.setattr(
        find_head_path(model).body,
        "forward",
        lambda attention_mask=None, **inputs: forward(**inputs, attention_mask=None),
    )
    assert not can_share_prefixes(model, "auto"), "its body takes a mask and ignores it"
    monkeypatch.setattr(shared_prefixes, "LEAST_HIDDEN_SIZE", 32)
    assert not can_share_prefixes(build("qwen2"), "auto"), "it is too small to gain from it"


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_steps_with_groups_of_answers_have_one_result(tmp_path, tied):
    """Micro-batches of one or two prompts: rows stay together, and metrics are those of padded rows."""
    optim = {"lr": 5e-3, "schedule": "constant"}
    config = SFTConfig(model={}, data={"path": "sums"}, optim=optim, tokens_per_microbatch=40)
    causal_lm("qwen2", **GROUPED, tie_word_embeddings=tied).save_pretrained(tmp_path)
    parts = [(8, 3), (8, 1), (8, 2), (9, 6), (9, 1), (9, 2)]
    rows = [conversation(i, *pair, group=i // 3, dtype=torch.float32) for i, pair in enumerate(parts)]
    for i, row in enumerate(rows):
        row["tokens", "full"][: parts[i][0]] = rows[i // 3 * 3]["tokens", "prompt"]
    batch = lazy_stack(rows)
    results = []
    with Session(config) as session:
        for packing in ("off", "auto"):
            model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
            updater = Updater(session, TokenScorer(model), config.model_copy(update={"packing": packing}), steps=4)
            seen = shapes_seen(model)
            metrics = [updater.step(SFTLoss(updater.scorer), batch, step) for step in (1, 2, 3, 4)]
            results.append((seen, [row[name] for row in metrics for name in ("loss", "grad_norm")]))
    assert sum(a * b for a, b in results[1][0]) < 0.7 * sum(a * b for a, b in results[0][0])
    assert results[1][1] == pytest.approx(results[0][1], abs=1e-5, rel=1e-5)
    assert results[1][1][6] < results[1][1][0] - 0.1, "the weights have moved"


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize(("prompt", "answer"), [(8, 3), (400, 300), (8, 60)], ids=["all", "by twos", "none"])
def test_the_memory_plan_counts_the_positions_that_a_model_computes(prompt: int, answer: int):
    model = build("llama")
    prompts, answers = sequences([prompt] * 3), sequences([answer] * 12, seed=2)
    rows = [torch.cat([prompts[number // 4], own]) for number, own in enumerate(answers)]
    seen = shapes_seen(model)
    token_logprobs(model, *padded(rows), packing="auto")
    lengths = RowLengths((prompt + answer,), alike=4, prompts=(prompt,))
    packs, width = seen[0]
    assert lengths.most_at_once(12, 100_000, "auto", shares=True) == (packs * width, width)
