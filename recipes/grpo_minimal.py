"""GRPO without settings: a tiny random model learns by reward alone to answer sums in digits, in ten seconds on a CPU.

    python recipes/grpo_minimal.py

``grpo.py`` is the same with micro-batches, several processes, other engines, evaluation and checkpoints.
"""

import torch

from llmrl import (
    DatasetChatEnv,
    GRPOLoss,
    LazyStackStorage,
    LLMCollector,
    MCAdvantage,
    ReplayBuffer,
    RewardFunction,
    TransformersWrapper,
)
from llmrl.envs.llm.tasks.sums import sums_problems
from llmrl.testing import tiny_model, tiny_tokenizer


def reward(completion: str) -> float:
    return sum(character.isdigit() for character in completion) / 8


def main(steps: int = 20) -> list[float]:
    """The mean reward of each step."""
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer)  # or AutoTokenizer and AutoModelForCausalLM.from_pretrained(...)
    policy = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 8, "seed": 0})
    env = DatasetChatEnv(dataset=sums_problems(), num_envs=8, repeats=8, group_repeats=True, seed=0)
    env.append_transform(RewardFunction(reward))
    collector = LLMCollector(env, policy=policy, yield_only_last_steps=True, dialog_turns_per_batch=1)
    buffer = ReplayBuffer(storage=LazyStackStorage(64), transform=MCAdvantage(grpo_size=8))
    loss = GRPOLoss(policy.get_new_version(generate=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rewards = []
    for step in range(1, steps + 1):
        rollouts = collector.rollout()  # 8 answers to each of 8 prompts, with rewards and log-probs
        buffer.empty()
        buffer.extend(rollouts)  # MCAdvantage compares each reward with the mean of its group
        loss(buffer[:]).loss_objective.backward()
        optimizer.step()
        optimizer.zero_grad()
        collector.update_policy_weights_()  # the engine shares the module: only the version moves
        rewards.append(rollouts["next", "reward"].mean().item())
        print(f"step {step:2}  reward {rewards[-1]:.3f}")
    collector.shutdown()
    return rewards


if __name__ == "__main__":
    main()
