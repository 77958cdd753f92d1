"""The base class of losses: configurable TensorDict keys, and outputs that add up over the micro-batches of a step."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar, TypeVar

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor, nn

from llmrl.errors import ConfigError, did_you_mean
from llmrl.objectives.metric import Metric

Output = TypeVar("Output")


class LossModule(nn.Module, abc.ABC):
    """A loss that reads a TensorDict through named keys and returns a record of ``loss_*`` terms and metrics.

    ``default_keys`` maps the names that the loss uses to the TensorDict entries it reads. `set_keys` points a name
    elsewhere; ``tensor_keys`` holds the current choice. ``metrics`` says which fields of the output are logged, and
    ``reads`` names columns of the data that the loss reads beside those of every rollout: a row then keeps them.
    """

    default_keys: ClassVar[Mapping[str, NestedKey]] = {}
    metrics: ClassVar[Mapping[str, Metric]] = {}
    reads: ClassVar[Sequence[NestedKey]] = ()
    reads_reference: bool = False  # ("next", "ref_log_probs", "full"), of the model that the run started from
    reads_mismatched: bool = False  # the sum of `mismatched_log_ratios` over all rows of a step, in its normalizer
    work: float = 1.0  # of a row for the model, where 1 is a forward and a backward pass of all its tokens
    reads_entropy: bool = False  # ("top_entropy", "full"), by its `entropies` before the first update
    reads_proximal: bool = False  # ("proximal_log_probs", "full"), by its `proximal_log_probs` before the first update

    def __init__(self) -> None:
        super().__init__()
        self.tensor_keys = SimpleNamespace(**self.default_keys)

    def set_keys(self, **keys: NestedKey) -> None:
        """Reads from other entries, as in ``loss.set_keys(advantage="my_advantage")``.

        Raises  ConfigError for a name that the loss does not use
        """
        for name in keys:
            if name not in self.default_keys:
                raise ConfigError(
                    f"{type(self).__name__}.set_keys: this loss has no key {name!r}; it reads "
                    f"{', '.join(sorted(self.default_keys))}.{did_you_mean(name, self.default_keys)}"
                )
        vars(self.tensor_keys).update(keys)

    @abc.abstractmethod
    def forward(self, td: TensorDictBase, normalizer: Any = None) -> Any:
        """The loss of one micro-batch, divided by the counts of the whole step if ``normalizer`` gives them.

        Returns  a tensorclass or a dict: terms named ``loss_*``, and detached metrics
        """

    def derived(self, merged: dict[str, Tensor]) -> dict[str, Tensor]:
        """Metrics that cannot be summed over micro-batches and ranks, such as ratios, from the sums of a step."""
        return {}

    def placeholder(self, device: torch.device) -> dict[str, Any]:
        """Columns, beside the conversation's, of a row without a trained token, for a rank that has no rows."""
        return {}


def output_fields(output: Any) -> dict[str, Tensor]:
    """Terms and metrics of an output by name, without the fields that are None."""
    if isinstance(output, Mapping):
        return {name: value for name, value in output.items() if isinstance(value, Tensor)}
    named = {name: getattr(output, name) for name in type(output).__dataclass_fields__}
    return {name: value for name, value in named.items() if isinstance(value, Tensor)}


def shows_values(output: type[Output]) -> type[Output]:
    """Decorates an output class: its ``repr`` shows the numbers, where a tensorclass shows shapes and devices."""

    def values(self: Any) -> str:
        named = output_fields(self).items()
        shown = (f"{name}={value.item():.4g}" if value.numel() == 1 else f"{name}={value}" for name, value in named)
        return f"{type(self).__name__}({', '.join(shown)})"

    output.__repr__ = values  # set here, because a tensorclass replaces the one of the class body
    return output


def total_loss(output: Any) -> Tensor:
    """The sum of the ``loss_*`` terms; call ``backward`` on it."""
    return sum(value for name, value in output_fields(output).items() if name.startswith("loss_"))


def merge_outputs(outputs: Sequence[Output]) -> Output:
    """The output of a whole step from those of its micro-batches, detached.

    Terms and metrics are already divided by the counts of the step, so they are summed; fields ending in ``_max`` take
    the maximum. A metric that is neither, such as ESS, is computed from the sums by ``derived`` of the output class.
    """
    if not outputs:
        raise ConfigError("merge_outputs: needs the output of at least one micro-batch, got none.")
    parts = [output_fields(output) for output in outputs]
    merged = {}
    for name in parts[0]:
        values = torch.stack([part[name].detach() for part in parts])
        merged[name] = values.amax(0) if name.endswith("_max") else values.sum(0)
    if isinstance(outputs[0], Mapping):
        return merged
    merged |= type(outputs[0]).derived(merged) if hasattr(type(outputs[0]), "derived") else {}
    return type(outputs[0])(**merged, batch_size=[])
