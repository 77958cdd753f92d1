"""Test doubles for offline tests: a tokenizer trained on the spot, a small random model, scripted answers.

They download nothing and leave the global random state alone. They mimic a Qwen model: byte-level BPE with
single digits, ChatML with Qwen's special tokens, a causal language model of the Transformers library.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from llmrl.data.llm.templates import find_template
from llmrl.data.ragged.tensordicts import present_keys
from llmrl.envs.llm.chat import answered
from llmrl.errors import ConfigError, MissingKeyError, did_you_mean
from llmrl.modules.llm.engines.base import Engine, Generation, Hear, SamplingParams, StopReason
from llmrl.modules.llm.rendering import text_tokenizer
from llmrl.modules.llm.vision import image_processor_class, model_class

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast, ProcessorMixin

__all__ = ["FakeEngine", "ScriptedPolicy", "tiny_model", "tiny_processor", "tiny_tokenizer"]

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
    '{"name": "calculator", "arguments": {"expression": "12 + 30"}}\ndef add(a, b):\n    return a + b\n\nprint(add(1))',
    "The quick brown fox jumps over the lazy dog while the other dogs sleep near the river and dream of the hills.",
)
# Settings of some families: windows shorter than the sequences of a test, fewer experts than its tokens.
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_FAMILY_SETTINGS: dict[str, dict[str, Any]] = {
    "gemma2": {"sliding_window": 8},
    "gemma3_text": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {**_MOE, "shared_expert_intermediate_size": 32},
    "qwen3_moe": _MOE,
}
_ARCHITECTURES = ("qwen2", "qwen3", "llama", "mistral", "gpt2", "gemma", "qwen2_vl", *_FAMILY_SETTINGS)
_IMAGE_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_IMAGE_TEMPLATE = """{%- macro text(content) -%}
{%- if content is string %}{{ content }}{% else %}{% for part in content -%}
{%- if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif -%}
{%- endfor %}{% endif -%}
{%- endmacro -%}
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}
{%- if message.role == 'assistant' %}{% generation %}{{ text(message.content) + '<|im_end|>' }}{% endgeneration %}
{%- else %}{{ text(message.content) + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


def tiny_tokenizer(
    texts: Sequence[str] | None = None, vocab_size: int = 512, *, template: str = "qwen"
) -> PreTrainedTokenizerFast:
    """Trains a Qwen-like tokenizer with a ChatML template.

    Reads    texts       lines to train on; a few built-in ones by default
             vocab_size  upper bound of ``len(tokenizer)``; at least 265 = 256 bytes and 9 added tokens
             template    a registered family: uses its template, its end token as ``eos``, and adds its control tokens
    Returns  a new tokenizer each time (the training is cached): ``eos`` is ``<|im_end|>``, ``pad`` is
             ``<|endoftext|>``, the template marks the assistant's text
    Raises   ConfigError if ``vocab_size`` has no room for the bytes and the added tokens; TemplateError for an unknown
             template

    >>> tokenizer = tiny_tokenizer()
    >>> tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True)
    '<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n'
    >>> len(tokenizer("2026").input_ids)
    4
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    row = find_template(None, template)
    controls = tuple(dict.fromkeys((*_CONTROL_TOKENS, *row.special_tokens)))
    eos = row.special_tokens[-1] if row.special_tokens else "<|im_end|>"
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained(tuple(_TEXTS if texts is None else texts), vocab_size, controls)),
        eos_token=eos,
        pad_token="<|endoftext|>",
        additional_special_tokens=[token for token in controls if token not in ("<|endoftext|>", eos)],
        clean_up_tokenization_spaces=False,
        model_max_length=32768,
    )
    tokenizer.chat_template = row.jinja
    return tokenizer


@lru_cache(maxsize=8)
def _trained(texts: tuple[str, ...], vocab_size: int, controls: tuple[str, ...]) -> str:
    """Returns the serialised byte-level BPE. Training is deterministic: same texts, same merges."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    num_added = len(controls) + len(_MARKUP_TOKENS)
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
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in controls])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in _MARKUP_TOKENS])
    return tokenizer.to_str()


