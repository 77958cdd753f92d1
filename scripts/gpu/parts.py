"""The parts that need no engine: machine, tests, head, memory, speed of SFT and GRPO, decoding."""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import torch
import transformers
from tensordict import TensorDict
from timing import memory_mb
from torch import nn
from torch.autograd import DeviceType
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from llmrl.modules.llm.engines import Generation, SamplingParams, TransformersEngine
from llmrl.modules.llm.head_scores import HeadOptions, score_hidden
from llmrl.modules.llm.log_probs import TokenScorer
from llmrl.modules.llm.packing import HeadPath
from llmrl.objectives.llm import GRPOLoss, SFTLoss
from llmrl.train.data.lengths import RowLengths, microbatches
from llmrl.train.distributed import Session
from llmrl.train.models.lora import add_adapters
from llmrl.train.updater import make_updater
from scripts.gpu.context import GIB, Context
from scripts.gpu.figures import Figure
from tests.support.training_rows import policy_of, random_rows, shard_alone

ROOT = Path(__file__).parents[2]
Part = Callable[[Context], Iterator[Figure]]


# --- 1 machine --------------------------------------------------------------------------------------------------------


def machine(context: Context) -> Iterator[Figure]:
    """What the other limits rest on: products, copies, the bytes of a bare process."""
    words = [f"Python {sys.version.split()[0]}", f"torch {torch.__version__}"]
    words += [f"transformers {transformers.__version__}"]
    if context.gpu:
        words += [context.gpu.name, f"CUDA {torch.version.cuda}", f"{context.gpu.bytes / GIB:.1f} GiB"]
        if not context.gpu.bfloat16:
            yield Figure.failed("machine/bfloat16", "this GPU has none")
    yield Figure("machine/software", ", ".join(words))
    peak = (context.gpu and context.gpu.flops) or 0
    rate = context.matmul_rate()
    yield Figure("machine/products", rate / 1e12, "TFLOP/s", least=context.judged(0.6 * peak / 1e12))

    source = torch.empty(context.pick(2**32, 2**24), dtype=torch.uint8, device=context.device)
    target = torch.empty_like(source)
    [seconds] = context.seconds(lambda: target.copy_(source))
    is_h100 = context.gpu is not None and context.gpu.name in ("H100", "H200")
    least = context.judged(2300) if is_h100 else None
    yield Figure("machine/copies", 2 * source.nbytes / seconds / 1e9, "GB/s", least=least)

    before = torch.cuda.mem_get_info()[0] if context.on_gpu else 0
    begin = f"import torch; torch.zeros(1, device={str(context.device)!r}); print(flush=True); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", begin], **pipes) as bare:
        bare.stdout.readline()
        after = before - torch.cuda.mem_get_info()[0] if context.on_gpu else memory_mb("VmRSS", bare.pid) * 2**20
        bare.communicate("\n")
    yield Figure("machine/context of a process", after / GIB, "GiB", most=context.judged(0.75), cause="context")


# --- 2 tests ----------------------------------------------------------------------------------------------------------


def tests(context: Context) -> Iterator[Figure]:
    """The tests marked gpu, each file by name: a file that lacks a package does not stop the others."""
    files = sorted(path for path in ROOT.glob("tests/**/test_*.py") if "pytest.mark.gpu" in path.read_text())
    chosen = ["-m", "gpu and not vllm", *map(str, files)]
    if context.small:
        chosen = ["-k", "cpu", str(ROOT / "tests/modules/test_log_probs.py")]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "tests.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default", *chosen]
        run = subprocess.run([*command, f"--junitxml={report}"], cwd=ROOT, capture_output=True, text=True)
        if not report.exists():
            raise RuntimeError(f"pytest wrote no report: {run.stdout[-2000:]}{run.stderr[-2000:]}")
        cases = list(ElementTree.parse(report).iter("testcase"))
    passed = 0
    for case in cases:
        name = f"tests/{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}"
        kinds = {part.tag: part.get("message", "") for part in case}
        if wrong := kinds.get("failure") or kinds.get("error"):
            yield Figure.failed(name, wrong.strip().splitlines()[0][:200])
        elif "skipped" in kinds:
            yield Figure.skipped(name, kinds["skipped"])
        else:
            passed += 1
    yield Figure("tests/passed", passed, "", least=1)


