"""Runs that end early: a full disk, Ctrl-C, a kill. What was saved before is whole, and the run goes on from it."""

import errno
import hashlib
import json
import os
import shutil
import signal
import sys
from contextlib import suppress

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import llmrl.recipes.grpo
from llmrl.collectors.llm import LLMCollector
from llmrl.envs.llm import DatasetChatEnv
from llmrl.errors import RolloutError
from llmrl.run.checkpoint import CheckpointStore
from llmrl.run.files import open_file
from llmrl.train.rollouts.engine import RolloutEngine
from llmrl.train.tasks import Task
from tests.support.processes import descendants, is_running, wait_until

WATCH = """
import os, signal

def interrupt_once(completion, answer):
    flag = os.path.join(os.path.dirname(__file__), "interrupted")
    if answer == "{answer}" and not os.path.exists(flag):
        open(flag, "w").close()
        os.kill(os.getpid(), signal.{signal})
    return len(completion)
"""


def no_space(*arguments, **options):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.slow
@pytest.mark.parametrize(("owner", "method"), [(torch, "save"), (PreTrainedModel, "save_pretrained")])
def test_a_full_disk_leaves_the_checkpoint_before_it_and_the_run_goes_on_from_there(place, monkeypatch, owner, method):
    changes = {"steps": 4, "checkpoint": {"every": 2}}
    place.train("grpo", "straight", **changes)
    write, calls = getattr(owner, method), []

    def fill_up(*arguments, **options):
        calls.append(arguments)
        return write(*arguments, **options) if len(calls) == 1 else no_space()

    monkeypatch.setattr(owner, method, fill_up)
    words = ["step 4 could not be written", "No space left on device", "step2 is intact", "llmrl resume"]
    place.train("grpo", "full", code=4, words=words, **changes)
    assert place.checkpoints("full") == ["step2"]
    AutoModelForCausalLM.from_pretrained(place.path / "runs/full/checkpoints/step2")
    monkeypatch.undo()
    monkeypatch.chdir(place.path)
    place.run("resume", "full")
    place.same("straight", "full")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs the device that is always full")
def test_a_full_disk_at_the_resumption_is_one_line_and_loses_nothing(place, monkeypatch):
    def on_a_full_disk(path, *arguments, **options):
        is_draft = path.name.startswith(".metrics.jsonl")
        return open("/dev/full", "wb") if is_draft else open_file(path, *arguments, **options)

    place.train("sft", "run")
    words = ["metrics.jsonl: cannot be written: No space left on device; "]
    with monkeypatch.context() as patch:
        patch.setattr("llmrl.run.files.open_file", on_a_full_disk)
        result = place.run("resume", "run", "steps=4", code=3, words=words)
    assert len(result.err.splitlines()) == 1
    assert "steps: 3" in (place.path / "runs/run/config.yaml").read_text()
    place.run("resume", "run", "steps=4")
    assert [row["step"] for row in place.steps("run")] == [1, 2, 3, 4]


def test_a_run_whose_folder_was_removed_ends_with_one_line(place):
    score = "import shutil\ndef score(completion, answer):\n    shutil.rmtree('runs/run', ignore_errors=True)\n"
    place.module("remove", f"{score}    return 1.0\n")
    words = ["runs/run/metrics.jsonl: cannot be written", "the folder was removed"]
    result = place.train("grpo", "run", code=3, words=words, env={"reward": "remove:score"})
    assert len(result.err.splitlines()) == 1
    assert not (place.path / "runs/run").exists()


def test_a_run_goes_on_without_the_reader_of_its_output(place, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as gone, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", gone)
        place.train("sft", "run")
    assert place.checkpoints("run") == ["step3"]


def test_ctrl_c_before_the_first_step_ends_the_run_at_once(place):
    stop = "def stop(*a, **k):\n    os.kill(os.getpid(), signal.SIGINT)\n    return 1.0\n"
    place.module("first", f"import os, signal\n{stop}")
    place.rows("held_out.jsonl", [{"prompt": "Say 1", "answer": "1"}])
    reward = {"reward": None, "rewards": [{"fn": "first:stop", "process": False}]}
    place.train("grpo", "run", code=130, words=["interrupted"], env=reward, eval={"dataset": "held_out.jsonl"})
    assert not (place.path / "runs/run/checkpoints").exists()


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_an_interrupted_run_finishes_its_step_writes_a_checkpoint_and_goes_on_later(place, name):
    handler = signal.getsignal(signal.SIGINT)  # of whoever started the tests: a job in the background ignores it
    place.module("watch", WATCH.format(answer=9, signal=name))
    env = {"reward": None, "rewards": [{"fn": "watch:interrupt_once", "process": False}]}
    changes = {"steps": 5, "env": env, "optim": {"schedule": "cosine"}, "checkpoint": {"every": 0}}
    place.train("grpo", "stopped", code=130, words=["interrupted", "llmrl resume runs/stopped"], **changes)
    done = len(place.steps("stopped"))
    assert 0 < done < 5
    assert place.checkpoints("stopped") == [f"step{done}"]
    assert signal.getsignal(signal.SIGINT) is handler
    place.run("resume", "stopped")
    place.train("grpo", "straight", **changes)
    place.same("straight", "stopped")


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "model.safetensors has other content": lambda folder: flip(folder / "model.safetensors"),
    "trainer.pt has other content": lambda folder: flip(folder / "trainer.pt"),
    "trainer.pt has 5 of ": lambda folder: os.truncate(folder / "trainer.pt", 5),
    "config.json has 0 of ": lambda folder: os.truncate(folder / "config.json", 0),
    "tokenizer.json is missing": lambda folder: (folder / "tokenizer.json").unlink(),
    "checksums.json: must list": lambda folder: (folder / "checksums.json").write_bytes(b"\xff{"),
    "No such file": lambda folder: (folder / "checksums.json").unlink(),
}


