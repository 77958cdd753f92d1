"""Of all answers to a prompt, the best go on; nothing is lost or mixed on the way."""

import io
import math

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict

from llmrl.data.llm import TopKRewardSelector
from llmrl.data.ragged.tensordicts import column
from llmrl.data.replay_buffers import LazyStackStorage, ReplayBuffer
from llmrl.errors import DataError, MissingKeyError


def batch(prompts, rewards, done=None):
    count = len(rewards)
    done = torch.tensor([True] * count if done is None else done).view(count, 1)
    rewards = torch.tensor(rewards, dtype=torch.float32).view(count, 1, 1)
    td = TensorDict(number=torch.arange(count), batch_size=[count])
    td["text"] = TensorDict(prompt=column(prompts), batch_size=[count])
    td["next"] = TensorDict(reward=rewards, done=done, batch_size=[count])
    return td


@pytest.mark.parametrize(
    ("k", "rewards", "written"),
    [(3, [0.0, 4.0, 1.0, 3.0, 2.0], [1, 3]), (2, [0.0, 1.0] * 3, [1, 3]), (1, [1.0] * 3, []), (1, [math.nan] * 2, [])],
)
def test_of_those_above_the_median_the_k_best_are_written_and_ties_go_to_the_first(k, rewards, written):
    selector = TopKRewardSelector(len(rewards), k)
    out = selector.inv(batch(["p"] * len(rewards), rewards))
    assert ([] if out is None else out["number"].tolist()) == written
    assert selector.counters["dropped"] + selector.counters["failed"] == len(rewards) - len(written)
    assert selector.inv(batch(["p"], [1.0])[:0]) is None, "an empty batch writes nothing"


def test_prompts_wait_apart_until_there_are_enough_turns():
    selector = TopKRewardSelector(3, 1)
    assert selector.inv(batch(["a", "b", "a"], [0.0, 9.0, 1.0])) is None
    assert selector.counters["queued"] == 2
    out = selector.inv(batch(["b", "a", "b"], [1.0, 2.0, 0.0]))
    assert out["next", "reward"].flatten().tolist() == [2.0, 9.0]
    assert selector.counters == {"prompts": 2, "written": 2, "dropped": 4, "failed": 0, "evicted": 0, "queued": 0}


def test_rows_of_a_two_dimensional_batch_are_conversations_of_several_turns():
    given = batch([f"turn {i % 2} of p" for i in range(8)], [0.0, 1.0, 2.0, 3.0, 0.0, 0.0, 9.0, -9.0],
                  done=[False, True] * 4)  # fmt: skip
    out = TopKRewardSelector(8, 2).inv(given.reshape(4, 2))
    assert out.batch_size == (4,)
    assert out["number"].tolist() == [2, 3, 0, 1]  # returns 5 and 1; those below are 0 and 0
    flat = TopKRewardSelector(8, 2).inv(given)
    assert flat["number"].tolist() == [2, 3, 0, 1]


def test_in_front_of_a_buffer_and_through_a_state():
    buffer = ReplayBuffer(storage=LazyStackStorage(10), transform=TopKRewardSelector(3, 2))
    assert buffer.extend(batch(["p", "p", "q"], [0.0, 3.0, 1.0], done=[True, True, False])).tolist() == []
    file = io.BytesIO()
    torch.save(buffer.state_dict(), file)
    file.seek(0)
    other = ReplayBuffer(storage=LazyStackStorage(10), transform=TopKRewardSelector(3, 2))
    other.load_state_dict(torch.load(file, weights_only=False))
    for one in (buffer, other):
        assert one.extend(batch(["q", "p"], [1.0, 1.0])).tolist() == [0]
        assert one[:]["next", "reward"].flatten().tolist() == [3.0]


def test_impossible_arguments_are_refused():
    for arguments, match in (((1, 1), "at least 2"), ((2, 3), "got 2, 3 and 1024")):
        with pytest.raises(ValueError, match=match):
            TopKRewardSelector(*arguments)
    with pytest.raises(DataError, match="True in 0 of 2"):
        TopKRewardSelector(2, 1).inv(batch(["p"] * 2, [0.0, 1.0], done=[False, False]))
    with pytest.raises(MissingKeyError, match=r"\('text', 'prompt'\)"):
        TopKRewardSelector(2, 1).inv(batch(["p"] * 2, [0.0, 1.0]).exclude("text"))


@pytest.mark.parametrize("prompt_key", ["group_id", ("text", "prompt")])
def test_single_rows_that_were_stacked_lazily_are_a_batch_like_any_other(prompt_key):
    given = batch(["p", "q"] * 3, [0.0, 9.0, 1.0, 8.0, 2.0, 7.0])
    given["group_id"] = torch.tensor([1, 2] * 3)
    rows = LazyStackedTensorDict.lazy_stack([row.clone() for row in given.unbind(0)])
    out = TopKRewardSelector(3, 1, prompt_key=prompt_key).inv(rows)
    assert out["number"].tolist() == [4, 1]


def test_the_queue_is_bounded(caplog):
    selector = TopKRewardSelector(2, 1, max_queued_prompts=2)
    for prompt in "abc":
        selector.inv(batch([prompt], [1.0]))
    assert (selector.counters["queued"], selector.counters["evicted"]) == (2, 1)
    assert "max_queued_prompts=2" in caplog.text


def test_a_conversation_that_continues_in_the_next_batch_is_one():
    selector = TopKRewardSelector(4, 1)
    assert selector.inv(batch(["p", "q"], [1.0, 1.0], done=[True, False])) is None
    out = selector.inv(batch(["q after", "p", "p", "p"], [5.0, 0.0, 3.0, 2.0]))
    assert out["next", "reward"].flatten().tolist() == [3.0]  # 1, 0, 3 and 2 of p
    assert selector.counters["queued"] == 1
