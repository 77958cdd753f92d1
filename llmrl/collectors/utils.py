"""The documented import path of `split_trajectories`."""

from llmrl.data.trajectories import split_trajectories

__all__ = ["split_trajectories"]
