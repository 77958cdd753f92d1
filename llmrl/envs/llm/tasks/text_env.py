"""Text environments with ``reset`` and ``step``, in processes of their own: gymnasium, GEM (0.1), TextArena (0.7)."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from llmrl.concurrency.worker_process import WorkerProcess
from llmrl.envs.llm.options import keywords_of
from llmrl.envs.llm.tasks import text_env_process
from llmrl.envs.llm.tasks.episodes import EpisodeEnv
from llmrl.envs.llm.transforms.episodes import EpisodeTurns, Observed
from llmrl.errors import ConfigError, MissingDependencyError, RolloutError, WorkerError, check_at_least
from llmrl.package_envs import is_there, python_of
from llmrl.tools import Tool

_NUMBERS = itertools.count()
_GRACE_S = 1.0  # for a process that is late to be ended, before its episodes are given up


class TextEnv(EpisodeEnv):
    """Conversations with a text environment that ``factory`` makes: `turns` has the options.

    The policy's text is the action, an observation the user's next message.
    """

    NAME: ClassVar[str] = "text_env"
    FACTORY: ClassVar[str | None] = None  # of a package's environments, by env_id
    PACKAGE: ClassVar[tuple[str, str]] = ("", "")  # its name, and its version that was tried
    ALL: ClassVar[str | None] = None  # the argument "seat" of a game that the policy plays alone

    @classmethod
    def turns(
        cls,
        *,
        factory: str | None = None,
        env_id: str | None = None,
        arguments: Mapping[str, Any] | None = None,
        python: str | None = None,
        processes: int = 1,
        reward: str = "sum",
        start_timeout_s: float = 60.0,
        step_timeout_s: float = 60.0,
        max_chars: int = 16000,
        seats: Sequence[Any] | str | None = None,
    ) -> tuple[Sequence[Tool], EpisodeTurns]:
        """The transform that keeps the episodes.

        factory          "module:make", called with the ``arguments`` for each episode; or, of a package's, ``env_id``
        python           the interpreter of the processes: of an environment that has the package; None: that of
                         ``llmrl env install``, or else this one
        processes        in which the environments are; one that is late takes those in its process with it
        reward           "sum" or "last" of the rewards of an episode's steps
        start_timeout_s  seconds for the first observation; step_timeout_s: for each further one
        max_chars        of one observation; the middle of a longer one is cut, with a notice
        seats            of a game that the policy plays alone, which are those that are trained, or "all": not an
                         environment but an agent, `SelfPlayAgent`
        """
        if seats is not None:
            raise ConfigError(
                f"{cls.NAME}: seats: a game with itself is several conversations, which recipes play, of textarena and "
                "text_env."
            )
        make, close = cls.games(
            factory=factory,
            env_id=env_id,
            arguments=arguments,
            python=python,
            processes=processes,
            start_timeout_s=start_timeout_s,
            step_timeout_s=step_timeout_s,
        )
        late = {"start_timeout_s": start_timeout_s + _GRACE_S, "step_timeout_s": step_timeout_s + _GRACE_S}
        shared = {"reward": reward, "concurrency": processes, "max_chars": max_chars, "on_close": close}
        return [], EpisodeTurns(make, **shared, **late)

    @classmethod
    def games(
        cls,
        *,
        factory: str | None = None,
        env_id: str | None = None,
        arguments: Mapping[str, Any] | None = None,
        python: str | None = None,
        processes: int = 1,
        seats: Sequence[Any] | str | None = None,
        start_timeout_s: float = 60.0,
        step_timeout_s: float = 60.0,
    ) -> tuple[Callable[[], _Game], Callable[[], None]]:
        """What makes an episode, and what ends the processes; the arguments are those of `turns`."""
        given, other = (factory, env_id) if cls.FACTORY is None else (env_id, factory)
        if not isinstance(given, str) or other is not None or (cls.FACTORY is None and ":" not in given):
            form = "factory must be as my_games:make" if cls.FACTORY is None else "env_id must name an environment"
            raise ConfigError(f"{cls.NAME}: env.options.{form}: got {given if other is None else other!r}.")
        check_at_least(cls.NAME, 1, processes=processes)
        if seats is not None and (not seats or (isinstance(seats, str) and seats != "all")):
            raise ConfigError(f"{cls.NAME}: env.options.seats must be all, or a list of players: got {seats!r:.80}.")
        if seats is not None and (taken := sorted({"seat", "opponent"} & (arguments or {}).keys())):
            raise ConfigError(
                f"{cls.NAME}: with seats the policy plays all: leave out env.options.arguments.{taken[0]}."
            )
        if python is None and cls.FACTORY is not None and is_there(cls.NAME):
            python = str(python_of(cls.NAME))
        hosts = [_Host(python) for _ in range(processes)]
        named = {} if cls.FACTORY is None else {"env_id": env_id}
        named |= {} if seats is None or cls.ALL is None else {"seat": cls.ALL}
        game = {"factory": cls.FACTORY or factory, "arguments": {**named, **(arguments or {})}}
        places = itertools.count()

        def close() -> None:
            for host in hosts:
                host.close()

        return lambda: _Game(hosts[next(places) % processes], game, start_timeout_s, step_timeout_s), close

    @classmethod
    def about(cls, eval_split: str | None, *, at_once: int, python: str | None = None, **options: Any) -> str:
        """Starts one episode. Raises MissingDependencyError without the package, ConfigError if it cannot start."""
        make, close = cls.games(python=python, **keywords_of(cls.games, options))
        try:
            game, (name, tried) = make(), cls.PACKAGE
            version = game.version(name) if name else None
            if name and version is None:
                raise MissingDependencyError(
                    f"{cls.NAME}: {name} is not installed for {python or 'this Python'}: run llmrl env install "
                    f"{cls.NAME}, or name a Python that has it in env.options.python ({name} {tried} was tried).",
                    name=name,
                )
            try:
                first = game.start(seed=options.get("items_seed", 0))
            except RolloutError as error:
                raise ConfigError(f"{cls.NAME}: an episode must start: {error}") from error
            told = f"{name} {version} · {options['env_id']}" if name else options["factory"]
            count = options.get("processes", 1)
            return f"{told} · {count} process{'es' * (count > 1)} · begins {first.text[:60]!r}"
        finally:
            close()


class GEMEnv(TextEnv):
    """Conversations with an environment of GEM, whose ``arguments`` are those of ``gem.make``."""

    NAME, FACTORY, PACKAGE = "gem", "gem:make", ("gem-llm", "0.1.0")


class TextArenaEnv(TextEnv):
    """Conversations with a game of TextArena, whose ``arguments`` are those of `textarena_game.Game`."""

    NAME, FACTORY, PACKAGE = "textarena", "llmrl.envs.llm.tasks.textarena_game:Game", ("textarena", "0.7.4")
    ALL = "all"


class _Host:
    """One process, which is started when it is first asked, and again after it was lost."""

    def __init__(self, python: str | None):
        self._python = None if python is None else str(Path(python).expanduser())
        self._lock = threading.Lock()
        self._worker: WorkerProcess | None = None
        self.life = 0  # counts the processes: their environments are lost with them

    def ask(self, kind: str, number: int, given: Any, timeout_s: float, life: int | None = None) -> Any:
        end = time.monotonic() + timeout_s
        if not self._lock.acquire(timeout=timeout_s):
            raise RolloutError(f"text_env: the process was busy for {timeout_s:g} s.")
        try:
            if life is not None and life != self.life:
                raise WorkerError("text_env: the process of this environment was lost.")
            if self._worker is None:
                try:
                    self._worker = WorkerProcess(
                        [text_env_process.__file__], who="text_env", quiet=True, python=self._python
                    )
                except (FileNotFoundError, PermissionError) as error:
                    raise ConfigError(f"text_env: env.options.python: {self._python}: {error}.") from error
                self.life += 1
            try:
                (answer,) = self._worker.ask((kind, number, given), max(0.1, end - time.monotonic()))
            except BaseException:
                self._worker.stop()
                self._worker = None
                raise
        finally:
            self._lock.release()
        if isinstance(answer, dict) and "failed" in answer:
            raise RolloutError(answer["failed"])
        return answer

    def close(self) -> None:
        with self._lock:
            worker, self._worker = self._worker, None
            self.life += 1
        if worker is not None:
            worker.stop()


class _Game:
    """An `Episode` in the process of a host."""

    def __init__(self, host: _Host, game: Mapping[str, Any], start_timeout_s: float, step_timeout_s: float):
        self._host, self._game = host, game
        self._start_timeout_s, self._step_timeout_s = start_timeout_s, step_timeout_s
        self._number, self._life = next(_NUMBERS), math.inf

    def version(self, package: str) -> str | None:
        return self._host.ask("version", self._number, package, self._start_timeout_s)

    def start(self, **row: Any) -> Observed:
        seen = self._host.ask("start", self._number, {**self._game, "row": row}, self._start_timeout_s)
        self._life = self._host.life
        return Observed(**seen)

    def step(self, text: str) -> Observed:
        return Observed(**self._host.ask("step", self._number, text, self._step_timeout_s, self._life))

    def close(self) -> None:
        if self._life == self._host.life:
            self._host.ask("close", self._number, None, self._step_timeout_s, self._life)
