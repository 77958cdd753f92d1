"""Trajectories that share beginnings, as trees."""

import random
from collections import Counter
from xml.etree import ElementTree

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict

from llmrl.data import MCTSForest, SipHash
from llmrl.envs.llm import LLMHashingEnv
from llmrl.errors import ConfigError, DataError, MissingKeyError


def rollout(start, *steps, rewards=None):
    """A trajectory over numbers: an action is added to the observation, times ten."""
    seen = [start]
    for step in steps:
        seen.append(seen[-1] * 10 + step)
    seen = torch.tensor(seen).unsqueeze(-1)
    td = TensorDict(observation=seen[:-1], action=torch.tensor(steps).unsqueeze(-1), batch_size=[len(steps)])
    rewards = [0.0] * len(steps) if rewards is None else rewards
    done = torch.zeros(len(steps), 1, dtype=torch.bool)
    done[-1] = True
    next_ = {"observation": seen[1:], "reward": torch.tensor(rewards).unsqueeze(-1), "done": done}
    return td.set("next", TensorDict(next_, batch_size=[len(steps)]))


def walk(*places):
    """A trajectory whose actions are the places they lead to."""
    seen = torch.tensor(places).unsqueeze(-1)
    td = TensorDict(observation=seen[:-1], action=seen[1:], batch_size=[len(places) - 1])
    return td.set("next", TensorDict(observation=seen[1:], batch_size=[len(places) - 1]))


@pytest.fixture
def forest():
    """1: 1, 2, 3, then 4 and 5 or 6, and another 1, 2 that ends there; and a trajectory elsewhere."""
    forest = MCTSForest()
    forest.extend(rollout(1, 1, 2, 3, 4, 5, rewards=[0.0, 0.0, 0.5, 0.0, 2.0]))
    forest.extend(rollout(1, 1, 2, 3, 6, rewards=[0.0, 0.0, 0.5, 1.0]))
    forest.extend(rollout(1, 2))
    forest.extend(rollout(7, 7, 7))
    return forest


def test_a_compact_tree_has_a_vertex_for_each_choice(forest):
    tree = forest.get_tree(rollout(1, 1)[0])
    assert tree.rollout is None
    assert (tree.num_children, tree.node_observation.item()) == (2, 1)
    common, short = tree.subtree
    assert common.selected_actions.flatten().tolist() == [1, 2, 3]
    assert (common.branching_action.item(), common.prev_action.item(), common.node_observation.item()) == (1, 3, 1123)
    assert [child.selected_actions.flatten().tolist() for child in common.subtree] == [[4, 5], [6]]
    assert (short.is_terminal, common.is_terminal) == (True, False)
    assert common.parent is tree
    assert common.subtree[0].parent is common
    assert tree.parent is None
    assert tree.num_vertices() == tree.num_vertices(count_repeat=True) == 5
    assert tree.edges() == [(0, 1), (0, 4), (1, 2), (1, 3)]
    assert list(tree.valid_paths()) == [(0, 0), (0, 1), (1,)]
    assert tree.max_length() == 5

    # Counts and values are those of the trajectories:
    assert (tree.count, tree.wins, tree.value) == (3, 4.0, pytest.approx(4 / 3))
    assert (common.visits, common.wins, common.value) == (2, 4.0, 2.0)
    assert [(child.count, child.value) for child in common.subtree] == [(1, 2.0), (1, 1.0)]
    assert (short.count, short.value) == (1, 0.0)
    # A path has the steps of its trajectory:
    for path, steps in {(0, 0): (1, 2, 3, 4, 5), (0, 1): (1, 2, 3, 6), (1,): (2,)}.items():
        got, expected = tree.rollout_from_path(path), rollout(1, *steps)
        for key in ("observation", ("next", "observation"), "action"):
            assert torch.equal(got[key], expected[key])
    assert tree.rollout_from_path(()) is None


def test_each_step_is_a_vertex_where_the_tree_is_not_compact(forest):
    tree = forest.get_tree(rollout(1, 1)[0], compact=False)
    assert tree.num_vertices() == 1 + 3 + 2 + 1 + 1
    assert all(len(vertex.branches) == 1 for path, vertex in tree.walk() if path)
    assert sorted(vertex.node_id for _, vertex in tree.walk()) == list(range(8))
    assert tree.max_length() == 5
    assert forest.get_tree(rollout(1, 1)[0], compact=False, max_depth=2).num_vertices() == 1 + 2 + 1
    assert forest.get_tree(rollout(1, 1)[0], max_depth=2).max_length() == 2


