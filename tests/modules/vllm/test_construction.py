"""What is decided before an engine runs: versions, arguments, request options. Most of it needs no vLLM."""

import inspect
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from llmrl.errors import ConfigError, DataError, MissingDependencyError, RolloutError
from llmrl.modules.llm import vLLMWrapper
from llmrl.modules.llm.engines import AsyncVLLMEngine, SamplingParams, StopReason, VLLMEngine
from llmrl.modules.llm.engines.vllm import compat
from llmrl.modules.llm.engines.vllm.compat import environment
from llmrl.modules.llm.engines.vllm.core import request_options, stop_reason
from llmrl.modules.llm.engines.vllm.gauges import EngineStats, ServerCounters, gauge_metrics, merged
from llmrl.testing import tiny_model, tiny_tokenizer
from tests.support.refusals import refusals


def some_vllm(**changes):
    """A package with the interface that is looked for."""

    class LLM:
        def collective_rpc(self, method, timeout=None, args=(), kwargs=None): ...
        def reset_prefix_cache(self): ...

    class LLMEngine:
        def add_request(self, request_id, prompt, params, lora_request=None): ...
        def step(self): ...
        def reset_encoder_cache(self): ...

    arguments = "logprobs_mode worker_extension_cls enforce_eager kv_cache_memory_bytes max_model_len"
    options = "max_tokens temperature top_p top_k min_p repetition_penalty seed stop stop_token_ids ignore_eos "
    options += "logprobs prompt_logprobs flat_logprobs detokenize skip_special_tokens output_kind"
    parts = {"LLM": LLM, "LLMEngine": LLMEngine, "EngineArgs": taking(arguments), "SamplingParams": taking(options)}
    parts["inputs"] = SimpleNamespace(tokens_input=taking("prompt_token_ids"))
    return SimpleNamespace(**parts | changes)


def taking(names):
    """Something that is called with arguments of these names."""
    kinds = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names.split()]

    def called(**arguments): ...

    called.__signature__ = inspect.Signature(kinds)
    return called


def test_a_version_is_accepted_for_what_it_has_and_what_it_lacks_is_named():
    assert compat.missing_capabilities(some_vllm()) == []

    class OldLLM:
        def reset_prefix_cache(self): ...

    class OldEngine:
        def add_request(self, request_id, prompt, params): ...
        def step(self): ...

    missing = compat.missing_capabilities(
        some_vllm(LLM=OldLLM, LLMEngine=OldEngine, EngineArgs=lambda logprobs_mode: None)
    )
    assert missing[:2] == ["LLM.collective_rpc", "LLMEngine.add_request(lora_request=)"]
    assert "EngineArgs(worker_extension_cls=)" in missing
    assert "EngineArgs(logprobs_mode=)" not in missing


@pytest.mark.parametrize(
    ("vllm", "message"),
    [
        (SimpleNamespace(__version__="0.9.0"), r"vllm 0.9.0 lacks: LLM.collective_rpc, (?s:.*)0.32 +fully tested"),
        (None, "needs the package 'vllm', .* run: pip install"),
        (some_vllm(__version__="0.31"), r"0\.31 lacks: vllm\.model_executor\.(?s:.*)0\.32 +fully tested"),
    ],
    ids=["outside", "none", "inside"],
)
def test_another_version_is_an_error_with_the_table_and_none_says_what_to_install(monkeypatch, vllm, message):
    for name in [name for name in sys.modules if name.startswith("vllm.")]:
        monkeypatch.delitem(sys.modules, name)  # parts of the real one, if a test before imported them
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    with pytest.raises(MissingDependencyError, match=message):
        compat.load_vllm()


@pytest.mark.vllm
def test_the_installed_version_has_all_that_is_looked_for():
    assert compat.missing_capabilities(compat.load_vllm(own_process=True), own_process=True) == []


@pytest.mark.vllm
@pytest.mark.parametrize("own_process", [False, True], ids=["here", "own process"])
def test_heads_that_vllm_cannot_compute_on_a_cpu_are_refused_before_anything_starts(own_process):
    if torch.cuda.is_available():
        pytest.skip("a GPU computes heads of any size")
    model = tiny_model(tiny_tokenizer(), hidden_size=64, heads=4)
    with pytest.raises(ConfigError, match=r"size of the model's heads: got 16, expected one of 32, 64, .*head_dim"):
        VLLMEngine(model, own_process=own_process, max_model_len=128)


@pytest.mark.vllm
@pytest.mark.parametrize("own_process", [False, True], ids=["here", "own process"])
def test_a_folder_without_a_model_is_a_data_error_that_names_it(tmp_path, own_process):
    with pytest.raises(DataError, match=f"VLLMEngine: model {tmp_path}/absent: cannot be loaded"):
        VLLMEngine(tmp_path / "absent", tokenizer=tiny_tokenizer(), own_process=own_process)


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


def test_the_environment_is_put_back_and_what_the_user_set_stays(monkeypatch):
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    before = dict(os.environ)
    with environment(SOMETHING="1"):
        assert (os.environ["VLLM_LOGGING_LEVEL"], os.environ["SOMETHING"]) == ("INFO", "1")
        os.environ["LEFT_BEHIND"] = "x"
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("finish", "cause", "ids", "reason"),
    [
        ("stop", 7, [5, 6], StopReason.EOS),
        ("stop", None, [5, 6], StopReason.EOS),
        ("stop", "END", [5, 6], StopReason.STOP_STRING),
        ("stop", "im_end", [5, 7], StopReason.EOS),  # a stop id whose text holds a stop string
        ("length", None, [5, 7], StopReason.LENGTH),
        ("abort", None, [5, 6], StopReason.ABORT),
    ],
)
def test_finish_reasons(finish, cause, ids, reason):
    assert stop_reason(finish, cause, ids, [7]) is reason
    with pytest.raises(RolloutError, match="must end by stop, length or abort"):
        stop_reason("error", cause, ids, [7])


