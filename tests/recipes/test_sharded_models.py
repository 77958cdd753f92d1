"""Models that no rank holds whole: read, saved and resumed by parts, with the numbers of one process."""

import shutil

import pytest
from safetensors.torch import load_file

from tests.support.saved_models import save_tiny

pytestmark = pytest.mark.slow

OPTIM = {"lr": 1e-2, "warmup": 1}

LOADING = """
import ctypes, gc, json, subprocess, sys, threading
from pathlib import Path
import torch
from safetensors import safe_open
from llmrl.errors import RunFolderError
from llmrl.modules.llm.engines import TransformersEngine
from llmrl.modules.llm.engines.base import SamplingParams
from llmrl.modules.llm.vision import model_class
from llmrl.testing import tiny_model, tiny_processor, tiny_tokenizer
from llmrl.train import checkpointing
from llmrl.train.models import loading as models
from llmrl.train.distributed import Session
from llmrl.train.settings.preferences import RewardConfig
from llmrl.train.models.reward import load_reward_model
from llmrl.train.settings import SFTConfig

def config(model="tiny", kind=SFTConfig):
    return kind(model=model, data={"path": "sums"}, parallel={"mode": "fsdp2"})

def equals(session, model, source):
    attention = model.config._attn_implementation  # of Gemma 2 not what every version of transformers would choose
    plain = model_class(source).from_pretrained(source, dtype=torch.float32, attn_implementation=attention)
    ids = torch.arange(12).view(2, 6) + 3 * session.rank
    with torch.no_grad():
        assert torch.equal(model(ids).logits, plain(ids).logits), source
    own, expected = model.state_dict(), plain.state_dict()
    assert own.keys() == expected.keys()
    assert all(torch.equal(own[name].full_tensor(), value) for name, value in expected.items())
    assert all(map(torch.equal, model.buffers(), plain.buffers()))
    tied = [each.get_input_embeddings().weight is each.get_output_embeddings().weight for each in (model, plain)]
    assert tied[0] == tied[1]

def megabytes(name):
    return next(int(line.split()[1]) / 1024 for line in open("/proc/self/status") if line.startswith(name))

def check_loading(session, tokenizer):
    for name in ("qwen2_vl", "qwen2", "gemma2", "gpt2", "qwen3_moe", "bin"):
        if session.is_first:
            reader = tiny_processor() if name == "qwen2_vl" else tokenizer
            model = tiny_model(reader, architecture=name.replace("bin", "qwen2"), hidden_size=32, heads=2)
            model.save_pretrained(name)
            if name == "bin":
                torch.save(model.state_dict(), "bin/pytorch_model.bin")
                Path("bin/model.safetensors").unlink()
        session.wait()
        model = models.load_model(config(name), tokenizer, session, runs=Path())
        assert models._can_slice(model, session)
        equals(session, model, name)
        checkpointing.write_model(model, Path(f"{name}-again"), session)
        session.wait()
        equals(session, model, f"{name}-again")
    with safe_open("qwen2_vl-again/model.safetensors", "pt") as file:
        assert "model.embed_tokens.weight" in file.keys(), "as Transformers writes it, and vLLM reads it"
    files = [{path.name for path in Path(folder).glob("model*")} for folder in ("gemma2-again", "qwen3_moe-again")]
    assert files == [{"model.safetensors"}] * 2
    checkpointing._FILE_BYTES, save_file, mine = 50_000, checkpointing.save_file, []
    checkpointing.save_file = lambda part, file, **more: mine.append(file.name) or save_file(part, file, **more)
    checkpointing.write_model(model, Path("parts"), session)
    checkpointing.save_file = save_file
    files = sorted(path.name for path in Path("parts").glob("model-*-of-*"))
    assert len(files) > 3 and mine == files[session.rank :: 2], "the ranks take turns"
    index = json.loads(Path("parts/model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(files)
    for name, file in index["weight_map"].items():
        with safe_open(f"parts/{file}", "pt") as part, safe_open("bin-again/model.safetensors", "pt") as whole:
            assert torch.equal(part.get_tensor(name), whole.get_tensor(name)), "as one file holds it"
    equals(session, model, "parts")
    can_slice, models._can_slice = models._can_slice, lambda *_: False  # as where Transformers splits: rank 0 deals out
    for name in ("gemma2", "qwen3_moe"):
        equals(session, models.load_model(config(name), tokenizer, session, runs=Path()), name)
        check_reward_model(session, tokenizer, name)
    models._can_slice = can_slice
    for name in ("qwen2", "qwen3_moe"):
        check_reward_model(session, tokenizer, name)

def check_reward_model(session, tokenizer, source):
    model = load_reward_model(config(source, RewardConfig), tokenizer, session, runs=Path())
    own, expected = model.state_dict(), model_class(source).from_pretrained(source, dtype=torch.float32).state_dict()
    head = own.pop("score.weight").full_tensor()
    assert torch.equal(head, torch.empty(1, 32).normal_(std=0.02, generator=torch.Generator().manual_seed(0)))
    assert own.keys() == expected.keys() - {"lm_head.weight"}
    assert all(torch.equal(value.full_tensor(), expected[name]) for name, value in own.items())
    checkpointing.write_model(model, Path(f"{source}-reward"), session)
    session.wait()
    again = load_reward_model(config(f"{source}-reward", RewardConfig), tokenizer, session, runs=Path())
    assert torch.equal(again.state_dict()["score.weight"].full_tensor(), head), "of its files, not drawn"

def check_memory(session, tokenizer):
    if session.is_first:
        make = "from llmrl.testing import tiny_model; tiny_model(hidden_size=512, layers=12, heads=8, vocab_size=4000)"
        subprocess.run([sys.executable, "-c", make + ".bfloat16().save_pretrained('big')"], check=True)
    session.wait()
    for load, kind in ((models.load_model, SFTConfig), (load_reward_model, RewardConfig)):
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # else the second model gets the memory of the first
        before = megabytes("RssAnon")  # pages of the file are mapped beside it, which the system can drop
        seen, ended = [], threading.Event()
        def watch():
            while not ended.wait(0.001):
                seen.append(megabytes("RssAnon") - before)
        watcher = threading.Thread(target=watch)
        watcher.start()
        model = load(config("big", kind), tokenizer, session, runs=Path())
        ended.set()
        watcher.join()
        sizes = [parameter.numel() * 4 / 2**20 for parameter in model.parameters()]
        peak, bound = max(seen), 1.2 * sum(sizes) / 2 + max(sizes)
        print(f"rank {session.rank} of {sum(sizes):.0f} MB: peak {peak:.0f} of {len(seen)} looks")
        assert len(seen) > 20 and 0.7 * sum(sizes) / 2 < peak < bound, (peak, bound)
        del model

def check_generating(session, tokenizer):
    model = models.load_model(config("qwen2"), tokenizer, session, runs=Path())
    plain = model_class("qwen2").from_pretrained("qwen2", dtype=torch.float32)
    prompts = [torch.arange(2, 6), torch.arange(9, 12)]
    class Policy: pass
    policy = Policy()
    policy.model = model
    rounds = 3 if session.rank else 1  # they call it a different number of times
    with session.in_step(policy):
        for number in range(rounds):
            params = SamplingParams(max_new_tokens=4 + number, temperature=1.0)
            answers = []
            for each in (model, plain):
                engine = TransformersEngine(each, eos_token_ids=1, pad_token_id=0)
                answers.append(engine.generate(prompts, params, seeds=[1, 2]))
            assert all(map(torch.equal, answers[0].ids, answers[1].ids))
    assert sum(p.to_local().numel() for p in model.parameters()) < 0.6 * sum(p.numel() for p in model.parameters())

with Session(config()) as session:
    tokenizer = tiny_tokenizer()
    check_loading(session, tokenizer)
    check_memory(session, tokenizer)
    check_generating(session, tokenizer)
    session.check_shared(Path())
    own = Path(f"node{session.rank}")
    own.mkdir()
    try:
        session.check_shared(own)
    except RunFolderError as error:
        assert "is not seen by rank 1 on" in str(error)
    else:
        raise AssertionError("a folder of one node alone")
"""


