"""One optimizer step: its learning rate, its micro-batches, and that the way it is cut never changes the result."""

import copy
import math
from contextlib import closing
from functools import cache
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from llmrl.errors import ConfigError, RolloutError, TrainingError
from llmrl.modules.llm.engines import TransformersEngine
from llmrl.modules.llm.log_probs import TokenScorer
from llmrl.modules.llm.policies.containers import LogProbs, Masks
from llmrl.objectives.llm import GRPOLoss, SFTLoss
from llmrl.testing import tiny_model, tiny_tokenizer
from llmrl.train.data.lengths import microbatches
from llmrl.train.distributed import Session
from llmrl.train.rollouts.engine import RolloutEngine
from llmrl.train.settings import OptimSettings, SFTConfig
from llmrl.train.updater import Updater, learning_rate
from tests.support.saved_models import save_tiny
from tests.support.training_rows import config, random_rows

CONFIG = SFTConfig(model={}, data={"path": "sums"})
OWN = {"eos_token_ids": [], "pad_token_id": 0}


def updater(session, model, *, tokens=16384, steps=10, **optim):
    changes = {"optim": OptimSettings(**{"lr": 1e-2, **optim}), "tokens_per_microbatch": tokens}
    return Updater(session, TokenScorer(model), CONFIG.model_copy(update=changes), steps=steps)


def tiny():
    return tiny_model(hidden_size=32, layers=1, heads=2)


@cache
def saved_folder(tied):
    folder = TemporaryDirectory()
    save_tiny(folder.name, tied=tied)
    return folder


def saved(tied):
    return AutoModelForCausalLM.from_pretrained(saved_folder(tied).name).eval()


