"""Checkpoints of a recipe: the model in Hugging Face's format, and beside it what an exact continuation needs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.utils.logging import disable_progress_bar

from llmrl.errors import CheckpointError, DataError
from llmrl.run.checkpoint import CheckpointStore
from llmrl.run.console import warn
from llmrl.weight_update.groups import whole

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from llmrl.train.distributed import Session
    from llmrl.train.updater import Updater

__all__ = ["load_state", "named_weights", "restore_state", "save_state"]

_FILE = "trainer.pt"


def save_state(
    store: CheckpointStore,
    step: int,
    *,
    session: Session,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    updater: Updater,
    **parts: Any,
) -> Path | None:
    """Writes ``checkpoints/step<step>``: all ranks take part, the first one writes and returns the folder.

    ``parts`` are state dicts by name, the same on every rank or only read on the first: tensors, numbers, strings,
    None, and lists, tuples and dicts of them.

    Raises  CheckpointError if it cannot be written, or holds what could not be read back; earlier checkpoints are whole
    """
    disable_progress_bar()  # of writing the weights: it would be the only line of a run that is not ours
    weights = named_weights(model)
    optimizer = updater.state_dict()
    folder = None
    if session.is_first:
        state = {"step": step, "optimizer": optimizer, "rng": torch.get_rng_state(), **parts}

        def write(path: Path) -> None:
            model.save_pretrained(path, state_dict=weights)
            tokenizer.save_pretrained(path)
            torch.save(state, path / _FILE)
            if unsafe := torch.serialization.get_unsafe_globals_in_checkpoint(path / _FILE):
                raise CheckpointError(
                    f"{_FILE}: a state must be of tensors, numbers, strings, lists and dicts: got {', '.join(unsafe)}; "
                    "correct the state_dict of your environment or transform"
                )

        folder = store.save(step, write)
    session.wait()
    return folder


def restore_state(store: CheckpointStore, session: Session) -> tuple[Path, dict[str, Any]]:
    """The newest whole checkpoint and its state, on every rank; damaged ones are named and set aside by the first.

    Raises  DataError if none can be read
    """
    ((folder, faults),) = session.gather([store.restore()] if session.is_first else [])
    for fault in faults:
        warn(session.console, f"{fault} It is kept as damaged-*; going on from {folder.name}.")
    return folder, load_state(folder)


def load_state(folder: Path) -> dict[str, Any]:
    """What `save_state` wrote beside the model; the random state of the process is set as it was. Runs no code of it.

    Raises  DataError if it is not there, or holds anything but a state
    """
    try:
        state = torch.load(folder / _FILE, map_location="cpu", weights_only=True)
    except Exception as error:
        cause = "it holds what is not a state" if isinstance(error, UnpicklingError) else error
        raise DataError(f"checkpoint {folder}: {_FILE} cannot be read: {cause}.") from error
    torch.set_rng_state(state["rng"])
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
