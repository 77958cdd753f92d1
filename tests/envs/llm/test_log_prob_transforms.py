"""The KL from a reference: on the tokens that were sampled and on no other, against numbers worked out by hand."""

import pytest
import torch
from tensordict import TensorDict

from llmrl.data.llm import AdaptiveKLController, ConstantKLController
from llmrl.data.llm.chat import History
from llmrl.envs import StepCounter, Transform, check_env_specs
from llmrl.envs.llm import ChatEnv
from llmrl.envs.llm.transforms import (
    KLComputation,
    KLRewardTransform,
    RetrieveKL,
    RetrieveLogProb,
    RewardFunction,
)
from llmrl.envs.llm.transforms.log_probs import adapter_off
from llmrl.errors import ConfigError, MissingKeyError, ShapeError
from llmrl.modules.llm import ChatHistory, LogProbs, Masks, Tokens, TransformersWrapper
from llmrl.objectives.llm import GRPOLoss, SFTLoss
from llmrl.testing import FakeEngine, tiny_model, tiny_tokenizer
from tests.support.conversations import AskAgain, fake_policy, rows

TOKENIZER = tiny_tokenizer()
QUERIES = ["Hi", "What is two and two, and why?", "2+2"]
CHAT = [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}]
BY_HAND = ([2, 1], [[-1.0, -2.0], [-0.5]], [[-1.5, -3.0], [-0.25]])  # prompts, log-probs, those of the reference


@pytest.fixture(scope="module")
def models():
    return tiny_model(TOKENIZER, seed=0), tiny_model(TOKENIZER, seed=1)


class One(Transform):
    """A reward of 1 for every turn."""

    def _step(self, td, next_td):
        return next_td.set("reward", torch.ones(*next_td.batch_size, 1, 1))


def wrapper(model, **options):
    return TransformersWrapper(model, **{"tokenizer": TOKENIZER, "generate": False, **options})


def policy_of(model, mode="history", temperature=1.0, **options):
    sampling = {"max_new_tokens": 5, "temperature": temperature, "seed": 0}
    return wrapper(model, generate=True, input_mode=mode, generate_kwargs=sampling, **options)


def chat_env(mode="history", *transforms):
    env = ChatEnv(batch_size=[3], input_mode=mode, tokenizer=TOKENIZER)
    for transform in transforms:
        env = env.append_transform(transform)
    return env


def one_turn(env, policy):
    return env.step(policy(env.reset(TensorDict(query=QUERIES, batch_size=[3]))))


def tensors(*values):
    return [torch.tensor(row) for row in values]


def said():
    """A conversation that no policy sampled."""
    return TensorDict(history=ChatHistory.from_rows({"full": History.from_chats([CHAT])}), batch_size=[1])


def batch(prompts, gen, ref, reward=1.0):
    """Conversations whose responses have these log-probs, after prompts of these lengths."""
    lengths = [len(row) for row in gen]
    wrote = [[False] * p + [True] * r for p, r in zip(prompts, lengths, strict=True)]

    def full(scores):  # with rubbish where nothing was sampled
        return LogProbs.from_rows({"full": tensors(*([9.0] * p + row for p, row in zip(prompts, scores, strict=True)))})

    reward = torch.full((len(gen), 1, 1), reward)
    return TensorDict(
        tokens=Tokens.from_rows({"response": [torch.arange(length) for length in lengths]}),
        masks=Masks.from_rows({"all_assistant_mask": tensors(*wrote)}),
        log_probs=full(gen),
        next=TensorDict(ref_log_probs=full(ref), reward=reward, batch_size=[len(gen)]),
        batch_size=[len(gen)],
    )


def by_hand(model, ids, temperature):
    """log p of every token but the first, from all the logits."""
    with torch.no_grad():
        logits = model(input_ids=ids[None]).logits[0, :-1].float() / temperature
    return logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]


