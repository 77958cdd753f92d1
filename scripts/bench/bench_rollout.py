"""Times the overhead of a rollout, with an engine that takes no time: llmrl against a loop written by hand.

    python scripts/bench/bench_rollout.py [--batch 64] [--repeats 30] [--profile]

Both sides render the same prompts, call the same engine, decode, score with the same function, compute group advantages
and store every conversation with its ids, masks and log-probs. Each figure is the best of the repeats; only ratios are
comparable between machines.
"""

from __future__ import annotations

import itertools
import random
import time
from collections import defaultdict
from typing import Any

import torch
from table import Row, benchmark
from timing import best, profiled
from torch import Tensor

from llmrl.collectors.llm import LLMCollector
from llmrl.data.llm import History
from llmrl.data.replay_buffers import LazyStackStorage, ReplayBuffer
from llmrl.envs import Transform
from llmrl.envs.llm import DatasetChatEnv
from llmrl.envs.llm.transforms import RewardFunction
from llmrl.modules.llm.engines import SamplingParams
from llmrl.modules.llm.policies import ChatHistory, LLMWrapperBase
from llmrl.objectives.llm import MCAdvantage
from llmrl.testing import FakeEngine, tiny_tokenizer

GROUP_SIZE = 8
SYSTEM = "You are a careful assistant. Answer with one number between <answer> and </answer>."
FOLLOW_UP = "Are you sure? Think again and give the answer once more."


def reward(completion: str, answer: str | None) -> float:
    return float(completion.strip() == answer)


class FollowUp(Transform):
    """Appends the same user message after every turn."""

    def _step(self, td: Any, next_td: Any) -> Any:
        prompt = next_td.get("history").get("prompt")
        asked = History.from_chats([[{"role": "user", "content": FOLLOW_UP}] for _ in range(td.batch_size[0])])
        next_td.set("history", ChatHistory.from_rows({"prompt": prompt.extend(asked, inplace=False, dim=-1)}))
        return next_td


class Ours:
    """DatasetChatEnv + wrapper + LLMCollector + MCAdvantage + ReplayBuffer."""

    def __init__(self, rows: list[dict[str, Any]], answers: list[Tensor], tokenizer: Any, turns: int):
        self.env = DatasetChatEnv(
            dataset=rows, num_envs=len(rows), shuffle=False, seed=0, max_steps=turns, system_prompt=SYSTEM
        )
        if turns > 1:
            self.env.append_transform(FollowUp())
        self.env.append_transform(RewardFunction(reward))
        self.policy = LLMWrapperBase(FakeEngine(answers, tokenizer=tokenizer), tokenizer=tokenizer)
        self.buffer = ReplayBuffer(
            storage=LazyStackStorage(len(rows)),
            transform=MCAdvantage(grpo_size=GROUP_SIZE, prompt_key="topic"),
            batch_size=8,
        )
        self.batches = iter(
            LLMCollector(self.env, policy=self.policy, replay_buffer=self.buffer, yield_only_last_steps=True)
        )

    def __call__(self) -> None:
        self.policy.engine.prompts.clear()
        next(self.batches)


class ByHand:
    """The same with lists of dicts and tensors."""

    def __init__(self, rows: list[dict[str, Any]], answers: list[Tensor], tokenizer: Any, turns: int):
        self.rows, self.turns, self.tokenizer = rows, turns, tokenizer
        self.engine = FakeEngine(answers, tokenizer=tokenizer)
        self.buffer: list[dict[str, Any]] = []
        self.draws = itertools.count()

    def __call__(self) -> None:
        self.engine.prompts.clear()
        self.buffer.clear()
        chats = [
            [{"role": "system", "content": SYSTEM}, {"role": "user", "content": row["prompt"]}] for row in self.rows
        ]
        count = len(chats)
        masks, log_probs = [torch.zeros(0, dtype=torch.bool)] * count, [torch.zeros(0)] * count
        returns = [0.0] * count
        for turn in range(self.turns):
            encoded = self.tokenizer.apply_chat_template(
                chats, add_generation_prompt=True, tokenize=True, return_dict=False
            )
            prompts = [torch.tensor(ids) for ids in encoded]
            seeds = [hash((next(self.draws), turn)) & 0x7FFF_FFFF for _ in chats]
            generation = self.engine.generate(prompts, SamplingParams(), seeds=seeds)
            texts = self.tokenizer.batch_decode([ids.tolist() for ids in generation.ids], skip_special_tokens=True)
            for i, text in enumerate(texts):
                size, new = len(prompts[i]), len(generation.ids[i])
                mask, values = torch.zeros(size + new, dtype=torch.bool), torch.zeros(size + new)
                mask[: len(masks[i])], values[: len(masks[i])] = masks[i], log_probs[i]
                mask[size:], values[size:] = True, generation.log_probs[i]
                masks[i], log_probs[i] = mask, values
                returns[i] += reward(text, self.rows[i]["answer"])
                chats[i].append({"role": "assistant", "content": text})
                if turn + 1 < self.turns:
                    chats[i].append({"role": "user", "content": FOLLOW_UP})
        groups: dict[str, list[int]] = defaultdict(list)
        for i, row in enumerate(self.rows):
            groups[row["topic"]].append(i)
        advantages = torch.zeros(count)
        for members in groups.values():
            values = torch.tensor([returns[i] for i in members])
            advantages[members] = (values - values.mean()) / (values.std() + 1e-6)
        for i, chat in enumerate(chats):
            self.buffer.append(
                {
                    "messages": chat,
                    "ids": torch.cat([prompts[i], generation.ids[i]]),
                    "mask": masks[i],
                    "log_probs": log_probs[i],
                    "reward": torch.tensor(returns[i]),
                    "advantage": advantages[i],
                    "stop_reason": generation.stop_reasons[i],
                    "version": generation.version,
                }
            )


