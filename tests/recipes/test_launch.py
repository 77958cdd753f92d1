"""``llmrl launch``: servers and ranks as one command; a server that dies, what is refused, what is left behind."""

from __future__ import annotations

import importlib
import os
import signal
import socket
import subprocess
import sys

import pytest
import torch

from llmrl.commands.launch import Command, Launch, run_launch
from llmrl.errors import WorkerError
from llmrl.modules.llm.engines.vllm.compat import EXTENSION, server_command
from tests.support.processes import descendants, is_running, wait_until

MODEL = {"hidden_size": 64, "layers": 1, "heads": 2}  # heads of 32, the smallest that vLLM computes on a CPU
ROLLOUT = {"engine": "vllm", "gpus": 2, "options": {"kv_cache_memory_bytes": 1 << 27}}
PATIENCE_S = 500


def free_ports():
    """The first of two."""
    while True:
        with socket.socket() as one, socket.socket() as two:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
            try:
                two.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return port


def log_of(place, port):
    return (place.path / "runs/.launch" / f"server-{port}.log").read_text(errors="replace")


@pytest.mark.vllm
@pytest.mark.slow
def test_two_servers_and_two_ranks_one_server_dies_and_ctrl_c_leaves_a_checkpoint_and_no_process(place):
    port = free_ports()
    name = place.recipe("mine", "grpo", model=MODEL, rollout=ROLLOUT, zero_variance="keep", parallel={"mode": "fsdp2"})
    arguments = ("launch", "grpo", name, "--name", "run", "--trainers", "2", "--port", port, "steps=100000")
    launch = place.process(*arguments, start_new_session=True)

    try:
        place.wait_for_lines(launch, "run", 3)
        pushes = [log_of(place, number).count("POST /update_weight_version") for number in (port, port + 1)]
        steps = place.num_lines("run")
        assert 3 <= pushes[0] <= steps + 2, "one by each version, the first before the first step, not one by each rank"
        assert abs(pushes[0] - pushes[1]) <= 1

        started = descendants(launch.pid)
        (second,) = [pid for pid, command in started if f"--port={port + 1}" in command and "api_server" in command]
        os.kill(second, signal.SIGKILL)
        place.wait_for_lines(launch, "run", place.num_lines("run") + 5)
        os.kill(launch.pid, signal.SIGINT)
        words = [f"server http://127.0.0.1:{port + 1} was killed by SIGKILL; it is restarted"]
        place.finish(launch, timeout_s=PATIENCE_S, code=130, words=words)
    finally:
        launch.kill()
    rows = place.steps("run")
    for step in rows:
        assert step["rollout/failed"] == 0, "asked again elsewhere"
        assert len(place.rollouts("run", int(step["step"]))) == 16
        assert step["mismatch/logp_abs_max"] < 1e-4, "sampled by the weights of this version"
    assert place.checkpoints("run") == [f"step{len(rows)}"]
    wait_until(lambda: not any(is_running(pid) for pid, _ in started))


@pytest.mark.vllm
def test_the_command_of_a_server_is_one_that_vllm_reads():
    options = {"max_model_len": -1, "dtype": "bfloat16", "tensor_parallel_size": 2, "hf_overrides": {"a": 1}}
    options |= {"disable_log_stats": False, "enable_prefix_caching": False}
    words, variables = server_command("org/model", options, host="127.0.0.1", port=8100)
    assert variables["VLLM_SERVER_DEV_MODE"] == "1"
    make = importlib.import_module("vllm.entrypoints.launchers.cli_args").make_arg_parser
    parser = make(importlib.import_module("vllm.utils.argparse_utils").FlexibleArgumentParser())
    read = parser.parse_args([word for word in words if word.startswith("--")])
    assert (read.model, read.port, read.host) == ("org/model", 8100, "127.0.0.1")
    assert {name: getattr(read, name) for name in options} == options
    assert (read.logprobs_mode, read.worker_extension_cls) == ("processed_logprobs", EXTENSION)


@pytest.mark.vllm
def test_any_command_that_samples_is_launched(place):
    recipe = place.recipe("critic", "grpo", rollout=ROLLOUT)
    planned = place.run("launch", "ppo", recipe, "--dry-run", "--trainers", "1").out
    assert "llmrl.commands.cli ppo critic" in planned
    assert "critic" in planned.partition("-m llmrl")[0], "its own plan"


# --- what is refused, and how a part ends


def test_engines_on_gpus_of_their_own_need_the_launcher(place, monkeypatch):
    monkeypatch.setattr("llmrl.train.planning.early_checks.check_packages", lambda config: None)  # without vLLM too
    launch = ("launch", "grpo", place.recipe("mine", "grpo", rollout=ROLLOUT))
    place.run(*launch[1:], code=2, words=["did you mean  llmrl launch grpo"])
    place.run(*launch, "rollout.gpus=0", code=2, words=["rollout.gpus=N"])
    place.run(*launch, "rollout.servers=[http://a:1]", code=2, words=["leave out rollout.servers"])
    place.run(
        "launch", "sft", "sums_sft", code=2, words=["needs a command that samples, such as grpo: sft trains on rows"]
    )
    place.run("launch", "grop", code=2, words=["grop"])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        words = [f"needs port {port} for a server: Address already in use", "--port"]
        place.run(*launch, "--port", port, "rollout.gpus=1", code=2, words=words)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_engines_and_a_trainer_that_need_more_gpus_than_there_are_are_refused(place):
    count = torch.cuda.device_count()
    name = place.recipe("mine", "grpo", rollout={**ROLLOUT, "gpus": count})
    words = [f"needs 1 + {count} GPUs (--trainers, rollout.gpus): got {count}"]
    place.run("launch", "grpo", name, "--trainers", "1", code=2, words=words)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("print('no room'); raise SystemExit(3)", r"(?s)within 2 s.*exit code 3.*no room"),
        ("import time; print('slow', flush=True); time.sleep(60)", r"(?s)within 2 s: it runs.*slow"),
    ],
    ids=["ends", "hangs"],
)
def test_a_server_that_does_not_answer_is_named_with_the_end_of_its_log(tmp_path, program, message):
    launch = Launch([], {"http://127.0.0.1:1": Command([sys.executable, "-c", program])}, Command([]))
    said = []
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(WorkerError, match=message):
        run_launch(launch, runs=tmp_path, wait_s=2, say=said.append)
    assert len(said) == 1
    assert str(tmp_path / ".launch/server-1.log") in said[0]
    assert signal.getsignal(signal.SIGINT) is before
    assert not [command for _, command in descendants(os.getpid()) if program in command], "nothing is left"


LAUNCH = """
import sys
from pathlib import Path
from llmrl.commands.launch import Command, Launch, run_launch
ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "rank.py"]
launch = Launch([], {}, Command([sys.executable, *ranks]))
sys.exit(run_launch(launch, runs=Path(), wait_s=60, say=print))
"""


def test_the_exit_code_and_the_last_line_are_those_of_the_rank_that_failed(tmp_path):
    (tmp_path / "rank.py").write_text(
        "import os, sys, time\nfrom llmrl.commands.cli import _tell_launcher\n"
        "if os.environ['RANK'] == '1': _tell_launcher('the engine is down'); sys.exit(7)\ntime.sleep(600)"
    )
    # A deadline below the 600 s of the other rank, which is not waited for.
    ended = subprocess.run([sys.executable, "-c", LAUNCH], cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert ended.returncode == 7, ended.stderr
    assert ended.stderr.splitlines()[-1] == "error         the engine is down"
