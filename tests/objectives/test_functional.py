"""The golden batch: 33 tokens in 8 sequences and 2 groups, float64, with the values that independent implementations of
the same formulas agree on. Values to 1e-7 (printed with 8 digits), gradients with respect to the current log-probs."""

import math
from types import SimpleNamespace

import pytest
import torch

from llmrl.errors import ConfigError, DataError, MissingKeyError
from llmrl.objectives.llm import functional as fn
from llmrl.objectives.llm.functional import StepCounts
from tests.support.losses import golden_columns
from tests.support.refusals import refusals

AGGREGATIONS = ("token", "seq-mean", "seq-sum", "dr_grpo", "prompt-mean")


@pytest.fixture
def golden() -> SimpleNamespace:
    g = golden_columns()
    centred = g.reward - g.reward.mean(1, keepdim=True)
    g.lp.requires_grad_()
    g.A = (centred / (g.reward.std(1, keepdim=True) + 1e-6)).view(8, 1).expand(8, 6)
    g.A_without_eps = (centred / g.reward.std(1, keepdim=True)).view(8, 1).expand(8, 6)
    g.centred = centred.view(8, 1).expand(8, 6)
    g.counts = StepCounts.of(g.mask, g.group)
    return g


def per_token(name: str, g: SimpleNamespace) -> torch.Tensor:
    """The per-token losses of the golden table."""
    r = fn.log_ratio(g.lp, g.lo, g.mask)

    def ppo(low=0.2, high=0.2, **other):
        return fn.clipped_surrogate(r, g.A, low=low, high=high, **other)

    def corrected(kind, **bounds):
        return ppo() * fn.correction_weight(g.lo, g.lg, g.mask, kind, **bounds)

    sequence = fn.sequence_log_ratio(r, g.mask)
    on_policy = fn.log_ratio(g.lp, g.lp.detach(), g.mask)
    table = {
        "PPO .2/.2": lambda: ppo(),
        "PPO .2/.28": lambda: ppo(high=0.28),
        "PPO .2/.2, dual c 1.25": lambda: ppo(dual_clip=1.25),
        "no clip": lambda: ppo(low=1.0, high=math.inf),
        "r = 1": lambda: fn.clipped_surrogate(on_policy, g.A, low=0.2, high=0.2),
        "GSPO .1/.1": lambda: fn.clipped_surrogate(sequence, g.A, low=0.1, high=0.1),
        "GSPO 3e-4/4e-4": lambda: fn.clipped_surrogate(sequence, g.A, low=3e-4, high=4e-4),
        "CISPO, r <= 1.28": lambda: fn.cispo(r, g.lp, g.A, low=1.0, high=0.28),
        "CISPO, [.8, 1.28]": lambda: fn.cispo(r, g.lp, g.A, low=0.2, high=0.28),
        "REINFORCE": lambda: fn.reinforce(g.lp, g.A),
        "KL k1": lambda: fn.kl_estimate(g.lp, g.lr, g.mask, "k1"),
        "KL k2": lambda: fn.kl_estimate(g.lp, g.lr, g.mask, "k2"),
        "KL k3": lambda: fn.kl_estimate(g.lp, g.lr, g.mask, "k3"),
        "KL k3+": lambda: fn.kl_estimate(g.lp, g.lr, g.mask, "k3+"),
        "KL k3 * r": lambda: fn.kl_estimate(g.lp, g.lr, g.mask, "k3-weighted", log_ratio_BT=r),
        "TIS 1.2": lambda: corrected("tis", cap=1.2),
        "raw rho (cap 2)": lambda: corrected("tis", cap=2.0),
        "IcePop [.8, 1.2]": lambda: corrected("mask", band=(0.8, 1.2)),
        "seq product cap 1.2": lambda: corrected("seq-tis", cap=1.2),
        "seq mask 1.2": lambda: corrected("seq-mask", cap=1.2),
        "geo mask [.98, 1.02] x rho": lambda: corrected("geo-mask", band=(0.98, 1.02)),
        "bypass": lambda: fn.clipped_surrogate(fn.log_ratio(g.lp, g.lg, g.mask), g.A, low=0.2, high=0.2),
    }
    return table[name]()


def aggregate(loss_BT: torch.Tensor, aggregation: str, g: SimpleNamespace) -> torch.Tensor:
    weights = fn.token_weights(g.mask, aggregation, g.counts, max_length=8, group_id_B=g.group, dtype=torch.float64)
    return (loss_BT * weights).sum()


