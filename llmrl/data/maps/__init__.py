"""Maps from tensordicts to tensordicts, hashes of rows, and trees of trajectories with shared prefixes."""

from typing import TYPE_CHECKING

from llmrl.lazy import on_demand

if TYPE_CHECKING:
    from llmrl.data.maps.forest import MCTSForest
    from llmrl.data.maps.hashes import BinaryToDecimal, HashToInt, RandomProjectionHash, SipHash
    from llmrl.data.maps.table import QueryModule, TensorDictMap, TensorMap
    from llmrl.data.maps.tree import Tree
else:
    __getattr__, __dir__ = on_demand(__name__)

__all__ = [
    "BinaryToDecimal",
    "HashToInt",
    "MCTSForest",
    "QueryModule",
    "RandomProjectionHash",
    "SipHash",
    "TensorDictMap",
    "TensorMap",
    "Tree",
]