# --- 3 head -----------------------------------------------------------------------------------------------------------


def head(context: Context) -> Iterator[Figure]:
    """Log-probs from hidden states, forwards and backwards: bytes, numbers, and time in products of matrices."""
    rate = context.matmul_rate()
    for name in ("0.5B", "7B"):
        shape = context.shape(name)
        hidden, vocabulary, tokens = shape.hidden, shape.vocabulary, context.pick(16_384, 512)
        layer = nn.Linear(hidden, vocabulary, bias=False, device=context.device)
        nn.init.normal_(layer.weight, std=0.02)
        states = torch.randn(tokens, hidden, device=context.device, requires_grad=True)
        targets = torch.randint(vocabulary, (tokens,), device=context.device)
        path = HeadPath(nn.Identity(), layer, 1.0, None)

        def score(count: int, path=path, states=states, targets=targets) -> torch.Tensor:
            with torch.autocast("cuda", torch.bfloat16, enabled=context.on_gpu):
                log_probs, _, _ = score_hidden(path, states[:count], targets[:count], HeadOptions(1.0, None, False))
            log_probs.mean().backward()
            return log_probs

        before = context.held()
        with context.peak() as peak:
            score(tokens)
            rise = peak() - before - states.nbytes  # the gradient of the states is one of the layers before
        plan = context.plan(context.sft(), shape).training["logits"]
        where, cause = f"head/{hidden} x {vocabulary}", "logits" if context.on_gpu else ""
        yield Figure(f"{where}: bytes", rise / plan, "x", most=context.judged(1.1), cause=cause)
        [seconds] = context.seconds(lambda: score(tokens))  # noqa: B023
        work = 8 * tokens * hidden * vocabulary / rate  # logits twice, and two gradients
        most = context.judged(1.7) if name == "7B" else None
        yield Figure(f"{where}: time", seconds / work, "x products", most=most)

        # The same inputs in float64, by plain autograd.
        part = min(tokens, 1024)
        layer.weight.grad = states.grad = None
        found = score(part)
        exact, weight = (
            each.detach().to(context.dtype).double().requires_grad_() for each in (states[:part], layer.weight)
        )
        expected = -F.cross_entropy(F.linear(exact, weight), targets[:part], reduction="none")
        expected.mean().backward()
        difference = (found.double() - expected).abs().mean().item()
        yield Figure(f"{where}: log-probs from float64", difference, "nats", most=2e-3)
        for what, own, right in (
            ("states", states.grad[:part], exact.grad),
            ("weight", layer.weight.grad, weight.grad),
        ):
            apart = ((own.double() - right).norm() / right.norm()).item()
            yield Figure(f"{where}: gradient of {what}", apart, "relative", most=5e-3)
        layer.weight.grad = states.grad = None
        del exact, weight, expected, found
        context.free()


# --- 4 memory ---------------------------------------------------------------------------------------------------------


def memory(context: Context) -> Iterator[Figure]:
    """A step of SFT against the plan: what tensors take, and what is left of the GPU."""
    cases = {
        "0.5B": {"memory": {"checkpointing": "off"}},
        "0.5B, checkpointing": {"memory": {"checkpointing": "on"}},
        "1.5B": {"memory": {"checkpointing": "off"}},
        "1.5B, checkpointing": {"memory": {"checkpointing": "on"}},
        "1.5B, FSDP2": {"memory": {"checkpointing": "on"}, "parallel": {"mode": "fsdp2"}},
        "7B, LoRA": {"memory": {"checkpointing": "on"}, "lora": {"r": 16}},
    }
    for name, changes in cases.items():
        if "lora" in changes and find_spec("peft") is None:
            yield Figure.skipped(f"memory/{name}", "peft is not installed")
            continue
        try:
            yield from memory_of(context, name, changes)
        except torch.OutOfMemoryError as error:
            yield Figure.failed(f"memory/{name}", str(error).splitlines()[0][:200])
        context.free()


