"""The plan that a run prints before any weights are loaded: machine, precision, algorithm, template, data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmrl.errors import ConfigError, DataError, TemplateError
from llmrl.modules.llm.rendering import Renderer
from llmrl.objectives.llm.algorithm import Algorithm
from llmrl.objectives.llm.presets import PRESETS
from llmrl.run.console.numbers import counted
from llmrl.train.algorithms import check_columns, columns_read, load_algorithm
from llmrl.train.critic import check_critic
from llmrl.train.data.lengths import RowLengths, tokens_at_once
from llmrl.train.distributed import Session
from llmrl.train.gpus import GPU
from llmrl.train.held_out import count_shared
from llmrl.train.models.loading import check_rows, load_tokenizer, meta_model
from llmrl.train.models.lora import lora_rows
from llmrl.train.models.shape import ModelShape, model_shape
from llmrl.train.optimizers import import_optimizer
from llmrl.train.planning.engines import EnginePlan, plan_engine, replays_routes
from llmrl.train.planning.fitting import memory_rows
from llmrl.train.planning.memory import longest_row, trainer_gpus
from llmrl.train.settings.algorithms import PPOConfig
from llmrl.train.settings.grpo import GRPOConfig
from llmrl.train.settings.machine import OptimSettings
from llmrl.train.settings.model import ModelSource, TinyModelSettings
from llmrl.train.settings.sft import SFTConfig
from llmrl.train.tasks import Task, eval_rows, make_task, training_rows
from llmrl.train.teacher import check_teacher, read_demonstrations, resolve_teacher

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from llmrl.modules.llm.vision import Media
    from llmrl.train.data.sft import TokenizedRows
    from llmrl.train.run import Run

Rows = list[tuple[str, str]]


def plan_recipe(
    tokenize: Callable[[Any, PreTrainedTokenizerBase], TokenizedRows],
    config: SFTConfig,
    *,
    runs: Path,
    gpu: GPU | None = None,
) -> Rows:
    """Rows of label and text that describe a run of ``config`` on this machine or on ``gpu``, with the data that
    ``tokenize(config, tokenizer)`` returns. Loads no weights.
    """
    with Session(config) as session:
        return _prepare(tokenize, config, config, session, runs, gpu)[-1]


def read_data(
    recipe: str,
    tokenize: Callable[[Any, PreTrainedTokenizerBase], TokenizedRows],
    config: SFTConfig,
    session: Session,
    run: Run,
) -> tuple[PreTrainedTokenizerBase, Any, int, int]:
    """Returns the tokenizer, the data of ``tokenize(config, tokenizer)``, and the optimizer steps of the run and of
    an epoch. Prints the plan.
    """
    tokenizer, data, rows = _prepare(tokenize, config, run.source, session, run.runs)
    run.print_plan(f"{recipe} · {data.source}", rows)
    return tokenizer, data, *_steps(config, len(data))


def _prepare(
    tokenize: Callable[[Any, PreTrainedTokenizerBase], TokenizedRows],
    config: SFTConfig,
    source: SFTConfig,
    session: Session,
    runs: Path,
    gpu: GPU | None = None,
) -> tuple[PreTrainedTokenizerBase, TokenizedRows, Rows]:
    """Tokenizer, data and plan; ``source`` names the model to load, see `Run`."""
    tokenizer = load_tokenizer(source, runs=runs)
    check_problems(config, tokenizer)
    data = tokenize(config, tokenizer)
    empty = meta_model(source, tokenizer, runs=runs)
    too_long = check_rows(empty, [*data.ids, *(data.held_out.ids if data.held_out else ())])
    rows = data_plan(config, session, data, model_shape(empty), gpu)
    return tokenizer, data, [*rows, *([("", too_long.removeprefix(" · "))] if too_long else [])]


def check_problems(config: SFTConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Reads the evaluation problems, so that their errors are reported before weights are loaded.

    Raises  DataError if ``stop`` has no problems; the errors of `Task.longest_prompt`
    """
    if config.env is None:
        return
    with closing(Task(config.env, tokenizer)) as task:
        task.measured(config.eval).longest_prompt(eval_rows(config.env, config.eval) or ())
        if config.stop_eval is None:
            return
        rows = eval_rows(config.env, config.stop_eval)
        if rows is None:
            raise DataError(
                f"stop needs problems that are not trained on: env {config.env.name} comes with none; name them "
                "in eval.dataset, or leave stop out."
            )
        task.longest_prompt(rows)


