"""Group-relative policy optimisation: ``llmrl grpo sums_grpo``, or ``torchrun -m llmrl.recipes.grpo sums_grpo.yaml``.

Read `train` from top to bottom: that is the whole algorithm. Which GRPO it is (Dr. GRPO, DAPO, GSPO, CISPO, RLOO ...)
is four settings of `MCAdvantage` and `GRPOLoss`, printed at the start. ``grpo_minimal.py`` is the same in 40 lines.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":  # before torch is imported: the command reports bad settings without it, and prepares for it
    from llmrl.run.cli import main

    sys.exit(main(["grpo", *sys.argv[1:]]))

import time
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase

from llmrl.collectors.llm import LLMCollector
from llmrl.collectors.llm.batches import cat_rows
from llmrl.data.replay_buffers import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement
from llmrl.envs.llm.transforms import MaskTruncated, OverlongShaping, RetrieveLogProb
from llmrl.envs.transforms import Compose, Transform
from llmrl.errors import ConfigError
from llmrl.modules.llm.policies import TransformersWrapper
from llmrl.objectives.llm import GroupQuota, GRPOLoss, MCAdvantage
from llmrl.run.console import grpo_columns
from llmrl.train.async_rollouts import RolloutSource
from llmrl.train.checkpointing import PerRank
from llmrl.train.dealing import attention_share, deal_batch
from llmrl.train.distributed import Session
from llmrl.train.engine_plan import EnginePlan, plan_engine
from llmrl.train.evaluation import Evaluator
from llmrl.train.memory import GPU
from llmrl.train.model_shape import model_shape
from llmrl.train.models import load_model, load_tokenizer, meta_model
from llmrl.train.plan import grpo_plan, grpo_settings, samples_exactly
from llmrl.train.rollout_engine import RolloutEngine
from llmrl.train.run import Run
from llmrl.train.settings import GRPOConfig
from llmrl.train.step_rollouts import StepRollouts, select_training_columns
from llmrl.train.tasks import Task, eval_rows, training_rows
from llmrl.train.updater import make_updater, step_metrics

if TYPE_CHECKING:
    from llmrl.envs.llm import DatasetChatEnv

__all__ = ["plan", "run"]


def plan(config: GRPOConfig, *, runs: Path, gpu: GPU | None = None) -> list[tuple[str, str]]:
    """Rows of label and text that describe a run of ``config``, on the machine that is here or on ``gpu``.

    Loads the tokenizer and the data, no weights.
    """
    return plan_with_engine(config, runs=runs, gpu=gpu)[0]


def plan_with_engine(
    config: GRPOConfig, *, runs: Path, gpu: GPU | None = None
) -> tuple[list[tuple[str, str]], EnginePlan | None]:
    """The rows of `plan`, and the engine that is in them."""
    tokenizer = load_tokenizer(config, runs=runs)
    with closing(Task(config.env, tokenizer)) as task, Session(config) as session:
        prompts, dropped = task.fit_prompts(training_rows(config.env))
        held_out = eval_rows(config.env, config.eval) or ()
        counts = {"num_prompts": len(prompts), "num_dropped": dropped, "num_eval": len(held_out)}
        empty = meta_model(config, tokenizer, runs=runs)
        engine = plan_engine(config, session, task, held_out, empty)
        return grpo_plan(config, session, task, engine, model_shape(empty), gpu, **counts), engine


def run(config: GRPOConfig, *, run_dir: Path, resume: bool = False, on_start: Callable[[], None] | None = None) -> int:
    """Trains and returns the exit code: 0, or 130 after an interruption that left a checkpoint.

    ``on_start`` is called on the first rank when all is loaded, before the first step.
    """
    with Session(config) as session, Run(config, session, run_dir, resume=resume, on_start=on_start) as run:
        train(config, session, run)
        return run.exit_code


def train(config: GRPOConfig, session: Session, run: Run) -> None:
    """The parts, put together once, and the loop over them."""
    tokenizer = load_tokenizer(run.source, runs=run.runs)
    task = Task(config.env, tokenizer)
    prompts, dropped = task.fit_prompts(training_rows(config.env))
    held_out = eval_rows(config.env, config.eval) or ()
    counts = {"num_prompts": len(prompts), "num_dropped": dropped, "num_eval": len(held_out)}
    empty = meta_model(run.source, tokenizer, runs=run.runs)
    engine_plan, shape = plan_engine(run.source, session, task, held_out, empty), model_shape(empty)
    run.print_plan(f"grpo · {config.env.name}", grpo_plan(config, session, task, engine_plan, shape, **counts))
    advantage_settings, loss_settings = grpo_settings(config, exact=samples_exactly(config, session))
    check_processes(config, session, advantage_settings)

    # The model that is trained, and the engine that samples: by the same weights, or (vLLM) by a copy of them.
    model = load_model(run.source, tokenizer, session, runs=run.runs, checked=run.resume, adapter=run.adapter)
    sampling = config.sampling.model_dump(exclude={"max_tokens"}) | {"max_new_tokens": config.sampling.max_tokens}
    engine = RolloutEngine(config, session, model, tokenizer, sampling, engine_plan)
    actor = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs=sampling, generate=False)
    updater = make_updater(config, session, actor, steps=config.steps)
    loss = GRPOLoss(actor, **loss_settings)
    reference = None
    if config.grpo.kl:  # against the model that the run started from, not the checkpoint: this one without its
        frozen_actor, kind = actor, "adapter_off"  # adapters, or a frozen copy
        if config.lora is None:
            frozen = load_model(config.model_copy(update={"model": run.origin}), tokenizer, session, runs=run.runs)
            frozen_actor, kind = actor.get_new_version(model=frozen), "model"
        reference = RetrieveLogProb(frozen_actor, log_probs_full_key=("ref_log_probs", "full"), reference=kind)

    env = make_env(config, session, task, prompts)
    collector = LLMCollector(
        env,
        policy=engine.policy,
        yield_only_last_steps=True,  # a row is a whole conversation
        dialog_turns_per_batch=1,  # one batch of conversations, each run to its end
        track_policy_version=True,
        concurrency=config.rollout.concurrency,
        retries=config.env.retries,
    )
    rollouts = RolloutSource(collector, engine, updater.scorer, session, config)
    advantage = MCAdvantage(config.group_size, **advantage_settings)
    quota = GroupQuota(config.prompts_per_step // session.world_size)
    buffer = ReplayBuffer(
        storage=LazyStackStorage(env.batch_size[0] * config.env.max_records),
        sampler=SamplerWithoutReplacement(),
        transform=Compose(quota, advantage),  # writes meet the last one first
        generator=torch.Generator().manual_seed(config.seed),
    )
    mask_truncated = MaskTruncated() if config.truncated == "mask" else Transform()
    refill_rounds = config.refill_rounds if config.zero_variance == "refill" else 0
    evaluator = Evaluator(session, engine.policy, task, held_out, config.eval) if held_out else None

    sampled, share = None, attention_share(model)
    with closing(rollouts):
        samplers = PerRank(session, buffer.sampler)
        run.begin(model, tokenizer, optimizer=updater, rollouts=rollouts, samplers=samplers, advantage=advantage)
        if evaluator:
            run.evaluate_before(evaluator)
        for step in run.steps(config.steps, grpo_columns(tools=bool(config.env.tools))):
            # 1. group_size answers to each prompt, with rewards: sampled now, or during the last updates. With
            #    max_staleness 1 the engine gets the newest weights here, between two batches of one version each.
            clock = time.perf_counter()
            data = rollouts.take(version=step - 1)
            metrics = rollouts.sync_weights(version=step - 1)

            # 2. MCAdvantage turns rewards into advantages on the way into the buffer: each minus the mean of its group.
            #    Groups of equal rewards teach nothing and are left out; with refill (DAPO) others take their place.
            buffer.empty()
            quota.reset()
            buffer.extend(select_training_columns(mask_truncated.inv(data)))
            for _ in range(refill_rounds):
                if session.any(quota.missing > 0):  # on any rank: all draw their prompts in step
                    more = rollouts.sample()
                    buffer.extend(select_training_columns(mask_truncated.inv(more)))
                    data = cat_rows([data, more])
            rollouts.end_sampling()  # an engine on the trainer's GPU leaves it to the update
            rollouts.begin_next(steps_left=config.steps - step)
            sampled = StepRollouts(session, data, buffer, tokenizer, keep_tokens=config.token_records)
            metrics |= sampled.metrics(version=rollouts.version, seconds=time.perf_counter() - clock)
            sampled.check_failed(config.max_failed, step, rollouts.first_error)

            # 3. The rows of all ranks, dealt over them by cost. Then what the loss compares with, before the first
            #    update changes the weights: log-probs of the starting model, and of this one where those of sampling
            #    are not exact enough for several updates.
            clock = time.perf_counter()
            dealt = [deal_batch(session, part, share) for part in split(buffer, config.updates_per_step)]
            batches = [batch for batch, _ in dealt]
            metrics["perf/imbalance"] = sum(imbalance for _, imbalance in dealt) / len(dealt)
            for batch in batches:
                if reference is not None and batch is not None:
                    with session.autocast(), session.split_sequences():
                        reference(batch)
                if loss.proximal == "recomputed":
                    updater.add_proximal(loss, batch)
            if reference is not None or loss.proximal == "recomputed":
                metrics["time/logp"] = time.perf_counter() - clock

            # 4. Micro-batches, loss, clipping, AdamW: one update on each part of the rollouts.
            clock = time.perf_counter()
            with sampled.watch(loss):
                updates = [updater.step(loss, batch, step) for batch in batches]
            seconds = time.perf_counter() - clock
            metrics |= step_metrics(updates, seconds) | updater.speed(seconds)

            # 5. The engine gets the new weights and proves it. Answers that it samples go on with them; a batch that
            #    one version must sample (max_staleness 1) is waited for in step 1, or here before an evaluation.
            due = evaluator is not None and run.due(config.eval.every)
            if due or rollouts.takes_weights:
                metrics |= rollouts.sync_weights(version=step)
            if due:
                metrics |= run.evaluate(evaluator)
            metrics |= rollouts.metrics(run.step_seconds)
            warning = engine.warning
            if failed := metrics["rollout/failed"]:
                warning += f"{failed} rollouts failed. {rollouts.first_unreported_error()}".rstrip()
            run.finish_step(step, metrics, rollouts=sampled.records_with_tokens(), warning=warning)
    run.print_end(sampled.samples(config.samples) if sampled else (), evaluator)


def make_env(config: GRPOConfig, session: Session, task: Task, prompts: list[Mapping[str, Any]]) -> DatasetChatEnv:
    """This rank's part of the prompts of a step, each ``group_size`` times, with tools, user and rewards."""
    env = task.make_env(
        prompts,
        num_envs=config.prompts_per_step // session.world_size,
        repeats=config.group_size,
        group_repeats=True,
        seed=config.seed,
        rank=session.rank,
        world_size=session.world_size,
    )
    if config.overlong_buffer:
        env.append_transform(OverlongShaping(config.sampling.max_tokens, config.overlong_buffer))
    return env


