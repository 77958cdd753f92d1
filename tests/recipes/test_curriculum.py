"""Curricula: which prompts are drawn, by the rewards that their last groups had."""

from collections import Counter

import pytest

from llmrl.envs.llm.transforms.dataloading import IndexedRows
from llmrl.errors import CheckpointError, ConfigError, RolloutError
from llmrl.train.curriculum import PooledOrder
from llmrl.train.settings.curriculum import CurriculumSettings
from tests.recipes.conftest import MIX
from tests.support.saved_models import save_tiny

SETTINGS = CurriculumSettings(window=2)  # easy above 0.9: 0.1, hard below 0.1: 0.2, medium: 1


def order_of(count=300, settings=SETTINGS, **options):
    rows = IndexedRows([{"query": f"{number}"} for number in range(count)], shuffle=True, seed=1)
    return PooledOrder(rows, settings, **{"seed": 1, **options})


def train(order, success, steps, size=30, first=0):
    """Draws and observes ``steps`` steps of a learner with this success on each row; counts the draws of each row."""
    drawn = Counter()
    for step in range(first, first + steps):
        rows = order.pick(range(step * size, (step + 1) * size))
        drawn.update(rows)
        order.agree([order.progress])
        order.observe([(step * size + at, success[row]) for at, row in enumerate(rows)])
    return drawn


def test_prompts_are_drawn_in_proportion_to_the_weights_of_their_pools_and_come_back_when_they_are_forgotten():
    order, success = order_of(), [(0.0, 0.5, 1.0)[row % 3] for row in range(300)]
    assert set(train(order, success, 10).values()) == {1}, "unseen prompts are drawn in turn, as without a curriculum"
    assert order.counts() == {"unseen": 0, "easy": 100, "hard": 100, "medium": 100}
    drawn = train(order, success, 260, first=10)  # 7800 draws, 60 epochs of 130 draws
    shares = [sum(count for row, count in drawn.items() if row % 3 == kind) for kind in range(3)]
    assert shares[1] == pytest.approx(6000, abs=100), "each medium prompt once in an epoch"
    assert shares[0] == pytest.approx(1200, abs=3 * (60 * 100 * 0.2 * 0.8) ** 0.5)
    assert shares[2] == pytest.approx(600, abs=3 * (60 * 100 * 0.1 * 0.9) ** 0.5)
    forgotten = [0.5 if row % 3 == 2 else value for row, value in enumerate(success)]
    train(order, forgotten, 300, first=270)
    assert order.counts() == {"unseen": 0, "easy": 0, "hard": 100, "medium": 200}


def test_the_pool_is_by_the_mean_of_the_last_groups_and_rows_of_equal_content_are_one_prompt():
    rows = IndexedRows([{"a": 1, "b": 2}, {"a": 3}, {"b": 2, "a": 1}], shuffle=False, seed=0)
    order = PooledOrder(rows, SETTINGS)
    assert order.pick(range(3)) == [0, 1, 2]
    for means, pool in (([1.0], "easy"), ([0.8], "medium"), ([1.0, 1.0], "easy"), ([0.0, 0.0], "hard")):
        order.observe([(0, mean) for mean in means])
        assert (order.pool(0), order.pool(2), order.pool(1)) == (pool, pool, "unseen"), "(1 + 0.8) / 2 is not above 0.9"
    assert order.counts() == {"unseen": 1, "easy": 0, "hard": 2, "medium": 0}


def levels_order(count=60, **levels):
    """Prompts of the levels 1, 5 and 9 in turn, of which each epoch has 20."""
    rows = IndexedRows([{"query": f"{n}", "level": (1, 5, 9)[n % 3]} for n in range(count)], shuffle=True, seed=1)
    settings = CurriculumSettings(levels={"window": 10, **levels}, pools={"all": {}})
    return PooledOrder(rows, settings, seed=1)


def learn(order, success, steps, first=0):
    """For each step, the level that it was drawn at and how many of its ten prompts are of the levels 1, 5 and 9."""
    found = []
    for step in range(first, first + steps):
        rows, level = order.pick(range(step * 10, (step + 1) * 10)), order.level
        found.append((level, [sum(row % 3 == kind for row in rows) for kind in range(3)]))
        order.agree([order.progress])
        order.observe([(step * 10 + at, success[row % 3]) for at, row in enumerate(rows)])
    return found


def test_levels_go_up_and_down_by_the_mean_of_their_last_groups():
    order = levels_order()
    assert learn(order, (0.7, 0, 0), 3) == [(0, [10, 0, 0])] * 3, (
        "0.7 is not above 0.8, and what was not reached is not drawn"
    )
    # Seven groups of ten must be new: 0.3 * 0.7 + 0.7 * 0.9 = 0.84, so the level moves within the next step.
    assert learn(order, (0.9, 0.5, 0), 1, first=3) == [(0, [10, 0, 0])]
    drawn = learn(order, (0.9, 0.5, 0), 40, first=4)
    assert {level for level, _ in drawn} == {1}
    easier, level, harder = map(sum, zip(*(counts for _, counts in drawn), strict=True))
    assert harder == 0
    assert easier / level == pytest.approx(0.1, abs=3 * (0.1 * 0.9 / level) ** 0.5), (
        "a few of the easier level come again"
    )
    assert {level for level, _ in learn(order, (0.5, 0.1, 0), 3, first=44)} == {1}, "a hard level that teaches is kept"
    found = [level for level, _ in learn(order, (0.5, 0.0, 0), 3, first=47)]
    assert found == [1, 0, 0], "a level that is too hard is left"
    learn(order, (1, 1, 1), 5, first=50)
    assert order.level == 2, "the last level is not left upwards"


