"""Weights into a vLLM engine, given as tensors in this process or through a shared buffer into its workers: it computes
with what was sent, whole, or with what it had before; what is damaged or missing is named.

The workers here are those of an engine in this process, which answer the same calls as those of another one.
"""

import copy
import json
import os
import time
from contextlib import closing
from dataclasses import replace

import pytest
import torch

from llmrl.errors import ConfigError, RolloutError, UnsupportedError, WeightSyncError
from llmrl.modules.llm.engines import SamplingParams, TransformersEngine, VLLMEngine
from llmrl.modules.llm.engines.vllm import compat
from llmrl.modules.llm.engines.vllm.core import NothingLoadedError
from llmrl.modules.llm.engines.vllm.transfer import NCCL, CudaIPC, SharedMemory, WeightTransfer
from llmrl.testing import tiny_model, tiny_tokenizer
from llmrl.weight_update import publish, weight_groups
from llmrl.weight_update.broadcast import BroadcastBuffer
from llmrl.weight_update.buffers import SharedBuffer, StoredTensor, fields_of_handle, handle_of_fields
from tests.support.processes import free_port
from tests.support.vllm import SameScores, WatchedGroups, assert_rows_close, left_in_memory, scorer, trainer_log_probs
from tests.support.vllm import stepped as stepped_by

pytestmark = pytest.mark.vllm
PROMPTS = [torch.tensor(ids) for ids in ([1, 2, 3], [70, 8, 9, 10, 400, 12], [5] * 20)]
SAMPLING = SamplingParams(max_new_tokens=8)
PROBE = SameScores(PROMPTS, bound=1e-4)


def make_model(architecture, tied):
    model = tiny_model(tiny_tokenizer(), architecture=architecture, heads=2)
    config = copy.deepcopy(model.config)
    config.tie_word_embeddings = tied
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return type(model)(config).eval()


@pytest.fixture(scope="module", params=[("qwen2", False), ("gemma", True), ("llama", True)], ids=str)
def pair(request):
    """A trainer's model, and an engine in this process that began with its weights."""
    model = make_model(*request.param)
    engine = VLLMEngine(model, eos_token_ids=(), seed=0, max_model_len=128)
    yield model, engine
    engine.close()


@pytest.fixture
def model(pair):
    return stepped(pair[0])


@pytest.fixture
def engine(pair):
    return pair[1]


def stepped(model):
    return stepped_by(model, time.monotonic_ns())


def check(model, engine, temperature=1.0):
    """The engine says of what it draws, and of any ids, what a full forward of the trainer's model says."""
    drawn = engine.generate(PROMPTS, SamplingParams(max_new_tokens=8, temperature=temperature))
    assert_rows_close(drawn.log_probs, trainer_log_probs(model, PROMPTS, drawn, temperature))
    full = [torch.cat(row) for row in zip(PROMPTS, drawn.ids, strict=True)]
    assert_rows_close(engine.score(full, temperature=temperature), scorer(model)(full, temperature=temperature))


def send(engine, weights, buffer_bytes=1 << 26, transfer=None):
    """Through shared memory, which an engine in this process does not use by itself."""
    transfer = transfer or WeightTransfer(engine.core.call_workers)
    transfer.send(engine._weight_spec.weight_set(weights), time.monotonic() + 60, SharedMemory(buffer_bytes))
    engine.core.llm.reset_prefix_cache()
    return transfer


# --- given as tensors -------------------------------------------------------------------------------------------------


def test_a_prompt_seen_before_is_not_answered_from_the_old_weights(model, engine):
    long = [torch.arange(1, 100)]  # several blocks of the prefix cache
    params = SamplingParams(max_new_tokens=1, temperature=0.0)
    engine.generate(long, params)
    publish(model.state_dict(), engine)
    reference = TransformersEngine(model, eos_token_ids=(), pad_token_id=0).generate(long, params)
    again = engine.generate(long, params)
    assert again.ids[0].tolist() == reference.ids[0].tolist()
    assert_rows_close(again.log_probs, reference.log_probs)


