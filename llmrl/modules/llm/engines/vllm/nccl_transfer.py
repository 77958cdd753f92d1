"""vLLM's own transfers between GPUs, ``nccl`` and ``ipc``, behind the interface of ``transfer``.

vLLM does the work on both sides. Here are the settings, the check that this machine can do it, and the two small
objects that vLLM asks for: where the weights come from, and how the workers are called. Not yet run on a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from llmrl.errors import ConfigError, UnsupportedError
from llmrl.modules.llm.engines.vllm.transfer import CallWorkers, NothingLoadedError, Transfer
from llmrl.modules.llm.engines.vllm.weight_spec import WeightSet
from llmrl.optional import require

__all__ = ["NCCL", "CudaIPC", "NativeTransfer"]


@dataclass(frozen=True)
class NCCL:
    """Broadcast from the trainer's GPU to those of the workers, which may be on other machines.

    num_workers     of the engine, over all of its replicas: tensor x pipeline x data parallel
    master_address  of this process, as the workers reach it
    master_port     None: a free one
    packed          many tensors per broadcast
    """

    num_workers: int = 1
    master_address: str = "127.0.0.1"
    master_port: int | None = None
    packed: bool = True

    def __post_init__(self) -> None:
        if self.num_workers < 1:
            raise ConfigError(f"NCCL: num_workers must be at least 1: got {self.num_workers}.")

    def connect(self, call: CallWorkers) -> Transfer:
        def info() -> Any:
            port = self.master_port
            if port is None:
                port = _vllm("vllm.utils.network_utils").get_open_port()
            return _vllm("vllm.distributed.weight_transfer.nccl_engine").NCCLTrainerInitInfo(
                rank=0,
                master_address=self.master_address,
                master_port=port,
                world_size=1 + self.num_workers,
                packed=self.packed,
            )

        return NativeTransfer(call, "nccl", info)


@dataclass(frozen=True)
class CudaIPC:
    """Handles of GPU memory: trainer and worker share a GPU.

    packed        through one buffer of ``buffer_bytes``, so that the trainer holds no second copy of the model
    """

    packed: bool = True
    buffer_bytes: int = 1 << 30

    def connect(self, call: CallWorkers) -> Transfer:
        def info() -> Any:
            return _vllm("vllm.distributed.weight_transfer.ipc_engine").IPCTrainerInitInfo(
                rank=0, packed=self.packed, packed_buffer_size_bytes=self.buffer_bytes
            )

        return NativeTransfer(call, "ipc", info)


class NativeTransfer:
    """A trainer's end of one of vLLM's transfers, opened at the first update."""

    def __init__(self, call: CallWorkers, backend: str, make_info: Callable[[], Any]) -> None:
        self._backend, self._make_info = backend, make_info
        self._client = _Client(call, backend)
        self._source: Any = None
        self._trainer: Any = None

    def send(self, weights: WeightSet, end: float) -> None:
        self._client.end, self._client.touched = end, False
        try:
            self._open()
            self._source.weights = weights
            self._trainer.send_weights()
        except Exception as error:
            if self._client.touched or isinstance(error, NotImplementedError):
                raise
            raise NothingLoadedError(f"{error} Nothing was updated.") from error
        finally:
            if self._source is not None:
                self._source.weights = None

    def _open(self) -> None:
        if self._trainer is not None:
            return
        factory = _vllm("vllm.distributed.weight_transfer.factory").WeightTransferTrainerFactory
        if not torch.cuda.is_available():
            raise UnsupportedError(
                f"VLLMEngine: the {self._backend} transfer moves weights between GPUs, and there is none here; "
                "backend='shared_memory' needs none. Nothing was updated."
            )
        self._source = _source_class()()
        self._trainer = factory.trainer_init(self._make_info(), client=self._client, source=self._source)

    def close(self) -> None:
        if self._trainer is not None:
            with suppress(Exception):  # the peers may be gone
                self._trainer.shutdown()
            self._trainer = None


class _Client:
    """The workers, in the four calls of vLLM's ``VLLMWeightSyncClient``."""

    def __init__(self, call: CallWorkers, backend: str) -> None:
        self._call, self._backend = call, backend
        self.end = time.monotonic()
        self.touched = False

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call("llmrl_open_transfer", self.end, backend=self._backend, init_info=init_info)

    def start_weight_update(self) -> None:
        self._call("llmrl_start", self.end)

    def update_weights(self, update_info: Any) -> None:
        self.touched = True
        self._call("update_weights", self.end, update_info=update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        del weight_version  # the engine labels it
        self._call("finish_weight_update", self.end)


@cache
def _source_class() -> type:
    base = _vllm("vllm.distributed.weight_transfer.base")

    class Source(base.WeightSource):
        """The weights of the update that runs."""

        weights: WeightSet

        def metadata(self) -> list[Any]:
            return [base.ParamMeta(name, dtype, tuple(shape)) for name, (dtype, shape) in self.weights.metadata.items()]

        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            for name, tensor in self.weights.pairs():
                yield name, tensor.cuda()

    return Source


def _vllm(module: str) -> ModuleType:
    return require(module, extra="vllm", used_by="VLLMEngine")