def test_a_level_is_resumed_exactly_and_data_without_levels_are_refused():
    one, success = levels_order(), (0.9, 0.6, 0.1)
    learn(one, success, 7)
    other = levels_order()
    other.load_state_dict(one.state_dict())
    assert other.level == one.level == 1
    # Until the window is full again the rest of it decides, which is in the state too.
    assert learn(other, (0.9, 0.95, 0.1), 30, first=7) == learn(one, (0.9, 0.95, 0.1), 30, first=7)
    rows = IndexedRows([{"query": "a", "level": 1}, {"query": "b"}], shuffle=False, seed=0)
    with pytest.raises(ConfigError, match="a number in the column 'level': got None in a row with query"):
        PooledOrder(rows, CurriculumSettings(levels={}))
    with pytest.raises(ValueError, match=r"below must be less than above: got 0.5, 0.5"):
        CurriculumSettings(levels={"above": 0.5, "below": 0.5})


def test_ranks_draw_what_one_process_draws_also_when_one_is_ahead_and_after_a_resume():
    success = [(0.0, 0.5, 1.0)[row % 3] for row in range(60)]
    one, ranks = order_of(60, lag=3), [order_of(60, lag=3) for _ in range(2)]
    asked = [0, 1]
    for step in range(40):
        for rank, order in enumerate(ranks):
            for _ in range(4 + 3 * (rank == 0 and step % 2)):  # the first rank runs ahead
                assert order.pick([asked[rank]])[0] in range(60)
                asked[rank] += 2
        decided = max(order.progress[0] for order in ranks)
        draws = range(max(0, 8 * step - 8), 8 * step)
        rewards = [(draw, success[row]) for draw, row in zip(draws, one.pick([*draws, decided - 1]), strict=False)]
        for order in (one, *ranks):
            order.agree([order.progress for order in ranks])
            order.observe(rewards)
        assert len({str([order.pool(draw) for draw in range(8 * step, decided)]) for order in (one, *ranks)}) == 1
        if step == 20:
            restored = order_of(60, lag=3)
            restored.load_state_dict(ranks[1].state_dict())
            ranks[1] = restored
    assert ranks[0].state_dict()["first"] > 100, "draws that ended are forgotten"
    with pytest.raises(RolloutError, match="one that has not ended: got 0"):
        ranks[0].pick([0])
    with pytest.raises(CheckpointError, match="are not among them"):
        order_of(5).load_state_dict(one.state_dict())


def test_a_run_counts_the_prompts_of_its_pools_by_source(place):
    pools = {"high": {"above": 0.1, "weight": 0.5}, "low": {}}
    place.train("grpo", "one", curriculum={"pools": pools}, words=["high: above 0.1, weight 0.5"])
    place.train("grpo", "mix", steps=2, curriculum={"pools": pools}, env=MIX, eval={"rows": 1, "max_tokens": 2})
    for step in place.steps("one"):  # of the 12 prompts 4 are drawn in a step
        assert sum(step[f"curriculum/{pool}/prompts"] for pool in ("unseen", "high", "low")) == 12
        assert sum(step[f"curriculum/{pool}/drawn"] for pool in ("unseen", "high", "low")) == 4
        means = {}
        for rollout in place.rollouts("one", step["step"]):
            means.setdefault(rollout.group, []).append(rollout.reward)
        if step["step"] == 1:
            assert step["curriculum/high/prompts"] == sum(sum(own) / 4 > 0.1 for own in means.values())
    for step in place.steps("mix"):
        for source in ("prompts", "big_sums"):
            found = {pool: step[f"curriculum/{source}/{pool}/prompts"] for pool in ("unseen", "high", "low")}
            assert sum(found.values()) == 12
            drawn = sum(step[f"curriculum/{source}/{pool}/drawn"] for pool in ("unseen", "high", "low"))
            assert drawn == step[f"source/{source}/prompts"]


@pytest.mark.slow
def test_two_processes_draw_the_prompts_of_one_from_the_same_sources(place):
    save_tiny("model")
    source = {"dataset": "prompts.jsonl", "reward": "vowels:odd"}
    env = {**MIX, "mix": [{**source, "source": "much", "weight": 3}, {**source, "source": "little"}]}
    changes = {"curriculum": {"pools": {"high": {"above": 0.9, "weight": 0.05}, "low": {}}}, "zero_variance": "refill"}
    place.train_as_one_and_as_ranks("grpo", step=5, steps=5, model="model", env=env, **changes)
    steps = place.steps("two")
    drawn = {name: sum(step[f"source/{name}/prompts"] for step in steps) for name in ("much", "little")}
    assert drawn["much"] > drawn["little"] > 0
    assert sum(drawn.values()) >= 5 * 4
    last = steps[-1]
    assert 0 < last["curriculum/much/high/prompts"] <= 6, "every second prompt has a reward of at least 1"
