"""The worker's half of the shared-memory transfer: vLLM's interface for taking weights, over a block of this machine.

vLLM's worker calls it as it calls its own transfers: start, update once per filled part of the block, finish. Filling
the block is the trainer's half (``transfer``), what the bytes mean is ``block``'s. vLLM is imported when the class is
asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import torch

from llmrl.modules.llm.engines.vllm.reload_patches import copy_waiting, repack_tied, set_kernels_aside
from llmrl.modules.llm.engines.vllm.shared_memory_buffer import Placed, SharedBlock, checksum
from llmrl.optional import require

__all__ = ["BACKEND", "register"]

BACKEND = "llmrl_shared_memory"
_SPOTS = 8  # loaded parameters that are compared with what was sent


def register() -> None:
    """Makes the transfer known to vLLM's factory in this process, as `BACKEND`. A second call does nothing."""
    factory = _vllm("vllm.distributed.weight_transfer.factory").WeightTransferEngineFactory
    try:
        factory.register_engine(BACKEND, engine_class())
    except ValueError as error:
        if "already registered" not in str(error):
            raise


@cache
def engine_class() -> type:
    """The class that vLLM's factory builds, a ``WeightTransferEngine``."""
    base = _vllm("vllm.distributed.weight_transfer.base")
    reload = _vllm("vllm.model_executor.model_loader.reload")

    @dataclass
    class InitInfo(base.WeightTransferInitInfo):
        path: str
        size: int

    @dataclass
    class UpdateInfo(base.WeightTransferUpdateInfo):
        placed: list[Placed]

    class SharedMemoryWeightTransferEngine(base.WeightTransferEngine):
        """Loads weights out of a shared block, as many at a time as the trainer has put there.

        The block is mapped once and kept. Tensors look into it, so nothing is held twice; only what vLLM has not
        finished with is copied before the trainer writes there again.
        """

        init_info_cls = InitInfo
        update_info_cls = UpdateInfo

        def init_transfer_engine(self, init_info: InitInfo) -> None:
            self.block = SharedBlock.open(init_info.path, init_info.size)

        def start_weight_update(self) -> None:
            self.began = False
            self.sent: dict[str, Placed] = {}
            self.unmet = {name.replace(".base_layer.", ".") for name, _ in self.model.named_parameters()}

        def damaged(self, placed: Sequence[Placed]) -> list[str]:
            """The names of those whose bytes here are not those that were written."""
            return [entry.name for entry in placed if not self.block.is_intact(entry)]

        def update_weights(self, update_info: dict[str, Any]) -> None:
            self.receive_weights(self.parse_update_info(update_info))
            if self.device.type != "cpu":
                torch.accelerator.synchronize()

        @torch.no_grad()
        def receive_weights(self, update_info: UpdateInfo) -> None:
            if not self.began:
                self.put_back = set_kernels_aside(self.model)
                reload.initialize_layerwise_reload(self.model)
                self.began = True
            try:
                loaded = self.model.load_weights((entry.name, self.block.read(entry)) for entry in update_info.placed)
                copy_waiting(self.model, self.block.bytes)
            except BaseException:
                self.finalize()  # puts back the layers that wait
                raise
            self.sent |= {entry.name: entry for entry in update_info.placed}
            self.unmet = set() if loaded is None else self.unmet - loaded

        def finish_weight_update(self) -> None:
            if self.began:
                self.finalize()
                repack_tied(self.model)

        def finalize(self) -> None:
            try:
                reload.finalize_layerwise_reload(self.model, self.model_config)
            finally:
                self.put_back()

        def not_loaded(self) -> list[str]:
            """The parameters of vLLM's model that nothing sent has reached."""
            return sorted(self.unmet) if self.model_config.quantization is None else []

        def differing(self) -> list[str]:
            """Of a few parameters that vLLM keeps as they are sent (vectors), those that are now something else."""
            kept = [
                (entry, parameter)
                for name, parameter in self.model.named_parameters()
                if (entry := self.sent.get(name)) is not None
                and parameter.ndim == 1
                and list(parameter.shape) == list(entry.shape)
                and str(parameter.dtype) == f"torch.{entry.dtype}"
            ]
            few = kept[:: max(len(kept) // _SPOTS, 1)]
            return [entry.name for entry, parameter in few if checksum(parameter) != entry.checksum]

        def shutdown(self) -> None:
            self.block = None

    return SharedMemoryWeightTransferEngine


def _vllm(module: str) -> ModuleType:
    return require(module, extra="vllm", used_by="VLLMEngine")
