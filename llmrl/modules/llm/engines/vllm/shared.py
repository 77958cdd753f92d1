"""`SharedVLLMEngine`: one tensor-parallel vLLM in the processes of several ranks, on the GPUs that they train on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from llmrl.errors import UnsupportedError
from llmrl.modules.llm.engines.base import Generation, Hear, SamplingParams
from llmrl.modules.llm.engines.vllm.compat import JOINS_RANKS
from llmrl.modules.llm.engines.vllm.engine import VLLMEngine
from llmrl.modules.llm.vision import Media, has_images


class _Call(NamedTuple):
    """What a rank asks of the engine. ``params`` None: `score` at ``temperature``, else `generate`."""

    rows: list[list[int]]
    params: SamplingParams | None
    seeds: Sequence[int] = ()
    temperature: float = 1.0


class SharedVLLMEngine(VLLMEngine):
    """A `VLLMEngine` whose weights and KV cache are divided over the ranks of ``group``, a part in each one's process.

    `generate` and `score` are collectives of the group: the engine computes the rows of all ranks and returns to each
    its own. Inside `joined` the ranks may call a different number of times. Weights, sleep and version are those of
    each rank's part; every rank loads all weights, of which vLLM keeps its part.

    group    the process group, of neighbouring ranks on one machine, in the order of their GPUs
    options  as of `VLLMEngine`; the executor and ``tensor_parallel_size`` are set here

    Raises  UnsupportedError for images, and for answers that are heard while they are sampled
    """

    streams = False

    def __init__(self, model: str | Path | Any, *, group: dist.ProcessGroup, **options: Any) -> None:
        self._group, self._rank = group, dist.get_rank(group)
        parallel = {"tensor_parallel_size": dist.get_world_size(group)}
        super().__init__(model, **options | parallel, distributed_executor_backend=JOINS_RANKS)

    def generate(
        self,
        prompts: Sequence[Tensor],
        params: SamplingParams,
        *,
        seeds: Sequence[int] | None = None,
        media: Sequence[Media] | None = None,
        hear: Hear | None = None,
    ) -> Generation:
        if has_images(media) or hear is not None:
            raise UnsupportedError("SharedVLLMEngine: an engine of several ranks takes no images and is not heard.")
        self.check(params)
        seeds = self._seeds(seeds, len(prompts))  # each rank's own
        found = self._together(_Call(self._rows(prompts, "a prompt", 1), params, seeds))
        home = prompts[0].device if len(prompts) else torch.device("cpu")
        for rows in (found.ids, found.log_probs, found.plain_log_probs or []):
            rows[:] = [row.to(home) for row in rows]
        return found

    def _score_rows(self, rows: list[list[int]], temperature: float, media: Sequence[Media] | None) -> list[Tensor]:
        if has_images(media):
            raise UnsupportedError("SharedVLLMEngine: an engine of several ranks takes no images.")
        return self._together(_Call(rows, None, temperature=temperature))

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Context in which each rank may call as often as it needs to: one that is done computes the others' rows."""
        yield
        while self._gathered(None):
            pass

    def _together(self, call: _Call) -> Any:
        return self._gathered(call)[self._rank]

    def _gathered(self, call: _Call | None) -> dict[int, Any]:
        """Runs what all ranks ask, in the same order on each; the results by rank, {} if no rank asks."""
        calls: list[_Call | None] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(calls, call, group=self._group)
        found: dict[int, Any] = {}
        asked = {rank: each for rank, each in enumerate(calls) if each is not None}
        for rank, each in asked.items():
            if each.params is None:  # alone, as rounding depends on the batch
                found[rank] = super()._score_rows(each.rows, each.temperature, None)
            elif rank not in found:  # with all that is sampled alike
                ranks = [other for other, its in asked.items() if its.params == each.params]
                found |= self._generate([asked[other] for other in ranks], ranks)
        return found

    def _generate(self, calls: Sequence[_Call], ranks: Sequence[int]) -> dict[int, Generation]:
        rows = [torch.tensor(row, dtype=torch.int64) for call in calls for row in call.rows]
        seeds = [seed for call in calls for seed in call.seeds]
        drawn = super().generate(rows, calls[0].params, seeds=seeds)
        found, begin = {}, 0
        for rank, call in zip(ranks, calls, strict=True):
            part = slice(begin, begin + len(call.rows))
            plain = None if drawn.plain_log_probs is None else drawn.plain_log_probs[part]
            own = drawn.ids[part], drawn.log_probs[part], plain, drawn.stop_reasons[part]
            found[rank] = Generation(*own, drawn.version)
            begin = part.stop
        return found