def memory_of(context: Context, name: str, changes: dict) -> Iterator[Figure]:
    length, count = context.pick((1024, 8), (256, 8))
    given = {"tokens_per_microbatch": length * count, "packing": "off", "max_length": length, **changes}
    config, size, sharded = context.sft(batch_size=count, **given), name.partition(",")[0], "parallel" in changes
    planned, ranks = config, 1
    if sharded:  # as one of two copies, each on one rank
        given["parallel"] = {"mode": "fsdp2", "replicas": 2}
        planned, ranks = context.sft(batch_size=2 * count, **given), 2
    plan = context.plan(planned, context.shape(size), num_gpus=ranks, lengths=RowLengths((length,)))
    causes = plan.training
    with Session(config) as session:
        if sharded:
            shard_alone(session, context.device.type)
        before = context.held()
        low = session.low_precision and config.lora is not None
        model = context.model(size, torch.bfloat16 if low else torch.float32)
        model = add_adapters(config, model, None) if config.lora else model
        model = session.shard(model) if sharded else model
        weights = context.held() - before
        actor = policy_of(model)
        updater = make_updater(config, session, actor, steps=2)
        rows, loss = random_rows([length] * count).to(session.device), SFTLoss(actor)
        updater.step(loss, rows, 1)
        stays = context.held() - before
        at: dict[str, float] = {}
        updater.optimizer.register_step_pre_hook(lambda *_: at.update(gradients=context.held()))
        with context.peak() as peak:
            updater.step(loss, rows, 2)
            most = peak()
    if not context.on_gpu:  # of the process, and what the C library keeps
        yield Figure(f"memory/{name}: peak", most / plan.peak, "x", cause="peak of the process")
        return
    total = sum(causes.values())
    yield Figure(f"memory/{name}: peak", most / total, "x", least=context.judged(0.85), most=context.judged(1.15))
    measured = {"weights": weights, "optimizer": stays - weights, "gradients": at["gradients"] - before - stays}
    measured["activations"] = most - before - (total - causes["activations"])  # the rest, as planned
    for cause, value in measured.items():
        yield Figure(f"memory/{name}: {cause}", value / causes[cause], "x", cause=cause)
    free, whole = torch.cuda.mem_get_info()
    used, reserved = whole - free, torch.cuda.max_memory_reserved()
    yield Figure(f"memory/{name}: of the GPU", used / GIB, "GiB", most=context.judged(plan.peak / GIB))
    yield Figure(f"memory/{name}: reserve", (used - most) / GIB, "GiB", cause="reserve")
    yield Figure(f"memory/{name}: slack of the allocator", (reserved - most) / GIB, "GiB", cause="slack")


# --- 5 and 6 speed ----------------------------------------------------------------------------------------------------


def lengths_of(context: Context) -> list[int]:
    """Of 64 thousand tokens in rows of 200 to 1500."""
    total, shortest, longest = context.pick((65_536, 200, 1500), (256, 10, 40))
    draw, lengths = random.Random(0), []
    while sum(lengths) < total:
        lengths.append(draw.randint(shortest, longest))
    return lengths


def sft(context: Context) -> Iterator[Figure]:
    """A step of SFT against the same by hand: losses, tokens per second, share of the GPU's peak; compiled."""
    lengths = lengths_of(context)
    rows, budget = random_rows(lengths).to(context.device), context.pick(8192, 128)
    for name in ("0.5B", "1.5B"):
        [hand_s], hand_loss = timed_by_hand(context, name, rows, lengths, budget)
        context.free()
        seconds, metrics = timed_update(context, name, rows, budget)
        yield Figure(f"sft/{name}: speed", sum(lengths) / seconds, "tokens/s")
        apart = abs(metrics[0]["policy/loss"] / hand_loss - 1)
        yield Figure(f"sft/{name}: loss by hand", apart, "relative", most=1e-3 if context.on_gpu else 1e-5)
        yield Figure(f"sft/{name}: of the loop by hand", hand_s / seconds, "x", least=context.judged(0.92))
        if (own := metrics[-1].get("perf/mfu")) is not None:
            mfu = flops_by_hand(context, name, lengths) / seconds / context.gpu.flops
            least = {"0.5B": 0.22, "1.5B": 0.33}[name]
            yield Figure(f"sft/{name}: share of the peak", mfu, "", least=context.judged(least))
            yield Figure(f"sft/{name}: perf/mfu", own / mfu, "x", least=context.judged(0.95), most=1.05)
        context.free()
    if not context.on_gpu:
        yield Figure.skipped("sft/1.5B: compiled", "timed on a GPU only")
        return
    compiled, _ = timed_update(context, "1.5B", rows, budget, compile=True)
    yield Figure("sft/1.5B: compiled", seconds / compiled, "x", least=context.judged(1.15))


