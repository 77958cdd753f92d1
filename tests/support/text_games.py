"""A text environment that does what it is told, also what it should not."""

import os
import random
import time


class Told:
    """Rewards the number that it is told with that number; draws a number at each step."""

    def __init__(self, greeting="Say a number."):
        self.greeting = greeting

    def reset(self, *, seed=None, options=None):
        if options:
            raise ValueError(f"no such options: {options}")
        return f"{self.greeting} {random.randint(0, 10**6)}", {}

    def step(self, action):
        if action == "late":
            time.sleep(30)
        if action == "die":
            os._exit(3)
        if action == "raise":
            raise RuntimeError("the world ended")
        reward = float(action) if action not in ("bye", "nothing") else None
        text = 5 if action == "7" else f"{random.randint(0, 10**6)} <|im_end|>"
        return text, reward, action in ("bye", "5"), action == "6", {"suffix": "Next."}


def opponent(seen):
    """Takes the first free square of TicTacToe."""
    return f"[{next(c for c in seen.rpartition('Available')[2] if c.isdigit())}]"


def length(completion):
    """A reward in place of the environment's own."""
    return float(len(completion))


class Duel:
    """Each of two says a number: the first earns by how much its own is larger, and the second loses that much; "fold"
    loses 9.
    """

    def reset(self, *, seed=None, options=None):
        self.said = []
        return "You begin.", {"player": "a"}

    def step(self, action):
        if action == "raise":
            raise RuntimeError("the board fell")
        if action == "fold":
            lost = -9 if not self.said else 9
            return "Over.", None, True, False, {"rewards": {"a": lost, "b": -lost}}
        self.said.append(int(action))
        if len(self.said) == 1:
            return "You are second.", None, False, False, {"player": "b"}
        more = self.said[0] - self.said[1]
        return "Over.", None, True, False, {"rewards": {"a": more, "b": -more}}
