"""Strings to ids and messages to text, and back."""

import pytest
import torch
from tensordict import TensorDict

from llmrl.data.llm.chat import History
from llmrl.data.llm.templates import template_names
from llmrl.envs import check_env_specs
from llmrl.envs.llm import ChatEnv, LLMEnv
from llmrl.envs.llm.transforms import TemplateTransform, Tokenizer, as_nested_tensor, as_padded_tensor
from llmrl.errors import ConfigError, DataError, MissingKeyError, ShapeError, TemplateError
from llmrl.modules.llm import Renderer
from llmrl.testing import ScriptedPolicy, tiny_tokenizer
from tests.support.conversations import fake_policy
from tests.support.refusals import refusals

TEXTS = ["Hi", "What is 2+2?"]
CHAT = [{"role": "user", "content": "What is 2+2?"}, {"role": "assistant", "content": "It is 4."}]


def ids_of(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def tokenised(tokenizer, texts=TEXTS, **options):
    """What a Tokenizer writes for these texts."""
    return Tokenizer(["text"], ["ids"], tokenizer=tokenizer, **options)(TensorDict(text=texts, batch_size=[len(texts)]))


@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_are_padded_on_the_side_of_the_tokenizer(side):
    tokenizer = tiny_tokenizer()
    tokenizer.padding_side = side
    td = tokenised(tokenizer)
    rows = [ids_of(tokenizer, text) for text in TEXTS]
    filler = [tokenizer.pad_token_id] * (len(rows[1]) - len(rows[0]))
    short = filler + rows[0] if side == "left" else rows[0] + filler
    assert td["ids"].tolist() == [short, rows[1]]
    assert td["ids"].dtype is torch.int64
    assert td["attention_mask"].sum(1).tolist() == [len(row) for row in rows]
    assert [row[mask].tolist() for row, mask in zip(td["ids"], td["attention_mask"], strict=True)] == rows


def test_lengths_are_cut_and_filled_as_asked(tokenizer):
    assert tokenised(tokenizer, padding="max_length", max_length=30)["ids"].shape == (2, 30)
    cut = tokenised(tokenizer, max_length=2, return_attention_mask=False)
    assert cut["ids"][1].tolist() == ids_of(tokenizer, TEXTS[1])[:2]
    assert "attention_mask" not in cut
    with pytest.raises(ShapeError, match="padding=False all rows must have the same length"):
        tokenised(tokenizer, padding=False)
    alike = tokenised(tokenizer, ["Hi", "Hi"], padding=False)
    assert alike["ids"].shape == (2, len(ids_of(tokenizer, "Hi")))


def test_the_inverse_decodes(tokenizer):
    text = "Hi<|im_end|>"
    td = TensorDict(ids=torch.tensor([ids_of(tokenizer, text)]), batch_size=[1])
    for skip, expected in ((True, "Hi"), (False, text)):
        transform = Tokenizer(in_keys_inv=["text"], out_keys_inv=["ids"], tokenizer=tokenizer, skip_special_tokens=skip)
        assert transform.inv(td).get("text").tolist() == [expected]
    assert "text" not in td


def test_additional_tokens_go_to_a_copy_of_the_tokenizer(tokenizer):
    size = len(tokenizer)
    td = tokenised(tokenizer, ["<|mine|>"], additional_tokens=["<|mine|>"])
    assert len(tokenizer) == size
    assert td["ids"].tolist() == [[size]]


def test_a_missing_entry_is_tolerated_where_that_is_allowed(tokenizer):
    empty = TensorDict(batch_size=[1])
    assert not Tokenizer(["text"], ["ids"], tokenizer=tokenizer)(empty.copy()).keys()
    with pytest.raises(MissingKeyError, match="reads 'text'"):
        Tokenizer(["text"], ["ids"], tokenizer=tokenizer, missing_tolerance=False)(empty)
    with pytest.raises(MissingKeyError, match="reads 'text'"):
        Tokenizer(["text"], ["ids"], tokenizer=tokenizer)._call(empty)


def test_several_keys_have_a_mask_each(tokenizer):
    transform = Tokenizer(["a", "b"], ["a", ("x", "b")], tokenizer=tokenizer)
    td = transform(TensorDict(a=["Hi"], b=["Hi"], batch_size=[1]))
    assert {"a_attention_mask", ("x", "b_attention_mask")} <= set(td.keys(True))


def test_settings_and_values_that_cannot_be_used_are_refused(tokenizer):
    unpadded = tiny_tokenizer()
    unpadded.pad_token = None
    for error, words, call in (
        (ConfigError, "there is no default", lambda: Tokenizer(["text"], ["ids"])),
        (ConfigError, "needs max_length", lambda: Tokenizer(tokenizer=tokenizer, padding="max_length")),
        (ConfigError, "one key to write per key", lambda: Tokenizer(["a", "b"], ["c"], tokenizer=tokenizer)),
        (DataError, "string: got int", lambda: tokenised(tokenizer, torch.tensor([1]))),
        (ConfigError, r"set tokenizer\.pad_token", lambda: tokenised(unpadded)),
    ):
        with pytest.raises(error, match=words):
            call()


def test_an_env_of_text_acts_on_ids_and_keeps_its_specs(tokenizer):
    transform = Tokenizer(["text"], ["ids"], ["text_response"], ["action"], tokenizer=tokenizer)
    env = LLMEnv(batch_size=[2]).append_transform(transform)
    hi = torch.tensor([ids_of(tokenizer, "Hi")] * 2)
    asked = TensorDict(text=TEXTS, batch_size=[2])
    after = env.step(env.reset(asked).set("action", hi))["next"]
    assert after.get("text").tolist() == [text + "Hi" for text in TEXTS]
    assert after["ids"][1][after["attention_mask"][1]].tolist() == ids_of(tokenizer, TEXTS[1] + "Hi")
    check_env_specs(env, tensordict=asked, policy=lambda td: td.set("action", hi))


READABLE = [name for name in template_names() if name != "tokenizer"]


@pytest.mark.parametrize("name", READABLE)
def test_the_inverse_reads_what_the_template_of_every_family_writes(tokenizer, name):
    both = {"in_keys_inv": ["history"], "out_keys_inv": ["text"], "in_keys": ["history"], "out_keys": ["text"]}
    try:
        transform = TemplateTransform(tokenizer, chat_template_name=name, **both)
    except TemplateError as error:  # a family whose template needs a token that this tokenizer lacks
        pytest.skip(str(error))
    td = transform(TensorDict(history=History.from_chats([CHAT, CHAT]), batch_size=[2]))
    back = transform.inv(td.exclude("history"))["history"].to_chats()
    said = [[(m["role"], m["content"]) for m in chat if m["role"] != "system"] for chat in back]
    assert said == [[(m["role"], m["content"]) for m in CHAT]] * 2


def test_a_text_policy_acts_in_an_env_of_messages_and_its_ids_stay_as_they_were_drawn(tokenizer):
    env = ChatEnv(batch_size=[2], system_prompt="Be brief.").append_transform(TemplateTransform(tokenizer))
    policy = fake_policy(tokenizer, ["four", "  4 ", "and", "so"], input_mode="text")
    engine = policy.engine
    td = env.reset(TensorDict(query=TEXTS, batch_size=[2]))
    expected = Renderer(tokenizer).prompt_ids(td["history"].prompt.to_chats())
    first = env.step(policy(td.exclude("history")))
    assert all(torch.equal(a, b) for a, b in zip(engine.prompts, expected, strict=True))
    last = [chat[-1] for chat in first["next", "history"].prompt.to_chats()]
    assert last == [{"role": "assistant", "content": content} for content in ("four", last[1]["content"])]
    second = policy(env.step_mdp(first).exclude("history"))
    pairs = zip(first.get(("tokens", "full"), as_list=True), engine.prompts[2:], strict=True)
    goes_on = [torch.equal(prompt[: len(before)], before) for before, prompt in pairs]
    assert second["new_record"].tolist() == [not same for same in goes_on]
    assert goes_on[0]


def test_text_that_holds_no_message_and_a_template_without_a_parser_are_refused(tokenizer):
    inverse = {"in_keys_inv": ["history"], "out_keys_inv": ["text"]}
    transform = TemplateTransform(tokenizer, **inverse)
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}[/]{% endfor %}"
    own = TemplateTransform(tokenizer, template, **inverse)
    for error, words, call in (
        (TemplateError, "must hold a message", lambda: transform.inv(TensorDict(text=[""], batch_size=[1]))),
        (MissingKeyError, "reads 'text'", lambda: transform.inv(TensorDict(batch_size=[1]))),
        (MissingKeyError, "there must be a History", lambda: transform(TensorDict(batch_size=[1]))),
        (TemplateError, "an inverse parser", lambda: own.inv(TensorDict(text=["[user]Hi[/]"], batch_size=[1]))),
        (TemplateError, "Did you mean", lambda: TemplateTransform(tokenizer, chat_template_name="chatml_formta")),
    ):
        with pytest.raises(error, match=words):
            call()


