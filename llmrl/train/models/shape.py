"""The sizes of a model that determine its memory and FLOPs, read from its modules; no weights are needed.

The bytes that a decoder layer keeps for its backward pass follow from what autograd saves: for a norm, its input in
float32 and the normalised values; for a linear layer, its input, once per reader if autocast makes a copy; for
attention, queries, keys, values and output, and what grows with the square of a row: the mask, or all scores; for a
gated MLP, four tensors of its inner width.

Letters: H hidden size, Q and K the widths of queries and of keys, I the inner width of the MLP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from llmrl.modules.llm.sequence_split import why_not_split
from llmrl.modules.llm.packing import may_attend_by_row
from llmrl.modules.llm.shared_prefixes import may_share_prefixes
from llmrl.modules.llm.vision import vision_tower

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# float32; bfloat16 by autocast from float32 weights (one process, DDP); weights cast to bfloat16 to compute (FSDP2)
Arithmetic = Literal["float32", "autocast", "bfloat16"]


@dataclass(frozen=True)
class ModelShape:
    """Counts of parameters and values; ``kept``, ``largest_kept`` and ``kept_after`` in bytes per token.

    ``parameters``     of the whole model; tied embeddings count once
    ``multiplied``     decoder parameters that each token is multiplied with; in a mixture only those of chosen experts
    ``largest_block``  parameters of the largest decoder layer
    ``matrices``       parameters in the 2-D weights of the decoder layers (`block_matrices`)
    ``outer``          parameters outside the decoder layers
    ``frozen``         parameters that are not trained; ``frozen_products``, those of ``multiplied``
    ``kept``           for the backward pass by all decoder layers together, ``largest_kept`` by the largest,
                       ``kept_after`` by the norm and the output head after them; ``kept_pairs`` by the attention of
                       a layer, per pair of tokens of a row
    ``recomputed``     the part of ``kept`` that `keep_less` leaves out
    ``linears``        for linear layers of decoder layers, by the last part of their names: their total parameters,
                       and the total parameters of rank-1 adapters on them
    ``ends``           parameters of the embedding and of the output layer, by the last part of their names; of two
                       that are tied, the output layer has none of its own
    ``heads``          numbers of attention heads: for queries, and for keys and values
    ``keeps_scores``   True if that is also the case for a single row, which needs no mask
    ``rows``           parameters of all weights with that number of rows
    ``largest_weight`` parameters of the largest weight
    ``splits``         True if sequences can be split over ranks that share the heads
    ``shares``         True if rows that begin alike may be computed with their beginning once (`share_prefixes`)
    ``by_row``         True if the attention of packs is computed row by row on a CPU (`row_attention`)
    ``cached``         values that a token adds to the KV cache, by the window of the layers that keep them (None: all)
    """

    parameters: int
    multiplied: int
    largest_block: int
    outer: int
    num_blocks: int
    hidden: int
    vocabulary: int
    query_width: int
    linears: dict[str, tuple[int, int]]
    ends: dict[str, int]
    heads: tuple[int, int]
    cached: dict[int | None, int]
    kept: dict[Arithmetic, float]
    largest_kept: dict[Arithmetic, float]
    kept_after: dict[Arithmetic, float]
    kept_pairs: dict[Arithmetic, float]
    recomputed: dict[Arithmetic, float]
    keeps_scores: bool = False
    frozen: int = 0
    splits: bool = False
    shares: bool = False
    by_row: bool = False
    frozen_products: int = 0
    matrices: int = 0
    rows: dict[int, int] = field(default_factory=dict)
    largest_weight: int = 0

    def on_a_rank(self, ranks: int) -> float:
        """The share of the parameters on the fullest of ``ranks`` that shard them: FSDP2 cuts a weight by its rows, and
        128 experts over 56 ranks are 3 for most of them and none for some.
        """
        held = sum(size / rows * -(-rows // ranks) for rows, size in self.rows.items())
        return held / sum(self.rows.values())

    def activations(
        self, tokens: float, arithmetic: Arithmetic, *, length: int, checkpointing: bool, less: bool = False
    ) -> float:
        """Bytes kept for the backward pass of ``tokens`` tokens in rows padded to ``length``, without the logits.

        less  after `keep_less`
        """
        width = 2 if arithmetic == "bfloat16" else 4  # bytes per value between layers
        inputs = self.num_blocks * width * self.hidden
        blocks = self.kept[arithmetic] - less * self.recomputed[arithmetic] + self.num_blocks * length * self.kept_pairs[arithmetic]
        return tokens * ((inputs if checkpointing else blocks) + self.kept_after[arithmetic])

    def largest_block_keeps(self, tokens: float, arithmetic: Arithmetic, *, length: int) -> float:
        """Bytes that one decoder layer keeps, without checkpointing."""
        return tokens * (self.largest_kept[arithmetic] + length * self.kept_pairs[arithmetic])

    def cache_numbers(self, length: int) -> int:
        """Values in the KV cache of one sequence, summed over the GPUs of an engine."""
        return sum(numbers * min(length, window or length) for window, numbers in self.cached.items())

    def training_flops(self, lengths: Sequence[int], num_scored: int) -> float:
        """FLOPs of forward and backward over sequences of these lengths, with ``num_scored`` tokens through the head.

        Two per multiplication, in three passes: one forward and two backward (one for frozen weights). Causal attention
        halves the square of the length. Recomputation by checkpointing is not counted.
        """
        attention = 6 * self.num_blocks * self.query_width * sum(length**2 for length in lengths)
        layers, head = 3 * self.multiplied - self.frozen_products, (2 if self.frozen_products else 3) * self.vocabulary
        return 2 * (layers * sum(lengths) + head * self.hidden * num_scored) + attention


def decoder_blocks(model: nn.Module) -> list[nn.Module]:
    """The decoder layers, which are checkpointed, compiled and sharded one by one; layers of a vision tower are not."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    tower = vision_tower(model)
    others = set() if tower is None else set(tower.modules())
    return [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer) and m not in others]


