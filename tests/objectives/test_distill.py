"""Distillation: every divergence and estimator against a whole [N, V] table, against TRL, and over samples."""

import importlib.util
from functools import partial
from itertools import pairwise

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torch import nn

from llmrl.data.ragged.tensordicts import column
from llmrl.errors import ConfigError, DataError
from llmrl.modules.llm.head_scores import HeadOptions
from llmrl.modules.llm.packing import HeadPath
from llmrl.modules.llm.policies.columns import placeholders
from llmrl.modules.llm.policies.containers import Masks, Tokens
from llmrl.modules.llm.rendering import Renderer
from llmrl.objectives.llm import DistillLoss, DistillSettings, GRPOLoss, GRPOSettings, count_step
from llmrl.objectives.llm import functional as fn
from llmrl.objectives.llm.teacher import Demonstrations, Distillation, HiddenTeacher, TeacherTerm, TopTeacher
from llmrl.objectives.llm.teacher_settings import TeacherSettings
from llmrl.testing import tiny_tokenizer
from tests.support.losses import conversation, run_step, tiny_scorer

N, V, CHUNK = 23, 37, 5
BETAS = (0.0, 0.25, 0.5, 1.0)


def drawn(seed, dtype, *, rows=(V, V), bias=True):
    """Hidden states and heads of a student of width 6 and a teacher of width 9, and sampled ids."""
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for width, size in zip((6, 9), rows, strict=True):
        head = nn.Linear(width, size, bias=bias, dtype=dtype)
        for parameter in head.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=dtype)
        parts.append((torch.randn(N, width, generator=generator, dtype=dtype).requires_grad_(), head))
    return *parts, torch.randint(0, min(rows), (N,), generator=generator)


def logits_of(hidden, head, softcap, temperature):
    logits = head(hidden)
    return (logits if softcap is None else softcap * torch.tanh(logits / softcap)) / temperature


def distilled(student, teacher, targets, beta, *, softcap=None, temperature=1.0, wrapped=False):
    """The divergences [N] by the chunked head, and the gradients of their sum."""
    hidden, head = student
    path = HeadPath(nn.Identity(), nn.Sequential(head) if wrapped else head, 1.0, softcap)
    options = HeadOptions(temperature, CHUNK, True)
    log_prob, entropy, top1, value = Distillation(teacher, beta, temperature, False)(path, hidden, targets, options)
    log_p = logits_of(hidden, head, softcap, temperature)[:, : teacher.vocabulary].log_softmax(-1).detach()
    torch.testing.assert_close(log_prob, log_p.gather(1, targets[:, None])[:, 0])
    torch.testing.assert_close(entropy, -(log_p.exp() * log_p).sum(-1))
    assert torch.equal(top1, log_p.argmax(-1) == targets)
    return value, torch.autograd.grad((value * torch.arange(1.0, N + 1)).sum(), [hidden, *head.parameters()])


def by_table(log_p, log_q, beta):
    """The same from whole tables, by autograd."""

    def kl(a, b):
        return (a.exp() * (a - b)).sum(-1)

    if beta in (0.0, 1.0):
        return kl(log_p, log_q) if beta else kl(log_q, log_p)
    log_m = ((1 - beta) * log_p.exp() + beta * log_q.exp()).log()
    return beta * kl(log_q, log_m) + (1 - beta) * kl(log_p, log_m)


def merged(log_p, ids):
    """The distribution of the ids and of all others together."""
    top = log_p.gather(1, ids)
    return torch.cat([top, (1 - top.exp().sum(-1, keepdim=True)).log()], 1)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("rows", [(V, V), (V, V + 4), (V + 4, V)], ids=["equal", "wider teacher", "wider student"])
