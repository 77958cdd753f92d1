"""Group-relative policy optimisation: ``llmrl grpo sums_grpo``, or ``torchrun -m llmrl.recipes.grpo sums_grpo.yaml``.

Read `train` from top to bottom: that is the whole algorithm. Its variant (Dr. GRPO, DAPO, GSPO, CISPO, RLOO ...) is
chosen by four settings of `MCAdvantage` and `GRPOLoss`, printed at the start; ``algorithm`` names one of your own
(`llmrl.objectives.llm.algorithm`). ``grpo_minimal.py`` is a 40-line version.

A command with another algorithm and settings is a file beside this one: a subclass of `GRPOConfig` says which, and

    SETTINGS = "llmrl.train.settings:MyConfig"
    ABOUT = "improve a model in my way"
    from llmrl.recipes.grpo import plan, plan_with_engine, run
"""

from __future__ import annotations

import sys

if __name__ == "__main__":  # before torch is imported: the command reports bad settings without it, and prepares for it
    from llmrl.commands.cli import main

    sys.exit(main(["grpo", *sys.argv[1:]]))

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase

from llmrl.collectors.llm import LLMCollector
from llmrl.collectors.llm.batches import cat_rows
from llmrl.envs.llm.transforms import MaskTruncated, OverlongShaping
from llmrl.modules.llm.policies import LLMWrapperBase, TransformersWrapper
from llmrl.objectives.llm import Algorithm, GroupQuota
from llmrl.run.console import grpo_columns
from llmrl.train.algorithms import columns_read
from llmrl.train.context import AlgorithmState, RunContext
from llmrl.train.data.record import DataRecord
from llmrl.train.distributed import Session
from llmrl.train.evaluation import make_evaluator
from llmrl.train.models.loading import load_model, load_tokenizer
from llmrl.train.planning.memory import cached_tokens
from llmrl.train.planning.plan import plan_grpo, plan_with_engine, prepare_grpo
from llmrl.train.rollouts.agents import AgentRollouts
from llmrl.train.rollouts.engine import RolloutEngine
from llmrl.train.rollouts.row_source import EnvironmentRollouts, RowSource
from llmrl.train.rollouts.source import RolloutSource
from llmrl.train.rollouts.step import StepRollouts, select_training_columns
from llmrl.train.run import Run, run_recipe
from llmrl.train.settings.grpo import GRPOConfig
from llmrl.train.tasks import Task, make_task
from llmrl.train.teacher import resolve_teacher
from llmrl.train.updater import Updater, make_updater

__all__ = ["plan", "plan_with_engine", "run"]
SETTINGS = "llmrl.train.settings:GRPOConfig"
ABOUT = "improve a model by reward"