@pytest.mark.parametrize("pad_output", [False, True], ids=["ragged", "padded"])
@pytest.mark.parametrize("mode", ["history", "text", "tokens"])
def test_the_reference_scores_the_sampled_ids_in_every_mode_at_the_temperature_of_the_policy(models, mode, pad_output):
    model, other = models
    policy = policy_of(model, mode, temperature=0.7, pad_output=pad_output)
    reference = policy.get_new_version(model=other, generate=False)
    env = chat_env(mode, One(), RetrieveKL(ref_model=reference, coeff=0.5))
    td = one_turn(env, policy)
    kept = rows(td, "masks", "all_attention_mask")
    keys = [("tokens", "full"), ("masks", "all_assistant_mask"), ("log_probs", "full")]
    keys += [("next", "ref_log_probs", "full"), ("next", "kl_penalty", "full")]
    columns = [[row[mask] for row, mask in zip(rows(td, *key), kept, strict=True)] for key in keys]
    totals = td["next", "reward"].sum((1, 2))
    assert td["next", "reward"].shape == ((3, *td["tokens"].full.shape[1:], 1) if pad_output else (3, 1, 1))
    for row, (ids, wrote, gen, ref, kl) in enumerate(zip(*columns, strict=True)):
        expected = torch.cat([torch.zeros(1), by_hand(other, ids, 0.7)]) * wrote
        torch.testing.assert_close(ref, expected, atol=2e-5, rtol=0)
        torch.testing.assert_close(kl, (gen - expected) * wrote, atol=4e-5, rtol=0)
        assert kl[wrote].abs().min() > 1e-3
        torch.testing.assert_close(totals[row], 1 - 0.5 * (gen - expected)[wrote].sum(), atol=1e-4, rtol=0)


def test_the_penalty_and_the_reward_by_hand():
    td = KLComputation(coeff=0.1)(batch(*BY_HAND))
    kl = rows(td, "next", "kl_penalty", "full")
    assert [row.tolist() for row in kl] == [[0.0, 0.0, 0.5, 1.0], [0.0, -0.25]]
    torch.testing.assert_close(td["next", "reward"].flatten(), torch.tensor([1 - 0.15, 1 + 0.025]))
    mean = KLComputation(coeff=0.1, reduction="mean")(batch([2], [[-1.0, -2.0]], [[-1.5, -3.0]]))
    assert mean["next", "reward"].item() == pytest.approx(1 - 0.075)
    unprompted = KLComputation(reduction="mean")(batch([0], [[0.0, -1.0, -2.0]], [[0.0, -1.5, -3.0]]))
    assert unprompted["next", "reward"].item() == pytest.approx(1 - 1.5 / 2)  # the first token has no predecessor


def padded(td):
    """The same rows with prompts padded on the left and responses on the right, rubbish in the padding."""
    responses, fulls = ([len(row) for row in rows(td, *key)] for key in (("tokens", "response"), ("log_probs", "full")))
    prompts = [full - response for full, response in zip(fulls, responses, strict=True)]
    width = max(prompts)

    def place(key, fill):
        out = torch.full((len(td), width + max(responses)), fill)
        for row, (value, prompt) in enumerate(zip(rows(td, *key), prompts, strict=True)):
            out[row, width - prompt : width - prompt + len(value)] = value
        return out

    return TensorDict(
        tokens=Tokens.from_padded({"response": torch.zeros(len(td), max(responses), dtype=torch.int64)}),
        masks=Masks.from_padded({"all_assistant_mask": place(("masks", "all_assistant_mask"), False)}),
        log_probs=LogProbs.from_padded({"full": place(("log_probs", "full"), float("nan"))}),
        next=TensorDict(
            ref_log_probs=LogProbs.from_padded({"full": place(("next", "ref_log_probs", "full"), 5.0)}),
            reward=td["next", "reward"],
            batch_size=td.batch_size,
        ),
        batch_size=td.batch_size,
    )


