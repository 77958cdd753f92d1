"""A local Ray cluster of two CPUs for the tests of a module."""

from __future__ import annotations

import warnings

import pytest

__all__ = ["cluster"]


@pytest.fixture(scope="module")
def cluster():
    ray = pytest.importorskip("ray")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Ray's start, which is not ours
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()
