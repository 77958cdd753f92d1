"""LoRA: an engine that is given an adapter, and one that is given merged weights, both score as the trainer does."""

from contextlib import closing

import pytest
import torch

from llmrl.errors import UnsupportedError, WeightSyncError
from llmrl.modules.llm.engines import SamplingParams, VLLMEngine
from llmrl.testing import tiny_model, tiny_tokenizer
from llmrl.weight_update import adapter_folder, merged_weights, publish
from tests.support.vllm import SameScores, assert_rows_close, scorer, stepped, trainer_log_probs

pytestmark = pytest.mark.vllm
peft = pytest.importorskip("peft")
PROMPTS = [torch.tensor(ids) for ids in ([1, 2, 3], [70, 8, 9, 10, 400, 12], [5] * 20)]
LONG = torch.arange(1, 100)
PROBE = SameScores([*PROMPTS, LONG], bound=1e-4)
PLAIN = {"eos_token_ids": (), "max_model_len": 128, "skip_tokenizer_init": True}


@pytest.fixture
def base(tmp_path):
    tiny_model(tiny_tokenizer(), heads=2).save_pretrained(tmp_path)
    return tmp_path


def adapted(**options):
    model = tiny_model(tiny_tokenizer(), heads=2)
    targets = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
    options = {"r": 8, "lora_alpha": 16, "target_modules": targets} | options
    return peft.get_peft_model(model, peft.LoraConfig(**options))


def test_an_engine_takes_one_adapter_after_the_other(base):
    model = stepped(adapted(), size=0.1).eval()
    with closing(VLLMEngine(base, **PLAIN, enable_lora=True)) as engine:
        with model.disable_adapter():
            PROBE(engine.score, scorer(model))
        for version in (1, 2, 3):
            stepped(model, version, size=0.1)
            before = {name: value.clone() for name, value in model.state_dict().items()}
            with pytest.raises(AssertionError, match="scores differ"):
                PROBE(engine.score, scorer(model))
            with adapter_folder(model) as folder:
                engine.update_adapter(folder, version=version)
            assert PROBE(engine.score, scorer(model)) < 1e-5  # the folder is gone
            drawn = engine.generate(PROMPTS, SamplingParams(max_new_tokens=5))
            assert drawn.version == engine.version == version
            assert_rows_close(drawn.log_probs, trainer_log_probs(model, PROMPTS, drawn))
            assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
        refused = pytest.raises(WeightSyncError, match=r"adapter 4 could not be loaded: .*stays in use")
        with adapter_folder(stepped(adapted(r=64), 9, size=0.1)) as folder, refused:  # vLLM takes a rank of 16
            engine.update_adapter(folder, version=4)
        PROBE(engine.score, scorer(model))
        assert engine.version == 3
        with pytest.raises(UnsupportedError, match=r"built with enable_lora, .*Nothing was updated"):
            engine.update_weights(tiny_model(tiny_tokenizer(), heads=2).state_dict(), version=4)
        PROBE(engine.score, scorer(model))


def test_an_engine_without_adapters_takes_merged_weights(base):
    model = stepped(adapted(use_rslora=True), size=0.1).eval()
    with closing(VLLMEngine(base, **PLAIN)) as engine:
        for version in (1, 2):
            stepped(model, version, size=0.1)
            assert publish(model if version == 1 else merged_weights(model, max_bytes=1 << 15), engine) == version
            assert PROBE(engine.score, scorer(model)) < 1e-5
        with adapter_folder(model) as folder, pytest.raises(UnsupportedError, match="built with enable_lora=True"):
            engine.update_adapter(folder, version=3)
        assert engine.version == 2


ON_GPU = pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
def test_beside_its_trainer_an_engine_in_bfloat16_sleeps_and_wakes_between_adapters(base, device):
    model, plain = adapted().bfloat16().to(device).eval(), tiny_model(tiny_tokenizer(), heads=2).bfloat16().to(device)
    options = {"gpu_memory_utilization": 0.3, "enable_sleep_mode": True} if device == "cuda" else {}
    with closing(VLLMEngine(base, dtype="bfloat16", enable_lora=True, **PLAIN, **options)) as engine:
        for seed in (1, 2):
            engine.sleep(keep_weights=True)
            stepped(model, seed, size=0.1)
            engine.wake()
            with adapter_folder(model) as folder:
                engine.update_adapter(folder, version=seed)
            SameScores(PROMPTS, 0.05)(engine.score, scorer(model))
        ids = PROMPTS[1][None].to(device)
        with torch.no_grad():
            changed = model(ids).logits
            with model.disable_adapter():
                assert torch.equal(model(ids).logits, plain(ids).logits), "the reference, to the last bit"
        assert not torch.equal(changed, plain(ids).logits)
