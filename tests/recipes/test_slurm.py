"""``llmrl launch --slurm``: a job of two nodes that is queued again, one with engines; what is refused."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys

import pytest

from tests.support.processes import descendants, is_running, wait_until
from tests.support.ranks import ROOT

SRUN = """
import os, shlex, signal, subprocess, sys

given = {}
words = sys.argv[1:]
while words[0].startswith("--"):
    name, _, value = words.pop(0).partition("=")
    given[name] = value
nodes = given["--nodelist"].split(",")
assert int(given["--nodes"]) == int(given["--ntasks"]) == len(nodes), given
tasks = []
for number, node in enumerate(nodes):
    own = {"SLURM_PROCID": number, "SLURM_NODEID": number, "SLURM_LOCALID": 0, "SLURMD_NODENAME": node}
    own |= {"SLURM_NTASKS": len(nodes), "SLURM_STEP_NODELIST": given["--nodelist"]}
    out = open(given["--output"], "ab") if "--output" in given else None
    tasks.append(subprocess.Popen(words, env=os.environ | {k: str(v) for k, v in own.items()}, stdout=out, stderr=out))
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, frame: [task.send_signal(number) for task in tasks])
sys.exit(max(task.wait() % 256 for task in tasks))
"""
SCONTROL = """
import pathlib, sys
if sys.argv[1:3] == ["show", "hostnames"]:
    print(*sys.argv[3].split(","), sep="\\n")
else:
    pathlib.Path("asked").write_text(" ".join(sys.argv[1:]))
"""
SBATCH = "import sys; print('Submitted batch job 7'); print(open(sys.argv[1]).readline(), end='')"
REFUSES = "import sys; sys.exit('sbatch: error: invalid partition specified: long')"
NODES = ["127.0.0.1", "127.0.0.2"]  # each one is this machine


@pytest.fixture
def slurm(place, monkeypatch):
    """Slurm's commands, as small programs that start one process for each node on this machine."""
    folder = place.path / "slurm"
    folder.mkdir()

    def add(name, program):
        (folder / name).write_text(f"#!{sys.executable}\n{program}")
        (folder / name).chmod(0o755)

    for name, program in (("srun", SRUN), ("scontrol", SCONTROL), ("sbatch", SBATCH)):
        add(name, program)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return add


def start(place, script, job, nodes):
    """The job as Slurm starts it: one shell on the first node, with the variables of the job."""
    (place.path / "job.sbatch").write_text(script)
    own = {"SLURM_JOB_ID": str(job), "SLURM_JOB_NODELIST": ",".join(nodes), "SLURM_JOB_NUM_NODES": str(len(nodes))}
    environment = os.environ | own | {"PYTHONPATH": f"{place.path}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        ["bash", "job.sbatch"], cwd=place.path, env=environment, stdout=pipe, stderr=pipe, text=True
    )


@pytest.mark.slow
def test_a_job_of_two_nodes_saves_before_its_time_limit_and_goes_on_to_the_end(place, slurm):
    recipe, job = place.recipe("mine", "sft"), random.randrange(10**6)
    printed = ("launch", "sft", recipe, "--slurm", "--print", "--nodes", "2", "--time", "30")
    name = f"job{job}"

    first = start(place, place.run(*printed, "steps=100000").out, job, NODES)
    try:
        place.wait_for_lines(first, name, 2)
        first.send_signal(signal.SIGUSR1)  # Slurm's, before the time limit
        place.finish(first, code=None)
    finally:
        first.kill()
    (saved,) = place.checkpoints(name)
    done = int(saved.removeprefix("step"))
    assert done == len(place.steps(name)) >= 2
    assert (place.path / "asked").read_text() == f"requeue {job}"

    (place.path / "asked").unlink()
    again = start(place, place.run(*printed, f"steps={done + 2}").out, job, NODES)
    place.finish(again, words=["2 processes, DDP"])
    assert [step["step"] for step in place.steps(name)] == list(range(1, done + 3))
    assert not (place.path / "asked").exists(), "it is done"


@pytest.mark.vllm
@pytest.mark.slow
def test_the_last_node_of_a_job_has_the_engines(place, slurm):
    rollout = {"engine": "vllm", "gpus": 1, "options": {"kv_cache_memory_bytes": 1 << 27}}
    recipe = place.recipe("mine", "grpo", model={"hidden_size": 64, "layers": 1, "heads": 2}, rollout=rollout)
    port = random.randrange(20000, 30000)
    script = place.run("launch", "grpo", recipe, "--slurm", "--print", "--nodes", "2", "--port", port, "steps=1").out
    job = start(place, script, random.randrange(10**6), NODES)
    log = place.path / f"runs/.launch/server-{NODES[1]}-{port}.log"
    try:
        wait_until(lambda: log.exists() or job.poll() is not None)
        started = [pid for pid, command in descendants(job.pid) if "api_server" in command]
        assert started, place.finish(job, code=None).err
        place.finish(job, words=[f"vLLM behind http://{NODES[1]}:{port}"])
    finally:
        job.kill()
    (run,) = (path.name for path in (place.path / "runs").glob("job*"))
    assert len(place.steps(run)) == 1
    assert log.read_text(errors="replace").count("POST /update_weight_version") == 1 + 1
    wait_until(lambda: not any(is_running(pid) for pid in started))


def test_a_job_is_submitted_with_the_nodes_that_the_plan_needs(place, slurm):
    recipe = place.recipe("mine", "sft", batch_size=16)
    options = ("--gpu", "H100:8x2", "--time", "1-12", "--sbatch", "partition=long")
    assert place.run("launch", "sft", recipe, "--slurm", *options).out.startswith("Submitted batch job 7\n#!/bin/bash")
    script = (place.path / "runs/.launch/llmrl.sbatch").read_text()
    lines = {line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH")}
    assert {"nodes=2", "gpus-per-node=8", "time=1-12", "signal=B:USR1@600", "requeue", "partition=long"} <= lines
    assert "--nnodes 2 --nproc-per-node 8" in script
    slurm("sbatch", REFUSES)
    place.run("launch", "sft", recipe, "--slurm", *options, code=4, words=["invalid partition specified: long"])


def test_a_job_that_cannot_be_is_refused(place, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    sft, grpo = (("launch", name, place.recipe(name, name)) for name in ("sft", "grpo"))
    words = ["submits by sbatch, which is not on this machine's PATH", "--print"]
    place.run(*sft, "--slurm", "--nodes", "2", code=2, words=words)
    place.run(*sft, "--nodes", "2", code=2, words=["add --slurm"])
    prints = ("--slurm", "--print")
    place.run(*sft, *prints, code=2, words=["such as H100:8x2, or --nodes N of CPUs"])
    place.run(*sft, *prints, "--nodes", "2", "--time", "soon", code=2, words=["--time soon must be a time of sbatch"])
    place.run(*sft, *prints, "--nodes", "2", "--trainers", "3", code=2, words=["--trainers 3", "each of the 2 nodes"])
    engines = ("rollout.engine=vllm", "rollout.gpus=4")
    monkeypatch.setattr("llmrl.train.planning.early_checks.check_packages", lambda config: None)  # without vLLM too
    place.run(*grpo, *engines, *prints, "--gpu", "H100:8x2", code=2, words=["take whole nodes", "2 nodes of 8"])
    place.run(*grpo, *prints, "--nodes", "3", code=2, words=["prompts_per_step 4 must be a multiple of the 3 trainers"])
