"""One round of GRPO: everything between two versions of the policy. The loop around it is `llmrl.recipes.grpo`.

The policy answers every prompt ``group_size`` times, the environment scores the answers, the replay buffer turns scores
into advantages within each group, the loss is stepped on all of it, and the engine gets the new weights.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase

from llmrl.collectors.llm import LLMCollector
from llmrl.collectors.llm.batches import cat_rows
from llmrl.data.replay_buffers import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement
from llmrl.envs.llm.transforms import MaskTruncated, OverlongShaping, RetrieveLogProb
from llmrl.envs.transforms import Compose, Transform
from llmrl.errors import ConfigError, RolloutError
from llmrl.modules.llm.policies import TransformersWrapper
from llmrl.objectives.llm import GroupQuota, GRPOLoss, MCAdvantage
from llmrl.train.async_rollouts import RolloutsAhead
from llmrl.train.distributed import Session
from llmrl.train.env_metrics import env_metrics
from llmrl.train.grpo_config import GRPOConfig
from llmrl.train.models import load_model
from llmrl.train.plan import grpo_settings
from llmrl.train.rollout_engine import RolloutEngine
from llmrl.train.step_rollouts import StepRollouts, slim
from llmrl.train.tasks import Task
from llmrl.train.updater import Updater

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["GRPORound"]

_FROM_LOSS = {
    "loss": "policy/loss",
    "grad_norm": "policy/grad_norm",
    "lr": "policy/lr",
    "entropy": "policy/entropy",
    "ratio_mean": "policy/ratio_mean",
    "clip_fraction_low": "policy/clip_low_frac",
    "clip_fraction_high": "policy/clip_high_frac",
    "kl_to_ref": "policy/kl_ref",
    "kl_approx": "mismatch/kl",
    "mismatch_mean": "mismatch/logp_abs_mean",
    "mismatch_max": "mismatch/logp_abs_max",
    "correction_mean": "mismatch/is_mean",
    "correction_max": "mismatch/is_max",
    "masked_fraction": "mismatch/masked_frac",
    "ESS": "mismatch/ess",
}
_BEFORE_UPDATES = ("mismatch_mean", "mismatch_max", "kl_approx", "ESS")  # later they measure what the updates changed


class GRPORound:
    """The pieces, put together once: ``policy`` samples, ``updater`` trains ``model``, ``collector`` fills ``buffer``.

    ``origin`` is the model that the run started from: the reference of a KL term.

    Raises  ConfigError for settings that this number of processes cannot keep
    """

    def __init__(
        self,
        config: GRPOConfig,
        session: Session,
        model: PreTrainedModel,
        task: Task,
        rows: Sequence[Mapping[str, Any]],
        *,
        origin: Any,
        runs: Path,
    ):
        tokenizer = task.tokenizer
        self.config, self.session, self.model, self.tokenizer = config, session, model, tokenizer
        options = config.sampling.model_dump(exclude={"max_tokens"}) | {"max_new_tokens": config.sampling.max_tokens}
        self.sampler = RolloutEngine(config, session, model, tokenizer, options)
        self.policy = self.sampler.policy
        advantage_settings, loss_settings = grpo_settings(config, exact=self.sampler.exact)
        _check_processes(config, session.world_size, advantage_settings)
        actor = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs=options, generate=False)
        self.updater = Updater(
            session,
            actor.scorer,
            config.optim,
            steps=config.steps,
            tokens_per_microbatch=config.tokens_per_microbatch,
            packing=config.packing,
        )
        actor.scorer = self.updater.scorer
        self.loss = GRPOLoss(actor, **loss_settings)
        self._reference: RetrieveLogProb | None = None
        if config.grpo.kl:
            frozen = load_model(config.model_copy(update={"model": origin}), tokenizer, runs=runs)
            reference = actor.get_new_version(model=frozen.to(session.device))
            self._reference = RetrieveLogProb(reference, log_probs_full_key=("ref_log_probs", "full"))

        num_prompts = config.prompts_per_step // session.world_size
        self.env = task.make_env(
            rows,
            num_envs=num_prompts,
            repeats=config.group_size,
            group_repeats=True,
            seed=config.seed,
            rank=session.rank,
            world_size=session.world_size,
        )
        if config.overlong_buffer:
            self.env.append_transform(OverlongShaping(config.sampling.max_tokens, config.overlong_buffer))
        self.advantage = MCAdvantage(config.group_size, **advantage_settings)
        self._quota = GroupQuota(num_prompts)
        self.buffer = ReplayBuffer(
            storage=LazyStackStorage(self.env.batch_size[0] * config.env.max_records),
            sampler=SamplerWithoutReplacement(),
            transform=Compose(self._quota, self.advantage),  # writes meet the advantage first
            generator=torch.Generator().manual_seed(config.seed),
        )
        self._unfinished = MaskTruncated() if config.truncated == "mask" else Transform()
        self._told = False
        self.collector = LLMCollector(
            self.env,
            policy=self.policy,
            yield_only_last_steps=True,
            dialog_turns_per_batch=1,  # one batch of conversations, each run to its end
            track_policy_version=True,
            concurrency=config.rollout.concurrency,
            retries=config.env.retries,
        )
        self._ahead = RolloutsAhead(self.collector, session) if config.rollout.max_staleness else None
        self._unsent = False  # weights that the engine does not have yet

    def collect(self, step: int) -> tuple[StepRollouts, dict[str, float]]:
        """Fills the buffer with the rollouts of one step.

        With ``max_staleness`` 1 they were sampled during the last update, and those of the next step begin now.

        Raises  RolloutError if more than ``max_failed`` of them failed
        """
        clock = time.perf_counter()
        self.buffer.empty()
        self._quota.reset()
        collected = [self._ahead.take() if self._ahead else self._sample()]
        sync = self._send()
        self._store(collected[0])
        for _ in range(self.config.refill_rounds if self.config.zero_variance == "refill" else 0):
            if self.session.any(self._quota.missing > 0):  # the ranks draw their prompts in step
                collected.append(self._sample())
                self._store(collected[-1])
        if self._ahead and step < self.config.steps:
            self._ahead.begin()
        seconds = time.perf_counter() - clock
        rollouts = StepRollouts(self.session, cat_rows(collected), self.buffer, self.tokenizer)
        metrics = rollouts.metrics(version=self.collector.policy_version, seconds=seconds) | sync
        metrics |= env_metrics(self.session, cat_rows(collected))
        if metrics["rollout/failed"] > self.config.max_failed * rollouts.num_rows:
            raise RolloutError(
                f"grpo: at most max_failed = {self.config.max_failed:.0%} of a step's rollouts may fail: got "
                f"{metrics['rollout/failed']:.0f} of {rollouts.num_rows} in step {step}. {self.first_error()}"
            )
        return rollouts, metrics

    def update(self, step: int) -> dict[str, float]:
        """One or more updates on what the buffer holds, then the new weights to the engine."""
        clock = time.perf_counter()
        updates: list[dict[str, float]] = []
        sizes = _parts(len(self.buffer), self.config.updates_per_step)
        batches = [self.buffer.sample(size).to(self.session.device) if size else None for size in sizes]
        for batch in batches:
            if batch is not None and self._reference is not None:
                with self.session.autocast():
                    self._reference(batch)
            if self.loss.proximal == "recomputed":
                self.updater.add_proximal(self.loss, batch)
        for batch in batches:
            updates.append(self.updater.step(self.loss, batch, step))
        updated = time.perf_counter() - clock
        tokens = sum(update.get("tokens", 0) for update in updates)
        self._unsent = True
        sync = {} if self._ahead else self._send()
        return (
            _over_updates(updates)
            | sync
            | {
                "tokens/trained": tokens,
                "time/update": updated,
                "perf/train_tok_s": tokens / updated,
            }
        )

    def idle(self, seconds: float) -> dict[str, float]:
        """Which shares of a step trainer and engine waited for each other; nothing where they take turns."""
        return self._ahead.idle(seconds) if self._ahead else {}

    def settle(self) -> None:
        """Returns when the engine has the weights as they are now, as an evaluation needs them."""
        if self._ahead:
            self._ahead.wait()
            self._send()

    def _sample(self) -> TensorDictBase:
        if self._ahead:
            return self._ahead.sample()
        with self.session.autocast():
            return self.collector.rollout()

    def _store(self, data: TensorDictBase) -> None:
        self.sampler.set_probe_sequences(data.get(("tokens", "full"), as_list=True))
        self.buffer.extend(slim(self._unfinished.inv(data)))

    def _send(self) -> dict[str, float]:
        """The weights to the engine, unless it has them; nothing is being sampled meanwhile."""
        if not self._unsent:
            return {}
        clock = time.perf_counter()
        proof = self.sampler.push(self.updater.scorer)
        self._unsent = False
        return proof | {"time/sync": time.perf_counter() - clock}

    def close(self) -> None:
        """Ends what still samples, the environment and an engine of its own."""
        self.collector.shutdown(close_env=False)
        self.sampler.close()
        if self._ahead:
            self._ahead.close()
        self.env.close()

    def new_error(self) -> str:
        """The first traceback of the env, a reward or a user, the first time that it is asked for."""
        error, self._told = "" if self._told else self.first_error(), True
        return error

    def first_error(self) -> str:
        """The first traceback of the env, of a reward function or of a user, if one is kept."""
        errors = [getattr(part, "first_error", None) for part in (self.collector, *self.env.transform.leaves())]
        return next((f"First error:\n{error}" for error in errors if error), "")

    def state_dict(self) -> dict[str, Any]:
        """What continues exactly, beside weights and optimizer; between rounds the buffer holds nothing new."""
        collecting = self._ahead.state_dict() if self._ahead else {"collector": self.collector.state_dict()}
        version = self.collector.policy_version
        ahead = collecting.get("ahead")
        batches = self.session.gather([ahead and ahead["batch"]])  # each rank has its own, as it has a sampler
        if None not in batches:
            ahead = {"collector": {**ahead["collector"], "version": version}, "batches": batches}
        return {
            "collector": {**collecting["collector"], "version": version + self._unsent},
            "ahead": ahead if None not in batches else None,
            "samplers": self.session.gather([self.buffer.sampler.state_dict()]),
            "advantage": self.advantage.state_dict(),
            "probes": self.sampler.probes,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        ahead = state["ahead"]
        if self._ahead and ahead and len(ahead["batches"]) == self.session.world_size:
            self.collector.load_state_dict(ahead["collector"])
            self._ahead.restore(ahead["batches"][self.session.rank], before=state["collector"])
            self._unsent = True  # the batch is of the version before: the weights are counted as one once it is taken
        else:
            self.collector.load_state_dict(state["collector"])
        samplers = state["samplers"]
        self.buffer.sampler.load_state_dict(samplers[self.session.rank % len(samplers)])
        self.advantage.load_state_dict(state["advantage"])
        self.sampler.set_probe_sequences(state["probes"])


def _check_processes(config: GRPOConfig, world_size: int, advantage: Mapping[str, Any]) -> None:
    if config.prompts_per_step % world_size:
        raise ConfigError(
            f"prompts_per_step {config.prompts_per_step} must be a multiple of the {world_size} processes"
        )
    if world_size > 1 and (advantage["scale"] == "batch" or advantage.get("whiten")):
        raise ConfigError(
            f"algo {config.algo} divides by what is measured over a whole batch, of which each of the {world_size} "
            "processes has a part: use one process, or an algorithm that looks at groups"
        )


def _over_updates(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The metrics of a step from those of its updates: means over their tokens, and the largest of maxima.

    >>> updates = [{"loss": 1.0, "ratio_max": 1.0, "ESS": 1.0, "lr": 0.1, "tokens": 30.0}]
    >>> updates += [{}, {"loss": 2.0, "ratio_max": 1.5, "ESS": 0.8, "lr": 0.1, "tokens": 10.0}]
    >>> metrics = _over_updates(updates)
    >>> metrics["policy/loss"], metrics["mismatch/ess"]
    (1.25, 1.0)
    """
    updates = [update for update in updates if update]
    metrics = {}
    for name, metric in _FROM_LOSS.items():
        values = [update[name] for update in updates if name in update]
        if not values:
            continue
        if name in _BEFORE_UPDATES or len(set(values)) == 1:
            metrics[metric] = values[0]
        elif name.endswith("_max"):
            metrics[metric] = max(values)
        else:
            tokens = [update["tokens"] for update in updates]
            metrics[metric] = sum(v * n for v, n in zip(values, tokens, strict=True)) / sum(tokens)
    return metrics


def _parts(count: int, num_parts: int) -> list[int]:
    """Sizes that add up to ``count`` and differ by one at most."""
    return [count * (part + 1) // num_parts - count * part // num_parts for part in range(num_parts)]
