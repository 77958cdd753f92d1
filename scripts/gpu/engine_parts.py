"""The parts with another process: weights on their way, an engine beside the trainer, and a whole run."""

from __future__ import annotations

import copy
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

import torch
from bench_weight_sync import Receiver, layers
from runs import run_steps
from tensordict import TensorDict
from torch.nn import functional as F

from llmrl.modules.llm.engines import Generation, SamplingParams
from llmrl.modules.llm.engines.vllm.transfer import CudaIPC, SharedMemory
from llmrl.modules.llm.policies.containers import LogProbs, Masks, Tokens
from llmrl.objectives.llm import GRPOLoss, SFTLoss
from llmrl.testing import tiny_tokenizer
from llmrl.train.distributed import Session
from llmrl.train.models.loading import load_model, load_tokenizer
from llmrl.train.planning.engines import plan_engine
from llmrl.train.planning.memory import row_bound
from llmrl.train.rollouts.engine import RolloutEngine
from llmrl.train.settings import GRPOConfig
from llmrl.train.updater import make_updater
from scripts.gpu.context import GIB, Context
from scripts.gpu.figures import Figure
from tests.support.training_rows import policy_of, random_rows

NO_VLLM = "vllm is not installed"


# --- 8 transfer -------------------------------------------------------------------------------------------------------


def transfer(context: Context) -> Iterator[Figure]:
    """Weights to another process through each kind of memory; AdamW's moments in host memory, saved and loaded."""
    parameters = context.pick(2**29, 2**20)  # 2 GiB
    weights = {name: each.to(context.device) for name, each in layers(parameters, context.pick(4096, 256)).items()}
    size = sum(tensor.nbytes for tensor in weights.values())
    kinds = {"shared memory": (SharedMemory(), 20.0)}
    kinds |= {"CUDA IPC": (CudaIPC(), 200.0)} if context.on_gpu else {}
    for name, (settings, least) in kinds.items():
        with closing(Receiver(weights)) as receiver:
            [seconds] = context.seconds(lambda: receiver.send(settings))  # noqa: B023
        yield Figure(f"transfer/{name}", size / seconds / 1e9, "GB/s", least=context.judged(least))
    if not context.on_gpu:
        yield Figure.skipped("transfer/CUDA IPC", "no GPU")
    del weights
    context.free()

    config = context.sft(optim={"lr": 1e-3, "name": "adamw_offload"}, memory={"checkpointing": "on"})
    rows = random_rows().to(context.device)
    with Session(config) as session:
        actor = policy_of(context.model("0.5B"))
        updater, loss = make_updater(config, session, actor, steps=9), SFTLoss(actor)
        updater.step(loss, rows, 1)
        saved, state = copy.deepcopy(actor.model.state_dict()), copy.deepcopy(updater.state_dict())
        expected = updater.step(loss, rows, 2), updater.step(loss, rows, 3)

        again = policy_of(context.model("0.5B"))
        again.model.load_state_dict(saved)
        resumed, loss = make_updater(config, session, again, steps=9), SFTLoss(again)
        before = context.held()
        with context.peak() as peak:
            resumed.load_state_dict(state)
        moments = [value for values in resumed.optimizer.state.values() for value in values.values()]
        on_gpu = sum(value.nbytes for value in moments if value.is_cuda)
        yield Figure("transfer/moments on the GPU after loading", on_gpu / GIB, "GiB", most=0.0)
        if context.on_gpu:
            yield Figure("transfer/rise while loading", (peak() - before) / GIB, "GiB")
        found = resumed.step(loss, rows, 2), resumed.step(loss, rows, 3)
        apart = max(abs(one["loss"] / other["loss"] - 1) for one, other in zip(found, expected, strict=True))
        yield Figure("transfer/loss after loading", apart, "relative", most=1e-3 if context.on_gpu else 1e-6)


# --- 9 engine ---------------------------------------------------------------------------------------------------------


def engine(context: Context) -> Iterator[Figure]:
    """vLLM beside the trainer, in a process of its own and in this one: memory it gives back, weights it gets."""
    if find_spec("vllm") is None:
        yield Figure.skipped("engine", NO_VLLM)
        return
    with tempfile.TemporaryDirectory() as folder:
        save(context, "1.5B", folder)
        for own_process in context.pick((True, False), (False,)):
            yield from engine_at(context, folder, own_process)
            context.free()


def save(context: Context, name: str, folder: str) -> None:
    """The files of a random model and of the tests' tokenizer, whose ids are the first ones of the vocabulary."""
    context.model(name, context.dtype).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    context.free()


