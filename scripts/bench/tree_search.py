"""Best of a tree of answers against best of n answers, at the same number of generated tokens, on held-out sums.

    llmrl sft sums_sft --name sft && python scripts/bench/tree_search.py runs/sft/checkpoints/step*

Both start with the greedy answer, and stop at the first correct one or when a problem's token budget is used up. Best
of n samples its other answers independently, so likely ones are repeated. The tree never repeats an answer: each new
one branches off an old one at the most likely untried token, continues greedily, and only its new tokens count.
"""

from __future__ import annotations

import argparse
import heapq
from dataclasses import dataclass, field

import torch
from tensordict import TensorDict
from transformers import AutoModelForCausalLM, AutoTokenizer

from llmrl.data import MCTSForest
from llmrl.envs.llm.tasks.sums import sums_problems, sums_reward
from llmrl.modules.llm.engines import SamplingParams, TransformersEngine

MAX_TOKENS = 32


@dataclass
class Search:
    """The search on one problem: its prompt, and a heap of untried prefixes of answers, the most likely first."""

    prompt: list[int]
    answer: str
    forest: MCTSForest = field(default_factory=MCTSForest)
    waiting: list[tuple[float, list[int]]] = field(default_factory=lambda: [(0.0, [])])
    used: int = 0
    solved_at: int | None = None


class Model:
    def __init__(self, folder: str) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.module = AutoModelForCausalLM.from_pretrained(folder).eval()
        end = self.tokenizer.eos_token_id
        self.engine = TransformersEngine(self.module, eos_token_ids=[end], pad_token_id=self.tokenizer.pad_token_id)

    def prompt(self, question: str) -> list[int]:
        chat = [{"role": "user", "content": question}]
        return self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]

    def answers(self, prompts: list[list[int]], temperature: float, seed: int = 0) -> list[list[int]]:
        params = SamplingParams(max_new_tokens=MAX_TOKENS, temperature=temperature)
        seeds = [seed * 10_000 + row for row in range(len(prompts))]
        out = self.engine.generate([torch.tensor(ids) for ids in prompts], params, seeds=seeds)
        return [ids.tolist() for ids in out.ids]

    def reward(self, ids: list[int], answer: str) -> float:
        return sums_reward(self.tokenizer.decode(ids, skip_special_tokens=True), answer)

    @torch.no_grad()
    def log_probs(self, prompt: list[int], answer: list[int]) -> torch.Tensor:
        """[len(answer), V]: the log-probs of all tokens at each place of the answer."""
        logits = self.module(torch.tensor([prompt + answer[:-1]])).logits[0, len(prompt) - 1 :]
        return logits.log_softmax(-1)


def best_of_n(model: Model, searches: list[Search], budget: int, seed: int) -> None:
    left, round_ = list(searches), 0
    while left := [one for one in left if one.solved_at is None and one.used < budget]:
        answers = model.answers([one.prompt for one in left], temperature=float(round_ > 0), seed=seed + round_)
        for one, ids in zip(left, answers, strict=True):
            one.used += len(ids)
            if model.reward(ids, one.answer) and one.used <= budget:
                one.solved_at = one.used
        round_ += 1


def best_of_tree(model: Model, searches: list[Search], budget: int, width: int) -> None:
    left = list(searches)
    while left := [one for one in left if one.solved_at is None and one.used < budget and one.waiting]:
        taken = [heapq.heappop(one.waiting) for one in left]
        starts = [one.prompt + prefix for one, (_, prefix) in zip(left, taken, strict=True)]
        for one, (cost, prefix), rest in zip(left, taken, model.answers(starts, temperature=0.0), strict=True):
            ended = prefix[-1:] == [model.tokenizer.eos_token_id]
            answer = prefix if ended else (prefix + rest)[:MAX_TOKENS]
            one.used += len(answer) - max(len(prefix) - 1, 0)  # the last token of the prefix is new too
            reward = model.reward(answer, one.answer)
            if reward and one.used <= budget:
                one.solved_at = one.used
            one.forest.extend(rollout(one.prompt, answer, reward))
            log_probs = model.log_probs(one.prompt, answer)
            # cost: -log p of the answer before ``place``, so that the heap yields the most likely untried prefix
            for place in range(len(prefix), len(answer)):
                values, tokens = log_probs[place].topk(width + 1)
                for value, token in zip(values.tolist(), tokens.tolist(), strict=True):
                    if token != answer[place]:
                        heapq.heappush(one.waiting, (cost - value, [*answer[:place], token]))
                cost -= log_probs[place, answer[place]].item()


def rollout(prompt: list[int], answer: list[int], reward: float) -> TensorDict:
    """The answer as steps of one token; an observation is the ids so far, padded to a common length."""
    ids = torch.tensor(prompt + answer)
    seen = torch.full((len(answer) + 1, len(prompt) + MAX_TOKENS), -1)
    for place in range(len(answer) + 1):
        seen[place, : len(prompt) + place] = ids[: len(prompt) + place]
    rewards = torch.zeros(len(answer), 1)
    rewards[-1] = reward
    after = TensorDict(observation=seen[1:], reward=rewards, batch_size=[len(answer)])
    return TensorDict(observation=seen[:-1], action=torch.tensor(answer), next=after, batch_size=[len(answer)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--problems", type=int, default=200)
    parser.add_argument("--budgets", type=int, nargs="+", default=[32, 64, 128, 256])
    parser.add_argument("--width", type=int, default=4, help="alternative tokens considered at each place")
    parser.add_argument("--draw", action="store_true", help="print the tree of the problem that took the most tokens")
    options = parser.parse_args()
    model, most = Model(options.model), max(options.budgets)
    rows = sums_problems("test")[: options.problems]
    found = {}
    for name, search, setting in (("n", best_of_n, 0), ("tree", best_of_tree, options.width)):
        found[name] = [Search(model.prompt(row["question"]), row["answer"]) for row in rows]
        search(model, found[name], most, setting)
    print(f"{'tokens':>8} {'best of n':>10} {'of a tree':>10}")
    for budget in options.budgets:
        shares = [
            sum((one.solved_at or most + 1) <= budget for one in searches) / len(rows) for searches in found.values()
        ]
        print(f"{budget:>8} {shares[0]:>10.3f} {shares[1]:>10.3f}")
    if options.draw:
        one = max(found["tree"], key=lambda one: one.solved_at or 0)
        tree = one.forest.get_tree(rollout(one.prompt, [0], 0.0)[0])
        print(tree.to_string(lambda vertex: label(model, vertex)))


def label(model: Model, vertex: object) -> str:
    """The text of a vertex and its mean reward."""
    actions = vertex.selected_actions
    text = "" if actions is None else model.tokenizer.decode(actions.tolist())
    return f"{text!r} {vertex.count} x {vertex.value:.2f}"


if __name__ == "__main__":
    main()
