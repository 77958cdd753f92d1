"""Every task through the collector and a buffer: multi-turn where it can be, resets of some rows, group advantages."""

import pytest

from llmrl.collectors.llm import LLMCollector
from llmrl.data import LazyStackStorage, ReplayBuffer
from llmrl.envs.llm import CountdownEnv, GSM8KEnv, IFEvalEnv, MATHEnv
from llmrl.objectives.llm import MCAdvantage
from llmrl.testing import ScriptedPolicy

IFEVAL = {"key": 1, "prompt": "Hi 1", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
TASKS = [
    (GSM8KEnv, [{"question": f"{n} + 1?", "answer": f"#### {n + 1}"} for n in range(4)]),
    (MATHEnv, [{"problem": f"{n} + 1?", "solution": f"\\boxed{{{n + 1}}}"} for n in range(4)]),
    (CountdownEnv, [{"nums": [n, 7], "target": n + 7} for n in range(4)]),
    (IFEvalEnv, [IFEVAL, {**IFEVAL, "key": 2, "prompt": "Hi 2"}] * 2),
]


def policy():
    """Alternately thinks aloud, which ends no conversation, and answers."""
    turns = []

    def reply(chat):
        turns.append(chat)
        return "Hm, let me see" if len(turns) % 3 == 0 else f"<answer>{len(turns)}</answer>"

    return ScriptedPolicy(reply)


@pytest.mark.parametrize(("kind", "rows"), TASKS, ids=[kind.__name__ for kind, _ in TASKS])
def test_a_task_keeps_its_specs_also_without_a_policy(kind, rows):
    if kind is MATHEnv:
        pytest.importorskip("math_verify")
    env = kind(dataset=rows, num_envs=2, max_steps=2)
    env.check_env_specs()
    env.check_env_specs(policy=policy(), break_when_any_done="both")
    batch = env.rollout(4)
    for key in env.reward_keys:
        assert batch["next"][:, -1].get(key).shape == env.full_reward_spec[key].shape


HALF = [{"problem": "Half of 1?", "solution": "Halve: $\\boxed{\\frac12}$", "level": "Level 1", "type": "Algebra"}]
SCORED = [
    (CountdownEnv, [{"nums": [2, 3], "target": 6}], "<think>2 * 3</think><answer>2 * 3</answer>", 1.0),
    (CountdownEnv, [{"nums": [2, 3], "target": 6}], "<answer>2 + 3</answer>", 0.1),
    (CountdownEnv, [{"nums": [2, 3], "target": 6}], "<answer>2 * 3", 0.0),
    (MATHEnv, HALF, "<think>\\boxed{1}</think><answer>0.5</answer>", 1.0),
    (MATHEnv, HALF, "so it is $\\boxed{\\frac{1}{2}}$", 1.0),
    (MATHEnv, HALF, "<answer>2</answer> or \\boxed{0.5}", 0.1),  # the answer block is the answer
    (MATHEnv, HALF, "<think>\\boxed{0.5}</think>", 0.0),
    (MATHEnv, HALF, "0.5", 0.0),
]


@pytest.mark.parametrize("mode", ["history", "text", "tokens"])
@pytest.mark.parametrize(("kind", "rows", "said", "reward"), SCORED)
def test_a_response_has_one_score_in_every_mode(kind, rows, said, reward, mode, tokenizer, say):
    if kind is MATHEnv:
        pytest.importorskip("math_verify")
    env = kind(dataset=rows, input_mode=mode, tokenizer=tokenizer)
    after = env.step(say(env.reset(), [said]))["next"]
    assert after["reward"].item() == pytest.approx(reward)
    assert (after["success"].item(), after["terminated"].item()) == (reward == 1, reward > 0)
    env.close()


@pytest.mark.parametrize(("kind", "rows"), TASKS, ids=[kind.__name__ for kind, _ in TASKS])
def test_a_task_feeds_a_buffer_with_groups_of_scored_conversations(kind, rows):
    if kind is MATHEnv:
        pytest.importorskip("math_verify")
    env = kind(dataset=rows, num_envs=2, repeats=2, group_repeats=True, max_steps=2, shuffle=False, seed=0)
    collector = LLMCollector(
        env, policy=policy(), dialog_turns_per_batch=8, total_dialog_turns=24, yield_only_last_steps=True
    )
    buffer = ReplayBuffer(storage=LazyStackStorage(100), transform=MCAdvantage(grpo_size=2), batch_size=4)
    for batch in collector:
        assert batch["next", "reward"].shape[1:] == (1, 1)
        assert batch["next", "done"].all()
        buffer.extend(batch)
    assert len(buffer) >= 8
    sample = buffer.sample()
    assert sample["advantage"].isfinite().all()
    collector.shutdown()
