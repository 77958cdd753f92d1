"""Data and rewards that people have: files of several formats, columns of several names, functions of their own."""

import json

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from llmrl.data import PairwiseDataset
from llmrl.data.llm.templates import _BUILT_IN, add_chat_template
from llmrl.envs.llm.tasks.gsm8k import GSM8KEnv
from llmrl.errors import ConfigError, TemplateError
from llmrl.modules.llm.rendering import Renderer
from llmrl.testing import tiny_tokenizer
from llmrl.train.data.preferences import tokenize_pairs
from llmrl.train.data.sft import marked_pieces, tokenize_chats
from llmrl.train.models.loading import load_tokenizer
from llmrl.train.planning.plan import check_template
from llmrl.train.settings import SFTConfig
from llmrl.train.settings.preferences import DPOConfig
from tests.support.published_templates import base_tokenizer
from tests.support.saved_models import save_tiny

ASK, TELL = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "four"}
CONVERSATION = [ASK, TELL, {"role": "user", "content": "sure?"}, {"role": "assistant", "content": "yes"}]
SHAPES = {
    "messages": {"messages": [ASK, TELL]},
    "prompt and completion": {"prompt": "2 + 2?", "completion": "four"},
    "prompt and completion as messages": {"prompt": [ASK], "completion": [TELL]},
    "question and answer": {"question": "2 + 2?", "answer": "four"},
}


def trained(place, row, file="chats.jsonl", **data):
    """What is trained of a row, as text."""
    settings = SFTConfig(model={}, data={"path": place.rows(file, [row, row]), **data})
    chats = tokenize_chats(settings, tiny_tokenizer())
    assert len(chats) == 2
    return [text for text, is_trained in chats.samples(1)[0].pieces if is_trained], chats


@pytest.mark.parametrize("file", ["chats.jsonl", "chats.parquet"])
@pytest.mark.parametrize("shape", list(SHAPES))
def test_supervised_data_come_in_the_shapes_that_people_have(place, shape, file):
    pieces, chats = trained(place, SHAPES[shape], file)
    assert pieces == ["four<|im_end|>"]
    assert "2 + 2?" in tiny_tokenizer().decode(chats.ids[0])


def test_settings_name_other_columns_the_turns_that_train_a_system_prompt_and_the_number_of_rows(place):
    row = {"problem_text": "2 + 2?", "reply": "four", "answer": "no"}
    assert trained(place, row, prompt_column="problem_text", completion_column="reply")[0] == ["four<|im_end|>"]
    row = {"messages": CONVERSATION}
    assert trained(place, row)[0] == ["four<|im_end|>", "yes<|im_end|>"]
    pieces, chats = trained(place, row, train_on="last", system_prompt="Be brief.")
    assert pieces == ["yes<|im_end|>"]
    assert tiny_tokenizer().decode(chats.ids[0]).startswith("<|im_start|>system\nBe brief.<|im_end|>")
    settings = SFTConfig(model={}, data={"path": "chats.jsonl", "rows": 1})
    assert len(tokenize_chats(settings, tiny_tokenizer())) == 1, "the first of two"


def test_flags_leave_messages_and_rows_out_of_the_loss_and_the_plan_counts_what_is_left_out(place):
    """Regression: `"weight": 0` was trained, and columns that are not read were left out without a word."""
    flagged = {"messages": [ASK, TELL | {"weight": 0}, *CONVERSATION[2:]], "weight": 1.0}
    pieces, chats = trained(place, flagged)
    assert pieces == ["yes<|im_end|>"]
    assert "four<|im_end|>" in tiny_tokenizer().decode(chats.ids[0])
    named = {"messages": [ASK | {"name": "Ada"}, TELL | {"id": "7"}]}
    rows = [flagged, {"messages": [ASK, TELL], "train": False, "source": "web"}, named]
    words = ("2 conversations · 1 row left out by their flags", "not used: source, of messages name, id")
    place.train("sft", "flagged", data={"path": place.rows("chats.jsonl", rows), "rows": None}, steps=1, words=words)
    last = {"messages": [*CONVERSATION[:3], CONVERSATION[3] | {"trainable": False}]}
    settings = SFTConfig(model={}, data={"path": place.rows("last.jsonl", [last, flagged]), "train_on": "last"})
    chats = tokenize_chats(settings, tiny_tokenizer())
    assert (len(chats), chats.num_left_out) == (1, 1)


