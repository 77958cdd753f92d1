"""The prompts that a run sees are a function of the data, the seed and one number."""

import multiprocessing
from functools import partial
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from llmrl.data.ragged.tensordicts import column
from llmrl.envs.llm import ChatEnv, DatasetChatEnv, LLMEnv
from llmrl.envs.llm.transforms import (
    DataLoadingPrimer,
    EndOfData,
    PolicyVersion,
    RewardFunction,
    ToolTransform,
    UserTurn,
)
from llmrl.errors import CheckpointError, ConfigError, DataError, MissingKeyError
from llmrl.modules.llm.policies.columns import RESERVED
from llmrl.testing import ScriptedPolicy
from tests.support.refusals import refusals

ROOT = Path(__file__).parents[3]
ROWS = [{"query": f"q{n}"} for n in range(10)]


def queries(primer, count):
    return primer.pull(count).get("query").tolist()


def pulled(primer, count):
    """(group, seed, query) of the next rows."""
    batch = primer.pull(count)
    return list(zip(*(batch.get(key).tolist() for key in ("group_id", "seed", "query")), strict=True))


def test_every_epoch_is_a_permutation_of_its_own():
    primer = DataLoadingPrimer(ROWS, shuffle=True, seed=3)
    first, second = queries(primer, 10), queries(primer, 10)
    assert sorted(first) == sorted(second) == sorted(row["query"] for row in ROWS)
    assert first != second
    assert queries(DataLoadingPrimer(ROWS, shuffle=True, seed=3), 10) == first
    assert queries(DataLoadingPrimer(ROWS, shuffle=True, seed=4), 10) != first


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_together_read_what_one_process_reads(world_size):
    options = {"repeats": 2, "shuffle": True, "seed": 1}
    alone = DataLoadingPrimer(ROWS, **options)
    ranks = [DataLoadingPrimer(ROWS, **options, rank=rank, world_size=world_size) for rank in range(world_size)]
    seeds = set()
    for _ in range(4):  # across an epoch's end
        found = [row for rank in ranks for row in pulled(rank, 16 // world_size)]
        assert sorted(found) == sorted(pulled(alone, 16))
        seeds |= {seed for _, seed, _ in found}
    assert (len(seeds), min(seeds) >= 0) == (64, True)


@pytest.mark.parametrize("data", [ROWS, DataLoader(ROWS, batch_size=3)], ids=["rows", "dataloader"])
def test_a_saved_position_restores_the_stream_exactly(data):
    options = {"repeats": 2, "seed": 5, "shuffle": isinstance(data, list)}
    primer = DataLoadingPrimer(data, **options)
    primer.pull(7)
    state = primer.state_dict()
    after = pulled(primer, 20)
    other = DataLoadingPrimer(data, **options)
    other.load_state_dict(state)
    assert pulled(other, 20) == after


def test_a_run_goes_on_with_another_number_of_ranks():
    primer = DataLoadingPrimer(ROWS)
    primer.pull(4)
    ranks = [DataLoadingPrimer(ROWS, rank=rank, world_size=2) for rank in range(2)]
    for rank in ranks:
        rank.load_state_dict(primer.state_dict())
    assert [queries(rank, 1) for rank in ranks] == [["q4"], ["q5"]]


def restored(rows, seed):
    return DataLoadingPrimer(rows, seed=seed).load_state_dict(DataLoadingPrimer(ROWS, seed=0).state_dict())


test_data_and_settings_that_cannot_be_used_are_refused = refusals(
    (CheckpointError, "epoch_size was 10, is 9", lambda: restored(ROWS[:9], 0)),
    (CheckpointError, "seed was 0, is 1", lambda: restored(ROWS, 1)),
    (DataError, "at least one row", lambda: DataLoadingPrimer([])),
    (DataError, "yielded none", lambda: DataLoadingPrimer(DataLoader([])).pull(1)),
    (DataError, "mapping of its columns.*row 1 is a str", lambda: DataLoadingPrimer(["What is 2+2?"]).pull(1)),
    (DataError, "row 2 is a str", lambda: DataLoadingPrimer([{"query": "a"}, "b"]).pull(2)),
    (ConfigError, "exactly one of dataloader and dataloader_factory", DataLoadingPrimer),
    (ConfigError, "exactly one of", lambda: DataLoadingPrimer(ROWS, dataloader_factory=lambda: ROWS)),
    (ConfigError, "use_ray_service must be False", lambda: DataLoadingPrimer(ROWS, use_ray_service=True)),
    (ConfigError, "version_type", lambda: PolicyVersion("date")),
    (ConfigError, "DataLoadingPrimer", lambda: DataLoadingPrimer(ROWS, repeats=0)),
    (ConfigError, "DataLoadingPrimer", lambda: DataLoadingPrimer(ROWS, rank=1)),
    (ConfigError, "DataLoadingPrimer", lambda: DataLoadingPrimer(ROWS, epochs=0)),
    (ConfigError, "DataLoadingPrimer", lambda: DataLoadingPrimer(ROWS, rank=-1, world_size=2)),
)


def worker_processes():
    return {process.pid for process in multiprocessing.active_children()}


LOADERS = [DataLoader(ROWS, batch_size=4), DataLoader(ROWS, batch_size=4, num_workers=2)]


@pytest.mark.parametrize("data", [ROWS, *LOADERS, "hub"], ids=["rows", "dataloader", "workers", "hub"])
def test_epochs_end_and_leave_no_process(data):
    if data == "hub":
        data = pytest.importorskip("datasets").Dataset.from_list(ROWS)
    before = worker_processes()
    primer = DataLoadingPrimer(data, epochs=2)
    for numbers in (range(8), range(8, 16), range(16, 20)):
        assert queries(primer, 8) == [f"q{n % 10}" for n in numbers]
    with pytest.raises(EndOfData):
        primer.pull(8)
    assert worker_processes() <= before


def test_ranks_end_together():
    ranks = [DataLoadingPrimer(ROWS[:9], epochs=1, rank=rank, world_size=2) for rank in range(2)]
    assert [len(rank.pull(8)) for rank in ranks] == [4, 4]


def test_an_exhausted_iterator_is_an_error_not_a_loop():
    once = DataLoadingPrimer(iter(ROWS[:2]))
    once.pull(2)
    with pytest.raises(DataError, match="can be read once only"):
        once.pull(1)


def test_tensors_are_stacked_and_other_columns_are_kept_as_they_are():
    rows = [{"query": "a", "ids": torch.arange(2), "tags": ["x"]}, {"query": "b", "ids": torch.arange(2), "tags": []}]
    batch = DataLoadingPrimer(rows).pull(2)
    assert batch["ids"].tolist() == [[0, 1], [0, 1]]
    assert batch.get("tags").tolist() == [["x"], []]
    ragged = [{"ids": torch.arange(2)}, {"ids": torch.arange(3)}]
    with pytest.raises(DataError, match="stack_method"):
        DataLoadingPrimer(ragged).pull(2)
    padded = DataLoadingPrimer(ragged, stack_method=lambda rows: pad_sequence(rows, batch_first=True))
    assert padded.pull(2)["ids"].shape == (2, 3)


@pytest.mark.parametrize("wrap", [list, lambda rows: DataLoader(rows, batch_size=None)], ids=["rows", "dataloader"])
def test_rows_must_have_the_columns_of_the_first_and_one_that_has_not_is_named(wrap):
    rows = [{"query": "a", "answer": "1"}, {"query": "b", "answer": "2"}, {"qery": "c", "answer": "3"}]
    primer = DataLoadingPrimer(wrap(rows))
    assert queries(primer, 1) == ["a"]
    for _ in range(2):  # and nothing was handed out
        with pytest.raises(MissingKeyError, match=r"the column 'query': row 3 has qery, answer. Did you mean 'qery'"):
            primer.pull(2)
    assert queries(primer, 1) == ["b"]
    shuffled = DataLoadingPrimer(rows, shuffle=True, seed=0)
    with pytest.raises(MissingKeyError, match="row 3 has qery"):  # counted in the data, whatever the order
        shuffled.pull(3)


def test_seeds_move_from_turn_to_turn():
    env = ChatEnv(batch_size=[2]).append_transform(DataLoadingPrimer(ROWS, seed=0))
    td = env.reset()
    td["history"].full = td["history"].prompt
    after = env.step(td)["next"]
    assert set(after["seed"].tolist()).isdisjoint(td["seed"].tolist())
    assert td["seed"].tolist() == DataLoadingPrimer(ROWS, seed=0).pull(2)["seed"].tolist()


def test_policy_version_is_stamped_as_integer_or_uuid():
    tracker, unique = PolicyVersion(), PolicyVersion("uuid")
    env = ChatEnv(batch_size=[2]).append_transform(DataLoadingPrimer(ROWS)).append_transform(tracker)
    tracker.increment_version()
    td = env.reset()
    assert (td["policy_version"].dtype, td["policy_version"].tolist()) == (torch.int64, [1, 1])
    first = unique.version
    unique.increment_version()
    assert unique.version_history == [first, unique.version]
    assert first != unique.version
    batch = unique._call(ChatEnv(batch_size=[1]).reset(td[:1]))
    assert batch.get("policy_version").tolist() == [unique.version]
    other = PolicyVersion()
    other.load_state_dict(tracker.state_dict())
    assert other.version == 1


def test_closing_the_env_ends_the_workers_and_a_later_pull_goes_on_where_it_was():
    before = worker_processes()
    env = ChatEnv.from_dataloader(DataLoader(ROWS, batch_size=2, num_workers=2))
    assert env.reset().get("query").tolist() == ["q0", "q1"]
    assert len(worker_processes() - before) == 2
    env.close()
    assert worker_processes() <= before
    [primer] = env.transform
    assert queries(primer, 2) == ["q2", "q3"]
    primer.close()
    assert worker_processes() <= before


def test_a_factory_makes_the_data_and_primers_choose_the_columns():
    made = iter([[{"query": "a", "answer": "1", "notes": "x"}]])  # once
    primer = DataLoadingPrimer(dataloader_factory=lambda: next(made), primers={"query": None, "answer": None})
    for _ in range(2):
        assert set(primer.pull(2).keys()) == {"query", "answer", "group_id"}


def test_repeats_stay_in_order_over_partial_resets():
    env = ChatEnv.from_dataloader(ROWS, batch_size=3, repeats=2)
    td = env.reset()
    seen = [td.get("query").tolist()]
    for resets in ([True, False, False], [False, True, True], [True, True, False]):
        td["_reset"] = torch.tensor(resets).view(3, 1)
        td = env.reset(td)
        seen.append(td.get("query").tolist())
    assert seen == [["q0", "q0", "q1"], ["q1", "q0", "q1"], ["q1", "q2", "q2"], ["q3", "q3", "q2"]]
    assert td["group_id"].tolist() == [3, 3, 2]


def test_an_endless_stream_draws_a_prompt_again_under_a_new_group():
    primer = DataLoadingPrimer(ROWS[:2])
    batch = primer.pull(5)
    assert batch.get("query").tolist() == ["q0", "q1", "q0", "q1", "q0"]
    assert batch["group_id"].tolist() == [0, 1, 2, 3, 4]


# Ways to start conversations from rows; an iterable is read, and a tensordict is given, at the reset.
STARTS = {
    "dataset": lambda rows: DatasetChatEnv(dataset=rows, num_envs=2, shuffle=False, max_steps=2, seed=0),
    "dataset without seed": lambda rows: DatasetChatEnv(dataset=rows, num_envs=2, shuffle=False, max_steps=2),
    "dataloader": lambda rows: ChatEnv.from_dataloader(rows, batch_size=2),
    "iterable": lambda rows: ChatEnv.from_dataloader(DataLoader(rows, batch_size=2)),
    "reset": lambda rows: ChatEnv(batch_size=[2]),
}


def rows_with(name):
    return [{"query": "q", "answer": "a", name: value} for value in ("x", "y")]


def started(start, rows, *transforms):
    env = STARTS[start](rows)
    for transform in transforms:
        env = env.append_transform(transform)
    given = {key: column([row[key] for row in rows]) for key in rows[0]}
    return env, env.reset(TensorDict(given, batch_size=[2]) if start == "reset" else None)


@pytest.mark.parametrize("name", RESERVED)
def test_a_column_with_the_name_of_an_entry_is_refused_however_conversations_start(name):
    """Regression: rewards got the sampling seed for the column `seed`, and never saw `text` or `next`."""
    starts = set(STARTS)
    if name == "history":  # a part of the prompt
        starts -= {"dataset", "dataset without seed"}
    if name in ("policy_version", "_reset"):  # may be of the turns before a reset; a mask of the rows to reset
        starts -= {"reset"}
    for start in starts:
        with pytest.raises(DataError, match=rf"got '{name}' .*rename it .*{name.strip('_')}_of_row"):
            # Where the columns are known, when it is made.
            STARTS[start](rows_with(name)) if start.startswith("data") else started(start, rows_with(name))
    assert f"`{name}`" in (ROOT / "docs/keys.md").read_text().partition("Refused, with the name")[2].partition("##")[0]


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("name", ["solution", "completion", "index", "conversation_id", "tool_calls", "action"])
def test_other_columns_reach_rewards_and_users_under_their_names_in_every_turn(start, name):
    seen = {}

    def note(by, values):
        seen.setdefault(by, []).extend(values)
        return [1.0] * len(values)

    def one(text, /, **columns):
        return note("one", [columns[name]])[0]

    def many(texts, /, **columns):
        return note("many", columns[name])

    def trl(completions, **columns):
        return note("trl", columns[name])

    def user(messages, **columns):
        return note("user", [columns[name]]) and "go on"

    rewards = [RewardFunction(one), RewardFunction(many, batched=True), RewardFunction(trl)]
    env, td = started(start, rows_with(name), UserTurn(user, concurrency=1), *rewards)
    policy = ScriptedPolicy(["ok"] * 4)
    env.step(policy(env.step_mdp(env.step(policy(td)))))
    turns = ["x", "y"] * 2
    asked = turns[:2] if start.startswith("dataset") else turns  # a dataset's second turn is the last
    assert seen == {"user": asked, "one": turns, "many": turns, "trl": turns}


def test_a_column_that_the_first_row_lacks_is_not_lost():
    """Regression: columns were those of the first row, so the tools of the second were never declared."""
    schema = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    rows = [{"prompt": "a"}, {"prompt": "b", "tools": [schema], "level": 3}]
    for order, levels in ((rows, [None, 3]), (rows[::-1], [3, None])):
        td = DatasetChatEnv(dataset=order, num_envs=2, shuffle=False).reset()
        tools = [chat[0].get("tools") for chat in td["history"].prompt.to_chats()]
        assert (td.get("level").tolist(), list(map(bool, tools))) == (levels, list(map(bool, levels)))
    with pytest.raises(DataError, match="row 2 also has 'level'"):
        DataLoadingPrimer([{"query": "a"}, {"query": "b", "level": 3}]).pull(2)


def starting(start, name, make):
    return lambda: started(start, rows_with(name), make())


def scoring(name, fn):
    return starting("dataset", name, lambda: RewardFunction(fn, name="f"))


TOOLS = partial(ToolTransform, ["calculator"])
TWO_PROMPTS = [{"task": "a", "query": "b"}]
test_columns_with_the_name_of_an_argument_or_of_what_a_transform_writes_are_refused = refusals(
    (DataError, r"'completion'; rename.*, /, \*\*", scoring("completion", lambda completion, **columns: 0.0)),
    (DataError, "argument: got 'completions'", scoring("completions", lambda completions, **columns: [])),
    (
        DataError,
        "argument: got 'messages'",
        starting("dataloader", "messages", lambda: UserTurn(lambda messages, **_: 1)),
    ),
    (ConfigError, "'history' must be.*not passed", scoring("level", lambda completion, history: 0.0)),
    (DataError, "'reward_f' ", scoring("reward_f", lambda completion: 0.0)),
    (DataError, "'reward_f' ", starting("iterable", "reward_f", lambda: RewardFunction(len, name="f"))),
    *(
        (DataError, f"'{name}' ", starting(start, name, TOOLS))
        for start in ("dataset", "iterable", "reset")
        for name in ("conversation_id", "tool_calls", "tool_use")
    ),
    (DataError, "got 'seed'", lambda: DataLoadingPrimer(rows_with("seed")).pull(1)),
    (DataError, "'text_response' ", lambda: LLMEnv.from_dataloader(rows_with("text_response"), str_key="query")),
    (DataError, "'task' and 'query' both", lambda: DatasetChatEnv(dataset=TWO_PROMPTS, prompt_column="task")),
    (DataError, "data_key='level'", lambda: DatasetChatEnv(dataset=rows_with("level"), data_key="level")),
)