def block_matrices(model: nn.Module) -> list[nn.Parameter]:
    """The trained 2-D weights of the decoder layers, which Muon trains; not those of experts, which are 3-D stacks."""
    weights = (weight for block in decoder_blocks(model) for weight in block.parameters())
    return [weight for weight in weights if weight.ndim == 2 and weight.requires_grad]


def model_shape(model: PreTrainedModel) -> ModelShape:
    """The shape of a transformers causal language model, on any device including meta."""
    config = model.config.get_text_config()
    blocks = decoder_blocks(model)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    query, key = config.num_attention_heads * head_dim, kv_heads * head_dim
    numbers = [_numel(block) for block in blocks]
    kept = [{kind: _kept(block, config, query, key, kind) for kind in _BYTES} for block in blocks]
    return ModelShape(
        parameters=_numel(model),
        multiplied=sum(_multiplied(block, config) for block in blocks),
        frozen_products=sum(_multiplied(block, config, frozen=True) for block in blocks),
        largest_block=max(numbers, default=0),
        rows=_rows(model),
        largest_weight=max(weight.numel() for weight in model.parameters()),
        matrices=sum(weight.numel() for weight in block_matrices(model)),
        outer=_numel(model) - sum(numbers),
        num_blocks=len(blocks),
        hidden=config.hidden_size,
        vocabulary=config.vocab_size,
        query_width=query,
        linears=_linears(blocks),
        ends=_ends(model),
        heads=(config.num_attention_heads, kv_heads),
        cached=_cached(config, 2 * key),
        kept={kind: sum(block[kind] for block in kept) for kind in _BYTES},
        largest_kept={kind: max((block[kind] for block in kept), default=0) for kind in _BYTES},
        frozen=sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad),
        splits=why_not_split(model, 1) is None,
        # Routers count the experts of every row's tokens.
        shares=may_share_prefixes(model) and all(weight.ndim < 3 for block in blocks for weight in block.parameters()),
        by_row=may_attend_by_row(model),
        kept_after={kind: (_norm_bytes(model, kind) + _BYTES[kind][0]) * config.hidden_size for kind in _BYTES},
        recomputed={kind: sum(_recomputed(block, config, kind) for block in blocks) for kind in _BYTES},
        kept_pairs={kind: _pair_bytes(config, kind) for kind in _BYTES},
        keeps_scores=config._attn_implementation == "eager",
    )


_BYTES: dict[Arithmetic, tuple[int, int]] = {  # bytes per value between layers, and in a matrix product
    "float32": (4, 4),
    "autocast": (4, 2),
    "bfloat16": (2, 2),
}


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _rows(model: nn.Module) -> dict[int, int]:
    found: dict[int, int] = {}
    for weight in model.parameters():
        rows = len(weight) if weight.ndim else 1
        found[rows] = found.get(rows, 0) + weight.numel()
    return found


def _linears(blocks: Sequence[nn.Module]) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for block in blocks:
        for name, module in block.named_modules():
            if type(module).__name__ in ("Linear", "Linear4bit", "Conv1D"):
                # transformers' Conv1D is a linear layer too
                inputs = getattr(module, "in_features", None) or module.nx
                outputs = getattr(module, "out_features", None) or module.nf
                size, width = found.get(leaf := name.rpartition(".")[2], (0, 0))
                found[leaf] = size + inputs * outputs, width + inputs + outputs
    return found


def _ends(model: PreTrainedModel) -> dict[str, int]:
    found, counted = {}, set()
    for part in (model.get_input_embeddings(), model.get_output_embeddings()):
        name = next((name for name, module in model.named_modules() if part is not None and module is part), "")
        if name:
            found[name.rpartition(".")[2]] = sum(own.numel() for own in part.parameters() if own not in counted)
            counted |= set(part.parameters())
    return found


def _elements(weight: nn.Parameter) -> int:
    """The number of values, also of a 4-bit weight, which stores two per byte."""
    state = getattr(weight, "quant_state", None)
    return weight.numel() if state is None else state.shape.numel()


