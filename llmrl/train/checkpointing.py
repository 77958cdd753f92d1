"""Checkpoints of a recipe: the model in Hugging Face's format, and the state of all other parts in ``trainer.pt``.

Sharded tensors are in ``shards/``, where each rank writes and reads its own parts; any number of ranks can read them.
No rank ever gathers all of them, or the whole model.
"""

from __future__ import annotations

import copy
import json
import re
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter, load, save
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils.logging import disable_progress_bar

from llmrl.errors import CheckpointError, DataError
from llmrl.modules.llm.packing import unwrapped
from llmrl.modules.llm.vision import save_processor
from llmrl.run.checkpoint import CheckpointStore, cause_of
from llmrl.train.adapter_files import ADAPTER
from llmrl.weight_update.lora import write_adapter
from llmrl.weight_update.publish import as_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from llmrl.train.distributed import Session

_FILE, _SHARDS = "trainer.pt", "shards"
_FILE_BYTES = 1 << 30  # of one model file; a rank holds two in memory: one being written, one being gathered


class Stateful(Protocol):
    """A part of a run that checkpoints store; its state is the same on every rank, or taken from the first."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> Any: ...


def save_state(
    store: CheckpointStore,
    step: int,
    session: Session,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    state: Mapping[str, Any],
    *,
    whole_model: bool = True,
    background: bool = False,
) -> None:
    """Writes ``checkpoints/step<step>``. All ranks take part: each writes its parts of sharded tensors, the first rank
    the rest. With ``background`` a thread flushes it to disk and publishes it (`CheckpointStore.publish`).

    Adapters are written to ``adapter/``; the model with them merged in is written only with ``whole_model``.

    ``state`` consists of tensors, numbers, strings, None, and lists, tuples and dicts of them.

    Raises  CheckpointError if it cannot be written, or could not be read back; earlier checkpoints stay intact
    """
    disable_progress_bar()  # Transformers' own, which would disturb the console
    shards: dict[str, DTensor] = {}
    random = {"rng": torch.get_rng_state(), **cuda_random_states(session)}
    state = {"step": step, **random, **_take_shards(state, shards)}

    def write(path: Path) -> None:
        first = _FirstRank(session, path)
        has_adapters = hasattr(model, "peft_config")
        if has_adapters:
            first.write(_write_adapters, model, path)
        if whole_model or not has_adapters:
            write_model(model, path, session)
        if shards:
            _save_shards(shards, path, session)
        first.write(save_processor, tokenizer, path)
        first.write(_write_state, state, path / _FILE)
        first.check()

    # The draft is renamed to ``step<step>`` last of all: a run that is killed earlier leaves older checkpoints intact.
    with session.raises_on_all():
        if session.is_first:
            store.begin(step)
    with store.undoing(step):
        write(store.draft(step))
    with session.raises_on_all():
        if session.is_first:
            store.publish(step, background=background)


def cuda_random_states(session: Session) -> dict[str, list[Tensor]]:
    """ "cuda_rng": the random state of each rank's GPU, in rank order; {} without GPUs. A collective."""
    if session.device.type != "cuda":
        return {}
    return {"cuda_rng": session.gather([torch.cuda.get_rng_state(session.device)])}


def restore_cuda_random(state: Mapping[str, Any], session: Session) -> None:
    """Restores this rank's of `cuda_random_states`, if the checkpoint has one. After everything that seeds a GPU."""
    states = state.get("cuda_rng", ())
    if session.device.type == "cuda" and session.rank < len(states):
        torch.cuda.set_rng_state(states[session.rank], session.device)


class _FirstRank:
    """Writes on the first rank only. After an error it writes no more, but still takes part in collectives.

    `check`, which all ranks call, then raises CheckpointError on each of them.
    """

    def __init__(self, session: Session, folder: Path):
        self._session, self._folder = session, folder
        self._error: Exception | None = None

    @property
    def writes(self) -> bool:
        return self._session.is_first and self._error is None

    def write(self, function: Callable[..., Any], *arguments: Any) -> None:
        if self.writes:
            try:
                function(*arguments)
            except Exception as error:
                self._error = error

    def check(self) -> None:
        _raise_on_all(self._error, self._folder, self._session)


def _raise_on_all(error: BaseException | None, folder: Path, session: Session) -> None:
    """Raises CheckpointError on all ranks if any rank has an ``error``, with the messages of all."""
    with session.raises_on_all():
        if error is not None:
            ours = isinstance(error, CheckpointError)
            raise CheckpointError(str(error) if ours else cause_of(error, folder, session.who)) from error


