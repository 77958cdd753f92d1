"""A teacher as a term of a loss: at each token that the student sampled, what the teacher would have written there.

`TeacherTerm` is what `GRPOLoss` holds; the models behind it are in `teacher_models`. The teacher reads the ids that the
student sampled, never their text. Of ``full``, neither model's logits exist for more than a chunk of tokens.

Shapes: B sequences, T tokens, N trained tokens, C tokens of a chunk, V vocabulary, K ids that the teacher names, H
hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from llmrl.data.llm.templates import Chat
from llmrl.data.ragged.padding import pad_rows
from llmrl.data.ragged.tensordicts import column_values, required
from llmrl.errors import ConfigError, DataError
from llmrl.modules.llm.head_scores import (
    HeadGradients,
    HeadOptions,
    HeadSpec,
    chunk_rows,
    chunks_of_logits,
    head_module,
    plain_head,
    score_hidden,
)
from llmrl.modules.llm.log_probs import TokenScores
from llmrl.modules.llm.packing import HeadPath, map_logits, reduction_dtype
from llmrl.modules.llm.policies.columns import placeholders
from llmrl.modules.llm.policies.containers import Tokens
from llmrl.modules.llm.rendering import Renderer
from llmrl.modules.llm.vision import present, read_media
from llmrl.objectives.llm import functional as fn
from llmrl.objectives.llm.batch import ASSISTANT_MASK, TOKENS, PaddedBatch, PolicyBatch
from llmrl.objectives.llm.teacher_settings import DivergenceSettings
from llmrl.objectives.metric import Metric

if TYPE_CHECKING:
    from llmrl.objectives.llm.algorithm import Context
    from llmrl.objectives.llm.grpo import GRPOLoss

SAMPLED = ("next", "teacher_log_probs", "full")  # columns of a teacher that was asked before the step's updates
PROMPT = ("teacher_prompt", "full")
TOP_IDS, TOP_LOG_PROBS = ("teacher_top", "ids"), ("teacher_top", "log_probs")
DIVERGENCE = Metric("policy/kl_teacher", "divergence from the teacher, per token", label="KL teacher")
_AT_ONCE = 64  # tokens whose likeliest ids are found together
_LEAST, _MOST = -69.0, 1 - 1e-6  # of the student's rest, log(1e-30); of the teacher's K, whose sum rounding blurs


class HiddenTeacher(NamedTuple):
    """A teacher's hidden states at N tokens, and its head.

    ``vocabulary``  rows of the head. Student and teacher are compared over the rows that both have: models of one
                    family pad one vocabulary to different sizes, and no id beyond it is ever sampled.
    """

    hidden_NH: Tensor
    logits: Callable[[Tensor], Tensor]  # of hidden states [C, H]: a new float[C, V], at the temperature
    vocabulary: int

    def measure(self, part: slice, log_p_CV: Tensor, beta: float) -> tuple[Tensor, Tensor]:
        """The divergence at these tokens, and its gradient by logits; overwrites the student's log-probs."""
        logits_CV = self.logits(self.hidden_NH[part])[:, : log_p_CV.shape[1]]
        return fn.divergence(log_p_CV, log_softmax_(logits_CV), beta)


class TopTeacher(NamedTuple):
    """The K likeliest tokens of a teacher at each of N tokens, with their log-probs; all others count as one token.

    Merging tokens never increases a divergence: this is a lower bound of the whole one, equal to it for K = V. Without
    the others the two would not be distributions, and the sum no divergence.
    """

    ids_NK: Tensor
    log_probs_NK: Tensor
    vocabulary: int | None = None

    def measure(self, part: slice, log_p_CV: Tensor, beta: float) -> tuple[Tensor, Tensor]:
        ids_CK, log_q_CK = self.ids_NK[part].long(), self.log_probs_NK[part].to(log_p_CV)
        rest_C1 = log_p_CV.scatter(1, ids_CK, -torch.inf).logsumexp(-1, keepdim=True).clamp_(min=_LEAST)
        log_p_CB = torch.cat([log_p_CV.gather(1, ids_CK), rest_C1], 1)
        log_q_rest_C1 = torch.log1p(-log_q_CK.exp().sum(-1, keepdim=True).clamp(max=_MOST))
        value_C, grad_CB = fn.divergence(log_p_CB, torch.cat([log_q_CK, log_q_rest_C1], 1), beta)
        # A logit of the rest has its share of the gradient, by probability.
        grad_CV = log_p_CV.sub_(rest_C1).exp_().mul_(grad_CB[:, -1:]).scatter_(1, ids_CK, grad_CB[:, :-1])
        return value_C, grad_CV