def data_plan(
    config: SFTConfig, session: Session, data: TokenizedRows, shape: ModelShape, gpu: GPU | None = None
) -> Rows:
    """The plan of a run that trains on ``data``."""
    steps, per_epoch = _steps(config, len(data))
    length = f"{counted(steps, 'step')} = {steps / per_epoch:.2f} epochs"
    if config.stop and config.env:
        length += f" or until {config.env.label} {config.stop.split} reaches {config.stop.at_least}"
    return [
        *_model_rows(config, session, shape, gpu, data.lengths),
        *_images(config, data.renderer, shape, data.media),
        ("batch", f"{config.batch_size} {data.unit} a step · {_microbatches(config, shape, gpu)}"),
        ("loss", config.loss_in_words),
        ("optim", _optim(config.optim, shape)),
        ("template", check_template(data.renderer, share=data.trained_share())),
        ("data", _count_rows(config, data.source, data)),
        *_not_used(data.unused, data.renderer.unused_keys),
        ("length", length),
        ("keep", _checkpoints(config)),
        *_held_out(config, data),
    ]


def _count_rows(config: SFTConfig, source: str, data: TokenizedRows) -> str:
    too_long = ""
    if data.num_too_long:
        what = {"drop": "dropped"}.get(config.too_long, config.too_long)
        too_long = f" · {data.num_too_long} longer than {config.max_length} tokens, {what}"
    return f"{source} · {len(data)} {data.unit}{too_long}{data.left_out()} · {sum(map(len, data.ids))} tokens"


def _not_used(columns: Iterable[str], keys: Sequence[str]) -> Rows:
    unused = [*columns, *([f"of messages {', '.join(keys)}"] if keys else [])]
    return [("", f"not used: {', '.join(unused)}")] if unused else []


def _held_out(config: SFTConfig, data: TokenizedRows) -> Rows:
    """The rows that are measured, how often, and a warning about those that are trained on too."""
    held_out = data.held_out
    if held_out is None:
        return [("measured", "none; eval.dataset=FILE names pairs to evaluate")] if config.measures_rows else []
    every = f", every {counted(config.eval.every, 'step')}" * bool(config.eval.every)
    rows = [("measured", f"{_count_rows(config, held_out.described, held_out)} · before and after{every}")]
    if shared := count_shared(data, held_out):
        text = f"{shared} of the {len(held_out)} held-out {data.unit} are trained on too: what is measured on them says"
        rows.append(("warning", f"{text} little about other {data.unit}"))
    return rows


def _steps(config: SFTConfig, num_chats: int) -> tuple[int, int]:
    """Optimizer steps of a run, and of an epoch."""
    per_epoch = math.ceil(num_chats / config.batch_size)
    return config.steps or max(1, math.ceil(config.epochs * per_epoch)), per_epoch


def plan_grpo(config: GRPOConfig, *, runs: Path, gpu: GPU | None = None) -> Rows:
    """Rows of label and text that describe a run of ``config``, on this machine or on ``gpu``.

    Loads the tokenizer and the data, no weights.
    """
    return plan_with_engine(config, runs=runs, gpu=gpu)[0]


def plan_with_engine(config: GRPOConfig, *, runs: Path, gpu: GPU | None = None) -> tuple[Rows, EnginePlan | None]:
    """The rows of `plan_grpo`, and the plan of the engine."""
    config, tokenizer = resolve_teacher(config, runs), load_tokenizer(config, runs=runs)
    with closing(make_task(config.env, tokenizer)) as task, Session(config) as session:
        prepared, rows = prepare_grpo(config, config, session, task, runs=runs, gpu=gpu)
        return rows, prepared.engine


def make_algorithm(config: GRPOConfig, task: Task, *, exact: bool = True) -> Algorithm:
    """The algorithm of a recipe. ``exact``: see `GRPOConfig.grpo_settings`."""
    found, options = load_algorithm(config.algorithm or config.ALGORITHM)
    if config.algorithm is None and config.SECTION is not None:
        options = getattr(config, config.SECTION)
    advantage, grpo = config.grpo_settings(exact=exact)
    if grpo.multi_objective_aggregation == "normalize_then_sum":
        advantage["reward_weights"] = task.reward_weights
    return found(options, group_size=config.group_size, advantage=advantage, grpo=grpo)


