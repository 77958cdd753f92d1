"""Adapter folders as peft writes them: where they are, their base model and tokenizer, and the settings of their LoRA.

Reads names and settings only, without torch; `llmrl.train.models.lora` reads the weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmrl.errors import DataError

ADAPTER = "adapter"  # folder in a checkpoint
SETTINGS = "adapter_config.json"
_HEADS = ("score", "classifier")  # output layers of classifiers, which peft trains in full without being asked


def start_adapter(model: object) -> Path | None:
    """The folder ``model`` if it is an adapter, with which training goes on; None for any other model."""
    if not isinstance(model, str) or not ((folder := Path(model).expanduser()) / SETTINGS).is_file():
        return None
    return None if any(folder.glob("model*.safetensors")) else folder


def adapter_in(folder: object) -> Path | None:
    """The adapter in place of a whole model: a folder by peft, or that of a checkpoint; None if there is none."""
    if (start := start_adapter(folder)) is not None or not isinstance(folder, str):
        return start
    inside = Path(folder) / ADAPTER
    return inside if inside.is_dir() and not any(Path(folder).glob("model*.safetensors")) else None


def read_settings(adapter: Path) -> dict[str, Any]:
    """The content of ``adapter_config.json``. Raises DataError if it cannot be read."""
    try:
        found = json.loads((adapter / SETTINGS).read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError(f"an object is expected, got {type(found).__name__}")
    except (OSError, ValueError) as error:
        raise DataError(f"adapter {adapter}: {SETTINGS} cannot be read: {error}.") from error
    return found


def base_of(adapter: Path, given: str | None = None) -> str:
    """The base model of an adapter: ``given``, or the one that its settings name, a folder or a hub name.

    Raises  DataError if that is not a name, or a folder that does not exist
    """
    settings = read_settings(adapter)
    named = given or settings.get("base_model_name_or_path")
    remedy = "give it as model_options.base_model=..., a folder or a hub name."
    if not named:
        raise DataError(f"adapter {adapter}: {SETTINGS} must name the base model: it names none; {remedy}")
    if not Path(named).is_dir() and (Path(named).is_absolute() or named.startswith(".")):
        raise DataError(f"adapter {adapter}: its base model must exist: {named} does not; {remedy}")
    if not given and settings.get("revision") not in (None, "", "main"):
        raise DataError(
            f"adapter {adapter}: its base is revision {settings['revision']!r} of {named}: download that, and {remedy}"
        )
    return str(named)


def tokenizer_of(adapter: Path, given: str | None = None) -> str:
    """Where the tokenizer of an adapter is: in its folder, in its checkpoint, or with its base model."""
    folders = [adapter, *([adapter.parent] if adapter.name == ADAPTER else [])]
    own = (str(folder) for folder in folders if (folder / "tokenizer_config.json").is_file())
    return next(own, None) or base_of(adapter, given)


def lora_settings(adapter: Path) -> dict[str, Any] | None:
    """The settings of the section ``lora`` with which an adapter was made; None for an adapter of another kind.

    Raises  DataError if its files cannot be read
    """
    settings = read_settings(adapter)
    if settings.get("peft_type") != "LORA":
        return None
    if missing := [name for name in ("r", "lora_alpha") if name not in settings]:
        raise DataError(f"adapter {adapter}: {SETTINGS} must have {' and '.join(missing)}, as peft writes it.")
    names = [name.rpartition(".lora_A.")[0] for name in _weight_names(adapter)]  # settings may hold a pattern
    saved = sorted({_last(name) for name in settings.get("modules_to_save") or ()}.difference(_HEADS))
    return {
        "r": settings["r"],
        "alpha": settings["lora_alpha"],
        "rslora": bool(settings.get("use_rslora")),
        "dropout": settings.get("lora_dropout") or 0.0,
        "target_modules": sorted({_last(name) for name in names if name}),
        "modules_to_save": saved,
    }


def disagreements(given: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, str]:
    """What is wrong with ``given`` settings of ``lora`` that the adapter's weights fix, by name."""
    fixed = {name: given[name] for name in own.keys() & given.keys() if name != "dropout"}
    as_set = {name: sorted(value) if isinstance(value, list) else value for name, value in fixed.items()}
    differ = sorted(name for name, value in as_set.items() if value != own[name])
    # Which layers "all-linear" means is known once the model's layers are: `lora_rows` compares them.
    differ = [name for name in differ if (name, given[name]) != ("target_modules", "all-linear")]
    return {name: f"must be {own[name]}, as in the adapter: got {given[name]}; leave it out" for name in differ}


def _weight_names(adapter: Path) -> list[str]:
    """The names in the header of the adapter's weights."""
    path = adapter / "adapter_model.safetensors"
    try:
        with open(path, "rb") as file:
            return list(json.loads(file.read(int.from_bytes(file.read(8), "little"))))
    except (OSError, ValueError, MemoryError, OverflowError) as error:
        raise DataError(
            f"adapter {adapter}: must hold {path.name}: it cannot be read: {error}; files of torch (.bin) are written "
            "again as such by peft's save_pretrained."
        ) from error


def _last(name: str) -> str:
    return name.rpartition(".")[2]
