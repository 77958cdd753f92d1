"""Runs a batch of conversations to their ends: all in lockstep, or each in its own thread.

Both take the same turns (`Stepper`): the policy samples, the env steps, a limit may truncate, and a failing env.step is
retried before its conversation is given up.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from llmrl.collectors.llm.batches import cat_rows
from llmrl.concurrency.background_work import BackgroundWork
from llmrl.data.ragged.tensordicts import column, new_tensordict
from llmrl.envs.base import EnvBase
from llmrl.envs.llm.chat import next_prompt
from llmrl.errors import ConfigError, DeadlineError, MissingKeyError, ShapeError, caused_by
from llmrl.modules.llm.policies.containers import LogProbs, mark_turn, mark_whole_record, set_field

Policy = Callable[[TensorDictBase], TensorDictBase]
_FAILED = "_failed_rollout"


class ConversationsStopped(Exception):
    """Raised in conversations that another thread has stopped: they have no result."""


@dataclass
class TurnLog:
    """Turns of a batch of conversations, in the order in which they were taken. A slot is a conversation's number.

    turns         (slots, td): the conversations, and their turn, td [len(slots)] with "next"
    last_turn_of  slot -> (turn, row) of its last turn; missing for a conversation that was cut off
    """

    turns: list[tuple[list[int], TensorDictBase]] = field(default_factory=list)
    last_turn_of: dict[int, tuple[int, int]] = field(default_factory=dict)

    def add(self, slots: list[int], td: TensorDictBase) -> list[bool]:
        """Adds a turn; returns the done flag of each of its conversations."""
        done = td.get("next").get("done").view(-1).tolist()
        self.last_turn_of.update((slot, (len(self.turns), row)) for row, slot in enumerate(slots) if done[row])
        self.turns.append((slots, td))
        return done

    @property
    def num_turns(self) -> int:
        return sum(len(slots) for slots, _ in self.turns)

    def turns_of(self) -> dict[int, list[tuple[int, int]]]:
        """The (turn, row) pairs of every finished conversation, in order of slots."""
        found: dict[int, list[tuple[int, int]]] = {slot: [] for slot in sorted(self.last_turn_of)}
        for turn, (slots, _) in enumerate(self.turns):
            for row, slot in enumerate(slots):
                if slot in found:
                    found[slot].append((turn, row))
        return found

    def rows(self, *, last_only: bool) -> TensorDictBase | None:
        """The turns of finished conversations, one conversation after another; None if none has finished.

        last_only  only the last turn of each training record; a conversation's last row has the sum of its rewards,
                   earlier rows have 0; ("tokens", "rewards") says which turn earned what
        """
        begins = [None if (column := td.get("new_record", None)) is None else column.tolist() for _, td in self.turns]
        wanted = [
            where
            for turns in self.turns_of().values()
            for where in (_ends_of_records(turns, begins) if last_only else turns)
        ]
        if not wanted:
            return None
        # Rows are indexed once per turn, which is fast, and sorted by conversation at the end.
        rows_of: dict[int, list[int]] = {}
        for turn, row in sorted(wanted):
            rows_of.setdefault(turn, []).append(row)
        returns = self._returns() if last_only else None
        # Also of conversations of one turn: rows of both kinds are joined. Before `_end_of_record` replaces rewards.
        token_rewards = self._token_rewards(wanted) if last_only else None
        pieces: list[TensorDictBase] = []
        position: dict[tuple[int, int], int] = {}
        for turn, rows in rows_of.items():
            slots, td = self.turns[turn]
            position.update({(turn, row): len(position) + number for number, row in enumerate(rows)})
            pieces.append(td if len(rows) == len(slots) else td[rows])
            if last_only:
                returns_of_rows = None if returns is None else returns[[slots[row] for row in rows]]
                pieces[-1].set("next", _end_of_record(pieces[-1].get("next"), returns_of_rows))
                mark_whole_record(pieces[-1])
        data = cat_rows(pieces)
        order = [position[where] for where in wanted]
        data = data if order == list(range(len(order))) else data[order]
        if token_rewards is not None:
            set_field(data, ("tokens", "rewards"), token_rewards)
        return data

    def _token_rewards(self, ends: Sequence[tuple[int, int]]) -> list[Tensor] | None:
        """For each record, of which ``ends`` are the last turns, float32[T]: each turn's reward at its last token.

        None if tokens are padded or not known, or if rewards are not one number per turn.
        """
        ids = [td.get(("tokens", "full"), None, as_list=True) for _, td in self.turns]
        rewards = [td.get("next").get("reward", None) for _, td in self.turns]
        single = all(reward is not None and not reward.is_nested and reward[0].numel() == 1 for reward in rewards)
        if not single or not all(isinstance(rows, list) for rows in ids):
            return None
        rewards = [reward.flatten().tolist() for reward in rewards]
        found: list[Tensor] = []
        last, turns = set(ends), []
        for turn, row in (where for turns_of_slot in self.turns_of().values() for where in turns_of_slot):
            turns.append((turn, row))
            if (turn, row) in last:
                reward_T = torch.zeros(len(ids[turn][row]), device=ids[turn][row].device)
                for each, at in turns:
                    reward_T[len(ids[each][at]) - 1] += rewards[each][at]
                found.append(reward_T)
                turns = []
        return found

    def _returns(self) -> Tensor | None:
        """Each conversation's sum of rewards, by slot; None if every conversation has one turn."""
        taken = [slot for slots, _ in self.turns for slot in slots]
        if len(set(taken)) == len(taken):
            return None  # rewards stay unchanged, and may be ragged
        total: Tensor | None = None
        for slots, td in self.turns:
            if (reward := td.get("next").get("reward", None)) is None:
                continue
            if total is None and not reward.is_nested:
                total = reward.new_zeros(1 + max(taken), *reward.shape[1:])
            if total is None or total.shape[1:] != reward.shape[1:]:
                before = "" if total is None else f" after {tuple(total.shape[1:])}"
                raise ShapeError(
                    "LLMCollector: rewards that are summed over turns must have one shape: got "
                    f"{tuple(reward.shape[1:])}{before} for a conversation; per-token rewards need "
                    "yield_completed_trajectories without yield_only_last_steps."
                )
            total[slots] += reward
        return total


