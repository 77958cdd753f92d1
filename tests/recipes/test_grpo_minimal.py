"""The loop of 40 lines: it runs as a file, and what it prints is a reward that rises."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from llmrl.recipes import grpo_minimal


@pytest.mark.slow
def test_the_reward_of_the_minimal_loop_rises_to_nearly_all_there_is():
    done = subprocess.run([sys.executable, Path(grpo_minimal.__file__)], capture_output=True, text=True, check=True)
    rewards = [float(value) for value in re.findall(r"^step +\d+  reward ([\d.]+)$", done.stdout, re.M)]
    assert len(rewards) == 20
    assert rewards[0] < 0.1
    assert min(rewards[-3:]) > 0.8
