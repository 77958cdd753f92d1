"""Stand-ins that make tests fast and offline: a tokenizer trained in the process and a small random model.

Nothing is downloaded and nothing touches the global random state. What they stand in for is a Qwen model: byte-level
BPE with single digits, ChatML with Qwen's special tokens, a causal language model of the Transformers library.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from importlib import resources
from typing import TYPE_CHECKING

import torch

from llmrl.errors import ConfigError, near

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

# Splits letters, single digits, punctuation and white space as Qwen's tokenizers do.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Added to the vocabulary but ordinary text for a decoder that skips special tokens, as in Qwen3.
_MARKUP_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
_TEXTS = (
    "system user assistant tool You are a helpful assistant. Answer with one number between <answer> and </answer>.",
    "What is the sum of 12 and 30? The sum of 12 and 30 is 42. What is 7 times 6? It is 42, because 6 times 7 is 42.",
    "Hello! How are you? I am fine, thank you. And you? Think step by step and then give the final answer.",
    '{"name": "calculator", "arguments": {"expression": "12 + 30"}}\ndef add(a, b):\n    return a + b\n\nprint(add(1, 2))',
    "The quick brown fox jumps over the lazy dog while the other dogs sleep near the river and dream of the hills.",
)
_ARCHITECTURES = ("qwen2", "qwen3", "llama", "mistral", "gpt2")


def tiny_tokenizer(texts: Sequence[str] | None = None, vocab_size: int = 512) -> PreTrainedTokenizerFast:
    """A Qwen-like tokenizer with a ChatML template, trained here and now.

    Reads    texts       lines to train on; a few built-in ones by default
             vocab_size  upper bound of ``len(tokenizer)``; at least 265 = 256 bytes and 9 added tokens
    Returns  a new tokenizer each time (the training is cached): ``eos`` is ``<|im_end|>``, ``pad`` is
             ``<|endoftext|>``, the template marks what the assistant writes
    Raises   ConfigError if ``vocab_size`` has no room for the bytes and the added tokens

    >>> tokenizer = tiny_tokenizer()
    >>> tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True)
    '<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n'
    >>> len(tokenizer("2026").input_ids)
    4
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained(tuple(_TEXTS if texts is None else texts), vocab_size)),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
        model_max_length=32768,
    )
    tokenizer.chat_template = resources.files("llmrl.chat_templates").joinpath("qwen.jinja").read_text("utf-8")
    return tokenizer


@lru_cache(maxsize=8)
def _trained(texts: tuple[str, ...], vocab_size: int) -> str:
    """The serialised byte-level BPE. Training is deterministic: same texts, same merges."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    num_added = len(_CONTROL_TOKENS) + len(_MARKUP_TOKENS)
    if vocab_size < 256 + num_added:
        raise ConfigError(
            f"tiny_tokenizer: vocab_size must hold 256 bytes and {num_added} added tokens: got {vocab_size}."
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - num_added,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _CONTROL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in _MARKUP_TOKENS])
    return tokenizer.to_str()


def tiny_model(
    tokenizer: PreTrainedTokenizerFast | None = None,
    *,
    architecture: str = "qwen2",
    hidden_size: int = 64,
    layers: int = 2,
    heads: int = 4,
    vocab_size: int | None = None,
    seed: int = 0,
) -> PreTrainedModel:
    """A random float32 causal language model in evaluation mode: same seed, same weights.

    Reads    tokenizer     gives the vocabulary size and the end and padding ids; :func:`tiny_tokenizer` by default
             architecture  "qwen2", "qwen3", "llama", "mistral" or "gpt2"
             heads         attention heads; half as many key/value heads where the family shares them
    Raises   ConfigError for another architecture, or if ``hidden_size`` is no multiple of ``2 * heads``

    The global random state is left as it was.

    >>> model = tiny_model(hidden_size=16, heads=2)
    >>> model(torch.tensor([[1, 2, 3]])).logits.shape[:2]
    torch.Size([1, 3])
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    if architecture not in _ARCHITECTURES:
        raise ConfigError(
            f"tiny_model: architecture must be one of {', '.join(_ARCHITECTURES)}: got {architecture!r}."
            f"{near(architecture, _ARCHITECTURES)}"
        )
    if hidden_size % (2 * heads):
        raise ConfigError(f"tiny_model: hidden_size must be a multiple of 2 * heads = {2 * heads}: got {hidden_size}.")
    tokenizer = tiny_tokenizer() if tokenizer is None else tokenizer
    common = {
        "vocab_size": len(tokenizer) if vocab_size is None else vocab_size,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    if architecture == "gpt2":
        sizes = {"n_embd": hidden_size, "n_layer": layers, "n_head": heads, "n_positions": 2048}
        sizes |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    else:
        sizes = {
            "hidden_size": hidden_size,
            "intermediate_size": 2 * hidden_size,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": max(1, heads // 2),
            "head_dim": hidden_size // heads,
            "max_position_embeddings": 32768,
        }
    config = AutoConfig.for_model(architecture, **common, **sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.eval()