Teacher = HiddenTeacher | TopTeacher


def log_softmax_(logits_CV: Tensor) -> Tensor:
    return logits_CV.sub_(logits_CV.logsumexp(-1, keepdim=True))


def read_teacher(
    scorer: nn.Module, batch: PaddedBatch, mask_BT: Tensor, temperature: float, **media: Any
) -> HiddenTeacher:
    """One pass of the teacher's body over the batch. ``scorer`` has ``token_scores``, as the actor has.

    Raises  DataError for ids beyond the teacher's embedding
    """
    found: list[HiddenTeacher] = []
    is_sharded = hasattr(getattr(scorer, "model", None), "call_whole")

    def keep(path: HeadPath, hidden_NH: Tensor, targets_N: Tensor, options: HeadOptions) -> tuple[Tensor | None, ...]:
        found.append(HiddenTeacher(hidden_NH, *_frozen_head(path, hidden_NH, options, copies=is_sharded)))
        return torch.zeros_like(targets_N, dtype=torch.float32), None, torch.zeros_like(targets_N, dtype=torch.bool)

    with torch.no_grad():
        scorer.token_scores(batch.input_ids, batch.attention_mask, mask_BT, head=keep, temperature=temperature, **media)
    teacher, largest = found[0], int(batch.input_ids.max())
    if largest >= teacher.vocabulary:
        raise DataError(
            f"distill: ids must be within the {teacher.vocabulary} rows of the teacher's head: got {largest}; student "
            "and teacher must share a tokenizer."
        )
    return teacher


def _frozen_head(
    path: HeadPath, hidden_NH: Tensor, options: HeadOptions, *, copies: bool
) -> tuple[Callable[[Tensor], Tensor], int]:
    """A function from hidden states to logits that can be called later, and the number of logits."""
    if (plain := plain_head(path, hidden_NH, options)) is None:
        head = head_module(path.head)
        head = getattr(head, "base_layer", head) if getattr(head, "disable_adapters", False) else head
        size = head(hidden_NH[:1]).shape[-1] if len(hidden_NH) else head.weight.shape[0]
        return lambda hidden_CH: map_logits(head(hidden_CH), path, options.temperature), size
    # In the precision of the product, once. The weights of a sharded model are gone after the pass.
    weight_VH = plain.weight.detach().to(plain.spec.dtype, copy=copies)
    bias_V = None if plain.bias is None else plain.bias.detach().clone()

    def logits(hidden_CH: Tensor) -> Tensor:
        spec = plain.spec._replace(options=plain.spec.options._replace(chunk=len(hidden_CH)))
        return next(chunks_of_logits(hidden_CH, weight_VH, bias_V, spec))[1]

    return logits, len(weight_VH)


# ------------------------------------------------------------------------------------------------- the student's head


