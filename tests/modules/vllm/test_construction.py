"""What is decided before an engine runs: versions, arguments, servers that are none. Needs no vLLM."""

from __future__ import annotations

import inspect
import os
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import pytest
import torch

from llmrl.errors import ConfigError, DeadlineError, MissingDependencyError, RolloutError
from llmrl.modules.llm import vLLMWrapper
from llmrl.modules.llm.engines import SamplingParams, StopReason, VLLMEngine
from llmrl.modules.llm.engines.vllm import adapter
from llmrl.modules.llm.engines.vllm.process_isolation import environment
from llmrl.testing import tiny_model, tiny_tokenizer


def some_vllm(**changes):
    """A package with the interface that is looked for."""

    class LLM:
        def generate(self, prompts, sampling_params=None, *, use_tqdm=True): ...
        def collective_rpc(self, method, timeout=None, args=(), kwargs=None): ...
        def reset_prefix_cache(self): ...

    arguments = "logprobs_mode worker_extension_cls enforce_eager kv_cache_memory_bytes max_model_len"
    options = (
        "max_tokens temperature top_p top_k min_p repetition_penalty seed stop stop_token_ids ignore_eos logprobs "
    )
    options += "prompt_logprobs flat_logprobs detokenize skip_special_tokens output_kind"
    return SimpleNamespace(**{"LLM": LLM, "EngineArgs": taking(arguments), "SamplingParams": taking(options)} | changes)


def taking(names):
    """Something that is called with arguments of these names."""
    kinds = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names.split()]

    def called(**arguments): ...

    called.__signature__ = inspect.Signature(kinds)
    return called


def test_a_version_is_accepted_for_what_it_has():
    assert adapter.missing_capabilities(some_vllm()) == []


def test_what_a_version_lacks_is_named():
    class OldLLM:
        def generate(self, prompts, sampling_params): ...
        def reset_prefix_cache(self): ...

    missing = adapter.missing_capabilities(some_vllm(LLM=OldLLM, EngineArgs=lambda logprobs_mode: None))
    assert missing[:2] == ["LLM.generate(use_tqdm=)", "LLM.collective_rpc"]
    assert "EngineArgs(worker_extension_cls=)" in missing
    assert "EngineArgs(logprobs_mode=)" not in missing


def test_a_version_outside_is_an_error_with_the_table(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.9.0"))
    with pytest.raises(MissingDependencyError, match=r"vllm 0.9.0 lacks: LLM.generate, (?s:.*)0.32 +tried, all of it"):
        adapter.load_vllm()


def test_a_version_whose_inside_is_another_is_an_error_with_the_table(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("vllm.")]:
        monkeypatch.delitem(sys.modules, name)  # parts of the real one, if a test before imported them
    monkeypatch.setitem(sys.modules, "vllm", some_vllm(__version__="0.31"))
    with pytest.raises(MissingDependencyError, match=r"0\.31 lacks: vllm\.model_executor\.(?s:.*)0\.32 +tried, all of"):
        adapter.load_vllm()


@pytest.mark.vllm
def test_the_installed_version_has_all_that_is_looked_for():
    assert adapter.missing_capabilities(adapter.load_vllm(own_process=True), own_process=True) == []


@pytest.mark.vllm
@pytest.mark.parametrize("own_process", [False, True], ids=["here", "own process"])
def test_heads_that_vllm_cannot_compute_on_a_cpu_are_refused_before_anything_starts(own_process):
    if torch.cuda.is_available():
        pytest.skip("a GPU computes heads of any size")
    model = tiny_model(tiny_tokenizer(), hidden_size=64, heads=4)
    with pytest.raises(ConfigError, match=r"size of the model's heads: got 16, expected one of 32, 64, .*head_dim"):
        VLLMEngine(model, own_process=own_process, max_model_len=128)


QUIET = """
import torch
from llmrl.modules.llm.engines import SamplingParams, VLLMEngine
from llmrl.testing import tiny_model, tiny_tokenizer

if __name__ == "__main__":
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer, heads=2)
    for own_process in (True, False):
        engine = VLLMEngine(model, tokenizer=tokenizer, own_process=own_process, max_model_len=128)
        engine.generate([torch.tensor([1, 2, 3])], SamplingParams(max_new_tokens=4))
        engine.update_weights(model.state_dict(), version=1)
        engine.close()
    print("done")
"""


@pytest.mark.vllm
@pytest.mark.slow
def test_an_engine_that_works_says_nothing(tmp_path):
    """Neither do vLLM's processes: no warnings, no log lines, no progress bars."""
    script = tmp_path / "quiet.py"
    script.write_text(QUIET)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "PYTHON"))}
    run = subprocess.run([sys.executable, script], env=kept, capture_output=True, text=True, timeout=400)
    assert (run.returncode, run.stdout, run.stderr) == (0, "done\n", "")