def test_rewards_per_token_stand_where_the_tokens_stand_and_add_up_to_the_one_of_the_conversation():
    td = KLComputation(coeff=0.1)(padded(batch(*BY_HAND)))
    expected = torch.tensor([[0.0, 0.0, -0.05, 1 - 0.1], [0.0, 0.0, 1 + 0.025, 0.0]])
    torch.testing.assert_close(td["next", "reward"], expected.unsqueeze(-1))
    whole = KLComputation(coeff=0.1)(batch(*BY_HAND))["next", "reward"]
    torch.testing.assert_close(td["next", "reward"].sum(1, keepdim=True), whole)
    again = KLComputation(coeff=0.1, kl_key="second")(td)["next", "reward"]  # of a reward that is per token already
    torch.testing.assert_close(again.sum(1, keepdim=True), whole - 0.1 * torch.tensor([1.5, -0.25]).view(2, 1, 1))
    with pytest.raises(ShapeError, match="use reduction='sum'"):
        KLComputation(reduction="token")(batch(*BY_HAND))


def test_a_reward_that_failed_stays_a_failure():
    ragged = batch([1], [[-1.0]], [[-2.0]], reward=float("nan"))
    assert KLComputation()(ragged)["next", "reward"].isnan().all()
    dense = padded(batch([1, 1], [[-1.0], [-1.0]], [[-2.0], [-2.0]]))
    dense["next", "reward"][0] = float("nan")
    assert KLComputation()(dense)["next", "reward"].isnan().any(1).flatten().tolist() == [True, False]


def test_where_sampling_was_cut_the_plain_log_probs_are_compared():
    td = batch([1], [[-1.0]], [[-2.0]])
    td["log_probs"] = LogProbs.from_rows({"full": tensors([0.0, -1.0]), "plain": tensors([0.0, -1.75])})
    assert KLComputation()(td)["next", "reward"].item() == 0.75


def test_a_kl_controller_sets_the_weight_at_every_step_and_is_state_of_the_transform():
    transform = KLComputation(coeff=ConstantKLController(kl_coef=0.5))
    for coef in (0.5, 0.25):
        transform.coeff.coef = coef
        assert transform(batch([1], [[-1.0]], [[-2.0]]))["next", "reward"].item() == 1 - coef
    moved, fresh = (
        KLComputation(coeff=AdaptiveKLController(init_kl_coef=coef, target=1.0, horizon=10)) for coef in (0.5, 0.1)
    )
    moved.coeff.update([-5.0] * 5)
    fresh.load_state_dict(moved.state_dict())
    assert fresh.coeff.coef == moved.coeff.coef == pytest.approx(0.55)
    assert KLComputation(coeff=0.5).state_dict() == {}


@pytest.mark.parametrize("reduction", ["sum", "mean", "token"])
def test_a_reward_in_whole_numbers_pays_the_whole_penalty(reduction):
    def given(dtype):
        td = padded(batch(*BY_HAND))
        td["next", "reward"] = td["next", "reward"].to(dtype)
        return KLComputation(coeff=0.1, reduction=reduction)(td)["next", "reward"]

    assert torch.equal(given(torch.int64), given(torch.float32))


@pytest.mark.parametrize(("reduction", "shape"), [("sum", (2, 4, 1)), ("mean", (2, 4, 1)), ("token", (2, 2, 1))])
def test_a_reward_that_is_not_one_per_conversation_is_refused_where_one_is_needed(reduction, shape):
    td = padded(batch(*BY_HAND))
    td["next", "reward"] = torch.ones(shape)
    with pytest.raises(ShapeError, match="one reward per conversation"):
        KLComputation(reduction=reduction)(td)