class Distillation(NamedTuple):
    """What the student's head computes against a teacher: a `HeadFunction`.

    beta         see `functional.divergence`
    temperature  of both distributions
    trains       log-probs and entropy are needed with gradients too, or at another temperature
    """

    teacher: Teacher
    beta: float
    temperature: float
    trains: bool = True

    def __call__(
        self, path: HeadPath, hidden_NH: Tensor, targets_N: Tensor, options: HeadOptions
    ) -> tuple[Tensor | None, ...]:
        """log-probs, entropies, top-1 hits and divergences [N]; the last with gradients, the others if ``trains``."""
        own = options._replace(temperature=self.temperature)
        head = head_module(path.head)
        rows = getattr(head, "out_features", 0) or 1 << 17
        size = options.chunk or max(32, chunk_rows(rows, hidden_NH.device.type) // 2)  # half: the logits of two models
        if (plain := plain_head(path, hidden_NH, own._replace(chunk=size))) is not None:
            value_N, *scores = _Divergence.apply(hidden_NH, plain.weight, plain.bias, targets_N, plain.spec, self)
        else:

            def measure(hidden_CH: Tensor, targets_C: Tensor, start: int) -> tuple[Tensor, ...]:
                logits_CV = map_logits(head(hidden_CH), path, self.temperature)
                return _DivergenceOfLogits.apply(logits_CV, targets_C, slice(start, start + len(targets_C)), self)

            parts = zip(
                hidden_NH.split(size), targets_N.split(size), range(0, max(len(targets_N), 1), size), strict=True
            )
            pieces = [checkpoint(measure, *part, use_reentrant=False) for part in parts]
            value_N, *scores = (torch.cat(values) for values in zip(*pieces, strict=True))
        if self.trains:
            scores = score_hidden(path, hidden_NH, targets_N, options)
        log_prob_N, entropy_N, top1_N = scores
        return log_prob_N, entropy_N if options.entropy else None, top1_N, value_N

    def values(self, part: slice, logits_CV: Tensor, targets_C: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The gradient of the divergence by logits [C, V]; divergence, log-prob, entropy and top-1 hit, [C] each.

        Overwrites the logits.
        """
        log_p_CV = log_softmax_(logits_CV[:, : self.teacher.vocabulary])
        log_prob_C = log_p_CV.gather(1, targets_C[:, None]).squeeze(1)
        top1_C, entropy_C = log_prob_C >= log_p_CV.amax(-1), -fn.expectation(log_p_CV.exp(), log_p_CV)
        value_C, grad_CV = self.teacher.measure(part, log_p_CV, self.beta)
        return self._padded(grad_CV, logits_CV), (value_C, log_prob_C, entropy_C, top1_C)

    def gradient(self, part: slice, logits_CV: Tensor) -> Tensor:
        """The gradient alone."""
        log_p_CV = log_softmax_(logits_CV[:, : self.teacher.vocabulary])
        return self._padded(self.teacher.measure(part, log_p_CV, self.beta)[1], logits_CV)

    def _padded(self, grad_CV: Tensor, logits_CV: Tensor) -> Tensor:
        absent = logits_CV.shape[1] - grad_CV.shape[1]  # rows that the teacher does not have
        return F.pad(grad_CV, (0, absent)) if absent else grad_CV


class _Divergence(torch.autograd.Function):
    """Values of N tokens from the student's hidden states; holds one chunk of both models' logits at a time."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        spec: HeadSpec,
        distillation: Distillation,
    ) -> tuple[Tensor, ...]:
        dtype = reduction_dtype(spec.dtype)
        value_N, log_prob_N, entropy_N = (hidden_NH.new_empty(targets_N.shape, dtype=dtype) for _ in range(3))
        top1_N = torch.empty_like(targets_N, dtype=torch.bool)
        for part, logits_CV, _ in chunks_of_logits(hidden_NH, weight_VH, bias_V, spec):
            _, found = distillation.values(part, logits_CV, targets_N[part])
            value_N[part], log_prob_N[part], entropy_N[part], top1_N[part] = found
        ctx.spec, ctx.distillation = spec, distillation
        ctx.mark_non_differentiable(log_prob_N, entropy_N, top1_N)
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V)
        return value_N, log_prob_N, entropy_N, top1_N

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_value_N: Tensor, *_: None) -> tuple:
        hidden_NH, weight_VH, bias_V = ctx.saved_tensors
        gradients = HeadGradients(ctx, hidden_NH, weight_VH, bias_V, ctx.spec)
        chunks = chunks_of_logits(hidden_NH, gradients.cast_VH, bias_V, ctx.spec, with_slope=True)
        for part, logits_CV, slope_CV in chunks:
            grad_CV = ctx.distillation.gradient(part, logits_CV)
            gradients.add(part, grad_CV.mul_(grad_value_N[part, None]), slope_CV)
        return gradients.hidden_NH, gradients.weight_VH, gradients.bias_V, None, None, None


