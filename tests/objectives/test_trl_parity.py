"""The same random batches through TRL's own functions and through ours. Runs where TRL is installed."""

import importlib.util
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from llmrl.objectives import total_loss
from llmrl.objectives.llm import GRPOLoss, StepCounts
from llmrl.objectives.llm import functional as fn
from tests.support.losses import Recorded

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs TRL: pip install trl"),
    pytest.mark.filterwarnings("ignore"),  # TRL's warnings are its own business
]

B, P, R, L_MAX = 8, 3, 7, 9
OURS = {"proximal": "recomputed", "correction": "none", "entropy_bonus": False}
CASES = {  # name: TRL's settings, ours
    "grpo": ({"loss_type": "grpo"}, {"aggregation": "seq-mean"}),
    "dapo": ({"loss_type": "dapo", "epsilon_high": 0.28}, {"aggregation": "token", "clip_epsilon": (0.2, 0.28)}),
    "bnpo": ({"loss_type": "bnpo"}, {"aggregation": "token"}),
    "dr_grpo": ({"loss_type": "dr_grpo"}, {"aggregation": "dr_grpo", "max_length": L_MAX}),
    # TRL's epsilon_high is the bound itself
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.3}, {"surrogate": "cispo", "clip_epsilon": (1.0, 0.3)}),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.05, "epsilon_high": 0.06},
        {"ratio_level": "sequence", "clip_epsilon": (0.05, 0.06), "aggregation": "seq-mean"},
    ),
    "luspo": ({"loss_type": "luspo", "importance_sampling_level": "token"}, {"aggregation": "seq-sum"}),
    "sapo": ({"loss_type": "sapo"}, {"surrogate": "sapo", "aggregation": "seq-mean"}),
    "two-sided": ({"loss_type": "dapo", "delta": 1.5}, {"dual_clip": 1.5}),
    "kl": ({"loss_type": "dapo", "beta": 0.1}, {"kl_to_ref_coeff": 0.1}),
    "kl, weighted": (
        {"loss_type": "grpo", "beta": 0.1, "use_bias_correction_kl": True},
        {"kl_to_ref_coeff": 0.1, "kl_estimator": "k3-weighted", "aggregation": "seq-mean"},
    ),
    "high entropy": ({"loss_type": "dapo", "top_entropy_quantile": 0.3}, {"top_entropy_quantile": 0.3}),
    "on-policy": ({"loss_type": "dapo", "on_policy": True}, {"proximal": "detach"}),
    "token truncation": ({"correct": "token_truncate"}, {"correction": "tis", "correction_cap": 1.2}),
    "token mask": ({"correct": "token_mask"}, {"correction": "mask", "correction_band": (0.0, 1.2)}),
    "sequence truncation": ({"correct": "sequence_truncate"}, {"correction": "seq-tis", "correction_cap": 1.2}),
    "sequence mask": ({"correct": "sequence_mask"}, {"correction": "seq-mask", "correction_cap": 1.2}),
}
TRL_DEFAULTS = {"loss_type": "dapo", "epsilon_low": 0.2, "epsilon_high": 0.2, "beta": 0.0}
TRL_DEFAULTS |= {"top_entropy_quantile": 1.0}
TRL_DEFAULTS |= {"importance_sampling_level": "token", "delta": None, "use_bias_correction_kl": False}


@pytest.fixture(params=range(4))
def numbers(request) -> SimpleNamespace:
    draw = torch.Generator().manual_seed(request.param)

    def normal(scale: float) -> torch.Tensor:
        return scale * torch.randn(B, R, generator=draw, dtype=torch.float64)

    lengths = torch.randint(1, R + 1, (B,), generator=draw)
    old = -1.5 + normal(0.4)
    return SimpleNamespace(
        mask=torch.arange(R) < lengths[:, None],
        old=old,
        new=old + normal(0.25),
        engine=old + normal(0.1),
        reference=old + normal(0.3),
        advantage=torch.randn(B, generator=draw, dtype=torch.float64),
        entropy=torch.rand(B, R, generator=draw, dtype=torch.float32),
    )


def importance_weight(numbers: SimpleNamespace, mode: str) -> torch.Tensor:
    """The weights that TRL's generation step hands to its loss, with a cap of 1.2."""
    log_rho = (numbers.old - numbers.engine) * numbers.mask
    if mode.startswith("sequence"):
        log_rho = log_rho.sum(-1, keepdim=True)
    rho = log_rho.exp()
    return rho.clamp(max=1.2) if mode.endswith("truncate") else rho.masked_fill(rho > 1.2, 0.0)


