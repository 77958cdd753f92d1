"""``llmrl export RUN DIR``: a checkpoint as a model folder for Transformers, vLLM and the hub, with a model card."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from llmrl.commands.show import changes
from llmrl.errors import ConfigError, DataError
from llmrl.modules.llm.rendering import Renderer
from llmrl.modules.llm.vision import model_class
from llmrl.report.page import HEADLINES
from llmrl.run.checkpoint import CHECKSUMS, check_files
from llmrl.run.console import make_console, print_summary
from llmrl.run.files import share_files, writing
from llmrl.run.masking import masked, masked_info
from llmrl.run.metrics import read_metrics
from llmrl.run.run_dir import RunDir
from llmrl.train.adapter_files import ADAPTER, adapter_in, base_of
from llmrl.train.distributed import Session
from llmrl.train.models.loading import load_model, load_tokenizer
from llmrl.train.models.reward import load_reward_model
from llmrl.train.settings.model import ModelSource
from llmrl.train.settings.preferences import RewardConfig

_OF_THE_RUN = {CHECKSUMS, "trainer.pt"}


def export(
    run: RunDir,
    folder: Path,
    *,
    config: ModelSource,
    checkpoint: Path,
    dtype: str,
    merge: bool,
    push: str | None,
    public: bool,
) -> int:
    """Writes ``folder``: weights in ``dtype``, tokenizer, chat template, generation config, README.md; returns 0.

    ``merge``  for a run with adapters: export the merged model instead of the adapters alone
    ``push``   a hub repository to upload the folder to, private unless ``public``

    Tensors are read one at a time and files written one at a time. The folder appears complete or not at all.

    Raises  ConfigError if ``folder`` is not empty, or there are no adapters to merge; DataError if the checkpoint is
            damaged or the hub refuses the upload; RunFolderError if ``folder`` cannot be written
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder}  exists and is not an empty folder; choose a new or empty one")
    has_adapters = (checkpoint / ADAPTER).is_dir()
    if merge and not has_adapters:
        raise ConfigError(f"--merge  adds adapters to a model: the checkpoint {checkpoint} has none; leave it out")
    adapters, judges = has_adapters and not merge, isinstance(config, RewardConfig)
    files = [checkpoint / name for name in check_files(checkpoint)]  # no other file of the folder is exported
    with _whole_or_absent(folder) as draft:
        if adapters:
            _cast_files(checkpoint / ADAPTER, files, draft, dtype)
            kept = {"config.json"} if judges else set()  # it says that there is one label
            _copy(checkpoint, files, draft, {"config.json", "generation_config.json"} - kept)
        else:
            if adapter_in(str(checkpoint)) is not None:
                _merge(config, checkpoint, run.path.parent, draft, dtype)
            else:
                _cast_files(checkpoint, files, draft, dtype)
            _copy(checkpoint, files, draft, set())
            _set_dtype(draft / "config.json", dtype)
        if (draft / "generation_config.json").exists():
            _set_generation(draft, config, checkpoint)
        (draft / "README.md").write_text(_card(run, config, push or folder.name, checkpoint, adapters=adapters))
        share_files(draft, like=draft / "README.md")
    summary = [f"{sum(path.stat().st_size for path in folder.iterdir()) / 2**20:.1f} MiB in {dtype}"]
    if push is not None:
        summary.append(_push(folder, push, private=not public))
    load = _loading(config, checkpoint, str(folder), adapters=adapters)
    print_summary(make_console(), summary, files=str(folder), facts=[("load", load)])
    return 0


@contextmanager
def _whole_or_absent(folder: Path) -> Iterator[Path]:
    """A draft folder that is renamed to ``folder`` at the end, or removed if the block fails."""
    # It is beside `folder`, because a rename is atomic only within one file system.
    draft = folder.with_name(f".{folder.name}.draft-{os.getpid()}")
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft.mkdir()
        try:
            yield draft
            os.rename(draft, folder)
        except BaseException as error:
            shutil.rmtree(draft, ignore_errors=True)
            if isinstance(error, SafetensorError) and (number := re.search(r"os error (\d+)", str(error))):
                raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
            raise