@dataclass(frozen=True)
class PreparedGRPO:
    """Decisions that are made before weights are loaded: prompts, evaluation problems, engine, algorithm."""

    prompts: list[Mapping[str, Any]]
    num_dropped: int  # prompts that were too long
    lengths: RowLengths  # of prompts with the longest answers
    held_out: Sequence[Mapping[str, Any]]
    engine: EnginePlan | None
    replays_routes: bool
    algorithm: Algorithm


def prepare_grpo(
    config: GRPOConfig, source: GRPOConfig, session: Session, task: Task, *, runs: Path, gpu: GPU | None = None
) -> tuple[PreparedGRPO, Rows]:
    """The parts of a run that need no weights, and its plan; ``source`` names the model to load, see `Run`."""
    check_teacher(config, task.tokenizer)
    source = resolve_teacher(source, runs)
    _check_processes(config, trainer_gpus(config, gpu).count if gpu else session.world_size)
    prompts, dropped, tokens = task.fit_prompts(training_rows(config.env))
    check_columns(load_algorithm(config.algorithm or config.ALGORITHM)[0], prompts)
    # Messages of tools and users have no known length: they are taken to be as long as the longest answers.
    most = (2 * config.env.max_turns - 1) * config.sampling.max_tokens
    held_out = task.measured(config.eval).scored(eval_rows(config.env, config.eval) or ())
    if config.eval.dataset is not None and not held_out:
        raise ConfigError("eval.dataset: answers are measured by a reward: got none; set env.reward, or leave it out.")
    empty = meta_model(source, task.processor, runs=runs)
    if isinstance(config, PPOConfig):
        check_critic(config, empty, task.processor, runs=runs)
    context = getattr(empty.config.get_text_config(), "max_position_embeddings", None)
    limits = [limit for limit in (config.env.max_conversation_tokens, context) if limit is not None]
    rows = tuple(min(length + most, *limits) if limits else length + most for length in tokens)
    # Conversations of an agent, and those that begin with an observation, are taken to be as long as they may be.
    unknown = len(prompts) - len(tokens)
    rows += (min(limits, default=longest_row(config)),) * unknown
    lengths = RowLengths(rows, alike=config.group_size, prompts=() if unknown else tuple(tokens))
    longest_held_out = task.measured(config.eval).longest_prompt(held_out)
    engine = plan_engine(source, session, longest_held_out, empty, gpu, lengths)
    # Transformers samples with the trained module itself, so in float32 its log-probs equal the trainer's.
    algorithm = make_algorithm(
        config, task, exact=config.rollout.engine == "transformers" and not session.low_precision
    )
    algorithm.demonstrations = read_demonstrations(config, task, prompts, context)
    prepared = PreparedGRPO(prompts, dropped, lengths, held_out, engine, replays_routes(source, empty), algorithm)
    return prepared, _grpo_plan(config, session, task, prepared, model_shape(empty), gpu)


def _check_processes(config: GRPOConfig, world_size: int) -> None:
    """Raises ConfigError for settings that do not work with this number of processes."""
    if config.prompts_per_step % world_size:
        raise ConfigError(
            f"prompts_per_step {config.prompts_per_step} must be a multiple of the {world_size} processes"
        )
    sharded = config.parallel.mode == "fsdp2" and world_size > 1
    alone = f"rollout.concurrency {config.rollout.concurrency}" if config.rollout.concurrency else ""
    alone = alone or ("env.agent" if config.env.agent else "")
    if sharded and config.rollout.engine == "transformers" and alone:
        raise ConfigError(
            f"{alone} with parallel.mode fsdp2 needs rollout.engine vllm: the "
            "processes of a sharded model generate in lockstep"
        )


