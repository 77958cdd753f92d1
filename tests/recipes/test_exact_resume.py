"""A resumed run is the run that would have been: the same numbers, to the last bit, in every later step."""

import shutil
from types import SimpleNamespace

import pytest
import torch

from llmrl.commands import cli
from llmrl.run.checkpoint import CHECKSUMS, _seal
from llmrl.run.config import dump_config, load_config
from llmrl.run.run_dir import RunDir
from llmrl.train.checkpointing import cuda_random_states, restore_cuda_random
from tests.recipes.conftest import MIX, OWN_ENGINE, WAITED
from tests.support.saved_models import save_tiny

HELD_OUT = {"dataset": "sums", "rows": 4, "every": 1}
POOLS = {"pools": {"high": {"above": 0.9, "weight": 0.05}, "low": {}}, "window": 2}
OPTIM = {"lr": 1e-2, "schedule": "cosine", "warmup": 2, "weight_decay": 0.1}


def resume_at_step_2(place, steps, **compared):
    """A run and its copy that was killed after step 2 and resumed: the same metrics, written once, and weights."""
    place.cut_back("straight", "cut", to=2)
    place.run("resume", "cut")
    place.same("straight", "cut", step=steps, **compared)
    lines = [(place.path / f"runs/{run}/metrics.jsonl").read_text().splitlines() for run in ("straight", "cut")]
    assert len(lines[0]) == len(lines[1]), "no step is written twice"


@pytest.mark.parametrize(
    ("command", "changes"),
    [
        ("sft", {}),
        ("sft", {"batch_size": 12, "model": "gpt2"}),  # 40 rows: passes that end within four steps
        ("sft", {"env": {"name": "sums"}, "eval": {"rows": 4, "max_tokens": 4, "every": 2}}),
        ("dpo", {"dpo": {"kind": "ipo"}}),  # the reference stays the model of the first step
        ("dpo", {"dpo": {"kind": "kto"}}),
        ("sft", {"optim": {**OPTIM, "name": "muon", "muon": {"lr": 2e-3}}}),
        ("sft", {"eval": HELD_OUT, "lora": {"r": 2, "dropout": 0.5}}),  # an evaluation draws no random numbers
        ("reward", {"eval": HELD_OUT}),
        ("grpo", {}),
        ("grpo", {"curriculum": POOLS, "zero_variance": "refill", "env": {"reward": "vowels:odd"}}),
        ("rejection", {"rejection": {"keep": 1}}),
        ("grpo", {"algorithm": "tests.support.twins:Twins", "grpo": {"kl": 0.5}, "updates_per_step": 2}),
        ("ppo", {"updates_per_step": 2, "env": {"max_turns": 2}}),
        ("ppo", {"model": "untied", "ppo": {"critic_warmup": 3, "critic": "tied"}}),  # cut while the critic warms up
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (
                ("sft", {"model": "untied"}),
                ("dpo", {"dpo": {"kind": "ipo", "reference": "none"}}),
                ("dpo", {"dpo": {"kind": "ipo"}, "model": "untied", "lora": {"r": 2}}),
                ("sft", {"lora": {"r": 2, "modules_to_save": ["lm_head"]}}),
                ("dpo", {"eval": HELD_OUT}),
                ("reward", {"model": "untied"}),
                ("grpo", {"model": "untied"}),
                (
                    "grpo",
                    {
                        "env": MIX,
                        "curriculum": POOLS,
                        "zero_variance": "refill",
                        "eval": {"rows": 3, "max_tokens": 4, "every": 2},
                    },
                ),
                ("grpo", {"updates_per_step": 2, "group_size": 5}),
                ("ppo", {"lora": {"r": 2}}),
                ("grpo", {"grpo": {"kl": 0.5, "entropy": 0.01}, "env": {"max_turns": 2}}),
                ("grpo", {"sampling": {"max_tokens": 8, "temperature": 0.7, "top_p": 0.9}, "zero_variance": "keep"}),
            )
        ),
    ],
)
def test_training_is_resumed_exactly(place, command, changes):
    changes = {"model": "tied", "optim": OPTIM} | changes
    kinds = {"tied": {}, "untied": {"tied": False}, "gpt2": {"architecture": "gpt2"}}
    for name in {changes["model"], changes.get("ppo", {}).get("critic", changes["model"])}:
        save_tiny(name, **kinds[name])
    place.train(command, "straight", steps=5, checkpoint={"every": 2, "keep": 5}, **changes)
    resume_at_step_2(place, 5)
    if command in ("grpo", "ppo"):
        place.same_rollouts("straight", "cut", 5)