def _ends_of_records(turns: list[tuple[int, int]], begins: list[list[bool] | None]) -> list[tuple[int, int]]:
    """Those (turn, row) pairs of one conversation that are last, or are followed by a new record."""
    new = [begins[turn] is not None and begins[turn][row] for turn, row in turns[1:]]
    return [where for where, last in zip(turns, [*new, True], strict=True) if last]


def _end_of_record(next_td: TensorDictBase, returns: Tensor | None) -> TensorDictBase:
    """``next`` without conversation entries; the reward is the return if the conversation ended, else 0."""
    # The root has these entries up to the record's last turn; those in ``next`` belong to the following record.
    next_td = next_td.exclude("history", "text", "tokens", "masks", "log_probs")
    if returns is not None:
        done = next_td.get("done").view(-1, *[1] * (returns.ndim - 1))
        next_td.set("reward", returns.masked_fill(~done, 0.0))
    return next_td


class Stepper:
    """Takes turns in ``env`` with ``policy``, within a budget of turns.

    max_turns  truncates conversations after this many turns; None: no limit
    budget     of turns over all conversations; -1: no limit
    retries    None: exceptions of the env are raised. Else failing rows are retried this many times, one by one, and
               then end with a reward of NaN. Exceptions of the policy are always raised
    counters   "produced" and "failed" are counted here
    background a turn is one of its steps; no turn begins once it is stopped
    """

    def __init__(
        self,
        env: EnvBase,
        policy: Policy,
        *,
        max_turns: int | None,
        budget: int,
        retries: int | None,
        counters: dict[str, int],
        background: BackgroundWork,
    ):
        self.env, self.policy, self.background = env, policy, background
        self.max_turns, self.budget, self.retries = max_turns, budget, retries
        self.counters = counters
        self.first_error: str | None = None
        self._answer: TensorDictBase | None = None  # "next" of a successful step: failed rows get the same entries
        self._lock = threading.Lock()

    def claim(self, wanted: int) -> int:
        """The number of ``wanted`` turns that the budget still allows; they count as produced from now on."""
        with self._lock:
            # Claimed before the turn is taken, or concurrent threads would exceed the budget.
            granted = wanted if self.budget < 0 else max(0, min(wanted, self.budget - self.counters["produced"]))
            self.counters["produced"] += granted
            return granted

    def turn(
        self, root: TensorDictBase, number: int | Tensor, stopped: threading.Event | None = None
    ) -> TensorDictBase:
        """Takes turn ``number`` (from 1; int64[B] if it differs between conversations), truncated at the limit."""
        with self.background.step():
            td = self._turn(root, (self.background.stopped, stopped or self.background.stopped))
        if self.max_turns is not None:
            next_td = td.get("next")
            done = next_td.get("done")
            cut = torch.as_tensor(number >= self.max_turns, device=done.device).view(-1, 1)
            next_td.set("truncated", next_td.get("truncated") | (cut & ~done))  # not if it is done anyway
            next_td.set("done", done | cut)
        return td

    def _turn(self, root: TensorDictBase, stops: Sequence[threading.Event]) -> TensorDictBase:
        if stops[0].is_set():
            raise ConversationsStopped
        td = self.policy(root)
        # Checked again: an engine that was interrupted has returned an incomplete answer.
        if any(stop.is_set() for stop in stops):
            raise ConversationsStopped
        mark_turn(td)
        try:
            td = self.env.step(td)
        except (ConfigError, MissingKeyError, ShapeError):  # a setup error, which would occur for all rows
            raise
        except Exception as error:  # the boundary to the user's env, tools and rewards
            if self.retries is None:
                raise
            self._keep(error)
            count = td.batch_size[0]
            attempts = self.retries + (count > 1)  # one more if the first attempt was for several rows
            # One by one, since the exception does not tell which rows failed.
            rows = [self._try_again(td[[row]], attempts) for row in range(count)]
            if self._answer is not None:
                self.complete(rows)
            return cat_rows(rows)
        self._answer = td.get("next")
        return td

    def complete(self, tds: Sequence[TensorDictBase]) -> None:
        """Gives rows whose env.step failed all entries of ``"next"`` that successful steps have.

        Raises  RolloutError if no env.step has succeeded: the setup is wrong, not a row
        """
        failed = [td for td in tds if td.get(_FAILED, None) is not None]
        if failed and self._answer is None and len(failed) == len(tds):
            count = sum(td.batch_size[0] for td in failed)
            raise caused_by(f"LLMCollector: env.step failed for all {count} conversations", str(self.first_error))
        for td in failed:
            next_td = td.get("next")
            for key, value in self._answer.items():
                if key not in next_td.keys():
                    next_td.set(key, _missing_row(value, td))
            td.set("next", next_td.select(*self._answer.keys()))
            td.pop(_FAILED)

    def _try_again(self, td: TensorDictBase, attempts: int) -> TensorDictBase:
        for _ in range(attempts):
            try:
                td = self.env.step(td)
            except Exception as error:
                self._keep(error)
            else:
                self._answer = td.get("next")
                return td
        with self._lock:
            self.counters["failed"] += 1
        yes = torch.ones(1, 1, dtype=torch.bool, device=td.device)
        # Truncated and not terminated: the conversation reached no end. Its reward is unknown: NaN.
        ended = {"done": yes, "terminated": ~yes, "truncated": yes.clone()}
        entries = {**next_prompt(td), **ended, "reward": torch.full((1, 1, 1), torch.nan, device=td.device)}
        td.set("next", new_tensordict(entries, td.batch_size, td.device))
        td.set(_FAILED, yes)
        return td

    def _keep(self, error: Exception) -> None:
        if self.first_error is None:
            from llmrl.loading import user_traceback

            self.first_error = user_traceback(error)


