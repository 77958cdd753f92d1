"""Group-relative policy optimisation. ``llmrl grpo sums_grpo``, or ``torchrun -m llmrl.recipes.grpo sums_grpo.yaml``.

Each step: the policy answers every prompt ``group_size`` times, the environment scores the answers, the replay buffer turns
scores into advantages within each group, the loss is stepped once over all of it, the engine gets the new weights. Which
GRPO it is (Dr. GRPO, DAPO, GSPO, CISPO, RLOO ...) is four settings, printed at the start. Read `_train` from top to bottom.
"""

from __future__ import annotations

import copy
import sys
import time
from pathlib import Path

import torch
from llmrl.recipes.evaluation import Evaluation
from llmrl.recipes.grpo_config import GRPOConfig
from llmrl.recipes.models import load_model, load_tokenizer, resolve_model
from llmrl.recipes.planning import grpo_plan, grpo_settings
from llmrl.recipes.rollouts import StepRollouts, slim
from llmrl.recipes.session import Session
from llmrl.recipes.state import load_state, named_weights, save_state
from llmrl.recipes.tasks import eval_rows, fit_prompts, make_env, training_rows
from llmrl.recipes.updates import Updater
from tensordict import TensorDictBase

from llmrl.checkpoint import CheckpointStore, InterruptGuard
from llmrl.collectors.llm import LLMCollector
from llmrl.collectors.llm.batches import cat_rows
from llmrl.console import GRPO_COLUMNS, StepDisplay, format_duration, print_conversations, print_plan, print_summary
from llmrl.data.replay_buffers import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement
from llmrl.envs.llm.transforms import MaskTruncated, OverlongShaping
from llmrl.envs.transforms import Compose, Transform
from llmrl.errors import ConfigError, RolloutError
from llmrl.metrics import MetricsLog
from llmrl.modules.llm.engines import Engine
from llmrl.modules.llm.policies import TransformersWrapper
from llmrl.modules.llm.policies.containers import LogProbs
from llmrl.modules.llm.rendering import Renderer
from llmrl.objectives.llm import GroupQuota, GRPOLoss, MCAdvantage
from llmrl.rollouts import RolloutLog

__all__ = ["plan", "run"]


def plan(config: GRPOConfig, *, runs: Path) -> list[tuple[str, str]]:
    """What a run of ``config`` would do, in rows of label and text; loads the tokenizer and the data, no weights."""
    tokenizer = load_tokenizer(config, runs=runs)
    rows, dropped = fit_prompts(config.env, training_rows(config.env), Renderer(tokenizer))
    num_eval = len(eval_rows(config.env, config.eval) or ())
    with Session(config) as session:
        return grpo_plan(
            config, session, tokenizer, num_prompts=len(rows), num_dropped=dropped, num_eval=num_eval
        )


def run(config: GRPOConfig, *, run_dir: Path, resume: bool = False) -> int:
    """Trains and returns the exit code: 0, or 130 after an interruption that left a checkpoint."""
    with Session(config) as session:
        store = CheckpointStore(run_dir, keep=config.checkpoint.keep, writer=session.is_first)
        return _train(config, session, run_dir, store, resume)