def trl_loss(numbers: SimpleNamespace, settings: dict) -> tuple[float, torch.Tensor, dict]:
    from trl import GRPOTrainer

    settings = {**TRL_DEFAULTS, **settings}
    correct, on_policy = settings.pop("correct", None), settings.pop("on_policy", False)
    new = numbers.new.clone().requires_grad_()
    trainer = object.__new__(GRPOTrainer)  # its loss needs no model: the log-probs are given
    one_process = SimpleNamespace(
        num_processes=1,
        gather=lambda value: value,
        reduce=lambda value, reduction: value,
        pad_across_processes=lambda value, **_: value,
        sync_gradients=True,
    )
    arguments = {name: settings.pop(name) for name in ("delta", "use_bias_correction_kl")}
    arguments |= {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05, "steps_per_generation": 1}
    vars(trainer).update(
        **settings,
        args=SimpleNamespace(**arguments),
        model=nn.Module().train(),
        accelerator=one_process,
        off_policy_mask_threshold=None,
        aux_loss_enabled=False,
        use_vllm=correct is not None,
        vllm_importance_sampling_correction=correct is not None,
        max_completion_length=L_MAX,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (new, numbers.entropy, None),
    )
    inputs = {
        "prompt_ids": torch.zeros(B, P, dtype=torch.int64),
        "prompt_mask": torch.ones(B, P, dtype=torch.int64),
        "completion_ids": torch.zeros(B, R, dtype=torch.int64),
        "completion_mask": numbers.mask.long(),
        "advantages": numbers.advantage,
        "num_items_in_batch": numbers.mask.sum(),
        "ref_per_token_logps": numbers.reference,
    }
    if not on_policy:
        inputs["old_per_token_logps"] = numbers.old
    if correct is not None:
        inputs["importance_sampling_ratio"] = importance_weight(numbers, correct)
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    return loss.item(), new.grad, trainer._metrics["train"]


def our_loss(numbers: SimpleNamespace, settings: dict, split: list[int]) -> tuple[float, torch.Tensor, list]:
    """Value, gradient and outputs of a step over micro-batches, on prompt and response together."""

    def wide(value: torch.Tensor) -> torch.Tensor:
        return torch.cat([value.new_zeros(B, P), value], 1)

    mask = wide(numbers.mask)
    td = TensorDict(
        tokens=TensorDict(full=torch.zeros(B, P + R, dtype=torch.int64), batch_size=[B]),
        masks=TensorDict(all_assistant_mask=mask, all_attention_mask=torch.ones_like(mask), batch_size=[B]),
        log_probs=TensorDict(full=wide(numbers.engine), batch_size=[B]),
        proximal_log_probs=TensorDict(full=wide(numbers.old), batch_size=[B]),
        next=TensorDict(ref_log_probs=TensorDict(full=wide(numbers.reference), batch_size=[B]), batch_size=[B]),
        advantage=numbers.advantage.view(B, 1, 1),
        batch_size=[B],
    )
    if (share := settings.get("top_entropy_quantile")) is not None:
        threshold = fn.entropy_threshold(numbers.entropy[numbers.mask], share)
        td["top_entropy"] = TensorDict(full=wide((numbers.entropy >= threshold).float()), batch_size=[B])
    counts, value, gradient, metrics = StepCounts.of(mask), 0.0, [], []
    for part, log_prob in zip(td.split(split), wide(numbers.new).split(split), strict=True):
        actor = Recorded(log_prob.clone())
        output = GRPOLoss(actor, **{**OURS, **settings})(part, counts)
        total = total_loss(output)
        total.backward()
        value += total.item()
        gradient.append(actor.log_prob.grad[:, P:])
        metrics.append(output)
    return value, torch.cat(gradient), metrics


@pytest.mark.parametrize("split", [[8], [3, 5]])
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_are_those_of_trl(name, split, numbers):
    theirs, ours = CASES[name]
    expected, gradient, _ = trl_loss(numbers, theirs)
    if name == "two-sided":  # the same algorithm where the bound is above 1 + high
        assert theirs["delta"] > 1 + TRL_DEFAULTS["epsilon_high"]
    got, our_gradient, _ = our_loss(numbers, ours, split)
    tolerance = 1e-6 if name == "sapo" else 1e-12  # TRL's temperatures of the gate are float32
    assert got == pytest.approx(expected, abs=tolerance)
    torch.testing.assert_close(our_gradient, gradient, atol=tolerance, rtol=0)


def test_metrics_are_those_of_trl(numbers):
    _, _, theirs = trl_loss(numbers, {"loss_type": "dapo", "beta": 0.1})
    _, _, (output,) = our_loss(numbers, {"kl_to_ref_coeff": 0.1}, [8])
    assert output.kl_to_ref.item() == pytest.approx(theirs["kl"][0], abs=1e-12)
    assert output.clip_fraction_low.item() == pytest.approx(theirs["clip_ratio/low_mean"][0], abs=1e-6)
    assert output.clip_fraction_high.item() == pytest.approx(theirs["clip_ratio/high_mean"][0], abs=1e-6)