def rollout_lockstep(stepper: Stepper, root: TensorDictBase, stopped: threading.Event | None = None) -> TurnLog:
    """Runs conversations that take their turns together; finished ones leave the batch.

    Raises  ConversationsStopped after the turn in which ``stopped`` is set
    """
    log = TurnLog()
    slots = list(range(root.batch_size[0]))
    while slots:
        granted = stepper.claim(len(slots))
        if granted < len(slots):
            if not granted:
                break
            # The budget cuts off the last conversations.
            slots, root = slots[:granted], root[:granted]
        td = stepper.turn(root, len(log.turns) + 1, stopped)
        done = log.add(slots, td)
        alive = [row for row, is_done in enumerate(done) if not is_done]
        slots = [slots[row] for row in alive]
        if not alive:
            break
        root = stepper.env.step_mdp(td if len(alive) == len(done) else td[alive])
    stepper.complete([td for _, td in log.turns])
    return log


def rollout_concurrent(stepper: Stepper, root: TensorDictBase, *, concurrency: int) -> TurnLog:
    """Runs each conversation in its own thread, at most ``concurrency`` at a time.

    A long answer or a slow tool delays only its own conversation. The log lists the turns one conversation after
    another.
    """
    stopped = threading.Event()
    same_modes = _modes_of_this_thread()

    def run(slot: int) -> list[TensorDictBase]:
        with same_modes():
            return _converse(stepper, root[[slot]], stopped)[0]

    count = root.batch_size[0]
    with ThreadPoolExecutor(min(concurrency, count), thread_name_prefix="conversation") as pool:
        futures: list[Future[list[TensorDictBase]]] = [pool.submit(run, slot) for slot in range(count)]
        try:
            # Not `result()` one by one, which would report an error only after all earlier conversations have ended.
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:  # after an exception or Ctrl-C the other conversations end after their current turn
            stopped.set()
            for future in futures:
                future.cancel()
    error = next((e for f in futures if not f.cancelled() and (e := f.exception()) is not None), None)
    if error is not None:
        raise error
    log = TurnLog()
    for slot, future in enumerate(futures):
        for td in future.result():
            log.add([slot], td)
    stepper.complete([td for _, td in log.turns])
    return log


