"""`RewardModelScorer`: a Transformers sequence-classification model as reward."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor

from llmrl.data.llm.images import refuse_images
from llmrl.data.llm.message_forms import render_text
from llmrl.data.llm.templates import find_template
from llmrl.errors import ConfigError, check_at_least
from llmrl.modules.llm.model_files import check_whole, loaded
from llmrl.optional import require

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class RewardModelScorer:
    """Scores whole conversations with a reward model: the prompt, and the response as the assistant's turn.

    Reads   the column ``query``: the user's message, or a list of messages
    Calls   ``model`` without gradients, in batches of rows of similar length: at most ``tokens_per_batch`` tokens with
            padding. Padding uses the model's own padding token, so that a row gets the same score as alone
    Returns the logit ``label`` of each row, float; None for a conversation of more than ``max_tokens`` tokens, because
            the score of a truncated conversation would be misleading
    Raises  ConfigError for a model with several labels without ``label``, one without a padding token, or a tokenizer
            without a chat template; DataError for a prompt with images

    >>> from llmrl.testing import tiny_tokenizer
    >>> from transformers import Qwen2Config, Qwen2ForSequenceClassification
    >>> tokenizer = tiny_tokenizer()
    >>> config = Qwen2Config(vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1,
    ...     num_attention_heads=2, num_key_value_heads=2, num_labels=1, pad_token_id=tokenizer.pad_token_id)
    >>> scorer = RewardModelScorer(Qwen2ForSequenceClassification(config), tokenizer)
    >>> len(scorer(["Four.", "5"], query=["2 + 2?", "2 + 2?"]))
    2
    """

    name = "reward_model"
    batched = True

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        label: int | None = None,
        tokens_per_batch: int = 16384,
        max_tokens: int | None = None,
        system_prompt: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ):
        labels = model.config.num_labels
        if label is None and labels != 1:
            raise ConfigError(f"RewardModelScorer: a model with {labels} labels needs label, the index of the reward.")
        if label is not None and not 0 <= label < labels:
            raise ConfigError(f"RewardModelScorer: label must be within [0, {labels}): got {label}.")
        if model.config.pad_token_id is None:
            raise ConfigError(
                "RewardModelScorer: model.config.pad_token_id must be set: the model finds padding by it; set it to "
                "the tokenizer's, or to another token that no conversation ends with."
            )
        if not tokenizer.chat_template:
            raise ConfigError("RewardModelScorer: the reward model's tokenizer must have a chat template.")
        check_at_least("RewardModelScorer", 1, tokens_per_batch=tokens_per_batch)
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.label = label or 0
        self.tokens_per_batch = tokens_per_batch
        self.max_tokens = max_tokens or getattr(model.config, "max_position_embeddings", None)
        self.system_prompt = system_prompt
        self.template_kwargs = dict(template_kwargs or {})

    @classmethod
    def load(
        cls, model: str, *, device: str | None = None, dtype: str = "auto", base: str | None = None, **options: Any
    ) -> RewardModelScorer:
        """Loads a hub name or a folder; the folder may hold only PEFT adapters, on the model ``base`` (None: the one
        that they name). ``options`` are the other arguments of `RewardModelScorer`.

        Raises  DataError if it cannot be loaded, or its files lack a weight, such as one of the output layer
        """
        from transformers import AutoTokenizer

        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        setting = f"{cls.name}.model"
        weights = loaded(_read, model, setting=setting, dtype=dtype, base=base)
        source = model
        if (adapter := _adapter(model)) is not None and not (Path(model) / "tokenizer_config.json").exists():
            source = _base(adapter, base)
        return cls(weights.to(device), loaded(AutoTokenizer.from_pretrained, source, setting=setting), **options)

    @classmethod
    def check(cls, model: str, *, base: str | None = None, **options: Any) -> None:
        """Raises DataError if `load` would fail: the files are missing, or a folder's lack the output weights."""
        loaded(_check_output, model, setting=f"{cls.name}.model", base=base)

    def __call__(self, completions: Sequence[str], query: Sequence[Any]) -> list[float | None]:
        if not completions:
            return []
        rows = self.ids([self.conversation(q, c) for q, c in zip(query, completions, strict=True)])
        # Sorts by length, because rows of similar length need little padding.
        order = sorted(range(len(rows)), key=lambda row: len(rows[row]))
        scores: list[float | None] = [None] * len(rows)
        if self.max_tokens is not None:
            order = [row for row in order if len(rows[row]) <= self.max_tokens]
        while order:
            count = 1  # from short to long: the next row sets the padded length of the batch
            while count < len(order) and len(rows[order[count]]) * (count + 1) <= self.tokens_per_batch:
                count += 1
            batch, order = order[:count], order[count:]
            for row, score in zip(batch, self._forward([rows[row] for row in batch]).tolist(), strict=True):
                scores[row] = score
        return scores

    def conversation(self, query: Any, completion: str) -> list[dict[str, Any]]:
        """The messages to score."""
        before = [{"role": "user", "content": query}] if isinstance(query, str) else list(query)
        if self.system_prompt is not None and before[0]["role"] != "system":
            before.insert(0, {"role": "system", "content": self.system_prompt})
        refuse_images(before, "RewardModelScorer")
        return [*before, {"role": "assistant", "content": completion}]

    def ids(self, conversations: list[list[dict[str, Any]]]) -> list[list[int]]:
        """The token ids of conversations, rendered with the reward model's own template."""
        own = self.tokenizer.chat_template
        template = find_template(self.tokenizer, template=own if isinstance(own, str) else None)
        texts = render_text(template, conversations, self.tokenizer, template_kwargs=self.template_kwargs)
        return self.tokenizer(texts, add_special_tokens=False)["input_ids"]

    @torch.no_grad()
    def _forward(self, rows: list[list[int]]) -> Tensor:
        length = max(map(len, rows))
        ids_BT = torch.full((len(rows), length), self.model.config.pad_token_id)
        attention_BT = torch.zeros(len(rows), length, dtype=torch.int64)
        for number, ids in enumerate(rows):  # padding on the right, which a causal model never attends to
            ids_BT[number, : len(ids)] = torch.tensor(ids)
            attention_BT[number, : len(ids)] = 1
        device = self.model.device
        logits_BL = self.model(input_ids=ids_BT.to(device), attention_mask=attention_BT.to(device)).logits
        return logits_BL[:, self.label].float().cpu()


