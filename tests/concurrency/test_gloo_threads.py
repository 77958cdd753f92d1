"""The wait for gloo's threads finds them, by the name that torch gives them."""

from datetime import timedelta

import torch
import torch.distributed as dist

from llmrl.concurrency.gloo_threads import _gloo_threads, wait_for_gloo_threads
from tests.support.processes import wait_until


def test_threads_of_a_group_sleep_after_the_wait():
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=20))
    group.allreduce([torch.ones(1000)]).wait()
    wait_for_gloo_threads()
    assert _gloo_threads()
    wait_until(lambda: {state[0] for state, *_ in _gloo_threads().values()} == {"S"}, 60)  # another test's may run
