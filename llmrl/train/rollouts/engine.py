"""The engine that samples during a run: Transformers with the trainer's weights, or vLLM with a copy of them."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from tensordict import TensorDictBase
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils.rnn import pad_sequence

from llmrl.concurrency.environment import environment
from llmrl.errors import ConfigError, DataError, LLMRLError, WeightSyncError
from llmrl.modules.llm.engines import AsyncVLLMEngine, Engine, TransformersEngine, VLLMEngine
from llmrl.modules.llm.engines.vllm.gauges import gauge_metrics, merged
from llmrl.modules.llm.engines.vllm.shared import SharedVLLMEngine
from llmrl.modules.llm.log_probs import TokenScorer
from llmrl.modules.llm.policies import LLMWrapperBase, TransformersWrapper, vLLMWrapper
from llmrl.modules.llm.vision import POSITIONS, read_media
from llmrl.train.data.lengths import microbatches
from llmrl.train.distributed import Session
from llmrl.train.planning.engines import EnginePlan, load_engine
from llmrl.train.ray_servers import RayServers, connect
from llmrl.train.settings.grpo import GRPOConfig
from llmrl.weight_update import SyncProbe, WeightGroups, adapter_folder, publish
from llmrl.weight_update.publish import as_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_NUM_PROBES, _PROBE_TOKENS = 8, 64  # rows per rank, sampled tokens per row
_SILENCE_S = 30.0  # a server is given up after this time; a whole run keeps it busy
_PROBED_VERSIONS = 20  # versions for which rows are compared before newer rows replace them


class RolloutEngine:
    """The policy that samples, and the transfer of new weights to its engine.

    ``model``   as it was loaded: vLLM reads the same files
    ``plan``    of a vLLM engine (`plan_engine`); None: the trainer's module samples
    ``reports_routes``, ``max_cached_tokens``  for Transformers; with vLLM the plan decides
    ``policy``  for the collector; without vLLM it shares the trainer's module
    ``warning`` the problem that the probe found after the last push; "" if none
    """

    warning = ""

    def __init__(
        self,
        config: GRPOConfig,
        session: Session,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        plan: EnginePlan | None = None,
        *,
        reports_routes: bool = False,
        max_cached_tokens: int | None = None,
    ):
        self.session, self.model = session, model
        self._has_copy = config.rollout.engine != "transformers"  # of the weights; otherwise it shares the trainer's
        plan = plan or EnginePlan()
        self._takes_adapter, self._sleeps = bool(plan.options.get("enable_lora")), plan.sleeps
        self._folder: tempfile.TemporaryDirectory[str] | None = None  # of Ray servers; deleted when collected
        self._probe = SyncProbe(factor=config.rollout.probe_factor, any_problem=self._first_problem)
        self._probed: TensorDictBase | None = None  # the newest rollouts, the source of compared rows
        self._probed_images: list[dict[str, Any]] = []  # of the compared rows
        self._probed_parts: list[list[int]] = []  # those rows by the trainer's passes, as many on each rank
        self._budget = config.tokens_per_microbatch
        self._probed_since: int | None = None  # the first version for which these rows are compared
        with ExitStack() as self._parts:  # closed by `close`, or at once if a later part fails
            self._build(config, plan, tokenizer)
            if isinstance(engine := self.policy.engine, TransformersEngine) and not self._has_copy:
                engine.reports_routes, engine.max_cached_tokens = reports_routes, max_cached_tokens
            self._parts = self._parts.pop_all()

    def _build(self, config: GRPOConfig, plan: EnginePlan, tokenizer: PreTrainedTokenizerBase) -> None:
        """Creates servers, engine and policy; sends the trainer's weights to engines that may have others."""
        session = self.session
        servers = self._place_servers(config, plan, tokenizer) if plan.ray else plan.servers
        self._on_servers = bool(servers)
        prefer = True if config.env.on_rewrite == "new_record" else "always"
        wrapping = {"tokenizer": tokenizer, "generate_kwargs": config.sampling.generate_kwargs, "prefer_tokens": prefer}
        wrapping["max_conversation_tokens"] = config.env.max_conversation_tokens
        self.policy: LLMWrapperBase
        own = config.rollout.own_engine
        if own is not None:
            made = self._parts.enter_context(closing(make_own_engine(*own, self.model, tokenizer)))
            self.policy = LLMWrapperBase(made, **wrapping)
        elif config.rollout.engine == "vllm":
            vllm = self._parts.enter_context(closing(self._make_vllm(config, plan, servers, tokenizer)))
            self.policy = vLLMWrapper(vllm, **wrapping)
        else:
            self.policy = TransformersWrapper(self.model, **wrapping)
        engine = self.policy.engine
        # Servers score at temperature 1 only. Changing the temperature would have to wait for answers in flight.
        self._temperature = 1.0 if servers or engine.in_flight == "continue" else config.sampling.temperature
        # Of the ranks that share an engine (the same server addresses) only the first sends weights.
        place = engine.address or f"rank {session.rank}"
        self._sends = session.gather([place]).index(place) == session.rank
        self._precision = self._agreed_precision(engine)
        if servers or own is not None or (config.lora and self._has_copy):
            self._send(engine.version)  # their weights are unknown; a local vLLM has only the base model's

    def _agreed_precision(self, engine: Engine) -> tuple[torch.dtype | None, tuple[str, ...]]:
        """`Engine.weight_precision`, the same on all ranks, which gather weights together; none if they need not."""
        mine: list[tuple[torch.dtype | None, tuple[str, ...]]] = []
        if self.session.sharded and self._has_copy and not self._takes_adapter:
            if self._sends:
                with suppress(LLMRLError):  # the first push says what is wrong
                    mine = [engine.weight_precision()]
            mine = self.session.gather(mine)
        return mine[0] if mine else (None, ())

    def _make_vllm(
        self, config: GRPOConfig, plan: EnginePlan, servers: Sequence[str], tokenizer: PreTrainedTokenizerBase
    ) -> VLLMEngine | AsyncVLLMEngine:
        """The engine of the plan. Raises DataError if there are no files of the model that vLLM can read."""
        settings, session, model = config.rollout, self.session, self.model
        if config.lora and not servers and not model.name_or_path:
            raise DataError(
                f"model {config.model}: its run must have finished, because vLLM reads the whole model from files: its "
                "newest checkpoint has adapters only; finish it with llmrl resume."
            )
        begin = session.rank % len(servers) if servers else 0  # each rank calls another server first
        source = [*servers[begin:], *servers[:begin]] or model.name_or_path or model  # a path: its files
        common = {"tokenizer": tokenizer, "devices": plan.devices, "seed": config.seed, "silence_s": _SILENCE_S}
        by_group = settings.max_staleness > 1 or settings.oversample > 0
        torch.cuda.empty_cache()  # what loading the model left in torch's cache is not free for the engine
        overlaps = bool(settings.max_staleness) and session.device.type == "cpu"
        with _half_the_threads() if overlaps else nullcontext():
            if by_group and not servers:  # groups in flight continue with new weights
                ages = {"in_flight": "continue", "max_age": settings.max_staleness}
                engine = AsyncVLLMEngine(source, **ages, **common, **plan.options)
            elif plan.parts > 1:
                del common["devices"]
                engine = SharedVLLMEngine(source, group=session.engine_group, **common, **plan.options)
            else:
                built = {} if servers else plan.options
                engine = VLLMEngine(source, own_process=plan.own_process, **common, **built)
        engine.update_s = 0.9 * config.parallel.timeout_s  # it times out before the ranks that wait for it
        return engine

    def _place_servers(self, config: GRPOConfig, plan: EnginePlan, tokenizer: PreTrainedTokenizerBase) -> Sequence[str]:
        """The URLs of servers that the first rank starts through Ray. Raises WorkerError on all ranks if one fails."""

        def place() -> Sequence[str]:
            model, options = self.model.name_or_path, dict(plan.options)
            if not model:  # no files: its weights are sent before the first rollout
                self._folder = tempfile.TemporaryDirectory(prefix="llmrl-model-")
                model, options["load_format"] = self._folder.name, "dummy"
                for part in (self.model.config, tokenizer):
                    part.save_pretrained(model)
            wait_s = 0.9 * config.parallel.timeout_s
            servers = RayServers(connect(plan.ray.address), plan.ray, model, options, wait_s=wait_s)
            return self._parts.enter_context(closing(servers)).urls

        return self.session.on_first(place)

    def set_probe_rows(self, data: TensorDictBase, scorer: TokenScorer) -> None:
        """Keeps the rollouts ``data`` for the probe; the first call, before any push, also selects rows from them."""
        if self._has_copy:
            self._probed = data
            if self._probed_since is None:
                self._use_probed_rows(scorer)

    def push(self, scorer: TokenScorer) -> dict[str, float]:
        """Sends new weights to the engine and checks that they arrived.

        Returns  "perf/sync_gb_s", the speed; "mismatch/probe", the mean |log-prob difference| on rows of this run;
                 "mismatch/probe_warnings", 1 if that looked wrong and the weights were sent once more
        Raises   WeightSyncError if they do not arrive, or the probe fails for several versions
        """
        engine = self.policy.engine
        version = engine.version + 1
        send = partial(self._send, version)
        if self._probed_since is None:
            send()
            return self._speed()
        mean, self.warning = self._probe.prove(send, self._engine_scores, partial(self._score, scorer))
        if not self.warning and version - self._probed_since >= _PROBED_VERSIONS:
            self._use_probed_rows(scorer)
        return {"mismatch/probe": mean, "mismatch/probe_warnings": float(bool(self.warning))} | self._speed()

    def _speed(self) -> dict[str, float]:
        """Speed of the last push; empty if the engine shares the trainer's weights, or receives adapters."""
        speed = self.policy.engine.load_speed
        return {"perf/sync_gb_s": speed / 1e9} if speed else {}

    def _send(self, version: int) -> None:
        """Sends the weights once to each engine. Raises WeightSyncError on all ranks if that fails on any."""
        engine, sends = self.policy.engine, self._sends
        if self._on_servers:
            self.session.wait()  # no rank may sample now: a row would mix two versions
        error, labels = "", None
        try:
            if self._takes_adapter:
                with adapter_folder(self.model) as folder:
                    engine.update_adapter(folder, version=version)
            else:
                weights = as_weights(self.model) if self._has_copy else None
                if isinstance(weights, WeightGroups):
                    weights = weights.cast(*self._precision)
                publish(weights, engine, version, again=engine.version == version, sends=sends)
            labels = engine.core.labels if self._on_servers and sends else None
        except WeightSyncError as caught:
            error = str(caught)
            if self._on_servers and "llmrl resume" not in error:
                error += " Start the server again, then continue from the newest checkpoint with llmrl resume."
        # Failures are exchanged before they are raised: otherwise the other ranks would wait for this one.
        answers = self.session.gather([(error, labels)])
        if error := next((error for error, _ in answers if error), ""):
            raise WeightSyncError(error)
        if self._on_servers and not sends:  # this rank uses them to recognise servers with other weights
            engine.core.labels = next(labels for _, labels in answers if labels is not None)

    def _use_probed_rows(self, scorer: TokenScorer) -> None:
        """Selects rows of the newest rollouts for the probe; engine and trainer must have the same weights now."""
        rows = _probe_rows(self._probed)
        # Scoring may be a collective: ranks with fewer rows score placeholder rows.
        missing = max(self.session.gather([len(rows)])) - len(rows)
        rows += [(torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.bool), {})] * missing
        sequences, masks = [ids for ids, _, _ in rows], [mask for _, mask, _ in rows]
        self._probed_images = [images for _, _, images in rows]
        alone = [[row] for row in range(len(rows))]  # computes what an engine does that scores rows one by one
        self._probed_parts = microbatches([len(ids) for ids in sequences], self._budget)
        # Only a sharded model, which is gathered for each pass, is worth the rounding of a batch; placeholders have no
        # images, and a batch has them in all rows or in none.
        if not self.session.sharded or self.session.any(any(self._probed_images)):
            self._probed_parts = alone
        more = max(self.session.gather([len(self._probed_parts)])) - len(self._probed_parts)
        self._probed_parts += [[0]] * more
        self._probe.use(sequences, masks, self._engine_scores, partial(self._score, scorer))
        self._probed_since = self.policy.engine.version

    def _engine_scores(self, sequences: Sequence[Tensor]) -> list[Tensor]:
        """The engine's log-probs, row by row: rounding depends on the batch, and equal weights must give equal bits."""
        score = partial(self.policy.engine.score, temperature=self._temperature)
        return [score([ids.cpu()], **images)[0] for ids, images in zip(sequences, self._probed_images, strict=True)]

    def _first_problem(self, problem: str) -> str:
        """The problem of the first rank that has one, so that all ranks push again, or all raise."""
        return next(filter(None, self.session.gather([problem])), "")

    def _score(self, scorer: TokenScorer, sequences: Sequence[Tensor]) -> list[Tensor]:
        """The trainer's log-prob of each token given the previous ones; all ranks must call it together."""
        scores: dict[int, Tensor] = {}
        for part in self._probed_parts:  # always the same batches, as rounding depends on them
            ids_BT = pad_sequence([sequences[row] for row in part], batch_first=True).to(self.session.device)
            lengths = [len(sequences[row]) for row in part]
            real_BT = (torch.arange(ids_BT.shape[1]) < torch.tensor(lengths)[:, None]).to(ids_BT.device)
            images = self._probed_images[part[0]]
            found_BT = scorer(ids_BT, real_BT, real_BT, temperature=self._temperature, **images).log_probs
            found = [found_T[:length] for found_T, length in zip(found_BT, lengths, strict=True)]
            scores |= dict(zip(part, found, strict=True))
        # FSDP2 keeps the outermost parameters gathered for a backward pass, and there is none here; a checkpoint that
        # is written now needs them sharded, as the optimizer has them.
        for module in scorer.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return [scores[row] for row in range(len(sequences))]

    def take_gauges(self) -> dict[str, float]:
        """Metrics of all ranks' vLLM engines since the last call, each engine counted once; a collective."""
        if not self._has_copy:
            return {}
        shared = self.session.engine_group
        counts = self._sends and (shared is None or dist.get_rank(shared) == 0)
        own = [self.policy.engine.take_gauges()] if counts else []
        return gauge_metrics(merged(self.session.gather(own)))

    def sleep(self) -> None:
        """Frees the engine's GPU memory for the update, if they share a GPU; the next `push` wakes the engine."""
        if self._sleeps:
            self.policy.engine.sleep(keep_weights=self._takes_adapter)

    def close(self) -> None:
        """Stops the local engine, and servers that were started for it. A second call does nothing."""
        self._parts.close()


