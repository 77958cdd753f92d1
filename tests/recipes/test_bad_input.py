"""Mistakes in settings and data: each is one clear message and an exit code, before anything is trained."""

import subprocess
import sys
import time

import pytest
import torch

from llmrl.objectives.llm import SFTLoss
from llmrl.testing import tiny_tokenizer
from llmrl.train.settings import EnvSettings
from llmrl.train.sft_config import SFTConfig
from llmrl.train.sft_data import tokenize_chats

GOOD = {"prompt": "2 + 2?", "completion": "four"}
LONG = {"prompt": "2 + 2?", "completion": "four " * 50}


def llmrl_without_torch(place, *arguments):
    """Runs the command in a new process, which fails if torch was imported; exit code and error output."""
    code = (
        "import sys; from llmrl.run.cli import main; code = main(sys.argv[1:]);"
        "assert 'torch' not in sys.modules, 'torch was imported'; sys.exit(code)"
    )
    command = [sys.executable, "-c", code, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, cwd=place.path, check=False)
    return result.returncode, result.stderr


# --- settings: exit code 2, before torch is imported


def test_an_unknown_key_in_a_file_is_reported_with_its_line_and_a_near_name(place, sft):
    (place.path / "bad.yaml").write_text("model: tiny\ndata: {path: sums}\nbatchsize: 8\n")
    code, err = llmrl_without_torch(place, "sft", "bad.yaml")
    assert code == 2
    assert "bad.yaml:3" in err
    assert "batchsize" in err
    assert "batch_size" in err
    assert not (place.path / "runs").exists()


def test_an_unknown_override_is_reported_with_a_near_name(place, grpo):
    code, err = llmrl_without_torch(place, "grpo", place.recipe("ok", grpo), "sampling.temprature=0.5")
    assert code == 2
    assert "sampling.temprature" in err
    assert "sampling.temperature" in err


