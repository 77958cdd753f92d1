"""Several sampled turns in the format of every built-in family: one stream of ids, and a history that renders as it."""

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from llmrl.data.llm.templates import _BUILT_IN, find_template
from llmrl.data.ragged.tensordicts import column
from llmrl.envs.llm import ChatEnv
from llmrl.envs.utils import step_mdp
from llmrl.modules.llm import LLMWrapperBase
from llmrl.modules.llm.rendering import Renderer
from llmrl.testing import FakeEngine, tiny_tokenizer
from tests.support.conversations import prompt_after

QUESTION, *FOLLOW_UPS = ({"role": "user", "content": text} for text in ("12+30?", "And 7*6?", "Sure, é?", "Thanks."))
ANSWERS = ["It is 42.", "42,\n\nagain.", "Yes <b> é", "Bye."]


def metaspace_tokenizer(template: str):
    """As Llama 2's: a space is a letter of its own, and one is put before each text."""
    row = find_template(None, template)
    letters = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *map(chr, range(33, 127))]
    vocab = {letter: index for index, letter in enumerate(letters)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        eos_token=row.special_tokens[-1],
        pad_token="<unk>",
        additional_special_tokens=list(row.special_tokens[:-1]),
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = row.jinja
    return tokenizer


def as_a_trained_model(renderer: Renderer, prompt: torch.Tensor, turn: int) -> torch.Tensor:
    """The ids after the prompt up to the end of the last answer, as the template writes them."""
    [whole] = renderer.render([spoken(turn)])
    assert whole.ids[: len(prompt)].tolist() == prompt.tolist()
    return whole.ids[len(prompt) : whole.spans[-1][1]]


def sampled_turns(tokenizer: Any, draw: Any) -> tuple[LLMWrapperBase, list[Any]]:
    """A policy and the rows of its four turns; ``draw(renderer, prompt ids, turn)`` is what the engine answers."""
    renderer = Renderer(tokenizer)
    turns = iter(range(len(ANSWERS)))
    options = {"tokenizer": tokenizer, "eos_token_ids": renderer.stop_token_ids}
    engine = FakeEngine(lambda prompt: draw(renderer, prompt, next(turns)), **options)
    policy = LLMWrapperBase(engine, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 200})
    td = ChatEnv(batch_size=[1]).reset(TensorDict(query=column([QUESTION["content"]]), batch_size=[1]))
    rows = []
    for follow_up in [*FOLLOW_UPS, None]:
        td = ChatEnv(batch_size=[1]).step(policy(td))
        rows.append(td[0])
        if follow_up is not None:
            td = step_mdp(td)
            td["history"] = prompt_after(td["history"].prompt, [[follow_up]])
    return policy, rows


def spoken(turn: int) -> list[dict[str, Any]]:
    """The conversation up to the answer of a turn."""
    chat: list[dict[str, Any]] = []
    for asked, answer in zip([QUESTION, *FOLLOW_UPS], ANSWERS[: turn + 1], strict=False):
        chat += [asked, {"role": "assistant", "content": answer}]
    return chat


TOKENIZERS = {"bytes": lambda name: tiny_tokenizer(template=name), "metaspace": metaspace_tokenizer}
KEEPING = [(name, "bytes") for name, row in _BUILT_IN.items() if not row.rewrites]
KEEPING += [(name, "metaspace") for name in ("llama", "mistral", "gemma", "phi")]


@pytest.mark.parametrize(("name", "kind"), KEEPING)
def test_a_sampled_conversation_is_one_stream_and_its_history_renders_as_it(name: str, kind: str):
    tokenizer = TOKENIZERS[kind](name)
    policy, rows = sampled_turns(tokenizer, as_a_trained_model)
    renderer = Renderer(tokenizer)
    assert policy.counters["rewritten"] == 0
    for turn, row in enumerate(rows):
        chat = row["history"].full.to_chats()
        assert chat == spoken(turn)
        [whole] = renderer.render([chat])
        assert row["tokens"].full.tolist() == whole.ids[: whole.spans[-1][1]].tolist()
        assert policy.engine.prompts[turn].tolist() == renderer.prompt_ids([chat[:-1]])[0].tolist()
        if turn:
            before = rows[turn - 1]["tokens"].full
            assert row["tokens"].full[: len(before)].tolist() == before.tolist()


@pytest.mark.parametrize("name", [name for name, row in _BUILT_IN.items() if row.rewrites])
def test_where_the_past_is_rewritten_each_prompt_is_what_the_template_writes(name: str):
    tokenizer = tiny_tokenizer(template=name)
    policy, rows = sampled_turns(tokenizer, as_a_trained_model)
    for turn, row in enumerate(rows):
        asked = row["history"].full.to_chats()[:-1]
        assert policy.engine.prompts[turn].tolist() == Renderer(tokenizer).prompt_ids([asked])[0].tolist()


@pytest.mark.parametrize(("name", "kind"), KEEPING)
@pytest.mark.parametrize("ends", ["by its control token alone", "by length"])
def test_each_turn_has_one_end_marker_however_it_ended(name: str, ends: str, kind: str):
    tokenizer = TOKENIZERS[kind](name)
    [end] = Renderer(tokenizer).end_of_turn_ids[-1:]

    def draw(renderer, prompt, turn):
        said = tokenizer(ANSWERS[turn], add_special_tokens=False).input_ids
        return torch.tensor(said + [end] * (ends != "by length"))

    policy, rows = sampled_turns(tokenizer, draw)
    assert policy.counters["rewritten"] == 0
    for turn in range(1, len(rows)):
        prompt, before = policy.engine.prompts[turn], rows[turn - 1]["tokens"].full
        assert prompt[: len(before)].tolist() == before.tolist()
        written = Renderer(tokenizer).prompt_ids([rows[turn]["history"].full.to_chats()[:-1]])[0]
        assert (prompt == end).sum() == (written == end).sum()
        added = tokenizer.decode(prompt[len(before) :])
        assert tokenizer.decode(written).endswith(added if ends != "by length" else added.lstrip())


@pytest.mark.parametrize(("name", "kind"), KEEPING)
@pytest.mark.parametrize("quoted", ["a {} b", "a{}b", " {} {} ", "{}\n{}", "é {}"])
def test_a_quoted_control_token_keeps_the_spaces_around_it(name: str, quoted: str, kind: str):
    tokenizer = TOKENIZERS[kind](name)
    renderer = Renderer(tokenizer)
    marker = renderer.template.special_tokens[-1]
    chat = [QUESTION | {"content": "x" + quoted.replace("{}", marker) + "x"}, {"role": "assistant", "content": "42"}]
    [row] = renderer.render([chat])
    [plain] = renderer.render([[chat[0] | {"content": "x" + quoted.replace("{}", "marker") + "x"}, chat[1]]])
    assert tokenizer.decode(row.ids) == tokenizer.decode(plain.ids).replace("marker", marker)
    control = tokenizer.convert_tokens_to_ids(marker)
    assert (row.ids == control).sum() == (plain.ids == control).sum()
    assert tokenizer.decode(row.ids[row.assistant_mask]) == tokenizer.decode(plain.ids[plain.assistant_mask])