def split(buffer: ReplayBuffer, num_parts: int) -> list[TensorDictBase | None]:
    """The buffer's rows in random order, in parts that differ by one row at most; None for an empty one."""
    count = len(buffer)
    sizes = [count * (part + 1) // num_parts - count * part // num_parts for part in range(num_parts)]
    return [buffer.sample(size) if size else None for size in sizes]


def check_processes(config: GRPOConfig, session: Session, advantage: Mapping[str, Any]) -> None:
    """Raises ConfigError for settings that this number of processes cannot keep."""
    world_size = session.world_size
    if config.prompts_per_step % world_size:
        raise ConfigError(
            f"prompts_per_step {config.prompts_per_step} must be a multiple of the {world_size} processes"
        )
    if world_size > 1 and (advantage["scale"] == "batch" or advantage.get("whiten")):
        raise ConfigError(
            f"algo {config.algo} divides by what is measured over a whole batch, of which each of the {world_size} "
            "processes has a part: use one process, or an algorithm that looks at groups"
        )
    if session.sharded and config.rollout.engine == "transformers" and config.rollout.concurrency:
        raise ConfigError(
            f"rollout.concurrency {config.rollout.concurrency} with parallel.mode fsdp2 needs rollout.engine vllm: the "
            "processes of a sharded model generate in step with each other"
        )