@pytest.mark.parametrize(
    "changes",
    [
        {"zero_variance": "keep"},
        {"zero_variance": "refill", "env": {"reward": "vowels:odd", "max_turns": 2}, "curriculum": POOLS},
        {"eval": {"dataset": "prompts.jsonl", "rows": 2, "max_tokens": 4, "every": 2}},  # saved after the weights came
    ],
)
def test_overlapped_grpo_is_resumed_exactly(place, changes):
    place.module("own_engine", OWN_ENGINE)
    save_tiny("model")
    changes |= {"model": "model", "optim": OPTIM, "rollout": {"engine": "own_engine:make", "max_staleness": 1}}
    place.train("grpo", "straight", steps=5, checkpoint={"every": 2, "keep": 5}, **changes)
    steps = place.steps("straight")
    assert [step["async/staleness_max"] for step in steps] == [0, 1, 1, 1, 1]
    probes = [step["mismatch/probe"] for step in steps if "mismatch/probe" in step]
    assert len(probes) >= 3
    assert max(probes) < 1e-6, "its copy has the weights that were trained"
    resume_at_step_2(place, 5, without=WAITED)
    place.same_rollouts("straight", "cut", 5)


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ("own_engine:wrong", ["own_engine:wrong must return an Engine", "got Qwen2ForCausalLM"]),
        ("own_engine:mak", ["own_engine", "mak", "make"]),
        ({"own_engine:make": {"sed": 1}}, ["own_engine:make", "sed"]),
        ("transformer", ["'transformer' is not an engine", "Did you mean 'transformers'?"]),
        ({"vllm": {"seed": 1}}, ["rollout.options"]),
        ({}, ["must be one engine's name"]),
    ],
)
def test_an_engine_that_cannot_be_is_refused(place, engine, words):
    place.module("own_engine", OWN_ENGINE)
    place.train("grpo", "run", code=2, words=words, rollout={"engine": engine})


def test_a_checkpoint_of_the_older_layout_is_resumed_exactly(place):
    place.train("grpo", "straight", steps=4, optim=OPTIM, checkpoint={"every": 2, "keep": 5})
    place.cut_back("straight", "cut", to=2)
    folder = place.checkpoint("cut", 2)
    state = torch.load(folder / "trainer.pt", weights_only=True)
    (groups,) = state.pop("algorithm")["groups"]
    state["rounds"] = {**state.pop("rollouts"), "samplers": [{}], "advantage": groups}
    torch.save(state, folder / "trainer.pt")
    (folder / CHECKSUMS).unlink()
    _seal(folder)
    place.run("resume", "cut")
    place.same("straight", "cut")


@pytest.mark.parametrize("command", ["sft", "grpo"])
def test_a_finished_run_goes_on_as_a_longer_one_would_have(place, command):
    place.train(command, "long", steps=5)
    place.train(command, "short", steps=2)
    place.run("resume", "short", "steps=5")
    assert "steps: 5" in (place.path / "runs/short/config.yaml").read_text()
    place.run("resume", "short")  # nothing is left to do
    place.same("long", "short", step=5)


def test_settings_changed_at_the_resumption_count(place):
    place.train("sft", "a", steps=2, optim={"weight_decay": 0.0, "schedule": "constant"})
    shutil.copytree(place.path / "runs/a", place.path / "runs/b")
    place.run("resume", "a", "steps=3")
    place.run("resume", "b", "steps=3", "optim.weight_decay=50")
    assert place.steps("a") == place.steps("b"), "the loss of step 3 is that of the same weights"
    name = "model.embed_tokens.weight"
    before, kept, decayed = (place.weights(run, step)[name] for run, step in (("a", 2), ("a", 3), ("b", 3)))
    assert torch.allclose(kept - decayed, 50 * 1e-2 * before, atol=1e-6), "lr x weight decay x weight"


@pytest.mark.parametrize(
    ("command", "change", "fault"),
    [
        ("sft", "model.layers=2", "model  cannot change in a resumed run: was {'architecture': 'qwen2',"),
        ("sft", "model=other", "'heads': 2}, got 'other'"),
        ("sft", "data.rows=30", "data  cannot change"),
        ("grpo", "seed=3", "seed  cannot change in a resumed run: was 0, got 3"),
        ("grpo", "group_size=2", "group_size  cannot change in a resumed run: was 4, got 2"),
        ("grpo", "env.dataset=other.jsonl", "env.dataset  cannot change"),
    ],
)
def test_settings_that_the_checkpoint_has_decided_are_refused_by_name_before_anything_is_written(
    place, command, change, fault
):
    place.rows("other.jsonl", [{"prompt": "Say 1", "answer": "1"}])
    run = RunDir.create("run", "", root=place.path / "runs", name="run")
    loaded = load_config(cli.RECIPES[command].settings(), place.path / place.recipe("mine", command), [])
    run.write_config(dump_config(loaded.config))
    run.write_info({"command": command})
    text = run.config.read_text()
    place.run("resume", "run", "steps=4", change, code=2, words=[fault])
    assert run.config.read_text() == text


