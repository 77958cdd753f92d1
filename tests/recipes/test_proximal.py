"""What the ratio compares with: in low precision, the trainer's own log-probs from before its first update."""

from contextlib import ExitStack

import pytest
import torch
from tensordict import TensorDict

from llmrl.data.llm.chat import History
from llmrl.modules.llm import ChatHistory, TransformersWrapper
from llmrl.objectives.llm import GRPOLoss
from llmrl.testing import tiny_model, tiny_tokenizer
from llmrl.train.distributed import Session
from llmrl.train.settings import GRPOConfig
from llmrl.train.updater import make_updater

PROMPTS = ["2 + 2?", "Say something long and then something longer, please.", "Hi", "17 * 3 is what?", "a", "b c d"]
LOSS = {"clip_epsilon": 0.2, "proximal": "recomputed"}


def config(dtype="bfloat16", **options):
    return GRPOConfig(model={}, env={"name": "sums"}, dtype=dtype, **options)


def sampled(session, actor, policy):
    """What the engine sampled in this session's precision, with advantages of both signs."""
    prompts = History.from_chats([[{"role": "user", "content": text}] for text in PROMPTS])
    with session.autocast():
        td = policy(TensorDict(history=ChatHistory.from_rows({"prompt": prompts}), batch_size=[len(PROMPTS)]))
    td["advantage"] = torch.tensor([1.0, -1.0, 0.5, -0.5, 2.0, -2.0]).view(-1, 1, 1)
    return td.select("tokens", "masks", "log_probs", "advantage")


@pytest.fixture
def begin():
    """Sessions of any precision, ended with the test whatever becomes of it."""
    with ExitStack() as stack:
        yield lambda dtype: stack.enter_context(Session(config(dtype)))


def parts_of_a_step(session, temperature, budget, packing):
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer, layers=3)
    options = {"max_new_tokens": 24, "temperature": temperature, "seed": 3}
    policy = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs=options)
    actor = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs=options, generate=False)
    settings = config(optim={"lr": 1e-2}, tokens_per_microbatch=budget, packing=packing)
    updater = make_updater(settings, session, actor, steps=4)
    return updater, GRPOLoss(actor, **LOSS), sampled(session, actor, policy)


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["off", "on"])
@pytest.mark.parametrize("budget", [96, 16384])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.3])
def test_in_bfloat16_the_first_ratios_are_one_against_the_same_weights(begin, temperature, budget, packing):
    updater, loss, batch = parts_of_a_step(begin("bfloat16"), temperature, budget, packing)
    updater.add_proximal(loss, batch)
    first = updater.step(loss, batch, 1)
    again = updater.step(loss, batch, 2)
    assert first["ratio_max"] == pytest.approx(1, abs=1e-5)
    assert first["ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert first["clip_fraction"] == 0
    assert first["mismatch_max"] > 0, "decoding with a cache rounds differently, and that is measured"
    assert abs(again["ratio_max"] - 1) > 1e-3, "after an update the ratio is what the update changed"


def test_the_tokens_of_the_highest_entropy_are_those_of_the_batches_of_all_ranks(begin, monkeypatch):
    updater, _, batch = parts_of_a_step(begin("float32"), 1.0, 96, "off")
    loss = GRPOLoss(updater.scorer, top_entropy_quantile=0.2)
    own = torch.cat([row[~row.isnan()] for row in updater.score(loss, batch, loss.entropies)])
    other = own.max() + torch.arange(float(len(own)))  # another rank's tokens, of which all but one are higher
    monkeypatch.setattr(type(updater.session), "gather", lambda self, items: [*items, other])
    updater.add_top_entropy(loss, batch, 0.5)
    assert sum(int(row.sum()) for row in batch.get(("top_entropy", "full"), as_list=True)) == 1
    monkeypatch.undo()
    updater.add_top_entropy(loss, batch, 0.2)
    chosen = torch.cat(list(batch.get(("top_entropy", "full"), as_list=True))).bool()
    assert int(chosen.sum()) == pytest.approx(0.2 * len(own), abs=1)
    assert updater.step(loss, batch, 1)["tokens"] == len(own)


def test_an_empty_part_of_a_sharded_step_has_the_column_too(begin):
    updater, loss, _ = parts_of_a_step(begin("float32"), 1.0, 96, "off")
    updater.add_proximal(loss, None)
    assert updater.step(loss, None, 1) == {}


def test_several_updates_compare_with_what_costs_no_accuracy():
    one, several = config(), config(updates_per_step=2)
    assert one.grpo_settings()[1].proximal == "detach"
    assert several.grpo_settings(exact=True)[1].proximal == "behaviour"
    assert several.grpo_settings(exact=True)[1].engine_correction["kind"] == "none"
    recomputed = several.grpo_settings(exact=False)[1]
    assert (recomputed.proximal, recomputed.engine_correction["kind"]) == ("recomputed", "tis")
    chosen = config(updates_per_step=2, grpo={"proximal": "recomputed"})
    assert chosen.grpo_settings(exact=True)[1].proximal == "recomputed"


@pytest.mark.parametrize("algo", ["rloo", "reinforce"])
def test_several_updates_without_a_ratio_keep_the_weight_that_corrects_them(algo):
    settings = config(algo=algo, updates_per_step=2).grpo_settings(exact=True)[1]
    assert (settings.surrogate, settings.proximal) == ("reinforce", "detach")
    assert settings.engine_correction["kind"] == "tis"