def _save_shards(shards: dict[str, DTensor], path: Path, session: Session) -> None:
    """Writes each rank's parts below ``path``. Raises CheckpointError on all ranks, naming those that failed."""
    # A rank holds the file that it writes in memory, so its parts go into files of bounded size, numbered from 1.
    sizes = {name: value.numel() * value.element_size() // session.world_size for name, value in shards.items()}
    files = {name: number + 1 for name, number in _bucket(sizes).items()}
    try:
        save(shards, storage_writer=HuggingFaceStorageWriter(str(path / _SHARDS), files, save_distributed=True))
    except CheckpointException as error:  # raised on all ranks; it is not an Exception
        failed = error.failures.get(session.rank)
        _raise_on_all(failed[0] if failed else None, path, session)


def write_model(model: PreTrainedModel, folder: Path, session: Session) -> None:
    """Writes the model as Transformers and vLLM read it, with adapters merged in. All ranks take part, and write the
    files in turn.

    The weights of one file are gathered at a time, never all: at most ``_FILE_BYTES``, or one decoder layer if that is
    larger.

    Raises  CheckpointError on all ranks if it cannot be written, which names those that could not
    """
    if session.world_size > 1 or hasattr(model, "peft_config"):
        _raise_on_all(_write_parts(model, folder, session), folder, session)
    else:
        first = _FirstRank(session, folder)
        first.write(model.save_pretrained, folder)
        first.check()


def try_writing(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Writes all that a checkpoint has beside weights and state to a temporary folder, before a run trains.

    Raises  CheckpointError for a model whose settings Transformers refuses to write
    """
    try:
        with tempfile.TemporaryDirectory() as folder:
            _write_config(unwrapped(model), Path(folder))
            tokenizer.save_pretrained(folder)
    except Exception as error:  # tokenizers raises no other for a full disk
        raise CheckpointError(
            f"model {model.name_or_path or type(model).__name__}: its checkpoints could not be written, so it is not "
            f"trained: {type(error).__name__}: {error}"
        ) from error


def _write_parts(model: PreTrainedModel, folder: Path, session: Session) -> Exception | None:
    """Writes this rank's files, each in a thread while the next are gathered. Returns what went wrong on this rank,
    which still takes part in the collectives.
    """
    weights, is_sharded = as_weights(model).weights, any(isinstance(value, DTensor) for value in model.parameters())
    model = unwrapped(model)
    sizes = dict.fromkeys(map(_unit, weights), 0)
    for name, value in weights.items():
        sizes[_unit(name)] += value.num_bytes
    unit_files = _bucket(sizes)
    num_files = max(unit_files.values()) + 1
    error: Exception | None = None

    def write_file(part: dict[str, Tensor], file: str) -> list[tuple[str, str]]:
        folder.mkdir(exist_ok=True)
        part = {name: value.contiguous() for name, value in revert_weight_conversion(model, part).items()}
        save_file(part, folder / file, metadata={"format": "pt"})
        return [(name, file) for name in part]

    def written(writing: Future[list[tuple[str, str]]] | None) -> list[tuple[str, str]]:
        nonlocal error
        try:
            return [] if writing is None else writing.result()
        except Exception as caught:
            error = error or caught
            return []

    index: list[tuple[str, str]] = []
    writing = None
    with ThreadPoolExecutor(1, thread_name_prefix="llmrl-model-file") as pool:
        for number in range(num_files):
            is_mine = number % session.world_size == session.rank
            part = {}
            for name, value in weights.items():
                if unit_files[_unit(name)] == number and (is_mine or is_sharded):
                    gathered = value.build()  # a collective, if sharded: also without a write, or after a failed one
                    if is_mine and error is None:
                        part[name] = gathered.cpu()
            if is_mine:
                index += written(writing)
                writing = None
            if part:
                file = f"model-{number + 1:05}-of-{num_files:05}.safetensors" if num_files > 1 else "model.safetensors"
                writing = pool.submit(write_file, part, file)
        index += written(writing)
    index = session.gather(index)
    if session.is_first and error is None:
        try:
            _write_index(model, folder, index if num_files > 1 else [], sum(sizes.values()))
        except Exception as caught:
            return caught
    return error


def _write_index(model: PreTrainedModel, folder: Path, index: Sequence[tuple[str, str]], size: int) -> None:
    if index:
        text = json.dumps({"metadata": {"total_size": size}, "weight_map": dict(sorted(index))}, indent=1)
        (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    _write_config(model, folder)


def _write_adapters(model: PreTrainedModel, folder: Path) -> None:
    (folder / ADAPTER).mkdir()
    write_adapter(model, folder / ADAPTER)
    _write_config(model.get_base_model(), folder)


def _write_state(state: Mapping[str, Any], file: Path) -> None:
    torch.save(state, file)
    if unsafe := torch.serialization.get_unsafe_globals_in_checkpoint(file):
        raise CheckpointError(
            f"{_FILE}: a state must consist of tensors, numbers, strings, lists and dicts: got {', '.join(unsafe)}; "
            "correct the state_dict of your environment or transform"
        )


def _write_config(model: PreTrainedModel, folder: Path) -> None:
    config = copy.deepcopy(model.config)
    config.dtype = str(model.dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__]
    if hasattr(config, "quantization_config"):  # the written weights are not quantised
        del config.quantization_config
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def _unit(name: str) -> str:
    """The unit that is written at once: a decoder layer (files may join or split its weights), or a single weight."""
    return match[0] if (match := re.match(r".*?\.\d+\.", name)) else name


def _bucket(sizes: Mapping[str, int]) -> dict[str, int]:
    """The file number of each name: files have at most ``_FILE_BYTES``, or a single name."""
    numbers, number, size = {}, 0, 0
    for name, num_bytes in sizes.items():
        if size and size + num_bytes > _FILE_BYTES:
            number, size = number + 1, 0
        numbers[name] = number
        size += num_bytes
    return numbers


def _take_shards(state: Any, shards: dict[str, DTensor], path: str = "") -> Any:
    """Copies ``state`` with each sharded tensor replaced by {_SHARDS: name} and moved to ``shards``."""
    if isinstance(state, DTensor):
        shards[path] = state
        return {_SHARDS: path}
    if isinstance(state, Mapping):
        return {key: _take_shards(value, shards, f"{path}/{key}") for key, value in state.items()}
    return state


def load_part(folder: Path, part: Stateful, state: Any) -> None:
    """Loads the saved state of ``part``; shards are read in the layout of this run, sharded or whole."""
    names: dict[str, Any] = {}

    def restored(saved: Any, own: Any) -> Any:
        if not isinstance(saved, dict):
            return saved
        if _SHARDS in saved:
            return names.setdefault(saved[_SHARDS], own)
        return {key: restored(value, own.get(key) if isinstance(own, dict) else None) for key, value in saved.items()}

    if _has_shards(state):  # the part's current state gives the layout of this run
        state = restored(state, part.state_dict())
        reader = HuggingFaceStorageReader(str(folder / _SHARDS))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # intended with one process
            load(names, storage_reader=reader)
    part.load_state_dict(state)


def _has_shards(state: Any) -> bool:
    return isinstance(state, dict) and (_SHARDS in state or any(map(_has_shards, state.values())))


def load_state(folder: Path) -> dict[str, Any]:
    """Reads the state that `save_state` wrote, and restores the CPU's random state. Executes no code from the file.

    Raises  DataError if the file is missing, or contains anything but a state
    """
    try:
        state = torch.load(folder / _FILE, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        cause = "it contains objects that are not a state" if isinstance(error, UnpicklingError) else error
        raise DataError(f"checkpoint {folder}: {_FILE} cannot be read: {cause}.") from error
    try:
        if not isinstance(state, dict):
            raise TypeError(f"got {type(state).__name__}")
        torch.set_rng_state(state["rng"])
        if state["step"] < 0 or not isinstance(state.get("course", {}), dict):
            raise ValueError(f"step {state['step']}, course {state.get('course')!r:.80}")
    except (KeyError, TypeError, RuntimeError, ValueError, AttributeError) as error:
        raise DataError(
            f"checkpoint {folder}: {_FILE} must hold the state of a run: {type(error).__name__}: {error}; it is "
            "damaged, or of another version of llmrl."
        ) from error
    if rounds := state.pop("rounds", None):  # format before 2026-11: all parts of GRPO but the optimizer
        state |= {**rounds, "rollouts": rounds}
    if "advantage" in state:  # format before 2026-12: the groups of the first rank
        state["algorithm"] = {"groups": [state.pop("advantage")], "own": {}}
    return state