def test_one_name_of_tied_weights_is_enough(model, engine):
    weights = model.state_dict()
    if model.config.tie_word_embeddings:
        for alone in ("lm_head.weight", "model.embed_tokens.weight"):
            sent = {k: v for k, v in weights.items() if k == alone or "norm" in k or "layers" in k}
            publish(sent, engine)
            check(model, engine)
    else:
        with pytest.raises(WeightSyncError, match=r"'lm_head.weight' is missing"):
            publish({k: v for k, v in weights.items() if k != "lm_head.weight"}, engine)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w | {"model.nrom.weight": w["model.norm.weight"]}, "Did you mean 'model.norm.weight'"),
        (lambda w: w | {"model.norm.weight": torch.ones(64).long()}, r"must be torch.float32 .* got torch.int64"),
        (lambda w: w | {"model.norm.weight": torch.ones(64, device="meta")}, "got torch.float32 on meta"),
        (lambda w: None, "weights must be given"),
    ],
    ids=["unknown", "kind", "empty", "none"],
)
def test_a_set_that_is_not_whole_is_refused_and_the_old_version_serves(model, engine, change, message):
    version = publish(model.state_dict(), engine)
    with pytest.raises(WeightSyncError, match=message):
        publish(change(stepped(copy.deepcopy(model)).state_dict()), engine)
    assert engine.generate(PROMPTS, SAMPLING).version == engine.version == version
    check(model, engine)


@pytest.mark.parametrize("error", [RuntimeError, NotImplementedError])
def test_an_update_that_failed_in_the_middle_serves_nothing_until_a_whole_one_came(model, engine, monkeypatch, error):
    """Regression: the second, which is also what torch raises for a tensor without data, left half of them in use."""
    version = publish(model.state_dict(), engine)
    kind = type(engine.core.llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model())
    load = kind.load_weights
    new = stepped(copy.deepcopy(model))

    def half(self, weights):
        sent = list(weights)
        load(self, sent[:9])
        if sent:
            raise error("no memory left")

    with monkeypatch.context() as patch:
        patch.setattr(kind, "load_weights", half)
        with pytest.raises(WeightSyncError, match=rf"version .* could not be loaded: {error.__name__}: no memory left"):
            publish(new.state_dict(), engine)
    for call in (lambda: engine.generate(PROMPTS, SAMPLING), lambda: engine.score(PROMPTS)):
        with pytest.raises(RolloutError, match="update failed in the middle"):
            call()
    assert engine.version == version
    publish(new.state_dict(), engine)
    check(new, engine)


def test_weights_of_another_precision_are_cast_to_the_engines(model, engine):
    half = {name: value.bfloat16() for name, value in model.state_dict().items()}
    publish(half, engine)
    rounded = copy.deepcopy(model)
    rounded.load_state_dict({name: value.float() for name, value in half.items()})
    check(rounded, engine)


def test_a_failure_between_groups_leaves_what_serves_and_the_other_groups_are_made(model, engine):
    """Ranks that gather with this one must not wait for ever."""
    version, made = publish(model, engine), []
    groups = WatchedGroups(model, made.extend)
    names = list(groups.metadata)
    groups.metadata |= {"unknown": (torch.float32, torch.Size([1]))}
    with pytest.raises(WeightSyncError, match="no weight is called 'unknown'"):
        publish(groups, engine)
    assert made == names
    assert engine.version == version
    check(model, engine)


