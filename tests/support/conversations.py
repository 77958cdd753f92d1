"""Conversations, scripted policies and an environment that goes on, shared by the tests of wrappers and collectors."""

from __future__ import annotations

import torch
from tensordict import TensorDict

from llmrl.data.llm.chat import History
from llmrl.envs import Transform
from llmrl.envs.llm import DatasetChatEnv
from llmrl.envs.llm.transforms import RewardFunction
from llmrl.modules.llm import ChatHistory, LLMWrapperBase
from llmrl.testing import FakeEngine, ScriptedPolicy

ROWS = [{"query": f"q{n}", "answer": str(n)} for n in range(12)]
QUESTIONS = ["Hi", "What is 12 + 30?", "Think step by step."]


def chats(questions=QUESTIONS):
    return [[{"role": "user", "content": question}] for question in questions]


def history_td(conversations):
    prompt = ChatHistory.from_rows({"prompt": History.from_chats(conversations)})
    return TensorDict({"history": prompt}, [len(conversations)])


def prompt_after(history, chats):
    """The prompts of conversations that go on with ``chats``, as the container of a batch."""
    return ChatHistory.from_rows({"prompt": history.extend(History.from_chats(chats), inplace=False, dim=-1)})


def fake_policy(tokenizer, answers, **options):
    return LLMWrapperBase(FakeEngine(answers, tokenizer=tokenizer), tokenizer=tokenizer, **options)


def rows(td, *key):
    return td.get(key, as_list=True)


def length(completion):
    return float(len(completion))


def dialogs(hook=None, *, num_envs=3, max_steps=6, rows=6, **options):
    """Conversations about q0, q1, ... in which the user asks again, rewarded by the lengths of the answers."""
    env = DatasetChatEnv(dataset=ROWS[:rows], shuffle=False, num_envs=num_envs, max_steps=max_steps, **options)
    return env.append_transform(AskAgain(hook)).append_transform(RewardFunction(length, deadline_s=None))


def talks_for(turns):
    """A policy whose conversation about q<n> ends in its turn ``turns[n]``."""

    def reply(chat):
        turn = 1 + sum(message["role"] == "assistant" for message in chat)
        return "stop" if turn == turns[int(chat[0]["content"][1:])] else "more" + "!" * turn

    return ScriptedPolicy(reply)


class AskAgain(Transform):
    """The user says "Go on." until the policy says "stop"; ``hook(chats)`` runs before that."""

    def __init__(self, hook=None):
        super().__init__()
        self.hook = hook

    def _step(self, td, next_td):
        prompt = next_td["history"].prompt
        chats = prompt.to_chats()
        if self.hook is not None:
            self.hook(chats)
        next_td["history"] = prompt_after(prompt, [[{"role": "user", "content": "Go on."}]] * len(chats))
        if (tokens := td.get("tokens", None)) is not None and tokens.rows("full") is not None:
            assert next_td["tokens"].rows("prompt") is not None
        stop = torch.tensor(["stop" in chat[-1]["content"] for chat in chats]).view(-1, 1)
        next_td["done"], next_td["terminated"] = next_td["done"] | stop, stop
        return next_td


class Recorder(FakeEngine):
    """A FakeEngine that keeps what it was asked and what it drew, a (prompt, ids, log-probs) per row."""

    def generate(self, prompts, params, *, seeds=None):
        generation = super().generate(prompts, params, seeds=seeds)
        rows = zip(prompts, generation.ids, generation.log_probs, strict=True)
        drawn = [tuple(value.clone() for value in row) for row in rows]
        self.__dict__.setdefault("drawn", []).extend(drawn)  # in place: conversations ask from several threads
        return generation
