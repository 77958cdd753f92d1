"""A batch of conversations run to their ends: all in lockstep, or each in a thread of its own.

Both take the same turns (`Stepper`): the policy samples, the env steps, a limit may truncate, a failing env is tried
again and then given up on.
"""

from __future__ import annotations

import threading
import traceback
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
from llmrl.errors import ConfigError, DeadlineError, MissingKeyError, RolloutError, ShapeError
from llmrl.modules.llm.policies.containers import LogProbs, mark_turn, mark_whole_record

Policy = Callable[[TensorDictBase], TensorDictBase]
_FAILED = "_failed_rollout"


class ConversationsStopped(Exception):
    """Raised in conversations that are stopped from outside: they have no result."""


@dataclass
class TurnLog:
    """Turns of a batch of conversations, in the order in which they were taken.

    turns         (slots, td): which conversations, and their turn, td [len(slots)] with "next"
    last_turn_of  slot -> (turn, row) of its last turn; a conversation that was cut off has none
    """

    turns: list[tuple[list[int], TensorDictBase]] = field(default_factory=list)
    last_turn_of: dict[int, tuple[int, int]] = field(default_factory=dict)

    def add(self, slots: list[int], td: TensorDictBase) -> list[bool]:
        """Adds a turn; returns for each of its conversations whether it is done."""
        done = td.get("next").get("done").view(-1).tolist()
        self.last_turn_of.update((slot, (len(self.turns), row)) for row, slot in enumerate(slots) if done[row])
        self.turns.append((slots, td))
        return done

    @property
    def num_turns(self) -> int:
        return sum(len(slots) for slots, _ in self.turns)

    def turns_of(self) -> dict[int, list[tuple[int, int]]]:
        """The (turn, row)s of every finished conversation, conversations in the order in which they were started."""
        found: dict[int, list[tuple[int, int]]] = {slot: [] for slot in sorted(self.last_turn_of)}
        for turn, (slots, _) in enumerate(self.turns):
            for row, slot in enumerate(slots):
                if slot in found:
                    found[slot].append((turn, row))
        return found

    def rows(self, *, last_only: bool) -> TensorDictBase | None:
        """The turns of finished conversations, conversation after conversation; None if none has finished.

        last_only  of each training record its last turn alone; the row where the conversation ended has the sum of its
                   rewards, those before it 0
        """
        begins = [None if (column := td.get("new_record", None)) is None else column.tolist() for _, td in self.turns]
        wanted = [
            where
            for turns in self.turns_of().values()
            for where in (_ends_of_records(turns, begins) if last_only else turns)
        ]
        if not wanted:
            return None
        # Rows are cut out turn by turn, once for each turn, and brought into the order of conversations at the end.
        rows_of: dict[int, list[int]] = {}
        for turn, row in sorted(wanted):
            rows_of.setdefault(turn, []).append(row)
        returns = self._returns() if last_only else None
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
        return data if order == list(range(len(order))) else data[order]

    def _returns(self) -> Tensor | None:
        """The sums of the rewards of each conversation, by its slot; None if no conversation has several turns."""
        taken = [slot for slots, _ in self.turns for slot in slots]
        if len(set(taken)) == len(taken):
            return None  # the rewards stay as they are, which may be ragged
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
    """Of the (turn, row)s of one conversation the last one, and each one that is followed by a new record."""
    new = [begins[turn] is not None and begins[turn][row] for turn, row in turns[1:]]
    return [where for where, last in zip(turns, [*new, True], strict=True) if last]


def _end_of_record(next_td: TensorDictBase, returns: Tensor | None) -> TensorDictBase:
    """``next`` without the entries of the row itself; the reward is the return where the conversation ended, else 0."""
    # The row itself has them up to its last turn; those of the next one belong to the record that follows.
    next_td = next_td.exclude("history", "text", "tokens", "masks", "log_probs")
    if returns is not None:
        done = next_td.get("done").view(-1, *[1] * (returns.ndim - 1))
        next_td.set("reward", returns.masked_fill(~done, 0.0))
    return next_td