def batch(lengths, seed=0, ratio=0.0):
    """Rows of random ids; the second half of each is trained, but the last row has nothing to train."""
    rows, draw = random_rows(lengths, seed), torch.Generator().manual_seed(seed)
    masks = [torch.arange(n) >= max(1, n // 2) for n in lengths]
    masks[-1][:] = False
    log_probs = [(-6.0 + ratio * torch.randn(n, generator=draw)) * mask for n, mask in zip(lengths, masks, strict=True)]
    rows["masks"] = Masks.from_rows({"all_assistant_mask": masks})
    rows["log_probs"] = LogProbs.from_rows({"full": log_probs})
    return rows.set("group_id", torch.arange(len(lengths)) // 2)


# --- learning rate


def test_the_learning_rate_rises_to_its_peak_and_ends_at_a_twentieth():
    for schedule in ("linear", "cosine"):
        optim = OptimSettings(lr=2.0, warmup=4, schedule=schedule)
        rates = [learning_rate(optim, step, 12) for step in range(1, 13)]
        assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
        assert rates[4:] == sorted(rates[4:], reverse=True)
        assert rates[-1] == pytest.approx(0.1)
        assert rates[7] == pytest.approx(2.0 * (0.05 + 0.95 * 0.5)), "half way down"


@pytest.mark.parametrize(
    ("optim", "rates"),
    [({"lr": 3.0}, [3, 3, 3]), ({"lr": 3.0, "warmup": 3, "schedule": "cosine"}, [1, 2, 3])],  # warm-up is all there is
)
def test_a_constant_learning_rate_stays_and_a_warm_up_may_last_to_the_end(optim, rates):
    assert [learning_rate(OptimSettings(**optim), step, 3) for step in (1, 2, 3)] == pytest.approx(rates)


# --- micro-batches


@given(lengths=st.lists(st.integers(1, 60), max_size=30), budget=st.integers(1, 200))
def test_micro_batches_hold_every_row_once_within_the_budget(lengths, budget):
    parts = microbatches(lengths, budget)
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    for part in parts:
        padded = len(part) * max(lengths[row] for row in part)
        assert padded <= budget or len(part) == 1, "only a row that is longer by itself may exceed it"


# --- the step


@pytest.mark.slow
@settings(max_examples=6)
@given(
    lengths=st.lists(st.integers(4, 24), min_size=2, max_size=8),
    budget=st.integers(1, 120),
    loss=st.sampled_from(["sft", "grpo", "dr_grpo", "prompt-mean"]),
)
def test_the_budget_of_a_micro_batch_never_changes_the_result(lengths, budget, loss):
    losses = {
        "sft": lambda actor: SFTLoss(actor),
        "grpo": lambda actor: GRPOLoss(actor, entropy_coeff=0.01),
        "dr_grpo": lambda actor: GRPOLoss(actor, aggregation="dr_grpo", max_length=32),
        "prompt-mean": lambda actor: GRPOLoss(actor, aggregation="prompt-mean"),
    }
    # Adam's first step is lr * sign(gradient), which noise decides where the gradient is tiny; a larger eps is smooth.
    for tied in (False, True):
        results = []
        with Session(CONFIG) as session:
            for tokens in (10**6, budget):
                model = saved(tied)
                one = updater(session, model, tokens=tokens)
                one.optimizer.param_groups[0]["eps"] = 1e-2
                loss_of = losses[loss](one.scorer)
                metrics = [one.step(loss_of, batch(lengths, ratio=0.1), step) for step in (1, 2, 3)]
                results.append((metrics, model.state_dict()))
        (whole, whole_weights), (cut, cut_weights) = results
        for row, other in zip(whole, cut, strict=True):
            assert other == pytest.approx(row, rel=1e-4, abs=1e-5)
        for name, value in whole_weights.items():
            assert (cut_weights[name] - value).abs().max() < 1e-5, name


@pytest.mark.parametrize("aggregation", ["token", "seq-mean", "seq-sum", "prompt-mean", "sum"])
def test_a_part_without_rows_changes_nothing_in_any_aggregation(session, aggregation, monkeypatch):
    results = []
    for parts in ([[0, 1, 2]], [[0, 1, 2], []]):  # as where other ranks have more of them
        model = tiny()
        one = updater(session, model)
        monkeypatch.setattr(one, "_parts", lambda rows, parts=parts: parts)
        metrics = one.step(GRPOLoss(one.scorer, aggregation=aggregation), batch([8, 12, 10], ratio=0.1), 1)
        results.append((metrics, model.state_dict()))
    (whole, weights), (padded, padded_weights) = results
    assert padded == pytest.approx(whole)
    assert all(torch.equal(value, padded_weights[name]) for name, value in weights.items())


def test_a_step_is_divided_by_what_its_loss_trains(session):
    rows = batch([8, 12, 10])
    rows["log_probs"] = LogProbs.from_rows({"full": [torch.full((n,), -6.0) for n in (8, 12, 10)]})
    one = updater(session, tiny())
    metrics = one.step(GRPOLoss(one.scorer, masking_strategy="generic"), rows, 1)
    assert metrics["tokens"] == 30 - 3  # nothing comes before the first token of a row
    assert metrics["correction_mean"] == pytest.approx(1), "a mean over the tokens that were trained"


def test_the_gradient_of_a_step_is_that_of_the_mean_over_its_tokens(session):
    rows = batch([8, 12, 10])
    model, reference = tiny(), tiny()
    one = updater(session, model, tokens=12, clip_norm=1e9)
    metrics = one.step(SFTLoss(one.scorer), rows, 1)
    total, count = 0.0, 0
    columns = (rows.get(key, as_list=True) for key in (("tokens", "full"), ("masks", "all_assistant_mask")))
    for ids, mask in zip(*columns, strict=True):
        scores = reference(ids[None]).logits[0, :-1].log_softmax(-1)
        total = total - scores.gather(1, ids[1:, None])[:, 0][mask[1:]].sum()
        count += int(mask[1:].sum())
    mean = total / count
    mean.backward()
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in reference.parameters() if p.grad is not None))
    assert metrics["tokens"] == count
    assert metrics["loss"] == pytest.approx(mean.item(), rel=1e-5)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_a_step_is_taken_at_the_learning_rate_of_its_number(session):
    moved = []
    for number, rate in ((1, 0.25e-2), (4, 1e-2), (10, 0.05e-2)):
        model, before = tiny(), tiny()
        one = updater(session, model, warmup=4, schedule="cosine")
        assert one.step(SFTLoss(one.scorer), batch([6, 7, 8]), number)["lr"] == pytest.approx(rate)
        moved.append((model.lm_head.weight - before.lm_head.weight).abs().max().item() / rate)
    assert moved == pytest.approx([1, 1, 1], rel=0.01), "Adam's first step is the rate times the sign of the gradient"


def test_a_step_without_a_token_to_train_changes_nothing(session):
    model = tiny()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    one = updater(session, model)
    rows = batch([6, 7])
    rows = rows[torch.tensor([1])]
    assert one.step(SFTLoss(one.scorer), rows, 1) == {}
    assert one.step(SFTLoss(one.scorer), None, 1) == {}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_gradient_that_is_not_finite_ends_the_run_and_is_not_applied(session):
    model = tiny()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    one = updater(session, model)
    model.lm_head.weight.register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(TrainingError, match="optimizer step 3: the gradient must be finite"):
        one.step(SFTLoss(one.scorer), batch([6, 7, 8]), 3)
    assert all(parameter.grad is None for parameter in one.scorer.parameters()), "a later step must not add to it"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_gradients_are_scaled_down_to_the_norm_that_is_allowed(session):
    for clip_norm in (1e-3, 1e9):
        model = tiny()
        one = updater(session, model, clip_norm=clip_norm)
        metrics = one.step(SFTLoss(one.scorer), batch([6, 7, 8]), 1)
        assert metrics["grad_norm"] > 0.1, "the norm before clipping is what is reported"
        moment = one.optimizer.state[model.lm_head.weight]["exp_avg"].norm()
        assert (moment < 1e-3) == (clip_norm < 1)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_an_optimizer_goes_on_from_its_state_in_another_updater(session, tied):
    first, second = saved(tied), saved(tied)
    one = updater(session, first, weight_decay=0.1)
    for step in (1, 2):
        one.step(SFTLoss(one.scorer), batch([6, 7, 8], seed=step), step)
    other = updater(session, second, weight_decay=0.1)
    second.load_state_dict(first.state_dict())
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    assert len(one.state_dict()["state"]) == len(list(first.parameters())), "a tied weight has one state"
    for step in (3, 4, 5):
        rows = batch([6, 7, 8], seed=step)
        assert one.step(SFTLoss(one.scorer), rows, step) == other.step(SFTLoss(other.scorer), rows, step)
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name]), name