def test_a_refused_conversation_is_named_with_its_line_and_message(place):
    """Regression: the rows of a block were named by its first one, messages were counted from 0."""
    path = place.path / "chats.jsonl"
    lines = ["", *[json.dumps({"messages": [ASK, TELL]})] * 5, json.dumps({"messages": [ASK, TELL | {"mood": "good"}]})]
    path.write_text("\n".join(lines))
    with pytest.raises(TemplateError, match=r"chats.jsonl:7, message 2: .* not of message 2, .*does not use mood"):
        tokenize_chats(SFTConfig(model={}, data={"path": str(path)}), tiny_tokenizer())
    pair = {"prompt": "2 + 2?", "chosen": "four", "rejected": "five"}
    odd = pair | {"rejected": TELL | {"mood": "good"}}
    config = DPOConfig(model={}, data={"path": place.rows("pairs.jsonl", [pair, pair, odd])})
    with pytest.raises(TemplateError, match=r"pairs.jsonl:3, message 2: "):
        tokenize_pairs(config, tiny_tokenizer())
    with pytest.raises(TemplateError, match=r"pairs.jsonl:3, message 2: "):
        PairwiseDataset.from_dataset("train", "pairs.jsonl", 60, place.path / "cache", tokenizer=tiny_tokenizer())


def test_a_reward_sees_the_columns_of_the_file_under_their_names_and_a_list_as_a_list(place):
    source = "def score(completion, answer, solution, problem):\n"
    source += "    assert answer == solution == ['yes', {'no': None}] and problem == '2 + 2?'\n    return 1.0\n"
    place.module("listed", source)
    rows = [{"problem": "2 + 2?", "solution": ["yes", {"no": None}], "level": 3}] * 4
    env = {"dataset": place.rows("asked.jsonl", rows), "reward": "listed:score"}
    place.train("grpo", "listed", env=env, zero_variance="keep", steps=1, words=("not used: level",))
    assert {rollout.reward for rollout in place.rollouts("listed", 1)} == {1.0}


@pytest.mark.parametrize("file", ["chats.jsonl", "chats.parquet"])
def test_a_model_is_trained_on_a_file(place, file):
    place.rows(file, [{"messages": CONVERSATION}, {"messages": [ASK, TELL]}] * 4)
    place.train("sft", "mine", data={"path": file, "rows": None}, epochs=3, steps=None, batch_size=4)
    steps = place.steps("mine")
    assert len(steps) == 6
    assert steps[-1]["policy/loss"] < steps[0]["policy/loss"] - 1


def test_a_reward_of_the_users_own_sees_the_answer_and_gives_the_advantages(place):
    place.module("mine", "def score(completion, answer):\n    return len(completion) + 100 * int(answer)\n")
    place.train("grpo", "mine", env={"reward": "mine:score"})
    for rollout in place.rollouts("mine", 2):
        question = rollout.prompt.split("<|im_end|>")[0].split()[-1]
        said = rollout.completion.removesuffix("<|im_end|>")
        assert rollout.reward == len(said) + 100 * int(question)
    groups = {}
    for rollout in place.rollouts("mine", 2):
        groups.setdefault(rollout.group, []).append(rollout)
    for group in groups.values():
        rewards = torch.tensor([rollout.reward for rollout in group], dtype=torch.float64)
        if rewards.std() > 0:
            expected = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
            assert [rollout.advantage for rollout in group] == pytest.approx(expected.tolist(), rel=1e-5)
        else:
            assert [rollout.advantage for rollout in group] == [None] * 4, "equal rewards teach nothing"


@pytest.mark.parametrize("file", ["prompts.jsonl", "prompts.parquet"])
def test_prompts_come_from_a_file_and_columns_may_have_other_names(place, file):
    rows = [{"task": f"Say {i}", "truth": str(i), "level": "easy"} for i in range(6)]
    source = "def score(completion, answer, level):\n    return float(level == 'easy') * int(answer)\n"
    place.module("levels", source)
    env = {"prompt_column": "task", "answer_column": "truth", "reward": "levels:score", "system_prompt": "Be brief."}
    place.train("grpo", "n", env=env | {"dataset": place.rows(file, rows)}, zero_variance="keep")
    for rollout in place.rollouts("n", 1):
        assert rollout.prompt.startswith("<|im_start|>system\nBe brief.")
        assert rollout.reward == int(rollout.prompt.split("<|im_end|>")[1].split()[-1])