def _cast_files(source: Path, files: Sequence[Path], target: Path, dtype: str) -> None:
    """Copies the weight files with floating-point tensors cast to ``dtype``; an adapter's JSON files unchanged."""
    own = sorted(path for path in files if path.parent == source)
    for path in (path for path in own if path.suffix == ".safetensors"):
        with safe_open(path, framework="pt") as file:
            names = file.keys()
            save_file(
                {name: _cast(file.get_tensor(name), dtype) for name in names}, target / path.name, file.metadata()
            )
    for path in (path for path in own if path.suffix == ".json"):
        if path.name == "model.safetensors.index.json":
            index = json.loads(path.read_text())
            size = sum(file.stat().st_size for file in target.glob("model*.safetensors"))  # with their headers
            index["metadata"]["total_size"] = size
            (target / path.name).write_text(json.dumps(index, indent=1))
        elif source.name == ADAPTER:
            shutil.copy(path, target)


def _cast(value: torch.Tensor, dtype: str) -> torch.Tensor:
    return value.to(getattr(torch, dtype)) if value.is_floating_point() else value


def _merge(config: ModelSource, checkpoint: Path, runs: Path, draft: Path, dtype: str) -> None:
    source = config.model_copy(update={"model": str(checkpoint), "lora": None})
    with Session(source) as session:
        tokenizer = load_tokenizer(source, runs=runs)
        load = load_reward_model if isinstance(config, RewardConfig) else load_model
        model = load(source, tokenizer, session, runs=runs, checked=True)
        model.to(dtype=getattr(torch, dtype)).save_pretrained(draft)


def _copy(checkpoint: Path, files: Sequence[Path], draft: Path, left_out: set[str]) -> None:
    """Copies the tokenizer and model files that ``draft`` still lacks, without the run's own files."""
    for path in (path for path in files if path.parent == checkpoint):
        known = path.name in _OF_THE_RUN | left_out or path.name.startswith("model") or (draft / path.name).exists()
        if not known:
            shutil.copy(path, draft)


def _set_dtype(path: Path, dtype: str) -> None:
    def change(value: Any, name: str = "") -> Any:
        if isinstance(value, dict):
            return {inner: change(own, inner) for inner, own in value.items()}
        return dtype if name in ("dtype", "torch_dtype") else value

    path.write_text(json.dumps(change({"dtype": dtype, **json.loads(path.read_text())}), indent=2) + "\n")


def _set_generation(draft: Path, config: ModelSource, checkpoint: Path) -> None:
    """Writes the stop tokens of the chat template and the run's sampling into the generation config."""
    tokenizer = load_tokenizer(config.model_copy(update={"model": str(checkpoint)}), runs=checkpoint.parent)
    # A template ends a turn with its own token; a model that stops only at eos would also write the next turn.
    stops = list(Renderer(tokenizer).stop_token_ids)
    path = draft / "generation_config.json"
    settings = json.loads(path.read_text()) | {"eos_token_id": stops if len(stops) > 1 else stops[0]}
    if (sampling := getattr(config, "sampling", None)) is not None and sampling.temperature > 0:
        settings |= {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p}
        settings |= {"max_new_tokens": sampling.max_tokens}
    path.write_text(json.dumps(settings, indent=2) + "\n")


def _card(run: RunDir, config: ModelSource, name: str, checkpoint: Path, *, adapters: bool) -> str:
    """The model card: base model, training command, measures, settings and how to load it."""
    info = masked_info(run.read_info())
    base = base_of(checkpoint / ADAPTER) if (checkpoint / ADAPTER).is_dir() else config.model
    named = isinstance(base, str) and not Path(base).exists() and not base.startswith("latest:")  # on the hub
    head = ["---", f"library_name: {'peft' if adapters else 'transformers'}"]
    head += [f"base_model: {base}"] if named else []
    head += [f"tags: [llmrl, {info['command']}]", "---", ""]
    text = [f"# {name}", "", f"Trained from {_code(base if isinstance(base, str) else 'a random tiny model')} by"]
    text += ["", f"    llmrl {info['command']} {' '.join(map(str, info.get('arguments', [])))}", ""]
    text += [f"with llmrl {info.get('llmrl', '?')}; this is {checkpoint.name}.", ""]
    steps = read_metrics(run.path) if run.metrics.exists() else []
    if measured := changes(steps) if steps else []:
        text += ["| measure | before | after |", "|---|---|---|"]
        text += [f"| {_measure_name(measure)} | {before:.3f} | {after:.3f} |" for measure, before, after in measured]
        text += [""]
    text += ["Settings that were given:", ""]
    for setting, place in sorted(info.get("origins", {}).items()):
        text.append(f"- {_code(f'{setting}: {_value(config, setting)}')} ({place})")
    return "\n".join([*head, *text, "", *_example(config, name, checkpoint, adapters=adapters), ""])


