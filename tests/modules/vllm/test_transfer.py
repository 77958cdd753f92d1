"""Weights through a shared block into vLLM's workers: whole, proven, or refused; with the tensor's name in the error.

The workers are those of an engine in this process, which answer the same calls as those of another one.
"""

from __future__ import annotations

import copy
import os
import time

import pytest
import torch

from llmrl.errors import ConfigError, UnsupportedError, WeightSyncError
from llmrl.modules.llm.engines import TransformersEngine, VLLMEngine
from llmrl.modules.llm.engines.vllm import reload_patches as reloading
from llmrl.modules.llm.engines.vllm import shared_memory
from llmrl.modules.llm.engines.vllm.nccl_transfer import NCCL, CudaIPC
from llmrl.modules.llm.engines.vllm.shared_memory_buffer import SharedBlock
from llmrl.modules.llm.engines.vllm.transfer import NothingLoadedError, SharedMemory, Transfers
from llmrl.modules.llm.engines.vllm.weight_spec import WeightLayout, WeightSet
from llmrl.testing import tiny_model, tiny_tokenizer
from llmrl.weight_update import SyncProbe, WeightPublisher, weight_groups

pytestmark = pytest.mark.vllm
PROMPTS = [torch.tensor(ids) for ids in ([1, 2, 3], [70, 8, 9, 10, 400, 12], [5] * 20)]


@pytest.fixture(scope="module", params=["qwen2", "gemma"])  # separate and tied head
def pair(request):
    """A trainer's model, and an engine in this process that began with its weights."""
    model = tiny_model(tiny_tokenizer(), architecture=request.param, heads=2).eval()
    engine = VLLMEngine(model, eos_token_ids=(), seed=0, max_model_len=128)
    yield model, engine
    engine.close()


@pytest.fixture
def model(pair):
    return stepped(pair[0])


@pytest.fixture
def engine(pair):
    return pair[1]