def turn_by_turn(
    rows: list[dict[str, Any]], answers: list[Tensor], tokenizer: Any, repeats: int
) -> tuple[float, float]:
    """Milliseconds of a collector that yields every turn, and of policy, step and resets without it."""
    env = DatasetChatEnv(dataset=rows, num_envs=len(rows), shuffle=False, seed=0, max_steps=1, system_prompt=SYSTEM)
    env.append_transform(RewardFunction(reward, deadline_s=None))
    policy = LLMWrapperBase(FakeEngine(answers, tokenizer=tokenizer), tokenizer=tokenizer)
    batches = iter(LLMCollector(env, policy=policy))

    def collected() -> None:
        policy.engine.prompts.clear()
        next(batches)

    def alone() -> None:
        policy.engine.prompts.clear()
        env.step(policy(env.reset()))

    collected()
    return best(collected, alone, repeats=repeats)


def per_turn(ours: Ours, turns: int, repeats: int) -> list[float]:
    """Milliseconds of each turn (policy, step, and the next root), the best of the repeats."""
    times = [[] for _ in range(turns)]
    for _ in range(repeats):
        ours.policy.engine.prompts.clear()
        root = ours.env.reset()
        for turn in range(turns):
            start = time.perf_counter()
            root = ours.env.step_mdp(ours.env.step(ours.policy(root)))
            times[turn].append(time.perf_counter() - start)
    return [1e3 * min(values) for values in times]


def main(batch: int, repeats: int, profile: bool) -> list[Row]:
    torch.set_num_threads(1)
    draw = random.Random(0)
    tokenizer = tiny_tokenizer()
    rows = []
    for n in range(batch):
        a, b = draw.randrange(1000), draw.randrange(1000)
        prompt = f"In lesson {n} we add two numbers. What is the sum of {a} and {b}? Think first, then answer."
        rows.append({"prompt": prompt, "answer": f"It is {a + b}.", "topic": f"topic {n // GROUP_SIZE}"})
    texts = [f"The sum of the two is {draw.randrange(9)}, so it is {row['answer']}" for row in rows]
    texts = [row["answer"] if n % 3 else text for n, (row, text) in enumerate(zip(rows, texts, strict=True))]
    answers = [torch.tensor([*tokenizer(text).input_ids, tokenizer.eos_token_id]) for text in texts]
    print(f"{batch} conversations, best of {repeats}")
    summary = []
    for turns in (1, 4):
        ours, by_hand = Ours(rows, answers, tokenizer, turns), ByHand(rows, answers, tokenizer, turns)
        ours()
        by_hand()
        mine, theirs = best(ours, by_hand, repeats=repeats)
        print(f"{turns} turns: llmrl {mine:.2f} ms, by hand {theirs:.2f} ms")
        what = f"rollout of {batch} conversations, {turns} turn{'s' * (turns > 1)}: llmrl / by hand"
        summary.append(Row(what, mine / theirs, 3.0))
        if profile:
            profiled(ours, repeats, 35)
    count = min(16, batch)
    whole, alone = turn_by_turn(rows[:count], answers[:count], tokenizer, repeats)
    print(f"turn by turn, {count} conversations: collector {whole:.2f} ms, policy and env alone {alone:.2f} ms")
    summary.append(
        Row(f"turns of {count} conversations without a buffer: collector / policy and env", whole / alone, 2.0)
    )
    times = per_turn(Ours(rows, answers, tokenizer, 20), 20, repeats)
    print(f"turn 1: {times[0]:.2f} ms, turn 2: {times[1]:.2f} ms, turn 20: {times[19]:.2f} ms")
    summary.append(Row("rollout: turn 20 / turn 1", times[19] / times[0], 1.3))
    return summary


if __name__ == "__main__":
    benchmark(
        main,
        __doc__,
        batch=(64, "conversations, a multiple of 8"),
        repeats=30,
        profile=(False, "print a profile of llmrl's side"),
    )