class _DivergenceOfLogits(torch.autograd.Function):
    """The same for one chunk of a head that is called as a module; the caller's `checkpoint` recomputes its logits."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, logits_CV: Tensor, targets_C: Tensor, part: slice, distillation: Distillation
    ) -> tuple[Tensor, ...]:
        grad_CV, (value_C, *scores) = distillation.values(part, logits_CV.clone(), targets_C)
        ctx.save_for_backward(grad_CV)
        ctx.mark_non_differentiable(*scores)
        return value_C, *scores

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_value_C: Tensor, *_: None) -> tuple:
        return ctx.saved_tensors[0] * grad_value_C[:, None], None, None, None


# ------------------------------------------------------------------------------------------------------------ the term


class TeacherTerm:
    """The divergence of a student from a teacher at every trained token: a term of `GRPOLoss` and of its subclasses.

    Reads   ("tokens", "full") and the masks, as the loss does; of a teacher that was asked before the step's updates:
            ("teacher_top", "ids")                int32 ragged[T, K]    if estimator="topk"
            ("teacher_top", "log_probs")          float32 ragged[T, K]  likewise
            ("next", "teacher_log_probs", "full") float32 ragged[T]     if estimator="sample"; or at the root
            ("teacher_prompt", "full")            int64 ragged[P]       with a demonstration, see `Demonstrations`
    Calls   teacher.token_scores, for ``full``: one pass without gradients in each forward pass of the loss
    Raises  ConfigError for ``full`` without a teacher

    temperature  of both distributions; of ``sample`` that of sampling
    vocabulary   ids below this alone may be among the teacher's likeliest; None: all
    """

    def __init__(
        self,
        options: DivergenceSettings,
        teacher: Any = None,
        *,
        temperature: float = 1.0,
        vocabulary: int | None = None,
    ) -> None:
        self.options, self.teacher = options, teacher
        self.temperature, self.vocabulary = temperature, vocabulary
        if teacher is None and options.estimator == "full":
            raise ConfigError("TeacherTerm: estimator 'full' needs a teacher with token_scores: got None.")

    @property
    def is_asked(self) -> bool:
        """True if the teacher's columns must be in the batch before the step's first update, by `write`."""
        return self.options.estimator != "full"

    def write(self, loss: GRPOLoss, batch: TensorDictBase | None, context: Context) -> None:
        self.teacher.write(loss, batch, context)

    def head(
        self, td: TensorDictBase, tokens: PaddedBatch, mask_BT: Tensor, *, trains: bool, temperature: float
    ) -> Distillation | None:
        """What the student's head computes in its pass; None for ``sample``, which needs its log-probs alone.

        trains       the student's log-probs or entropies need gradients of their own
        temperature  of the student's log-probs
        """
        if self.options.estimator == "sample":
            return None
        if self.options.estimator == "full":
            teacher: Teacher = self._read(td, tokens, mask_BT)
        else:
            teacher = TopTeacher(*(tokens.column(td, key)[mask_BT] for key in (TOP_IDS, TOP_LOG_PROBS)))
        trains |= self.temperature != temperature
        return Distillation(teacher, self.options.mixture, self.temperature, trains)

    def divergence(self, td: TensorDictBase, batch: PolicyBatch, scores: TokenScores) -> Tensor:
        """float[B, T], with grad, from the scores of the student's pass."""
        if self.options.estimator != "sample":
            return scores.own
        teacher_BT = batch.tokens.reference(td, SAMPLED, batch.mask_BT).to(scores.log_probs)
        return fn.sampled_divergence(scores.log_probs, teacher_BT, batch.behaviour_BT, batch.mask_BT)

    @torch.no_grad()
    def ask(self, td: TensorDictBase, tokens: PaddedBatch, mask_BT: Tensor) -> Tensor:
        """Log-probs [B, T] of the sampled tokens under the teacher; for ``topk`` [B, T, 2K]: ids, then log-probs."""
        if self.options.estimator == "sample":
            own, own_mask_BT = self._rows(td, tokens, mask_BT)
            given = {"temperature": self.temperature, **present(media=read_media(td))}
            scores = self.teacher.token_scores(own.input_ids, own.attention_mask, own_mask_BT, **given)
            return scores.log_probs.new_zeros(mask_BT.shape).masked_scatter(mask_BT, scores.log_probs[own_mask_BT])
        teacher = self._read(td, tokens, mask_BT)
        said = teacher.hidden_NH.new_zeros(*mask_BT.shape, 2 * self.options.num_likeliest)
        if mask_BT.any():  # a rank may have no rows
            logits = (teacher.logits(part_CH)[:, : self.vocabulary] for part_CH in teacher.hidden_NH.split(_AT_ONCE))
            tops = [log_softmax_(logits_CV).topk(self.options.num_likeliest) for logits_CV in logits]
            said = said.to(tops[0].values.dtype)
            said[mask_BT] = torch.cat([torch.cat([top.indices.to(said), top.values], 1) for top in tops])  # exact ids
        return said

    def placeholder(self, device: torch.device) -> dict[str, Any]:
        """The columns of a row without a trained token."""
        top = {
            "ids": torch.zeros(1, 2, self.options.num_likeliest, dtype=torch.int32),
            "log_probs": torch.zeros(1, 2, self.options.num_likeliest),
        }
        own = {SAMPLED[1]: placeholders(device)["log_probs"], PROMPT[0]: placeholders(device)["tokens"]}
        return {TOP_IDS[0]: TensorDict(top, batch_size=[1]).to(device), **own}

    def _read(self, td: TensorDictBase, tokens: PaddedBatch, mask_BT: Tensor) -> HiddenTeacher:
        rows = self._rows(td, tokens, mask_BT)
        return read_teacher(self.teacher, *rows, self.temperature, **present(media=read_media(td)))

    def _rows(self, td: TensorDictBase, tokens: PaddedBatch, mask_BT: Tensor) -> tuple[PaddedBatch, Tensor]:
        """What the teacher reads, and the trained tokens in it, which are those of ``mask_BT`` in the same order."""
        if self.options.demonstration is None:
            return tokens, mask_BT
        begun_BT, rows, masks = tokens.column(td, ASSISTANT_MASK), [], []
        prompts = required(td, PROMPT, tokens.reader, as_list=True)
        for row, prompt in enumerate(prompts):
            own = tokens.attention_mask[row].bool()
            start = int(begun_BT[row][own].int().argmax())  # of what was sampled
            ids, mask = tokens.input_ids[row][own][start:], mask_BT[row][own][start:]
            prompt = prompt.to(ids)
            rows.append(torch.cat([prompt, ids]))
            masks.append(torch.cat([torch.zeros_like(prompt, dtype=torch.bool), mask]))
        return PaddedBatch.from_rows(rows, reader="TeacherTerm", device=tokens.device), pad_rows(masks)


