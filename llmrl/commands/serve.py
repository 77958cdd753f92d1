"""``llmrl serve RUN|MODEL``: a model behind an OpenAI-compatible server, for any client."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llmrl.endpoint import Endpoint
from llmrl.modules.llm.conversation import TurnSampler
from llmrl.modules.llm.policies import TransformersWrapper
from llmrl.train.distributed import Session
from llmrl.train.models.loading import load_model, load_tokenizer
from llmrl.train.settings.grpo import SamplingSettings
from llmrl.train.settings.model import ModelSource


def serve(config: ModelSource, *, runs: Path, host: str, port: int, api_key: str | None, max_tokens: int | None) -> int:
    """Serves until Ctrl-C. ``config``: settings of a run, with its checkpoint as the model; or with only a model.

    Sampling is the run's (without a run: temperature 1) unless a request says otherwise. ``max_tokens``: the most of an
    answer, instead of the run's.
    """
    sampling = getattr(config, "sampling", SamplingSettings()).generate_kwargs
    sampling |= {"max_new_tokens": max_tokens} if max_tokens else {}
    place = {"model": str(config.model), "host": host, "port": port, "api_key": api_key}
    with serving(config, sampling, runs=runs, **place) as (_, endpoint):
        print(f"serve     {endpoint.url}/v1", flush=True)
        print(f"          {config.model}; Ctrl-C ends it", flush=True)
        signal.sigwait({signal.SIGINT, signal.SIGTERM})
    return 0


@contextmanager
def serving(
    config: ModelSource, sampling: Mapping[str, Any], *, runs: Path, checked: bool = False, **place: Any
) -> Iterator[tuple[Session, Endpoint]]:
    """Context with a server of the model of ``config``; ``place``: arguments of `Endpoint`, ``checked``: see
    `load_model`.
    """
    with Session(config) as session:
        tokenizer = load_tokenizer(config, runs=runs)
        model = load_model(config, tokenizer, session, runs=runs, checked=checked)
        policy = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs=sampling, batching=True)
        sampler = TurnSampler(policy.renderer, policy.engine, policy.options.params)
        with Endpoint(sampler, **place) as endpoint:
            yield session, endpoint
