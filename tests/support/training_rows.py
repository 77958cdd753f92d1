"""Batches of random conversations for the losses, and one optimizer step whose gradients are kept."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from llmrl.modules.llm.policies import TransformersWrapper
from llmrl.modules.llm.policies.containers import LogProbs, Masks, Tokens
from llmrl.objectives.base import total_loss
from llmrl.objectives.llm import GRPOLoss, SFTLoss
from llmrl.testing import tiny_tokenizer
from llmrl.train.settings import GRPOConfig
from llmrl.train.updater import make_updater

RATE = 0.3  # of the steps between comparisons: it moves the weights
Step = tuple[dict[str, float], dict[str, Tensor]]
LENGTHS = [30, 28, 26, 24, 5, 4, 6, 3]


def random_rows(lengths: list[int] = LENGTHS, seed: int = 0) -> TensorDict:
    """Conversations of these lengths, two thirds of each sampled by the policy, in groups of two and more."""
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(3, 400, (length,), generator=generator) for length in lengths]
    log_probs = [-5 - torch.rand(length, generator=generator) for length in lengths]
    return TensorDict(
        {
            "tokens": Tokens.from_rows({"full": ids}),
            "masks": Masks.from_rows({"all_assistant_mask": [torch.arange(n) >= n // 3 for n in lengths]}),
            "log_probs": LogProbs.from_rows({"full": log_probs}),
            "advantage": torch.randn(len(lengths), 1, 1, generator=generator),
            "group_id": torch.arange(len(lengths)) // 2 % 3,
        },
        batch_size=[len(lengths)],
    )


def config(**changes: object) -> GRPOConfig:
    """Settings of an updater that neither clips its gradients nor moves far."""
    return GRPOConfig(**{"model": {}, "env": {"name": "sums"}, "optim": {"clip_norm": 1e9}, **changes})


def losses(actor: nn.Module) -> dict[str, nn.Module]:
    """GRPO with terms over tokens, sequences and groups, and SFT."""
    entropy = {"entropy_coeff": 0.1}
    return {
        "token": GRPOLoss(actor, aggregation="token", **entropy),
        "sequence": GRPOLoss(actor, aggregation="seq-mean", ratio_level="sequence", surrogate="clip"),
        "group": GRPOLoss(actor, aggregation="prompt-mean"),
        "sft": SFTLoss(actor),
    }


def policy_of(model: nn.Module) -> TransformersWrapper:
    return TransformersWrapper(model, tokenizer=tiny_tokenizer(), generate=False)


def stepper(settings, session, model, name="token") -> Callable[[TensorDict | None], Step]:
    """A function that takes a step of an updater on this rank's rows: metrics, and the whole gradients, along which the
    model is moved.
    """
    actor = policy_of(model)
    updater = make_updater(settings, session, actor, steps=1)
    loss, found = losses(actor)[name], {}

    @torch.no_grad()
    def move() -> None:
        for key, parameter in model.named_parameters():
            if (grad := parameter.grad) is None:  # of what is frozen
                continue
            found[key] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad.clone()
            parameter -= RATE * grad

    def take(rows: TensorDict | None) -> Step:
        found.clear()
        return updater.step(loss, rows, 1), dict(found)

    updater.optimizer.step = move
    return take


def step(settings, session, model, rows, name="token") -> Step:
    """The first step of a `stepper`."""
    return stepper(settings, session, model, name)(rows)


def shard_alone(session, device):
    """Lets a session of one process shard its models, over a group of this process alone; closing ends the group."""
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    session.sharded, session.mesh = True, init_device_mesh(device, (1,))


def in_one_piece(model: nn.Module, rows: TensorDict, name: str = "token") -> tuple[float, dict[str, Tensor]]:
    """A loss of `losses` and its gradients by one backward pass, on a copy of the model."""
    plain = copy.deepcopy(model)
    loss = total_loss(losses(policy_of(plain))[name](rows))
    loss.backward()
    return loss.item(), {key: parameter.grad for key, parameter in plain.named_parameters()}


def check_steps(
    session, settings, model, mine, expected, name="token", *, bound=1e-6, loss_bound=None, plain=None
) -> dict[str, float]:
    """Asserts that three steps of all ranks, on this one's part ``mine``, have the losses and gradients that
    ``expected`` returns for the whole model, ``plain`` (default: a copy), which moves likewise; returns the metrics of
    the first. ``model`` is split and sharded as the session is, unless ``plain`` is given: it is then ready.
    """
    if plain is None:
        plain = copy.deepcopy(model)
        if session.split:
            session.split.prepare(model)
        model = session.shard(model) if session.sharded else model
    take, first = stepper(settings, session, model, name), {}
    for number in (1, 2, 3):
        where = (settings.parallel.mode, model.config.model_type, name, f"step {number}")
        loss, gradients = expected(plain)
        metrics, found = take(mine)
        first = first or metrics
        assert abs(metrics["loss"] - loss) < (loss_bound or bound), (*where, metrics["loss"], loss)
        assert worst(found, gradients) < bound, (*where, worst(found, gradients))
        with torch.no_grad():
            for key, parameter in plain.named_parameters():
                parameter -= RATE * gradients[key]
    return first


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference between tensors by the same names."""
    assert found.keys() == expected.keys()
    return max((found[name] - value).abs().max().item() for name, value in expected.items())