def make_own_engine(
    name: str, options: Mapping[str, Any], model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> Engine:
    """The engine that the user's function makes. Raises ConfigError if it is not an `Engine`."""
    engine = load_engine(name, options)(model, tokenizer=tokenizer, **options)
    if not isinstance(engine, Engine):
        raise ConfigError(
            f"rollout.engine: {name} must return an Engine, a subclass of llmrl.modules.llm.engines.Engine: got "
            f"{type(engine).__name__}."
        )
    return engine


def _probe_rows(data: TensorDictBase) -> list[tuple[Tensor, Tensor, dict[str, Any]]]:
    """One row per group, cut after some sampled tokens; the mask of those tokens; and "media" if it has images."""
    media = read_media(data)
    ids, masks = data.get(("tokens", "full"), as_list=True), data.get(("masks", "all_assistant_mask"), as_list=True)
    chosen: dict[int, tuple[Tensor, Tensor, dict[str, Any]]] = {}
    for row, group in enumerate(data.get("group_id").tolist()):
        sampled = masks[row].cpu().nonzero().flatten().tolist()
        if sampled and group not in chosen and len(ids[row]) > 1:
            end = sampled[:_PROBE_TOKENS][-1] + 1
            images = {}
            if media is not None and len(places := media[row][POSITIONS]):
                if int(places[-1]) >= end:  # an image of a later turn, beyond the cut
                    continue
                images = {"media": [media[row]]}
            chosen[group] = ids[row][:end].cpu(), masks[row][:end].cpu(), images
    return list(chosen.values())[:_NUM_PROBES]


def _half_the_threads() -> AbstractContextManager[None]:
    """Context in which started processes use half of this process's number of threads.

    When trainer and engine compute at the same time on one CPU, with all cores each, both lose a third of their speed.
    The trainer keeps all threads: the engine waits for it, and it has the CPU to itself once rollouts are finished.
    """
    return environment("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // 2)))
