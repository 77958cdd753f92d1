"""Times one GRPO iteration end to end on a tiny model: llmrl, a loop written by hand, and TRL's GRPOTrainer.

    python scripts/bench/bench_grpo_step.py [--prompts 4 8] [--repeats 12] [--profile]

An iteration is: render the prompts, sample 8 completions of 32 tokens for each, score them, compute group advantages,
the clipped loss, its gradients, one AdamW step. The three sides run in turn, in one process, on copies of one model
whose end-of-turn token has a bias of -1e9, so that all completions have the same length; the number of tokens that
each side trained is printed. Each figure is the fastest of the repeats; only ratios are comparable between machines.

by hand  `generate` of the model, full logits, log-softmax and gather; nothing is stored, logged or checked
llmrl    one step of `llmrl.recipes.grpo` including its metrics, without files and display
TRL      `GRPOTrainer.train()` with logging, saving, progress bar and gradient checkpointing (on by default) off; the
         time between two of its `on_step_end` events. Left out if `trl` is not installed
"""

from __future__ import annotations

import copy
import importlib.util
import os
import tempfile
import time
from typing import Any

import torch
from table import Row, benchmark
from timing import profiled
from torch import nn
from trl_side import LEARNING_RATE, QUIET, train

GROUP_SIZE = 8
NEW_TOKENS = 32
CLIP = 0.2


def reward(completion: str, answer: str | None = None) -> float:
    """The share of lower-case letters, which differs between random completions."""
    return sum("a" <= character <= "z" for character in completion) / (len(completion) + 1)


def make_prompts(count: int) -> list[str]:
    return [f"In lesson {n} we add. What is the sum of {37 * n % 1000} and {91 * n % 700}?" for n in range(count)]


def make_model(tokenizer: Any) -> nn.Module:
    """A model of about a million parameters that never samples an end or padding token."""
    from llmrl.testing import tiny_model

    model = tiny_model(tokenizer, hidden_size=160, layers=4, heads=4)
    head = nn.Linear(model.config.hidden_size, model.config.vocab_size)
    with torch.no_grad():
        head.weight.copy_(model.lm_head.weight)
        head.bias.zero_()
        head.bias[[tokenizer.eos_token_id, tokenizer.pad_token_id]] = -1e9
    model.lm_head = head
    return model


class ByHand:
    """A straightforward loop without llmrl."""

    def __init__(self, model: nn.Module, tokenizer: Any, prompts: list[str]):
        self.model, self.tokenizer = model, tokenizer
        self.chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
        self.tokens = 0

    def __call__(self) -> None:
        encoded = self.tokenizer.apply_chat_template(
            [chat for chat in self.chats for _ in range(GROUP_SIZE)],
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
            padding=True,
            tokenizer_kwargs={"padding_side": "left"},
        )
        self.model.eval()
        with torch.no_grad():
            ids_BT = self.model.generate(
                **encoded, do_sample=True, max_new_tokens=NEW_TOKENS, pad_token_id=self.tokenizer.pad_token_id
            )
        width = encoded["input_ids"].shape[1]
        answers_BR = ids_BT[:, width:]
        texts = self.tokenizer.batch_decode(answers_BR, skip_special_tokens=True)
        rewards_GK = torch.tensor([reward(text) for text in texts]).view(-1, GROUP_SIZE)
        centred_GK = rewards_GK - rewards_GK.mean(1, keepdim=True)
        advantages_B1 = (centred_GK / (rewards_GK.std(1, keepdim=True) + 1e-4)).view(-1, 1)
        self.model.train()
        mask_BT = torch.cat([encoded["attention_mask"], torch.ones_like(answers_BR)], dim=1)
        logits = self.model(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False).logits
        log_p_BRV = logits[:, width - 1 : -1].float().log_softmax(-1)
        log_prob_BR = log_p_BRV.gather(-1, answers_BR[..., None]).squeeze(-1)
        ratio_BR = (log_prob_BR - log_prob_BR.detach()).exp()
        clipped_BR = ratio_BR.clamp(1 - CLIP, 1 + CLIP)
        loss = -torch.minimum(ratio_BR * advantages_B1, clipped_BR * advantages_B1).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.tokens = answers_BR.numel()


