"""One optimizer step in micro-batches, normalised over the whole step: the same on any number of ranks."""

from __future__ import annotations

import math
import resource
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from llmrl.errors import TrainingError
from llmrl.modules.llm.log_probs import TokenScorer
from llmrl.modules.llm.packing import attends_by_row, evaluating
from llmrl.modules.llm.policies.columns import placeholders
from llmrl.modules.llm.policies.containers import LogProbs
from llmrl.modules.llm.routers import active_routes, same_routes
from llmrl.modules.llm.row_attention import active_rows, rows_apart
from llmrl.modules.llm.shared_prefixes import can_share_prefixes
from llmrl.objectives.base import LossModule, merge_outputs, output_fields, total_loss
from llmrl.objectives.llm.functional import StepCounts, entropy_threshold
from llmrl.objectives.metric import Metric
from llmrl.train.data.lengths import RowLengths, microbatches, tokens_at_once
from llmrl.train.data.sft import AT_ONCE
from llmrl.train.dealing import attention_share, deal_batch
from llmrl.train.expert_balance import ExpertBalance
from llmrl.train.gpus import find_gpu
from llmrl.train.models.recomputed import keep_less, keeps_less
from llmrl.train.models.shape import block_matrices, decoder_blocks, model_shape
from llmrl.train.optimizers import make_optimizer, set_learning_rate, set_options
from llmrl.train.planning.memory import uses_checkpointing
from llmrl.train.settings.machine import OptimSettings
from llmrl.train.settings.model import ModelSource

if TYPE_CHECKING:
    from llmrl.modules.llm.policies import TransformersWrapper
    from llmrl.train.distributed import Session

_METRICS = {  # of every loss, beside its own
    "loss": Metric("policy/loss"),
    "grad_norm": Metric("policy/grad_norm"),
    "lr": Metric("policy/lr"),
    "expert_aux_loss": Metric("router/aux_loss"),
    "expert_load_max": Metric("router/load_max", merge="max"),
    "expert_replayed": Metric("router/replayed_frac"),
    "expert_differing": Metric("router/differ_frac", merge="first"),
}
_FLOOR = 0.05  # final learning rate of a schedule, as a share of the peak