def _train(config: GRPOConfig, session: Session, run_dir: Path, store: CheckpointStore, resume: bool) -> int:
    started = time.perf_counter()
    if config.prompts_per_step % session.world_size:
        raise ConfigError(
            f"prompts_per_step {config.prompts_per_step} must be a multiple of the {session.world_size} processes"
        )
    advantage_settings, loss_settings = grpo_settings(config)
    if session.world_size > 1 and (advantage_settings["scale"] == "batch" or advantage_settings.get("whiten")):
        raise ConfigError(
            f"algo {config.algo} divides by what is measured over a whole batch, of which each of the "
            f"{session.world_size} processes has a part: use one process, or an algorithm that looks at groups"
        )
    state = load_state(store.latest()) if resume else None
    origin = state["origin"] if state else resolve_model(config.model, runs=run_dir.parent)
    source = config.model_copy(update={"model": str(store.latest()) if resume else origin})
    tokenizer = load_tokenizer(source, runs=run_dir.parent)
    rows, num_dropped = fit_prompts(config.env, training_rows(config.env), Renderer(tokenizer))
    exam_rows = eval_rows(config.env, config.eval)
    print_plan(
        session.console,
        f"grpo · {config.env.name}",
        grpo_plan(
            config, session, tokenizer, num_prompts=len(rows), num_dropped=num_dropped, num_eval=len(exam_rows or ())
        ),
        right=str(run_dir),
    )

    # The policy that is trained, and the one that samples: the same module, unless its parameters are sharded.
    model = load_model(source, tokenizer, runs=run_dir.parent).to(session.device)
    sampling = config.sampling
    options = {
        "max_new_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
    }
    policy = TransformersWrapper(
        copy.deepcopy(model) if session.sharded else model,
        tokenizer=tokenizer,
        input_mode="history",
        generate_kwargs=options,
    )
    actor = TransformersWrapper(
        model, tokenizer=tokenizer, input_mode="history", generate_kwargs=options, generate=False
    )
    reference = None
    if config.grpo.kl:
        frozen = load_model(config.model_copy(update={"model": origin}), tokenizer, runs=run_dir.parent)
        reference = policy.get_new_version(model=frozen.to(session.device), generate=False).engine
    updater = Updater(
        session,
        actor.scorer,
        config.optim,
        steps=config.steps,
        tokens_per_microbatch=config.tokens_per_microbatch,
        packing=config.packing,
    )
    actor.scorer = updater.scorer
    loss = GRPOLoss(actor, **loss_settings)

    # Prompts -> rollouts -> rewards -> advantages, in the buffer of one step.
    env = make_env(
        config.env,
        rows,
        num_envs=config.prompts_per_step // session.world_size,
        repeats=config.group_size,
        group_repeats=True,
        seed=config.seed,
        rank=session.rank,
        world_size=session.world_size,
    )
    if config.overlong_buffer:
        env.append_transform(OverlongShaping(sampling.max_tokens, config.overlong_buffer))
    advantage = MCAdvantage(config.group_size, **advantage_settings)
    quota = GroupQuota(config.prompts_per_step // session.world_size)
    unfinished = MaskTruncated() if config.truncated == "mask" else Transform()
    buffer = ReplayBuffer(
        storage=LazyStackStorage(env.batch_size[0]),
        sampler=SamplerWithoutReplacement(),
        transform=Compose(quota, advantage),  # writes meet the advantage first
        generator=torch.Generator().manual_seed(config.seed),
    )
    collected: list[TensorDictBase] = []
    collector = LLMCollector(
        env,
        policy=policy,
        yield_only_last_steps=True,
        dialog_turns_per_batch=1,  # one batch of conversations, each run to its end
        replay_buffer=buffer,
        track_policy_version=True,
        postproc=lambda data: collected.append(data) or slim(unfinished.inv(data)),
    )
    exam = None
    if exam_rows:
        exam = Evaluation(
            session,
            policy,
            config.env,
            exam_rows,
            batch_size=config.eval.batch_size,
            max_tokens=config.eval.max_tokens,
        )

    start, before = 0, None
    if state is not None:
        start, before = state["step"], state["before"]
        updater.load_state_dict(state["optimizer"])
        collector.load_state_dict(state["collector"])
        buffer.sampler.load_state_dict(state["sampler"][session.rank % len(state["sampler"])])
        advantage.load_state_dict(state["advantage"])
    elif exam is not None:
        before = exam.run()

    metrics: dict[str, float] = {}
    rollouts: StepRollouts | None = None
    step, conversations, trained, status = start, 0, 0, 0
    first_reward: float | None = None
    shown = False  # the traceback of a failing reward
    log = MetricsLog(run_dir, enabled=session.is_first, resume_step=start if resume else None, mirrors=config.log)
    rollout_log = RolloutLog(run_dir, enabled=session.is_first, resume_step=start if resume else None)
    display = StepDisplay(config.steps, GRPO_COLUMNS, console=session.console, title=run_dir.name, start=start)
    with InterruptGuard() as guard, log, display:
        for step in range(start + 1, config.steps + 1):
            began = time.perf_counter()
            collected.clear()
            buffer.empty()
            quota.reset()
            with session.autocast():
                collector.next()
                for _ in range(config.refill_rounds if config.zero_variance == "refill" else 0):
                    if quota.missing:
                        collector.next()
            generated = time.perf_counter() - began
            rollouts = StepRollouts(session, cat_rows(collected), buffer, advantage, tokenizer)
            metrics = rollouts.metrics(version=collector.policy_version, seconds=generated)
            if metrics["rollout/failed"] > config.max_failed * rollouts.num_rows:
                raise RolloutError(
                    f"grpo: at most max_failed = {config.max_failed:.0%} of a step's rollouts may fail: got "
                    f"{metrics['rollout/failed']:.0f} of {rollouts.num_rows} in step {step}. {_first_error(env)}"
                )
            clock = time.perf_counter()
            tokens = 0.0
            for size in _parts(len(buffer), config.updates_per_step):
                batch = buffer.sample(size).to(session.device) if size else None
                if batch is not None and reference is not None:
                    with session.autocast():
                        _add_reference(batch, reference, sampling.temperature)
                update = updater.step(loss, batch, step)
                tokens += update.get("tokens", 0)
                metrics |= _loss_metrics(update)
            metrics["tokens/trained"] = tokens
            metrics["time/update"] = time.perf_counter() - clock
            metrics["perf/train_tok_s"] = tokens / metrics["time/update"]
            clock = time.perf_counter()
            collector.update_policy_weights_(named_weights(model) if session.sharded else None)
            metrics["time/sync"] = time.perf_counter() - clock
            remark = ""
            stopped = session.any(guard.requested)
            last = stopped or step == config.steps
            if exam is not None and not stopped and (last or (config.eval.every and step % config.eval.every == 0)):
                clock = time.perf_counter()
                metrics[f"eval/{exam.name}/mean"] = score = exam.run()
                metrics["time/eval"] = time.perf_counter() - clock
                remark = f"{exam.name} {score:.3f}"
            metrics["time/step"] = time.perf_counter() - began
            conversations += rollouts.num_rows
            trained += int(tokens)
            first_reward = metrics["reward/mean"] if first_reward is None else first_reward
            log.log(step, metrics)
            rollout_log.write(step, rollouts.records(step))
            display.step(step, metrics, remark)
            if metrics["rollout/failed"]:
                error, shown = "" if shown else _first_error(env), True
                display.warn(f"step {step}: {metrics['rollout/failed']:.0f} rollouts failed. {error}".rstrip())
            if last or (config.checkpoint.every and step % config.checkpoint.every == 0):
                save_state(
                    store,
                    step,
                    session=session,
                    model=model,
                    tokenizer=tokenizer,
                    updater=updater,
                    collector=collector.state_dict(),
                    sampler=session.gather([buffer.sampler.state_dict()]),
                    origin=origin,
                    advantage=advantage.state_dict(),
                    before=before,
                    finished=last and not stopped,
                )
            if stopped:
                status = 130
                break
    collector.shutdown()
    if rollouts is not None:
        print_conversations(session.console, rollouts.samples(config.samples))
    changes = [("reward", first_reward, metrics.get("reward/mean"))]
    if exam is not None:
        changes.append((f"{exam.name} {config.eval.split}", before, metrics.get(f"eval/{exam.name}/mean")))
    print_summary(
        session.console,
        [
            "interrupted" if status else f"{step} steps",
            format_duration(time.perf_counter() - started),
            f"{conversations:,} rollouts".replace(",", " "),
            f"{trained:,} trained tokens".replace(",", " "),
        ],
        changes=changes,
        files=f"{run_dir}/{{config.yaml, metrics.jsonl, rollouts/*.parquet, checkpoints/step{step}}}",
        following=[f"llmrl {'resume' if status else 'eval'} {run_dir}", f"llmrl show {run_dir}"],
    )
    return status


def _parts(count: int, num_parts: int) -> list[int]:
    """Sizes that add up to ``count`` and differ by one at most."""
    return [count * (part + 1) // num_parts - count * part // num_parts for part in range(num_parts)]


def _add_reference(batch: TensorDictBase, reference: Engine, temperature: float) -> None:
    scores = reference.score(
        batch.get(("tokens", "full"), as_list=True),
        temperature=temperature,
        masks=batch.get(("masks", "all_assistant_mask"), as_list=True),
    )
    batch.set(("next", "ref_log_probs"), LogProbs.from_rows({"full": scores}))


_FROM_LOSS = {
    "loss": "policy/loss",
    "grad_norm": "policy/grad_norm",
    "lr": "policy/lr",
    "tokens": "tokens/trained",
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


def _loss_metrics(update: dict[str, float]) -> dict[str, float]:
    return {metric: update[name] for name, metric in _FROM_LOSS.items() if name in update}


def _first_error(env: object) -> str:
    """The first traceback of a reward function, if one is kept."""
    errors = [getattr(transform, "first_error", None) for transform in env.transform.leaves()]  # type: ignore[attr-defined]
    return next((f"First error:\n{error}" for error in errors if error), "")


if __name__ == "__main__":
    from llmrl.cli import main

    sys.exit(main(["grpo", *sys.argv[1:]]))
