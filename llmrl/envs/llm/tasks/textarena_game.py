"""A game of TextArena (tried with 0.7.4) from one seat or all, as an environment with reset and step on text."""

from __future__ import annotations

from typing import Any

from llmrl.loading import load_function


class Game:
    """``textarena.make(env_id, **options)``; in the other seats plays ``opponent``.

    seat      number of the policy's player; "any": by the seed, each in turn; "all": every player
    players   their number; None: 1 without an opponent, else 2
    opponent  "module:name" of a function from what a player sees to its action
    """

    def __init__(
        self,
        env_id: str,
        *,
        opponent: str | None = None,
        seat: int | str = "any",
        players: int | None = None,
        **options: Any,
    ):
        import textarena

        self._env = textarena.make(env_id, **options)
        self._play = None if opponent is None else load_function(opponent, what="opponent")
        self._players = players or (1 if opponent is None and seat != "all" else 2)
        self._seat = seat
        if self._players > 1 and self._play is None and seat != "all":
            raise ValueError(f"{env_id} with {self._players} players needs an opponent: my_module:function")

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self._env.reset(num_players=self._players, seed=seed)
        self._mine = {"any": [(seed or 0) % self._players], "all": range(self._players)}.get(self._seat, [self._seat])
        self._seen = dict.fromkeys(self._mine, "")
        text, *_, info = self._until_mine(False)
        return text, info

    def step(self, action: str) -> tuple[str, float | None, bool, bool, dict[str, Any]]:
        done, _ = self._env.step(action)
        return self._until_mine(done)

    def _until_mine(self, done: bool) -> tuple[str, float | None, bool, bool, dict[str, Any]]:
        while not done:
            player, seen = self._env.get_observation()
            if player in self._mine:
                # Most games show all that happened, of which the player has read the beginning.
                text, self._seen[player] = seen.removeprefix(self._seen[player]).lstrip("\n"), seen
                return text, None, False, False, {"player": player}
            done, _ = self._env.step(self._play(seen))
        rewards, _ = self._env.close()
        return "The game is over.", float(rewards[self._mine[0]]), True, False, {"rewards": rewards}
