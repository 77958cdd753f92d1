"""`SyncDataCollector`: the batches, the arguments, weights, state, and collecting in a thread."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import InteractionType
from tensordict.nn.probabilistic import interaction_type
from torch import nn

from llmrl.collectors import SyncDataCollector, VanillaWeightUpdater
from llmrl.collectors.collector import placed
from llmrl.data import LazyTensorStorage, ReplayBuffer
from llmrl.envs import NextStateReconstructor, StepCounter, Transform, TransformedEnv
from llmrl.errors import ConfigError, WeightSyncError, WorkerError
from llmrl.weight_update import MultiProcessWeightSyncScheme, NoWeightSyncScheme, SharedMemWeightSyncScheme
from tests.support.counting_env import CountingEnv, Scale
from tests.support.processes import wait_until


def collector(env=None, policy=None, **options) -> SyncDataCollector:
    options = {"frames_per_batch": 6, "total_frames": 12, **options}
    return SyncDataCollector(CountingEnv() if env is None else env, policy or Scale(), **options)


def buffer(size: int = 1000, **options) -> ReplayBuffer:
    return ReplayBuffer(storage=LazyTensorStorage(size, **options), batch_size=8)


def test_batches_are_steps_along_time_and_trajectories_go_on_from_batch_to_batch():
    both = collector()
    first, second = both
    assert first.batch_size == (6,)
    assert first.names == ["time"]
    assert not first.requires_grad
    assert torch.cat([first["observation"], second["observation"]]).flatten().tolist() == [0, 1, 2, 3] * 3
    assert first["next", "observation"].flatten().tolist() == [1, 2, 3, 4, 1, 2]
    assert first["next", "reward"].flatten().tolist() == [2, 3, 4, 5, 2, 3]
    assert first["collector", "traj_ids"].tolist() == [0, 0, 0, 0, 1, 1]
    assert second["collector", "traj_ids"].tolist() == [1, 1, 2, 2, 2, 2]
    assert both.counters == {"produced": 12, "delivered": 12, "dropped": 0}
    assert len(both) == 2


def test_several_envs_share_the_frames_and_rows_that_are_done_start_anew_alone():
    env = CountingEnv(batch_size=(2,))
    [batch] = collector(env, frames_per_batch=12)
    assert batch.batch_size == (2, 6)
    assert batch.names == [None, "time"]
    assert batch["collector", "traj_ids"].tolist() == [[0, 0, 0, 0, 2, 2], [1, 1, 1, 1, 3, 3]]


def test_frames_that_do_not_divide_are_rounded_up_with_a_warning():
    with pytest.warns(UserWarning, match="frames_per_batch should be a multiple.*7 for 2"):
        batches = list(collector(CountingEnv(batch_size=(2,)), frames_per_batch=7, total_frames=8))
    assert batches[0].batch_size == (2, 4)
    with pytest.warns(UserWarning, match="total_frames should be a multiple"):
        assert sum(len(batch) for batch in collector(total_frames=7)) == 12


def test_a_batch_stays_as_it_is_unless_the_same_one_is_asked_for():
    one, two = collector(CountingEnv(100))
    assert (one["observation"] + 6 == two["observation"]).all()
    one, two = collector(CountingEnv(100), return_same_td=True)
    assert one is two
    assert two["observation"].flatten().tolist() == [6, 7, 8, 9, 10, 11]


def test_private_entries_are_left_out_and_what_a_policy_writes_is_kept():
    def policy(td: TensorDictBase) -> TensorDictBase:
        td.set("_hidden", torch.zeros(1)).set("value", td["observation"] * 2)
        return td.set(("nested", "_x"), torch.zeros(1)).set("action", torch.zeros(1))

    batch = collector(policy=policy).next()
    assert not any(str(key).count("_hidden") or str(key).count("_x") for key in batch.keys(True))
    assert (batch["value"] == batch["observation"] * 2).all()


def test_without_a_policy_actions_are_random_and_a_factory_makes_one():
    assert SyncDataCollector(CountingEnv, frames_per_batch=4).next()["action"].unique().numel() == 4
    assert SyncDataCollector(CountingEnv, policy_factory=Scale, frames_per_batch=4).next()["action"].unique() == 1
    with pytest.raises(TypeError, match="exclude each other"):
        SyncDataCollector(CountingEnv, Scale(), policy_factory=Scale, frames_per_batch=4)


REFUSED = [("total_frames", 0), ("frames_per_batch", 0), ("extend_buffer", False), ("interruptor", 3), ("postproc", 3)]
REFUSED += [("frames_per_batch", 6.0), ("exploration_type", "mode"), ("replay_buffer", 3), ("timeout_s", 0)]
REFUSED += [("weight_sync_schemes", {"policy": 3})]


def test_unknown_and_contradicting_arguments_are_refused():
    for name, value in REFUSED:
        with pytest.raises(ConfigError, match=name):
            collector(**{name: value})
    for error, message, make in [
        (TypeError, r"frames_per_bach.*Did you mean 'frames_per_batch'", lambda: collector(frames_per_bach=4)),
        (TypeError, "frames_per_batch must be given", lambda: SyncDataCollector(CountingEnv)),
        (ConfigError, r"missing keys \['env_state_dict', 'frames'", lambda: collector().load_state_dict({})),
        (ConfigError, r"the policy must be a function.*got 3", lambda: collector(policy=3)),
        (ConfigError, r"must return the tensordict.*got None", lambda: collector(policy=lambda td: None).next()),
        (ConfigError, "must be, or return, an EnvBase: got list", lambda: collector([CountingEnv])),
        (ConfigError, "must be, or return, an EnvBase: got int", lambda: collector(lambda: 3)),
        (ConfigError, "track_traj_ids", lambda: collector(split_trajs=True, track_traj_ids=False)),
    ]:
        with pytest.raises(error, match=message):
            make()


def test_a_limit_of_frames_truncates_and_counts():
    batch = collector(CountingEnv(100), max_frames_per_traj=4).next()
    assert batch["collector", "step_count"].tolist() == [0, 1, 2, 3, 0, 1]
    assert batch["next", "truncated"].flatten().tolist() == [False, False, False, True, False, False]
    assert not batch["next", "terminated"].any()
    with pytest.raises(ConfigError, match="'step_count'"):
        collector(TransformedEnv(CountingEnv(), StepCounter()), max_frames_per_traj=4)


def test_random_frames_come_first_exactly_as_many_as_asked_for():
    batches = list(collector(init_random_frames=8))
    actions = torch.cat([batch["action"] for batch in batches]).flatten()
    assert (actions[:8] != 1).all()
    assert (actions[8:] == 1).all()
    rows = buffer()
    rows.extend(TensorDict(collector(frames_per_batch=5, total_frames=5).next(), batch_size=[5]))
    for _ in collector(init_random_frames=8, replay_buffer=rows):
        pass
    assert (rows[:]["action"].flatten() == 1).tolist() == [True] * 5 + [False] * 3 + [True] * 9


def test_resets_at_each_batch_or_not_even_where_done():
    _first, second = collector(CountingEnv(100), reset_at_each_iter=True)
    assert second["observation"].flatten().tolist() == [0, 1, 2, 3, 4, 5]
    assert second["collector", "traj_ids"].unique().tolist() == [1]
    batch = collector(reset_when_done=False).next()
    assert batch["observation"].flatten().tolist() == [0, 1, 2, 3, 4, 5]
    assert batch["collector", "traj_ids"].unique().tolist() == [0]


def test_the_end_of_a_batch_can_be_marked_as_truncated():
    batch = collector(CountingEnv(100), set_truncated=True).next()
    assert batch["next", "truncated"].flatten().tolist() == batch["next", "done"].flatten().tolist()
    assert batch["next", "done"].flatten().tolist() == [False] * 5 + [True]
    assert not batch["next", "terminated"].any()


def test_trajectories_are_split_before_postproc():
    seen = []
    batch = collector(split_trajs=True, postproc=lambda td: seen.append(td.batch_size) or td.exclude("done")).next()
    assert seen == [(2, 4)]
    assert "done" not in batch.keys()
    assert batch["collector", "mask"].tolist() == [[True] * 4, [True, True, False, False]]
    assert batch["next", "reward"].squeeze(-1).tolist() == [[2, 3, 4, 5], [2, 3, 0, 0]]


def test_an_interruption_leaves_rows_of_zeros_without_a_trajectory():
    class AfterFour:
        calls = 0

        def collection_stopped(self) -> bool:
            self.calls += 1
            return self.calls == 4

    one = collector(CountingEnv(100), interruptor=AfterFour())
    batch = one.next()
    assert batch.batch_size == (6,)
    assert batch.names == ["time"]
    assert batch["collector", "traj_ids"].tolist() == [0, 0, 0, 0, -1, -1]
    assert batch["next", "observation"].flatten().tolist() == [1, 2, 3, 4, 0, 0]
    assert one.counters["delivered"] == one.counters["produced"] == 4


def test_the_policy_samples_as_asked_for():
    seen = set()

    def policy(td: TensorDictBase) -> TensorDictBase:
        seen.add(interaction_type())
        return td.set("action", torch.zeros(1))

    collector(policy=policy).next()
    collector(policy=policy, exploration_type=InteractionType.MODE).next()
    assert seen == {InteractionType.RANDOM, InteractionType.MODE}


def test_compact_rows_are_rebuilt_by_the_next_state_reconstructor():
    full = collector().next()
    compact = collector(compact_obs=True).next()
    assert ("next", "observation") not in compact.keys(True)
    assert ("next", "reward") in compact.keys(True)
    rebuilt = NextStateReconstructor()(compact)
    assert rebuilt["next", "observation"].flatten().tolist()[:3] == [1, 2, 3]
    known = ~rebuilt["next", "observation"].isnan()
    assert known.flatten().tolist() == [True, True, True, False, True, False]
    assert (rebuilt["next", "observation"][known] == full["next", "observation"][known]).all()


# --- the policy ---


def test_a_policy_is_copied_only_where_its_device_is_another_one():
    policy = Scale()
    assert collector(policy=policy).policy is policy
    assert collector(policy=policy, policy_device="cpu", device="cpu").policy is policy
    tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    tied[1].weight = tied[0].weight
    moved = placed(tied, "meta", "Collector")
    assert moved is not tied
    assert moved[1].weight is moved[0].weight
    assert moved[0].weight.device.type == "meta"
    assert tied[0].weight.device.type == "cpu"


def test_a_policy_that_must_be_copied_and_cannot_be_is_named():
    class Single(Scale):
        def __deepcopy__(self, memo):
            raise RuntimeError("holds a graph")

    assert collector(policy=Single(), device="cpu").next() is not None  # none is needed
    with pytest.raises(
        ConfigError, match=r"policy_device=meta.*Single cannot be copied.*holds a graph.*policy_factory"
    ):
        placed(Single(), "meta", "Collector")


def test_a_module_whose_forward_names_observations_needs_no_keys():
    class Plain(nn.Module):
        def forward(self, observation):
            return observation * 0 + 0.5

    assert (collector(policy=Plain()).next()["action"] == 0.5).all()


def test_weights_are_taken_between_batches_and_counted():
    one = collector(track_policy_version=True)
    before = one.next()
    one.update_policy_weights_({"scale": torch.tensor(3.0)})
    after = one.next()
    assert (before["action"] == 1).all()
    assert (after["action"] == 3).all()
    assert before["policy_version"].tolist() == [0] * 6
    assert after["policy_version"].tolist() == [1] * 6
    one.update_policy_weights_(TensorDict.from_module(Scale(4.0)))
    one.update_policy_weights_(Scale(5.0))
    one.update_policy_weights_()
    assert one.policy.scale == 5
    assert one.policy_version == 4
    with pytest.raises(WeightSyncError, match="'scale'"):
        one.update_policy_weights_({"scale": torch.zeros(3)})
    with pytest.raises(ConfigError, match=r"'critic'.*weight_sync_schemes"):
        one.update_policy_weights_(Scale(), model_id="critic")
    assert one.policy.scale == 5
    assert one.policy_version == 4


@pytest.mark.parametrize("extend_buffer", [True, False])
def test_weights_from_another_thread_wait_until_the_steps_are_copied(extend_buffer):
    class Late(SyncDataCollector):
        """Weights come when the steps are taken and the batch is not made; `Scale` has written views of its weight."""

        def _assembled(self, *parts):
            thread = threading.Thread(target=self.receive_weights, args=({"scale": torch.tensor(3.0)},))
            thread.start()
            threads.append(thread)
            thread.join(0.2)
            return super()._assembled(*parts)

    threads, rows = [], buffer()
    one = Late(
        CountingEnv,
        Scale(),
        frames_per_batch=1,
        track_policy_version=True,
        replay_buffer=rows,
        extend_buffer=extend_buffer,
    )
    one.background.allow_pauses()
    one.next()
    for thread in threads:
        thread.join(60)
    assert one.policy.scale == 3
    assert (rows[0]["policy_version"].item(), rows[0]["action"].item()) == (0, 1)


def test_a_version_can_be_a_uuid():
    one = collector(track_policy_version="uuid")
    first = one.next()["policy_version"]
    one.update_policy_weights_()
    assert set(first) == {first[0]}
    assert one.next()["policy_version"][0] == one.policy_version != first[0]


# --- state and seeds ---


def test_a_state_goes_on_with_counts_ids_and_weights():
    one = collector(CountingEnv(3), total_frames=18)
    one.next()
    one.update_policy_weights_({"scale": torch.tensor(2.0)})
    other = collector(CountingEnv(3), total_frames=18)
    other.load_state_dict(one.state_dict())
    batches = list(other)
    assert len(batches) == 2
    assert (batches[0]["action"] == 2).all()
    assert batches[0]["collector", "traj_ids"].tolist() == [3, 3, 3, 4, 4, 4]  # id 2 was under way


def test_a_seed_makes_random_actions_repeat():
    def actions(seed: int):
        one = SyncDataCollector(CountingEnv, frames_per_batch=6)
        following = one.set_seed(seed)
        assert following != seed
        assert one.set_seed(seed, static_seed=True) == seed
        return one.next()["action"].flatten().tolist()

    assert actions(3) == actions(3) != actions(4)


# --- replay buffers and threads ---


@pytest.mark.parametrize("batch_size", [(), (2,)])
def test_a_buffer_gets_rows_and_iterating_yields_none(batch_size):
    rows = buffer()
    assert list(collector(CountingEnv(batch_size=batch_size), replay_buffer=rows)) == [None, None]
    assert len(rows) == 12
    assert rows[:]["observation"].shape == (12, 1)
    by_step = buffer()
    assert list(collector(CountingEnv(batch_size=batch_size), replay_buffer=by_step, extend_buffer=False))
    assert len(by_step) == 12
    assert set(by_step[:].keys(True, True)) == set(rows[:].keys(True, True))
    grid = buffer(ndim=2)
    if batch_size:
        list(collector(CountingEnv(batch_size=batch_size), replay_buffer=grid))
        assert (
            grid[:]["observation"].flatten().long().bincount().tolist()
            == rows[:]["observation"].flatten().long().bincount().tolist()
        )


def test_a_thread_fills_the_buffer_until_it_is_shut_down():
    rows = buffer()
    one = collector(CountingEnv(cost_s=0.001), replay_buffer=rows, total_frames=-1, track_policy_version=True)
    one.start()
    with pytest.raises(ConfigError, match="in the background already"):
        next(iter(one))
    wait_until(lambda: len(rows) >= 12)
    with one.pause():
        count, produced = len(rows), one.counters["produced"]
        time.sleep(0.05)
        assert (len(rows), one.counters["produced"]) == (count, produced)
    one.update_policy_weights_({"scale": torch.tensor(-1.0)})
    wait_until(lambda: len(rows) >= count + 24)
    one.async_shutdown()
    counts = one.counters
    assert counts["produced"] == counts["delivered"] + counts["dropped"]
    assert counts["delivered"] == rows.write_count
    old = rows[:]["policy_version"] == 0
    assert (rows[:]["action"][old] == 1).all()
    assert (rows[:]["action"][~old] == -1).all()
    assert (~old).any()


def test_seeds_and_states_come_in_the_middle_of_the_threads_batches():
    rows = buffer()
    one = collector(CountingEnv(100, cost_s=0.001), frames_per_batch=40, replay_buffer=rows, total_frames=-1)
    one.start()
    for number in range(20):
        before = one.counters["produced"]
        wait_until(lambda before=before: one.counters["produced"] > before)
        one.set_seed(number)
        with one.pause():
            one.load_state_dict({**one.state_dict(), "policy_state_dict": {"scale": torch.tensor(number % 3 + 1.0)}})
            assert one.counters["delivered"] == rows.write_count
    wait_until(lambda: len(rows) >= 80)
    one.async_shutdown()
    counts = one.counters
    assert counts["produced"] == counts["delivered"] + counts["dropped"]
    content = rows[:]
    assert (content["next", "reward"] == content["observation"] + 1 + content["action"]).all()  # none is overwritten


def test_after_a_failure_collecting_goes_on_with_a_reset():
    one = collector(CountingEnv(10, fault="raise"), frames_per_batch=4, total_frames=8)
    assert one.next()["observation"].flatten().tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="failed at 5"):
        one.next()
    assert one.next()["observation"].flatten().tolist() == [0, 1, 2, 3]
    assert one.counters == {"produced": 8, "delivered": 8, "dropped": 0}
    with pytest.raises(StopIteration):
        one.next()


def test_a_failure_in_the_thread_is_raised_by_the_next_call():
    one = collector(CountingEnv(10, fault="raise"), replay_buffer=buffer(), total_frames=-1)
    with pytest.warns(UserWarning, match="the env failed at 5"):
        start_and_fail(one)
    with pytest.raises(WorkerError, match="the env failed at 5"):
        one.update_policy_weights_()
    with pytest.raises(WorkerError, match="the env failed at 5"):
        one.async_shutdown()
    assert one.counters == {"produced": 4, "delivered": 0, "dropped": 4}


def start_and_fail(one: SyncDataCollector) -> None:
    one.start()
    wait_until(lambda: not one.background.is_running)


# --- schemes in one process ---


class Critic(Transform):
    """A model in the env, as another one might use it."""

    def __init__(self):
        super().__init__()
        self.actor = nn.Linear(1, 1)


def test_models_in_this_process_take_weights_by_their_path():
    path = "env.transform[0].actor"
    schemes = {"policy": SharedMemWeightSyncScheme(), path: MultiProcessWeightSyncScheme()}
    one = collector(TransformedEnv(CountingEnv(), Critic()), weight_sync_schemes=schemes)
    weights = nn.Linear(1, 1)
    one.update_policy_weights_(weights, model_id=path)
    assert torch.equal(one.env.transform[0].actor.weight, weights.weight)
    one.update_policy_weights_(weights_dict={"policy": Scale(3.0), path: weights.state_dict()})
    assert one.policy.scale == 3
    assert one.policy_version == 1
    with pytest.raises(ConfigError, match="actr"):
        collector(weight_sync_schemes={"env.transform[0].actr": MultiProcessWeightSyncScheme()})


def test_a_scheme_that_sends_nothing_and_an_updater_of_ones_own():
    still = collector(weight_sync_schemes={"policy": NoWeightSyncScheme()})
    still.update_policy_weights_(Scale(3.0))
    assert (still.policy.scale, still.policy_version) == (1, 1)
    policy = Scale()
    own = collector(policy=policy, weight_updater=VanillaWeightUpdater(policy_weights=policy))
    own.update_policy_weights_(Scale(4.0))
    assert (policy.scale, own.policy_version) == (4, 1)
    assert own.weight_updater.collector is own


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_policy_on_a_gpu_is_a_copy_that_follows_the_trainer():
    policy = Scale()
    one = collector(policy=policy, policy_device="cuda", storing_device="cpu", total_frames=-1)
    assert one.policy is not policy
    policy.scale.data.fill_(2)
    assert (one.next()["action"] == 1).all()
    one.update_policy_weights_()
    assert (one.next()["action"] == 2).all()
    assert one.next()["action"].device.type == "cpu"