# fmt: off
GOLDEN_VALUES = {  # token, seq-mean, seq-sum, dr_grpo with length 8, prompt-mean
    "PPO .2/.2":                  (-.09713537, -.00458861, -.40068339, -.05008542, -.12051078),
    "PPO .2/.28":                 (-.10710181, -.01310720, -.44179496, -.05522437, -.13080720),
    "PPO .2/.2, dual c 1.25":     (-.10287576, -.01248165, -.42436250, -.05304531, -.12682521),
    "no clip":                    (-.14028752, -.03627508, -.57868600, -.07233575, -.16345170),
    "r = 1":                      (-.09108099, 0.0,        -.37570907, -.04696363, -.11685572),
    "GSPO .1/.1":                 (-.10925821, -.01383026, -.45069013, -.05633627, -.13383899),
    "GSPO 3e-4/4e-4":             (-.06209883, +.03087721, -.25615767, -.03201971, -.08750199),
    "CISPO, r <= 1.28":           (+.00724222, -.02154930, +.02987415, +.00373427, +.01880426),
    "CISPO, [.8, 1.28]":          (-.00088331, -.02544962, -.00364365, -.00045546, +.01199634),
    "REINFORCE":                  (-.00640746, -.03107403, -.02643077, -.00330385, +.00861843),
    "KL k1":                      (-.09696970, -.09187500, -.40,       -.05,       -.09394444),
    "KL k2":                      (+.05575758, +.04932396, +.23,       +.02875,    +.05550417),
    "KL k3":                      (+.06250835, +.05454765, +.25784693, +.03223087, +.06203787),
    "KL k3+":                     (+.06250835, +.05454765, +.25784693, +.03223087, +.06203787),
    "KL k3 * r":                  (+.05046892, +.04547492, +.20818428, +.02602304, +.05054448),
    "TIS 1.2":                    (-.10806713, -.01703616, -.44577690, -.05572211, -.13227380),
    "raw rho (cap 2)":            (-.11740403, -.02448216, -.48429162, -.06053645, -.14187291),
    "IcePop [.8, 1.2]":           (-.04398819, +.01930420, -.18145130, -.02268141, -.06516915),
    "seq product cap 1.2":        (-.19031022, -.07457927, -.78502964, -.09812871, -.21301904),
    "seq mask 1.2":               (-.13296264, -.01543959, -.54847089, -.06855886, -.16045043),
    "geo mask [.98, 1.02] x rho": (+.04559452, +.08090030, +.18807741, +.02350968, +.05015398),
    "bypass":                     (-.08405881, -.00001142, -.34674261, -.04334283, -.10848019),
}
GOLDEN_GRADIENTS = {  # name, aggregation: norm, non-zero entries, single entries
    ("PPO .2/.2", "token"):         (.13222589, 26, {(0, 0): -.03112137, (3, 0): +.02105355}),
    ("PPO .2/.2", "seq-mean"):      (.14172674, 26, {(0, 0): -.02139595, (3, 0): +.08684590}),
    ("PPO .2/.2", "dr_grpo"):       (.06817897, 26, {}),
    ("GSPO .1/.1", "seq-mean"):      (.10137706, 24, {(0, 0): -.02888150, (3, 0): 0.0}),
    ("CISPO, r <= 1.28", "token"):  (.15770452, 33, {}),
    ("CISPO, [.8, 1.28]", "token"): (.16213055, 33, {}),
    ("KL k1", "token"):             (.17407766, 33, {(0, 0): .030303, (3, 0): .030303}),
    ("KL k2", "token"):             (.05813129, None, {}),
    ("KL k3", "token"):             (.07081451, None, {}),
    ("KL k3+", "token"):            (.05813129, None, {}),
    ("KL k3 * r", "token"):         (.05299171, None, {}),
}
# fmt: on


@pytest.mark.parametrize("name", GOLDEN_VALUES)
def test_golden_values(name, golden):
    loss = per_token(name, golden)
    got = [aggregate(loss, aggregation, golden).item() for aggregation in AGGREGATIONS]
    assert got == pytest.approx(GOLDEN_VALUES[name], abs=1e-8, rel=0)
    assert aggregate(loss, "sum", golden).item() == pytest.approx(33 * GOLDEN_VALUES[name][0], abs=5e-7)


