"""A third backend from nothing but the public names: a bigram table as the language model, and its wrapper.

This is what docs/extending.md describes: an engine knows ids, the subclass says how to make it, and everything else
(modes, templates, padding, multi-turn streams, batching, losses) comes with ``LLMWrapperBase``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from llmrl.data.llm.chat import History
from llmrl.data.ragged.tensordicts import column
from llmrl.envs.llm import ChatEnv
from llmrl.envs.utils import step_mdp
from llmrl.errors import ConfigError
from llmrl.modules.llm import (
    Backend,
    ChatHistory,
    Engine,
    Generation,
    LLMWrapperBase,
    SamplingParams,
    StopReason,
    TokenScores,
)
from llmrl.objectives.llm import GRPOLoss
from llmrl.testing import tiny_tokenizer

# --- the backend ------------------------------------------------------------------------------------------------------


class Bigram(nn.Module):
    """p(token | token before it) = softmax of a row of a table."""

    def __init__(self, vocabulary: int, seed: int = 0) -> None:
        super().__init__()
        self.table = nn.Parameter(
            2 * torch.randn(vocabulary, vocabulary, generator=torch.Generator().manual_seed(seed))
        )

    def log_probs(self, ids: Tensor, temperature: float) -> Tensor:
        """float32[..., T, V]: of what follows each token."""
        return (self.table[ids] / temperature).log_softmax(-1)


class BigramEngine:
    """Samples and scores a ``Bigram``. Refuses what it cannot do instead of leaving it out."""

    def __init__(self, model: Bigram, eos_token_id: int) -> None:
        self.model = model
        self.eos_token_ids = (eos_token_id,)
        self.version = 0

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Tensor], params: SamplingParams, *, seeds: Sequence[int] | None = None
    ) -> Generation:
        if params.truncates or params.stop_strings:
            raise ConfigError("BigramEngine: neither truncation nor stop strings: leave them out of generate_kwargs.")
        stops = {*self.eos_token_ids, *params.stop_token_ids}
        seeds = torch.randint(1 << 62, (len(prompts),)).tolist() if seeds is None else seeds
        rows = [self._row(int(p[-1]), params, stops, seed) for p, seed in zip(prompts, seeds, strict=True)]
        ids, log_probs, reasons = map(list, zip(*rows, strict=True))
        return Generation(ids, log_probs, None, reasons, self.version)

    def _row(self, last: int, params: SamplingParams, stops: set[int], seed: int) -> tuple[Tensor, Tensor, StopReason]:
        generator = torch.Generator().manual_seed(seed)
        ids, scores = [], []
        while len(ids) < params.max_new_tokens and (not ids or ids[-1] not in stops):
            log_p_V = self.model.log_probs(torch.tensor(last), params.scoring_temperature)
            last = int(log_p_V.argmax() if params.greedy else torch.multinomial(log_p_V.exp(), 1, generator=generator))
            ids.append(last)
            scores.append(log_p_V[last])
        reason = StopReason.EOS if ids[-1] in stops else StopReason.LENGTH
        return torch.tensor(ids), torch.stack(scores), reason

    @torch.no_grad()
    def score(
        self, sequences: Sequence[Tensor], *, temperature: float = 1.0, masks: Sequence[Tensor] | None = None
    ) -> list[Tensor]:
        scores = [_scores(self.model, row, temperature) for row in sequences]
        return scores if masks is None else [row * mask for row, mask in zip(scores, masks, strict=True)]

    def update_weights(self, weights: Mapping[str, Tensor] | None, *, version: int) -> None:
        if weights is not None:
            self.model.load_state_dict(weights)
        self.version = version

    def close(self) -> None:
        """Nothing to release."""


class BigramScorer(nn.Module):
    """The same scores with gradients: what the losses call."""

    def __init__(self, model: Bigram) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, select: Tensor, temperature: float = 1.0, entropy: bool = False
    ) -> TokenScores:
        log_p_BTV = self.model.log_probs(input_ids, temperature)
        scores = _scores(self.model, input_ids, temperature) * select
        entropy_BT = -(log_p_BTV.exp() * log_p_BTV).sum(-1).roll(1, -1) * select if entropy else None
        return TokenScores(scores, entropy_BT)


def _scores(model: Bigram, ids: Tensor, temperature: float) -> Tensor:
    following = model.log_probs(ids[..., :-1], temperature).gather(-1, ids[..., 1:, None])[..., 0]
    return torch.cat([torch.zeros_like(ids[..., :1], dtype=torch.float32), following], -1)


class BigramWrapper(LLMWrapperBase):
    """The policy over a ``Bigram``: all arguments are LLMWrapperBase's."""

    def _build(self, model: Any) -> Backend:
        engine = BigramEngine(model, self.tokenizer.eos_token_id)
        return Backend(engine, BigramScorer(model), self.tokenizer.pad_token_id)


# --- what comes with it -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def make_policy(tokenizer, **options):
    options = {"generate_kwargs": {"max_new_tokens": 8, "seed": 0, "temperature": 0.8}} | options
    return BigramWrapper(Bigram(len(tokenizer)), tokenizer=tokenizer, **options)


def questions(*texts):
    history = History.from_chats([[{"role": "user", "content": text}] for text in texts])
    return TensorDict({"history": ChatHistory.from_rows({"prompt": history})}, [len(texts)])


def test_it_is_an_engine_and_its_wrapper_generates_and_scores(tokenizer):
    policy = make_policy(tokenizer)
    assert isinstance(policy.engine, Engine)
    td = policy(questions("Hi", "What is 2+2?"))
    assert td["history"].full.to_chats()[1][0] == {"role": "user", "content": "What is 2+2?"}
    scorer = policy.get_new_version(generate=False)
    assert scorer.engine is policy.engine
    assert scorer.temperature == 0.8
    scored = scorer(td.copy())["log_probs"].rows("full")
    for mask, old, new in zip(*(td[key[0]].rows(key[1]) for key in KEYS), scored, strict=True):
        torch.testing.assert_close(new[mask], old[mask], atol=1e-6, rtol=0)


KEYS = [("masks", "all_assistant_mask"), ("log_probs", "full")]


@pytest.mark.parametrize("pad_output", [False, True])
def test_conversations_and_the_loss_work_as_with_any_other(tokenizer, pad_output):
    policy = make_policy(tokenizer, pad_output=pad_output)
    env = ChatEnv(batch_size=[2])
    td = env.reset(TensorDict(query=column(["Hi", "What is 2+2?"]), batch_size=[2]))
    td = env.step(policy(step_mdp(env.step(policy(td)))))
    td["advantage"] = torch.tensor([1.0, -1.0]).reshape(2, 1, 1)
    output = GRPOLoss(policy)(td)
    torch.testing.assert_close(output.ESS, torch.tensor(1.0))  # every ratio is 1
    output.loss_objective.backward()
    assert policy.scorer.model.table.grad.abs().sum() > 0


def test_threads_share_its_calls(tokenizer):
    policy = make_policy(tokenizer, min_batch_size=2, batching_timeout=20.0)
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(policy, questions(text)) for text in ("Hi", "Hello")]
        assert [future.result(timeout=20.0).batch_size for future in futures] == [(1,), (1,)]


def test_what_it_cannot_do_it_says(tokenizer):
    policy = make_policy(tokenizer, generate_kwargs={"top_k": 3})
    with pytest.raises(ConfigError, match="neither truncation nor stop strings"):
        policy(questions("Hi"))