def test_a_sharded_model_is_read_written_and_generates_by_parts(place):
    place.module("loading", LOADING)
    place.ranks(module="loading")


CANNOT_WRITE = """
import resource, socket
from pathlib import Path
from llmrl.errors import CheckpointError
from llmrl.testing import tiny_model, tiny_tokenizer
from llmrl.train import checkpointing
from llmrl.train.distributed import Session
from llmrl.train.settings import SFTConfig

LIMIT = resource.getrlimit(resource.RLIMIT_FSIZE)

def message(write):
    try:
        write()
    except CheckpointError as error:
        return str(error)

def check(session, model):
    for rank, limit in ((0, 20_000), (0, 130_000), (1, 20_000)):  # its first file, a later one
        folder = Path(f"cut-{rank}-{limit}")
        if session.rank == rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, LIMIT[1]))
        said = message(lambda: checkpointing.write_model(model, folder, session))
        resource.setrlimit(resource.RLIMIT_FSIZE, LIMIT)
        assert said and said.startswith(f"rank {rank} on {socket.gethostname()}: "), said
        assert "File too large" in said and "GiB free of" in said, said
        assert session.gather([said]) == [said] * 2, "the ranks are in step"
        assert any(path.stat().st_size > 130_000 for path in folder.glob("*")), "the other rank still wrote its own"
    assert message(lambda: checkpointing.write_model(model, Path("whole"), session)) is None

with Session(SFTConfig(model="tiny", data={"path": "sums"}, parallel={"mode": "MODE"})) as session:
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer)
    checkpointing._FILE_BYTES = 50_000
    check(session, session.shard(model) if session.sharded else model)
"""