def test_one_process_may_hold_one_session_after_another_of_another_precision():
    for dtype in ("float32", "bfloat16", "float32"):
        with Session(CONFIG.model_copy(update={"dtype": dtype})) as session:
            one = updater(session, tiny())
            assert math.isfinite(one.step(SFTLoss(one.scorer), batch([6, 7, 8]), 1)["loss"])
            assert ("bfloat16" in session.describe()) == (dtype == "bfloat16")


@pytest.mark.parametrize(("sharded", "budget", "passes"), [(True, 16384, 1), (True, 60, 2), (False, 16384, 3)])
def test_the_probe_of_a_sharded_model_scores_rows_together_as_the_engine_scores_each_alone(sharded, budget, passes):
    """Three rows, of 30, 26 and 5 tokens or fewer; a sharded model is gathered for every pass."""
    engine = {"llmrl.modules.llm.engines:TransformersEngine": OWN}
    settings = config(rollout={"engine": engine}, tokens_per_microbatch=budget)
    model, calls = tiny_model(heads=2), []
    with Session(settings) as session, closing(RolloutEngine(settings, session, model, tiny_tokenizer())) as engine:
        session.sharded, scorer = sharded, TokenScorer(model)
        scorer.register_forward_hook(lambda *_: calls.append(1))
        engine.set_probe_rows(random_rows(), scorer)
        assert len(calls) == passes
        assert engine.push(scorer)["mismatch/probe"] < 1e-6
        assert len(calls) == 2 * passes
        assert not engine.warning


@pytest.mark.parametrize(
    ("sharded", "answer", "expected"),
    [
        (True, (torch.bfloat16, ("norm",)), torch.bfloat16),
        (True, RolloutError("lost"), torch.float32),  # the push will say so
        (False, (torch.bfloat16, ()), torch.float32),  # cast one by one, as they are sent
    ],
)
def test_the_ranks_of_a_sharded_model_cast_weights_as_the_engine_takes_them(monkeypatch, sharded, answer, expected):
    settings = config(rollout={"engine": {"llmrl.modules.llm.engines:TransformersEngine": OWN}})
    sent = []

    def precision(self):
        if isinstance(answer, Exception):
            raise answer
        return answer

    def take(self, weights, *, version):
        sent.append(weights["lm_head.weight"].dtype)
        self.version = version

    monkeypatch.setattr(TransformersEngine, "weight_precision", precision)
    monkeypatch.setattr(TransformersEngine, "update_weights", take)
    with Session(settings) as session:
        session.sharded = sharded
        with closing(RolloutEngine(settings, session, tiny_model(heads=2), tiny_tokenizer())) as engine:
            engine.push(None)
    assert sent == [expected] * 2, "at the start and by the push"


def test_memory_that_loading_left_unused_is_free_before_an_engine_asks_for_its_share(monkeypatch):
    calls = []

    def build(*arguments, **options):
        calls.append("built")
        raise ConfigError("enough is known")

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("emptied"))
    monkeypatch.setattr("llmrl.train.rollouts.engine.VLLMEngine", build)
    settings = config(rollout={"engine": "vllm"})
    with Session(settings) as session, pytest.raises(ConfigError, match="enough"):
        RolloutEngine(settings, session, tiny_model(), tiny_tokenizer())
    assert calls == ["emptied", "built"]