# --- through shared memory --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("buffer_bytes", "group_bytes"), [(128, 0), (40_000, 0), (200_000, 0), (1 << 26, 0), (40_000, 1), (40_000, 50_000)]
)
def test_the_engine_scores_as_the_trainer_whatever_fits_into_the_buffer(model, engine, buffer_bytes, group_bytes):
    """From one tensor at a time to all of them at once, whole or in groups. Before the update they differ."""
    with pytest.raises(AssertionError, match="scores differ"):
        PROBE(engine.score, scorer(model))
    weights = weight_groups(model, max_bytes=group_bytes) if group_bytes else model.state_dict()
    transfer = send(engine, weights, buffer_bytes)
    assert PROBE(engine.score, scorer(model)) < 1e-5
    buffer = transfer._buffer
    for _ in range(3):  # the same buffer serves
        send(engine, stepped(model).state_dict(), buffer_bytes, transfer)
        PROBE(engine.score, scorer(model))
    assert transfer._buffer is buffer
    assert not os.path.exists(buffer.path)
    send(engine, model.state_dict(), buffer_bytes + 64, transfer)
    assert transfer._buffer is not buffer, "other settings"


@pytest.mark.parametrize(("patched", "buffer_bytes"), [("copy_pending", 128), ("repack_tied", 1 << 26)])
def test_without_a_patch_of_vllm_the_probe_fails(model, engine, monkeypatch, patched, buffer_bytes):
    """The query projection waits in vLLM for key and value, which come into the same memory later; a tied head keeps
    its old packed copy.
    """
    if patched == "repack_tied" and not model.config.tie_word_embeddings:
        patched, buffer_bytes = "copy_pending", 40_000
    with monkeypatch.context() as patch:
        patch.setattr(compat, patched, lambda *arguments: None)
        send(engine, model.state_dict(), buffer_bytes)
        with pytest.raises(AssertionError, match="scores differ"):
            PROBE(engine.score, scorer(model))
    send(engine, model.state_dict(), buffer_bytes)
    PROBE(engine.score, scorer(model))


def test_a_load_without_memory_for_what_waits_keeps_nothing_of_the_buffer(model, engine, monkeypatch):
    """Regression: the next update ended it, and read a buffer that the trainer had released."""
    layerwise = compat.vllm_module("vllm.model_executor.model_loader.reload.layerwise")
    inner = engine.core.llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()

    def waits():
        return any(layerwise.get_layerwise_info(module).loaded_weights for module in inner.modules())

    def fail(*arguments):
        if waits():
            raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(compat, "copy_pending", fail)
        with pytest.raises(torch.OutOfMemoryError):
            send(engine, model.state_dict(), 128)
    assert not waits()
    send(engine, model.state_dict())
    PROBE(engine.score, scorer(model))


def test_a_flipped_bit_is_named_and_nothing_of_the_half_is_loaded(model, engine, monkeypatch):
    transfer = send(engine, model.state_dict())
    old, victim, write = copy.deepcopy(model), "model.layers.1.mlp.down_proj.weight", SharedBuffer.write

    def damaging(self, name, tensor, *, offset):
        stored = write(self, name, tensor, offset=offset)
        if name == victim:
            self.bytes[offset + tensor.nbytes // 2] ^= 4
        return stored

    with monkeypatch.context() as patch:
        patch.setattr(SharedBuffer, "write", damaging)
        with pytest.raises(NothingLoadedError, match=rf"{victim} must arrive as it was sent: worker 0 .*Nothing was"):
            send(engine, stepped(model).state_dict(), transfer=transfer)
        assert transfer._buffer is None, "after an error the workers may be others"
        assert PROBE(engine.score, scorer(old)) < 1e-5  # the old weights, all of them
        with pytest.raises(WeightSyncError, match=victim) as caught:
            send(engine, model.state_dict(), 40_000)  # others went before
        assert not isinstance(caught.value, NothingLoadedError)
    send(engine, model.state_dict())
    PROBE(engine.score, scorer(model))


@pytest.mark.parametrize(
    ("loads", "finding"), [(lambda t: [], "was not loaded"), (lambda t: [2 * t], "is not what was sent")]
)
def test_a_weight_that_vllm_passes_over_or_changes_is_named(model, engine, monkeypatch, loads, finding):
    kind = type(engine.core.llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model())
    load, name = kind.load_weights, "model.norm.weight"

    def wrong(self, weights):
        return load(self, ((n, value) for n, t in weights for value in (loads(t) if n == name else [t])))

    with monkeypatch.context() as patch:
        patch.setattr(kind, "load_weights", wrong)
        with pytest.raises(WeightSyncError, match=rf"in worker 0 {name} {finding} \(1 in all\)"):
            send(engine, model.state_dict())
    send(engine, model.state_dict())
    PROBE(engine.score, scorer(model))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda name, tensor: {} if name == "model.norm.weight" else {name: tensor}, "announced but not sent"),
        (lambda name, tensor: {name: tensor.half()}, r"must match its metadata: got torch.float16"),
    ],
    ids=["missing", "dtype"],
)
def test_groups_that_are_not_what_they_announced_are_named(model, engine, change, message):
    with pytest.raises(WeightSyncError, match=message):
        send(engine, WatchedGroups(model, lambda group: change(*next(iter(group.items())))))
    send(engine, model.state_dict())
    PROBE(engine.score, scorer(model))