class Updater:
    """The optimizer of ``scorer``, which it wraps for distributed training: use ``updater.scorer`` afterwards.

    ``config.tokens_per_microbatch`` bounds the padded tokens of one forward pass, `tokens_at_once`. It changes memory
    and time but never the result: every loss term is divided by counts of the whole step. Nor does ``config.packing``.

    Raises  ConfigError for packing="on" if the model does not support it
    """

    def __init__(self, session: Session, scorer: TokenScorer, config: ModelSource, *, steps: int):
        self.session, self.steps = session, steps
        self.settings = config.optim
        self._model = scorer.model
        size = sum(parameter.numel() for parameter in scorer.model.parameters())
        self._budget = tokens_at_once(config.tokens_per_microbatch, size, on_gpu=session.device.type != "cpu")
        self._attention = attention_share(scorer.model)
        self._packing = config.packing
        scorer.use_packing(config.packing)
        self._balance = ExpertBalance(session, scorer.model, config.model_options.router_aux_loss)
        self.scorer = session.prepare(scorer)
        self._trained = [parameter for parameter in self.scorer.parameters() if parameter.requires_grad]
        given = {"matrices": block_matrices(self._model), "offloads": session.offloads}
        self.optimizer = make_optimizer(self._trained, config.optim, session.device, **given)
        self._counted: defaultdict[str, float] = defaultdict(float)  # since the last `speed`
        self._gpu = find_gpu(session.device, session.world_size)
        is_known = self._gpu and self._gpu.flops and session.low_precision  # the peak in the table is for bfloat16
        self._shape = model_shape(self._model) if is_known else None

    def deal(self, batch: TensorDictBase | None, *, everywhere: bool = False) -> tuple[TensorDictBase | None, float]:
        """`deal_batch` over the ranks, by the cost of rows for this model."""
        return deal_batch(self.session, batch, self._attention, everywhere=everywhere)

    def step(self, loss: LossModule, batch: TensorDictBase | None, step: int) -> dict[str, float]:
        """Trains on this rank's part of the batch (None: it has no rows) as optimizer step number ``step``.

        Returns  the fields of the loss's output, over all ranks, and "loss", "grad_norm", "lr"; {} if no rank has a
                 token to train: the model is then unchanged
        Raises   TrainingError if the gradient is not finite; the model is unchanged
        """
        is_filled = batch is not None
        batch = batch if is_filled else _empty_batch(loss, self.session.device)

        # Every loss term is divided by counts of the whole step, so counts are summed over the ranks before any forward
        # pass. The ranks of a group have the same rows: one of them counts.
        counts = (loss.count_step(batch) if self.session.leads_group else StepCounts()).over_ranks()
        if counts.tokens == 0:
            return {}
        with self._measured(batch, counts.tokens, loss.work):
            if loss.reads_mismatched:
                counts = self._with_log_ratios(loss, counts, [batch])
            with self.session.split_sequences():
                outputs = self._backward(loss, batch, counts, is_filled)
        rate = learning_rate(self.settings, step, self.steps)
        set_learning_rate(self.optimizer, rate)

        # The norm is over all ranks, so all ranks step or all raise.
        norm = nn.utils.clip_grad_norm_(self._trained, self.settings.clip_norm)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        if not norm.isfinite():
            self.optimizer.zero_grad(set_to_none=True)
            raise TrainingError(
                f"optimizer step {step}: the gradient must be finite: got norm {float(norm)}; the weights are those "
                f"of step {step - 1}. Resume from the last checkpoint with a smaller optim.lr, or look at the data."
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

        metrics = self._sum(loss, outputs)
        experts = self._balance.metrics()
        metrics["loss"] += self._balance.coefficient * experts.get("expert_aux_loss", 0.0)
        return metrics | experts | {"grad_norm": float(norm), "lr": rate}

    def measure(self, loss: LossModule, rows: TensorDictBase) -> dict[str, float]:
        """The fields of the loss's output for ``rows`` as one step, and "loss", without gradients or dropout.

        Every rank has the same rows and takes its part of each block of them; a collective.
        """
        blocks = [rows[start : start + AT_ONCE] for start in range(0, len(rows), AT_ONCE)]
        counts = sum(loss.count_step(block) for block in blocks)
        outputs = []
        dealt = [self.deal(block, everywhere=True)[0] for block in blocks]
        if loss.reads_mismatched:
            counts = self._with_log_ratios(loss, counts, dealt)
        for mine in dealt:
            batch = _empty_batch(loss, self.session.device) if mine is None else mine
            with torch.no_grad(), evaluating(self.scorer), self.session.split_sequences():
                outputs += [self._forward(loss, batch, part, counts) for part in self._parts(batch)]
        return self._sum(loss, outputs)

    def _with_log_ratios(
        self, loss: LossModule, counts: StepCounts, batches: Sequence[TensorDictBase | None]
    ) -> StepCounts:
        """``counts`` with the sum of the loss's `mismatched_log_ratios` over all rows of this step; a collective."""
        with evaluating(self.scorer):
            scores = [value for batch in batches for value in self.score(loss, batch, loss.mismatched_log_ratios)]
        own = float(torch.stack(scores).double().sum()) if scores and self.session.leads_group else 0.0
        return replace(counts, log_ratios=self.session.sum({"log_ratios": own})["log_ratios"])

    def train(
        self, loss: LossModule, batches: Sequence[TensorDictBase | None], step: int, *, family: str = "policy"
    ) -> dict[str, float]:
        """Runs a `step` on each batch; returns their combined metrics, with the time and `speed`.

        ``family``: of a model beside the policy, such as "critic". Only "<family>/loss", "grad_norm" and "lr" are then
        returned beside the loss's own metrics.
        """
        clock = time.perf_counter()
        updates = [self.step(loss, batch, step) for batch in batches]
        seconds = time.perf_counter() - clock
        metrics = step_metrics(updates, seconds, loss.metrics)
        if family == "policy":
            return metrics | self.speed(seconds)
        own = {metric.name for metric in loss.metrics.values()}
        renamed = {f"policy/{name}": f"{family}/{name}" for name in ("loss", "grad_norm", "lr")}
        return {renamed.get(name, name): value for name, value in metrics.items() if name in own or name in renamed}

    def _backward(self, loss: LossModule, batch: TensorDictBase, counts: StepCounts, is_filled: bool) -> list[Any]:
        """Runs forward and backward on each micro-batch, averages gradients over ranks; returns the loss's outputs."""
        parts = self._parts(batch)
        # `_forward` slices its micro-batch when it runs: slicing all beforehand would copy the batch.
        forwards = [(partial(self._forward, loss, batch, rows, counts), is_filled and bool(rows)) for rows in parts]
        self._balance.begin_step(forwards)
        outputs = []
        for number, (forward, has_rows) in enumerate(forwards, 1):
            # Gradients are reduced over the ranks once, in the backward pass of the last micro-batch.
            with nullcontext() if number == len(parts) else self.session.no_sync(self.scorer):
                with self._balance.watch():
                    output = forward()
                total = total_loss(output) + self._balance.term(is_filled=has_rows)
                # DDP and FSDP average over ranks, but the loss is a partial sum, already normalised over all ranks.
                self.session.accelerator.backward(total * self.session.world_size)
            outputs.append(output)
        self.session.average_whole_gradients(self._trained)
        return outputs

    def _sum(self, loss: LossModule, outputs: Sequence[Any]) -> dict[str, float]:
        """The fields of the micro-batches' outputs, and "loss", over all micro-batches and ranks."""
        # Outputs are partial sums of the step; their ratios (`derived`) are computed from the complete sums.
        merged = {name: float(value) for name, value in output_fields(merge_outputs(outputs)).items()}
        merged["loss"] = sum(float(total_loss(output).detach()) for output in outputs)
        metrics = self.session.sum(merged if self.session.leads_group else dict.fromkeys(merged, 0.0))
        tensors = {name: torch.tensor(value, dtype=torch.float64) for name, value in metrics.items()}
        return metrics | {name: float(value) for name, value in loss.derived(tensors).items()}

    def _forward(self, loss: LossModule, batch: TensorDictBase, rows: Sequence[int], counts: StepCounts) -> Any:
        part = batch[torch.tensor(rows)] if rows else _empty_batch(loss, self.session.device)
        return loss(part, normalizer=counts)

    @contextmanager
    def _measured(self, batch: TensorDictBase, num_tokens: float, work: float) -> Iterator[None]:
        """Counts, for `speed`, the model's work inside the block: padded positions, real tokens, FLOPs."""
        lengths, counted = _lengths(batch), self._counted
        share = self.session.num_groups / self.session.world_size  # of the rows of its group
        scored = sum(int(mask.sum()) for mask in batch.get(("masks", "all_assistant_mask"), as_list=True))

        def count(module: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
            counted["positions"] += output.shape[:-1].numel()

        handle = self._model.get_input_embeddings().register_forward_hook(count)
        try:
            yield
        finally:
            handle.remove()
        counted["tokens"] += share * sum(lengths)
        counted["trained"] += float(num_tokens) / self.session.world_size
        if self._shape is not None:
            flops = work * share * self._shape.training_flops(lengths, scored)
            counted["ideal_s"] += flops / self._gpu.flops / self._gpu.count

    def speed(self, seconds: float) -> dict[str, float]:
        """The "perf" metrics of the updates since the last call, which took ``seconds``; a collective."""
        device = self.session.device
        total = self.session.sum({**self._counted, "peak_gb_max": _peak_gb(device)})
        self._counted.clear()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        metrics = {
            "perf/train_tok_s_device": total.get("trained", 0.0) / seconds / self.session.world_size,
            "perf/peak_gb": total["peak_gb_max"],
        }
        if total.get("positions"):
            metrics["perf/padding_frac"] = max(0.0, 1 - total["tokens"] / total["positions"])
        if total.get("ideal_s"):
            metrics["perf/mfu"] = total["ideal_s"] / seconds
        return metrics

    def add_proximal(self, loss: LossModule, batch: TensorDictBase | None) -> None:
        """Writes ("proximal_log_probs", "full"), the log-probs under the current weights, for a later `step`.

        Uses the same micro-batches as that step, so that its first ratios are exactly 1 in every precision.
        """
        scores = self.score(loss, batch, loss.proximal_log_probs)
        if batch is not None:
            columns = [row[:length].clone() for row, length in zip(scores, _lengths(batch), strict=True)]
            batch.set("proximal_log_probs", LogProbs.from_rows({"full": columns}))

    def add_top_entropy(self, loss: LossModule, batch: TensorDictBase | None, quantile: float) -> None:
        """Writes ("top_entropy", "full"): 1 at the share ``quantile`` of the trained tokens, of the batches of all
        ranks, with the highest entropy under the current weights; else 0. A collective.
        """
        found = self.score(loss, batch, loss.entropies)
        rows = [] if batch is None else [row[:size] for row, size in zip(found, _lengths(batch), strict=True)]
        own = [row[~row.isnan()].cpu() for row in rows] if self.session.leads_group else []
        of_all = torch.cat([torch.zeros(0), *self.session.gather(own)])
        threshold = entropy_threshold(of_all, quantile)
        if batch is not None:
            batch.set("top_entropy", LogProbs.from_rows({"full": [(row >= threshold).float() for row in rows]}))

    def score(
        self, loss: LossModule | None, batch: TensorDictBase | None, function: Callable[[TensorDictBase], Tensor]
    ) -> list[Tensor]:
        """The result of ``function`` for each row of the batch, in the micro-batches of a `step`; a collective.

        ``loss``: the one whose columns ``function`` reads; None: those of every rollout alone.
        """
        batch = _empty_batch(loss, self.session.device) if batch is None else batch
        scores: list[Tensor] = [None] * len(_lengths(batch))  # type: ignore[list-item]
        for rows in self._parts(batch):
            part = batch[torch.tensor(rows)] if rows else _empty_batch(loss, self.session.device)
            with torch.no_grad(), self.session.split_sequences():
                values = function(part)
            for row, value in zip(rows, values, strict=bool(rows)):
                scores[row] = value
        return scores

    @cached_property
    def _shares_prefixes(self) -> bool:
        return self._whole(can_share_prefixes, self._packing)

    @cached_property
    def _without_filling(self) -> bool:
        return self._packing == "on" and self._whole(attends_by_row)

    @torch.no_grad()
    def _whole(self, function: Callable[..., bool], *options: Any) -> bool:
        """``function`` of the model, gathered if it is sharded."""
        call = getattr(self._model, "call_whole", None)
        return function(self._model, *options) if call is None else call(function, *options)

    def _parts(self, batch: TensorDictBase) -> list[list[int]]:
        """The rows of each micro-batch; if sharded, equally many on each rank: every forward pass is a collective."""
        prompts = _prompts(batch) if self._shares_prefixes else None
        parts = microbatches(_lengths(batch), self._budget, prompts, without_filling=self._without_filling)
        if self.session.sharded:
            parts += [[]] * (max(self.session.gather([len(parts)])) - len(parts))
        return parts

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state by parameter name; sharded tensors stay sharded."""
        return get_optimizer_state_dict(self.scorer, self.optimizer)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads ``state``, sharded or whole on every rank; its options are those of the settings."""
        tensors = (value for values in state["state"].values() for value in values.values())
        options = StateDictOptions(full_state_dict=not any(isinstance(value, DTensor) for value in tensors))
        set_optimizer_state_dict(self.scorer, self.optimizer, state, options=options)
        set_options(self.optimizer, self.settings)


def make_updater(
    config: ModelSource,
    session: Session,
    policy: TransformersWrapper,
    *,
    steps: int,
    lengths: RowLengths | None = None,
) -> Updater:
    """The updater of a policy's model, by the settings; the policy then scores with the updater's module.

    lengths  of the rows that will be trained, by which the plan chose between checkpointing and none
    """
    model, on_gpu = policy.scorer.model, session.device.type != "cpu"
    if uses_checkpointing(config, model, session, lengths):
        random = config.lora is not None and config.lora.dropout > 0
        recompute_blocks(model, offload=config.memory.offload == "activations", random=random)
    elif keeps_less(config, model.config.get_text_config().hidden_size, on_gpu=on_gpu, sharded=session.sharded):
        keep_less(model)
    if config.memory.compile:
        for block in decoder_blocks(model):
            block.compile()
    updater = Updater(session, policy.scorer, config, steps=steps)
    policy.scorer = updater.scorer
    return updater


def recompute_blocks(model: nn.Module, *, offload: bool = False, random: bool = False) -> None:
    """Makes each decoder layer keep only its input, and recompute the rest in the backward pass.

    This also works in evaluation mode, in which models are trained. ``random``: the layers use random numbers (dropout
    of adapters). ``offload``: the inputs are kept in host memory. Copies of the model do the same.
    """
    # Transformers' own gradient checkpointing works in training mode only.
    for block in decoder_blocks(model):
        block.forward = partial(_recompute, block.forward, offload, random)


def _recompute(forward: Callable[..., Any], offload: bool, random: bool, *inputs: Any, **options: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*inputs, **options)
    routes, rows = active_routes(), active_rows()  # they are no longer active in the backward pass
    if routes is not None or rows is not None:
        options["context_fn"] = lambda: (nullcontext(), _recomputing(routes, rows))
    with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()) if offload else nullcontext():
        return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=random, **options)