@pytest.mark.parametrize("mode", ["fsdp2", "ddp"])
def test_all_ranks_are_told_by_one_that_it_cannot_write_its_files_of_the_model(place, mode):
    place.module("cannot_write", CANNOT_WRITE.replace("MODE", mode))
    place.ranks(module="cannot_write", timeout_s=180)


CANNOT_PUBLISH = """
from pathlib import Path
from llmrl.errors import CheckpointError
from llmrl.recipes.sft import train
from llmrl.train.distributed import Session
from llmrl.train.run import Run
from llmrl.train.settings import SFTConfig

def no_draft(checkpoints):
    checkpoints.write_text("a file where the folder must be")

def no_rename(checkpoints):
    for name in ("step2", ".replaced-step2"):
        (checkpoints / name / "in the way").mkdir(parents=True)

def message(session, name, spoil, **checkpoint):
    config = SFTConfig(model=MODEL, data={"path": "sums", "rows": 40}, batch_size=8, steps=6, optim={"lr": 1e-3},
                       checkpoint={"every": 2, **checkpoint}, samples=1, parallel={"mode": "MODE"})
    folder = Path("runs", name)
    if session.is_first:
        folder.mkdir(parents=True)
    session.wait()
    try:
        with Run(config, session, folder) as run:
            if session.is_first:
                spoil(folder / "checkpoints")
            train(config, session, run)
    except CheckpointError as error:
        return str(error)

MODEL = {"hidden_size": 32, "layers": 1, "heads": 2}
with Session(SFTConfig(model=MODEL, data={"path": "sums"}, parallel={"mode": "MODE", "timeout_s": 60})) as session:
    for name, spoil, cause, options in (
        ("draft", no_draft, "File exists", {}),
        ("sealed", no_rename, "Directory not empty", {"asynchronous": False}),
        ("later", no_rename, "Directory not empty", {}),
    ):
        said = message(session, name, spoil, **options)
        assert said and "step 2 could not be written" in said, said
        assert cause in said and "rank 0 on " in said, said
        assert session.gather([said]) == [said] * 2, "the ranks are in step"
"""