@pytest.mark.parametrize("k", [None, 4], ids=["full", "topk"])
@pytest.mark.parametrize("wrapped", [False, True], ids=["linear", "module"])
def test_the_chunked_divergence_equals_that_of_whole_tables(beta, rows, k, wrapped):
    softcap, temperature = 3.0, 0.7
    (hidden, head), (other, other_head), targets = drawn(0, torch.float64, rows=rows)
    both = min(rows) if k is None else V
    log_q = logits_of(other, other_head, softcap, temperature)[:, :both].log_softmax(-1).detach()
    log_p = logits_of(hidden, head, softcap, temperature)
    if k is None:
        ask = partial(logits_of, head=other_head, softcap=softcap, temperature=temperature)
        teacher = HiddenTeacher(other.detach(), lambda hidden: ask(hidden).detach(), rows[1])
        expected = by_table(log_p[:, :both].log_softmax(-1), log_q, beta)
    else:
        teacher = TopTeacher(log_q.topk(k).indices, log_q.topk(k).values)
        ids = teacher.ids_NK
        expected = by_table(merged(log_p.log_softmax(-1), ids), merged(log_q, ids), beta)
    value, gradients = distilled(
        (hidden, head), teacher, targets, beta, softcap=softcap, temperature=temperature, wrapped=wrapped
    )
    torch.testing.assert_close(value, expected, atol=1e-10, rtol=1e-10)
    total = (expected * torch.arange(1.0, N + 1)).sum()
    for got, whole in zip(gradients, torch.autograd.grad(total, [hidden, *head.parameters()]), strict=True):
        torch.testing.assert_close(got, whole, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("beta", BETAS)
def test_the_teachers_likeliest_tokens_give_a_lower_bound_that_all_of_them_reach(beta):
    student, (other, other_head), targets = drawn(1, torch.float64)
    log_q = other_head(other).log_softmax(-1).detach()
    values = [distilled(student, TopTeacher(*log_q.topk(k)[::-1]), targets, beta)[0] for k in (1, 4, 16, V)]
    whole = by_table(student[1](student[0]).log_softmax(-1), log_q, beta)
    assert all((more >= less - 1e-12).all() for less, more in pairwise(values))
    torch.testing.assert_close(values[-1], whole, atol=2e-4, rtol=1e-4)  # a rest of 1e-6 is kept for the teacher


@pytest.mark.slow  # TRL is imported
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs TRL: pip install trl")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("beta", BETAS)
def test_a_hundred_batches_have_the_divergence_and_the_gradient_of_trl(beta):
    from trl.trainer.distillation_trainer import _chunked_divergence_loss

    for seed in range(25):
        softcap, temperature, bias = (None, 2.0)[seed % 2], (1.0, 0.8, 1.7)[seed % 3], bool(seed % 5)
        (hidden, head), (other, other_head), targets = drawn(seed, torch.float32, bias=bias)
        mask = torch.arange(N) % 4 != seed % 4
        theirs, entropy, count = _chunked_divergence_loss(
            hidden[None], other.detach()[None], head.weight, other_head.weight, mask[None], beta,
            student_lm_head_bias=head.bias, teacher_lm_head_bias=None if not bias else other_head.bias.detach(),
            student_final_logit_softcapping=softcap, teacher_final_logit_softcapping=softcap, temperature=temperature,
        )  # fmt: skip
        expected = torch.autograd.grad(theirs, [hidden, *head.parameters()])
        ask = partial(logits_of, head=other_head, softcap=softcap, temperature=temperature)
        teacher = HiddenTeacher(other.detach()[mask], lambda hidden, ask=ask: ask(hidden).detach(), V)
        path, options = HeadPath(nn.Identity(), head, 1.0, softcap), HeadOptions(temperature, CHUNK, True)
        own = Distillation(teacher, beta, temperature, trains=False)
        _, own_entropy, _, value = own(path, hidden[mask], targets[mask], options)
        ours = value.sum() / count
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(own_entropy.sum(), entropy, atol=1e-4, rtol=1e-6)
        for got, their in zip(torch.autograd.grad(ours, [hidden, *head.parameters()]), expected, strict=True):
            torch.testing.assert_close(got, their, atol=1e-6, rtol=1e-6)


def test_one_sampled_token_gives_on_average_the_reverse_divergence_and_its_gradient():
    """Also of tokens that older weights sampled; k3 as a loss would have another gradient."""
    draws = 40_000
    generator = torch.Generator().manual_seed(0)
    logits, log_q = torch.randn(2, 7, generator=generator, dtype=torch.float64)
    logits, log_q = logits.requires_grad_(), log_q.log_softmax(-1)
    whole = by_table(logits.log_softmax(-1)[None], log_q[None], 1.0)
    expected = torch.cat([whole.detach(), torch.autograd.grad(whole.sum(), logits)[0]])
    older = (logits + 0.1 * torch.randn(7, generator=generator, dtype=torch.float64)).log_softmax(-1).detach()
    for behaviour in (logits.log_softmax(-1).detach(), older):
        ids = torch.multinomial(behaviour.exp(), draws, replacement=True, generator=generator)
        log_p = logits.log_softmax(-1)
        mask = torch.ones(1, 7, dtype=torch.bool)
        each = fn.sampled_divergence(log_p[None], log_q[None], behaviour[None], mask)[0]  # of each possible token
        slopes = torch.stack([torch.autograd.grad(value, logits, retain_graph=True)[0] for value in each])
        found = torch.cat([each.detach()[:, None], slopes], 1)[ids]
        error = found.std(0) / draws**0.5
        assert ((found.mean(0) - expected).abs() <= 3 * error).all()
        assert (error < 0.02).all()


@pytest.mark.parametrize("options", [{}, {"estimator": "topk", "k": 3}, {"estimator": "sample"}], ids=str)
def test_a_teacher_beside_the_reward_adds_its_loss_and_its_gradient_times_its_weight(options):
    batch = lazy_stack([conversation(i, 3, 2 + i, dtype=torch.float64) for i in range(4)])
    actor, teacher = tiny_scorer(), tiny_scorer(vocab=31, hidden=24)
    own = {"kl_to_ref_coeff": 0.1, "entropy_coeff": 0.02, "clip_epsilon": 0.1}
    term = TeacherTerm(TeacherSettings(model="x", weight=0.3, **options), teacher)
    alone, alone_gradients = run_step(GRPOLoss(actor, **own), batch)
    distilled, gradients = run_step(DistillLoss(actor, options=DistillSettings(**options), teacher=teacher), batch)
    with pytest.raises(ConfigError, match="settings with a teacher need the teacher itself"):
        GRPOLoss(actor, GRPOSettings(teacher="x"))(batch)
    both, both_gradients = run_step(GRPOLoss(actor, **own, teacher=term), batch)
    asking = DistillLoss(actor, options=DistillSettings(**options), teacher=teacher)
    empty = TensorDict({**placeholders("cpu"), **asking.placeholder("cpu")}, batch_size=[1])  # of a rank without rows
    assert not asking.ask_teacher(empty).any()
    assert asking(empty, count_step(batch))["loss_distill"] == 0
    assert both.keys() - alone.keys() == {"loss_distill", "distill"}
    for name, value in alone.items():
        torch.testing.assert_close(both[name], value, atol=1e-12, rtol=1e-12)
    assert distilled["distill"].abs() > 1e-3
    torch.testing.assert_close(both["distill"], distilled["distill"])
    torch.testing.assert_close(both["loss_distill"], 0.3 * distilled["loss_distill"])
    assert max(value.abs().max() for value in gradients.values()) > 1e-3
    for name, value in both_gradients.items():
        expected = alone_gradients[name] + 0.3 * gradients[name]
        torch.testing.assert_close(value, expected, atol=1e-6, rtol=0)  # the model's norms are in float32


@pytest.mark.parametrize("estimator", ["full", "topk", "sample"])
def test_a_teacher_with_a_demonstration_says_what_it_says_after_the_longer_prompt(estimator):
    """Rows of several lengths, prompts longer and shorter than the student's, tokens within that are not trained."""
    batch = lazy_stack([conversation(i, 3, 2 + i, dtype=torch.float64) for i in range(4)])
    batch[2]["masks", "all_assistant_mask"][4] = False  # such as a tool's result
    actor, teacher = tiny_scorer(), tiny_scorer(hidden=24)
    own = {"k": 4} if estimator == "topk" else {}
    options = DistillSettings(teacher="self", estimator=estimator, demonstration="shown", **own)
    loss = DistillLoss(actor, options=options, teacher=teacher)
    prompts = [torch.arange(2 + 2 * i) for i in range(4)]
    batch.set("teacher_prompt", Tokens.from_rows({"full": prompts}))
    rows, masks = (batch.get(key, as_list=True) for key in (("tokens", "full"), ("masks", "all_assistant_mask")))

    def after(model, prompt, ids, mask):
        """Log-probs over the vocabulary at the trained tokens of ids, which follow the prompt."""
        logits = model(torch.cat([prompt, ids])[None]).logits[0, len(prompt) - 1 : -1]
        return logits.log_softmax(-1).detach()[mask]

    log_q = [after(teacher.model, p, ids[3:], mask[3:]) for p, ids, mask in zip(prompts, rows, masks, strict=True)]
    if estimator == "full":
        log_p = [after(actor.model, ids[:3], ids[3:], mask[3:]) for ids, mask in zip(rows, masks, strict=True)]
        expected = by_table(torch.cat(log_p), torch.cat(log_q), 1.0).mean()
        torch.testing.assert_close(loss(batch)["distill"], expected, atol=1e-6, rtol=1e-6)
        return
    for said, row, mask, q in zip(loss.ask_teacher(batch), rows, masks, log_q, strict=True):
        found = said[: len(row)][mask]
        if estimator == "sample":
            torch.testing.assert_close(found, q.gather(1, row[mask][:, None])[:, 0], atol=1e-6, rtol=0)
        else:
            assert torch.equal(found[:, :4].long(), q.topk(4).indices)
            torch.testing.assert_close(found[:, 4:], q.topk(4).values, atol=1e-6, rtol=0)


def test_a_demonstration_follows_the_last_user_message_and_is_that_of_the_row():
    renderer = Renderer(tiny_tokenizer())
    ask = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Why?"}]
    shown = [(ask, "So."), (ask, "Thus {x}."), ([*ask, {"role": "assistant", "content": "Hm"}, ask[1]], "So.")]
    made = Demonstrations(renderer, shown, column="good", text=" Like: {demonstration}")
    prompts = renderer.prompt_ids([chat for chat, _ in shown])
    ids = [torch.cat([prompt, torch.tensor([5, 6])]) for prompt in prompts]
    masks = [torch.arange(len(row)) >= len(row) - 2 for row in ids]
    rows = TensorDict(
        tokens=Tokens.from_rows({"full": ids}),
        masks=Masks.from_rows({"all_assistant_mask": masks}),
        good=column([answer for _, answer in shown]),
        batch_size=[3],
    )
    expected = [[*chat[:-1], {"role": "user", "content": f"Why? Like: {answer}"}] for chat, answer in shown]
    found = made.write(rows).get(("teacher_prompt", "full"), as_list=True)
    assert [row.tolist() for row in found] == [row.tolist() for row in renderer.prompt_ids(expected)]
    assert made.longest == max(map(len, found))
    with pytest.raises(DataError, match="must begin with a prompt of the data"):
        made.write(rows.copy().set("good", column(["So.", "another", "So."])))
    with pytest.raises(DataError, match="must have a message of a user"):
        Demonstrations(renderer, [(ask[:1], "So.")], column="good", text="{demonstration}")
