"""Checkpoints of a recipe: the model in Hugging Face's format, and the state of all other parts in ``trainer.pt``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from transformers.utils.logging import disable_progress_bar

from llmrl.errors import CheckpointError, DataError
from llmrl.run.checkpoint import CheckpointStore
from llmrl.weight_update.groups import whole

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from llmrl.train.distributed import Session

__all__ = ["PerRank", "Stateful", "load_state", "named_weights", "save_state"]

_FILE = "trainer.pt"


class Stateful(Protocol):
    """A part of a run that a checkpoint holds; its state is the same on every rank, or read on the first only."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> Any: ...


class PerRank:
    """A part that is another one on each rank: its state is the list of theirs."""

    def __init__(self, session: Session, part: Stateful):
        self._session, self._part = session, part

    def state_dict(self) -> list[Any]:
        return self._session.gather([self._part.state_dict()])

    def load_state_dict(self, state: list[Any]) -> None:
        self._part.load_state_dict(state[self._session.rank % len(state)])  # saved by another number of ranks, perhaps


def save_state(
    store: CheckpointStore,
    step: int,
    session: Session,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    state: Mapping[str, Any],
) -> None:
    """Writes ``checkpoints/step<step>``: all ranks take part, the first one writes.

    ``state`` is of tensors, numbers, strings, None, and lists, tuples and dicts of them.

    Raises  CheckpointError if it cannot be written, or holds what could not be read back; earlier checkpoints are whole
    """
    disable_progress_bar()  # of writing the weights: it would be the only line of a run that is not ours
    weights = named_weights(model)

    def write(path: Path) -> None:
        model.save_pretrained(path, state_dict=weights)
        tokenizer.save_pretrained(path)
        torch.save({"step": step, "rng": torch.get_rng_state(), **state}, path / _FILE)
        if unsafe := torch.serialization.get_unsafe_globals_in_checkpoint(path / _FILE):
            raise CheckpointError(
                f"{_FILE}: a state must be of tensors, numbers, strings, lists and dicts: got {', '.join(unsafe)}; "
                "correct the state_dict of your environment or transform"
            )

    if session.is_first:
        store.save(step, write)
    session.wait()


def load_state(folder: Path) -> dict[str, Any]:
    """The state that `save_state` wrote; the random state of the process is set as it was. Runs no code of the file.

    Raises  DataError if it is not there, or holds anything but a state
    """
    try:
        state = torch.load(folder / _FILE, map_location="cpu", weights_only=True)
    except Exception as error:
        cause = "it holds what is not a state" if isinstance(error, UnpicklingError) else error
        raise DataError(f"checkpoint {folder}: {_FILE} cannot be read: {cause}.") from error
    torch.set_rng_state(state["rng"])
    if rounds := state.pop("rounds", None):  # until 2026-11 all parts of a GRPO run but the optimizer were one
        state |= {**rounds, "rollouts": rounds}
    return state


@torch.no_grad()
def named_weights(model: nn.Module) -> Mapping[str, Tensor]:
    """The weights by name, each whole on every rank. Where parameters are sharded this is a collective.

    A tied weight comes under each of its names, as in ``state_dict``.
    """
    weights: dict[str, Tensor] = {}
    gathered: dict[int, Tensor] = {}  # a tied weight is gathered once, and stays tied
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in gathered:
            gathered[id(value)] = whole(value)
        weights[name] = gathered[id(value)]
    return weights