def _measure_name(measure: str) -> str:
    return HEADLINES.get(measure) or HEADLINES.get(f"{measure}/mean") or measure.removeprefix("eval/")


def _example(config: ModelSource, name: str, checkpoint: Path, *, adapters: bool) -> list[str]:
    """What to install, and code that runs as it stands: it generates an answer, or scores one."""
    kind = _model_class(config, checkpoint)
    judges, reads_images = isinstance(config, RewardConfig), kind == "AutoModelForImageTextToText"
    reader, variable = ("AutoProcessor", "processor") if reads_images else ("AutoTokenizer", "tokenizer")
    text: object = "What is 2 + 2?"
    messages = [{"role": "user", "content": [{"type": "text", "text": text}] if reads_images else text}]
    messages += [{"role": "assistant", "content": "4"}] if judges else []
    asked = "" if judges else "add_generation_prompt=True, "
    asked += 'tokenize=True, return_dict=True, return_tensors="pt"'
    code = [
        *(["import torch"] if judges else []),
        *(["from peft import PeftModel"] if adapters else []),
        f"from transformers import {', '.join(sorted([kind, reader]))}",
        "",
        f"{variable} = {reader}.from_pretrained({json.dumps(name)})",
        f"model = {_loading(config, checkpoint, name, adapters=adapters)}",
        f"messages = {json.dumps(messages)}",
        f"inputs = {variable}.apply_chat_template(messages, {asked})",
    ]
    if judges:
        code += ["with torch.no_grad():", "    print(float(model(**inputs).logits[0, 0]))  # larger is better"]
    else:
        code += ["output = model.generate(**inputs, max_new_tokens=256)"]
        code += [f'print({variable}.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))']
    packages = ["torch", "transformers", *(["peft"] if adapters else []), *(["pillow"] if reads_images else [])]
    return ["```sh", f"pip install {' '.join(packages)}", "```", "", "```python", *code, "```"]


def _model_class(config: ModelSource, checkpoint: Path) -> str:
    """The class of transformers that loads the model, or the one below adapters."""
    if isinstance(config, RewardConfig):
        return "AutoModelForSequenceClassification"
    return model_class(str(checkpoint)).__name__


def _loading(config: ModelSource, checkpoint: Path, name: str, *, adapters: bool) -> str:
    """The expression that loads what was exported as ``name``."""
    kind = _model_class(config, checkpoint)
    if not adapters:
        return f"{kind}.from_pretrained({json.dumps(name)})"
    labels = ", num_labels=1" if isinstance(config, RewardConfig) else ""
    base = f"{kind}.from_pretrained({json.dumps(base_of(checkpoint / ADAPTER))}{labels})"
    return f"PeftModel.from_pretrained({base}, {json.dumps(name)})"


def _value(config: ModelSource, name: str) -> Any:
    value: Any = masked(config.model_dump(mode="json"))
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _code(text: str) -> str:
    return f"`{text.replace('`', chr(39))}`"


def _push(folder: Path, repository: str, *, private: bool) -> str:
    """Uploads the folder and returns its URL. Raises DataError if the hub refuses or cannot be reached."""
    from huggingface_hub import HfApi

    try:
        url = HfApi().create_repo(repository, private=private, exist_ok=True)
        HfApi().upload_folder(repo_id=repository, folder_path=folder, commit_message="Model by llmrl")
    except Exception as error:  # from any library on the way to the hub
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        raise DataError(
            f"--push {repository}: the hub must take the model: {reason}; log in with `hf auth login`. The model is in "
            f"{folder}, complete."
        ) from error
    return str(url)