def test_the_specs_of_a_text_view_are_kept(tokenizer):
    env = ChatEnv(batch_size=[2]).append_transform(TemplateTransform(tokenizer))
    assert env.action_keys == (("text", "full"),)
    asked = TensorDict(query=TEXTS, batch_size=[2])
    check_env_specs(env, tensordict=asked, policy=lambda td: ScriptedPolicy(["4<|im_end|>"])(td.exclude("history")))


def test_ragged_rows_become_padded_or_nested_tensors():
    rows = [torch.arange(6).view(2, 3), torch.arange(9).view(3, 3)]
    padded = as_padded_tensor(rows)
    assert (padded.shape, padded[0, 2].tolist()) == ((2, 3, 3), [0, 0, 0])
    assert torch.equal(padded[1], rows[1])
    other = as_padded_tensor([row.T for row in rows], dim=1, stack_dim=1)
    assert torch.equal(other[:, 0, :2], rows[0].T)
    assert torch.equal(other[:, 1], rows[1].T)
    assert other[:, 0, 2].tolist() == [0, 0, 0]
    nested = as_nested_tensor(rows)
    assert [torch.equal(a, b) for a, b in zip(nested.unbind(), rows, strict=True)] == [True, True]


def test_tensordicts_are_stacked_entry_by_entry():
    mask = torch.ones(3, dtype=torch.bool)
    rows = [TensorDict(ids=torch.arange(n), more=TensorDict(mask=mask[:n]), text="t") for n in (2, 3)]
    padded = as_padded_tensor(rows)
    assert padded["ids"].tolist() == [[0, 1, 0], [0, 1, 2]]
    assert padded["more", "mask"].tolist() == [[True, True, False], [True, True, True]]
    assert (padded.get("text").tolist(), padded.batch_size) == (["t", "t"], (2,))
    assert as_nested_tensor(rows)["ids"].offsets().tolist() == [0, 2, 5]


test_rows_that_do_not_fit_are_refused = refusals(
    (ShapeError, "at least one row", lambda: as_padded_tensor([])),
    (ShapeError, "differ in nothing but", lambda: as_nested_tensor([torch.ones(2, 2), torch.ones(2, 3)])),
    (ShapeError, "same entries", lambda: as_padded_tensor([TensorDict(a=torch.ones(1)), TensorDict(b=torch.ones(1))])),
    (ShapeError, "must have dim 1", lambda: as_padded_tensor([torch.ones(1)], dim=1)),
)
