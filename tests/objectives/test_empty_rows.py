"""A conversation without a trained token changes nothing: no loss, no gradient, no metric, whatever the settings."""

import itertools

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import nn

from llmrl.errors import DataError
from llmrl.modules.llm.log_probs import TokenScores
from llmrl.objectives import LossModule
from llmrl.objectives.base import output_fields
from llmrl.objectives.llm import GRPOLoss, SFTLoss


class Table(nn.Module):
    """Log-probs and entropies by token id."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.linspace(-3.0, -0.1, 12, dtype=torch.float64))

    def token_scores(self, input_ids, attention_mask, select, *, entropy=False):
        log_prob = self.table[input_ids]
        other = -log_prob.exp() * log_prob if entropy else None
        return TokenScores(log_prob.masked_fill(~select, 0.0), other, select & (input_ids > 6))


def row(first: int, length: int, trained: int, group: int) -> TensorDict:
    ids = torch.arange(first, first + length)
    old = torch.linspace(-2.0, -0.5, length, dtype=torch.float64)
    return TensorDict(
        tokens=TensorDict(full=ids),
        masks=TensorDict(all_assistant_mask=torch.arange(length) >= length - trained),
        log_probs=TensorDict(full=old),
        next=TensorDict(ref_log_probs=TensorDict(full=old - 0.1)),
        advantage=torch.tensor([[1.0 - group]], dtype=torch.float64),
        group_id=torch.tensor(group),
    )


FULL = [row(0, 5, 3, 0), row(4, 7, 2, 2)]
EMPTY = row(3, 6, 0, 1)  # the only one of its group
PLACES = {"first": [EMPTY, *FULL], "between": [FULL[0], EMPTY, FULL[1]], "last": [*FULL, EMPTY, EMPTY]}


def sft_settings() -> list[dict]:
    names = ("reduction", "normalize_by_seq_length", "loss_function")
    choices = itertools.product(("mean", "sum", "none"), (True, False), ("sft", "minor_sft"))
    reductions = [{"reduction": "token", "loss_function": "sft"}]
    reductions += [dict(zip(names, values, strict=True)) for values in choices]
    return [{**one, "kl_to_ref_coeff": kl} for one in reductions for kl in (None, 0.3)]


def grpo_settings() -> list[dict]:
    names = ("token", "seq-mean", "seq-sum", "dr_grpo", "prompt-mean", "sum", "none")
    common = {"kl_to_ref_coeff": 0.1, "kl_to_inference_coeff": 0.1, "entropy_coeff": 0.01}
    return [{**common, "aggregation": name, "max_length": 8 if name == "dr_grpo" else None} for name in names]


CASES = [(SFTLoss, settings) for settings in sft_settings()] + [(GRPOLoss, settings) for settings in grpo_settings()]


def run(loss_class: type[LossModule], settings: dict, td: TensorDictBase):
    actor = Table()
    loss = loss_class(actor, **settings)
    output = loss(td)
    fields = output_fields(output)
    sum(value.sum() for name, value in fields.items() if name.startswith("loss_")).backward()
    return fields, actor.table.grad


@pytest.mark.parametrize("number", range(len(CASES)))
def test_an_empty_row_changes_nothing(number):
    loss_class, settings = CASES[number]
    expected, gradient = run(loss_class, settings, lazy_stack(FULL))
    for rows in PLACES.values():
        fields, got = run(loss_class, settings, lazy_stack(rows))
        torch.testing.assert_close(got, gradient, atol=1e-12, rtol=0)
        full = torch.tensor([one is not EMPTY for one in rows])
        for name, value in fields.items():
            if name == "empty_rows":
                assert value == (~full).sum()
            elif value.ndim:
                assert (value[~full] == 0).all()
                torch.testing.assert_close(value[full].sum(), expected[name].sum(), atol=1e-12, rtol=0)
            else:
                torch.testing.assert_close(value, expected[name], atol=1e-12, rtol=0)
        assert torch.isfinite(got).all()


@pytest.mark.parametrize("number", range(len(CASES)))
def test_a_step_of_empty_rows_alone_is_an_error(number):
    loss_class, settings = CASES[number]
    with pytest.raises(DataError, match=r"a token to train|at least one trained token"):
        run(loss_class, settings, lazy_stack([EMPTY, EMPTY]))