def test_a_buffer_that_workers_cannot_open_changes_nothing_and_leaves_no_file(model, engine):
    def call(method, end, **arguments):
        raise FileNotFoundError(2, "No such file or directory", arguments["info"]["path"])

    with pytest.raises(NothingLoadedError, match=r"No such file or directory: '/dev/shm/llmrl-weights-.*Nothing was"):
        send(engine, model.state_dict(), transfer=WeightTransfer(call))
    assert left_in_memory() == []


def test_too_little_shared_memory_is_used_as_it_is_and_none_is_an_error(model, engine, monkeypatch):
    create = SharedBuffer.create
    largest = max(tensor.nbytes for tensor in model.state_dict().values())
    room = 2 * largest

    def scarce(size):
        if size > room:
            raise OSError(28, "No space left on device")
        return create(size)

    monkeypatch.setattr(SharedBuffer, "create", scarce)
    transfer = send(engine, model.state_dict())
    assert largest <= transfer._buffer.size <= room
    PROBE(engine.score, scorer(model))
    room = largest - 1
    with pytest.raises(NothingLoadedError, match=r"embed_tokens.weight needs .* No space left on device.*--shm-size"):
        send(engine, model.state_dict())
    PROBE(engine.score, scorer(model))


# --- transfers and their settings -------------------------------------------------------------------------------------


def test_a_backend_that_does_not_reach_the_engine_is_refused_before_anything_is_sent(model, engine):
    version = engine.version
    for backend, message in (("shared_memory", "does not reach an engine in this process"), ("ncl", "mean 'nccl'")):
        with pytest.raises(ConfigError, match=message):
            engine.update_weights(model.state_dict(), version=version + 1, backend=backend)
    if not torch.cuda.is_available():
        with pytest.raises(UnsupportedError, match="memory of a GPU, and this process has none"):
            CudaIPC().create_buffer(1, engine.core.call_workers, 0.0)
    with pytest.raises(ConfigError, match="num_workers must be at least 1: got 0"):
        NCCL(num_workers=0)


def test_bytes_sent_are_those_of_the_parameters_in_the_dtype_asked_for_in_bounded_buckets(model, engine):
    received = []

    def call(method, end, **arguments):
        if method == "llmrl_receive":
            received.append([StoredTensor(*entry) for entry in arguments["stored"]])
            assert arguments["stop"] - arguments["start"] <= max(40_000, received[-1][0].num_bytes + 63)
        return engine.core.call_workers(method, end, **arguments)

    checked = engine._weight_spec.weight_set(weight_groups(model, max_bytes=50_000))
    weights = replace(checked, dtype=torch.bfloat16, kept=("norm",))  # which this engine could not keep in float32
    WeightTransfer(call).send(weights, time.monotonic() + 60, SharedMemory(40_000))
    engine.core.llm.reset_prefix_cache()
    stored = [entry for bucket in received for entry in bucket]
    expected = sum(p.numel() * (4 if "norm" in name else 2) for name, p in model.named_parameters())
    assert sum(entry.num_bytes for entry in stored) == weights.num_bytes == expected
    assert len(received) > 3
    rounded = copy.deepcopy(model)
    for name, parameter in rounded.named_parameters():
        if "norm" not in name:
            parameter.data = parameter.data.bfloat16().float()
    PROBE(engine.score, scorer(rounded))


