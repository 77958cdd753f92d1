"""One round of GRPO: everything between two versions of the policy. The loop around it is `llmrl.recipes.grpo`.

The policy answers every prompt ``group_size`` times, the environment scores the answers, the replay buffer turns scores
into advantages within each group, the loss is stepped on all of it, and the engine gets the new weights.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase

from llmrl.collectors.llm import LLMCollector
from llmrl.collectors.llm.batches import cat_rows
from llmrl.data.replay_buffers import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement
from llmrl.envs.llm.transforms import MaskTruncated, OverlongShaping
from llmrl.envs.transforms import Compose, Transform
from llmrl.errors import ConfigError, RolloutError
from llmrl.modules.llm.engines import Engine
from llmrl.modules.llm.policies import TransformersWrapper
from llmrl.modules.llm.policies.containers import LogProbs
from llmrl.objectives.llm import GroupQuota, GRPOLoss, MCAdvantage
from llmrl.recipes.grpo_config import GRPOConfig
from llmrl.recipes.models import load_model
from llmrl.recipes.planning import grpo_settings
from llmrl.recipes.rollouts import StepRollouts, slim
from llmrl.recipes.session import Session
from llmrl.recipes.state import named_weights
from llmrl.recipes.tasks import make_env
from llmrl.recipes.updates import Updater

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

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
    "masked_fraction": "mismatch/masked_frac",
    "ESS": "mismatch/ess",
}


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
        tokenizer: PreTrainedTokenizerBase,
        rows: Sequence[Mapping[str, Any]],
        *,
        origin: Any,
        runs: Path,
    ):
        self.config, self.session, self.model, self.tokenizer = config, session, model, tokenizer
        advantage_settings, loss_settings = grpo_settings(config, exact=not session.low_precision)
        _check_processes(config, session.world_size, advantage_settings)
        # The policy that samples and the one that is trained share a module, unless its parameters are sharded.
        sampled = copy.deepcopy(model) if session.sharded else model
        options = config.sampling.model_dump(exclude={"max_tokens"}) | {"max_new_tokens": config.sampling.max_tokens}
        self.policy = TransformersWrapper(
            sampled,
            tokenizer=tokenizer,
            generate_kwargs=options,
            prefer_tokens=True if config.env.on_rewrite == "new_record" else "always",
        )
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
        self._reference: Engine | None = None
        if config.grpo.kl:
            frozen = load_model(config.model_copy(update={"model": origin}), tokenizer, runs=runs)
            self._reference = self.policy.get_new_version(model=frozen.to(session.device), generate=False).engine

        num_prompts = config.prompts_per_step // session.world_size
        self.env = make_env(
            config.env,
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
        unfinished = MaskTruncated() if config.truncated == "mask" else Transform()
        self._collected: list[TensorDictBase] = []
        self._told = False
        self.collector = LLMCollector(
            self.env,
            policy=self.policy,
            yield_only_last_steps=True,
            dialog_turns_per_batch=1,  # one batch of conversations, each run to its end
            replay_buffer=self.buffer,
            track_policy_version=True,
            postproc=lambda data: self._collected.append(data) or slim(unfinished.inv(data)),
        )

    def collect(self, step: int) -> tuple[StepRollouts, dict[str, float]]:
        """Fills the buffer with the rollouts of one step.

        Raises  RolloutError if more than ``max_failed`` of them failed
        """
        clock = time.perf_counter()
        self._collected.clear()
        self.buffer.empty()
        self._quota.reset()
        with self.session.autocast():
            self.collector.next()
            for _ in range(self.config.refill_rounds if self.config.zero_variance == "refill" else 0):
                if self.session.any(self._quota.missing > 0):  # the ranks draw their prompts in step
                    self.collector.next()
        seconds = time.perf_counter() - clock
        rollouts = StepRollouts(self.session, cat_rows(self._collected), self.buffer, self.tokenizer)
        metrics = rollouts.metrics(version=self.collector.policy_version, seconds=seconds)
        if metrics["rollout/failed"] > self.config.max_failed * rollouts.num_rows:
            raise RolloutError(
                f"grpo: at most max_failed = {self.config.max_failed:.0%} of a step's rollouts may fail: got "
                f"{metrics['rollout/failed']:.0f} of {rollouts.num_rows} in step {step}. {self.first_error()}"
            )
        return rollouts, metrics

    def update(self, step: int) -> dict[str, float]:
        """One or more updates on what the buffer holds, then the new weights to the engine."""
        clock = time.perf_counter()
        metrics: dict[str, float] = {}
        tokens = 0.0
        sizes = _parts(len(self.buffer), self.config.updates_per_step)
        batches = [self.buffer.sample(size).to(self.session.device) if size else None for size in sizes]
        for batch in batches:
            if batch is not None and self._reference is not None:
                with self.session.autocast():
                    _add_reference(batch, self._reference, self.config.sampling.temperature)
            if self.loss.proximal == "recomputed":
                self.updater.add_proximal(self.loss, batch)
        for batch in batches:
            update = self.updater.step(self.loss, batch, step)
            tokens += update.get("tokens", 0)
            metrics |= {metric: update[name] for name, metric in _FROM_LOSS.items() if name in update}
        updated = time.perf_counter() - clock
        clock = time.perf_counter()
        self.collector.update_policy_weights_(named_weights(self.model) if self.session.sharded else None)
        return metrics | {
            "tokens/trained": tokens,
            "time/update": updated,
            "time/sync": time.perf_counter() - clock,
            "perf/train_tok_s": tokens / updated,
        }

    def new_error(self) -> str:
        """The first traceback of a reward function, the first time that it is asked for."""
        error, self._told = "" if self._told else self.first_error(), True
        return error

    def first_error(self) -> str:
        """The first traceback of a reward function, if one is kept."""
        errors = [getattr(transform, "first_error", None) for transform in self.env.transform.leaves()]
        return next((f"First error:\n{error}" for error in errors if error), "")

    def state_dict(self) -> dict[str, Any]:
        """What continues exactly, beside weights and optimizer; between rounds the buffer holds nothing new."""
        return {
            "collector": self.collector.state_dict(),
            "samplers": self.session.gather([self.buffer.sampler.state_dict()]),  # each rank has its own
            "advantage": self.advantage.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.collector.load_state_dict(state["collector"])
        samplers = state["samplers"]
        self.buffer.sampler.load_state_dict(samplers[self.session.rank % len(samplers)])
        self.advantage.load_state_dict(state["advantage"])


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


def _parts(count: int, num_parts: int) -> list[int]:
    """Sizes that add up to ``count`` and differ by one at most."""
    return [count * (part + 1) // num_parts - count * part // num_parts for part in range(num_parts)]


def _add_reference(batch: TensorDictBase, reference: Engine, temperature: float) -> None:
    """Writes ("next", "ref_log_probs", "full"): the log-probs of the model that the run started from."""
    scores = reference.score(
        batch.get(("tokens", "full"), as_list=True),
        temperature=temperature,
        masks=batch.get(("masks", "all_assistant_mask"), as_list=True),
    )
    batch.set(("next", "ref_log_probs"), LogProbs.from_rows({"full": scores}))
