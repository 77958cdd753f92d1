"""`RolloutFromModel`: answers to a dataset's prompts as episodes of tokens, with a reward model's score and KL penalty.

Shapes: B prompts, R = max_new_tokens steps, T = the width of the batch + R.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn

from llmrl.data.llm.rlhf import PromptData
from llmrl.errors import ConfigError, ShapeError
from llmrl.modules.llm.engines import SamplingParams, TransformersEngine
from llmrl.modules.llm.log_probs import token_logprobs
from llmrl.modules.llm.packing import evaluating
from llmrl.modules.llm.reward_scorer import RewardScorer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from llmrl.data.llm.kl_controllers import ConstantKLController


class RolloutFromModel:
    """Samples one answer to each prompt of a `PromptData` and returns its tokens as the steps of an episode.

    reward = [last step] clip(score of the answer - score of the label) - kl_coef * (log pi - log pi_ref)

    Calls    ``model``, ``ref_model``  causal language models of the Transformers library, evaluated without
             gradients
             ``reward_model``  a sequence-classification model with one label; or a TensorDictModule that writes
             "end_scores"; or a module called with input_ids and attention_mask that returns the reward after each
             token, [B, T], or (rewards, end scores)
    Raises   ConfigError without an end-of-sequence id, ShapeError for a batch without prompts

    score_clip    the difference of the scores is clipped to [-score_clip, score_clip]
    kl_scheduler  its coefficient replaces ``kl_coef``; `step_scheduler` updates it by the KL of at most the last
                  ``num_steps`` batches
    eos_token_id, pad_token_id  by default those of the model's configuration; both may be equal

    An answer that ended is scored with the ending of its label (all ids from the label's last end of sequence on), so
    that answer and label are scored at the same position. An answer that was cut off gets no ending.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        ref_model: PreTrainedModel,
        reward_model: nn.Module,
        kl_coef: float = 0.1,
        max_new_tokens: int = 50,
        score_clip: float = 10.0,
        kl_scheduler: ConstantKLController | None = None,
        num_steps: int | None = None,
        *,
        eos_token_id: int | None = None,
        pad_token_id: int | None = None,
        seed: int | None = None,
    ) -> None:
        if max_new_tokens < 1 or not score_clip > 0:
            raise ConfigError(
                f"RolloutFromModel: max_new_tokens and score_clip must be above 0: got {max_new_tokens}, {score_clip}."
            )
        settings = getattr(model, "generation_config", None) or model.config
        eos = settings.eos_token_id if eos_token_id is None else eos_token_id
        if eos is None:
            raise ConfigError("RolloutFromModel: pass eos_token_id: the model's configuration has none.")
        self.eos_token_ids = [eos] if isinstance(eos, int) else list(eos)
        pad = settings.pad_token_id if pad_token_id is None else pad_token_id
        self.pad_token_id = self.eos_token_ids[0] if pad is None else pad
        self.model, self.ref_model = model, ref_model
        self.reward_model = RewardScorer(reward_model) if hasattr(reward_model, "score") else reward_model
        self.max_new_tokens, self.score_clip, self.kl_scheduler = max_new_tokens, score_clip, kl_scheduler
        self.kl_coef = kl_coef if kl_scheduler is None else kl_scheduler.coef
        self._engine = TransformersEngine(
            model, eos_token_ids=self.eos_token_ids, pad_token_id=self.pad_token_id, seed=seed
        )
        self._kl: deque[Tensor] = deque(maxlen=num_steps)

    def rollout_from_data(self, batch: PromptData, kl_coef: float | None = None) -> TensorDict:
        """`generate`, then `create_rollout_td`."""
        return self.create_rollout_td(batch, *self.generate(batch), kl_coef=kl_coef)

    @torch.no_grad()
    def generate(
        self, batch: PromptData, generation_config: SamplingParams | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Samples answers.

        generation_config  default: temperature 1, and at most ``max_new_tokens`` tokens

        Returns  generated  int64[B, T]       the prompt and its answer, with the end of sequence, then padding
                 log_probs  float32[B, R, 1]  of the answer's tokens, under the distribution that was sampled from
                 log_ratio  float32[B, R]     the model's log-probs minus the reference's; both are 0 after the end
        """
        params = generation_config or SamplingParams(max_new_tokens=self.max_new_tokens)
        stops = params.ignore_eos or params.stop_token_ids or params.stop_strings
        if params.max_new_tokens != self.max_new_tokens or stops:
            raise ConfigError(
                "RolloutFromModel.generate: answers must end with an end of sequence or after max_new_tokens="
                f"{self.max_new_tokens}: got max_new_tokens={params.max_new_tokens}, ignore_eos={params.ignore_eos}, "
                f"stop_token_ids={params.stop_token_ids}, stop_strings={params.stop_strings}."
            )
        if not len(batch):
            raise ShapeError("RolloutFromModel.generate: the batch must hold prompts: it is empty.")
        starts_B = batch.prompt_rindex + 1
        prompts = [ids[:start] for ids, start in zip(batch.input_ids, starts_B.tolist(), strict=True)]
        drawn = self._engine.generate(prompts, params)
        generated_BT = batch.input_ids.new_full((len(batch), self._width(batch)), self.pad_token_id)
        log_probs_BR = torch.zeros(len(batch), self.max_new_tokens, device=generated_BT.device)
        for row, (prompt, answer, values) in enumerate(zip(prompts, drawn.ids, drawn.log_probs, strict=True)):
            generated_BT[row, : len(prompt) + len(answer)] = torch.cat([prompt, answer.to(prompt)])
            log_probs_BR[row, : len(answer)] = values
        ends_B = starts_B + torch.tensor([len(answer) for answer in drawn.ids], device=starts_B.device)
        attention_BT = _before(ends_B, generated_BT)
        answer_BT = attention_BT & ~_before(starts_B, generated_BT)
        # Both terms are from scoring passes, since the sampler's log-probs may differ by rounding.
        ratio_BT = 0.0
        for model, sign in ((self.model, 1.0), (self.ref_model, -1.0)):
            with evaluating(model):  # the same mode for both, so that equal models have a ratio of exactly 1
                scores = token_logprobs(
                    model, generated_BT, attention_BT, answer_BT, temperature=params.scoring_temperature
                )
            ratio_BT = ratio_BT + sign * scores.log_probs.float()
        return generated_BT, log_probs_BR.unsqueeze(-1), ratio_BT.gather(1, self._places(starts_B))

    @torch.no_grad()
    def create_rollout_td(
        self, batch: PromptData, generated: Tensor, log_probs: Tensor, log_ratio: Tensor, kl_coef: float | None = None
    ) -> TensorDict:
        """The episodes [B, R] of the answers, given the tensors that `generate` returned.

        Returns  "action" int64[B, R], "sample_log_prob" float32[B, R, 1], "mask" bool[B, R], False after the end;
                 "input_ids", "attention_mask" int64[B, R, T], the tokens before the step; in "next" also its action;
                 ("next", ...) "done", "terminated" (at an end of sequence), "truncated" (at max_new_tokens) bool[B, R,
                 1], True at the last step only; "reward", "reward_raw", "reward_kl" float32[B, R, 1]
        """
        kl_coef = self.kl_coef if kl_coef is None else kl_coef
        starts_B = batch.prompt_rindex + 1
        places_BR = self._places(starts_B)
        action_BR = generated.gather(1, places_BR)
        ended_BR = torch.isin(action_BR, torch.tensor(self.eos_token_ids, device=action_BR.device))
        # An answer ends at its first end of sequence, because the sampler stops there; padding may have the same id.
        mask_BR = ended_BR.int().cumsum(-1) - ended_BR.int() == 0
        last_BR = mask_BR & ~nn.functional.pad(mask_BR[:, 1:], (0, 1))
        ends_B = starts_B + mask_BR.sum(-1)
        score_B = self._answer_scores(batch, generated, ends_B, (ended_BR & mask_BR).any(-1))
        label_B = self._end_scores(batch.input_ids, batch.attention_mask)
        clipped_B1 = (score_B - label_B).clamp(-self.score_clip, self.score_clip).unsqueeze(-1)
        raw_BR = torch.where(last_BR, clipped_B1, 0.0)
        kl_BR = torch.where(mask_BR, log_ratio, 0.0)
        self._kl.append(kl_BR.sum(-1).cpu())
        # Tokens seen before and after each step; steps after the end of an answer see the whole answer.
        now_BRT, then_BRT = (_before((places_BR + step).minimum(ends_B[:, None]), generated) for step in (0, 1))
        observed = [
            {
                "input_ids": generated.unsqueeze(1).masked_fill(~seen_BRT, self.pad_token_id),
                "attention_mask": seen_BRT.to(torch.int64),
            }
            for seen_BRT in (now_BRT, then_BRT)
        ]
        rows = {
            "done": last_BR,
            "terminated": last_BR & ended_BR,
            "truncated": last_BR & ~ended_BR,
            "reward": raw_BR - kl_coef * kl_BR,
            "reward_raw": raw_BR,
            "reward_kl": -kl_coef * kl_BR,
        }
        return TensorDict(
            {
                "action": action_BR.masked_fill(~mask_BR, self.pad_token_id),
                "mask": mask_BR,
                "sample_log_prob": log_probs,
                **observed[0],
                "next": {**observed[1], **{name: value.unsqueeze(-1) for name, value in rows.items()}},
            },
            batch_size=action_BR.shape,
            device=generated.device,
        )

    def step_scheduler(self) -> None:
        """Updates ``kl_coef`` by the KL of each answer since the last call."""
        if self.kl_scheduler is None or not self._kl:
            return
        self.kl_scheduler.update(-self.kl_scheduler.coef * torch.cat(list(self._kl)))
        self._kl.clear()
        self.kl_coef = self.kl_scheduler.coef

    @staticmethod
    def logits_to_logprobs(logits: Tensor, labels: Tensor) -> Tensor:
        """float32[...]: the log-probs of ``labels`` int64[...] under ``logits`` [..., V] of the same positions.

        >>> logits = torch.tensor([[0.0, 0.0], [0.0, 3.0]])
        >>> RolloutFromModel.logits_to_logprobs(logits, torch.tensor([0, 1])).exp()
        tensor([0.5000, 0.9526])
        """
        logits = logits.float()
        return logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)

    def _width(self, batch: PromptData) -> int:
        return batch.input_ids.shape[1] + self.max_new_tokens

    def _places(self, starts_B: Tensor) -> Tensor:
        """int64[B, R]: the positions of the answers' tokens."""
        return starts_B.unsqueeze(-1) + torch.arange(self.max_new_tokens, device=starts_B.device)

    def _answer_scores(self, batch: PromptData, generated: Tensor, ends_B: Tensor, ended_B: Tensor) -> Tensor:
        endings = self._label_endings(batch)
        rows = []
        for ids, end, ended, ending in zip(generated, ends_B.tolist(), ended_B.tolist(), endings, strict=True):
            rows.append(torch.cat([ids[: end - 1], ending]) if ended else ids[:end])
        lengths_B = torch.tensor([len(row) for row in rows], device=generated.device)
        ids_BT = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=self.pad_token_id)
        return self._end_scores(ids_BT, _before(lengths_B, ids_BT).to(torch.int64))

    def _label_endings(self, batch: PromptData) -> list[Tensor]:
        """The ids of each label from its last end of sequence on; empty if it has none."""
        eos = torch.tensor(self.eos_token_ids, device=batch.input_ids.device)
        endings = []
        for ids, mask, last in zip(
            batch.input_ids, batch.attention_mask.bool(), batch.prompt_rindex.tolist(), strict=True
        ):
            label = ids[last + 1 :][mask[last + 1 :]]
            # The last end of sequence: a label may hold several turns, each with its own.
            places = torch.isin(label, eos).nonzero().flatten().tolist()
            endings.append(label[places[-1] :] if places else label[:0])
        return endings

    def _end_scores(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """float32[B]: the reward model's score of whole rows."""
        if isinstance(self.reward_model, TensorDictModuleBase):
            td = TensorDict({"input_ids": input_ids, "attention_mask": attention_mask}, batch_size=[len(input_ids)])
            found: Any = (None, self.reward_model(td).get("end_scores"))
        else:
            with evaluating(self.reward_model):
                found = self.reward_model(input_ids=input_ids, attention_mask=attention_mask)
        if isinstance(found, Tensor):
            last_B1 = attention_mask.sum(-1, keepdim=True) - 1
            return found.reshape(input_ids.shape).gather(1, last_B1).squeeze(-1).float()
        return found[1].reshape(len(input_ids)).float()


def _before(ends: Tensor, like: Tensor) -> Tensor:
    """bool[*ends, T]: the positions before each end."""
    return torch.arange(like.shape[-1], device=ends.device) < ends.unsqueeze(-1)