@pytest.mark.parametrize("gen", ["from_collector", "scored again"])
def test_a_turn_pays_for_its_own_tokens_so_that_the_turns_of_a_conversation_add_up(models, gen):
    model, other = models
    policy, reference = policy_of(model), wrapper(other)
    given = "from_collector" if gen == "from_collector" else wrapper(model)
    env = chat_env("history", One(), RetrieveKL(given, reference, coeff=0.5), AskAgain())
    first = one_turn(env, policy)
    second = env.step(policy(env.step_mdp(first)))
    kl, wrote = rows(second, "next", "kl_penalty", "full")[0], rows(second, "masks", "all_assistant_mask")[0]
    assert int(wrote.sum()) == sum(len(rows(td, "tokens", "response")[0]) for td in (first, second))
    paid = first["next", "reward"][0].item() + second["next", "reward"][0].item()
    assert paid == pytest.approx(2 - 0.5 * kl[wrote].sum().item(), abs=1e-4)
    # what the env carried is untouched by what was scored again
    before = rows(first, "log_probs", "full")[0]
    assert torch.equal(rows(second, "log_probs", "full")[0][: len(before)], before)
    assert "ref_log_probs" not in second  # it is not carried to the next turn
    assert "kl_penalty" not in second


def test_log_probs_are_written_under_the_key_of_the_model(models):
    model, _ = models
    td = one_turn(chat_env("history", One()), policy_of(model))
    for options, name in ({}, "ref_log_probs"), ({"log_probs_key": "ref"}, "ref"):
        transform = RetrieveLogProb(wrapper(model, **options))
        assert transform.log_probs_full_key == (name, "full")
        scores = rows(transform(td.copy()), "next", name, "full")[0]
        torch.testing.assert_close(scores, rows(td, "log_probs", "full")[0], atol=2e-5, rtol=0)
    assert RetrieveLogProb(FakeEngine(["4"], tokenizer=TOKENIZER)).log_probs_full_key == ("ref_log_probs", "full")


@pytest.mark.parametrize("at_root", [False, True])
def test_the_losses_read_what_the_transform_writes_by_default(models, at_root):
    model, other = models
    policy = policy_of(model)
    td = one_turn(chat_env("history", One()), policy)
    td = td.exclude("next") if at_root else td
    td = RetrieveLogProb(wrapper(other))(td).set("advantage", torch.ones(3, 1, 1))
    actor = policy.get_new_version(generate=False)
    kl = GRPOLoss(actor, kl_to_ref_coeff=0.1)(td).kl_to_ref
    torch.testing.assert_close(kl, SFTLoss(actor, kl_to_ref_coeff=0.1)(td).kl_to_ref, atol=1e-5, rtol=0)
    assert kl > 1e-3


@pytest.mark.parametrize("kl_key", ["kl_penalty", ("kl", "penalty")])
def test_data_without_a_next_step_or_a_reward_get_the_kl_alone(models, kl_key):
    model, other = models
    path = [kl_key] if isinstance(kl_key, str) else kl_key
    td = RetrieveKL(wrapper(model), wrapper(other), kl_key=kl_key, assistant_only=False)(said())
    assert "next" not in td
    assert "reward" not in td
    [gen], [ref], [kl] = rows(td, "log_probs", "full"), rows(td, "ref_log_probs", "full"), rows(td, *path, "full")
    assert torch.equal(kl, gen - ref)
    assert kl[1:].abs().min() > 1e-4
    options = {"ref_model": wrapper(other), "kl_key": kl_key}
    turn = RetrieveKL(**options)(one_turn(chat_env("history"), policy_of(model)))
    assert "reward" not in turn["next"].keys()
    assert rows(turn, "next", *path, "full")[0].abs().max() > 1e-3
    env = chat_env("history", RewardFunction(lambda completion: 1.0), RetrieveKL(**options))
    check_env_specs(env, tensordict=TensorDict(query=QUERIES, batch_size=[3]), policy=policy_of(model))