def test_a_missing_vllm_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ImportError):
        adapter.load_vllm()


def test_the_environment_is_put_back_and_what_the_user_set_stays(monkeypatch):
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    before = dict(os.environ)
    with environment(SOMETHING="1"):
        assert os.environ["VLLM_LOGGING_LEVEL"] == "INFO"
        assert os.environ["SOMETHING"] == "1"
        os.environ["LEFT_BEHIND"] = "x"
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("finish", "cause", "reason"),
    [
        ("stop", 7, StopReason.EOS),
        ("stop", None, StopReason.EOS),
        ("stop", "END", StopReason.STOP_STRING),
        ("length", None, StopReason.LENGTH),
        ("abort", None, StopReason.ABORT),
    ],
)
def test_finish_reasons(finish, cause, reason):
    assert adapter.stop_reason(finish, cause, [5, 6], [7]) is reason


def test_a_stop_id_whose_text_holds_a_stop_string_is_a_natural_end():
    assert adapter.stop_reason("stop", "im_end", [5, 7], [7]) is StopReason.EOS
    assert adapter.stop_reason("length", None, [5, 7], [7]) is StopReason.LENGTH


@pytest.mark.parametrize("finish", ["error", "repetition", None])
def test_another_end_is_no_response(finish):
    with pytest.raises(RolloutError, match="must end by stop, length or abort"):
        adapter.stop_reason(finish, None, [5], [7])


def test_greedy_requests_are_not_truncated_and_repeated_stop_ids_are_sent_once():
    options = adapter.request(SamplingParams(temperature=0.0, top_k=5, stop_token_ids=(3, 2)), stop_token_ids=(2, 9))
    assert (options["temperature"], options["top_k"], options["stop_token_ids"]) == (0.0, 0, [2, 9, 3])


def test_what_is_no_model_is_refused():
    with pytest.raises(ConfigError, match=r"must be a folder or hub name.*got dict"):
        VLLMEngine({})
    with pytest.raises(ConfigError, match="max_model_len can only be set where the engine is built"):
        VLLMEngine("http://localhost:1", max_model_len=5)
    with pytest.raises(ConfigError, match="device is decided by vLLM"):
        vLLMWrapper("anything", tokenizer=tiny_tokenizer(), device="cpu")


def test_wrong_settings_are_refused_before_an_engine_is_built():
    """Regression: the engine of a wrapper that could not be made stayed open."""
    with pytest.raises(ConfigError, match="min_batch_size must not exceed max_batch_size"):
        vLLMWrapper("no/such/model", tokenizer=tiny_tokenizer(), min_batch_size=3, max_batch_size=2)


# --- servers that are none --------------------------------------------------------------------------------------------


def test_a_server_that_is_not_there_is_named():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(RolloutError, match=f"{url}/v1/models must be reachable"):
        VLLMEngine(url)


def test_a_server_that_does_not_answer_ends_in_the_deadline():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(DeadlineError, match=r"must answer within 0\.2 s"):
            VLLMEngine(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.2)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("llmrl-vllm-server")]


def test_a_server_of_something_else_is_refused():
    class Other(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *arguments):
            pass

    with HTTPServer(("127.0.0.1", 0), Other) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            with pytest.raises(ConfigError, match="must be a server started by vllm serve: its answers lack 'data'"):
                VLLMEngine(f"http://127.0.0.1:{server.server_port}")
        finally:
            server.shutdown()
            thread.join()


def test_a_url_must_be_one():
    with pytest.raises(ConfigError, match="http://host:port"):
        VLLMEngine("http://")


def test_a_closed_engine_says_so():
    engine = VLLMEngine.__new__(VLLMEngine)
    engine.core, engine._half_loaded = SimpleNamespace(close=lambda: None), False
    engine.close()
    engine.close()
    with pytest.raises(RolloutError, match=r"close\(\) was called"):
        engine.generate([torch.tensor([1])], SamplingParams())
