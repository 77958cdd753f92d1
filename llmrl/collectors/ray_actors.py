"""Collectors in Ray actors: the actor's side, and the pool of actors on the owner's side."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from llmrl.collectors.worker_pool import FailingPool
from llmrl.concurrency.background_work import BackgroundWork
from llmrl.data.replay_buffers.proxy import Answer, answer
from llmrl.data.replay_buffers.ray_buffer import RayReplayBuffer
from llmrl.errors import ConfigError, DeadlineError, LLMRLError, WorkerError
from llmrl.optional import require
from llmrl.weight_update import RayWeightSyncScheme, WeightReceiver

_START_S = 120.0  # for an actor to import its modules and to make its env
_CLOSE_S = 10.0  # for the current step to end; then actors are killed
_PERIOD_S = 1.0  # interval between checks of actors that have not answered
_BATCHES = "batches"  # the group of requests for them
_THREADS = 3  # of an actor, beside that of batches: for weights, pauses, and progress queries


# --- the actor's side -------------------------------------------------------------------------------------------------


def _answered(method: Callable[..., Any]) -> Callable[..., Answer]:
    @functools.wraps(method)
    def call(self: CollectorActor, *arguments: Any) -> Answer:
        return answer(method, self, *arguments)

    return call


class CollectorActor:
    """Any collector in an actor with several threads: one collects, another applies new weights between two steps."""

    def __init__(self) -> None:
        self.collector: Any = None
        self.background: BackgroundWork | None = None
        self._collecting = threading.Lock()
        self._pauses: list[contextlib.ExitStack] = []

    def where(self) -> str:
        """The process id and host name, for messages."""
        return f"process {os.getpid()} on {socket.gethostname()}"

    @_answered
    def build(self, recipe: bytes) -> None:
        make, model_ids, seed = _ray("ray.cloudpickle").loads(recipe)
        torch.manual_seed(seed)
        self.collector = make()
        self.background = getattr(self.collector, "background", None)
        if self.background is not None:
            self.background.allow_pauses()
        for model_id in model_ids:
            _Receiver(self, model_id).attach(self)

    @_answered
    def collect(self) -> tuple[int | None, int, Any]:
        """Frames of the batch (None at the end), frames produced so far, and the batch on the CPU."""
        with self._collecting:
            before = self.collector.counters["delivered"]
            try:
                batch = self.collector.next()
            except StopIteration:
                return None, self.collector.counters["produced"], None
        counters = self.collector.counters
        if batch is not None and batch.device is not None and batch.device.type != "cpu":
            batch = batch.cpu()
        return counters["delivered"] - before, counters["produced"], batch

    @_answered
    def _call(self, name: str, *arguments: Any) -> Any:
        """Calls a method of the collector between two batches."""
        with self._collecting:
            return getattr(self.collector, name)(*arguments)

    def set_seed(self, seed: int, static_seed: bool) -> Answer:
        torch.manual_seed(seed)
        return self._call("set_seed", seed, static_seed)

    def state_dict(self) -> Answer:
        return self._call("state_dict")

    def load_state_dict(self, state: Mapping[str, Any]) -> Answer:
        return self._call("load_state_dict", state)

    @_answered
    def start(self, limits: Mapping[str, int]) -> None:
        """Starts the collector in the background; ``limits`` maps attributes of the collector to new values."""
        vars(self.collector).update(limits)
        self.collector.start()

    @_answered
    def pause(self) -> None:
        self._pauses.append(contextlib.ExitStack())
        self._pauses[-1].enter_context(self.collector.pause())

    @_answered
    def resume(self) -> None:
        self._pauses.pop().close()

    @_answered
    def counters(self) -> dict[str, int]:
        """The collector's counters. Raises WorkerError if it failed in the background."""
        if self.background is not None:
            self.background.check()
        return {"produced": 0, "delivered": 0} if self.collector is None else dict(self.collector.counters)

    @_answered
    def finish(self, timeout: float) -> dict[str, int]:
        """Ends the collector. Returns its counters."""
        self.collector.shutdown(timeout)
        return dict(self.collector.counters)