def timed_update(context: Context, name: str, rows: TensorDict, budget: int, **memory: bool) -> tuple[float, list]:
    """Seconds of an update of llmrl on the rows, and the metrics of all updates."""
    config = context.sft(tokens_per_microbatch=budget, memory={"checkpointing": "off", **memory})
    with Session(config) as session:
        actor = policy_of(context.model(name))
        updater = make_updater(config, session, actor, steps=1000)
        loss, metrics = SFTLoss(actor), []
        [seconds] = context.seconds(lambda: metrics.append(updater.train(loss, [rows], 1 + len(metrics))))
    return seconds, metrics


def flops_by_hand(context: Context, name: str, lengths: list[int]) -> float:
    """6 for each weight of a matrix and token, and causal attention; the head for the trained two thirds."""
    sizes = context.sizes(name)
    width = sizes.hidden_size
    keys = width // sizes.num_attention_heads * sizes.num_key_value_heads
    layer = 2 * width * width + 2 * width * keys + 3 * width * sizes.intermediate_size
    scored = sum(length - length // 3 for length in lengths)
    attention = 6 * sizes.num_hidden_layers * width * sum(length**2 for length in lengths)
    return 6 * (sizes.num_hidden_layers * layer * sum(lengths) + sizes.vocab_size * width * scored) + attention


def timed_by_hand(context: Context, name: str, rows: TensorDict, lengths: list[int], budget: int) -> tuple:
    """Seconds of a step of a loop without llmrl, and its first loss: sorted micro-batches, autocast, fused AdamW, a
    recomputed cross-entropy in chunks.
    """
    model = context.model(name)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.0, fused=context.on_gpu
    )
    ids, masks = (rows.get(key, as_list=True) for key in (("tokens", "full"), ("masks", "all_assistant_mask")))
    trained, losses = sum(int(mask.sum()) for mask in masks), []

    def chunk(hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model.lm_head(hidden).float(), targets, reduction="sum")

    def step() -> None:
        summed = 0.0
        for part in microbatches(lengths, budget):
            ids_BT, mask_BT = (pad_sequence([each[row] for row in part], batch_first=True) for each in (ids, masks))
            real_BT = pad_sequence([torch.ones_like(ids[row]) for row in part], batch_first=True)
            with torch.autocast("cuda", torch.bfloat16, enabled=context.on_gpu):
                hidden = model.model(input_ids=ids_BT, attention_mask=real_BT, use_cache=False).last_hidden_state
                hidden, targets = (each[mask_BT[:, 1:]].split(1024) for each in (hidden[:, :-1], ids_BT[:, 1:]))
                pairs = zip(hidden, targets, strict=True)
                loss = sum(checkpoint(chunk, *pair, use_reentrant=False) for pair in pairs) / trained
            loss.backward()
            summed += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(summed))

    return context.seconds(step), losses[0]


