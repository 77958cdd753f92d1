"""What vLLM does to the process that imports and builds it, kept out or put back: environment, seeds, groups, noise."""

from __future__ import annotations

import logging
import os
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy
import torch

from llmrl.optional import require

__all__ = ["environment", "process_state", "quiet", "undone_on_failure", "without_binding"]


@contextmanager
def environment(**wanted: str) -> Iterator[None]:
    """Variables that vLLM reads while it is imported and built, unless they are set already. Afterwards the environment
    is as it was: vLLM leaves a dozen variables behind, LD_PRELOAD among them.
    """
    before = dict(os.environ)
    defaults = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_LOGGING_STREAM": "ext://sys.stderr", "VLLM_NO_USAGE_STATS": "1"}
    for name, value in (defaults | wanted).items():
        os.environ.setdefault(name, value)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@contextmanager
def quiet() -> Iterator[None]:
    """What vLLM says of itself while it is imported and built is not shown, unless VLLM_LOGGING_LEVEL asks for it;
    errors are. Used inside `environment`.
    """
    logger = logging.getLogger("vllm")
    if logger.level == logging.NOTSET and not logger.handlers:  # else somebody has decided, vLLM itself for one
        logger.setLevel(os.environ["VLLM_LOGGING_LEVEL"].upper())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def process_state() -> Iterator[None]:
    """Puts back the global seeds, and the function that vLLM's CPU worker replaces by one that does nothing."""
    set_num_threads, python_state, numpy_state = torch.set_num_threads, random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        torch.set_num_threads = set_num_threads
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)


@contextmanager
def without_binding() -> Iterator[None]:
    """Keeps vLLM's CPU worker from binding this process, in which others work too, to the memory of one node."""
    require("vllm._custom_ops", extra="vllm", used_by="VLLMEngine")  # makes the name known
    operations, name = torch.ops._C, "init_cpu_memory_env"
    if not hasattr(operations, name):  # vLLM for a GPU
        yield
        return
    bind = getattr(operations, name)
    setattr(operations, name, lambda nodes: None)
    try:
        yield
    finally:
        setattr(operations, name, bind)


@contextmanager
def undone_on_failure() -> Iterator[None]:
    """Ends the process groups that an engine opened in this process, where it could not be built: vLLM leaves them
    open, and the next engine would find them. There must be none before.
    """
    try:
        yield
    except BaseException:
        groups = require("vllm.distributed.parallel_state", extra="vllm", used_by="VLLMEngine")
        groups.cleanup_dist_env_and_memory()
        raise