class _Receiver(WeightReceiver):
    """Applies weights to the actor's collector; to one that cannot be paused, between two batches."""

    def __init__(self, actor: CollectorActor, model_id: str) -> None:
        super().__init__(RayWeightSyncScheme())
        self._actor, self.model_id = actor, model_id

    def update_weights(self, weights: Any, *, version: int, model_id: str | None = None) -> None:
        actor = self._actor
        with contextlib.nullcontext() if actor.background is not None else actor._collecting:
            actor.collector.receive_weights(weights, model_id=self.model_id, version=version)


# --- the owner's side -------------------------------------------------------------------------------------------------


class Member:
    """The owner's side of one actor."""

    def __init__(self, index: int, handle: Any) -> None:
        self.index, self.handle = index, handle
        self.place = "which Ray has not placed yet"
        self.due: deque[Any] = deque()  # references of requested batches
        self.counters = {"produced": 0, "delivered": 0}
        self.batches = 0  # requested since it last received weights
        self.has_ended = False  # end of its data, or of its frames
        self.since = 0.0  # when it last made progress, or was asked for what it does now

    @property
    def ahead(self) -> int:
        """Number of batches that the owner has requested and not taken yet."""
        return len(self.due)


class ActorPool(FailingPool):
    """An actor for each of ``makers``, functions that build the collector in the actor.

    who        names the owner in messages
    configs    options of each actor (``num_cpus``, ``num_gpus``, ``resources``, ...)
    model_ids  models that receive weights
    init       arguments of ``ray.init``, used if Ray is not running yet

    If an actor raises, dies or makes no progress for ``timeout_s``, all actors are ended. The error names the actor,
    and every later call raises it again.
    """

    def __init__(
        self,
        who: str,
        makers: Sequence[Callable[[], Any]],
        configs: Sequence[Mapping[str, Any]],
        *,
        model_ids: Sequence[str],
        init: Mapping[str, Any] | None,
        timeout_s: float,
        replay_buffer: Any = None,
    ) -> None:
        if replay_buffer is not None and not isinstance(replay_buffer, RayReplayBuffer):
            raise ConfigError(
                f"{who}: actors write into a RayReplayBuffer: got {type(replay_buffer).__name__}; give one, or extend "
                "your own buffer by the batches that iterating yields."
            )
        self._who, self.timeout_s, self._replay_buffer = who, timeout_s, replay_buffer
        self._ray = ray = _ray(who=who)
        # Pickled before Ray is started, so that a pickling error is raised at once.
        recipes = [_packed((make, model_ids, torch.initial_seed() + n), who) for n, make in enumerate(makers)]
        if not ray.is_initialized():
            ray.init(**(init or {}))
        for config in configs:
            check_room(wanted_of({"num_cpus": 1, **config}), f"{who}: remote_configs")
        self.is_open = True
        self.workers: list[Member] = []
        # Its threads take requests in any order; those of one group of one thread in the order in which they were sent.
        actor_class = ray.remote(concurrency_groups={_BATCHES: 1})(CollectorActor)
        with self.failing():
            for index, config in enumerate(configs):
                options = {"num_cpus": 1, "max_concurrency": _THREADS, **config}
                self.workers.append(Member(index, actor_class.options(**options).remote()))
            for member in self.workers:
                _, member.place = next(self._each({member.handle.where.remote(): member}, "be placed", _START_S))
            # Built after all are placed, so that every message can say where its actor is.
            building = {m.handle.build.remote(recipe): m for m, recipe in zip(self.workers, recipes, strict=True)}
            for member, (is_built, error) in self._each(building, "make its env and policy", _START_S):
                if not is_built:
                    error.add_note(f"Raised in {self.name(member)}.")
                    raise error

    def name(self, member: Member) -> str:
        actor = member.handle._actor_id.hex()[:8]
        return f"{self._who}: collector {member.index} of {len(self.workers)} (Ray actor {actor}, {member.place})"

    # --- batches ------------------------------------------------------------------------------------------------------

    def grant(self, member: Member) -> None:
        """Requests a batch."""
        if not member.due:
            member.since = time.monotonic()
        member.due.append(member.handle.collect.options(concurrency_group=_BATCHES).remote())
        member.batches += 1

    def take(self) -> tuple[Member, int | None, Any]:
        """The next batch of any member: the member, the frames (None if the member has ended) and the batch."""
        with self.failing():
            pending = {m.due[0]: m for m in self.workers if m.due}
            member, found = self._first(pending, "collect a batch", self.timeout_s)
            frames, member.counters["produced"], batch = self._value(member, found, "collect a batch")
            member.due.popleft()
            member.since = time.monotonic()
            member.has_ended |= frames is None
            self.delivered += frames or 0
            return member, frames, batch

    # --- calls --------------------------------------------------------------------------------------------------------

    def ask(
        self, method: str, arguments: Sequence[Sequence[Any]] | None = None, workers: Sequence[Member] | None = None
    ) -> list[Any]:
        """Calls a method of each actor with its own arguments, and returns the results in order of ``workers``."""
        self.check_open(method)
        members = self.workers if workers is None else workers
        arguments = [()] * len(members) if arguments is None else arguments
        pending = {getattr(m.handle, method).remote(*given): m for m, given in zip(members, arguments, strict=True)}
        what = f"answer {method!r}"
        with self.failing():
            found = self._each(pending, what, self.timeout_s)
            answers = {member.index: self._value(member, one, what) for member, one in found}
        return [answers[member.index] for member in members]

    def _each(self, pending: Mapping[Any, Member], what: str, limit_s: float) -> Iterator[tuple[Member, Any]]:
        while pending:
            for member in pending.values():
                member.since = time.monotonic()
            member, found = self._first(pending, what, limit_s)
            yield member, found
            pending = {reference: other for reference, other in pending.items() if other is not member}

    def _first(self, pending: Mapping[Any, Member], what: str, limit_s: float) -> tuple[Member, Any]:
        while True:
            # Ray does not report an actor that hangs, so pending actors are checked every second, and those that are
            # late also where another one has an answer: it may always have one.
            ready, _ = self._ray.wait(list(pending), num_returns=1, timeout=_PERIOD_S)
            if not ready or any(self._is_late(member, limit_s) for member in pending.values()):
                answered, _ = self._ray.wait(list(pending), num_returns=len(pending), timeout=0)
                members = [member for reference, member in pending.items() if reference not in answered]
                self._look_at(members, what)
                for member in members:
                    if self._is_late(member, limit_s):
                        raise DeadlineError(
                            f"{self.name(member)} must {what}: it has done nothing for {limit_s:g} s. Other jobs may "
                            "use the cluster's resources (see `ray status`); raise timeout_s if a step of the env "
                            "takes longer."
                        )
            if ready:
                return pending[ready[0]], self._get(pending[ready[0]], ready[0], what)

    def _is_late(self, member: Member, limit_s: float) -> bool:
        return time.monotonic() - member.since > limit_s

    def _look_at(self, members: Sequence[Member], what: str) -> None:
        """Raises WorkerError if an actor has died or its collector failed; records which actors made progress."""
        placed = {m.handle.counters.remote(): m for m in members if m.place.startswith("process")}
        ready, _ = self._ray.wait(list(placed), num_returns=len(placed), timeout=_PERIOD_S) if placed else ((), ())
        for reference in ready:
            member = placed[reference]
            counters = self._value(member, self._get(member, reference, what), what)
            if counters["produced"] != member.counters["produced"]:
                member.since = time.monotonic()
            member.counters = counters

    def _get(self, member: Member, reference: Any, what: str) -> Any:
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:
            raise WorkerError(f"{self.name(member)} must {what}: {error}") from error
        except self._ray.exceptions.RayError as error:
            raise WorkerError(
                f"{self.name(member)} must {what}: it has ended: {error}. Create the collector again; the actors' logs "
                "are in Ray's session folder."
            ) from error

    def _value(self, member: Member, found: Answer, what: str) -> Any:
        returned, result = found
        if returned:
            return result
        notes = "\n".join(getattr(result, "__notes__", ()))
        raise WorkerError(
            f"{self.name(member)} must {what}: it raised {type(result).__name__}: {result}\n\n{notes}"
        ) from result

    # --- in the background --------------------------------------------------------------------------------------------

    def start(self, limits: Mapping[str, int]) -> None:
        """Starts every collector, and a thread that warns if an actor dies."""
        if self._replay_buffer is None:
            raise ConfigError(f"{self._who}.start: actors write into a replay_buffer: give a RayReplayBuffer.")
        if self.is_started or any(member.batches for member in self.workers):
            raise ConfigError(f"{self._who}.start: the collection has begun already.")
        self.ask("start", [(limits,)] * len(self.workers))
        self.is_started = True
        threading.Thread(target=self._watch, name="llmrl-ray-watch", daemon=True).start()

    def _watch(self) -> None:
        while self.is_open:
            try:
                self._look_at(self.workers, "collect in the background")
            except LLMRLError as error:
                if self.is_open:
                    self.failure = error
                    self._kill()
                    warnings.warn(f"{error}", stacklevel=1)
                return
            time.sleep(_PERIOD_S)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """A block during which no actor takes a step."""
        self.ask("pause")
        try:
            yield
        finally:
            if self.is_open:
                self.ask("resume")

    def finish(self, timeout: float | None = None) -> None:
        """Closes the pool. Raises WorkerError if an actor failed in the background."""
        try:
            if self.is_open or self.failure is not None:
                self.ask("counters")
        finally:
            self.close(timeout)

    # --- shutdown -----------------------------------------------------------------------------------------------------

    def _counted(self) -> tuple[int, int]:
        if self.is_open and self.is_started:
            for member, counters in zip(self.workers, self.ask("counters"), strict=True):
                member.counters = counters
        return tuple(sum(member.counters[name] for member in self.workers) for name in ("produced", "delivered"))

    def close(self, timeout_s: float | None = None) -> None:
        """Ends the collectors, whose final counters are kept, then the actors; with 0, kills the actors at once."""
        if not self.is_open:
            return
        self.is_open = False
        # No longer open from now on: an error of an actor while it ends is not a failure of the collection.
        limit_s = _CLOSE_S if timeout_s is None else timeout_s
        ended = {member.handle.finish.remote(limit_s): member for member in self.workers if limit_s}
        if ended:
            ready, _ = self._ray.wait(list(ended), num_returns=len(ended), timeout=limit_s + _PERIOD_S)
            for reference in ready:
                with contextlib.suppress(LLMRLError):  # it has died or did not end in time; it is killed below
                    member = ended[reference]
                    member.counters = self._value(member, self._get(member, reference, "end"), "end")
        self._kill()

    def _kill(self) -> None:
        self.is_open = False
        if self._ray.is_initialized():
            for member in self.workers:
                self._ray.kill(member.handle)