def engine_at(context: Context, folder: str, own_process: bool) -> Iterator[Figure]:
    where, num_tokens = "engine/apart" if own_process else "engine/here", context.pick(64, 8)
    # CUDA graphs, which take long to capture, only here
    options = {"enforce_eager": own_process} if context.on_gpu else {"kv_cache_memory_bytes": 1 << 27}
    rollout = {"engine": "vllm", "own_process": own_process, "sleep": True, "options": options}
    env = {"name": "sums", "max_prompt_tokens": 64}
    given = {"model": folder, "env": env, "rollout": rollout, "sampling": {"max_tokens": num_tokens}}
    config = context.grpo(**given, prompts_per_step=context.pick(32, 4), optim={"lr": 1e-5, "warmup": 0})
    num_rows = config.prompts_per_step * config.group_size
    with Session(config) as session:
        tokenizer = load_tokenizer(config, runs=Path(folder))
        model = load_model(config, tokenizer, session, runs=Path(folder))
        plan = plan_engine(config, session, 0, model, lengths=row_bound(config))
        start = time.perf_counter()
        rollouts = RolloutEngine(config, session, model, tokenizer, plan)
        with closing(rollouts):
            yield Figure(f"{where}: start", time.perf_counter() - start, "s")
            yield Figure(f"{where}: rows at once", plan.options.get("max_num_seqs", 0), "", least=context.judged(256))
            actor = policy_of(model)
            updater = make_updater(config, session, actor, steps=9)
            loss, vllm = GRPOLoss(actor), rollouts.policy.engine
            prompts = [torch.randint(3, 400, (32,)) for _ in range(num_rows)]
            params = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)
            for version in (1, 2, 3):
                drawn = vllm.generate(prompts, params)
                rows = rows_of(prompts, drawn)
                rollouts.set_probe_rows(rows, updater.scorer)
                awake = context.free_bytes()
                rollouts.sleep()
                share = plan.options.get("gpu_memory_utilization", 0.0) * (context.gpu.bytes if context.gpu else 0.0)
                if share and version == 1:
                    freed = (context.free_bytes() - awake) / share
                    yield Figure(f"{where}: freed by sleep", freed, "of its share", least=context.judged(0.95))
                updater.step(loss, rows.to(session.device), version)
                start = time.perf_counter()
                metrics = rollouts.push(updater.scorer)
                seconds = time.perf_counter() - start
                last = f"{where}, version {version}"
                yield Figure(f"{last}: wake, push and probe", seconds, "s", most=context.judged(2.0))
                yield Figure(f"{last}: push", metrics["perf/sync_gb_s"], "GB/s", least=context.judged(20))
                bound = 2e-2 if context.on_gpu else 1e-4
                yield Figure(f"{last}: log-probs, trainer - engine", metrics["mismatch/probe"], "nats", most=bound)
                yield Figure(f"{last}: faults found by the probe", metrics["mismatch/probe_warnings"], "", most=0)
            # One push that is lost.
            sends = vllm.update_weights

            def lose(weights: object, *, version: int) -> None:
                vllm.version, vllm.update_weights = version, sends

            vllm.update_weights = lose
            updater.step(loss, rows.to(session.device), 4)
            found = rollouts.push(updater.scorer)["mismatch/probe_warnings"]
            yield Figure(f"{where}: a lost push is found", found, "", least=1)


def rows_of(prompts: list[torch.Tensor], drawn: Generation) -> TensorDict:
    """The rows that a step trains on, in groups of two."""
    ids = [torch.cat([prompt, own]) for prompt, own in zip(prompts, drawn.ids, strict=True)]
    rows = random_rows([len(row) for row in ids])
    sizes = [(len(prompt), len(row)) for prompt, row in zip(prompts, ids, strict=True)]
    padded = [F.pad(own, (given, 0)) for (given, _), own in zip(sizes, drawn.log_probs, strict=True)]
    rows["tokens"] = Tokens.from_rows({"full": ids})
    rows["masks"] = Masks.from_rows({"all_assistant_mask": [torch.arange(n) >= given for given, n in sizes]})
    rows["log_probs"] = LogProbs.from_rows({"full": padded})
    rows["group_id"] = torch.arange(len(ids)) // 2
    return rows


# --- 10 run -----------------------------------------------------------------------------------------------------------


def run(context: Context) -> Iterator[Figure]:
    """Three steps of the command: where the time goes, and the peak against the plan."""
    has_vllm = find_spec("vllm") is not None
    if not has_vllm:
        yield Figure.skipped("run/with vLLM", f"{NO_VLLM}: Transformers samples")
    with tempfile.TemporaryDirectory() as folder:
        save(context, "0.5B", folder)
        options = {"kv_cache_memory_bytes": 1 << 27} if has_vllm and not context.on_gpu else {}
        rollout = {"engine": "vllm" if has_vllm else "transformers", "options": options}
        settings = {"model": folder, "env": {"name": "sums"}, "rollout": rollout, "steps": 3, "zero_variance": "keep"}
        settings |= {"prompts_per_step": context.pick(32, 4), "sampling": {"max_tokens": context.pick(256, 8)}}
        settings |= {"eval": {"rows": 4, "max_tokens": 4}, "samples": 0}
        recipe = Path(folder) / "recipe.yaml"
        recipe.write_text(json.dumps(settings))  # JSON is YAML
        steps = run_steps("grpo", str(recipe))
    second = steps[1]
    parts = {name: value for name, value in second.items() if name.startswith("time/") and name != "time/step"}
    for name, value in parts.items():
        yield Figure(f"run/{name}", value / second["time/step"], "of a step")
    yield Figure("run/step", second["time/step"], "s")
    yield Figure("run/named parts", sum(parts.values()) / second["time/step"], "of a step", least=context.judged(0.9))
    yield Figure("run/speed", second["perf/train_tok_s"], "trained tokens/s")
    if context.on_gpu:
        plan = context.plan(GRPOConfig(**settings), context.shape("0.5B"))
        peak = max(step["perf/peak_gb"] for step in steps) * 1e9
        yield Figure("run/peak", peak / (plan.peak - plan.reserve), "x", most=context.judged(1.0))


PARTS = {"transfer": transfer, "engine": engine, "run": run}