def test_a_damaged_checkpoint_is_named_and_the_run_goes_on_from_the_one_before(place):
    place.train("sft", "straight", steps=8, checkpoint={"every": 1, "keep": 8})
    shutil.copytree(place.path / "runs/straight", place.path / "runs/run")
    folder = place.path / "runs/run/checkpoints"
    for step, damage in enumerate(DAMAGE.values(), 2):
        damage(folder / f"step{step}")
    words = ["step8/checksums.json: must list the files of the checkpoint"]
    place.run("eval", "run", "env.name=sums", "eval.rows=2", code=3, words=words)
    place.run("resume", "run", words=[*DAMAGE, "going on from step1"])
    steps = range(2, 9)
    assert place.checkpoints("run") == [
        *(f"damaged-step{step}" for step in steps),
        "step1",
        *map("step{}".format, steps),
    ]
    place.same("straight", "run")


def test_without_a_whole_checkpoint_nothing_changes_and_every_fault_is_named(place):
    place.train("sft", "broken", checkpoint={"every": 1})
    folder = place.path / "runs/broken/checkpoints"
    (folder / "step3/trainer.pt").write_bytes(b"not a checkpoint")
    flip(folder / "step2/model.safetensors")
    words = ["step3: must be", "trainer.pt has 16 of ", "step2: must be", "model.safetensors has other content"]
    assert "Traceback" not in place.run("resume", "broken", "steps=5", code=3, words=words).err
    assert place.checkpoints("broken") == ["step2", "step3"]
    assert "steps: 3" in (place.path / "runs/broken/config.yaml").read_text()
    place.run("sft", "model=runs/broken", "data.path=sums", "steps=1", code=3, words=["trainer.pt has 16 of "])