def _converse(stepper: Stepper, root: TensorDictBase, stopped: threading.Event) -> tuple[list[TensorDictBase], bool]:
    """The turns of one conversation [1], and True if it ended, False if it was cut off."""
    turns: list[TensorDictBase] = []
    while not stopped.is_set() and stepper.claim(1):
        td = stepper.turn(root, len(turns) + 1)
        turns.append(td)
        if bool(td.get("next").get("done")):
            return turns, True
        root = stepper.env.step_mdp(td)
    return turns, False


class ConversationStream:
    """Conversations that run continuously, each in its own thread: when one ends, another begins.

    begin   starts one conversation [1]; None at the end of the data
    width   number of concurrent conversations
    room    no new one begins while finished ones with at least this many turns wait to be taken
    """

    def __init__(self, stepper: Stepper, begin: Callable[[], TensorDictBase | None], *, width: int, room: int):
        self._stepper, self._begin, self._room = stepper, begin, room
        self._same_modes = _modes_of_this_thread()
        self._changed = threading.Condition()
        self._finished: list[list[TensorDictBase]] = []
        self._waiting = 0  # number of their turns
        self._running = width  # number of running threads
        self._stopped = threading.Event()
        self._error: BaseException | None = None
        names = [f"conversation-{number}" for number in range(width)]
        self._threads = [threading.Thread(target=self._run, name=name, daemon=True) for name in names]
        for thread in self._threads:
            thread.start()

    def take(self, num_turns: int) -> TurnLog | None:
        """Finished conversations with at least ``num_turns`` turns, in order of completion; fewer, or None, at the end
        of the data or the budget. Raises the first error of a conversation.
        """
        log, slot = TurnLog(), 0
        with self._changed:
            while log.num_turns < num_turns:
                self._changed.wait_for(lambda: self._finished or self._error or not self._running)
                if self._error is not None:
                    raise self._error
                if not self._finished:
                    break
                turns = self._finished.pop(0)
                self._waiting -= len(turns)
                for td in turns:
                    log.add([slot], td)
                slot += 1
                self._changed.notify_all()  # there may be room for another conversation
        if not slot:
            return None
        self._stepper.complete([td for _, td in log.turns])
        return log

    def stop(self, timeout: float) -> None:
        """Ends each conversation after its current turn, and waits until all have ended."""
        self._end(None)
        with self._changed:
            if not self._changed.wait_for(lambda: not self._running, timeout):
                raise DeadlineError(
                    f"LLMCollector: current turns must end within {timeout:g} s: {self._running} did not."
                )
        for thread in self._threads:  # they free tensors, which aborts a process that exits
            thread.join(timeout)

    def _run(self) -> None:
        try:
            with self._same_modes():
                while (root := self._next()) is not None:
                    turns, has_ended = _converse(self._stepper, root, self._stopped)
                    if has_ended:
                        with self._changed:
                            self._finished.append(turns)
                            self._waiting += len(turns)
                            self._changed.notify_all()
        except ConversationsStopped:
            pass
        except BaseException as error:  # `take` raises it
            self._end(error)
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def _next(self) -> TensorDictBase | None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopped.is_set() or self._waiting < self._room)
            # Under the lock, because the env may draw data in one thread at a time only.
            return None if self._stopped.is_set() else self._begin()

    def _end(self, error: BaseException | None) -> None:
        with self._changed:
            self._error = self._error or error
            self._stopped.set()
            self._changed.notify_all()


def _missing_row(value: Any, td: TensorDictBase) -> Any:
    """One row of an entry that the env failed to write: NaN, 0 or None."""
    if isinstance(value, LogProbs):
        [ids] = td.get(("tokens", "full"), as_list=True)
        return LogProbs.from_rows({"full": [torch.full((len(ids),), torch.nan)]})
    if isinstance(value, TensorDict):  # such as a tool transform's counts
        entries = {name: torch.zeros_like(inner[:1]) for name, inner in value.items()}
        return TensorDict(entries, batch_size=[1], device=value.device)
    if isinstance(value, Tensor):
        return torch.full_like(value[:1], torch.nan) if value.is_floating_point() else torch.zeros_like(value[:1])
    return column([None])


def _modes_of_this_thread() -> Callable[[], object]:
    """A context for other threads: no gradients, and this thread's autocast settings, which threads do not inherit."""
    settings = [
        (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        for kind in ("cpu", *(("cuda",) if torch.cuda.is_available() else ()))
    ]

    @contextmanager
    def modes() -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            for kind, dtype, enabled in settings:
                stack.enter_context(torch.autocast(kind, dtype, enabled=enabled))
            yield

    return modes