def _chosen(config: Any) -> int:
    """Experts per token."""
    return getattr(config, "num_experts_per_tok", None) or getattr(config, "top_k_experts", None) or 1


def _multiplied(block: nn.Module, config: Any, *, frozen: bool = False) -> int:
    """Multiplications per token; with ``frozen`` only those by weights that are not trained."""
    weights = [weight for weight in block.parameters() if not (frozen and weight.requires_grad)]
    dense = sum(_elements(weight) for weight in weights if weight.ndim == 2)
    return dense + sum(weight.numel() * _chosen(config) // len(weight) for weight in weights if weight.ndim == 3)


def _cached(config: Any, width: int) -> dict[int | None, int]:
    if rank := getattr(config, "kv_lora_rank", None):  # latent attention caches one vector for all heads
        width = rank + config.qk_rope_head_dim
    window = getattr(config, "sliding_window", None)
    windows = {"full_attention": None, "sliding_attention": window, "chunked_attention": None}
    cached: dict[int | None, int] = {}
    for kind in getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers:
        if kind in windows:  # the state of linear attention does not grow with length
            cached[windows[kind]] = cached.get(windows[kind], 0) + width
    return cached


def _norm_bytes(module: nn.Module, kind: Arithmetic) -> int:
    """Bytes that a norm in ``module`` keeps per value of its input."""
    between, _ = _BYTES[kind]
    if any(isinstance(part, nn.LayerNorm) for part in module.modules()):
        return between
    return 4 + (4 if _is_upcast(module) else between)


def _is_upcast(module: nn.Module) -> bool:
    """True if norms in ``module`` multiply by their weight in float32, whatever the precision of the input."""
    return any("Gemma" in type(part).__name__ and "Norm" in type(part).__name__ for part in module.modules())


def _pair_bytes(config: Any, kind: Arithmetic) -> float:
    """Bytes that the attention of a layer keeps per pair of tokens, in padded and packed rows."""
    _, product = _BYTES[kind]
    if config._attn_implementation != "eager":  # torch's attention converts the mask in each layer
        return product if config._attn_implementation == "sdpa" else 0
    # the scores of each head: capped by tanh, their float32 softmax, and its copy in the precision of the product
    capped = product if getattr(config, "attn_logit_softcapping", None) else 0
    return config.num_attention_heads * (capped + 4 + (product if product < 4 else 0))


def _recomputed(block: nn.Module, config: Any, kind: Arithmetic) -> float:
    """Bytes per token that a gated MLP need not keep, its activation and its product, and the RMS norms of a layer."""
    is_gated = any(hasattr(part, "gate_proj") and hasattr(part, "act_fn") for part in block.modules())
    norms = sum(type(part).__name__.endswith("RMSNorm") for part in block.children())
    inner = 2 * _BYTES[kind][1] * getattr(config, "intermediate_size", 0) * is_gated
    return inner + norms * _BYTES[kind][0] * config.hidden_size


def _kept(block: nn.Module, config: Any, query: int, key: int, kind: Arithmetic) -> float:
    """Bytes per token that one decoder layer keeps for its backward pass."""
    between, product = _BYTES[kind]
    hidden, low = config.hidden_size, product == 2
    matrices = [module for module in block.modules() if type(module).__name__ in ("Linear", "Conv1D")]
    named_norms = [(name, module) for name, module in block.named_modules() if "Norm" in type(module).__name__]
    on_heads = [name for name, _ in named_norms if name.endswith(("q_norm", "k_norm", "q_layernorm", "k_layernorm"))]
    norms = [module for name, module in named_norms if name not in on_heads]
    experts = [weight for weight in block.parameters() if weight.ndim == 3]  # one tensor for all experts, [E, ., .]

    # Norms: the float32 input, and the normalised values. Linear layers read the outputs of two of the norms, and
    # autocast copies those for each reader. The output layers of attention and MLP read other tensors.
    norm = _norm_bytes(block, kind)
    readers = len(matrices) - (1 if experts else 2) + bool(experts)
    total = len(norms) * norm * hidden + (2 * max(readers, 1) if kind == "autocast" else 2 * between) * hidden
    if on_heads:
        total += (4 + (2 if low and not _is_upcast(block) else 4)) * (query + key)
    # Attention: queries, keys, values and output, and a log-sum-exp per head. With a mask (padded and packed rows) keys
    # and values are expanded to all heads.
    total += product * 4 * query + 4 * config.num_attention_heads
    if experts:  # copies of each token in and out, and the gated MLP of each chosen expert
        inner = min(min(weight.shape[1:]) for weight in experts)
        width = 4 if kind == "autocast" else product
        return total + width * _chosen(config) * (2 * hidden + 4 * inner)
    # MLP: gate, its activation, up projection and their product; without a gate, the activation's intermediates.
    inner = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * hidden
    activation = str(getattr(config, "hidden_act", None) or getattr(config, "activation_function", ""))
    gated = any("gate" in name for name, _ in block.named_modules())
    return total + product * (4 if gated else 5 if "new" in activation else 2) * inner