def stepped(model, seed=None):
    """The model after something like an optimizer step on every weight."""
    generator = torch.Generator().manual_seed(time.monotonic_ns() if seed is None else seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    return model


def scorer(model):
    return TransformersEngine(model, eos_token_ids=(), pad_token_id=0).score


def send(engine, weights, block_bytes=1 << 26, transfer=None):
    transfer = SharedMemory(block_bytes).connect(engine.core._call) if transfer is None else transfer
    layout = WeightLayout(engine._config)
    transfer.send(layout.weight_set(weights), time.monotonic() + 60)
    engine.core._empty_prefix_cache(0.0)
    return transfer


PROBE = SyncProbe(PROMPTS, bound=1e-4)


@pytest.mark.parametrize("block_bytes", [128, 40_000, 200_000, 1 << 26])
def test_the_engine_scores_as_the_trainer_whatever_fits_into_the_block(model, engine, block_bytes):
    """From one tensor at a time to all of them at once. Before the update they differ."""
    with pytest.raises(WeightSyncError, match="does not have these weights"):
        PROBE(engine.score, scorer(model))
    transfer = send(engine, model.state_dict(), block_bytes)
    assert PROBE(engine.score, scorer(model)) < 1e-5
    block = transfer._block
    for _ in range(3):  # the same block serves
        send(engine, stepped(model).state_dict(), transfer=transfer)
        PROBE(engine.score, scorer(model))
    assert transfer._block is block
    assert not os.path.exists(block.path)


@pytest.mark.parametrize("max_bytes", [1, 50_000])
def test_groups_arrive_like_all_of_it(model, engine, max_bytes):
    send(engine, weight_groups(model, max_bytes=max_bytes), 40_000)
    PROBE(engine.score, scorer(model))
    version = WeightPublisher([engine]).publish(weight_groups(stepped(model), max_bytes=max_bytes))
    assert PROBE(engine.score, scorer(model)) < 1e-5
    assert engine.version == version


def test_what_vllm_has_not_finished_with_is_not_overwritten(model, engine, monkeypatch):
    """The query projection waits in vLLM for key and value, which come into the same memory later."""
    with monkeypatch.context() as patch:
        patch.setattr(shared_memory, "copy_waiting", lambda model, memory: None)
        send(engine, model.state_dict(), 128)
        with pytest.raises(WeightSyncError, match="does not have these weights"):
            PROBE(engine.score, scorer(model))
    send(engine, model.state_dict(), 128)
    PROBE(engine.score, scorer(model))


@pytest.mark.parametrize("pair", ["gemma"], indirect=True)
def test_a_tied_head_that_is_not_packed_again_is_noticed(model, engine, monkeypatch):
    assert model.config.tie_word_embeddings
    with monkeypatch.context() as patch:
        patch.setattr(shared_memory, "repack_tied", lambda model: None)
        send(engine, model.state_dict())
        with pytest.raises(WeightSyncError, match="the engine must score as the trainer does"):
            PROBE(engine.score, scorer(model))
    send(engine, model.state_dict())
    PROBE(engine.score, scorer(model))
    assert reloading.repack_tied is shared_memory.repack_tied


def flipping(monkeypatch, victim):
    """One bit of the tensor named ``victim`` changes between writing and reading."""
    write = SharedBlock.write

    def written(self, name, tensor, *, offset):
        placed = write(self, name, tensor, offset=offset)
        if name == victim:
            self.bytes[offset + tensor.nbytes // 2] ^= 4
        return placed

    monkeypatch.setattr(SharedBlock, "write", written)


def test_a_flipped_bit_is_named_and_nothing_of_the_block_is_loaded(model, engine, monkeypatch):
    send(engine, model.state_dict())
    old = copy.deepcopy(model)
    victim = "model.layers.1.mlp.down_proj.weight"
    with monkeypatch.context() as patch:
        flipping(patch, victim)
        with pytest.raises(NothingLoadedError, match=rf"{victim} must arrive as it was sent: worker 0 .*Nothing was"):
            send(engine, stepped(model).state_dict())
        assert PROBE(engine.score, scorer(old)) < 1e-5  # the old weights, all of them
        with pytest.raises(WeightSyncError, match=victim) as caught:
            send(engine, model.state_dict(), 40_000)  # others went before
        assert not isinstance(caught.value, NothingLoadedError)
    send(engine, model.state_dict())
    PROBE(engine.score, scorer(model))


def test_a_weight_that_vllm_passes_over_is_named(model, engine, monkeypatch):
    kind = type(engine.core.llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model())
    load = kind.load_weights
    with monkeypatch.context() as patch:
        patch.setattr(kind, "load_weights", lambda self, w: load(self, (p for p in w if p[0] != "model.norm.weight")))
        with pytest.raises(WeightSyncError, match=r"in worker 0 model.norm.weight was not loaded \(1 in all\)"):
            send(engine, model.state_dict())
    with monkeypatch.context() as patch:
        double = lambda self, w: load(self, ((n, 2 * t if n == "model.norm.weight" else t) for n, t in w))  # noqa: E731
        patch.setattr(kind, "load_weights", double)
        with pytest.raises(WeightSyncError, match=r"in worker 0 model.norm.weight is not what was sent"):
            send(engine, model.state_dict())
    send(engine, model.state_dict())
    PROBE(engine.score, scorer(model))


def test_groups_that_are_not_what_they_announced_are_named(model, engine):
    send(engine, model.state_dict())
    groups = weight_groups(model, max_bytes=1)

    class Groups:
        metadata = groups.metadata

        def __init__(self, change):
            self.change = change

        def __iter__(self):
            for group in groups:
                yield {n: t for name, tensor in group.items() for n, t in self.change(name, tensor).items()}

    drop = lambda name, tensor: {} if name == "model.norm.weight" else {name: tensor}  # noqa: E731
    for change, message in (
        (drop, "model.norm.weight was announced and did not come"),
        (lambda name, tensor: {name: tensor.half()}, r"must be what was announced: got torch.float16"),
    ):
        with pytest.raises(WeightSyncError, match=message):
            send(engine, Groups(change))
    send(engine, model.state_dict())
    PROBE(engine.score, scorer(model))


def test_a_failure_between_groups_leaves_what_serves_and_the_other_groups_are_made(model, engine):
    """Ranks that gather with this one must not wait for ever."""
    engine.update_weights(model.state_dict(), version=engine.version + 1)
    version, asked = engine.version, []
    groups = weight_groups(model, max_bytes=1)

    class Groups:
        def __init__(self):
            self.metadata = {**groups.metadata, "unknown": (torch.float32, torch.Size([1]))}

        def __iter__(self):
            for group in groups:
                asked.extend(group)
                yield group

    with pytest.raises(WeightSyncError, match="unknown names unknown"):
        engine.update_weights(Groups(), version=version + 1)
    assert asked == list(groups.metadata)
    assert engine.version == version
    assert PROBE(engine.score, scorer(model)) < 1e-5


def test_a_block_that_workers_cannot_open_changes_nothing_and_leaves_no_file(model, engine):
    def call(method, end, **arguments):
        raise FileNotFoundError(2, "No such file or directory", arguments["init_info"]["path"])

    with pytest.raises(NothingLoadedError, match=r"No such file or directory: '/dev/shm/llmrl-weights-.*Nothing was"):
        send(engine, model.state_dict(), transfer=SharedMemory().connect(call))
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(f"llmrl-weights-{os.getpid()}-")]


def test_too_little_shared_memory_is_used_as_it_is_and_none_is_an_error(model, engine, monkeypatch):
    create = SharedBlock.create
    largest = max(tensor.nbytes for tensor in model.state_dict().values())
    room = 2 * largest

    def scarce(size):
        if size > room:
            raise OSError(28, "No space left on device")
        return create(size)

    monkeypatch.setattr(SharedBlock, "create", scarce)
    transfer = send(engine, model.state_dict())
    assert largest <= transfer._block.size <= room
    PROBE(engine.score, scorer(model))
    room = largest - 1
    with pytest.raises(NothingLoadedError, match=r"embed_tokens.weight needs .* No space left on device.*--shm-size"):
        send(engine, model.state_dict())
    PROBE(engine.score, scorer(model))


def test_a_transfer_is_kept_until_other_settings_are_asked_for(model, engine):
    transfers = Transfers(engine.core._call)
    weights = lambda: WeightLayout(engine._config).weight_set(model.state_dict())  # noqa: E731
    transfers.send(weights(), time.monotonic() + 60, SharedMemory())
    first = transfers._transfer
    transfers.send(weights(), time.monotonic() + 60, SharedMemory())
    assert transfers._transfer is first
    transfers.send(weights(), time.monotonic() + 60, SharedMemory(block_bytes=1 << 20))
    assert transfers._transfer is not first
    transfers.close()
    transfers.close()


def test_a_backend_that_cannot_be_is_refused_before_anything_is_sent(model, engine):
    version = engine.version
    for backend, message in (("shared_memory", "is for an engine in another process"), ("ncl", "Did you mean 'nccl'")):
        with pytest.raises(ConfigError, match=message):
            engine.update_weights(model.state_dict(), version=version + 1, backend=backend)
    if not torch.cuda.is_available():
        for settings in (NCCL(), CudaIPC()):
            transfer = settings.connect(engine.core._call)
            with pytest.raises(UnsupportedError, match="moves weights between GPUs, and there is none here"):
                transfer.send(WeightSet({}, []), 0.0)
            transfer.close()
    with pytest.raises(ConfigError, match="num_workers must be at least 1: got 0"):
        NCCL(num_workers=0)


def test_vllms_own_transfers_are_given_what_they_ask_for():
    """As far as that shows without a GPU: their settings, the weights' metadata, and the calls in their order."""
    calls = []
    transfer = NCCL(num_workers=3, master_address="10.0.0.1", master_port=29501).connect(
        lambda method, end, **arguments: calls.append((method, end, arguments)) or []
    )
    info = transfer._make_info()
    found = (info.backend, info.rank, info.master_address, info.master_port, info.world_size, info.packed)
    assert found == ("nccl", 0, "10.0.0.1", 29501, 4, True)
    assert NCCL().connect(None)._make_info().master_port > 0
    info = CudaIPC(buffer_bytes=1 << 20).connect(None)._make_info()
    assert (info.backend, info.packed, info.packed_buffer_size_bytes) == ("ipc", True, 1 << 20)
    from llmrl.modules.llm.engines.vllm.nccl_transfer import _source_class

    source = _source_class()()
    source.weights = WeightSet({"a": (torch.bfloat16, torch.Size([2, 3]))}, [])
    assert [(meta.name, meta.dtype, meta.shape) for meta in source.metadata()] == [("a", torch.bfloat16, (2, 3))]
    client = transfer._client
    client.end = 7.0
    client.init_weight_transfer_engine({"world_size": 4})
    client.start_weight_update()
    assert not client.touched
    client.update_weights({"names": []})
    assert client.touched
    client.finish_weight_update("5")
    assert calls == [
        ("llmrl_open_transfer", 7.0, {"backend": "nccl", "init_info": {"world_size": 4}}),
        ("llmrl_start", 7.0, {}),
        ("update_weights", 7.0, {"update_info": {"names": []}}),
        ("finish_weight_update", 7.0, {}),
    ]
