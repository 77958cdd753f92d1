"""`TurnSampler`: answers to messages, over a renderer and an engine, without a TensorDict.

A turn that follows another one begins with exactly the ids of that one: sampled ids are never tokenised again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from llmrl.data.llm.template_analysis import conversation_shape
from llmrl.data.llm.templates import Tools
from llmrl.errors import DataError
from llmrl.modules.llm.engines.base import Engine, Generation, Hear, SamplingParams, StopReason, generate_within
from llmrl.modules.llm.policies.containers import decode_rows
from llmrl.modules.llm.policies.options import with_stop_ids
from llmrl.modules.llm.rendering import Renderer

Message = Mapping[str, Any]


@dataclass(eq=False)
class SampledTurn:
    """An answer as it was sampled.

    messages    of the prompt, with all earlier turns, as they were rendered
    message     the answer, as the template renders it in later turns; its content without the end of the turn
    parent      the turn whose ids this prompt begins with; None: the messages were rendered as a whole
    prompt_ids  int64[P]
    ids         int64[R]; log_probs, plain_log_probs and versions: see `Generation`
    version     of the weights that sampled its oldest id
    is_chosen   it is the first of several answers that met a condition: its log-probs are not those of how it was
                drawn, so it is not trained
    """

    messages: list[Message]
    message: dict[str, Any]
    tools: Tools | None
    parent: SampledTurn | None
    prompt_ids: Tensor
    ids: Tensor
    log_probs: Tensor
    plain_log_probs: Tensor | None
    versions: Tensor | None
    version: int
    stop_reason: StopReason
    is_chosen: bool = False

    @cached_property
    def shape(self) -> tuple[Any, ...]:
        """`conversation_shape` of the messages and the answer."""
        if self.parent is None:
            return conversation_shape([*self.messages, self.message])
        return self.parent.shape + conversation_shape([*self.messages[len(self.parent.shape) :], self.message])

    @cached_property
    def stream(self) -> Tensor:
        """int64[P + R], the ids of prompt and answer."""
        return torch.cat([self.prompt_ids, self.ids])

    def path(self) -> list[SampledTurn]:
        """The turns from the first one to this one."""
        turns: list[SampledTurn] = []
        turn: SampledTurn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        return turns[::-1]


class TurnSampler:
    """Samples answers with one engine, template and set of sampling parameters.

    >>> from llmrl.testing import FakeEngine, tiny_tokenizer
    >>> tokenizer = tiny_tokenizer()
    >>> sampler = TurnSampler(Renderer(tokenizer), FakeEngine(["4", "8"], tokenizer=tokenizer))
    >>> [first] = sampler.sample([{"role": "user", "content": "2+2"}])
    >>> [second] = sampler.sample([*first.messages, first.message, {"role": "user", "content": "4+4"}], after=first)
    >>> second.message["content"], second.prompt_ids[: len(first.stream)].equal(first.stream)
    ('8', True)

    ``max_tokens``: the most that a prompt and its answer may have together; None: what the engine can hold.
    """

    def __init__(
        self,
        renderer: Renderer,
        engine: Engine,
        params: SamplingParams | None = None,
        *,
        max_tokens: int | None = None,
    ) -> None:
        self.renderer, self.engine, self.params = renderer, engine, params or SamplingParams()
        limits = [limit for limit in (max_tokens, engine.context_length) if limit is not None]
        self.max_tokens = min(limits, default=None)

    @cached_property
    def _longest_token(self) -> int:
        return max(map(len, self.renderer.tokenizer.get_vocab()))

    def prompt(
        self, messages: Sequence[Message], *, tools: Tools | None = None, after: SampledTurn | None = None
    ) -> Tensor:
        """int64[P]: the ids of ``after`` and those that the messages behind its answer add; or of all messages.

        Raises  RewriteError if the template writes the turns up to ``after`` differently once these messages follow;
                DataError for texts that are too long whatever their tokens: to tokenise 50 MB takes minutes
        """
        new = messages if after is None else messages[len(after.messages) + 1 :]
        size = sum(len(text) for message in new if isinstance(text := message.get("content"), str))
        if self.max_tokens is not None and size > self.max_tokens * self._longest_token:
            raise DataError(
                f"TurnSampler: a prompt must have fewer than the {self.max_tokens} tokens of a conversation: got a "
                f"text of {size} characters, and no token has more than {self._longest_token}."
            )
        if after is None:
            return self.renderer.prompt_ids([messages], tools=tools)[0]
        options = {"tools": tools, "shapes": [after.shape]}
        [added] = self.renderer.extend([after.stream], [messages], [len(new)], **options)
        return torch.cat([after.stream, added])

    def sample(
        self,
        messages: Sequence[Message] | Tensor,
        *,
        tools: Tools | None = None,
        after: SampledTurn | None = None,
        params: SamplingParams | None = None,
        count: int = 1,
        seeds: Sequence[int] | None = None,
        hear: Callable[[Tensor], Hear] | None = None,
    ) -> list[SampledTurn]:
        """``count`` answers to a conversation that ends with a question, or to its ids int64[P].

        ``after``: see `prompt`
        ``hear``   of an engine that ``streams``: it is called with the ids of the prompt and returns what hears of the
                   answers while they are sampled
        Raises  DataError if the prompt leaves no room for an answer; what the engine raises
        """
        prompt, known = messages, []
        if not isinstance(messages, Tensor):
            prompt, known = self.prompt(messages, tools=tools, after=after), list(messages)
        limit = self.max_tokens
        if limit is not None and len(prompt) >= limit:
            raise DataError(
                f"TurnSampler: a prompt must have fewer than the {limit} tokens of a conversation: got {len(prompt)}."
            )
        params, stops = with_stop_ids(params or self.params, self.renderer.stop_token_ids, self.engine.eos_token_ids)
        heard = None if hear is None else hear(prompt)
        drawn = generate_within(self.engine, [prompt] * count, params, limit, seeds=seeds, hear=heard)
        return list(self._turns(drawn, prompt, known, tools, after, stops))

    def _turns(
        self,
        drawn: Generation,
        prompt: Tensor,
        messages: list[Message],
        tools: Tools | None,
        after: SampledTurn | None,
        stops: frozenset[int],
    ) -> Iterator[SampledTurn]:
        bodies = []
        for ids, reason in zip(drawn.ids, drawn.stop_reasons, strict=True):
            body = ids.tolist()
            bodies.append(body[:-1] if reason is StopReason.EOS and body and body[-1] in stops else body)
        texts = decode_rows(self.renderer.tokenizer, bodies)
        for row, (text, reason) in enumerate(zip(texts, drawn.stop_reasons, strict=True)):
            plain = None if drawn.plain_log_probs is None else drawn.plain_log_probs[row]
            versions = None if drawn.versions is None else drawn.versions[row]
            yield SampledTurn(
                messages=messages,
                message=self.renderer.answer(text, ended=reason is StopReason.EOS),
                tools=tools,
                parent=after,
                prompt_ids=prompt,
                ids=drawn.ids[row],
                log_probs=drawn.log_probs[row],
                plain_log_probs=plain,
                versions=versions,
                version=drawn.version if versions is None or not len(versions) else int(versions[0]),
                stop_reason=reason,
            )
