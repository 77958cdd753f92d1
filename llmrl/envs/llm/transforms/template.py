"""`TemplateTransform`: lets a policy that reads and writes text act in an environment in history mode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tensordict import NestedKey, TensorDictBase

from llmrl.data.llm.chat import History
from llmrl.data.ragged.tensordicts import column, present_keys, required
from llmrl.data.specs import Composite, NonTensor
from llmrl.envs.llm.completions import strings_of
from llmrl.envs.llm.transforms.tool_messages import begin_anew
from llmrl.envs.td_ops import shallow_copy
from llmrl.envs.transforms.base import Keys, Transform
from llmrl.errors import MissingKeyError
from llmrl.modules.llm.policies.containers import ChatHistory, Text, history_chats
from llmrl.modules.llm.rendering import Renderer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TemplateTransform(Transform):
    """Renders the history that the env writes, and parses the text that the policy writes.

    Reads   in_keys       History [B, M]; default ("history", "prompt")
            out_keys_inv  str [B], written by the policy; default ("text", "full")
    Writes  out_keys      str [B]; default ("text", "prompt"). For in_keys that end in "prompt" the text ends with the
                          generation prompt
            in_keys_inv   History [B, M], for the env; default ("history", "full")
    Raises  TemplateError for an unknown template, one without a parser, or text without a message

    ``chat_template`` (jinja text) or ``chat_template_name`` (registered, with its parser) replace the tokenizer's own.

    If the text of a turn does not begin with the text so far (the parser strips white space, the template drops
    thinking), the turn starts a new training record.

    >>> from llmrl.envs.llm import ChatEnv
    >>> from llmrl.testing import ScriptedPolicy, tiny_tokenizer
    >>> from tensordict import TensorDict
    >>> env = ChatEnv(batch_size=[1]).append_transform(TemplateTransform(tiny_tokenizer()))
    >>> td = env.reset(TensorDict(query="2 + 2?", batch_size=[1]))
    >>> td["text"].rows("prompt")
    ['<|im_start|>user\\n2 + 2?<|im_end|>\\n<|im_start|>assistant\\n']
    >>> td = td.exclude("history")
    >>> env.step(ScriptedPolicy(["4<|im_end|>"])(td))["next", "history"].prompt.to_chats()[0][-1]
    {'role': 'assistant', 'content': '4'}
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        chat_template: str | None = None,
        *,
        chat_template_name: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        in_keys: Keys | None = None,
        out_keys: Keys | None = None,
        in_keys_inv: Keys | None = None,
        out_keys_inv: Keys | None = None,
    ):
        super().__init__(
            ("history", "prompt") if in_keys is None else in_keys,
            ("text", "prompt") if out_keys is None else out_keys,
            ("history", "full") if in_keys_inv is None else in_keys_inv,
            ("text", "full") if out_keys_inv is None else out_keys_inv,
        )
        self._check_pairs()
        self.tokenizer = tokenizer
        self._template = {"chat_template": chat_template, "chat_template_name": chat_template_name}
        self.renderer = Renderer(tokenizer, template_kwargs=template_kwargs, **self._template)

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        for in_key, out_key in zip(self.in_keys, self.out_keys, strict=True):
            _set_texts(td, out_key, self._rendered(td, in_key))
        return td

    def _call(self, next_td: TensorDictBase) -> TensorDictBase:
        for in_key, out_key in zip(self.in_keys, self.out_keys, strict=True):
            texts, carried = self._rendered(next_td, in_key), strings_of(next_td, out_key)
            if carried is not None and out_key[0] == "text":
                pairs = enumerate(zip(texts, carried, strict=True))
                rewritten = [row for row, (text, before) in pairs if not text.startswith(before)]
                if rewritten:
                    begin_anew(next_td, rewritten, "text")
            _set_texts(next_td, out_key, texts)
        return next_td

    def inv(self, td: TensorDictBase) -> TensorDictBase:
        td = shallow_copy(td)
        for in_key, out_key in zip(self.in_keys_inv, self.out_keys_inv, strict=True):
            required(td, out_key, "TemplateTransform")
            history = History.from_text(strings_of(td, out_key), tokenizer=self.tokenizer, **self._template)
            if isinstance(in_key, tuple):
                td.set(in_key[0], ChatHistory.from_rows({in_key[1]: history}, td.batch_size))
            else:
                td.set(in_key, history)
        return td

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        for key in self.out_keys:
            observation_spec[key] = NonTensor(shape=observation_spec.shape)
        return observation_spec

    def transform_action_spec(self, action_spec: Composite) -> Composite:
        for in_key, out_key in zip(self.in_keys_inv, self.out_keys_inv, strict=True):
            if in_key in action_spec:
                del action_spec[in_key[0] if isinstance(in_key, tuple) else in_key]
                action_spec[out_key] = NonTensor(shape=action_spec.shape)
        return action_spec

    def _rendered(self, td: TensorDictBase, key: NestedKey) -> Sequence[str]:
        history = td.get(key, None)
        if not isinstance(history, History):
            got = f"{type(history).__name__}; keys present: {present_keys(td)}"
            raise MissingKeyError(f"TemplateTransform: there must be a History in {key!r}: got {got}.")
        asks = isinstance(key, tuple) and key[-1] == "prompt"
        chats = history_chats(history, 1, asks=asks)
        return self.renderer.prompt_texts(chats) if asks else self.renderer.codec.render(chats)


def _set_texts(td: TensorDictBase, key: NestedKey, texts: Sequence[str]) -> None:
    if isinstance(key, str):
        td.set(key, column(texts))
    else:
        td.set(key[0], Text.from_rows({key[1]: list(texts)}, td.batch_size))