def train(config: GRPOConfig, session: Session, run: Run) -> None:
    """Builds the parts of a run, then runs the training loop."""
    config, tokenizer = resolve_teacher(config, run.runs), load_tokenizer(run.source, runs=run.runs)
    task = run.close_at_end(make_task(config.env, tokenizer))
    prepared, rows = prepare_grpo(config, run.source, session, task, runs=run.runs)
    run.print_plan(f"{config.COMMAND} · {config.env.label}", rows)

    # The model that is trained, and the engine that samples: with the same weights, or (vLLM) with a copy of them.
    model = load_model(run.source, tokenizer, session, runs=run.runs, checked=run.resume, adapter=run.adapter)
    own = {"reports_routes": prepared.replays_routes}  # mixtures of experts: the trainer replays the routes
    own["max_cached_tokens"] = cached_tokens(config, model, session, prepared.lengths)
    engine = run.close_at_end(RolloutEngine(config, session, model, tokenizer, prepared.engine, **own))
    options = {"generate_kwargs": config.sampling.generate_kwargs}  # log-probs at the temperature of sampling
    actor = TransformersWrapper(model, tokenizer=tokenizer, generate=False, **options)
    updater = make_updater(config, session, actor, steps=config.steps, lengths=prepared.lengths)
    algorithm = prepared.algorithm  # its loss, and other models that it needs: a reference, a teacher, a critic
    algorithm.build(RunContext(config, session, run, tokenizer, actor, updater))

    # Rollouts are sampled in turn with the updates, or ahead of them.
    source = make_source(config, session, task, prepared.prompts, engine.policy)
    rollouts = run.close_at_end(RolloutSource(source, engine, updater.scorer, session, config))
    quota = GroupQuota(config.prompts_per_step // session.world_size)
    held_out = prepared.held_out
    most = {"concurrency": config.rollout.concurrency}  # of an agent's rollouts
    evaluator = make_evaluator(session, engine.policy, task, held_out, config.eval, **most) if held_out else None
    sampled, sources = None, [source.label for source in config.env.mix or ()]

    declared = [*algorithm.policy_loss.metrics.values(), *algorithm.metrics.values()]
    run.declare_metrics(declared)
    data = DataRecord.of(config.env.dataset or config.env.label, "prompts", len(prepared.prompts), prepared.prompts)
    state = AlgorithmState(session, algorithm)
    run.begin(model, tokenizer, data=data, optimizer=updater, rollouts=rollouts, algorithm=state)
    run.evaluate_before(evaluator)
    shown = [*declared, *rollouts.columns]
    for step in run.steps(config.steps, grpo_columns(tools=any(t.tools for t in config.env.tasks), own=shown)):
        # 1. group_size answers to each prompt, with rewards: sampled now, or during earlier updates. With
        #    max_staleness 1 the engine gets the newest weights here, so that one version samples each batch.
        clock = time.perf_counter()
        data = rollouts.take(version=step - 1)
        metrics = rollouts.sync_weights(version=step - 1)

        # 2. Rewards become advantages: each minus the mean of its group, which replaces a value network. Groups of
        #    equal rewards have no gradient and are left out; with refill (DAPO) others take their place.
        quota.reset()
        rows = quota.inv(algorithm.advantages(trainable_rows(data, config, algorithm)))
        for _ in range(config.refill_rounds if config.zero_variance == "refill" else 0):
            if session.any(quota.missing > 0):  # if any rank lacks groups, all draw more prompts
                more = rollouts.sample()
                rows = joined(rows, quota.inv(algorithm.advantages(trainable_rows(more, config, algorithm))))
                data = joined(data, more)
        metrics |= rollouts.end_sampling(data)  # an engine on the trainer's GPU frees memory
        rollouts.begin_next(steps_left=config.steps - step)
        sampled = StepRollouts(session, data, rows, tokenizer, keep_tokens=config.token_records, sources=sources)
        metrics |= sampled.metrics(version=rollouts.version, seconds=time.perf_counter() - clock)
        sampled.check_failed(config.max_failed, step, rollouts.failure)

        # 3. A batch for each update: the rows of all ranks, shuffled, dealt over the ranks by cost. Then, before the
        #    first update changes the weights, the log-probs that the loss compares with: of the starting model, and
        #    of the current one if the engine's are not exact enough for several updates.
        shuffle = torch.Generator().manual_seed(config.seed + step)
        batches, metrics["perf/imbalance"] = deal_parts(updater, rows, config.updates_per_step, shuffle)
        metrics |= algorithm.prepare(batches)

        # 4. Micro-batches, loss, clipping, AdamW: one update on each batch. The loss raises the log-probs of tokens
        #    with a positive advantage and lowers the others, within the clip range.
        with sampled.watch(algorithm.policy_loss):
            metrics |= algorithm.train(batches, step)

        # 5. The engine gets the new weights, and a probe checks them. Answers in flight continue with them; a batch
        #    that a single version must sample (max_staleness 1) is waited for in 1., or here before an evaluation.
        due = evaluator is not None and run.due(config.eval.every)
        if due or rollouts.takes_weights:
            metrics |= rollouts.sync_weights(version=step)
        if due:
            metrics |= run.evaluate(evaluator)
        metrics |= rollouts.metrics(run.step_seconds)
        warning = rollouts.warning(num_failed=metrics["rollout/failed"])
        run.finish_step(step, metrics, rollouts=sampled.records_with_tokens(), warning=warning)
    run.print_end(sampled.samples(config.samples) if sampled else (), evaluator)


plan = plan_grpo
run = partial(run_recipe, train)

# --- the parts that `train` puts together -----------------------------------------------------------------------------


def make_source(
    config: GRPOConfig, session: Session, task: Task, prompts: list[Mapping[str, Any]], policy: LLMWrapperBase
) -> RowSource:
    """What this rank's share of a step's prompts is sampled by, each ``group_size`` times: the user's agent, or an
    environment with tools, user and rewards.
    """
    if config.env.agent is not None:
        return AgentRollouts(config, session, prompts, policy)
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
    collector = LLMCollector(
        env,
        policy=policy,
        yield_only_last_steps=True,  # a row is a whole conversation
        dialog_turns_per_batch=1,  # one batch of conversations, each run to its end
        track_policy_version=True,
        concurrency=config.rollout.concurrency,
        retries=config.env.retries,
    )
    return EnvironmentRollouts(collector)


def trainable_rows(data: TensorDictBase, config: GRPOConfig, algorithm: Algorithm) -> TensorDictBase:
    """The columns that advantages and loss read; ``truncated="mask"`` masks answers that were cut off."""
    data = MaskTruncated().inv(data) if config.truncated == "mask" else data
    rows = select_training_columns(data, columns_read(algorithm))
    return rows if algorithm.demonstrations is None else algorithm.demonstrations.write(rows)


def joined(*parts: TensorDictBase | None) -> TensorDictBase | None:
    """The rows of all parts, None if there are none."""
    present = [part for part in parts if part is not None]
    return cat_rows(present) if present else None


def deal_parts(
    updater: Updater, rows: TensorDictBase | None, num_parts: int, shuffle: torch.Generator
) -> tuple[list[TensorDictBase | None], float]:
    """Splits the rows, in random order, into parts of equal size (to within a row), each dealt over the ranks.

    Returns  this rank's share of each part, None for no rows; and the mean imbalance of their costs
    """
    order = torch.randperm(0 if rows is None else len(rows), generator=shuffle)
    dealt = [updater.deal(rows[part] if len(part) else None) for part in order.tensor_split(num_parts)]
    return [batch for batch, _ in dealt], sum(imbalance for _, imbalance in dealt) / num_parts