def test_vertices_are_found_by_hash_id_and_path(forest):
    tree = forest.get_tree(rollout(1, 1)[0])
    common = tree.subtree[0]
    assert common.hash == SipHash()(torch.tensor([1123])).item()
    assert tree.get_vertex_by_hash(common.hash) is common is tree.get_vertex_by_id(1)
    assert tree.vertices(key_type="path")[0,] is common
    assert set(tree.vertices(key_type="id")) == set(range(5))
    assert common in tree
    assert tree not in common
    with pytest.raises(MissingKeyError, match="id 99"):
        tree.get_vertex_by_id(99)
    with pytest.raises(ValueError, match="'name'"):
        tree.vertices(key_type="name")


def test_paths_that_meet_are_counted_once_and_a_circle_ends():
    forest = MCTSForest()
    forest.extend(walk(0, 1, 3))
    forest.extend(walk(0, 2, 3))
    tree = forest.get_tree(walk(0, 1)[0])
    assert (tree.num_vertices(), tree.num_vertices(count_repeat=True)) == (2, 3), "both end in 3"
    forest.extend(walk(3, 0))
    tree = forest.get_tree(walk(0, 1)[0])
    assert tree.max_length() == 3
    assert [leaf.is_repeated for leaf in tree.subtree] == [True, True]
    assert forest.get_tree(walk(1, 3)[0]).rollout["observation"].flatten().tolist() == [1, 3]


def test_a_vertex_that_two_paths_reach_has_one_id_and_a_line_for_each_path():
    forest = MCTSForest()
    forest.extend(walk(1, 2, 3))
    forest.extend(walk(1, 4, 3))
    tree = forest.get_tree(walk(1, 2)[0], compact=False)
    assert {key_type: len(tree.vertices(key_type=key_type)) for key_type in ("id", "hash", "path")} == {
        "id": 4, "hash": 4, "path": 5
    }  # fmt: skip
    assert [vertex.node_id for _, vertex in tree.walk()] == [0, 1, 2, 3, 2]
    assert tree.to_svg().count("<circle") == 5
    lines = forest.to_string(walk(1, 2)[0], lambda vertex: vertex.node_observation.item()).splitlines()
    assert lines == ["(0,) 3", "(1,) 3"]
    assert "'observation': tensor([3])" in forest.to_string(walk(1, 2)[0])


def test_an_action_that_leads_elsewhere_is_refused_and_nothing_is_kept(forest):
    wrong = rollout(9, 9, 9)
    wrong["next", "observation"][1] = 0
    right = rollout(9, 9, 9)
    forest.extend(right)
    before = (len(forest), len(forest.node_map), len(forest.data_map), list(forest.counts))
    longer = torch.cat([rollout(5, 5), wrong])
    with pytest.raises(DataError, match="step 2"):
        forest.extend(longer)
    assert (len(forest), len(forest.node_map), len(forest.data_map), list(forest.counts)) == before
    with pytest.raises(MissingKeyError, match="no trajectory"):
        forest.get_tree(rollout(5, 5)[0])


@pytest.mark.parametrize(
    ("steps", "error", "words"),
    [
        (rollout(1, 3, rewards=[float("nan")]), DataError, "rewards must be finite"),
        (rollout(1, 3).exclude("next"), MissingKeyError, "under 'next'"),
        (rollout(1, 3).exclude("action"), MissingKeyError, "'action'"),
    ],
)
def test_steps_that_cannot_be_kept_are_told(forest, steps, error, words):
    before = (len(forest), len(forest.node_map), forest.get_tree(rollout(1, 1)[0]).value)
    with pytest.raises(error, match=words):
        forest.extend(steps)
    assert (len(forest), len(forest.node_map), forest.get_tree(rollout(1, 1)[0]).value) == before
    seen, env = TensorDict(seen=torch.tensor([1])), LLMHashingEnv(vocab_size=3, text_output=False)
    for error, words, call in (
        (MissingKeyError, "'observation': got NoneType; keys present: 'seen'", lambda: forest.get_tree(seen)),
        (MissingKeyError, "'observation': got NoneType; keys present: 'seen'", lambda: forest.get_child(seen)),
        (ConfigError, "before the first", lambda: forest.get_keys_from_env(env)),
        (DataError, "time dimension", lambda: forest.extend(rollout(1, 1)[0])),
        (DataError, "one observation", lambda: forest.get_tree(rollout(1, 1))),
    ):
        with pytest.raises(error, match=words):
            call()