def test_greedy_requests_are_not_truncated_and_repeated_stop_ids_are_sent_once():
    options = request_options(SamplingParams(temperature=0.0, top_k=5, stop_token_ids=(3, 2)), stop_token_ids=(2, 9))
    assert (options["temperature"], options["top_k"], options["stop_token_ids"]) == (0.0, 0, [2, 9, 3])


URL = "http://localhost:1"


test_unusable_models_and_settings_are_refused = refusals(
    (ConfigError, "must be a folder or hub name.*got dict", lambda: VLLMEngine({})),
    (ConfigError, "max_model_len can only be set when the engine is built", lambda: VLLMEngine(URL, max_model_len=5)),
    (ConfigError, "timeout_s must be positive: got 0", lambda: VLLMEngine(URL, timeout_s=0)),
    (ConfigError, "connect_s must be positive: got 0", lambda: VLLMEngine(URL, connect_s=0)),
    (ConfigError, "Did you mean 'nccl'", lambda: VLLMEngine(URL, weight_backend="ncl")),
    (ConfigError, "'finish', 'abort' or 'continue': got 'drop'", lambda: AsyncVLLMEngine("model", in_flight="drop")),
    (ConfigError, "own_process can only be set when the engine is built", lambda: AsyncVLLMEngine(URL)),
    (ConfigError, "device is decided by vLLM", lambda: vLLMWrapper("any", tokenizer=tiny_tokenizer(), device="cpu")),
)


def test_wrong_settings_are_refused_before_an_engine_is_built():
    """Regression: the engine of a wrapper that could not be made stayed open."""
    with pytest.raises(ConfigError, match="min_batch_size must not exceed max_batch_size"):
        vLLMWrapper("no/such/model", tokenizer=tiny_tokenizer(), min_batch_size=3, max_batch_size=2)


def page(preempted, queries, hits, started=1.7e9, engine=0):
    """What vLLM 0.32 answers, of one engine."""
    labels = f'{{engine="{engine}",model_name="a\\"b"}}'
    return f"""# HELP vllm:num_preemptions_total Cumulative number of preemption from the engine.
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{labels} {preempted}
vllm:num_preemptions_created{labels} {started + 9}
vllm:kv_cache_usage_perc{labels} 0.5
vllm:prefix_cache_queries_total{labels} {queries}
vllm:prefix_cache_hits_total{labels} {hits}
process_start_time_seconds {started}
"""


@pytest.mark.vllm  # whose prometheus_client reads them
def test_a_server_is_counted_between_two_pages_and_not_over_a_restart():
    counters = ServerCounters()
    assert counters.take(page(5.0, 100.0, 10.0)) == {}, "counted since it was started, by whoever asked it"
    two = page(6.0, 300.0, 20.0) + page(1.0, 1e3, 0.0, engine=1).rpartition("process_")[0]
    assert counters.take(two) == {"preempted": 2, "prefix_queries": 1200, "prefix_hits": 10}
    assert counters.take(page(9.0, 2e3, 99.0, started=1.8e9)) == {}, "another process, whose counters are larger"
    assert counters.take(page(9.0, 2e3, 99.0, started=1.8e9)) == {
        "preempted": 0,
        "prefix_queries": 0,
        "prefix_hits": 0,
    }
    assert counters.take(page(0.0, 0.0, 0.0, started=1.8e9)) == {}, "counters do not fall"
    assert counters.take("") == {}, "it did not answer"
    assert counters.take(page(1.0, 1.0, 1.0, started=1.8e9)) == {}, "of an unknown time"
    assert counters.take("<html>vllm:num_preemptions</html>") == {}


def test_several_engines_add_up_or_take_the_largest_and_what_one_lacks_is_not_known():
    first = {"preempted": 1, "cache_max": 0.25, "waiting_max": 3, "prefix_hits": 0, "prefix_queries": 0}
    second = {"preempted": 2, "cache_max": 0.5, "waiting_max": 2, "prefix_hits": 3, "prefix_queries": 12}
    assert gauge_metrics(merged([first, second])) == {
        "engine/preempted": 3,
        "engine/cache_max_frac": 0.5,
        "engine/waiting_max": 3,
        "engine/prefix_hit_frac": 0.25,
    }
    drafts = [{"drafted": 8, "accepted": 1}, {"drafted": 4, "accepted": 2}]
    assert gauge_metrics(merged(drafts)) == {"engine/draft_accepted_frac": 0.25}
    assert gauge_metrics({"drafted": 0, "accepted": 0}) == {}, "nothing was drafted"
    assert gauge_metrics(merged([first, {"preempted": 2}])) == {"engine/preempted": 3}
    assert "engine/prefix_hit_frac" not in gauge_metrics(first), "nothing was looked up"
    assert merged([second, {}]) == merged([]) == gauge_metrics({}) == {}


def test_a_vllm_without_statistics_has_no_numbers():
    for engine in (object(), type("OtherVersion", (), {"logger_manager": None})()):
        assert EngineStats(engine).take() == {}
    stats = EngineStats(object())
    stats.record(scheduler_stats=type("Older", (), {"kv_cache_usage": 0.5})(), iteration_stats=None, engine_idx=0)
    assert stats.take() == {"cache_max": 0.5}