def test_two_runs_of_one_seed_are_the_same_and_of_another_are_not(place):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        place.train("grpo", name, seed=seed)
    place.same("a", "b")
    assert place.rollouts("a", 1) == place.rollouts("b", 1)
    assert place.rollouts("a", 1) != place.rollouts("c", 1)


@pytest.mark.parametrize("command", ["sft", "dpo", "grpo"])
@pytest.mark.parametrize("change", ["reversed", "removed", "edited"])
def test_a_run_does_not_go_on_with_other_data(place, command, change):
    """Regression: reference log-probs of other pairs were used, and rows that were added never drawn; with rewards, an
    edited answer was not noticed.
    """
    rows = [{"prompt": f"Say {n}", **answers(command, n)} for n in range(6)]
    file = place.rows("rows.jsonl", rows)
    given = {"data": {"path": str(file), "rows": None}, "batch_size": 2}
    if command == "grpo":
        given = {"env": {"dataset": str(file)}, "prompts_per_step": 2}
    place.train(command, "run", **given, steps=2, checkpoint={"every": 1})
    changed = {"reversed": rows[::-1], "removed": rows[:4], "edited": [rows[0] | answers(command, 9), *rows[1:]]}
    place.rows("rows.jsonl", changed[change])
    said = "4;" if change == "removed" else "other contents, or another order"
    place.run("resume", "run", "steps=3", code=3, words=["goes on with the data that it began with", "had 6", said])


def answers(command, number):
    if command in ("sft", "grpo"):
        return {"completion": f"it is {number}"}
    return {"chosen": f"it is {number}", "rejected": f"no {number}"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"optimizer": None}, ["trainer.pt: must hold the state of 'optimizer'"]),
        ({"rng": torch.zeros(3)}, ["trainer.pt must hold the state of a run"]),
        ({"step": "three"}, ["trainer.pt must hold the state of a run"]),
        ({"step": -5}, ["trainer.pt must hold the state of a run", "step -5"]),
        ({"course": {"unknown": 1}}, ["trainer.pt: its part 'course' does not fit"]),
        ({"course": {"trained": [1]}}, ["trainer.pt: its part 'course' does not fit: trained must be a number"]),
        *(
            ({"data": state}, ["trainer.pt: must hold the state of 'data'", "rows and their digest, 64 hexadecimal"])
            for state in ({"rows": 40}, {"rows": 40, "digest": "changed"}, {"rows": "40", "digest": "0" * 64})
        ),
        (torch.zeros(3), ["trainer.pt must hold the state of a run"]),
        ([], ["trainer.pt must hold the state of a run"]),
    ],
)
def test_a_state_that_does_not_fit_is_named_with_its_part(place, change, words):
    place.train("sft", "run", steps=2, checkpoint={"every": 1})
    folder = place.path / "runs/run/checkpoints/step2"
    state = torch.load(folder / "trainer.pt", weights_only=True)
    torch.save(state | change if isinstance(change, dict) else change, folder / "trainer.pt")
    (folder / CHECKSUMS).unlink()
    _seal(folder)
    place.run("resume", "run", "steps=3", code=3, words=words)


def test_each_rank_gets_the_random_state_of_its_own_gpu_back(monkeypatch):
    now = {"cuda:1": torch.tensor([5], dtype=torch.uint8)}
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: now[str(device)])
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda value, device: now.__setitem__(str(device), value))
    other = torch.tensor([4], dtype=torch.uint8)
    session = SimpleNamespace(device=torch.device("cuda:1"), rank=1, gather=lambda mine: [other, *mine])
    state = cuda_random_states(session)
    now["cuda:1"] = other
    restore_cuda_random(state, session)
    assert now == {"cuda:1": torch.tensor([5], dtype=torch.uint8)}
    session.rank = 2  # a rank that the run did not have
    now["cuda:1"] = other
    for saved in (state, {}):  # and a checkpoint from before
        restore_cuda_random(saved, session)
        assert now["cuda:1"] is other
    assert cuda_random_states(SimpleNamespace(device=torch.device("cpu"))) == {}
