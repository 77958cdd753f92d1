"""Checks that the name of a model or a dataset leads somewhere: to a folder, or the Hugging Face hub; no torch.

Transformers asks the hub several times for each of several files before it gives up. One short request, before
anything is loaded, tells whether that has a chance.
"""

from __future__ import annotations

import os
import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Literal

from llmrl.concurrency.deadline import Calls, ThreadRunner
from llmrl.errors import DataError, closest

SMALL_MODEL = "models/smollm2"  # of the recipes real_sft and real_grpo, made by scripts/real_model
ANSWER_S = 5.0  # for the hub to answer, the look-up of its address included
_NAME = re.compile(r"(\b[\w.-]+\b/)?\b[\w.-]{1,96}\b", re.ASCII)
_OF_A_MODEL = ("config.json", "tokenizer_config.json", "tokenizer.json", "adapter_config.json", "adapter")
_YES = ("1", "ON", "YES", "TRUE")  # as huggingface_hub reads them
_MISSING = "no such repository"


def check_folder(name: str, *, setting: str = "model") -> bool:
    """True if ``name`` is the folder of a model; False if only the hub can have it.

    Raises  DataError for a file, a folder without a model's files, and a path that does not exist
    """
    path = Path(name).expanduser()
    if path.is_dir():
        if any((path / file).exists() for file in _OF_A_MODEL):
            return True
        inside = [str(found.parent) for found in sorted(path.glob("*/config.json"))[-3:]]
        hint = f"; did you mean {' or '.join(inside)}?" if inside else "."
        raise DataError(f"{setting} {name}: a model's folder must hold config.json: it does not{hint}")
    if path.exists():
        raise DataError(
            f"{setting} {name}: must be the folder of a model: it is a file; name the folder that it is in."
        )
    if name == SMALL_MODEL:
        raise DataError(f"{setting} {name}: it is not here; in a checkout of llmrl, scripts/real_model makes it.")
    _check_form(name, setting, "model")
    return False


def check_repository(name: str, *, setting: str, kind: Literal["model", "dataset"] = "model") -> str:
    """Checks that ``name`` is here, or that the hub or its cache has it; a request of at most `ANSWER_S` seconds. If
    the hub does not answer, HF_HUB_OFFLINE is set for what is in its cache.

    Returns  a remark for the user, or ""
    Raises   DataError, with the nearest folder
    """
    if kind == "model" and check_folder(name, setting=setting):
        return ""
    expected = _check_form(name, setting, kind)
    is_cached, hint = any(_caches(name, kind)), _nearest(name)
    if any(os.environ.get(word, "").upper() in _YES for word in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")):
        if is_cached:
            return ""
        raise DataError(f"{expected}, nor is it in the hub's cache {_cache()}; HF_HUB_OFFLINE is set.{hint}")
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    host, file = endpoint.partition("://")[2], "config.json" if kind == "model" else "README.md"
    fault = _ask(f"{endpoint}/{'datasets/' * (kind == 'dataset')}{name}/resolve/main/{file}")
    if fault == _MISSING:
        raise DataError(
            f"{expected}, and {host} has no public {kind} of this name; for a private one: hf auth login.{hint}"
        )
    if fault and is_cached:
        os.environ["HF_HUB_OFFLINE"] = "1"  # else every file is asked for again and again
        return f"{host} does not answer ({fault}): {name} is read from the hub's cache, with HF_HUB_OFFLINE=1"
    if fault:
        raise DataError(
            f"{expected}, and {host} does not answer ({fault}); without a network use a folder, or with "
            f"HF_HUB_OFFLINE=1 what is in the hub's cache.{hint}"
        )
    return ""


def _check_form(name: str, setting: str, kind: str) -> str:
    """The beginning of a message. Raises DataError for a name that the hub cannot have."""
    what = "the folder of a model" if kind == "model" else "a dataset's file or folder"
    begin = f"{setting} {name}: must be {what}, or a name on the hub: "
    if _NAME.fullmatch(name) and not re.search(r"--|\.\.", name):
        return f"{begin}it is not here"
    raise DataError(f"{begin}there is no {Path(name).expanduser().absolute()}.{_nearest(name)}")


def _ask(url: str) -> str:
    """Why a HEAD request for a file of a repository fails; "" if the repository is there, or nothing can be said."""
    if urllib.request.getproxies().get("all"):  # such as a SOCKS proxy, which urllib does not know
        return ""
    runner = ThreadRunner("hub")  # a look-up of the address has no deadline of its own
    [outcome] = runner.run(Calls([partial(_request, url)]), timeout_s=ANSWER_S)
    runner.close()
    return (outcome.value or "") if outcome.done else f"no answer within {ANSWER_S:g} s"


def _request(url: str) -> str:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=ANSWER_S):
            return ""
    except urllib.error.HTTPError as error:
        missing = error.headers.get("X-Error-Code") == "RepoNotFound" and not _is_logged_in()
        return _MISSING if missing else ""  # else it is there, or the request that loads it says more
    except OSError as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLError):  # huggingface_hub may trust other certificates
            return ""
        return getattr(reason, "strerror", None) or str(reason)


def _is_logged_in() -> bool:
    """True if there is a token, with which the hub shows more; it is not sent here."""
    return bool(os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN")) or (_home() / "token").is_file()


def _home() -> Path:
    home = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    return Path(os.environ.get("HF_HOME", f"{home}/huggingface")).expanduser()


def _cache() -> Path:
    given = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    return Path(given).expanduser() if given else _home() / "hub"


def _caches(name: str, kind: str) -> Iterator[Path]:
    """What the caches of huggingface_hub and datasets have of a repository."""
    yield from (_cache() / f"{kind}s--{name.replace('/', '--')}" / "snapshots").glob("*/*")
    if kind == "dataset":
        folder = os.environ.get("HF_DATASETS_CACHE") or str(_home() / "datasets")
        yield from Path(folder).expanduser().glob(f"{name.replace('/', '___')}/*")


def _nearest(name: str) -> str:
    """ " Did you mean ...?" with the folder whose path is nearest to ``name``, or a run of that name; "" for none."""
    path = Path(name).expanduser()
    found = Path(path.anchor)
    for part in path.parts[bool(path.anchor) :]:
        if not (found / part).is_dir():
            try:
                folders = {entry.name.lower(): entry.name for entry in found.iterdir() if entry.is_dir()}
            except OSError:
                return ""
            if (match := closest(part.lower(), folders)) is None:
                runs = [run.parent.name for run in Path("runs").glob("*/config.yaml")]
                match = closest(name, runs)
                return f" Did you mean 'runs/{match}'?" if match else ""
            part = folders[match]
        found /= part
    return f" Did you mean {str(found)!r}?"