def grpo(context: Context) -> Iterator[Figure]:
    """Log-probs of the current weights and two updates, on stored rollouts."""
    config = context.grpo(tokens_per_microbatch=context.pick(8192, 128), memory={"checkpointing": "off"})
    lengths = lengths_of(context)
    rows = random_rows(lengths).to(context.device)
    batches = [rows[half] for half in torch.arange(len(rows)).chunk(2)]
    with Session(config) as session:
        actor = policy_of(context.model("0.5B"))
        updater = make_updater(config, session, actor, steps=1000)
        loss, plain, metrics = GRPOLoss(actor, proximal="recomputed", surrogate="clip"), SFTLoss(actor), []

        def step() -> None:
            for batch in batches:
                updater.add_proximal(loss, batch)
            metrics.append([updater.step(loss, batch, 1) for batch in batches])

        def step_of_sft() -> None:
            updater.step(plain, rows, 1)

        seconds, of_sft = context.seconds(step, step_of_sft)
        first = metrics[0][0]
        yield Figure("grpo/largest first ratio", first["ratio_max"], "", least=1, most=1)
        yield Figure("grpo/mean first ratio", first["ratio_mean"], "", least=1 - 1e-6, most=1 + 1e-6)
        yield Figure("grpo/speed", sum(lengths) / seconds, "tokens/s")
        yield Figure("grpo/time of a token, of SFT's", seconds / of_sft, "x", most=context.judged(1.4))
        if not context.on_gpu:
            yield Figure.skipped("grpo/idle", "a trace of kernels needs a GPU")
            return
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            updater.step(plain, rows, 1)
            context.synchronize()
        yield Figure("grpo/idle", idle_share(trace), "of an update", most=context.judged(0.05))


def idle_share(trace: profile) -> float:
    """The share of the time between the first and the last kernel in which none ran."""
    kernels = [event.time_range for event in trace.events() if event.device_type == DeviceType.CUDA]
    busy, end = 0.0, 0.0
    for span in sorted(kernels, key=lambda span: span.start):
        busy += max(0.0, span.end - max(span.start, end))
        end = max(end, span.end)
    return 1 - busy / (end - min(span.start for span in kernels))


# --- 7 decoding -------------------------------------------------------------------------------------------------------


def decode(context: Context) -> Iterator[Figure]:
    """Sampling by Transformers, and the same tokens scored by the trainer."""
    num_rows, num_tokens, num_given = context.pick((64, 256, 128), (4, 8, 6))
    config = context.grpo(prompts_per_step=num_rows // 2, group_size=2, sampling={"max_tokens": num_tokens})
    config = config.model_copy(update={"env": config.env.model_copy(update={"max_prompt_tokens": num_given})})
    model = context.model("0.5B")
    prompts = torch.randint(3, 400, (num_rows, num_given), device=context.device)
    with Session(config) as session:
        engine = TransformersEngine(model, eos_token_ids=(), pad_token_id=0, max_batch_tokens=None)
        params = SamplingParams(max_new_tokens=num_tokens)

        def sample() -> Generation:
            with session.autocast():
                return engine.generate(list(prompts), params, seeds=list(range(num_rows)))

        sample()
        before, start = context.held(), time.perf_counter()
        with context.peak() as peak:
            drawn = sample()
            context.synchronize()
            seconds, rise = time.perf_counter() - start, peak() - before
        yield Figure("decode/speed", num_rows * num_tokens / seconds, "tokens/s")
        cache = context.plan(config, context.shape("0.5B")).sampling["KV cache"]
        if context.on_gpu:  # autocast's copies of the weights are those of training
            rise -= 2 * sum(parameter.numel() for parameter in model.parameters())
            yield Figure("decode/cache", rise / cache, "x", most=context.judged(1.0), cause="KV cache")
        scorer = TokenScorer(model)
        apart = []
        for row, said in zip(range(num_rows), drawn.log_probs, strict=True):
            ids_1T = torch.cat([prompts[row], drawn.ids[row].to(context.device)])[None]
            everywhere = torch.ones_like(ids_1T, dtype=torch.bool)
            with torch.no_grad(), session.autocast():
                scores_1T = scorer(ids_1T, everywhere, everywhere).log_probs
            apart.append(scores_1T[0, num_given:] - said.to(context.device))
    logs = torch.cat(apart)
    bound, of_ratio = (2e-2, 5e-3) if context.on_gpu else (1e-5, 1e-5)
    yield Figure("decode/log-probs, trainer - engine", logs.abs().mean().item(), "nats", most=bound)
    ratio = logs.exp().mean().item()
    yield Figure("decode/mean ratio", ratio, "", least=1 - of_ratio, most=1 + of_ratio)


PARTS: dict[str, Part] = {"machine": machine, "tests": tests, "head": head, "memory": memory}
PARTS |= {"sft": sft, "grpo": grpo, "decode": decode}