def test_a_tree_of_texts_counts_shared_prefixes():
    """Against a plain count of prefixes."""
    env = LLMHashingEnv(vocab_size=3, text_output=False)
    forest = MCTSForest()
    forest.get_keys_from_env(env)
    assert set(forest.observation_keys) == {"observation", "hashing"}
    forest = MCTSForest(observation_keys=["hashing"], action_keys=["action"])
    draw = random.Random(0)
    texts = [[draw.randrange(3) for _ in range(draw.randrange(1, 6))] for _ in range(40)]
    start = env.reset(TensorDict(observation=torch.tensor([0, 1])))
    for text in texts:
        steps, td = [], start
        for token in text:
            td = env.step(td.clone().set("action", torch.tensor([token])))
            steps.append(td)
            td = td["next"].exclude("reward", "done", "terminated")
        forest.extend(LazyStackedTensorDict(*steps))
    tree = forest.get_tree(start, compact=False)
    counts = Counter(tuple(text[:length]) for text in texts for length in range(1, len(text) + 1))
    vertices = [(tree.rollout_from_path(path)["action"], vertex.count) for path, vertex in tree.walk() if path]
    assert {tuple(actions.flatten().tolist()): count for actions, count in vertices} == counts
    assert tree.count == len(texts)
    longest = max(counts, key=len)
    path = next(path for path, _ in tree.walk() if path and len(path) == len(longest))
    last = tree.rollout_from_path(path)[-1]["next", "observation"]
    assert last[2:].tolist() == tree.rollout_from_path(path)["action"].flatten().tolist(), "rows of any length are kept"


def test_a_tree_is_drawn(forest):
    tree = forest.get_tree(rollout(1, 1)[0])
    lines = ["1", "├── 1123", "│   ├── 112345", "│   └── 11236", "└── 12"]
    assert tree.to_string(lambda vertex: vertex.node_observation.item()).splitlines() == lines
    assert tree.to_string().splitlines()[1] == "├── 1: 2 x 2"
    drawing = ElementTree.fromstring(tree.to_svg(lambda vertex: f"<script>{vertex.node_id}</script> & more"))
    texts = [element.text for element in drawing.iter() if element.tag.endswith("text")]
    assert (texts[0], len(texts)) == ("<script>0</script> & more", 5)
    assert not [element for element in drawing.iter() if element.tag.endswith("script")]


def test_the_maps_answer_as_documented(forest):
    branches = forest.node_map[rollout(1, 1)[0]]["_index"]
    steps = forest.data_map[branches]
    assert steps["action"].flatten().tolist() == [1, 2]
    assert steps["next", "observation"].flatten().tolist() == [11, 12]
    assert torch.equal(forest.get_child(rollout(1, 1)[0])["action"], steps["action"])
    several = forest.node_map[rollout(1, 1, 2)]
    assert [row["_index"].tolist() for row in several.unbind(0)] == [branches.tolist(), [1]]
    assert len(forest) == 5 + 1 + 1 + 2


def test_a_batch_of_trajectories_is_added_at_once():
    batch = torch.stack([rollout(1, 1, 2), rollout(1, 1, 3)])
    forest = MCTSForest()
    tree = forest.extend(batch, return_node=True)
    assert tree.rollout["action"].flatten().tolist() == [1]
    assert [child.selected_actions.item() for child in tree.subtree] == [2, 3]
    tree = forest.add(rollout(1, 4)[0], return_node=True)
    expanded = [tree.fully_expanded(LLMHashingEnv(vocab_size=size, text_output=False)) for size in (2, 3)]
    assert (tree.num_children, expanded) == (2, [True, False])


def test_a_long_trajectory_makes_a_deep_tree():
    forest = MCTSForest()
    td = walk(*range(3001))
    forest.extend(td)
    assert forest.get_tree(td[0]).max_length() == 3000
    assert forest.get_tree(td[0], compact=False).num_vertices() == 3001