def _grpo_plan(
    config: GRPOConfig,
    session: Session,
    task: Task,
    prepared: PreparedGRPO,
    shape: ModelShape,
    gpu: GPU | None,
) -> Rows:
    env, prompts, num_eval = config.env, config.prompts_per_step, len(prepared.held_out)
    algorithm = prepared.algorithm
    words = PRESETS[config.algo].describe(algorithm.advantage, algorithm.grpo) | algorithm.describe()
    unused = [name for name in algorithm.without if _is_given(config, name)]
    if config.zero_variance == "refill":
        words["advantage"] += f", others drawn in their place in at most {config.refill_rounds} more rounds"
    if config.overlong_buffer:
        words["advantage"] += f"; the last {config.overlong_buffer} tokens of {config.sampling.max_tokens} cost reward"
    if config.truncated == "mask":
        words["aggregation"] += ", without answers that were cut off"
    rollouts = f"{prompts} prompts x {config.group_size} = {prompts * config.group_size} rollouts a step"
    updates = f"{config.updates_per_step} update{'s' * (config.updates_per_step > 1)}"
    num_prompts, dropped = len(prepared.prompts), ""
    if prepared.num_dropped:
        dropped = f" · {prepared.num_dropped} longer than {env.max_prompt_tokens} tokens left out"
    evaluated = f" · {num_eval} problems measured" if num_eval else ""
    if num_eval and config.eval.every:
        evaluated += f" every {config.eval.every}"
    epochs = counted(config.steps, "step")
    if not env.is_mix and config.curriculum is None:  # sources have epochs of their own, pools have none
        epochs += f" = {config.steps * prompts / num_prompts:.2f} epochs"
    several = {"several_turns": env.several_turns, "new_records": env.several_records}
    return [
        *_model_rows(config, session, shape, gpu, prepared.lengths),
        *_images(config, Renderer(task.processor), shape),
        ("batch", f"{rollouts} · {updates} · {_microbatches(config, shape, gpu)}"),
        ("sampling", _sampling(config)),
        *_engine(config, prepared.engine),
        *([("algorithm", _named(config.algorithm))] if config.algorithm else []),
        (config.SECTION or f"algo {config.algo}"[:10], f"{'advantage':<12}{words['advantage']}"),
        ("", f"{'ratio':<12}{words['ratio']}"),
        ("", f"{'aggregation':<12}{words['aggregation']}"),
        ("", f"{'KL':<12}{words['kl']}"),
        *([("", f"{'not used':<12}{', '.join(unused)}: {type(algorithm).__name__} does without")] if unused else []),
        ("optim", _optim(config.optim, shape)),
        ("template", check_template(Renderer(task.tokenizer), **several)),
        *_sources(config, task, prepared),
        *_agent(config),
        *([("env", about)] if (about := task.about(config.eval, _at_once(config, num_eval))) else []),
        ("data", f"{num_prompts} prompts{dropped} · {epochs}{evaluated}"),
        *_sets(config, task, prepared),
        *_curriculum(config),
        *_not_used(_unused_columns(task, prepared), task.unused_keys),
        ("keep", _checkpoints(config)),
    ]


def _is_given(config: GRPOConfig, name: str) -> bool:
    section, _, field = name.rpartition(".")
    settings = getattr(config, section) if section else config
    return field in settings.model_fields_set and getattr(settings, field) is not None


def _unused_columns(task: Task, prepared: PreparedGRPO) -> list[str]:
    """Columns of the data that neither the task nor the algorithm reads."""
    return [name for name in task.unused_columns(prepared.prompts) if name not in columns_read(prepared.algorithm)]


def _named(algorithm: str | Mapping[str, Any]) -> str:
    if isinstance(algorithm, str):
        return algorithm
    name, options = next(iter(algorithm.items()))
    return f"{name} · " + ", ".join(f"{option} {value}" for option, value in (options or {}).items())


def check_template(
    renderer: Renderer, *, share: float | None = None, several_turns: bool = False, new_records: bool = False
) -> str:
    """The properties of the chat template, in words.

    Raises  TemplateError if nothing would be trained, or if the template rewrites earlier turns of conversations of
            several turns, unless such turns may be ``new_records``
    """
    report = renderer.check()
    share = report.trained_share if share is None else share
    if share <= 0:
        raise TemplateError(f"template: no token of a conversation would be trained: {report.reason}")
    if several_turns and not report.prefix_preserving and not new_records:
        raise TemplateError(
            f"template: several turns need one that leaves earlier turns as they are: {report.reason}; use "
            "chat_template=qwen or another that does, env.on_rewrite=new_record, which trains such a turn as a "
            "separate record, or env.max_turns=1."
        )
    stop = "yes" if report.stop_token_trained else "NO"
    if not report.stop_token_trained:  # the template was chosen: by the settings, or by the model's author
        eos = renderer.tokenizer.eos_token
        stop += f", so the model will not learn to stop: use a chat_template that ends an answer with {eos!r}"
    kept = "yes" if report.prefix_preserving else "NO: each turn is a record of its own" if several_turns else "NO"
    trained = f"{share:.0%} of the tokens trained · stop token trained {stop}"
    return f"{renderer.template.name} · {trained} · prefix-preserving {kept}"


