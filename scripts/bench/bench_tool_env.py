"""Times a turn of tool conversations: 64 of them, 20 turns, one call each, with an engine and a tool that cost nothing.

    python scripts/bench/bench_tool_env.py [--repeats 7] [--json FILE]

CPU time of the environment and of the policy's bookkeeping, per turn; the least of the repeats of each turn. The
twentieth turn is compared with the second (the first with earlier turns), and with the first. Tool results come from
threads, as always.
"""

from __future__ import annotations

import time

from table import Row, benchmark
from tensordict import TensorDict

from llmrl.envs.llm import ChatEnv
from llmrl.envs.llm.tool_calls import HermesFormat
from llmrl.envs.llm.transforms import ToolTransform
from llmrl.modules.llm.policies.base import LLMWrapperBase
from llmrl.testing import FakeEngine, tiny_tokenizer

NUM, TURNS = 64, 20


def echo(text: str) -> str:
    """Says the same."""
    return text


def conversations(mode: str, repeats: int) -> list[tuple[list[float], list[float]]]:
    """Milliseconds of each turn in the environment and in the policy, for each repeat.

    All repeats use one environment, as a run does: it probes the template once for each number of turns.
    """
    tokenizer = tiny_tokenizer()
    answer = "Let me see. " + HermesFormat().render("echo", {"text": "twelve and thirty"})
    engine = FakeEngine([answer], tokenizer=tokenizer)
    options = {"generate_kwargs": {"max_new_tokens": 256}}
    policy = LLMWrapperBase(engine, tokenizer=tokenizer, input_mode=mode, **options)
    env = ChatEnv(batch_size=[NUM], input_mode=mode, tokenizer=tokenizer, system_prompt="Be brief.")
    env = env.append_transform(ToolTransform([echo]))
    runs = [conversation(env, policy) for _ in range(repeats)]
    env.close()
    return runs


def conversation(env: ChatEnv, policy: LLMWrapperBase) -> tuple[list[float], list[float]]:
    td = env.reset(TensorDict(query=[f"What is {n}?" for n in range(NUM)], batch_size=[NUM]))
    steps, turns = [], []
    for _ in range(TURNS):
        began = time.process_time()
        td = policy(td)
        asked = time.process_time()
        td = env.step_mdp(env.step(td))
        steps.append(1e3 * (time.process_time() - asked))
        turns.append(1e3 * (asked - began))
    return steps, turns


def main(repeats: int) -> list[Row]:
    rows = []
    for mode in ("history", "text", "tokens"):
        runs = conversations(mode, repeats)
        step, policy = ([min(times) for times in zip(*column, strict=True)] for column in zip(*runs, strict=True))
        # the median of neighbours: a single turn is too noisy
        first, second, last = step[0], sorted(step[1:4])[1], sorted(step[-3:])[1]
        asked, asked_last = sorted(policy[1:4])[1], sorted(policy[-3:])[1]
        rows += [
            Row(f"env step, {mode}, turn {TURNS} against turn 2", last / second, 1.2),
            Row(f"env step, {mode}, turn {TURNS} against turn 1", last / first, 1.2),
            Row(f"policy, {mode}, turn {TURNS} against turn 2", asked_last / asked, 1.5),
            Row(f"env step, {mode}, one call of {NUM}", last / NUM, None, "ms"),
            Row(f"policy, {mode}, one call of {NUM} at turn {TURNS}", asked_last / NUM, None, "ms"),
        ]
    return rows


if __name__ == "__main__":
    benchmark(main, __doc__, repeats=7)