@contextmanager
def _recomputing(routes: Tensor | None, rows: Sequence[int] | None) -> Iterator[None]:
    with same_routes(routes), nullcontext() if rows is None else rows_apart(rows):
        yield


def step_metrics(updates: Sequence[Mapping[str, float]], seconds: float, own: Mapping[str, Metric]) -> dict[str, float]:
    """The metrics of a step from those of its updates, which took ``seconds``. ``own``: those that the loss declares.

    >>> updates = [{"loss": 1.0, "ESS": 1.0, "lr": 0.1, "tokens": 30.0}]
    >>> updates += [{}, {"loss": 2.0, "ESS": 0.8, "lr": 0.1, "tokens": 10.0}]
    >>> metrics = step_metrics(updates, 2.0, {"ESS": Metric("mismatch/ess", merge="first")})
    >>> metrics["policy/loss"], metrics["mismatch/ess"], metrics["perf/train_tok_s"]
    (1.25, 1.0, 20.0)
    """
    updates = [update for update in updates if update]  # an update without a token to train is empty
    tokens = [update["tokens"] for update in updates]
    metrics = {"tokens/trained": sum(tokens), "time/update": seconds, "perf/train_tok_s": sum(tokens) / seconds}
    for field, metric in {**_METRICS, **own}.items():
        values = [update[field] for update in updates if field in update]
        if not values:
            continue
        if metric.merge == "first" or len(set(values)) == 1:
            metrics[metric.name] = values[0]
        elif metric.merge == "max":
            metrics[metric.name] = max(values)
        else:
            metrics[metric.name] = sum(v * n for v, n in zip(values, tokens, strict=True)) / sum(tokens)
    return metrics


