"""The tiny tokenizer and model, and the vLLM server that tests of several files share: starting one takes long."""

import pytest

from llmrl.modules.llm.engines.vllm.compat import EXTENSION
from llmrl.testing import tiny_model, tiny_tokenizer
from tests.support.vllm import serving


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
    """A server in one process, which starts faster than vLLM's two."""
    arguments = ("--logprobs-mode", "processed_logprobs", "--worker-extension-cls", EXTENSION)
    arguments += ("--distributed-executor-backend", "uni")
    environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    with serving(served_folder, *arguments, **environment) as server:
        yield server


@pytest.fixture
def vllm_server(session_server):
    """The server, alive whatever the test before did to it."""
    if session_server.process.poll() is not None:
        session_server.kill()
        session_server.start()
    return session_server
