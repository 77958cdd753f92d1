"""Per-rank setup: device, precision, collectives; console output on rank 0.

Wraps accelerate, so that a recipe reads the same under ``llmrl`` and under ``torchrun``. FSDP2 is torch's own
``fully_shard``, which works with any backend; accelerate does not offer it on CPUs.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import InitProcessGroupKwargs, gather_object
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from llmrl.concurrency.gloo_threads import wait_for_gloo_threads
from llmrl.errors import ConfigError, DeadlineError, LLMRLError, RunFolderError
from llmrl.modules.llm.sequence_split import SequenceSplit
from llmrl.modules.llm.vision import vision_tower
from llmrl.report.run_files import flat_settings
from llmrl.run.console import make_console
from llmrl.run.console.numbers import counted
from llmrl.run.files import writing
from llmrl.train.late_ranks import LateRanks, counters_of, late_message, raise_in_main
from llmrl.train.settings.model import ModelSource

T = TypeVar("T")

_NUMBERS = itertools.count()  # numbers this process's sessions; ranks count alike
_ROLL_CALL_S = 5.0  # ranks that wait for a lost rank time out at nearly the same time
_SHARED_WITHIN_S = 8.0  # a network disk shows a new file to other nodes with a delay
_LOST = re.compile("timed out|timeout|connection (closed|reset)", re.IGNORECASE)  # errors after a lost rank


class Session:
    """This process's ``rank``, ``world_size``, ``device``, ``console`` (silent except on rank 0), and collectives."""

    def __init__(self, config: ModelSource):
        self._timeout_s = config.parallel.timeout_s
        check_gpus(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count())
        self.offloads = config.memory.offload == "parameters"
        self._store = _join(self._timeout_s, offloads=self.offloads)
        self._late: LateRanks | None = None
        has_gpu = torch.cuda.is_available()
        bf16 = config.in_bfloat16(torch.cuda.is_bf16_supported(including_emulation=False) if has_gpu else None)
        self.accelerator = Accelerator(
            cpu=not has_gpu,
            mixed_precision="bf16" if bf16 else "no",
            kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=self._timeout_s))],
        )
        self.rank: int = self.accelerator.process_index
        self.world_size: int = self.accelerator.num_processes
        self._check_same(config)
        if self.world_size > 1:
            config.parallel.check_count(self.world_size)
        self.sharded: bool = config.parallel.mode == "fsdp2" and self.world_size > 1
        self.device: torch.device = self.accelerator.device
        self.low_precision = bf16
        self.mesh = _make_mesh(self.device, self.world_size, config.parallel.replicas) if self.sharded else None
        self.split = _make_split(self.device, self.world_size, config.parallel.context)
        self.engine_group = _make_engine_group(self.device, self.world_size, config)
        self.console = make_console(self.rank)
        if self._store is not None:
            self._late = self._watch_late(self._store)
        if self.world_size > 1:
            sys.excepthook = _abort_at_once(sys.excepthook)

    def _watch_late(self, store: dist.Store) -> LateRanks:
        groups = [dist.group.WORLD, *([] if self.mesh is None else self.mesh.get_all_groups())]
        groups += [self.split.group] if self.split else []
        groups = list(dict.fromkeys([*groups, *([self.engine_group] if self.engine_group else [])]))
        aborted = groups if self.device.type == "cuda" else []
        on_late = partial(raise_in_main, aborted=aborted)
        return LateRanks(store, self.rank, counters_of(groups), self._timeout_s, on_late)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def who(self) -> str | None:
        """This rank and its machine, for messages; None in a run of one process."""
        return f"rank {self.rank} on {socket.gethostname()}" if self.world_size > 1 else None

    @property
    def num_groups(self) -> int:
        """The number of groups of ranks. The ranks of a group have the same rows; each has one slice of every row."""
        return self.world_size // (self.split.size if self.split else 1)

    @property
    def group(self) -> int:
        """The index of this rank's group."""
        return self.rank * self.num_groups // self.world_size

    @property
    def leads_group(self) -> bool:
        """True on the first rank of each group, the only one whose rows and sums are counted."""
        return self.split is None or self.split.rank == 0

    def split_sequences(self) -> AbstractContextManager[None]:
        """Context for passes that all ranks of a group run together on the same rows: see `SequenceSplit`."""
        return self.split.active() if self.split else nullcontext()

    def prepare(self, scorer: nn.Module) -> nn.Module:
        """The module to train instead of ``scorer``: in this session's precision, its gradients averaged over ranks.

        A sharded session expects that `shard` has sharded the model already.
        """
        if not self.sharded:
            return self.accelerator.prepare(scorer)
        scorer.model.reshard()  # earlier forward passes may have left its own unit unsharded
        if self.low_precision and hasattr(scorer.model, "peft_config"):  # adapters: float32, not cast by FSDP
            scorer.forward = torch.autocast(self.device.type, torch.bfloat16)(scorer.forward)
        return scorer

    def average_whole_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Averages over the ranks the gradients of unsharded parameters (adapters), which FSDP does not reduce."""
        if not self.sharded:
            return
        own = [parameter for parameter in parameters if not isinstance(parameter, DTensor)]
        if not own:
            return
        for parameter in own:  # a gradient is None where no row of this rank used the layer: it counts as zero
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        joined = torch.cat([parameter.grad.flatten() for parameter in own])
        dist.all_reduce(joined)
        joined /= self.world_size
        for parameter, mean in zip(own, joined.split([parameter.numel() for parameter in own]), strict=True):
            parameter.grad.copy_(mean.view_as(parameter))

    def shard(self, model: nn.Module) -> nn.Module:
        """Shards ``model`` in place with FSDP2; it may be on the meta device, and its weights be read afterwards.

        Each decoder layer is a unit, gathered only while it computes; embeddings and head are the outermost unit.
        ``model.call_whole(function, ...)`` calls ``function(model, ...)`` while the outermost unit is gathered.
        """
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if self.low_precision else MixedPrecisionPolicy()
        offload = CPUOffloadPolicy(pin_memory=self.device.type == "cuda") if self.offloads else OffloadPolicy()
        units, kind = getattr(model, "_no_split_modules", None) or (), type(model)
        tower = vision_tower(model)  # no unit of its own: a rank without images does not call it
        others = set() if tower is None else set(tower.modules())
        for module in [*(m for m in model.modules() if type(m).__name__ in units and m not in others), model]:
            fully_shard(module, mesh=self.mesh, mp_policy=policy, offload_policy=offload)
        # FSDP changes the model's class; Transformers maps weight names in files to it by these two attributes.
        type(model).__name__, type(model).__module__ = kind.__name__, kind.__module__
        model._call_whole = lambda function, *arguments, **options: function(model, *arguments, **options)
        register_fsdp_forward_method(model, "_call_whole")

        def call_whole(function: Callable[..., T], *arguments: Any, **options: Any) -> T:
            result = model._call_whole(function, *arguments, **options)
            if not torch.is_grad_enabled():  # FSDP reshards only after a backward pass
                model.reshard()
            return result

        model.call_whole = call_whole
        return model

    @contextmanager
    def in_step(self, policy: Any) -> Iterator[None]:
        """Context in which each rank may call a policy with a sharded model or engine as often as it needs to.

        Every forward pass of such a model is a collective. Before each pass the ranks exchange whether any rank still
        needs one; ranks that have finished run dummy passes until none does.
        """
        model = getattr(policy, "model", None)
        if not hasattr(model, "call_whole"):
            with policy.engine.joined():
                yield
            return

        def is_needed(here: bool) -> bool:
            needed = torch.tensor(float(here), device=self.device)
            dist.all_reduce(needed)
            return needed.item() > 0

        handle = model.register_forward_pre_hook(lambda *_: is_needed(True) and None, prepend=True)
        try:
            yield
        finally:
            handle.remove()
        # This rank is done: it joins the other ranks' passes with one token until no rank needs more.
        ids = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        with torch.no_grad():
            while is_needed(False):
                model(ids)
        model.reshard()

    def no_sync(self, scorer: nn.Module) -> AbstractContextManager[None]:
        """Context in which a backward pass of a prepared module adds to its gradients without averaging them.

        Sharded gradients are averaged all the same: unsharded ones would not fit in memory.
        """
        return nullcontext() if self.sharded else self.accelerator.no_sync(scorer)

    def autocast(self) -> AbstractContextManager[None]:
        """Context with the precision of training, for generating and scoring outside of it."""
        return nullcontext() if self.sharded else self.accelerator.autocast()  # FSDP casts a sharded model

    def gather(self, items: list[T]) -> list[T]:
        """The items of all ranks, in rank order, on every rank."""
        return gather_object(items) if self.world_size > 1 else items

    def gather_on_first(self, items: list[T]) -> list[T]:
        """The items of all ranks, in rank order, on the first rank; an empty list on the others."""
        if self.world_size == 1:
            return items
        parts: list[Any] | None = [None] * self.world_size if self.is_first else None
        dist.gather_object(items, parts)
        return [item for part in parts or () for item in part]

    def exchange(self, messages: Sequence[bytes]) -> list[bytes]:
        """Sends one message to each rank; returns those that the ranks sent to this one, in rank order."""
        sizes = torch.tensor([len(message) for message in messages], device=self.device)
        their_sizes = torch.empty_like(sizes)
        dist.all_to_all_single(their_sizes, sizes)
        joined = torch.empty(0, dtype=torch.uint8)
        if any(messages):
            joined = torch.frombuffer(bytearray(b"".join(messages)), dtype=torch.uint8)
        coming = their_sizes.tolist()
        received = torch.empty(sum(coming), dtype=torch.uint8, device=self.device)
        dist.all_to_all_single(received, joined.to(self.device), coming, sizes.tolist())
        return [part.numpy().tobytes() for part in received.cpu().split(coming)]

    @contextmanager
    def raises_on_all(self) -> Iterator[None]:
        """Context for code that each rank runs alone, without collectives: an error on one rank is raised on all.

        Raises  on a rank that failed its own error; on the others that error if it is an `LLMRLError` (the messages of
                several are joined), else an LLMRLError that names the rank and its error
        """
        own: Exception | None = None
        try:
            yield
        except Exception as error:
            own = error
        # Only llmrl's own errors are sent: others may not be picklable, or not be constructible from a message.
        known = own if own is None or isinstance(own, LLMRLError) else LLMRLError(f"{self.who}: {own!r}")
        mine = [] if known is None else [(type(known), str(known), getattr(known, "__notes__", []))]
        if errors := self.gather(mine):
            if own is not None and len(errors) == 1:
                raise own
            shared = errors[0][0]("; ".join(dict.fromkeys(text for _, text, _ in errors)))
            for note in dict.fromkeys(note for _, _, notes in errors for note in notes):
                shared.add_note(note)
            raise shared from own

    def on_first(self, call: Callable[[], T]) -> T:
        """Runs ``call`` on the first rank only, and returns its result on all ranks. An error is raised on all."""
        results = []
        with self.raises_on_all():
            if self.is_first:
                results.append(call())
        return self.gather(results)[0]

    def sum(self, values: Mapping[str, float]) -> dict[str, float]:
        """Each value summed over the ranks; for names ending in ``_max``, the largest."""
        parts = self.gather([dict(values)])
        return {
            name: (max if name.endswith("_max") else sum)(part[name] for part in parts)  # type: ignore[operator]
            for name in values
        }

    def any(self, flag: bool) -> bool:
        """True on every rank if ``flag`` is true on any."""
        return any(self.gather([flag]))

    def wait(self) -> None:
        """A barrier: returns when every rank has called it."""
        self.accelerator.wait_for_everyone()

    def _check_same(self, config: ModelSource) -> None:
        """Raises ConfigError if ranks have different settings or packages.

        Runs before the first collective that depends on a setting: ranks that differ would hang in it.
        """
        if self.world_size == 1:
            return
        own = flat_settings(config.model_dump(mode="json")) | _versions()
        (first, expected), *others = self.gather([(self.who, own)])
        for other, got in others:
            for name in (name for name in expected | got if expected.get(name) != got.get(name)):
                self.close()
                raise ConfigError(
                    f"{name}: must be the same for all ranks: {first} has {expected.get(name)}, {other} has "
                    f"{got.get(name)}; start all nodes with the same files, settings and packages."
                )

    def check_shared(self, folder: Path) -> None:
        """Checks that every rank sees a file that the first rank writes in ``folder``.

        Raises  RunFolderError, within 10 s, that names the ranks that do not see it
        """
        if self.world_size == 1:
            return

        def make_file() -> str:
            name = f".seen-by-all-{uuid.uuid4().hex}"
            with writing(folder):
                (folder / name).touch()
            return name

        file = folder / self.on_first(make_file)
        deadline = time.monotonic() + _SHARED_WITHIN_S
        while not (seen := file.exists()) and time.monotonic() < deadline:
            time.sleep(0.1)
        blind = self.gather([] if seen else [self.who])
        if self.is_first:
            file.unlink(missing_ok=True)
        if blind:
            raise RunFolderError(
                f"{folder}: must be a folder that all nodes share: rank 0's file is not seen by {', '.join(blind)} "
                f"after {_SHARED_WITHIN_S:g} s; put it on a shared disk with --runs DIR."
            )

    def describe(self) -> str:
        cuda, several = self.device.type == "cuda", self.world_size > 1
        layout = f"{self.world_size} processes, {'FSDP2' if self.sharded else 'DDP'}" if several else "1 process"
        if self.mesh is not None and self.mesh.ndim == 2:
            layout += f" in {self.mesh.size(0)} copies of {self.mesh.size(1)} parts"
        if self.split:
            layout += f", sequences split over {self.split.size}"
        device = torch.cuda.get_device_name() if cuda else f"CPU, {counted(torch.get_num_threads(), 'thread')}"
        precision = "bfloat16 arithmetic, float32 weights" if self.low_precision else "float32"
        return f"{layout} · {device} · torch {torch.__version__} · {precision}"

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        if self._late is not None:
            self._late.close()
        if kind is None or self.world_size == 1:  # closing is a collective, which cannot finish once a rank has failed
            self.close()
        elif self._store is not None and isinstance(error, RuntimeError) and _LOST.search(str(error)):
            _call_roll(self._store, "collective", self.rank, self.world_size, _ROLL_CALL_S, self._timeout_s)

    def close(self) -> None:
        """Leaves the process group. Afterwards this process may open another session, or exit."""
        if self._late is not None:
            self._late.close()
        wait_for_gloo_threads()
        self.accelerator.end_training()
        AcceleratorState._reset_state(reset_partial_state=True)


def check_gpus(processes: int, gpus: int) -> None:
    """Raises ConfigError if the processes of one machine would have to share GPUs."""
    if gpus and processes > gpus:
        raise ConfigError(
            f"session: each process needs a GPU of its own: got {processes} processes on a machine of {gpus} GPUs; "
            "start fewer with --nproc-per-node, or let every process see all GPUs of its machine."
        )


def _make_mesh(device: torch.device, world_size: int, replicas: int) -> DeviceMesh:
    """A mesh of ``replicas`` rows of ranks: the model is sharded along each row, and every row has a copy of it."""
    if replicas == 1:
        return init_device_mesh(device.type, (world_size,))
    return init_device_mesh(device.type, (replicas, world_size // replicas), mesh_dim_names=("replica", "shard"))


def _make_split(device: torch.device, world_size: int, size: int) -> SequenceSplit | None:
    """The split of sequences over groups of ``size`` neighbouring ranks; None for one process or size 1."""
    if world_size == 1 or size == 1:
        return None
    mesh = init_device_mesh(device.type, (world_size // size, size), mesh_dim_names=("group", "context"))
    return SequenceSplit(mesh.get_group("context"))


def _make_engine_group(device: torch.device, world_size: int, config: ModelSource) -> dist.ProcessGroup | None:
    """The ranks that hold this rank's engine with it (``rollout.over_ranks``); None without such engines."""
    rollout = getattr(config, "rollout", None)
    if rollout is None or not rollout.over_ranks or world_size == 1:
        return None
    size, here = rollout.tensor_parallel, int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if here % size:
        raise ConfigError(
            f"rollout.over_ranks: tensor_parallel must divide the {here} processes of a machine: got {size}."
        )
    mesh = init_device_mesh(device.type, (world_size // size, size), mesh_dim_names=("engine", "part"))
    return mesh.get_group("part")


def _versions() -> dict[str, str]:
    """Versions of the packages that a rank computes with, and a checksum of llmrl's own files."""
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    code = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]
    return {"the code of llmrl": code} | {name: version(name) for name in ("torch", "transformers")}


def _join(timeout_s: float, *, offloads: bool) -> dist.Store | None:
    """Initialises the process group of several ranks, under a key prefix that is new in the launcher's store.

    Returns  the store with that prefix; None for one process, or if there is a group already
    Raises   DeadlineError that names the ranks that do not join in time
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        return None
    timeout = timedelta(seconds=timeout_s)
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # the store survives a restart of the ranks
    store = dist.PrefixStore(f"llmrl/start{start}/session{next(_NUMBERS)}", store)
    _call_roll(store, "start", rank, world_size, timeout_s, timeout_s)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if offloads and backend == "nccl":
        backend = "cpu:gloo,cuda:nccl"  # gloo: the norm of gradients in host memory
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    return store


def _call_roll(store: dist.Store, event: str, rank: int, world_size: int, wait_s: float, timeout_s: float) -> None:
    """Sets this rank's key in the store, and waits at most ``wait_s`` for those of all other ranks.

    Raises  DeadlineError that names the ranks without a key; ``timeout_s`` is the deadline that it states
    """
    keys = {other: f"{event}/{other}" for other in range(world_size)}
    store.set(keys[rank], "")
    # Polled, because the store's own wait would not report which keys are missing.
    deadline = time.monotonic() + wait_s
    while missing := [other for other, key in keys.items() if not store.check([key])]:
        if time.monotonic() > deadline:
            raise DeadlineError(late_message(missing, timeout_s))
        time.sleep(0.1)


def _abort_at_once(default_hook: Any) -> Any:
    """An excepthook that exits at once: destructors would wait for the other ranks. The launcher then ends those."""

    def hook(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
        default_hook(kind, error, traceback)
        sys.stderr.flush()
        os._exit(1)

    return hook