class ActorOwner:
    """The methods that a collector delegates to its `ActorPool`."""

    _pool: ActorPool

    @property
    def remote_collectors(self) -> list[Any]:
        """The handles of the actors."""
        return [member.handle for member in self._pool.workers]

    @property
    def counters(self) -> dict[str, int]:
        """Frames or turns: "produced" = "delivered" + "dropped" (those of unfinished batches at the end)."""
        return self._pool.counters

    def pause(self) -> AbstractContextManager[None]:
        """A block during which no actor takes a step."""
        return self._pool.pause()

    def async_shutdown(self, timeout: float | None = None, close_env: bool = True) -> None:
        """Ends a collection that was started. Raises WorkerError if an actor failed."""
        self._pool.finish(timeout)

    def shutdown(self, timeout: float | None = None, close_env: bool = True) -> None:
        """Ends the collection and its actors, with their envs and engines; Ray keeps running."""
        self._pool.close(timeout)


def wanted_of(config: Mapping[str, Any]) -> dict[str, float]:
    """The resources that an actor's options request, by Ray's names."""
    known = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}
    return {ours: config[name] for name, ours in known.items() if config.get(name)} | config.get("resources", {})


def check_room(wanted: Mapping[str, float], who: str) -> None:
    """Raises ConfigError if no node of the cluster has these resources, whether or not they are in use."""
    nodes = [node["Resources"] for node in _ray().nodes() if node["Alive"]]
    if not any(all(node.get(name, 0) >= count for name, count in wanted.items()) for node in nodes):
        shown = [{name: node.get(name, 0) for name in wanted} for node in nodes]
        raise ConfigError(f"{who}: a node of the cluster must have {dict(wanted)} for an actor: got {shown}.")


def _ray(module: str = "ray", who: str = "collectors in Ray actors") -> Any:
    return require(module, extra="ray", used_by=who)


def _packed(recipe: tuple[Any, ...], who: str) -> bytes:
    try:
        return _ray("ray.cloudpickle").dumps(recipe)
    except Exception as error:  # parts of the recipe may raise anything
        raise ConfigError(
            f"{who}: env, policy and arguments must be picklable, to be sent to an actor: {type(error).__name__}: "
            f"{error}; give functions that make them there (create_env_fn, policy_factory)."
        ) from error