def test_tokenizer_kwargs_are_what_apply_chat_template_takes(models):
    model, other = models

    def ids(transform):
        return rows(transform.model(said()), "tokens", "full")[0]

    expected = History.from_chats([CHAT]).apply_chat_template(
        tokenizer=TOKENIZER, chat_template_name="chatml_format", add_generation_prompt=False, return_dict=True
    )["input_ids"][0]
    kwargs = {"chat_template_name": "chatml_format", "return_dict": True, "padding": False, "tokenize": True}
    assert torch.equal(ids(RetrieveLogProb(wrapper(model), tokenizer_kwargs=kwargs)), expected)
    for retrieve in RetrieveKL(wrapper(model), wrapper(other), tokenizer_kwargs=kwargs)[:2]:
        assert torch.equal(ids(retrieve), expected)
    template = "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }};{% endfor %}"
    own = RetrieveLogProb(wrapper(model), tokenizer_kwargs={"chat_template": template})
    assert TOKENIZER.decode(ids(own)) == "u:2+2;a:4;"
    with pytest.raises(ConfigError, match="add_generation_prompt=False: got True"):
        RetrieveLogProb(wrapper(model), tokenizer_kwargs={"add_generation_prompt": True})
    with pytest.raises(ConfigError, match="chat_template_nam"):
        RetrieveLogProb(wrapper(model), tokenizer_kwargs={"chat_template_nam": "qwen"})


def lora(model):
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2))


def test_the_policy_without_its_adapter_is_the_base_model(models):
    base = tiny_model(TOKENIZER, seed=0)
    model = lora(base)
    policy = policy_of(model)
    scorer = policy.get_new_version(generate=False)
    env = chat_env("history", One(), RetrieveKL(ref_model=scorer, reference="adapter_off"))
    untrained = one_turn(env, policy)
    assert max(row.abs().max() for row in rows(untrained, "next", "kl_penalty", "full")) < 2e-5
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(0))
    trained = one_turn(env, policy_of(model))
    keys = (("tokens", "full"), ("next", "ref_log_probs", "full"), ("next", "kl_penalty", "full"))
    for ids, ref, kl in zip(*(rows(trained, *key) for key in keys), strict=True):
        wrote = ref != 0
        assert kl[wrote].abs().max() > 1e-2
        expected = torch.cat([torch.zeros(1), by_hand(models[0], ids, 1.0)])  # the base's, whatever the adapter says
        torch.testing.assert_close(ref[wrote], expected[wrote], atol=2e-5, rtol=0)


def test_turning_the_adapter_off_changes_neither_what_is_trained_nor_what_is_frozen():
    model = lora(tiny_model(TOKENIZER))
    trainable = [parameter.requires_grad for parameter in model.parameters()]
    with adapter_off(model):
        pass
    assert [parameter.requires_grad for parameter in model.parameters()] == trainable
    model.requires_grad_(False)
    with pytest.raises(KeyError), adapter_off(model):
        raise KeyError
    assert not any(parameter.requires_grad for parameter in model.parameters())
    with pytest.raises(ConfigError, match="needs a PEFT model"):
        RetrieveLogProb(wrapper(tiny_model(TOKENIZER)), reference="adapter_off")


def test_gradients_reach_the_model_unless_detached(models):
    model, _ = models
    td = one_turn(chat_env("history", One()), policy_of(model))
    reference = wrapper(model, log_probs_key="ref_log_probs")
    frozen = rows(RetrieveLogProb(reference)(td.copy()), "next", "ref_log_probs", "full")
    assert not frozen[0].requires_grad
    scores = rows(RetrieveLogProb(reference, detach=False)(td.copy()), "next", "ref_log_probs", "full")
    for score, other in zip(scores, frozen, strict=True):
        torch.testing.assert_close(score.detach(), other, atol=2e-5, rtol=0)
    torch.cat(scores).sum().backward()
    assert any(parameter.grad is not None for parameter in model.parameters())
    model.zero_grad()


