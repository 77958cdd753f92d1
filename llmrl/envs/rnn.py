"""`GRUModule` and `LSTMModule`: recurrent policy layers that keep their state in the tensordict."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Self

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from llmrl.data.ragged.tensordicts import required
from llmrl.data.specs import Unbounded
from llmrl.envs.transforms.trajectory import TensorDictPrimer
from llmrl.errors import ConfigError, ShapeError


class _RecurrentModule(TensorDictModuleBase):
    # Subclasses set torch's layer class and the keys of its states.

    _layer: type[nn.RNNBase]
    _states: tuple[str, ...]

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        *,
        in_key: NestedKey | None = None,
        out_key: NestedKey | None = None,
        in_keys: Sequence[NestedKey] | None = None,
        out_keys: Sequence[NestedKey] | None = None,
        is_init_key: NestedKey = "is_init",
        bias: bool = True,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        who = type(self).__name__
        if (in_key is None) == (in_keys is None) or (out_key is None) == (out_keys is None):
            raise ConfigError(f"{who}: needs exactly one of in_key and in_keys, and one of out_key and out_keys.")
        reads = [in_key, *self._states] if in_keys is None else list(in_keys)
        writes = [out_key, *(("next", state) for state in reads[1:])] if out_keys is None else list(out_keys)
        self.in_keys = [unravel_key(key) for key in reads] + [is_init_key]
        self.out_keys = [unravel_key(key) for key in writes]
        if len(reads) != len(self._states) + 1 or len(writes) != len(reads):
            names = ", ".join(("the input", *self._states))
            raise ConfigError(f"{who}: in_keys and out_keys must each name {names}: got {reads} and {writes}.")
        self.rnn = self._layer(
            input_size, hidden_size, num_layers, bias=bias, batch_first=True, dropout=dropout, device=device
        )
        self.recurrent_mode = False

    def set_recurrent_mode(self, mode: bool = True) -> Self:
        """A module that shares these weights and reads whole trajectories (single steps if ``mode`` is False)."""
        other = copy.copy(self)
        other.recurrent_mode = mode
        return other

    def make_tensordict_primer(self) -> TensorDictPrimer:
        """The transform that makes an env start each trajectory with zero states."""
        shape, parameter = (self.rnn.num_layers, self.rnn.hidden_size), self.rnn.weight_ih_l0
        spec = Unbounded(shape, parameter.device, parameter.dtype)
        return TensorDictPrimer({key: spec.clone() for key in self.in_keys[1:-1]})

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        who, lead = type(self).__name__, td.batch_dims
        value = required(td, self.in_keys[0], who)
        is_init = required(td, self.in_keys[-1], who, "append InitTracker() to the env").reshape(td.batch_size)
        if value.shape[:-1] != td.batch_size or value.shape[-1] != self.rnn.input_size:
            raise ShapeError(
                f"{who}: {self.in_keys[0]!r} must be [*B, {self.rnn.input_size}] for the batch size "
                f"{tuple(td.batch_size)}: got {tuple(value.shape)}."
            )
        if self.recurrent_mode:
            if not lead:
                raise ShapeError(f"{who}: a batch of trajectories must have time as its last dimension: got none.")
            states = [td.get(key, None) for key in self.in_keys[1:-1]]
            return td.set(self.out_keys[0], self._trajectories(value, is_init, states))
        remedy = "append make_tensordict_primer() to the env"
        states = [required(td, key, who, remedy) for key in self.in_keys[1:-1]]
        out, states = self._run(value.reshape(-1, 1, value.shape[-1]), is_init.reshape(-1), states)
        td.set(self.out_keys[0], out.reshape(*td.batch_size, -1))
        for key, state in zip(self.out_keys[1:], states, strict=True):
            td.set(key, state.movedim(0, 1).reshape(*td.batch_size, *state.shape[::2]))
        return td

    def _run(self, rows: Tensor, is_init: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
        """Runs torch's layer on rows [N, T, F], from states [*B, layers, H]; zero states where ``is_init`` bool[N]."""
        shape = (len(rows), self.rnn.num_layers, self.rnn.hidden_size)
        starts = [state.reshape(shape).masked_fill(is_init[:, None, None], 0).movedim(0, 1) for state in states]
        starts = [start.contiguous() for start in starts]
        out, ends = self.rnn(rows, starts[0] if len(starts) == 1 else tuple(starts))
        return out, [ends] if len(starts) == 1 else ends

    def _trajectories(self, value: Tensor, is_init: Tensor, states: Sequence[Tensor | None]) -> Tensor:
        """The outputs [*B, T, H] for inputs [*B, T, F]: each trajectory is a row of one padded call."""
        # Each trajectory becomes a row of its own, so its state cannot leak into the next one.
        time = value.shape[-2]
        starts = is_init.reshape(-1, time).clone()
        starts[:, 0] = True
        at = starts.flatten().nonzero().squeeze(-1)  # flat positions, row by row
        total = torch.tensor([starts.numel()], device=at.device)
        lengths = torch.cat([at, total]).diff()
        rows = pad_sequence(value.reshape(-1, value.shape[-1]).split(lengths.tolist()), batch_first=True)
        shape = (self.rnn.num_layers, self.rnn.hidden_size)
        goes_on = ~is_init.reshape(-1)[at]  # the row begins in mid-trajectory: start from its stored state
        firsts = [
            value.new_zeros(len(at), *shape) if state is None else state.reshape(-1, *shape)[at] for state in states
        ]
        out, _ = self._run(rows, ~goes_on, firsts)
        is_step = torch.arange(rows.shape[1], device=at.device) < lengths[:, None]
        return out[is_step].reshape(*value.shape[:-1], -1)


class GRUModule(_RecurrentModule):
    """`torch.nn.GRU` for single env steps, or for batches of trajectories.

    Reads   ``in_key`` float[*B, F], "recurrent_state" float[*B, layers, H], "is_init" bool[*B, 1]: True where a
            trajectory starts; its state is zeroed there
    Writes  ``out_key`` float[*B, H], ("next", "recurrent_state") float[*B, layers, H], which the env's step carries on
    Raises  MissingKeyError without a state or "is_init": `make_tensordict_primer` and `InitTracker` make the env write
            them; ShapeError, ConfigError for shapes and keys that do not fit

    After ``set_recurrent_mode(True)`` the batch is [*B, T], time last. Trajectories may start within it; the others
    continue from the state at time 0 (zero if absent). Only ``out_key`` float[*B, T, H] is written.

    in_keys, out_keys  the input or output key, then the state keys, to use other names than these

    >>> from llmrl.envs import GymEnv, InitTracker
    >>> gru = GRUModule(4, 8, in_key="observation", out_key="features")
    >>> env = GymEnv("CartPole-v1").append_transform(InitTracker()).append_transform(gru.make_tensordict_primer())
    >>> td = env.rollout(3, policy=lambda td: env.rand_action(gru(td)))
    >>> torch.allclose(gru.set_recurrent_mode(True)(td.clone())["features"], td["features"], atol=1e-6)
    True
    """

    _layer = nn.GRU
    _states = ("recurrent_state",)


class LSTMModule(_RecurrentModule):
    """`GRUModule` with `torch.nn.LSTM`; its states are "recurrent_state_h" and "recurrent_state_c".

    >>> lstm = LSTMModule(4, 8, in_key="observation", out_key="features")
    >>> lstm.out_keys
    ['features', ('next', 'recurrent_state_h'), ('next', 'recurrent_state_c')]
    """

    _layer = nn.LSTM
    _states = ("recurrent_state_h", "recurrent_state_c")