class Ours:
    """The body of the loop of `llmrl.recipes.grpo`."""

    def __init__(self, model: nn.Module, tokenizer: Any, prompts: list[str]):
        from llmrl.collectors.llm import LLMCollector
        from llmrl.envs.llm import DatasetChatEnv
        from llmrl.envs.llm.transforms import RewardFunction
        from llmrl.modules.llm.policies import TransformersWrapper
        from llmrl.objectives.llm import GRPOLoss, MCAdvantage
        from llmrl.train.distributed import Session
        from llmrl.train.settings.grpo import GRPOConfig
        from llmrl.train.updater import make_updater

        config = GRPOConfig(
            model={},
            env={"name": "sums"},
            steps=1_000_000,
            prompts_per_step=len(prompts),
            group_size=GROUP_SIZE,
            sampling={"max_tokens": NEW_TOKENS},
            optim={"lr": LEARNING_RATE},
            dtype="float32",
        )
        self.tokenizer = tokenizer
        self.session = Session(config)
        options = {"max_new_tokens": NEW_TOKENS, "temperature": 1.0}
        policy = TransformersWrapper(model, tokenizer=tokenizer, input_mode="history", generate_kwargs=options)
        actor = TransformersWrapper(
            model, tokenizer=tokenizer, input_mode="history", generate_kwargs=options, generate=False
        )
        self.updater = make_updater(config, self.session, actor, steps=config.steps)
        advantage_settings, loss_settings = config.grpo_settings()
        self.loss = GRPOLoss(actor, loss_settings)
        env = DatasetChatEnv(
            dataset=[{"prompt": prompt, "answer": ""} for prompt in prompts],
            num_envs=len(prompts),
            repeats=GROUP_SIZE,
            group_repeats=True,
            seed=0,
        )
        env.append_transform(RewardFunction(reward, deadline_s=config.env.reward_deadline_s))
        self.advantage = MCAdvantage(GROUP_SIZE, **advantage_settings)
        self.collector = LLMCollector(
            env,
            policy=policy,
            yield_only_last_steps=True,
            dialog_turns_per_batch=1,
            track_policy_version=True,
        )
        self.step = 0
        self.tokens = 0

    def __call__(self) -> None:
        from llmrl.train.rollouts.step import StepRollouts, select_training_columns

        self.step += 1
        began = time.perf_counter()
        with self.session.autocast():
            data = self.collector.rollout()
        rows = self.advantage.inv(select_training_columns(data))
        generated = time.perf_counter() - began
        rollouts = StepRollouts(self.session, data, rows, self.tokenizer)
        metrics = rollouts.metrics(version=self.collector.policy_version, seconds=generated)
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(self.step))
        metrics |= self.updater.step(self.loss, rows[order], self.step)
        self.collector.update_policy_weights_(None)
        self.tokens = int(metrics["tokens"])


class TRL:
    """TRL's `GRPOTrainer`. It owns the loop; the other sides run between two of its steps."""

    def __init__(self, model: nn.Module, tokenizer: Any, prompts: list[str], folder: str):
        import trl
        from datasets import Dataset

        self.tokens = 0

        def scored(completions: list[Any], completion_ids: list[list[int]], **columns: Any) -> list[float]:
            self.tokens = sum(len(ids) for ids in completion_ids)
            return [reward(completion[0]["content"]) for completion in completions]

        settings = trl.GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=len(prompts) * GROUP_SIZE,
            gradient_accumulation_steps=1,
            num_generations=GROUP_SIZE,
            max_completion_length=NEW_TOKENS,
            beta=0.0,
            epsilon=CLIP,
            use_vllm=False,
            **QUIET,
        )
        rows = [{"prompt": [{"role": "user", "content": prompt}]} for prompt in prompts]
        self.trainer = trl.GRPOTrainer(
            model=model,
            reward_funcs=scored,
            args=settings,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
        )


def measure(prompts: int, repeats: int, with_trl: bool, profile: bool) -> dict[str, float]:
    """The fastest iteration of each side, in milliseconds."""
    from llmrl.testing import tiny_tokenizer

    tokenizer = tiny_tokenizer()
    model = make_model(tokenizer)
    texts = make_prompts(prompts)
    sides = {
        "by hand": ByHand(copy.deepcopy(model), tokenizer, texts),
        "llmrl": Ours(copy.deepcopy(model), tokenizer, texts),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}

    def between(trl_seconds: float | None = None) -> bool:
        if trl_seconds is not None:
            seconds.setdefault("TRL", []).append(trl_seconds)
        for name, side in sides.items():
            start = time.perf_counter()
            side()
            seconds[name].append(time.perf_counter() - start)
        return len(seconds["llmrl"]) <= repeats

    tokens = f"{prompts} prompts x {GROUP_SIZE} x {NEW_TOKENS} tokens"
    if with_trl:
        with tempfile.TemporaryDirectory() as folder:
            trainer = TRL(copy.deepcopy(model), tokenizer, texts, folder)
            train(trainer.trainer, time.perf_counter, between)
        trained = {"TRL": trainer.tokens}
    else:
        trained = {}
        while between():
            pass
    trained |= {name: side.tokens for name, side in sides.items()}
    print(f"{tokens}, tokens trained per iteration: {trained}")
    if len(set(trained.values())) > 1:
        raise RuntimeError(f"bench_grpo_step: every side must train as many tokens: got {trained}.")
    if profile:
        profiled(sides["llmrl"], repeats, 45)
    return {name: 1e3 * min(values[1:]) for name, values in seconds.items()}


def main(prompts: list[int], repeats: int, no_trl: bool, profile: bool) -> list[Row]:
    torch.set_num_threads(1)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with_trl = not no_trl and importlib.util.find_spec("trl") is not None
    if not with_trl:
        print("trl: not installed" if not no_trl else "trl: left out")
    rows = []
    for count in prompts:
        best = measure(count, repeats, with_trl, profile)
        print("  ".join(f"{name} {value:.1f} ms" for name, value in best.items()), flush=True)
        what = f"GRPO iteration, {count} prompts x {GROUP_SIZE} x {NEW_TOKENS}: "
        if with_trl:
            rows.append(Row(f"{what}llmrl / TRL", best["llmrl"] / best["TRL"], 1.0))
            rows.append(Row(f"{what}TRL / by hand", best["TRL"] / best["by hand"]))
        rows.append(Row(f"{what}llmrl / by hand", best["llmrl"] / best["by hand"]))
    return rows


if __name__ == "__main__":
    benchmark(
        main,
        __doc__,
        prompts=[4, 8],
        repeats=12,
        no_trl=(False, "leave TRL out although it is installed"),
        profile=(False, "print a profile of llmrl's side"),
    )