def _sources(config: GRPOConfig, task: Task, prepared: PreparedGRPO) -> Rows:
    """The tools and user of the task; of a mix, for each source, after its share of the prompts and its rows."""
    if not config.env.is_mix:
        return _tools_and_user(task)
    rows: Rows = []
    by_source = () if config.eval.sets else task.parts(prepared.held_out)
    measured = {part.settings.label: len(own) for part, own in by_source}
    total = sum(source.weight for source in config.env.mix)
    for part, own in task.parts(prepared.prompts):
        source = part.settings
        share = source.weight / total
        text = f"{source.label} · weight {source.weight:g}, {share:.0%} of the prompts · {len(own)} prompts"
        if config.curriculum is None:
            text += f" · {share * config.steps * config.prompts_per_step / len(own):.2f} epochs"
        text += f" · {measured[source.label]} problems measured" if source.label in measured else ""
        rows += [("source", text), *_tools_and_user(part)]
        asked = config.eval.model_copy(update={"dataset": source.eval_dataset})
        if about := part.about(asked, _at_once(config, len(prepared.held_out))):
            rows.append(("env", about))
    return rows


def _at_once(config: GRPOConfig, num_eval: int) -> int:
    """The most conversations of a run at a time: those that are sampled ahead go on during evaluations."""
    settings, prompts = config.rollout, config.prompts_per_step
    ahead = settings.max_staleness * prompts + math.ceil(settings.oversample * prompts)
    measured = min(num_eval, config.eval.batch_size)
    trained = config.group_size * (prompts + ahead)
    return trained + measured if ahead else max(trained, measured)


def _sets(config: GRPOConfig, task: Task, prepared: PreparedGRPO) -> Rows:
    """The sets of ``eval.sets``, with their problems."""
    rows: Rows = []
    for part, own in task.measured(config.eval).parts(prepared.held_out) if config.eval.sets else ():
        data = part.settings.dataset or f"{part.settings.name} {part.settings.split}"
        rows.append(("measured", f"{part.settings.label} · {len(own)} problems of {data}"))
    return rows


def _curriculum(config: GRPOConfig) -> Rows:
    if config.curriculum is None:
        return []
    pools = " · ".join(f"{name}: {pool.label}" for name, pool in config.curriculum.pools.items())
    rows = [("curriculum", f"by the mean of the last {counted(config.curriculum.window, 'group')} · {pools}")]
    return rows if config.curriculum.levels is None else [*rows, ("", config.curriculum.levels.label)]


def _tools_and_user(task: Task) -> Rows:
    env, rows = task.settings, []
    if task.tools is not None:
        declared = "in the prompt" if task.tools.declare else "not in the prompt"
        names = ", ".join(task.tools.runner.tools)
        calls = f"{task.tools.format.name} calls, {declared}, at most {env.tool_timeout_s:g} s each"
        rows.append(("tools", f"{names} · {calls} · {env.max_turns} turns"))
    if env.user is not None:
        rows.append(("user", f"{env.user} · {env.max_turns} turns"))
    return rows


def _agent(config: GRPOConfig) -> Rows:
    agent = config.env.agent
    if agent is None:
        return []
    most = config.rollout.concurrency or "all"
    where = ", each in a process of its own" if agent.process or agent.command else ""
    limits = f"{most} at a time{where}, at most {agent.deadline_s:g} s with its retries, {config.env.retries} at most"
    trained = {
        "main": "its first conversation is trained; sub-agents and edited histories are not",
        "all": "all its conversations are trained, sub-agents and edited histories too",
        "longest": "its conversation with the most sampled tokens is trained",
    }
    who = agent.label if agent.is_named else config.env.label
    return [("agent", f"{who} · {limits}"), ("", trained[agent.train])]