class Payload:
    """Unpickled, it makes a folder."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_nothing_that_a_run_or_a_model_folder_holds_is_executed(place):
    ran = place.path / "ran"
    place.train("sft", "run")
    folder = place.path / "runs/run/checkpoints/step3"
    torch.save({"step": 3, "rng": Payload(ran)}, folder / "trainer.pt")
    content = (folder / "trainer.pt").read_bytes()
    sums = json.loads((folder / "checksums.json").read_text())
    sums["trainer.pt"] = {"size": len(content), "blake2b": hashlib.blake2b(content).hexdigest()}
    (folder / "checksums.json").write_text(json.dumps(sums))
    place.run("resume", "run", "steps=5", code=3, words=["trainer.pt cannot be read"])

    def skipped(*arguments):
        return ["model.safetensors", "checksums.json"]

    model = shutil.copytree(folder, place.path / "model", ignore=skipped)
    torch.save({"model.embed_tokens.weight": Payload(ran)}, model / "pytorch_model.bin")
    place.run("sft", "model=model", "data.path=sums", "steps=1", code=3)

    settings = json.loads((model / "config.json").read_text()) | {"model_type": "mine"}
    settings["auto_map"] = {"AutoConfig": "mine.Mine", "AutoModelForCausalLM": "mine.Mine"}
    (model / "config.json").write_text(json.dumps(settings))
    (model / "mine.py").write_text(f"import os\nos.mkdir({str(ran)!r})\n")
    place.run("sft", "model=model", "data.path=sums", "steps=1", code=3)
    assert not ran.exists()


def test_a_state_that_could_not_be_read_back_is_refused_when_it_is_saved(place, monkeypatch):
    from llmrl.data.replay_buffers import SamplerWithoutReplacement

    monkeypatch.setattr(SamplerWithoutReplacement, "state_dict", lambda self: {"folder": Payload("ran")})
    assert "Traceback" not in place.train("sft", "run", code=4, words=["a state must consist of tensors"]).err


@pytest.mark.slow
def test_ctrl_c_in_a_terminal_ends_a_run_with_a_checkpoint_and_exit_code_130(place):
    settings = place.recipe("long", "sft", steps=100_000, data={"rows": 400})
    process = place.process("sft", settings, "--name", "long")
    place.wait_for_step(process, 3)
    process.send_signal(signal.SIGINT)
    assert "Traceback" not in place.finish(process, code=130).err
    (name,) = place.checkpoints("long")
    done = len(place.steps("long"))
    assert name == f"step{done}"
    place.run("resume", "long", f"steps={done + 2}")
    assert len(place.steps("long")) == done + 2


@pytest.mark.slow
@pytest.mark.parametrize("command", ["sft", "grpo"])
def test_a_killed_run_goes_on_as_if_nothing_had_happened(place, command):
    optim = {"schedule": "cosine", "warmup": 5}
    settings = place.recipe("kill", command, steps=60, optim=optim, checkpoint={"every": 7, "keep": 2})
    place.run(command, settings, "--name", "straight")
    process = place.process(command, settings, "--name", "killed")
    place.wait_for_step(process, 10)
    place.wait_for_checkpoint(process, "killed")
    process.kill()
    place.finish(process, code=-signal.SIGKILL)
    assert 10 <= len(place.steps("killed")) < 60
    place.run("resume", "killed")
    place.same("straight", "killed")
    if command == "grpo":
        place.same_rollouts("straight", "killed", 60)


@pytest.mark.slow
def test_one_command_begins_a_run_begins_it_again_and_goes_on(place):
    """As a queue starts a job again whose machine it took away."""
    settings = place.recipe("mine", "sft", checkpoint={"every": 4, "keep": 9})
    place.run("sft", settings, "steps=6", "--name", "straight")
    command = ("sft", settings, "--name", "job7", "--resume")
    (place.path / "runs/job7").mkdir()  # killed before it wrote its first file
    job = place.process(*command, "steps=100000", "checkpoint.every=0", start_new_session=True)
    place.wait_for_lines(job, "job7", 3)
    place.run(*command, code=3, words=["must have one process at a time"])
    assert place.num_lines("job7") >= 3, "it took nothing from the one that runs"
    os.killpg(job.pid, signal.SIGKILL)
    job.communicate()
    assert not (place.path / "runs/job7/checkpoints").exists() or place.checkpoints("job7") == []

    place.run(*command, "steps=4")
    assert [row["step"] for row in place.steps("job7")] == [1, 2, 3, 4], "from its first step"
    place.run(*command, "steps=6")
    assert place.checkpoints("job7") == ["step4", "step6"]
    place.same("straight", "job7")
    assert "steps: 6  # command line" in (place.path / "runs/job7/config.yaml").read_text()
    for change, words in (("seed=3", "seed  cannot change in a resumed run"), ("data.rows=9", "data  cannot change")):
        place.run(*command, change, code=2, words=[words])
    other = ("grpo", "env.name=sums", "model=x", "--name", "job7", "--resume")
    place.run(*other, code=2, words=["job7 is a run of sft"])
    place.run("sft", settings, "--resume", code=2, words=["--resume continues the run named by --name"])


@pytest.mark.slow
def test_two_ranks_that_were_killed_before_their_first_checkpoint_begin_again(place):
    settings = place.recipe("mine", "sft", steps=4)
    place.run("sft", settings, "--name", "straight")
    command = ("sft", settings, "--name", "job7", "--resume")
    job = place.process(*command, "steps=100000", ranks=2, start_new_session=True)
    place.wait_for_lines(job, "job7", 1)
    ranks = descendants(job.pid)
    for pid in (job.pid, *(pid for pid, _ in ranks)):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    job.communicate()
    wait_until(lambda: not any(is_running(pid) for pid, _ in ranks))
    place.ranks(*command)
    place.same("straight", "job7", tolerance=1e-5)


@pytest.mark.parametrize(
    ("owner", "name", "made"),
    [(llmrl.recipes.grpo, "make_source", ()), (LLMCollector, "shutdown", (DatasetChatEnv,))],
)
def test_whatever_fails_all_parts_of_a_run_are_closed(place, monkeypatch, owner, name, made):
    closed = set()

    def record(part):
        close = part.close

        def closing(self, *arguments, **options):
            closed.add(part)
            return close(self, *arguments, **options)

        monkeypatch.setattr(part, "close", closing)

    def fail(*arguments, **options):
        raise RolloutError("broken")

    parts = (RolloutEngine, Task, CheckpointStore, *made)
    for part in parts:
        record(part)
    monkeypatch.setattr(owner, name, fail)
    place.train("grpo", "run", code=4, words=["broken"])
    assert closed == set(parts)
