"""The tiny tokenizer and model, and the vLLM server that tests of several files share: starting one takes long."""

import pytest

from llmrl.testing import tiny_model, tiny_tokenizer
from tests.support.vllm import serving_in_one_process


@pytest.fixture(scope="session")
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer):
    return tiny_model(tokenizer, hidden_size=32, heads=1)  # vLLM on a CPU needs heads of at least 32


@pytest.fixture(scope="session")
def served_folder(tmp_path_factory):
    """The folder of a model with a tied head, and its tokenizer."""
    folder, tokenizer = tmp_path_factory.mktemp("served"), tiny_tokenizer()
    tiny_model(tokenizer, architecture="gemma", heads=2).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def session_server(served_folder):
    with serving_in_one_process(served_folder) as server:
        yield server


@pytest.fixture
def vllm_server(session_server):
    """The server, alive whatever the test before did to it."""
    if session_server.process.poll() is not None:
        session_server.kill()
        session_server.start()
    return session_server
