"""Parameters that wait in host memory: the numbers of a whole model, the plan, and what refuses them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, modeling_utils

from llmrl.errors import ConfigError
from llmrl.modules.llm.vision import model_class
from llmrl.testing import tiny_model, tiny_tokenizer
from llmrl.train.distributed import Session
from llmrl.train.gpus import parse_gpu
from llmrl.train.models import loading as models
from llmrl.train.models.shape import model_shape
from llmrl.train.planning.fitting import memory_rows, remedies, with_changes
from llmrl.train.planning.memory import plan_memory
from llmrl.train.updater import make_updater
from llmrl.weight_update.groups import weight_groups
from scripts.memory_table import shape_of
from tests.support.training_rows import config, losses, policy_of, random_rows, shard_alone, worst

GPU = pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("can_slice", [True, False], ids=["sliced", "dealt out"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_offloaded_parameters_train_as_a_whole_model_does(tmp_path, monkeypatch, device, can_slice):
    tiny_model(architecture="qwen3_moe", hidden_size=32, heads=2).save_pretrained(tmp_path)
    settings = {"model": str(tmp_path), "tokens_per_microbatch": 64, "dtype": "float32"}
    settings["optim"] = {"clip_norm": 0.1, "lr": 1e-2}
    offloaded = config(**settings, parallel={"mode": "fsdp2"}, memory={"offload": "parameters", "checkpointing": "on"})
    monkeypatch.setattr(models, "_can_slice", lambda *_: can_slice)
    rows, trained = random_rows(), []
    for each in (config(**settings), offloaded):
        with Session(each) as session:
            if each is offloaded:
                shard_alone(session, device)
            model = models.load_model(each, tiny_tokenizer(), session, runs=tmp_path)
            actor = policy_of(model)
            updater = make_updater(each, session, actor, steps=2)
            metrics = [updater.step(losses(actor)["token"], rows.to(device), step) for step in (1, 2)]
            if each is offloaded:
                assert {parameter.to_local().device.type for parameter in model.parameters()} == {"cpu"}
                assert {buffer.device.type for buffer in model.buffers()} == {device}
                groups = model._get_fsdp_state()._fsdp_param_groups
                assert all(part.offload_to_cpu for group in groups for part in group.fsdp_params)
            weights = {name: value.cpu() for group in weight_groups(model) for name, value in group.items()}
            trained.append((metrics, weights))
    (metrics, weights), (found, got) = trained
    assert worst(got, weights) < 1e-5
    for one, other in zip(metrics, found, strict=True):
        assert one == {name: pytest.approx(value, abs=1e-5) for name, value in other.items()}
    assert metrics[0]["grad_norm"] > 0.1, "it is clipped"


RANKS = """
from pathlib import Path
from llmrl.testing import tiny_tokenizer
from llmrl.modules.llm.vision import model_class
from llmrl.train.models import loading as models
from llmrl.train.dealing import deal_batch
from llmrl.train.distributed import Session
from tests.support.saved_models import save_tied_as, save_tiny
from tests.support.training_rows import check_steps, config, in_one_piece, random_rows

FORMS = ("both", "head", "own head", "bin")

def main():
    rows, can_slice = random_rows(), models._can_slice
    with Session(config()) as session:
        if session.is_first:
            save_tiny("tied"), save_tiny("untied", tied=False), save_tiny("gemma2", architecture="gemma2")
            for form in FORMS:
                save_tied_as(form, form)
        session.wait()
    for source in ("tied", "untied", "gemma2", *FORMS):
        for memory in ({"offload": "parameters"}, {"checkpointing": "on"})[source in FORMS :]:
            settings = config(model=source, parallel={"mode": "fsdp2"}, memory=memory, tokens_per_microbatch=64)
            with Session(settings) as session:
                mine, _ = deal_batch(session, rows, 0.0, everywhere=True)
                for models._can_slice in (can_slice, lambda *_: False):  # each rank reads its part; rank 0 deals out
                    plain = model_class(source).from_pretrained(source)
                    model = models.load_model(settings, tiny_tokenizer(), session, runs=Path())
                    assert len(list(model.parameters())) == len(list(plain.parameters())), source
                    held = [each for group in model._get_fsdp_state()._fsdp_param_groups for each in group.fsdp_params]
                    tied = plain.get_input_embeddings().weight is plain.get_output_embeddings().weight
                    assert len(held) == (2 if tied else 3), (source, "embeddings, norm and head")
                    assert model.config.tie_word_embeddings == tied, "as its checkpoints will say"
                    expected = lambda plain: in_one_piece(plain, rows, "sft")
                    check_steps(session, settings, model, mine, expected, "sft", plain=plain)

