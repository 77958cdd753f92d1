"""Checkpoints of a recipe: the model in Hugging Face's format, and beside it what an exact continuation needs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.utils.logging import disable_progress_bar

from llmrl.checkpoint import CheckpointStore
from llmrl.errors import CheckpointError
from llmrl.weight_update.groups import whole

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from llmrl.recipes.session import Session
    from llmrl.recipes.updates import Updater

__all__ = ["load_state", "named_weights", "save_state"]

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

    ``parts`` are state dicts by name, the same on every rank or only read on the first.

    Raises  CheckpointError if it cannot be written; earlier checkpoints are whole
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

        folder = store.save(step, write)
    session.wait()
    return folder


def load_state(folder: Path) -> dict[str, Any]:
    """What `save_state` wrote beside the model; the random state of the process is set as it was.

    Raises  CheckpointError if it is not there, or broken
    """
    try:
        state = torch.load(folder / _FILE, map_location="cpu", weights_only=False)
    except Exception as error:
        raise CheckpointError(f"checkpoint {folder}: {_FILE} cannot be read: {error}") from error
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
