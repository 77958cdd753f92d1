"""Gauges worked out by hand: of pages and of several engines. Running engines are asked in their own tests."""

import pytest

from llmrl.modules.llm.engines.vllm.gauges import EngineStats, ServerCounters, gauge_metrics, merged


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


def test_a_server_is_counted_between_two_pages_and_not_over_a_restart():
    pytest.importorskip("prometheus_client")
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
    assert gauge_metrics(merged([first, {"preempted": 2}])) == {"engine/preempted": 3}
    assert "engine/prefix_hit_frac" not in gauge_metrics(first), "nothing was looked up"
    assert merged([second, {}]) == merged([]) == gauge_metrics({}) == {}


def test_a_vllm_without_statistics_has_no_numbers():
    for engine in (object(), type("OtherVersion", (), {"logger_manager": None})()):
        assert EngineStats(engine).take() == {}
    stats = EngineStats(object())
    stats.record(scheduler_stats=type("Older", (), {"kv_cache_usage": 0.5})(), iteration_stats=None, engine_idx=0)
    assert stats.take() == {"cache_max": 0.5}
