"""Torch's own layers, run trajectory by trajectory, are the reference."""

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

from llmrl.envs import GymEnv, InitTracker, SerialEnv, TransformedEnv, check_env_specs
from llmrl.errors import ConfigError, MissingKeyError, ShapeError
from llmrl.modules import GRUModule, LSTMModule

KINDS = [(GRUModule, nn.GRU), (LSTMModule, nn.LSTM)]


def batch(is_init, size=3):
    torch.manual_seed(0)
    init = torch.tensor(is_init)
    return TensorDict(x=torch.randn(*init.shape, size), is_init=init.unsqueeze(-1), batch_size=init.shape)


@pytest.mark.parametrize(("module", "layer"), KINDS)
@pytest.mark.parametrize("num_layers", [1, 2])
def test_each_trajectory_of_a_batch_is_torchs_own(module, layer, num_layers):
    td = batch([[1, 0, 0, 1, 0, 0, 0], [0, 0, 1, 1, 0, 0, 1]])
    td = td.set("is_init", td["is_init"].bool())
    rnn = module(3, 5, num_layers, in_key="x", out_key="y").set_recurrent_mode()
    reference = layer(3, 5, num_layers, batch_first=True)
    reference.load_state_dict(rnn.rnn.state_dict())
    states = [torch.randn(2, 7, num_layers, 5) for _ in rnn.in_keys[1:-1]]
    for key, state in zip(rnn.in_keys[1:-1], states, strict=True):
        td.set(key, state)
    rnn(td)["y"].square().sum().backward()
    cuts = [[(0, 3), (3, 7)], [(0, 2), (2, 3), (3, 6), (6, 7)]]
    expected = torch.zeros(2, 7, 5)
    for row, parts in enumerate(cuts):
        for start, end in parts:
            first = None
            if (row, start) == (1, 0):  # goes on from the state it had
                first = [state[1, 0].unsqueeze(1) for state in states]
                first = first[0] if len(first) == 1 else tuple(first)
            expected[row, start:end] = reference(td["x"][row : row + 1, start:end], first)[0][0]
    assert torch.allclose(td["y"], expected, atol=1e-6, rtol=0)
    expected.square().sum().backward()
    for ours, theirs in zip(rnn.rnn.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, atol=1e-5)


@pytest.mark.parametrize(("module", "layer"), KINDS)
def test_steps_in_an_env_and_the_batch_they_make_agree(module, layer):
    torch.manual_seed(0)
    rnn = module(4, 6, 2, in_key="observation", out_key="hidden")
    env = TransformedEnv(SerialEnv(2, lambda: GymEnv("CartPole-v1", max_episode_steps=5)), InitTracker())
    env.append_transform(rnn.make_tensordict_primer())
    check_env_specs(env, break_when_any_done="both")
    head = TensorDictModule(nn.Linear(6, 2), in_keys=["hidden"], out_keys=["action"])
    env.set_seed(0)
    td = env.rollout(13, policy=TensorDictSequential(rnn, head), break_when_any_done=False)
    assert td["is_init"].sum() == 6
    again = rnn.set_recurrent_mode()(td.exclude("hidden"))
    assert torch.allclose(again["hidden"], td["hidden"], atol=1e-6, rtol=0)
    middle = rnn.set_recurrent_mode()(td[:, 3:].exclude("hidden"))  # from the middle of trajectories
    assert torch.allclose(middle["hidden"], td["hidden"][:, 3:], atol=1e-6, rtol=0)
    for key in rnn.in_keys[1:-1]:
        carried = td["next", key][:, :-1][~td["next", "done"][:, :-1, 0]]
        assert carried.equal(td[key][:, 1:][~td["next", "done"][:, :-1, 0]])
        assert td[key][:, 0].eq(0).all()


def test_the_copy_for_trajectories_has_the_same_weights():
    rnn = GRUModule(3, 5, in_key="x", out_key="y")
    copy = rnn.set_recurrent_mode()
    assert not rnn.recurrent_mode
    assert all(a is b for a, b in zip(rnn.parameters(), copy.parameters(), strict=True))
    assert rnn.in_keys == ["x", "recurrent_state", "is_init"]
    named = LSTMModule(3, 5, in_keys=["x", "h", "c"], out_keys=["y", ("next", "h"), ("next", "c")])
    assert list(named.make_tensordict_primer().primers) == ["h", "c"]


def test_what_is_missing_is_named_with_the_transform_that_writes_it():
    rnn = GRUModule(3, 5, in_key="x", out_key="y")
    with pytest.raises(MissingKeyError, match=r"'is_init'.*InitTracker\(\)"):
        rnn(TensorDict(x=torch.zeros(3)))
    with pytest.raises(MissingKeyError, match=r"'recurrent_state'.*make_tensordict_primer\(\)"):
        rnn(TensorDict(x=torch.zeros(3), is_init=torch.ones(1, dtype=torch.bool)))
    with pytest.raises(ShapeError, match=r"'x' must be \[\*B, 3\]"):
        rnn(TensorDict(x=torch.zeros(4), is_init=torch.ones(1, dtype=torch.bool)))
    with pytest.raises(ConfigError, match="needs exactly one of in_key and in_keys"):
        GRUModule(3, 5, out_key="y")
    with pytest.raises(ConfigError, match="must each name the input, recurrent_state_h, recurrent_state_c"):
        LSTMModule(3, 5, in_keys=["x", "h"], out_key="y")
