"""The settings of a curriculum: pools of prompts, by the rewards of their last groups, and how often each is drawn."""

from __future__ import annotations

from pydantic import Field, model_validator

from llmrl.settings import Settings

UNSEEN = "unseen"  # prompts without a reward so far: their weight is 1


class PoolSettings(Settings):
    """The prompts whose mean reward lies within the bounds; without any, those that are in no other pool."""

    above: float | None = Field(None, description="a mean reward of more than this")
    below: float | None = Field(None, description="a mean reward of less than this")
    weight: float = Field(
        1.0, ge=0.02, le=10, description="chance of each of its prompts, in proportion to that of others; unseen: 1"
    )

    @property
    def takes_the_rest(self) -> bool:
        return self.above is None and self.below is None

    def takes(self, mean: float) -> bool:
        return (self.above is None or mean > self.above) and (self.below is None or mean < self.below)

    @property
    def label(self) -> str:
        bounds = [f"{word} {bound:g}" for word in ("above", "below") if (bound := getattr(self, word)) is not None]
        return f"{' and '.join(bounds) or 'all others'}, weight {self.weight:g}"


class LevelSettings(Settings):
    """Prompts of one level at a time, and few of easier ones; the level goes up and down by its groups' rewards."""

    column: str = Field("level", description="column of the data with the level of a prompt, a number")
    above: float = Field(0.8, description="a mean reward of more than this: the next level")
    below: float = Field(
        0.05, description="a mean reward of less than this: the level before; one of 0.1 still teaches"
    )
    window: int = Field(16, ge=1, description="groups of the level whose mean reward counts, the last ones")
    easier: float = Field(
        0.1, ge=0.02, le=1, description="chance of a prompt of an easier level, in proportion to those of the level"
    )

    @property
    def label(self) -> str:
        return (
            f"one level of {self.column!r} at a time, the next above a mean reward of {self.above:g} over the last "
            f"{self.window} groups, the one before below {self.below:g}; easier ones with weight {self.easier:g}"
        )

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> LevelSettings:
        if self.below >= self.above:
            raise ValueError(f"curriculum.levels: below must be less than above: got {self.below:g}, {self.above:g}")
        return self


class CurriculumSettings(Settings):
    """Pools of prompts by the mean reward of their last groups; a prompt is of the first pool that takes it."""

    pools: dict[str, PoolSettings] = Field(
        {
            "easy": PoolSettings(above=0.9, weight=0.1),
            "medium": PoolSettings(),
            "hard": PoolSettings(below=0.1, weight=0.2),
        },
        description="by name: {easy: {above: 0.9, weight: 0.1}, medium: {}, hard: {below: 0.1, weight: 0.2}}",
    )
    window: int = Field(4, ge=1, description="groups of a prompt whose mean reward counts, the last ones")

    levels: LevelSettings | None = Field(
        None, description="of difficulty, one after the other: {above: 0.8, below: 0.05, window: 16}; null: all at once"
    )

    @model_validator(mode="after")
    def _pools_take_every_prompt_once(self) -> CurriculumSettings:
        rest = [name for name, pool in self.pools.items() if pool.takes_the_rest]
        if len(rest) != 1:
            named = f"got {' and '.join(rest)}" if rest else "none does"
            raise ValueError(f"curriculum.pools: one pool must have neither above nor below, for the rest: {named}")
        for name, pool in self.pools.items():
            if name == UNSEEN or not name.replace("-", "_").isidentifier():
                raise ValueError(f"curriculum.pools: a pool must be named by a word other than {UNSEEN}: got {name!r}")
            if None not in (pool.above, pool.below) and pool.above >= pool.below:
                raise ValueError(
                    f"curriculum.pools.{name}: above must be less than below: got {pool.above:g}, {pool.below:g}"
                )
        return self

    @property
    def names(self) -> list[str]:
        """The pools in the order in which they are asked: the one for the rest is last."""
        return sorted(self.pools, key=lambda name: self.pools[name].takes_the_rest)

    def pool_of(self, mean: float) -> str:
        """The pool of a prompt with this mean reward.

        >>> [CurriculumSettings().pool_of(mean) for mean in (0.0, 0.1, 0.9, 0.95)]
        ['hard', 'medium', 'medium', 'easy']
        """
        return next(name for name in self.names if self.pools[name].takes(mean))
