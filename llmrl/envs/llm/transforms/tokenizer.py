"""`Tokenizer`: plain strings to plain ids and back, for environments without conversations."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from llmrl.data.ragged.padding import lengths_mask, pad_rows
from llmrl.data.ragged.tensordicts import column, required
from llmrl.data.specs import Categorical, Composite, NonTensor, Unbounded
from llmrl.envs.llm.completions import strings_of
from llmrl.envs.td_ops import shallow_copy
from llmrl.envs.transforms.base import Keys, Transform
from llmrl.errors import ConfigError, DataError, ShapeError, check_at_least

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Tokenizer(Transform):
    """Tokenises the strings of the env, and decodes the ids of the policy.

    Reads   in_keys       str [B]
            out_keys_inv  int64[B, T], written by the policy
    Writes  out_keys      int64[B, T], padded on the tokenizer's side; by default in place of the strings
            "attention_mask"  bool[B, T], with ``return_attention_mask``; "<out_key>_attention_mask" for each of several
            in_keys_inv   str [B], for the env
    Raises  ConfigError without a tokenizer, or if padding is needed and it has no padding token; MissingKeyError for an
            absent entry, at a step or with ``missing_tolerance=False``; ShapeError for rows that differ in length with
            ``padding=False``; DataError for an entry that is not a string

    additional_tokens    added as special tokens, to a copy of the tokenizer: ``transform.tokenizer``
    padding              True: to the longest row; "max_length": to ``max_length``; False: rows must have equal lengths
    max_length           longer rows are cut at their end
    call_before_reset    True tokenises only the input of a reset, not steps: for an env that starts from ids
    use_raw_nontensor    a subclass's `_apply_transform` gets the NonTensorStack itself instead of a list of strings

    >>> from llmrl.testing import tiny_tokenizer
    >>> from tensordict import TensorDict
    >>> transform = Tokenizer(["text"], ["tokens"], ["text"], ["tokens"], tokenizer=tiny_tokenizer())
    >>> td = transform(TensorDict(text=["Hi", "Hi Hi"], batch_size=[2]))
    >>> transform.inv(td.exclude("text")).get("text").tolist()
    ['Hi', 'Hi Hi']
    """

    def __init__(
        self,
        in_keys: Keys | None = None,
        out_keys: Keys | None = None,
        in_keys_inv: Keys | None = None,
        out_keys_inv: Keys | None = None,
        *,
        tokenizer: PreTrainedTokenizerBase | str | None = None,
        use_raw_nontensor: bool = False,
        additional_tokens: Sequence[str] | None = None,
        skip_special_tokens: bool = True,
        add_special_tokens: bool = False,
        padding: bool | Literal["max_length"] = True,
        max_length: int | None = None,
        return_attention_mask: bool = True,
        missing_tolerance: bool = True,
        call_before_reset: bool = False,
    ):
        if tokenizer is None:
            raise ConfigError(
                "Tokenizer: tokenizer must be given: there is no default, because it must match your model; "
                "pass the model's tokenizer, or its name."
            )
        if isinstance(tokenizer, str):
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(tokenizer)
        super().__init__(in_keys, out_keys, in_keys_inv, out_keys_inv)
        self._check_pairs()
        if padding not in (True, False, "max_length"):
            raise ConfigError(f"Tokenizer: padding must be True, False or 'max_length': got {padding!r}.")
        if max_length is None and padding == "max_length":
            raise ConfigError("Tokenizer: padding='max_length' needs max_length.")
        check_at_least("Tokenizer", 1, max_length=max_length)
        if additional_tokens:
            # A copy: the caller's tokenizer belongs to a model that has no embeddings for these tokens.
            tokenizer = copy.deepcopy(tokenizer)
            tokenizer.add_tokens(list(additional_tokens), special_tokens=True)
        self.tokenizer = tokenizer
        self.use_raw_nontensor = use_raw_nontensor
        self.skip_special_tokens = skip_special_tokens
        self.add_special_tokens = add_special_tokens
        self.padding = padding
        self.max_length = max_length
        self.return_attention_mask = return_attention_mask
        self.missing_tolerance = missing_tolerance
        self.call_before_reset = call_before_reset

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        return self._tokenised(td, tolerant=self.missing_tolerance)

    def _call(self, next_td: TensorDictBase) -> TensorDictBase:
        return next_td if self.call_before_reset else self._tokenised(next_td, tolerant=False)

    def _reset(self, td: TensorDictBase, reset_td: TensorDictBase) -> TensorDictBase:
        return reset_td if self.call_before_reset else self._tokenised(reset_td, tolerant=self.missing_tolerance)

    def _reset_env_preprocess(self, td: TensorDictBase | None) -> TensorDictBase | None:
        if not self.call_before_reset or td is None:
            return td
        return self._tokenised(shallow_copy(td), tolerant=self.missing_tolerance)

    def _apply_transform(self, value: Any) -> tuple[Tensor, Tensor]:
        """Ids int64[B, T] and attention mask bool[B, T] of B strings."""
        texts = value if isinstance(value, list) else value.tolist()
        texts = [texts] if isinstance(texts, str) else texts
        if wrong := [text for text in texts if not isinstance(text, str)]:
            raise DataError(f"Tokenizer: every entry must be a string: got {type(wrong[0]).__name__}.")
        rows = self.tokenizer(texts, add_special_tokens=self.add_special_tokens)["input_ids"]
        rows = [torch.tensor(row[: self.max_length], dtype=torch.int64) for row in rows]
        lengths = [len(row) for row in rows]
        if len(set(lengths)) > 1 and not self.padding:
            raise ShapeError(
                f"Tokenizer: with padding=False all rows must have the same length: got {min(lengths)} to "
                f"{max(lengths)} tokens; pass padding=True, or one row at a time."
            )
        width = self.max_length if self.padding == "max_length" else max(lengths)
        fill = self.tokenizer.pad_token_id
        if fill is None and min(lengths) < width:
            raise ConfigError("Tokenizer: the tokenizer must have a padding token: set tokenizer.pad_token.")
        side = self.tokenizer.padding_side
        # Without a padding token all rows already have this width, so the fill value is unused.
        return pad_rows(rows, value=fill or 0, side=side, length=width), lengths_mask(lengths, width, side)

    def _inv_apply_transform(self, value: Any) -> Any:
        return column(self.tokenizer.batch_decode(value.tolist(), skip_special_tokens=self.skip_special_tokens))

    def _tokenised(self, td: TensorDictBase, *, tolerant: bool) -> TensorDictBase:
        for in_key, out_key in zip(self.in_keys, self.out_keys, strict=True):
            raw = td.get(in_key, None) if tolerant else required(td, in_key, "Tokenizer")
            if raw is None:
                continue
            ids_BT, mask_BT = self._apply_transform(raw if self.use_raw_nontensor else strings_of(td, in_key))
            td.set(out_key, ids_BT.to(td.device))
            if self.return_attention_mask:
                td.set(self._mask_key(out_key), mask_BT.to(td.device))
        return td

    def _mask_key(self, out_key: NestedKey) -> NestedKey:
        *path, name = (out_key,) if isinstance(out_key, str) else out_key
        last = "attention_mask" if len(self.out_keys) == 1 else f"{name}_attention_mask"
        return (*path, last) if path else last

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        shape, device = (*observation_spec.shape, -1), observation_spec.device
        for key in () if self.call_before_reset else self.out_keys:
            observation_spec[key] = self._ids_spec(observation_spec)
            if self.return_attention_mask:
                observation_spec[self._mask_key(key)] = Categorical(2, shape=shape, dtype=torch.bool, device=device)
        return observation_spec

    def transform_state_spec(self, state_spec: Composite) -> Composite:
        if self.call_before_reset:  # a reset accepts text even though the env itself starts from ids
            for key in self.in_keys:
                state_spec[key] = NonTensor(shape=state_spec.shape, example_data="")
        return state_spec

    def transform_action_spec(self, action_spec: Composite) -> Composite:
        for in_key, out_key in zip(self.in_keys_inv, self.out_keys_inv, strict=True):
            if in_key in action_spec:
                del action_spec[in_key]
                action_spec[out_key] = self._ids_spec(action_spec)
        return action_spec

    def _ids_spec(self, spec: Composite) -> Unbounded:
        return Unbounded(shape=(*spec.shape, -1), dtype=torch.int64, device=spec.device)