class Demonstrations:
    """The prompts of the data with a good answer in them, which a teacher reads in place of what the student read.

    ``shown``    the messages of each prompt, and the answer to show
    ``column``   of the rollouts' rows: the answer
    ``text``     what follows the last user message, with the answer for {demonstration}
    ``longest``  the number of tokens of the longest of them
    Raises  DataError for a prompt without a message of a user
    """

    def __init__(self, renderer: Renderer, shown: Sequence[tuple[Chat, str]], *, column: str, text: str) -> None:
        self._column = column
        chats = [chat for chat, _ in shown]
        longer = [with_text(chat, text.replace("{demonstration}", answer)) for chat, answer in shown]
        made = zip(renderer.prompt_ids(chats), renderer.prompt_ids(longer), shown, strict=True)
        self._prompts = {(_key(ids), answer): prompt for ids, prompt, (_, answer) in made}
        self.longest = max(map(len, self._prompts.values()))

    def write(self, rows: TensorDictBase) -> TensorDictBase:
        """The rows with ("teacher_prompt", "full") int64 ragged[P].

        Raises  DataError for a row whose prompt is not one of the data
        """
        prompts = []
        masks, answers = rows.get(ASSISTANT_MASK, as_list=True), column_values(rows, self._column)
        for ids, mask, answer in zip(rows.get(TOKENS, as_list=True), masks, answers, strict=True):
            prompt = self._prompts.get((_key(ids[: int(mask.int().argmax())]), answer))
            if prompt is None and mask.any():
                raise DataError(
                    "demonstration: a conversation must begin with a prompt of the data, which the teacher reads with "
                    f"the demonstration: got one that is none of them, with {self._column} {answer!r}; an environment "
                    "whose prompts change at each reset cannot be used."
                )
            prompts.append(ids[:1] if prompt is None else prompt)  # where nothing is trained, any prompt
        return rows.copy().set(PROMPT[0], Tokens.from_rows({"full": prompts}))


def with_text(chat: Chat, text: str) -> Chat:
    """The messages with ``text`` behind the last one of a user."""
    places = [place for place, message in enumerate(chat) if message["role"] == "user"]
    if not places:
        raise DataError(f"demonstration: a prompt must have a message of a user, which it follows: got {chat!r}.")
    message = chat[places[-1]]
    content = message["content"] or ""
    content = content + text if isinstance(content, str) else [*content, {"type": "text", "text": text}]
    return [*chat[: places[-1]], {**message, "content": content}, *chat[places[-1] + 1 :]]


def _key(ids: Tensor) -> bytes:
    return ids.to(torch.int32).cpu().numpy().tobytes()