def test_a_conversation_that_was_not_sampled_is_scored_by_its_rendering(models):
    model, _ = models
    td = said()
    [scores] = rows(RetrieveLogProb(wrapper(model))(td), "ref_log_probs", "full")
    assert "next" not in td
    assert int((scores != 0).sum()) == len(TOKENIZER("4<|im_end|>").input_ids)
    text = RetrieveLogProb(wrapper(model, input_mode="text", input_key="said"))
    with pytest.raises(MissingKeyError, match="which tokens the policy wrote"):
        text(TensorDict(said=["2+2"], batch_size=[1]))


@pytest.mark.parametrize("mode", ["history", "text"])
def test_the_specs_are_kept(models, mode):
    other = models[1]
    env = chat_env(mode, One(), KLRewardTransform(wrapper(other)), StepCounter(2))
    declared = env.full_reward_spec
    assert {"kl_penalty", "ref_log_probs"} <= set(declared.keys())
    assert "kl_penalty" not in chat_env(mode, RetrieveLogProb(wrapper(other))).full_reward_spec
    engine = fake_policy(TOKENIZER, ["4"], generate=False)
    quiet = chat_env("history", RewardFunction(lambda completion: 1.0), RetrieveKL(ref_model=engine))
    asked = TensorDict(query=QUERIES, batch_size=[3])
    check_env_specs(quiet, tensordict=asked, policy=fake_policy(TOKENIZER, ["4"]))


def test_what_is_missing_is_named():
    with pytest.raises(MissingKeyError, match=r"the policy .*\('log_probs'"):
        KLComputation()(batch([1], [[-1.0]], [[-2.0]]).exclude("log_probs"))
    with pytest.raises(MissingKeyError, match=r"ref_log_probs.* RetrieveLogProb"):
        KLComputation()(batch([1], [[-1.0]], [[-2.0]]).exclude(("next", "ref_log_probs")))
    td = batch([1], [[-1.0]], [[-2.0]]).exclude(("next", "reward"))
    with pytest.raises(MissingKeyError, match="after the transform that writes the reward"):
        KLComputation()._step(td, td["next"])
    assert "reward" not in KLComputation()(td)["next"].keys()
    with pytest.raises(ShapeError, match=r"the reference's log-probs .* got \[3\], expected \[2\]"):
        KLComputation()(batch([1], [[-1.0]], [[-2.0, -3.0]]))


def test_settings_that_contradict_each_other_are_refused(models):
    model, other = models
    scorer, engine = wrapper(other), FakeEngine(["4"], tokenizer=TOKENIZER)
    wrong = {
        "got generate=True": lambda: RetrieveLogProb(policy_of(model)),
        "must have the same pad_output": lambda: RetrieveKL(wrapper(model, pad_output=True), scorer),
        "under different keys": lambda: RetrieveKL(ref_model=scorer, ref_log_probs_full_key=("log_probs", "full")),
        "different keys: got .'a'": lambda: KLComputation(("a", "full"), ("a", "full")),
        "a reference is required": RetrieveKL,
        "not both": lambda: RetrieveKL(ref_model=scorer, ref_model_factory=lambda: scorer),
        "use_ray_service must be False": lambda: KLRewardTransform(scorer, use_ray_service=True),
        "wrap it in TransformersWrapper": lambda: RetrieveLogProb(other),
        "got an engine alone": lambda: RetrieveLogProb(engine, detach=False),
        "padding_side": lambda: KLComputation(padding_side="top"),
        r"is \(name, 'full'\)": lambda: RetrieveLogProb(engine, log_probs_full_key="ref"),
        "reduction": lambda: KLComputation(reduction="max"),
        "out_keys": lambda: KLRewardTransform(scorer, in_keys=["reward", "other"]),
    }
    for words, make in wrong.items():
        with pytest.raises(ConfigError, match=words):
            make()
    assert RetrieveKL(ref_model_factory=lambda: scorer)[0].model is scorer