@pytest.mark.parametrize(("name", "aggregation"), GOLDEN_GRADIENTS)
def test_golden_gradients(name, aggregation, golden):
    norm, non_zero, entries = GOLDEN_GRADIENTS[name, aggregation]
    if name == "CISPO, [.8, 1.28]":  # this one was computed without eps in the advantage
        golden.A = golden.A_without_eps
    aggregate(per_token(name, golden), aggregation, golden).backward()
    assert golden.lp.grad.norm().item() == pytest.approx(norm, abs=1e-8)
    if non_zero is not None:
        assert (golden.lp.grad != 0).sum() == non_zero
    for entry, expected in entries.items():
        assert golden.lp.grad[entry].item() == pytest.approx(expected, abs=1e-6 if "k1" in name else 1e-8)
    assert (golden.lp.grad[~golden.mask] == 0).all()


def test_golden_single_values(golden):
    g, r = golden, fn.log_ratio(golden.lp, golden.lo, golden.mask)

    def token(loss_BT):
        return aggregate(loss_BT, "token", g).item()

    def ppo(high):
        return fn.clipped_surrogate(r, g.A, low=0.2, high=high)

    assert token(ppo(0.272)) == pytest.approx(-0.10610516, abs=1e-8)
    weighted = fn.kl_estimate(g.lp, g.lr, g.mask, "k3-weighted", log_ratio_BT=r)
    assert token(ppo(0.2) + 0.1 * weighted) == pytest.approx(-0.09208848, abs=1e-8)
    unclipped = fn.clipped_surrogate(fn.log_ratio(g.lp, g.lg, g.mask), g.centred, low=1.0, high=math.inf)
    assert token(unclipped) == pytest.approx(-0.07464531, abs=1e-8)
    assert aggregate(unclipped, "sum", g).item() == pytest.approx(33 * -0.07464531, abs=5e-7)
    # a bound on the unclipped ratio alone, above 1 + high, is dual clip; below it is the lower upper bound
    r_bounded = torch.minimum(r, torch.tensor(1.25).double().log())
    both = torch.minimum(r_bounded.exp() * g.A, r.exp().clamp(0.8, 1.28) * g.A)
    assert token(-both) == pytest.approx(-0.10839265, abs=1e-8)


def test_nan_and_infinity_outside_the_mask_touch_nothing():
    mask = torch.tensor([[True, False, False]])
    new = torch.tensor([[-1.0, math.nan, -math.inf]], requires_grad=True)
    old = torch.tensor([[-1.0, -1.0, math.nan]])
    r = fn.log_ratio(new, old, mask)
    weights = fn.token_weights(mask, "token", StepCounts.of(mask))
    correction = fn.correction_weight(old, new.detach(), mask, "seq-tis")
    loss = (fn.clipped_surrogate(r, torch.ones(1, 1), low=0.2, high=0.2) * correction * weights).sum()
    (loss + (fn.kl_estimate(new, old, mask) * weights).sum()).backward()
    assert loss.item() == -1.0
    assert new.grad.tolist() == [[-1.0, 0.0, 0.0]]


def test_a_huge_ratio_stays_finite_and_stops_the_gradient():
    new = torch.tensor([[100.0]], requires_grad=True)
    r = fn.log_ratio(new, torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool))
    loss = fn.clipped_surrogate(r, -torch.ones(1, 1), low=0.2, high=0.2)
    loss.sum().backward()
    assert torch.isfinite(loss).all()
    assert new.grad.item() == 0.0


def test_geo_mask_caps_the_tokens_that_it_keeps():
    lo, lg = torch.tensor([[1.0, -1.0], [1.0, 1.0]]), torch.zeros(2, 2)  # geometric means 1 and e
    weights = fn.correction_weight(lo, lg, torch.ones(2, 2, dtype=torch.bool), "geo-mask", cap=2.0, band=(0.9, 1.1))
    assert weights.tolist() == [[2.0, pytest.approx(math.exp(-1))], [0.0, 0.0]]


def test_corrections_are_detached(golden):
    for kind in ("none", "tis", "mask", "seq-tis", "seq-mask", "geo-mask"):
        assert not fn.correction_weight(golden.lp, golden.lg, golden.mask, kind).requires_grad