main()
"""


@pytest.mark.slow
def test_shards_of_tied_and_untied_weights_in_every_form_of_file_are_trained_as_one_process_does(place):
    place.module("offloading", RANKS)
    place.ranks(module="offloading")


def test_the_plan_counts_offloaded_parameters_in_host_memory():
    shape = shape_of("32B")

    def plan(offload):
        settings = config(model="x", parallel={"mode": "fsdp2"}, memory={"offload": offload}, grpo={"kl": 0.1})
        return plan_memory(settings, shape, num_gpus=8, low_precision=True, capacity=80e9)

    kept, moved = plan("none"), plan("parameters")
    names = ("weights", "gradients", "optimizer", "reference")
    assert [moved.training[name] for name in names] == [0, 0, 0, 0]
    assert moved.host == sum(kept.training[name] for name in names) == 20 * shape.parameters / 8
    assert moved.training["weights in use"] == kept.training["weights in use"] > 0
    assert (kept.host, moved.resident) == (0, 0)


@pytest.mark.parametrize("changes", [{"memory.offload": "parameters"}, {"optim.name": "adamw_offload"}])
def test_what_is_offloaded_must_fit_in_host_memory(changes):
    """20 and 8 bytes per parameter, and 8 GPUs."""
    settings = with_changes(config(model="x", parallel={"mode": "fsdp2"}, grpo={"kl": 0.1}), changes)
    shape, gpu = shape_of("32B"), parse_gpu("H200:8")
    needed = (20 if "memory.offload" in changes else 8) * shape.parameters / 8
    with Session(config()) as session:
        rows = memory_rows(settings, shape, session, replace(gpu, host=needed / 0.9 + 1))
        assert f"{needed / 2**30:.1f} GiB of " in rows[0][1]
        words = rf"host memory, [\d.]+ GiB: needs {needed / 2**30:.1f} GiB"
        with pytest.raises(ConfigError, match=words):
            memory_rows(settings, shape, session, replace(gpu, host=needed / 0.9 - 1))


def test_ranks_that_do_not_divide_the_experts_hold_what_the_plan_says():
    """Of 4 experts over 3 ranks the first has two."""
    model = tiny_model(architecture="qwen3_moe", hidden_size=32, heads=2)
    shape = model_shape(model)
    with Session(config(parallel={"mode": "fsdp2"})) as session:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=3)
        session.mesh = init_device_mesh("cpu", (3,))
        session.shard(model)
        held = sum(parameter.to_local().numel() for parameter in model.parameters())
        dist.destroy_process_group()
    assert held == pytest.approx(shape.on_a_rank(3) * shape.parameters)
    assert held > 1.2 * shape.parameters / 3


@pytest.mark.parametrize("family", ["gpt_oss", "llama", "qwen2"])
def test_reading_a_sharded_model_reserves_its_shards_alone(monkeypatch, family):
    """Transformers 5.19 would reserve nearly all of gpt-oss, whose plan for tensor parallelism has few weights."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 500, "head_dim": 16}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": family == "qwen2"}
    sizes |= {"num_local_experts": 8} if family == "gpt_oss" else {}
    source = AutoConfig.for_model(family, **sizes)
    with torch.device("meta"):
        model = model_class(source).from_config(source, dtype=torch.float32)
    asked, empty = [], torch.empty
    for name, answer in (("mem_get_info", (80 << 30, 80 << 30)), ("memory_reserved", 0), ("memory_allocated", 0)):
        monkeypatch.setattr(torch.cuda, name, lambda index, answer=answer: answer)

    def allocate(size, *more, device=None, dtype=None, **options):
        if torch.device(device or "cpu").type != "cuda":
            return empty(size, *more, device=device, dtype=dtype, **options)
        asked.append(size * dtype.itemsize)

    with Session(config(parallel={"mode": "fsdp2"})) as session:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
        session.mesh = init_device_mesh("cpu", (8,))
        session.shard(model)
        places = dict.fromkeys(model.state_dict(), "cuda:0")
        monkeypatch.setattr(torch, "empty", allocate)
        with models._reserving_shards():
            modeling_utils.caching_allocator_warmup(model, places, None)
        dist.destroy_process_group()
    whole = 4 * sum(parameter.numel() for parameter in model.parameters())
    held = 4 * sum(parameter.to_local().numel() for parameter in model.parameters())
    assert held == pytest.approx(whole / 8, rel=0.05)
    assert asked == [pytest.approx(held, rel=0.01)]


def test_offloading_is_named_where_it_makes_a_run_fit():
    gpu = parse_gpu("80:8")
    settings = config(model="x", rollout={"engine": "vllm", "tensor_parallel": 4}, env={"name": "gsm8k"})
    changes = remedies(settings, shape_of("32B"), gpu)
    assert changes["memory.offload"] == "parameters"
    assert "optim.name" not in changes
    type(settings).model_validate(with_changes(settings, changes).model_dump())
