"""A process that saves in a loop is killed at random moments: what lies on the disk always loads."""

import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest

from llmrl.data.replay_buffers import LazyTensorStorage, ReplayBuffer
from llmrl.data.replay_buffers.checkpointers import FlatStorageCheckpointer
from llmrl.data.replay_buffers.directory import current_directory

# For every number on stdin: forks a child, which saves the rows number + 1, number + 2, ... until it is killed.
SAVER = """
import os, sys, torch
from tensordict import TensorDict
from llmrl.data.replay_buffers import LazyTensorStorage, ReplayBuffer
from llmrl.data.replay_buffers.checkpointers import FlatStorageCheckpointer

def save(path, number):
    buffer = ReplayBuffer(storage=LazyTensorStorage(64))
    buffer.storage.checkpointer = FlatStorageCheckpointer()
    step = torch.arange(64)
    while True:
        number += 1
        now, then = (torch.stack([torch.full((64,), number), t], -1) for t in (step, step + 1))
        following = TensorDict(obs=then, done=torch.zeros(64, 1, dtype=torch.bool), batch_size=[64])
        buffer.extend(TensorDict(obs=now, next=following, batch_size=[64]))
        buffer.dumps(path)
        os.write(1, f"saved {number}\\n".encode())

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        save(sys.argv[1], int(line))
    os.write(1, f"child {child}\\n".encode())
    os.waitpid(child, 0)
    os.write(1, b"dead 0\\n")
"""


@pytest.mark.slow
def test_a_buffer_that_is_killed_in_mid_save_50_times_always_loads(tmp_path):
    chance = random.Random(0)
    path = tmp_path / "buffer"
    process = subprocess.Popen(
        [sys.executable, "-c", SAVER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    deadline = threading.Timer(300, process.kill)
    deadline.start()
    cut_short, saved = 0, 0
    try:
        for _ in range(50):
            print(saved, file=process.stdin, flush=True)
            child = None
            first = saved
            while child is None or saved == first:
                word, number = process.stdout.readline().split()
                child = int(number) if word == "child" else child
                saved = int(number) if word == "saved" else saved
            time.sleep(chance.uniform(0, 0.1))
            os.kill(child, signal.SIGKILL)
            while (word := (line := process.stdout.readline().split())[0]) != "dead":
                saved = int(line[1]) if word == "saved" else saved
            cut_short += any(".draft" in entry.name for entry in path.iterdir())

            buffer = ReplayBuffer(storage=LazyTensorStorage(64))
            buffer.storage.checkpointer = FlatStorageCheckpointer()
            buffer.loads(path)
            found = buffer[:]["obs"][:, 0].unique().tolist()
            assert found in ([saved], [saved + 1])  # the rows of one save: the last that was reported, or the next
            assert buffer[:]["next", "obs"][:, 1].tolist() == list(range(1, 65))
            saved = found[0]
    finally:
        deadline.cancel()
        process.kill()
        process.communicate()
    assert cut_short > 10  # most kills come in the middle of a save
    assert current_directory(path).name.startswith("checkpoint.")