MASK, ZEROS = torch.ones(1, 2, dtype=torch.bool), torch.zeros(1, 2)
test_what_cannot_be_aggregated_says_why = refusals(
    (DataError, "at least one trained token", lambda: fn.token_weights(~MASK, "token", StepCounts.of(~MASK))),
    (ConfigError, "max_length", lambda: fn.token_weights(MASK, "dr_grpo", StepCounts.of(MASK))),
    (MissingKeyError, "group_id", lambda: fn.token_weights(MASK, "prompt-mean", StepCounts.of(MASK))),
    (ConfigError, "'seq_mean'.* 'seq-mean'", lambda: fn.token_weights(MASK, "seq_mean", StepCounts.of(MASK))),
    (ConfigError, "KL estimator", lambda: fn.kl_estimate(ZEROS, ZEROS, MASK, "k4")),
    (ConfigError, "correction", lambda: fn.correction_weight(ZEROS, ZEROS, MASK, "is")),
)


def test_the_weighted_k3_is_the_gradient_of_the_kl_in_expectation():
    """Over a whole vocabulary, sampled from an older policy: E[r k3] is KL(pi || ref), and so are the gradients."""
    generator = torch.Generator().manual_seed(0)
    logits, reference, older = (torch.randn(7, generator=generator, dtype=torch.float64) for _ in range(3))
    logits.requires_grad_()
    log_p, log_ref, log_old = (x.log_softmax(-1) for x in (logits, reference, older))
    everywhere = torch.ones(1, 7, dtype=torch.bool)
    (exact,) = torch.autograd.grad((log_p.exp() * (log_p - log_ref)).sum(), logits, retain_graph=True)

    def gradient(kind, sampled_from, ratio=None):
        estimate = fn.kl_estimate(log_p[None], log_ref[None], everywhere, kind, log_ratio_BT=ratio)
        return torch.autograd.grad((sampled_from.exp() * estimate).sum(), logits, retain_graph=True)[0]

    on_policy = log_p.detach()
    torch.testing.assert_close(gradient("k3-weighted", log_old, (log_p - log_old)[None]), exact)
    torch.testing.assert_close(gradient("k3-weighted", on_policy, (log_p - on_policy)[None]), exact)
    torch.testing.assert_close(gradient("k2", on_policy), exact)
    torch.testing.assert_close(gradient("k3+", on_policy), exact)
    assert (gradient("k3", on_policy) - exact).norm() > 0.1 * exact.norm()
    torch.testing.assert_close(gradient("k1", on_policy), torch.zeros_like(exact), atol=1e-12, rtol=0)


def test_sapo_is_the_policy_gradient_at_a_ratio_of_one_and_fades_on_both_sides():
    log_ratio = torch.tensor([[-2.0, 0.0, 2.0]], dtype=torch.float64, requires_grad=True)
    fn.sapo(log_ratio, torch.ones(1, 3, dtype=torch.float64)).sum().backward()
    left, middle, right = log_ratio.grad.flatten().tolist()
    assert middle == pytest.approx(-1.0)
    assert -1.0 < left < 0.0
    assert -1.0 < right < 0.0
    negative = torch.zeros(1, 1, dtype=torch.float64, requires_grad=True)
    fn.sapo(negative, -torch.ones(1, 1, dtype=torch.float64)).sum().backward()
    assert negative.grad.item() == pytest.approx(1.0)


def test_dppo_leaves_out_what_moved_too_far_the_way_that_it_is_pushed():
    old = torch.tensor([[0.5, 0.5, 0.5, 0.5, 0.001]]).log()
    new = torch.tensor([[0.8, 0.2, 0.2, 0.8, 0.1]]).log().requires_grad_()  # the rare token: ratio 100, moved by 0.1
    advantage = torch.tensor([[1.0, 1.0, -1.0, -1.0, 1.0]])
    mask = torch.ones(1, 5, dtype=torch.bool)
    fn.dppo(new, old, mask, advantage, low=0.2, high=0.2).sum().backward()
    assert (new.grad != 0).tolist() == [[False, True, False, True, True]]
    assert new.grad.flatten().tolist() == pytest.approx([0.0, -0.4, 0.0, 1.6, -100.0], rel=1e-4)


def test_a_veto_drops_the_whole_sequence_for_one_token():
    lo = torch.tensor([[0.0, -10.0, 0.0], [0.0, 0.0, -10.0], [0.0, 0.1, 0.2]])
    mask = torch.tensor([[True, True, True], [True, True, False], [True, True, True]])
    veto = fn.sequence_veto(lo, torch.zeros(3, 3), mask, low=1e-4, high=100.0)
    assert veto.any(-1).tolist() == [True, False, False]  # in the second row the impossible token is not trained
    assert veto.all(-1).tolist() == [True, False, False]
    assert fn.sequence_veto(-lo, torch.zeros(3, 3), mask, low=1e-4, high=100.0).any(-1).tolist() == [True, False, False]