def _peak_gb(device: torch.device) -> float:
    """Peak memory of the GPU since the last reset; on a CPU, of this process since it started."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def learning_rate(optim: OptimSettings, step: int, steps: int) -> float:
    """The learning rate of step ``step`` of ``steps``, counted from 1: a linear warm-up, then the schedule.

    >>> optim = OptimSettings(lr=1.0, warmup=2, schedule="linear")
    >>> [round(learning_rate(optim, step, 10), 3) for step in (1, 2, 6, 10)]
    [0.5, 1.0, 0.525, 0.05]
    """
    if step <= optim.warmup:
        return optim.lr * step / optim.warmup
    if optim.schedule == "constant":
        return optim.lr
    done = (step - optim.warmup) / max(1, steps - optim.warmup)
    share = 1 - done if optim.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return optim.lr * (_FLOOR + (1 - _FLOOR) * share)


def _lengths(batch: TensorDictBase) -> list[int]:
    return [len(ids) for ids in batch.get(("tokens", "full"), as_list=True)]


def _prompts(batch: TensorDictBase) -> list[tuple[int, ...]]:
    """The ids of each row before the first that is trained."""
    rows = batch.get(("tokens", "full"), as_list=True)
    masks = batch.get(("masks", "all_assistant_mask"), as_list=True)
    return [tuple(ids[: int(mask.int().argmax())].tolist()) for ids, mask in zip(rows, masks, strict=True)]


def _empty_batch(loss: LossModule | None, device: torch.device) -> TensorDict:
    """A batch without a trained token, with which a rank without rows takes part in the collectives of a step."""
    own = {"next": TensorDict(batch_size=[1])} if loss is None else loss.placeholder(device)
    return TensorDict({**placeholders(device), **own}, batch_size=[1])