class Stepper:
    """Takes turns in ``env`` with ``policy``, within a budget of turns.

    max_turns  a conversation with as many is truncated; None: no limit
    budget     of turns over all conversations; -1: none
    retries    None: an exception of the env is raised. Else the rows that it fails for are tried again, one by one, so
               many times, and then end with a reward of NaN. Exceptions of the policy are always raised
    counters   "produced" and "failed" are counted here
    background a turn is one of its steps; none begins once it is stopped
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
        self._answer: TensorDictBase | None = None  # an answer of the env: what else a failed one has to have
        self._lock = threading.Lock()

    def claim(self, wanted: int) -> int:
        """The number of ``wanted`` turns that the budget still allows; they count as produced from here on."""
        with self._lock:
            # Claimed before the turn is taken: threads that asked at the same time would overdraw the budget.
            granted = wanted if self.budget < 0 else max(0, min(wanted, self.budget - self.counters["produced"]))
            self.counters["produced"] += granted
            return granted

    def turn(
        self, root: TensorDictBase, number: int | Tensor, stopped: threading.Event | None = None
    ) -> TensorDictBase:
        """Turn ``number`` (from 1; int64[B] if the conversations are not in the same one), truncated at the limit."""
        with self.background.step():
            td = self._turn(root, (self.background.stopped, stopped or self.background.stopped))
        if self.max_turns is not None:
            next_td = td.get("next")
            done = next_td.get("done")
            cut = torch.as_tensor(number >= self.max_turns, device=done.device).view(-1, 1)
            next_td.set("truncated", next_td.get("truncated") | (cut & ~done))  # not if it has ended by itself
            next_td.set("done", done | cut)
        return td

    def _turn(self, root: TensorDictBase, stops: Sequence[threading.Event]) -> TensorDictBase:
        if stops[0].is_set():
            raise ConversationsStopped
        td = self.policy(root)
        # Again after the policy: an engine that was interrupted has returned an answer that is not whole.
        if any(stop.is_set() for stop in stops):
            raise ConversationsStopped
        mark_turn(td)
        try:
            td = self.env.step(td)
        except (ConfigError, MissingKeyError, ShapeError):  # a mistake in the setup: it would fail for all rows
            raise
        except Exception:  # the boundary to the user's env, tools and rewards
            if self.retries is None:
                raise
            self._keep(traceback.format_exc())
            count = td.batch_size[0]
            attempts = self.retries + (count > 1)  # alone, a row has not been tried yet
            # One by one, since the exception does not tell which rows it was raised for.
            rows = [self._try_again(td[[row]], attempts) for row in range(count)]
            if self._answer is not None:
                self.complete(rows)
            return cat_rows(rows)
        self._answer = td.get("next")
        return td

    def complete(self, tds: Sequence[TensorDictBase]) -> None:
        """Fills in, for rows where env.step failed, the entries of ``"next"`` that its answers have.

        Raises  RolloutError if it has never taken a step: the setup is at fault, not a row
        """
        failed = [td for td in tds if td.get(_FAILED, None) is not None]
        if failed and self._answer is None and len(failed) == len(tds):
            raise RolloutError(
                f"LLMCollector: env.step failed for all {sum(td.batch_size[0] for td in failed)} conversations. First "
                f"error:\n{self.first_error}"
            )
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
            except Exception:
                self._keep(traceback.format_exc())
            else:
                self._answer = td.get("next")
                return td
        with self._lock:
            self.counters["failed"] += 1
        yes = torch.ones(1, 1, dtype=torch.bool, device=td.device)
        ended = {"done": yes, "terminated": ~yes, "truncated": yes.clone()}
        entries = {**next_prompt(td), **ended, "reward": torch.full((1, 1, 1), torch.nan, device=td.device)}
        td.set("next", new_tensordict(entries, td.batch_size, td.device))
        td.set(_FAILED, yes)
        return td

    def _keep(self, text: str) -> None:
        if self.first_error is None:
            self.first_error = text


def rollout_lockstep(stepper: Stepper, root: TensorDictBase, stopped: threading.Event | None = None) -> TurnLog:
    """All conversations take their turns together; the ones that are done leave the batch.

    Raises  ConversationsStopped after the turn in which ``stopped`` is set
    """
    log = TurnLog()
    slots = list(range(root.batch_size[0]))
    while slots:
        granted = stepper.claim(len(slots))
        if granted < len(slots):
            if not granted:
                break
            # The budget cuts off the conversations that were started last.
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
    """Each conversation takes its turns in a thread of its own, at most ``concurrency`` at a time.

    A long answer or a slow tool delays its own conversation only. The turns are handed out conversation after
    conversation, as if they had been taken in that order.
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
            # Not `result()` in turn, which would notice an error of the last one only when all before it have ended.
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:  # an exception, also Ctrl-C: the others end with the turn that they are in
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
    """The turns of one conversation [1], and True where it has ended rather than been cut off."""
    turns: list[TensorDictBase] = []
    while not stopped.is_set() and stepper.claim(1):
        td = stepper.turn(root, len(turns) + 1)
        turns.append(td)
        if bool(td.get("next").get("done")):
            return turns, True
        root = stepper.env.step_mdp(td)
    return turns, False


class ConversationStream:
    """Conversations that run all the time, each in a thread of its own: where one ends another begins.

    begin   draws one conversation [1]; None if the data have ended
    width   of them at a time
    room    no other begins while finished ones of so many turns wait to be taken
    """

    def __init__(self, stepper: Stepper, begin: Callable[[], TensorDictBase | None], *, width: int, room: int):
        self._stepper, self._begin, self._room = stepper, begin, room
        self._same_modes = _modes_of_this_thread()
        self._changed = threading.Condition()
        self._finished: list[list[TensorDictBase]] = []
        self._waiting = 0  # turns in them
        self._running = width  # threads
        self._stopped = threading.Event()
        self._error: BaseException | None = None
        for number in range(width):
            threading.Thread(target=self._run, name=f"conversation-{number}", daemon=True).start()

    def take(self, num_turns: int) -> TurnLog | None:
        """Finished conversations of at least so many turns, in the order of their ends; fewer, or None, at the end of
        the data or the budget. Raises what a conversation raised.
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
                self._changed.notify_all()
        if not slot:
            return None
        self._stepper.complete([td for _, td in log.turns])
        return log

    def stop(self, timeout: float) -> None:
        """Ends each conversation after the turn under way, and returns when all have ended."""
        self._end(None)
        with self._changed:
            if not self._changed.wait_for(lambda: not self._running, timeout):
                raise DeadlineError(
                    f"LLMCollector: the turns under way must end within {timeout:g} s: {self._running} did not."
                )

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
        except BaseException as error:  # raised when conversations are taken
            self._end(error)
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def _next(self) -> TensorDictBase | None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopped.is_set() or self._waiting < self._room)
            # Under the lock: the env draws data in one thread at a time.
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
    if isinstance(value, TensorDict):  # as a tool transform's counts
        entries = {name: torch.zeros_like(inner[:1]) for name, inner in value.items()}
        return TensorDict(entries, batch_size=[1], device=value.device)
    if isinstance(value, Tensor):
        return torch.full_like(value[:1], torch.nan) if value.is_floating_point() else torch.zeros_like(value[:1])
    return column([None])


def _modes_of_this_thread() -> Callable[[], object]:
    """Gradients are off and autocast is as it is here: both are settings of a thread, and threads begin without."""
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