def _model_rows(config: ModelSource, session: Session, shape: ModelShape, gpu: GPU | None, lengths: RowLengths) -> Rows:
    model = config.model
    if isinstance(model, TinyModelSettings):
        model = f"tiny {model.architecture}, {model.layers} layers of {model.hidden_size}, random (seed {config.seed})"
    rows = [("machine", session.describe()), ("model", model), *lora_rows(config, shape)]
    return rows + memory_rows(config, shape, session, gpu, lengths)


def _images(config: ModelSource, renderer: Renderer, shape: ModelShape, media: Sequence[Media] = ()) -> Rows:
    if renderer.vision is None:
        return []
    held = sum(value.nbytes for row in media for value in row.values())
    size = f" · {held / 2**30:.2g} GiB of tensors in RAM" if held else ""
    frozen = f"the vision tower is {'frozen' if config.model_options.freeze_vision else 'trained'}"
    part = f"{frozen} ({shape.frozen / 1e6:.2g}M parameters)" if shape.frozen else frozen
    return [("images", f"{part} · batches with images are padded, never packed{size}")]


def _microbatches(config: ModelSource, shape: ModelShape, gpu: GPU | None) -> str:
    budget = tokens_at_once(config.tokens_per_microbatch, shape.parameters, on_gpu=gpu is not None)
    return f"at most {budget} padded tokens at once"


def _optim(optim: OptimSettings, shape: ModelShape) -> str:
    import_optimizer(optim)
    warmup = f" after {counted(optim.warmup, 'step')}" if optim.warmup else ""
    names = {"adamw": "AdamW", "adamw_8bit": "AdamW in 8 bits", "adamw_offload": "AdamW in host memory"}
    share = f"{shape.matrices / shape.parameters:.0%} of the parameters"
    names["muon"] = (
        f"Muon for the 2-D weights of the decoder layers ({share}), AdamW for embeddings, output layer, norms"
    )
    names["muon"] += f", biases and all else · lr of Muon {optim.muon.lr or optim.lr:g}, {optim.muon.adjust_lr_fn}"
    lr = f"lr {optim.lr:g} {optim.schedule}{warmup}"
    return f"{names[optim.name]} · {lr} · gradient norm at most {optim.clip_norm:g}"


def _sampling(config: GRPOConfig) -> str:
    sampling = config.sampling
    limits = (("top_p", sampling.top_p, 1.0), ("top_k", sampling.top_k, 0))
    cut = [f"{name} {value:g}" for name, value, off in limits if value != off]
    warning = f" · {', '.join(cut)}: samples are not the policy's own" if cut else ""
    limit, turns = config.env.max_conversation_tokens, ""
    if limit is not None or config.env.several_turns:
        turns = f" · conversations of at most {'what the model holds' if limit is None else f'{limit} tokens'}"
    return f"at most {sampling.max_tokens} tokens{turns} · temperature {sampling.temperature:g}{warning}"


def _engine(config: GRPOConfig, engine: EnginePlan | None) -> Rows:
    words = [] if engine is None else [engine.place, _staleness(config), *engine.describe()]
    if config.rollout.own_engine is not None:
        words = [f"{_named(config.rollout.engine)}: its memory is not in the plan", _staleness(config)]
    if config.rollout.concurrency:
        words.append(f"{config.rollout.concurrency} conversations at a time, each independent")
    return [("engine", " · ".join(words))] if words else []


def _staleness(config: GRPOConfig) -> str:
    rollout, loss = config.rollout, config.grpo_settings(exact=False)[1]
    words = "weights sent after every step"
    if rollout.max_staleness == 1 and not rollout.oversample:
        words = "the next rollouts are sampled during the update, one version behind"
    elif rollout.max_staleness:
        begun = "answers in flight are waited for" if rollout.elsewhere else "answers continue with new weights"
        words = f"rollouts are sampled ahead, at most {rollout.max_staleness} versions behind; {begun}"
    if rollout.oversample:
        words += f"; {rollout.oversample:.0%} more groups than a step takes, the slowest are dropped"
    if rollout.max_staleness and loss.proximal != "behaviour" and loss.engine_correction["kind"] == "none":
        words += "; NOTHING CORRECTS FOR OLDER WEIGHTS (grpo.correction)"
    return words


def _checkpoints(config: ModelSource) -> str:
    every = f"every {config.checkpoint.every} steps and at the end" if config.checkpoint.every else "at the end"
    return f"checkpoint {every}, the last {config.checkpoint.keep} stay"