@pytest.mark.parametrize("mode", ["fsdp2", "ddp"])
def test_all_ranks_are_told_by_the_first_that_it_cannot_begin_or_publish_a_checkpoint(place, mode):
    place.module("cannot_publish", CANNOT_PUBLISH.replace('MODE"', f'{mode}"'))
    place.ranks(module="cannot_publish", timeout_s=300)


def test_a_sharded_run_goes_on_with_one_process_and_then_with_three(place):
    save_tiny("tied")
    changes = {"model": "tied", "steps": 6, "batch_size": 9, "optim": OPTIM, "checkpoint": {"every": 2, "keep": 5}}
    settings = place.recipe("sums", "sft", **changes)
    place.run("sft", settings, "--name", "one")
    options = ("parallel.mode=fsdp2", "steps=2", "--name", "two")
    place.finish(place.process(settings, *options, module="llmrl.recipes.sft", ranks=2))
    shards = [f"shard-0000{rank}-model-00001-of-00001.safetensors" for rank in (1, 2)]
    assert sorted(path.name for path in (place.checkpoint("two", 2) / "shards").iterdir()) == shards
    assert "lm_head.weight" not in load_file(place.checkpoint("two", 2) / "model.safetensors"), "it is tied"
    place.run("resume", "two", "steps=4")
    assert not (place.checkpoint("two", 4) / "shards").exists(), "one process has whole tensors"
    place.ranks("resume", "two", "steps=6", ranks=3)
    place.same("one", "two", tolerance=1e-5, step=6)
    shutil.rmtree(place.checkpoint("two", 6))
    shutil.rmtree(place.checkpoint("two", 4))  # of three ranks' run: one that goes on from two ranks'
    place.ranks("resume", "two", ranks=3)
    place.same("one", "two", tolerance=1e-5, step=6)


def test_two_copies_of_a_model_on_two_processes_each_have_the_numbers_of_one(place):
    changes = {"steps": 4, "batch_size": 9, "optim": OPTIM, "env": {"name": "sums"}, "eval": {"rows": 3}}
    overrides, words = ("parallel.mode=fsdp2", "parallel.replicas=2"), ["4 processes, FSDP2 in 2 copies of 2 parts"]
    place.train_as_one_and_as_ranks("sft", *overrides, step=4, ranks=4, words=words, **changes)
    words = ["parallel.replicas  must divide the 2 processes: got 3"]
    place.ranks("sft", "mine.yaml", "parallel.mode=fsdp2", "parallel.replicas=3", code=None, words=words)


DIES_ONCE = """
import os
from llmrl.train.updater import Updater
step = Updater.step
def dying(self, loss, batch, number):
    if number == {at} and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os._exit(9)
    return step(self, loss, batch, number)
Updater.step = dying
from llmrl.commands.cli import main
main()
"""


@pytest.mark.parametrize(("name", "at"), [("mine", 6), (None, 2)])
def test_a_run_whose_rank_died_goes_on_in_its_folder_when_the_launcher_restarts_it(place, name, at):
    settings = place.recipe("sums", "sft", steps=7, batch_size=8, optim=OPTIM, checkpoint={"every": 4, "keep": 5})
    place.run("sft", settings, "--name", "straight")
    place.module("dies_once", DIES_ONCE.format(at=at))
    named = () if name is None else ("--name", name)
    place.finish(place.process("sft", settings, *named, module="dies_once", ranks=2, restarts=1))
    (folder,) = (path for path in (place.path / "runs").iterdir() if path.name != "straight")
    assert name is None or folder.name == name
    place.same("straight", folder.name, tolerance=1e-5, step=7)