@pytest.mark.parametrize("send_as", [json.dumps, "vllm"], ids=["http", "vllm"])
def test_a_handle_of_gpu_memory_is_plain_fields_in_every_message(send_as):
    """vLLM's own encoder refuses the classes in torch's form of a handle."""
    handle = [b"\x00\xffmemory", 1 << 28, 512, b"counter", 3, b"event\x80", True]
    info = {"info": {"gpu": "GPU-1", "handle": fields_of_handle(handle), "size": 1 << 28}}
    if send_as == "vllm":
        messages = compat.vllm_module("vllm.v1.serial_utils")
        received = messages.MsgpackDecoder().decode(messages.MsgpackEncoder().encode(info))
    else:
        received = json.loads(send_as(info))
    assert received == info
    assert handle_of_fields(received["info"]["handle"]) == handle


@pytest.mark.slow
def test_a_bfloat16_engine_in_a_process_gets_half_the_bytes_by_memory_and_by_broadcast_and_never_a_mixture():
    model = make_model("qwen2", False)
    options = {"eos_token_ids": (), "max_model_len": 128, "dtype": "bfloat16", "own_process": True}
    with closing(VLLMEngine(model, **options)) as engine:
        call_workers, fault, received = engine.core.call_workers, [None], []

        def call(method, end, **arguments):
            if method == "llmrl_receive":
                if len(received) == fault[0]:
                    raise RolloutError("lost")
                received.append(sum(StoredTensor(*entry).num_bytes for entry in arguments["stored"]))
            return call_workers(method, end, **arguments)

        engine.core.call_workers = call
        expected = 2 * sum(parameter.numel() for parameter in model.parameters())
        for settings in (None, SharedMemory(buffer_bytes=60_000), NCCL(buffer_bytes=60_000), NCCL()):
            engine.weight_backend = settings
            received.clear()
            before = engine.score(PROMPTS)
            publish(stepped(model), engine)
            assert sum(received) == expected
            assert SameScores(PROMPTS, 0.02)(engine.score, scorer(model)) > 0
            assert any(not torch.equal(one, other) for one, other in zip(engine.score(PROMPTS), before, strict=True))
        engine.weight_backend = SharedMemory(buffer_bytes=60_000)
        for chunk in range(4):
            fault[0] = chunk
            received.clear()
            with pytest.raises(WeightSyncError, match="lost"):
                publish(stepped(model), engine)
            with pytest.raises(RolloutError, match="update failed in the middle"):
                engine.score(PROMPTS)
            fault[0] = None
            publish(model, engine)
        with pytest.raises(WeightSyncError, match="got 3, but 1 answer"):
            engine.update_weights(model.state_dict(), version=engine.version + 1, backend=NCCL(num_workers=3))
        SameScores(PROMPTS, 0.02)(engine.score, scorer(model))


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_one_gpu_weights_go_through_its_memory_and_a_group_of_one_broadcasts():
    model = make_model("qwen2", False).cuda()
    options = {"eos_token_ids": (), "max_model_len": 128, "dtype": "bfloat16", "own_process": True}
    with closing(VLLMEngine(model, gpu_memory_utilization=0.2, **options)) as engine:
        for settings in (CudaIPC(buffer_bytes=60_000), None, SharedMemory()):
            engine.weight_backend = settings
            publish(stepped(model), engine)
            SameScores(PROMPTS, 0.05)(engine.score, scorer(model))
            if settings is None:
                assert isinstance(engine._transfer._settings, CudaIPC)
    buffer = BroadcastBuffer(4096, "cuda", "127.0.0.1", free_port(), 1)
    buffer.connect(lambda info: None)
    stored = buffer.sealed([buffer.write("w", torch.arange(100.0, device="cuda"), offset=64)])
    buffer.pass_on(64, 512)
    assert buffer.damaged(stored) == []