def test_prompts_may_be_conversations(place):
    rows = [{"messages": [*CONVERSATION[:3], {"role": "assistant", "content": str(i)}]} for i in range(6)]
    place.module("last", "def score(completion, answer):\n    return float(answer)\n")
    env = {"dataset": place.rows("chats.jsonl", rows), "reward": "last:score"}
    place.train("grpo", "c", env=env, zero_variance="keep")
    rollouts = place.rollouts("c", 1)
    assert {rollout.reward for rollout in rollouts} <= {0.0, 1.0, 2.0, 3.0, 4.0, 5.0}
    assert "four<|im_end|>" in rollouts[0].prompt
    assert "sure?" in rollouts[0].prompt


def test_gsm8k_is_trained_from_a_local_file_with_its_own_prompt_and_reward(place):
    rows = [{"question": f"Tom has {i} eggs. How many?", "answer": f"He has {i}.\n#### {i}"} for i in range(1, 9)]
    env = {"name": "gsm8k", "dataset": place.rows("gsm8k.jsonl", rows)}
    env |= {"reward": None}
    changes = {"zero_variance": "keep", "eval": {"dataset": "gsm8k.jsonl", "rows": 3, "max_tokens": 6}}
    place.train("grpo", "eggs", env=env, **changes)
    for rollout in place.rollouts("eggs", 1):
        assert GSM8KEnv.SYSTEM_PROMPT in rollout.prompt
        assert rollout.reward in (0.0, pytest.approx(0.1), 1.0)
    assert 0 <= place.steps("eggs")[-1]["eval/gsm8k/mean"] <= 1


def test_a_template_registered_for_the_model_stays_with_the_tokenizer(tmp_path, monkeypatch):
    """A checkpoint's folder has another name than the model, and its template must be the one that was trained with."""
    monkeypatch.setattr("llmrl.data.llm.templates._TEMPLATES", dict(_BUILT_IN))
    tiny_tokenizer().save_pretrained(tmp_path / "My-Bracket-7b")
    jinja = (
        "{% for m in messages %}[{{ m.role }}]{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% endfor %}"
    )
    add_chat_template("bracket", jinja, model_family_keywords=["bracket"])
    source = SFTConfig(model=str(tmp_path / "My-Bracket-7b"), data={"path": "chats.jsonl"})
    load_tokenizer(source, runs=tmp_path).save_pretrained(tmp_path / "step1")
    saved = SFTConfig(model=str(tmp_path / "step1"), data={"path": "chats.jsonl"})
    assert load_tokenizer(saved, runs=tmp_path).chat_template == jinja
    with pytest.raises(ConfigError, match="'bracket' is registered for models named"):
        load_tokenizer(source.model_copy(update={"chat_template": "phi"}), runs=tmp_path)


def source(folder, tokenizer, **settings):
    tokenizer.save_pretrained(folder / "model")
    return SFTConfig(model=str(folder / "model"), data={"path": "chats.jsonl"}, **settings)


def test_a_base_model_without_a_template_is_refused_with_the_templates_that_fit_it(tmp_path):
    """Regression: it was trained on ChatML as ordinary text, and never learned to stop."""
    words = r"chat_template=dialogpt or chat_template=falcon, which ends a turn with '<\|endoftext\|>'"
    with pytest.raises(TemplateError, match=words):
        load_tokenizer(source(tmp_path, base_tokenizer()), runs=tmp_path)
    tokenizer = load_tokenizer(source(tmp_path, base_tokenizer(), chat_template="dialogpt"), runs=tmp_path)
    assert "stop token trained yes" in check_template(Renderer(tokenizer))
    chosen = load_tokenizer(source(tmp_path, base_tokenizer(), chat_template="chatml_format"), runs=tmp_path)
    assert "NO, so the model will not learn to stop: use a chat_template that ends" in check_template(Renderer(chosen))


def test_variables_of_the_template_are_those_of_every_later_reader(tmp_path):
    tokenizer = tiny_tokenizer(template="qwen3")
    settings = source(tmp_path, tokenizer, template_variables={"enable_thinking": False})
    load_tokenizer(settings, runs=tmp_path).save_pretrained(tmp_path / "model")
    [expected] = Renderer(tokenizer, template_kwargs={"enable_thinking": False}).prompt_ids([[ASK]])
    for later in (settings, settings.model_copy(update={"template_variables": {}})):
        assert Renderer(load_tokenizer(later, runs=tmp_path)).prompt_ids([[ASK]])[0].tolist() == expected.tolist()
    other = settings.model_copy(update={"template_variables": {"enable_thinking": True}})
    [thinking] = Renderer(tokenizer).prompt_ids([[ASK]])
    assert Renderer(load_tokenizer(other, runs=tmp_path)).prompt_ids([[ASK]])[0].tolist() == thinking.tolist()


