"""``llmrl launch --slurm``: a run on several nodes as one job of Slurm, by a script that is printed or submitted."""

from __future__ import annotations

import importlib
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmrl.commands.launch import served_model
from llmrl.errors import ConfigError, WorkerError
from llmrl.run.console import make_console, print_plan

if TYPE_CHECKING:
    from llmrl.train.gpus import GPU

_TIME_LIMIT = "24:00:00"
_SAVING_S = 600  # before the time limit the ranks finish a step and save it
_SUBMITTED_S = 120.0
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d+))?(?::(?P<third>\d+))?")


@dataclass(frozen=True)
class Job:
    """The job: ``nodes`` with ``gpu.count / nodes`` GPUs each (None: with CPUs alone), its ``time`` limit and further
    ``options``, both as sbatch reads them.
    """

    nodes: int
    gpu: GPU | None
    time: str
    options: Sequence[str] = ()

    @property
    def each(self) -> int:
        """The GPUs of a node; 1 for a CPU, where an engine is a process."""
        return self.gpu.count // self.nodes if self.gpu else 1

    @property
    def saving_s(self) -> int:
        """Seconds before the time limit at which the job is asked to end: ten minutes, or half of a short job."""
        return min(_SAVING_S, seconds_of(self.time) // 2)


def seconds_of(time: str) -> int:
    """The seconds of a time limit of sbatch: minutes, minutes:seconds, hours:minutes:seconds, or days-hours and so on.

    Raises  ConfigError

    >>> seconds_of("90"), seconds_of("24:00:00"), seconds_of("1-12:30")
    (5400, 86400, 131400)
    """
    if not (found := _TIME.fullmatch(time)) or not (total := _seconds(found)):
        raise ConfigError(
            f"llmrl launch --time {time}  must be a time of sbatch, such as 90 (minutes), 24:00:00 or 2-12:00:00"
        )
    return total


def _seconds(found: re.Match[str]) -> int:
    first, *more = (int(part) for part in found.group("first", "second", "third") if part is not None)
    units = (3600, 60, 1) if found["days"] or len(more) == 2 else (60, 1)
    return 86400 * int(found["days"] or 0) + sum(n * unit for n, unit in zip((first, *more), units, strict=False))


def submit(
    module: str,
    config: Any,
    arguments: Sequence[str],
    *,
    gpu: str | None,
    nodes: int | None,
    time: str | None,
    sbatch: Sequence[str],
    runs: Path,
    port: int,
    trainers: int | None,
    wait_s: float,
    print_only: bool,
    dry_run: bool,
) -> int:
    """Submits the job that trains by ``config`` and returns the exit code.

    gpu         the nodes and their GPUs, as `parse_gpu` reads them; None: ``nodes`` without GPUs
    print_only  prints the script instead; with ``dry_run`` after the plan
    For the other arguments see `llmrl.commands.launch.launch`.

    Raises  ConfigError if the nodes cannot run it, or this machine has no sbatch; WorkerError if sbatch refuses the job
    """
    time = time or _TIME_LIMIT
    seconds_of(time)
    submits = not print_only and not dry_run
    if submits and shutil.which("sbatch") is None:
        raise ConfigError(
            "llmrl launch --slurm  submits by sbatch, which is not on this machine's PATH: run it where jobs are "
            "submitted, or write the script with --print and submit it there"
        )
    from llmrl.train.gpus import parse_gpu

    if (gpu is None) == (nodes is None):
        raise ConfigError(
            "llmrl launch --slurm  needs the nodes: --gpu NAME:COUNTxNODES, such as H100:8x2, or --nodes N of CPUs"
        )
    found = parse_gpu(gpu) if gpu else None
    job = Job(found.nodes if found else nodes or 1, found, time, sbatch)
    rows, text = _plan(module, config, list(arguments), job, runs, port, trainers, wait_s, writes=not dry_run)
    if dry_run:
        print_plan(make_console(), "launch --slurm (dry run)", rows)
    if not submits:
        print(text, end="")
        return 0
    file = runs / ".launch" / "llmrl.sbatch"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    done = subprocess.run(["sbatch", str(file)], capture_output=True, text=True, timeout=_SUBMITTED_S)
    if done.returncode:
        raise WorkerError(f"llmrl launch --slurm: sbatch must accept {file}: it said: {done.stderr.strip()}")
    print(done.stdout.strip())
    return 0


def _plan(
    module: str,
    config: Any,
    arguments: list[str],
    job: Job,
    runs: Path,
    port: int,
    trainers: int | None,
    wait_s: float,
    *,
    writes: bool,
) -> tuple[list[tuple[str, str]], str]:
    """The rows of the plan, and the script. ``writes``: also the files of a model that servers need."""
    from llmrl.train.planning.memory import trainer_gpus

    recipe, rollout = importlib.import_module(module), getattr(config, "rollout", None)
    engines, parts = (rollout.gpus, rollout.tensor_parallel) if rollout is not None else (0, 1)
    if engines and rollout.servers:
        raise ConfigError("llmrl launch  starts servers itself: leave out rollout.servers")
    if engines % job.each or engines >= job.nodes * job.each:
        raise ConfigError(
            f"rollout.gpus {engines}  engines of a job take whole nodes, the last ones, and leave nodes to the "
            f"trainers: got {job.nodes} nodes of {job.each}"
        )
    if engines and job.each % parts:
        raise ConfigError(f"rollout.tensor_parallel {parts}  must divide the {job.each} of a node: a server is on one")
    nodes = job.nodes - engines // job.each
    ranks = trainers or (trainer_gpus(config, job.gpu).count if job.gpu else nodes)
    if ranks % nodes or (job.gpu and ranks > nodes * job.each):
        raise ConfigError(
            f"--trainers {ranks}  must be the same number on each of the {nodes} nodes that train"
            + f", at most {job.each}" * bool(job.gpu)
        )
    if getattr(config, "prompts_per_step", ranks) % ranks:
        raise ConfigError(f"prompts_per_step {config.prompts_per_step}  must be a multiple of the {ranks} trainers")
    if not engines:
        return recipe.plan(config, runs=runs, gpu=job.gpu), _script(job, nodes, ranks, arguments, [], runs)
    from llmrl.modules.llm.engines.vllm.compat import server_command

    rows, engine = recipe.plan_with_engine(config, runs=runs, gpu=job.gpu)
    model, options = served_model(config, runs, engine.options, port, not writes)
    words, variables = server_command(model, options, host="", port=0)
    words = [word for word in words if not word.startswith(("--host=", "--port="))]  # which serve() adds
    server = _folded([*(f"{name}={value}" for name, value in variables.items()), *words])
    lines = ["", f"server=({server})", _SERVE]
    for number in range(engine.apart):
        node, first = divmod(number * parts, job.each)
        devices = ",".join(str(first + part) for part in range(parts))
        lines.append(f"serve {nodes + node} {port + number}" + f" CUDA_VISIBLE_DEVICES={devices}" * bool(job.gpu))
    lines += ["", _WAIT.replace("WAIT_S", f"{wait_s:.0f}")]
    return rows, _script(job, nodes, ranks, arguments, lines, runs)


def _script(
    job: Job,
    nodes: int,
    ranks: int,
    arguments: Sequence[str],
    servers: Sequence[str],
    runs: Path,
) -> str:
    """The script; ``servers``: its lines that start the engines."""
    options = ["job-name=llmrl", f"nodes={job.nodes}", "ntasks-per-node=1"]
    options += [f"gpus-per-node={job.each}"] if job.gpu else []
    options += [f"time={job.time}", f"signal=B:USR1@{job.saving_s}", "requeue", "open-mode=append", *job.options]
    command, changes = ["-m", "llmrl.commands.cli", *arguments], []
    if arguments[0] != "resume":
        # A requeued job is the same job, so that it continues in the folder of its name.
        given = {word.partition("=")[0] for word in arguments}
        changes += [] if "--name" in given else ['--name "job$SLURM_JOB_ID"']
        changes += [] if "--resume" in given else ["--resume"]
    changes += ['"rollout.servers=[$(IFS=,; echo "${servers[*]}")]"'] if servers else []
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(nodes)]
    launcher += ["--nproc-per-node", str(ranks // nodes), "--max-restarts", "3", "--rdzv-backend", "c10d"]
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH --{option}" for option in options),
        "set -euo pipefail",
        "",
        f"logs={shlex.quote(str(runs / '.launch'))}",
        f"trainers={nodes}  # the first nodes; the others hold engines",
        f"export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={max(1, job.saving_s - 60)}  # seconds to finish a step and save it",
        _BEGINNING,
        *servers,
        "",
        'srun --overlap --nodes="$trainers" --ntasks="$trainers" --kill-on-bad-exit=1 \\',
        '  --nodelist="$(IFS=,; echo "${nodes[*]:0:trainers}")" \\',
        f'  {_folded(launcher)} --rdzv-endpoint "$rendezvous" --rdzv-id "$SLURM_JOB_ID" \\',
        " ".join([f"  {_folded(command)}", *changes, "&"]),
        _END,
    ]
    return "\n".join(lines)


def _folded(words: Sequence[str]) -> str:
    """Words of a command, quoted, in lines of bash of about a hundred characters."""
    lines = [""]
    for word in map(shlex.quote, words):
        if len(lines[-1]) + len(word) > 100:
            lines.append("")
        lines[-1] += f"{word} "
    return "\\\n    ".join(lines).rstrip()


_BEGINNING = r"""
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
rendezvous=${nodes[0]}:$((20000 + SLURM_JOB_ID % 10000))
mkdir -p "$logs"
trainer= again=
trap 'kill $(jobs -p) 2>/dev/null || :' EXIT
# Before the time limit: the ranks finish a step and save it, and the job is queued again.
trap 'again=yes; kill -TERM $trainer 2>/dev/null || :' USR1"""

_SERVE = r"""servers=() pids=()
serve() {  # number of the node, port, variables; the server is restarted at most three times
  local node=${nodes[$1]}
  srun --overlap --nodes=1 --ntasks=1 --nodelist="$node" --open-mode=append --output="$logs/server-$node-$2.log" \
    bash -c 'trap "kill \$!; wait; exit" TERM; for start in 1 2 3 4; do "$@" & wait $! && exit; done; exit 1' server \
    env "${@:3}" "${server[@]}" --host="$node" --port="$2" &
  servers+=("http://$node:$2") pids+=($!)
}
"""

_WAIT = r"""for number in "${!servers[@]}"; do
  until curl --fail --silent --max-time 10 "${servers[number]}/health"; do
    if ((SECONDS > WAIT_S)) || ! kill -0 "${pids[number]}" 2>/dev/null; then
      echo "${servers[number]} does not answer within WAIT_S s; see its log in $logs" >&2
      exit 1
    fi
    sleep 2
  done
done"""

_END = r"""trainer=$! code=0
wait "$trainer" || code=$?
if [[ $again ]]; then  # the signal ended the wait
  code=0
  wait "$trainer" || code=$?
  ((code == 0)) || scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""
