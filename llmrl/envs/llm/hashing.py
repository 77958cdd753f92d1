"""`LLMHashingEnv`: one token per step, and a number for every prefix: the nodes of a tree of texts.

The number is a function of the ids alone, the same in every process and on every device, so a tree search can look up
what it knows about a prefix wherever that was written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor

from llmrl.data.ragged.tensordicts import column
from llmrl.data.specs import Categorical, Composite, NonTensor, Unbounded
from llmrl.envs.base import EnvBase
from llmrl.envs.llm.transforms.prompt_stream import next_seeds
from llmrl.envs.td_ops import present_keys
from llmrl.errors import ConfigError, MissingKeyError, ShapeError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["LLMHashingEnv", "prefix_hash"]


class LLMHashingEnv(EnvBase):
    """Appends one token per step and names every prefix by a hash.

    Reads   ``observation_key``  int64[*B, N] at reset: the prompts, of one length
            "action"             int64[*B, 1] at step: the next token
    Writes  ``observation_key``  int64[*B, N + steps]
            "hashing"            int64[*B, 1]  equal for equal prefixes, however they were split into prompt and actions
            ``text_key``         str [*B]      the prefix, decoded; with ``text_output``
            ("next", "reward")   float32[*B, 1]  0;  done is False: a search ends where it wants to
    Raises  ConfigError without a vocabulary size or, for text, a tokenizer; MissingKeyError without a prompt

    vocab_size      None: the tokenizer's
    hashing_module  (int64[*B, 2] of the hash before and the token) -> int64[*B, 1]; None: `prefix_hash`

    Different prefixes have different hashes but for accidents of 1 in 2^63.

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
                raise ConfigError("LLMHashingEnv: vocab_size or tokenizer must say how many tokens there are.")
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
        """A reset to these texts: batch () for one, [B] for B of them, which must have one length in tokens.

        >>> from llmrl.testing import tiny_tokenizer
        >>> LLMHashingEnv(tokenizer=tiny_tokenizer()).make_tensordict("2 + 2 =")["text"]
        '2 + 2 ='
        """
        if self.tokenizer is None:
            raise ConfigError("LLMHashingEnv.make_tensordict: text needs a tokenizer: give one to the env.")
        rows = self.tokenizer([text] if isinstance(text, str) else list(text), add_special_tokens=False)["input_ids"]
        lengths = sorted({len(row) for row in rows})
        if len(lengths) != 1:
            raise ShapeError(
                "LLMHashingEnv.make_tensordict: the texts of one batch must have as many tokens: got "
                f"{lengths}; make one tensordict for each length."
            )
        ids_BN = torch.tensor(rows, dtype=torch.int64)
        if isinstance(text, str):
            return self.reset(TensorDict({self.observation_key: ids_BN[0]}, batch_size=[]))
        return self.reset(TensorDict({self.observation_key: ids_BN}, batch_size=[len(rows)]))

    def _reset(self, td: TensorDictBase | None) -> TensorDictBase:
        if td is None or td.get(self.observation_key, None) is None:
            keys = "none" if td is None else present_keys(td)
            raise MissingKeyError(
                f"LLMHashingEnv.reset: the prompt must be in {self.observation_key!r}; keys present: {keys}; see "
                "make_tensordict."
            )
        ids_BN = td.get(self.observation_key)
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
            elif len(batch_size) == 1:
                out.set(self.text_key, column(texts))
            else:
                stacked = column(texts)
                out.set(self.text_key, stacked.reshape(batch_size))
        return out


def prefix_hash(pair: Tensor) -> Tensor:
    """int64[*B, 1], not negative, of int64[*B, 2]: the hash of a prefix and the token that follows it.

    Source  the finaliser of splitmix64 (Steele, Lea, Flood 2014), over the hash and the mixed token

    >>> prefix_hash(torch.tensor([[0, 1], [0, 2], [0, 1]])).flatten().tolist()
    [4024481171978880086, 5104019121784386522, 4024481171978880086]
    """
    before, token = pair[..., :1], pair[..., 1:]
    return next_seeds(before ^ next_seeds(token))