def test_a_file_of_a_template_is_read_with_the_settings(place):
    (place.path / "mine.jinja").write_text("{{ messages }}")
    assert (
        SFTConfig(model={}, data={"path": "x"}, chat_template=str(place.path / "mine.jinja")).chat_template
        == "{{ messages }}"
    )
    words = ["chat_template", "mime.jinja", "must exist", "Did you mean 'mine.jinja'?"]
    place.train("sft", "bad", code=2, words=words, chat_template=str(place.path / "mime.jinja"))


def test_a_conversation_with_a_call_is_among_the_samples(place):
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    calling = [ASK, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "4"}, TELL]
    path = place.rows("chats.jsonl", [{"messages": [ASK, TELL]}] * 5 + [{"messages": calling}] * 2)
    chats = tokenize_chats(SFTConfig(model={}, data={"path": path}), tiny_tokenizer())
    shown = ["".join(text for text, _ in sample.pieces) for sample in chats.samples(2)]
    assert ["<tool_call>" in text for text in shown] == [False, True]


def test_a_chat_template_of_the_users_own_is_used_and_saved(place):
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}A: {% generation %}{{ m.content }}</s>{% endgeneration %}"
    )
    template += "{% else %}Q: {{ m.content }}\n{% endif %}{% endfor %}{% if add_generation_prompt %}A: {% endif %}"
    place.rows("chats.jsonl", [SHAPES["messages"]] * 4)
    data = {"path": "chats.jsonl", "rows": None}
    place.train("sft", "mine", words=["Q: 2 + 2?"], data=data, chat_template=template, steps=1)
    saved = place.path / "runs/mine/checkpoints/step1/chat_template.jinja"
    assert saved.read_text() == template


def test_text_is_cut_where_training_begins_and_ends():
    tokenizer = tiny_tokenizer()
    ids = torch.tensor(tokenizer("one two").input_ids + tokenizer(" three").input_ids)
    mask = torch.zeros(len(ids), dtype=torch.bool)
    mask[len(tokenizer("one two").input_ids) :] = True
    assert marked_pieces(tokenizer, ids, mask) == [("one two", False), (" three", True)]
    assert marked_pieces(tokenizer, ids, ~mask) == [("one two", True), (" three", False)]
    assert marked_pieces(tokenizer, ids, torch.ones_like(mask)) == [("one two three", True)]
    assert marked_pieces(tokenizer, ids[:0], mask[:0]) == []


@pytest.mark.parametrize(
    ("command", "settings"),
    [
        ("sft", {"do_sample": False, "temperature": 0.6, "top_p": 0.9}),
        ("dpo", {"do_sample": False, "top_h": 0.5, "length_penalty": 2.0}),
        ("grpo", {"do_sample": True, "early_stopping": True}),
    ],
)
def test_a_model_whose_sampling_settings_transformers_does_not_write_is_trained_and_saved(place, command, settings):
    """Regression: every step was trained, then the first checkpoint failed."""
    folder = place.path / "model"
    save_tiny(folder)
    (folder / "generation_config.json").write_text(json.dumps(settings))
    place.train(command, "run", model=str(folder), steps=1)
    written = json.loads((place.path / "runs/run/checkpoints/step1/generation_config.json").read_text())
    assert settings.keys() & written.keys() <= {"do_sample"}


def test_models_that_cannot_be_trained_are_refused_before_their_weights_load(place, run_llmrl):
    def refused(folder, *words):
        run_llmrl("sft", "chat_sft", f"model={folder}", "data.path=chats.jsonl", "steps=1", code=3, words=words)

    place.rows("chats.jsonl", [{"question": "Hi there", "answer": "Good morning to you and everybody"}])
    save_tiny("no_tokenizer")
    (place.path / "no_tokenizer/tokenizer.json").unlink()
    refused("no_tokenizer", "tokenizer.json is missing")
    save_tiny("added", vocab_size=478)
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["morning"])
    tokenizer.save_pretrained("added")
    refused("added", "within the model's embedding of 478 tokens: got 478")
    sizes = {"n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    GPT2LMHeadModel(GPT2Config(vocab_size=478, **sizes)).save_pretrained("learned")
    tiny_tokenizer().save_pretrained("learned")
    refused("learned", "must fit the 16 positions that the model has learned")