def tiny_processor() -> ProcessorMixin:
    """Makes a processor like Qwen2-VL's: :func:`tiny_tokenizer` with image tokens, and patches of 4 x 4 pixels.

    One token covers 8 x 8 pixels; images are resized to 1 to 16 tokens. For ``tiny_model(...,
    architecture="qwen2_vl")``.

    >>> from PIL import Image
    >>> processor = tiny_processor()
    >>> processor(text=["<|image_pad|>"], images=[Image.new("RGB", (16, 24))])["input_ids"][0].count(480)
    6
    """
    from transformers import Qwen2VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", *_IMAGE_TOKENS]})
    tokenizer.chat_template = _IMAGE_TEMPLATE
    sizes = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
    images = Qwen2VLImageProcessorPil(**sizes, size={"shortest_edge": 64, "longest_edge": 1024})
    return image_processor_class(Qwen2VLProcessor)(images, tokenizer, chat_template=_IMAGE_TEMPLATE)


def tiny_model(
    tokenizer: PreTrainedTokenizerFast | ProcessorMixin | None = None,
    *,
    architecture: str = "qwen2",
    hidden_size: int = 64,
    layers: int = 2,
    heads: int = 4,
    vocab_size: int | None = None,
    seed: int = 0,
) -> PreTrainedModel:
    """Makes a random float32 causal language model in evaluation mode: same seed, same weights.

    Reads    tokenizer     sets the vocabulary size and the end and padding ids; :func:`tiny_tokenizer` by default
             architecture  "qwen2", "qwen3", "llama", "mistral", "gpt2", "gemma", "gemma2", "gemma3_text" (both with a
                           window of 8 tokens), "mixtral", "qwen2_moe" or "qwen3_moe" (four experts), "qwen2_vl" (reads
                           images, with :func:`tiny_processor` for the tokenizer)
             heads         attention heads; half as many key/value heads (one, if odd) if the family shares them
    Raises   ConfigError for another architecture, or if ``hidden_size`` is not a multiple of ``2 * heads``

    >>> model = tiny_model(hidden_size=16, heads=2)
    >>> model(torch.tensor([[1, 2, 3]])).logits.shape[:2]
    torch.Size([1, 3])
    """
    from transformers import AutoConfig

    if architecture not in _ARCHITECTURES:
        raise ConfigError(
            f"tiny_model: architecture must be one of {', '.join(_ARCHITECTURES)}: got {architecture!r}."
            f"{did_you_mean(architecture, _ARCHITECTURES)}"
        )
    if hidden_size % (2 * heads):
        raise ConfigError(f"tiny_model: hidden_size must be a multiple of 2 * heads = {2 * heads}: got {hidden_size}.")
    reads_images = architecture == "qwen2_vl"
    tokenizer = text_tokenizer(tokenizer or (tiny_processor() if reads_images else tiny_tokenizer()))
    settings = {
        "vocab_size": len(tokenizer) if vocab_size is None else vocab_size,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        **_sizes(architecture, hidden_size, layers, heads),
    }
    config = _vision_config(tokenizer, settings) if reads_images else AutoConfig.for_model(architecture, **settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return model_class(config).from_config(config, dtype=torch.float32).eval()


def _vision_config(tokenizer: PreTrainedTokenizerFast, settings: dict[str, Any]) -> PretrainedConfig:
    from transformers import Qwen2VLConfig

    half = settings.pop("head_dim") // 2  # rotary frequencies, divided between time, height and width
    time = half // 4
    sections = [time, (half - time) // 2, half - time - (half - time) // 2]
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections}
    patches = {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": settings["hidden_size"], "num_heads": 1, "mlp_ratio": 2}
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    return Qwen2VLConfig(
        text_config={**settings, "rope_parameters": rope},
        vision_config={**vision, **patches},
        tie_word_embeddings=False,
        **{name: settings[name] for name in ("eos_token_id", "pad_token_id", "bos_token_id")},
        **dict(zip(names, tokenizer.convert_tokens_to_ids(list(_IMAGE_TOKENS)), strict=True)),
    )


def _sizes(architecture: str, hidden_size: int, layers: int, heads: int) -> dict[str, Any]:
    if architecture == "gpt2":
        sizes = {"n_embd": hidden_size, "n_layer": layers, "n_head": heads, "n_positions": 2048}
        return sizes | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2 if heads % 2 == 0 else 1,
        "head_dim": hidden_size // heads,
        "max_position_embeddings": 32768,
        **_FAMILY_SETTINGS.get(architecture, {}),
    }
    if "layer_types" in sizes:
        sizes["layer_types"] = (sizes["layer_types"] * layers)[:layers]
    return sizes


class FakeEngine(Engine):
    """An ``Engine`` that answers from a script, for tests of wrappers, environments and losses.

    answers  strings or int64[R] id rows, used in order across rows and calls, cyclically; or a function from prompt ids
             int64[P] to a string or ids. A string is tokenised and ended with the end-of-sequence id
    streams  tells of its ids one by one, see `Engine`
    Stores   ``prompts``: every prompt received, in order; ``seeds``: the seeds of the last call; ``weights``: the last
             weights received

    An answer that does not end in a stop id has stop reason LENGTH. Log-probs are a fixed function of the ids.

    >>> tokenizer = tiny_tokenizer()
    >>> engine = FakeEngine(["It is 4."], tokenizer=tokenizer)
    >>> generation = engine.generate([torch.tensor([1, 2, 3])], SamplingParams())
    >>> tokenizer.decode(generation.ids[0]), generation.stop_reasons[0].name, engine.prompts[0].tolist()
    ('It is 4.<|im_end|>', 'EOS', [1, 2, 3])
    """

    def __init__(
        self,
        answers: Sequence[str | Tensor] | Callable[[Tensor], str | Tensor],
        *,
        tokenizer: PreTrainedTokenizerFast | None = None,
        eos_token_ids: Sequence[int] = (),
        streams: bool = False,
    ) -> None:
        self.streams = streams
        if not callable(answers) and not len(answers):
            raise ConfigError("FakeEngine: there must be at least one answer: got none.")
        self.tokenizer = tokenizer
        self.eos_token_ids = tuple(eos_token_ids) or (() if tokenizer is None else (tokenizer.eos_token_id,))
        self.answers = answers if callable(answers) else [self._ids(answer) for answer in answers]
        self.version = 0
        self.prompts: list[Tensor] = []
        self.seeds: list[int] | None = None
        self.weights: Mapping[str, Tensor] | None = None
        self._num_given = 0
        self._known: dict[tuple[int, frozenset[int], int], tuple[Tensor, Tensor, StopReason]] = {}

    def generate(
        self,
        prompts: Sequence[Tensor],
        params: SamplingParams,
        *,
        seeds: Sequence[int] | None = None,
        hear: Hear | None = None,
    ) -> Generation:
        """Returns the next answers, cut at ``max_new_tokens`` and after the first stop id."""
        self.prompts.extend(prompts)
        self.seeds = None if seeds is None else list(seeds)
        stops = frozenset((*self.eos_token_ids, *params.stop_token_ids))
        rows = [self._answer(prompt, stops, params.max_new_tokens) for prompt in prompts]
        if hear is not None:
            rows = [_heard(answer, row, hear) for row, answer in enumerate(rows)]
        ids, log_probs, reasons = ([row[part] for row in rows] for part in range(3))
        plain = [2 * row for row in log_probs] if params.truncates else None
        return Generation(ids, log_probs, plain, reasons, self.version)

    def score(
        self, sequences: Sequence[Tensor], *, temperature: float = 1.0, masks: Sequence[Tensor] | None = None
    ) -> list[Tensor]:
        """Returns log-probs that depend on the ids only; 0 for the first token and where a mask is False."""
        scores = _fake_log_probs(sequences)
        for row in scores:
            row[:1] = 0.0
        if masks is not None:
            scores = [row * mask for row, mask in zip(scores, masks, strict=True)]
        return scores

    def update_weights(self, weights: Mapping[str, Tensor] | None, *, version: int) -> None:
        """Stores the weights and sets the version."""
        self.weights = weights
        self.version = version

    def close(self) -> None:
        """Does nothing: there is nothing to release."""

    def _answer(self, prompt: Tensor, stops: frozenset[int], limit: int) -> tuple[Tensor, Tensor, StopReason]:
        """Ids, log-probs and stop reason of the next answer; scripted answers are cached."""
        if callable(self.answers):
            return _cut_answer(self._ids(self.answers(prompt)), stops, limit)
        key = (self._num_given % len(self.answers), stops, limit)
        self._num_given += 1
        if key not in self._known:
            self._known[key] = _cut_answer(self.answers[key[0]], stops, limit)
        return self._known[key]

    def _ids(self, answer: str | Tensor) -> Tensor:
        if isinstance(answer, Tensor):
            return answer
        if self.tokenizer is None:
            raise ConfigError("FakeEngine: string answers need tokenizer=.")
        ids = self.tokenizer(answer, add_special_tokens=False)["input_ids"]
        return torch.tensor([*ids, self.tokenizer.eos_token_id], dtype=torch.int64)


def _heard(answer: tuple[Tensor, Tensor, StopReason], row: int, hear: Hear) -> tuple[Tensor, Tensor, StopReason]:
    """The answer as far as it is wanted."""
    ids, log_probs, _ = answer
    for place, (token, log_prob) in enumerate(zip(ids.tolist(), log_probs.tolist(), strict=True), start=1):
        if not hear(row, [token], [log_prob]):
            return ids[:place], log_probs[:place], StopReason.ABORT
    return answer


def _cut_answer(ids: Tensor, stops: frozenset[int], limit: int) -> tuple[Tensor, Tensor, StopReason]:
    values = ids.tolist()[:limit]
    end = next((place + 1 for place, value in enumerate(values) if value in stops), None)
    ids = ids[: len(values) if end is None else end].clone()
    return ids, _fake_log_probs([ids])[0], StopReason.LENGTH if end is None else StopReason.EOS


def _fake_log_probs(rows: Sequence[Tensor]) -> list[Tensor]:
    """Returns float32 values in (-1, 0) that depend on the id only."""
    if not len(rows):
        return []
    flat = torch.cat(list(rows))
    return [row.clone() for row in (-(flat % 7 + 1).float() / 8).split([len(row) for row in rows])]


class ScriptedPolicy:
    """A policy without a model or tokens, for tests of environments, transforms and collectors in history or text mode.

    replies  strings, used in order across rows and calls, cyclically; or a function from a row's prompt (a list of
             messages, or a string) to the reply
    Reads    ("history", "prompt") or ("text", "prompt"), whichever is present
    Writes   "response" and "full" of the same container, "stop_reason" int64[B] (always EOS), "policy_version" (0)

    >>> from tensordict import TensorDict
    >>> from llmrl.modules.llm import Text
    >>> policy = ScriptedPolicy(["4", "5"])
    >>> td = TensorDict({"text": Text.from_rows({"prompt": ["2+2=", "2+3="]})}, batch_size=[2])
    >>> policy(td)["text"].rows("full")
    ['2+2=4', '2+3=5']
    """

    def __init__(self, replies: Sequence[str] | Callable[[Any], str]) -> None:
        if not callable(replies) and not len(replies):
            raise ConfigError("ScriptedPolicy: there must be at least one reply: got none.")
        self.replies = replies
        self._num_given = 0

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        history, text = td.get("history", None), td.get("text", None)
        if history is not None and (chats := history.chats("prompt")) is not None:
            td.set("history", answered(history, [self._reply(chat) for chat in chats]))
        elif text is not None and (prompts := text.rows("prompt")) is not None:
            td.set("text", answered(text, [self._reply(prompt) for prompt in prompts]))
        else:
            raise MissingKeyError(
                f"ScriptedPolicy: there must be a ('history', 'prompt') or ('text', 'prompt') to answer: keys "
                f"present: {present_keys(td)}."
            )
        td.set("stop_reason", torch.full(td.batch_size, int(StopReason.EOS)))
        td.set("policy_version", torch.zeros(td.batch_size, dtype=torch.int64))
        return td

    def _reply(self, prompt: Any) -> str:
        if callable(self.replies):
            return self.replies(prompt)
        self._num_given += 1
        return self.replies[(self._num_given - 1) % len(self.replies)]