def _adapter(source: str) -> Path | None:
    """The folder of PEFT adapters in ``source``, a folder without a whole model; None if there are none."""
    found = [path.parent for path in Path(source).glob("**/adapter_config.json")]
    return found[0] if found and not any(Path(source).glob("model*.safetensors")) else None


def _base(adapter: Path, given: str | None) -> str:
    """The model below PEFT adapters. Raises ValueError if they name none that exists."""
    name = given or json.loads((adapter / "adapter_config.json").read_text()).get("base_model_name_or_path")
    if not name or (Path(name).is_absolute() and not Path(name).is_dir()):
        raise ValueError(f"the base model of these adapters must exist: {name or 'it'} does not; give it as base")
    return name


def _adapted_config(source: str, adapter: Path, base: str | None, **options: Any) -> Any:
    """The configuration of a classifier with PEFT adapters, whose folder may lack it."""
    from transformers import AutoConfig

    if (Path(source) / "config.json").exists():
        return AutoConfig.from_pretrained(source, **options)
    with safe_open(adapter / "adapter_model.safetensors", framework="pt") as file:
        heads = [name for name in file.keys() if name.endswith((".score.weight", ".classifier.weight"))]
        check_whole([] if heads else ["score.weight"])
        labels = file.get_slice(heads[0]).get_shape()[0]
    return AutoConfig.from_pretrained(_base(adapter, base), num_labels=labels, **options)


def _check_output(source: str, *, base: str | None, **options: Any) -> None:
    """Checks the configuration and, for a folder, the weight names in the headers of its safetensors files."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    if (adapter := _adapter(source)) is not None:
        _base(adapter, base)
        _adapted_config(source, adapter, base, **options)
        return
    config = AutoConfig.from_pretrained(source, **options)
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(config)
    names = set()
    for path in Path(source).glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            names.update(file.keys())
    if names:
        own = [name for name in model.state_dict() if not name.startswith(f"{model.base_model_prefix}.")]
        check_whole(set(own) - names)


def _read(source: str, *, base: str | None, **options: Any) -> PreTrainedModel:
    from transformers import AutoModelForSequenceClassification

    load = AutoModelForSequenceClassification.from_pretrained
    if (adapter := _adapter(source)) is not None:
        peft = require("peft", extra="lora", used_by="RewardModelScorer")
        model = load(_base(adapter, base), config=_adapted_config(source, adapter, base), **options)
        return peft.PeftModel.from_pretrained(model, adapter).merge_and_unload()
    model, found = load(source, output_loading_info=True, **options)
    check_whole(found["missing_keys"])
    return model
