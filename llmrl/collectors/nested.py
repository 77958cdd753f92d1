"""`NestedCollector`: the collector of a worker that has worker processes itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensordict import TensorDictBase


class NestedCollector:
    """Adapts a collector with several processes to the methods that `llmrl.collectors.worker.WorkerLoop` calls.

    New weights go into ``policy``, the copy in this process, and from there to the processes, which apply them between
    two of their steps.
    """

    def __init__(self, collector: Any):
        self._collector = collector
        self.options, self.policy = collector.options, collector.policy
        self.frames_taken = 0  # of the last batch collected
        self._pool, self._senders = collector._pool, collector._senders
        self.set_seed, self.shutdown = collector.set_seed, collector.shutdown
        self.state_dict, self.load_state_dict = collector.state_dict, collector.load_state_dict

    @property
    def counters(self) -> dict[str, int]:
        return self._collector.counters

    @property
    def spec(self) -> dict[str, Any]:
        """The specs of the envs."""
        return self._pool.workers[0].spec

    @property
    def before_step(self) -> Callable[[], None]:
        """Called repeatedly while the processes collect."""
        return self._pool.tick

    @before_step.setter
    def before_step(self, call: Callable[[], None]) -> None:
        self._pool.tick = call

    def number_trajectories(self, first: int, stride: int) -> None:
        """Numbers trajectories ``first`` plus multiples of ``stride``, in disjoint sets for the processes."""
        count = len(self._pool.workers)
        self._pool.ask("number_trajectories", [(first + stride * index, stride * count) for index in range(count)])

    def collect(self) -> TensorDictBase:
        before = self.counters["delivered"]
        batch = self._collector.next()
        self.frames_taken = self.counters["delivered"] - before
        return batch

    def deliver(self, batch: TensorDictBase) -> TensorDictBase:
        return batch

    def detach_steps(self) -> None:
        """Does nothing: the processes copy their steps."""

    def set_version(self, version: int | str) -> None:
        """Sends the current weights of ``policy`` to the processes, under the version received with them."""
        collector = self._collector
        collector._version = version
        if (sender := self._senders.get("policy")) is None:
            collector._tell_version(None, None)
        else:
            # Sent after the weights of the earlier update have arrived, and before those of this version are sent.
            collector._settle([sender])
            collector._tell_version(sender.version + 1, None)
            sender.update_weights()