def test_a_group_of_one_is_refused_because_it_has_no_baseline(place, grpo):
    code, err = llmrl_without_torch(place, "grpo", place.recipe("one", grpo, group_size=1))
    assert code == 2
    assert "a group of 1 has no baseline to compare with; use at least 2" in err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"updates_per_step": 3}, "updates_per_step 3 must divide prompts_per_step 4"),
        ({"min_group_size": 5}, "min_group_size 5 is more than group_size 4"),
        ({"env": {"reward": None}}, "env chat needs reward"),
        ({"group_size": "many"}, "group_size"),
        ({"optim": {"lr": -1.0}}, "optim.lr"),
        ({"max_failed": 1.5}, "max_failed"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(place, grpo, changes, message):
    result = place.run("grpo", place.recipe("bad", grpo, **changes))
    assert result.code == 2
    assert message in result.err
    assert not (place.path / "runs").exists()


def test_stopping_early_needs_something_to_measure(place, sft):
    result = place.run("sft", place.recipe("bad", sft, stop={"at_least": 0.5}))
    assert result.code == 2
    assert "stop needs env" in result.err


def test_stopping_early_needs_problems_that_are_not_trained_on(place, sft):
    env = {"name": "chat", "dataset": "prompts.jsonl", "reward": "vowels:share"}
    result = place.run("sft", place.recipe("bad", sft, env=env, stop={"at_least": 0.5}))
    assert result.code == 3
    assert "env chat has none of its own; name them in eval.dataset" in result.err


def test_a_dataset_and_a_reward_are_both_asked_for():
    with pytest.raises(ValueError, match="env chat needs dataset and reward"):
        EnvSettings()


def test_a_run_to_resume_must_exist_and_have_a_checkpoint(place, sft):
    assert place.run("resume", "nowhere").code == 2
    assert place.run("sft", place.recipe("ok", sft, data={"path": "gone.jsonl"}), "--name", "empty").code == 3
    result = place.run("resume", "empty")
    assert result.code == 3
    assert "there is none; start a new run" in result.err


# --- data: exit code 3


def test_a_missing_file_is_named(place, sft, grpo):
    result = place.run("sft", place.recipe("a", sft, data={"path": "gone.jsonl"}))
    assert result.code == 3
    assert "gone.jsonl" in result.err
    assert "does not" in result.err
    result = place.run("grpo", place.recipe("b", grpo, env={"dataset": "gone.parquet"}))
    assert result.code == 3
    assert "gone.parquet" in result.err


def test_a_missing_column_is_reported_with_those_that_are_there(place, sft, grpo):
    place.rows("odd.jsonl", [{"promt": "2 + 2?", "completion": "four"}])
    result = place.run("sft", place.recipe("a", sft, data={"path": "odd.jsonl"}))
    assert result.code == 3
    assert "row 1 must have a prompt column" in result.err
    assert "Did you mean 'prompt'?" in result.err
    result = place.run("grpo", place.recipe("b", grpo, env={"dataset": "odd.jsonl", "prompt_column": "question"}))
    assert result.code == 3
    assert "'question' is missing in row 1" in result.err


def test_an_empty_dataset_is_refused(place, sft, grpo):
    place.rows("empty.jsonl", [])
    for command, name in (
        ("sft", place.recipe("a", sft, data={"path": "empty.jsonl"})),
        ("grpo", place.recipe("b", grpo, env={"dataset": "empty.jsonl"})),
    ):
        result = place.run(command, name)
        assert result.code == 3
        assert "must have at least one row: empty.jsonl has none" in result.err


def test_a_line_that_is_not_json_is_named(place, sft):
    (place.path / "broken.jsonl").write_text('{"prompt": "a", "completion": "b"}\n{"prompt": \n')
    result = place.run("sft", place.recipe("a", sft, data={"path": "broken.jsonl"}))
    assert result.code == 3
    assert "broken.jsonl, line 2 must be JSON" in result.err


def test_a_row_without_an_assistant_turn_is_named(place, sft):
    rows = [{"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "four"}]}]
    place.rows("chats.jsonl", [*rows, {"messages": rows[0]["messages"][:1]}])
    result = place.run("sft", place.recipe("a", sft, data={"path": "chats.jsonl"}))
    assert result.code == 3
    assert "must have an assistant turn: row 2 has only user" in result.err


def test_the_reward_must_be_there_and_its_columns_too(place, grpo):
    for reward, message in (
        ("nowhere:score", "nowhere"),
        ("vowels:shares", "Did you mean 'share'?"),
        ("vowels", "must be 'package.module:name'"),
    ):
        result = place.run("grpo", place.recipe("a", grpo, env={"reward": reward}))
        assert result.code == 2, reward
        assert message in result.err
    place.module("needy", "def score(completion, difficulty):\n    return 1.0\n")
    result = place.run("grpo", place.recipe("b", grpo, env={"reward": "needy:score"}))
    assert result.code == 2
    assert "'difficulty' must be a column of the dataset" in result.err


def test_a_model_that_is_not_there_is_named(place, sft):
    result = place.run("sft", place.recipe("a", sft, model="./no-model-here"))
    assert result.code == 3
    assert "model ./no-model-here: cannot be loaded" in result.err
    result = place.run("sft", place.recipe("b", sft, model="latest:sums_sft"))
    assert result.code == 3
    assert "a run of sums_sft with a checkpoint must be in runs/: there is none" in result.err


# --- too long


def chats(place, **settings):
    place.rows("chats.jsonl", [GOOD, LONG, GOOD])
    return tokenize_chats(SFTConfig(model={}, data={"path": "chats.jsonl"}, **settings), tiny_tokenizer())


def test_a_conversation_longer_than_the_limit_is_an_error_unless_another_policy_is_chosen(place, sft):
    place.rows("chats.jsonl", [GOOD, LONG, GOOD])
    result = place.run("sft", place.recipe("a", sft, data={"path": "chats.jsonl"}, max_length=40))
    assert result.code == 3
    assert "at most max_length = 40 tokens long: row 2 has" in result.err
    assert "too_long=split or too_long=truncate" in result.err


def test_a_conversation_longer_than_the_limit_can_lose_its_end(place):
    whole, cut = chats(place), chats(place, max_length=40, too_long="truncate")
    assert [len(ids) for ids in cut.ids] == [len(whole.ids[0]), 40, len(whole.ids[2])]
    assert cut.ids[1].tolist() == whole.ids[1][:40].tolist()
    assert cut.masks[1].tolist() == whole.masks[1][:40].tolist()
    assert cut.num_cut == 1


def test_a_conversation_longer_than_the_limit_can_be_split_without_losing_a_trained_token(place):
    whole, split = chats(place), chats(place, max_length=40, too_long="split")
    assert len(split) > 3
    assert max(map(len, split.ids)) == 40
    pieces = list(zip(split.ids, split.masks, strict=True))[1:-1]
    trained = [token for ids, mask in pieces for token in ids[mask].tolist()]
    assert trained == whole.ids[1][whole.masks[1]].tolist()
    assert split.num_cut == 1
    counts = [SFTLoss(torch.nn.Identity()).count_step(data.as_rows()).tokens for data in (whole, split)]
    assert counts[0] == counts[1] == sum(int(mask.sum()) for mask in whole.masks)


def test_pieces_without_a_trained_token_are_dropped_and_counted(place, sft):
    place.rows("chats.jsonl", [{"prompt": "2 + 2? " * 40, "completion": "four"}, GOOD])
    cut = tokenize_chats(
        SFTConfig(model={}, data={"path": "chats.jsonl"}, max_length=40, too_long="truncate"), tiny_tokenizer()
    )
    assert (len(cut), cut.num_cut, cut.num_dropped) == (1, 1, 1)
    place.rows("chats.jsonl", [{"prompt": "2 + 2? " * 40, "completion": "four"}])
    name = place.recipe("a", sft, data={"path": "chats.jsonl", "rows": None}, max_length=40, too_long="truncate")
    result = place.run("sft", name)
    assert result.code == 3
    assert "no token is left to train" in result.err


def test_how_many_were_cut_is_part_of_the_plan(place, sft):
    place.rows("chats.jsonl", [GOOD, LONG, GOOD] * 4)
    name = place.recipe("a", sft, data={"path": "chats.jsonl"}, max_length=40, too_long="truncate", steps=1)
    assert "4 longer than 40 tokens, truncate" in place.run("sft", name).out.replace("\n", " ")


def test_a_prompt_longer_than_the_limit_is_an_error_or_dropped(place, grpo):
    place.rows(
        "mixed.jsonl", [{"prompt": f"Say {'many words ' * (30 * (i == 2))} {i}", "answer": ""} for i in range(6)]
    )
    env = {"dataset": "mixed.jsonl", "max_prompt_tokens": 30}
    result = place.run("grpo", place.recipe("a", grpo, env=env))
    assert result.code == 3
    assert "at most env.max_prompt_tokens = 30 tokens long: row 3 has" in result.err
    assert "env.too_long=drop" in result.err
    result = place.run("grpo", place.recipe("b", grpo, env={**env, "too_long": "drop"}), "--name", "dropped")
    assert result.code == 0
    assert "5 prompts · 1 longer than 30 tokens left out" in result.out.replace("\n", " ")
    prompts = {rollout.prompt for step in (1, 2, 3) for rollout in place.rollouts("dropped", step)}
    assert len(prompts) == 5


def test_dropping_must_leave_a_prompt(place, grpo):
    env = {"max_prompt_tokens": 2, "too_long": "drop"}
    result = place.run("grpo", place.recipe("a", grpo, env=env))
    assert result.code == 3
    assert "all 12 are longer than env.max_prompt_tokens = 2" in result.err


# --- templates


SILENT = "{% for m in messages %}{{ m.role }}: {% if m.role != 'assistant' %}{{ m.content }}{% endif %}\n{% endfor %}"
UNMARKED = (
    "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}{% endgeneration %}{% endif %}"
    "{{ m.content }}\n{% endfor %}"
)
FORGETFUL = (  # shows only the last assistant turn, as templates that drop earlier thinking do
    "{% for m in messages %}{% if m.role != 'assistant' or loop.last %}{{ m.role }}: "
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}</s>{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.mark.parametrize("template", [SILENT, UNMARKED])
def test_a_template_under_which_nothing_would_be_trained_is_refused(place, sft, template):
    result = place.run("sft", place.recipe("a", sft, chat_template=template))
    assert result.code == 3
    assert "assistant" in result.err
    assert "Traceback" not in result.err


def test_several_turns_need_a_template_that_keeps_earlier_ones(place, grpo):
    result = place.run("grpo", place.recipe("a", grpo, chat_template=FORGETFUL, env={"max_turns": 2}))
    assert result.code == 3
    assert "several turns need one that leaves earlier turns as they are" in result.err
    assert "env.max_turns=1" in result.err
    assert "env.on_rewrite=new_record" in result.err
    result = place.run("grpo", place.recipe("b", grpo, chat_template=FORGETFUL, steps=1))
    assert result.code == 0, "one turn does not"
    assert "prefix-preserving NO" in result.out.replace("\n", " ")


def test_a_template_by_a_name_that_nobody_registered_is_refused(place, sft):
    result = place.run("sft", place.recipe("a", sft, chat_template="qwem"))
    assert result.code in (2, 3)
    assert "qwen" in result.err


def test_a_mistake_in_the_settings_costs_no_time(place):
    started = time.perf_counter()
    code, _ = llmrl_without_torch(place, "grpo", "sums_grpo", "stepz=3")
    assert code == 2
    assert time.perf_counter() - started < 2, "torch alone takes longer"
