"""Environments without roles and templates: `LLMEnv` appends text or ids per step, `LLMHashingEnv` one token.

For conversations use `ChatEnv`: it has turns, carries masks and log-probs, and accepts rows of different lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor

from llmrl.data.ragged.tensordicts import column, column_values, new_tensordict, required
from llmrl.data.specs import Categorical, Composite, NonTensor, TensorSpec, Unbounded
from llmrl.envs.base import EnvBase
from llmrl.envs.llm.chat import one_batch_size
from llmrl.envs.llm.options import split_keywords
from llmrl.envs.llm.transforms.dataloading import RESERVED_IN_ANY, DataLoadingPrimer, next_seeds
from llmrl.envs.llm.transforms.tokenizer import Tokenizer
from llmrl.envs.transforms.transformed_env import TransformedEnv
from llmrl.errors import ConfigError, ShapeError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class LLMEnv(EnvBase):
    """A prompt to which every step appends the policy's action.

    With ``from_text``, str [B]:
    Reads   ``str_key`` ("text") at reset; ``action_key`` ("text_response") at step
    Writes  ("next", str_key) = text + action
    Otherwise, int64[B, T]:
    Reads   ``token_key`` ("tokens") and, with ``has_attention``, ``attention_key`` ("attention_mask", bool[B, T]; by
            default all True) at reset; ``action_key`` ("tokens_response", int64[B, R]) at step
    Writes  ("next", token_key) = cat(tokens, action), the mask longer by R

    Writes  ("next", reward_key)  float32[B, 1, 1]  0, with ``assign_reward``: transforms add to it
            ("next", "terminated" | "done")  bool[B, 1]  with ``assign_done``: True if the action contains
                                  ``eos_token_id``; False if that is None
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
        batch_size = one_batch_size(batch_size, "LLMEnv", "prompts")
        super().__init__(device=device, batch_size=batch_size, batch_locked=False)
        self.from_text = from_text
        self.prompt_key = (str_key or "text") if from_text else (token_key or "tokens")
        self.attention_key = (attention_key or "attention_mask") if has_attention and not from_text else None
        self.answer_key = action_key or ("text_response" if from_text else "tokens_response")
        self.zero_reward_key = reward_key if assign_reward else None
        self.assign_done = assign_done
        self.eos_token_id = eos_token_id
        action = self.answer_key if isinstance(self.answer_key, str) else self.answer_key[0]
        self.reserved_columns = {**RESERVED_IN_ANY, action: "the action"}
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
        tokenizer: PreTrainedTokenizerBase | None = None,
        str_key: NestedKey | None = None,
        from_text: bool = True,
        has_attention: bool = True,
        **options: Any,
    ) -> TransformedEnv:
        """An `LLMEnv` whose prompts come from the column ``str_key`` (or ``token_key``) of ``dataloader``.

        With ``tokenizer`` and ``from_text=False`` the column ``str_key`` ("text") is tokenised first, padded on the
        tokenizer's side. ``batch_size`` counts prompts; with ``group_repeats`` each has ``repeats`` rows. ``options``
        are the other arguments of `LLMEnv` and `DataLoadingPrimer`.

        >>> env = LLMEnv.from_dataloader([{"text": "1 + 1 ="}, {"text": "2 + 2 ="}], repeats=2, group_repeats=True)
        >>> env.reset().get("text").tolist()
        ['1 + 1 =', '1 + 1 =']
        """
        loading, settings = split_keywords(options, f"{cls.__name__}.from_dataloader", DataLoadingPrimer, cls)
        primer = DataLoadingPrimer(dataloader, **loading)
        tokenises = tokenizer is not None and not from_text
        settings |= {"str_key": None if tokenises else str_key, "from_text": from_text, "has_attention": has_attention}
        env = cls(**settings | {"batch_size": primer.batch_size})
        transformed = TransformedEnv(env, primer)
        if tokenises:
            keys = ([str_key or "text"], [env.prompt_key])
            transformed.append_transform(
                Tokenizer(*keys, tokenizer=tokenizer, call_before_reset=True, return_attention_mask=has_attention)
            )
        return transformed

    def _reset(self, td: TensorDictBase | None) -> TensorDictBase:
        td = new_tensordict({}, self.batch_size) if td is None else td
        required(td, self.prompt_key, "LLMEnv.reset", "pass a tensordict with the prompt, or add a DataLoadingPrimer")
        out = new_tensordict(
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
                # Checks only the action: prompts may contain this token, between their turns or as padding.
                out.set("terminated", (answer_BR == self.eos_token_id).any(-1, keepdim=True))
        if self.zero_reward_key is not None:
            out.set(self.zero_reward_key, torch.zeros(*td.batch_size, 1, 1, device=self.device))
        return out

    def _view_spec(self, vocab_size: int | None) -> TensorSpec:
        if self.from_text:
            return NonTensor(shape=self.batch_size, example_data="")
        shape = (*self.batch_size, -1)
        return Unbounded(shape=shape, dtype=torch.int64) if vocab_size is None else Categorical(vocab_size, shape=shape)


class LLMHashingEnv(EnvBase):
    """Appends one token per step and identifies every prefix by a hash: the nodes of a tree of texts.

    The hash depends only on the ids and is the same in every process and on every device, so a tree search can look up
    a prefix that another process wrote.

    Reads   ``observation_key``  int64[*B, N] at reset: the prompts, all of the same length
            "action"             int64[*B, 1] at step: the next token
    Writes  ``observation_key``  int64[*B, N + steps]
            "hashing"            int64[*B, 1]  equal for equal prefixes, however they were split into prompt and actions
            ``text_key``         str [*B]      the prefix, decoded; with ``text_output``
            ("next", "reward")   float32[*B, 1]  0;  done is False: the search decides when to stop
    Raises  ConfigError without a vocabulary size or, for text, a tokenizer; MissingKeyError without a prompt

    vocab_size      None: the tokenizer's
    hashing_module  (int64[*B, 2] of the hash before and the token) -> int64[*B, 1]; None: `prefix_hash`

    >>> from llmrl.testing import tiny_tokenizer
    >>> env = LLMHashingEnv(tokenizer=tiny_tokenizer())
    >>> ids = tiny_tokenizer()("2 + 2 =", return_tensors="pt")["input_ids"]
    >>> whole = env.reset(TensorDict(observation=ids, batch_size=[1]))
    >>> td = env.reset(TensorDict(observation=ids[:, :-1], batch_size=[1]))
    >>> td["action"] = ids[:, -1:]
    >>> bool(env.step(td)["next", "hashing"] == whole["hashing"]), whole.get("text").tolist()
    (True, ['2 + 2 ='])
    """

    def __init__(
        self,
        vocab_size: int | None = None,
        *,
        hashing_module: Callable[[Tensor], Tensor] | None = None,
        observation_key: NestedKey = "observation",
        text_output: bool = True,
        tokenizer: PreTrainedTokenizerBase | None = None,
        text_key: NestedKey | None = "text",
    ):
        if vocab_size is None:
            if tokenizer is None:
                raise ConfigError("LLMHashingEnv: vocab_size or tokenizer must give the number of tokens.")
            vocab_size = len(tokenizer)
        if text_output and tokenizer is None:
            raise ConfigError("LLMHashingEnv: text_output needs a tokenizer to decode with; or pass text_output=False.")
        super().__init__(batch_locked=False)
        self.vocab_size = vocab_size
        self.tokenizer = tokenizer
        self.observation_key = observation_key
        self.text_key = text_key if text_output else None
        self.hashing_module = prefix_hash if hashing_module is None else hashing_module
        observation = Composite(
            {observation_key: Categorical(vocab_size, shape=(-1,)), "hashing": Unbounded(shape=(1,), dtype=torch.int64)}
        )
        if self.text_key is not None:
            observation[self.text_key] = NonTensor(shape=(), example_data="")
        self.observation_spec = observation
        self.state_spec = Composite({observation_key: Categorical(vocab_size, shape=(-1,))})
        self.action_spec = Composite(action=Categorical(vocab_size, shape=(1,)))
        self.reward_spec = Composite(reward=Unbounded(shape=(1,)))

    def make_tensordict(self, text: str | Sequence[str]) -> TensorDictBase:
        """Resets to the given texts: batch () for a string, [B] for B strings, which must have equally many tokens.

        >>> from llmrl.testing import tiny_tokenizer
        >>> LLMHashingEnv(tokenizer=tiny_tokenizer()).make_tensordict("2 + 2 =")["text"]
        '2 + 2 ='
        """
        if self.tokenizer is None:
            raise ConfigError("LLMHashingEnv.make_tensordict: text needs a tokenizer: give one to the env.")
        rows = self.tokenizer([text] if isinstance(text, str) else list(text), add_special_tokens=False)["input_ids"]
        lengths = sorted({len(row) for row in rows})
        if len(lengths) != 1:
            got = f"{lengths}; make one tensordict for each length"
            raise ShapeError(f"LLMHashingEnv.make_tensordict: texts of one batch must have as many tokens: got {got}.")
        ids_BN = torch.tensor(rows, dtype=torch.int64)
        if isinstance(text, str):
            return self.reset(TensorDict({self.observation_key: ids_BN[0]}, batch_size=[]))
        return self.reset(TensorDict({self.observation_key: ids_BN}, batch_size=[len(rows)]))

    def _reset(self, td: TensorDictBase | None) -> TensorDictBase:
        td = new_tensordict({}, self.batch_size) if td is None else td
        ids_BN = required(td, self.observation_key, "LLMHashingEnv.reset", "see make_tensordict for the prompt")
        # Token by token, like the steps: the hash must not depend on where the prompt ended.
        hash_B1 = torch.zeros((*td.batch_size, 1), dtype=torch.int64, device=ids_BN.device)
        for token_B1 in ids_BN.split(1, dim=-1):
            hash_B1 = self._hash(hash_B1, token_B1)
        return self._state(ids_BN, hash_B1, td.batch_size)

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        action_B1 = td.get("action").reshape(*td.batch_size, 1)
        ids_BN = torch.cat([td.get(self.observation_key), action_B1], -1)
        out = self._state(ids_BN, self._hash(td.get("hashing"), action_B1), td.batch_size)
        return out.set("reward", torch.zeros(*td.batch_size, 1, device=ids_BN.device))

    def _hash(self, before_B1: Tensor, token_B1: Tensor) -> Tensor:
        return self.hashing_module(torch.cat([before_B1, token_B1.to(torch.int64)], -1)).reshape(before_B1.shape)

    def _state(self, ids_BN: Tensor, hash_B1: Tensor, batch_size: torch.Size) -> TensorDictBase:
        out = TensorDict({self.observation_key: ids_BN, "hashing": hash_B1}, batch_size=batch_size)
        if self.text_key is not None:
            rows = ids_BN.reshape(-1, ids_BN.shape[-1]).tolist()
            texts = self.tokenizer.batch_decode(rows, skip_special_tokens=False)
            if not batch_size:
                out.set_non_tensor(self.text_key, texts[0])
            else:
                out.set(self.text_key, column(texts) if len(batch_size) == 1 else column(texts).reshape(batch_size))
        return out


def prefix_hash(pair: Tensor) -> Tensor:
    """The hash of a longer prefix, int64[*B, 1], not negative, from int64[*B, 2]: the hash so far and the next token.

    Source  the finaliser of splitmix64 (Steele, Lea, Flood 2014), over the hash and the mixed token

    >>> prefix_hash(torch.tensor([[0, 1], [0, 2], [0, 1]])).flatten().tolist()
    [4024481171978880086, 5104019121784386522, 4024481171978880086]
    """
    before, token = pair[..., :1], pair[..., 1:]
    return next_seeds(before ^ next_seeds(token))
