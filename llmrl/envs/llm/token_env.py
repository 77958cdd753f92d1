"""`LLMEnv`: text or ids that grow by what the policy writes, in flat keys and without roles or templates.

For conversations use `ChatEnv`: it has turns, carries masks and log-probs along, and takes rows of any lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase

from llmrl.data.ragged.tensordicts import column, column_values
from llmrl.data.specs import Categorical, Composite, NonTensor, TensorSpec, Unbounded
from llmrl.envs.base import EnvBase
from llmrl.envs.llm.transforms.dataloading import DataLoadingPrimer
from llmrl.envs.llm.transforms.tokenizer import Tokenizer
from llmrl.envs.td_ops import present_keys
from llmrl.envs.transforms.transformed_env import TransformedEnv
from llmrl.errors import ConfigError, MissingKeyError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["LLMEnv"]


class LLMEnv(EnvBase):
    """A prompt to which every step appends the policy's action.

    With ``from_text``, str [B]:
    Reads   ``str_key`` ("text") at reset; ``action_key`` ("text_response") at step
    Writes  ("next", str_key) = text + action
    Else, int64[B, T]:
    Reads   ``token_key`` ("tokens") and, with ``has_attention``, ``attention_key`` ("attention_mask", bool[B, T]; by
            default all True) at reset; ``action_key`` ("tokens_response", int64[B, R]) at step
    Writes  ("next", token_key) = cat(tokens, action), the mask longer by R

    Writes  ("next", reward_key)  float32[B, 1, 1]  0, with ``assign_reward``: for transforms to add to
            ("next", "terminated" | "done")  bool[B, 1]  with ``assign_done``: the action holds ``eos_token_id``; False
                                  where that is None
    Raises  MissingKeyError without a prompt at reset; ConfigError for settings that contradict each other

    vocab_size   makes the ids `Categorical`, so that `rand_action` can draw them
    as_llm_data  must be False

    >>> env = LLMEnv(batch_size=[1])
    >>> td = env.reset(TensorDict(text=["2 + 2 ="], batch_size=[1]))
    >>> td["text_response"] = [" 4"]
    >>> env.step(td)["next"].get("text").tolist()
    ['2 + 2 = 4']
    """

    def __init__(
        self,
        *,
        token_key: NestedKey | None = None,
        str_key: NestedKey | None = None,
        attention_key: NestedKey | None = None,
        action_key: NestedKey | None = None,
        reward_key: NestedKey = "reward",
        from_text: bool = True,
        device: torch.device | str | None = None,
        vocab_size: int | None = None,
        assign_reward: bool = False,
        assign_done: bool = False,
        batch_size: int | Sequence[int] | None = None,
        has_attention: bool = True,
        as_llm_data: bool = False,
        eos_token_id: int | None = None,
    ):
        if as_llm_data:
            raise ConfigError("LLMEnv: as_llm_data must be False: batches are tensordicts, see docs/keys.md.")
        if eos_token_id is not None and (from_text or not assign_done):
            raise ConfigError(
                "LLMEnv: eos_token_id ends an episode of tokens: it needs from_text=False and assign_done=True: got "
                f"from_text={from_text}, assign_done={assign_done}."
            )
        if from_text and (vocab_size is not None or token_key is not None or attention_key is not None):
            raise ConfigError("LLMEnv: vocab_size, token_key and attention_key belong to from_text=False.")
        if not from_text and str_key is not None:
            raise ConfigError("LLMEnv: str_key belongs to from_text=True.")
        batch_size = torch.Size(
            (1,) if batch_size is None else (batch_size,) if isinstance(batch_size, int) else batch_size
        )
        if len(batch_size) != 1:
            raise ConfigError(f"LLMEnv: batch_size must be the number of prompts, as in [8]: got {list(batch_size)}.")
        super().__init__(device=device, batch_size=batch_size, batch_locked=False)
        self.from_text = from_text
        self.prompt_key = (str_key or "text") if from_text else (token_key or "tokens")
        self.attention_key = (attention_key or "attention_mask") if has_attention and not from_text else None
        self.answer_key = action_key or ("text_response" if from_text else "tokens_response")
        self.zero_reward_key = reward_key if assign_reward else None
        self.assign_done = assign_done
        self.eos_token_id = eos_token_id
        spec = self._view_spec(vocab_size)
        observation = Composite({self.prompt_key: spec}, shape=batch_size)
        if self.attention_key is not None:
            observation[self.attention_key] = Categorical(2, shape=(*batch_size, -1), dtype=torch.bool)
        self.observation_spec = observation
        self.state_spec = observation.clone()
        self.action_spec = Composite({self.answer_key: spec.clone()}, shape=batch_size)
        if assign_reward:
            self.reward_spec = Composite({reward_key: Unbounded(shape=(*batch_size, 1, 1))}, shape=batch_size)

    @classmethod
    def from_dataloader(
        cls,
        dataloader: Iterable[Any] | None = None,
        *,
        dataloader_factory: Callable[[], Iterable[Any]] | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        token_key: NestedKey | None = None,
        str_key: NestedKey | None = None,
        attention_key: NestedKey | None = None,
        action_key: NestedKey | None = None,
        reward_key: NestedKey = "reward",
        from_text: bool = True,
        device: torch.device | str | None = None,
        vocab_size: int | None = None,
        batch_size: int | Sequence[int] | None = None,
        assign_reward: bool = False,
        assign_done: bool = False,
        primers: Any | None = None,
        stack_method: Callable[[list[Any]], Any] | None = None,
        repeats: int | None = None,
        group_repeats: bool = False,
        has_attention: bool = True,
        eos_token_id: int | None = None,
    ) -> TransformedEnv:
        """An `LLMEnv` whose prompts come from the column ``str_key`` (or ``token_key``) of ``dataloader``.

        With ``tokenizer`` and ``from_text=False`` the column ``str_key`` ("text") is tokenised first, padded on the
        tokenizer's side. ``batch_size`` counts prompts; with ``group_repeats`` each has ``repeats`` rows.

        >>> env = LLMEnv.from_dataloader([{"text": "1 + 1 ="}, {"text": "2 + 2 ="}], repeats=2, group_repeats=True)
        >>> env.reset().get("text").tolist()
        ['1 + 1 =', '1 + 1 =']
        """
        primer = DataLoadingPrimer(
            dataloader,
            dataloader_factory=dataloader_factory,
            primers=primers,
            stack_method=stack_method,
            batch_size=batch_size,
            repeats=repeats,
            device=device,
            group_repeats=group_repeats,
        )
        tokenises = tokenizer is not None and not from_text
        env = cls(
            token_key=token_key,
            str_key=None if tokenises else str_key,
            attention_key=attention_key,
            action_key=action_key,
            reward_key=reward_key,
            from_text=from_text,
            device=device,
            vocab_size=vocab_size,
            assign_reward=assign_reward,
            assign_done=assign_done,
            batch_size=primer.batch_size,
            has_attention=has_attention,
            eos_token_id=eos_token_id,
        )
        transformed = TransformedEnv(env, primer)
        if tokenises:
            keys = ([str_key or "text"], [env.prompt_key])
            transformed.append_transform(
                Tokenizer(*keys, tokenizer=tokenizer, call_before_reset=True, return_attention_mask=has_attention)
            )
        return transformed

    def _reset(self, td: TensorDictBase | None) -> TensorDictBase:
        if td is None or td.get(self.prompt_key, None) is None:
            keys = "none" if td is None else present_keys(td)
            raise MissingKeyError(
                f"LLMEnv.reset: the prompt must be in {self.prompt_key!r}; keys present: {keys}; pass a tensordict "
                "with it, or add a DataLoadingPrimer."
            )
        out = TensorDict._new_unsafe(
            {key: value for key, value in td.items() if key not in ("_reset", "next", *self._action_root_names())},
            batch_size=td.batch_size,
            device=self.device,
        )
        if self.attention_key is not None:
            given = td.get(self.attention_key, None)
            ids_BT = td.get(self.prompt_key)
            out.set(self.attention_key, torch.ones_like(ids_BT, dtype=torch.bool) if given is None else given.bool())
        return out

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        out = TensorDict({}, batch_size=td.batch_size, device=self.device)
        if self.from_text:
            pairs = zip(column_values(td, self.prompt_key), column_values(td, self.answer_key), strict=True)
            out.set(self.prompt_key, column(prompt + answer for prompt, answer in pairs))
        else:
            answer_BR = td.get(self.answer_key)
            out.set(self.prompt_key, torch.cat([td.get(self.prompt_key), answer_BR], -1))
            if self.attention_key is not None:
                longer_BR = torch.ones_like(answer_BR, dtype=torch.bool)
                out.set(self.attention_key, torch.cat([td.get(self.attention_key), longer_BR], -1))
            if self.eos_token_id is not None:
                out.set("terminated", (answer_BR == self.eos_token_id).any(-1, keepdim=True))
        if self.zero_reward_key is not None:
            out.set(self.zero_reward_key, torch.zeros(*td.batch_size, 1, 1, device=self.device))
        return out

    def _view_spec(self, vocab_size: int | None) -> TensorSpec:
        if self.from_text:
            return NonTensor(shape=self.batch_size, example_data="")
        shape = (*self.batch_size, -1)
        return Unbounded(shape=shape, dtype=torch.int64) if vocab_size is None else Categorical(vocab_size, shape=shape)
