"""Whole runs, from the command line to the files that they leave."""

import json
import math
from typing import get_args

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

import llmrl.testing
from llmrl.envs.llm.tasks.sums import sums_reward
from llmrl.errors import DataError
from llmrl.objectives.llm.presets import PRESETS
from llmrl.report.curves import charts
from llmrl.report.run_files import read_run
from llmrl.run.metrics import check_metric_name, read_metrics
from llmrl.run.model_names import resolve_model
from llmrl.train.settings import GRPOConfig, SFTConfig

EVAL = {"rows": 6, "max_tokens": 6}


@pytest.fixture(scope="module")
def runs(shared_place):
    """One supervised run on ``sums``, and one of GRPO that starts from its checkpoint."""
    place = shared_place
    tiny = {"hidden_size": 32, "layers": 1, "heads": 2}
    common = {"env": {"name": "sums"}, "eval": EVAL, "checkpoint": {"every": 2, "keep": 3}, "optim": {"lr": 1e-2}}
    place.recipe("teach", {**common, "model": tiny, "data": {"path": "sums", "rows": 40}, "batch_size": 8, "steps": 5})
    grpo = {"steps": 3, "prompts_per_step": 3, "group_size": 4, "sampling": {"max_tokens": 6}, "zero_variance": "keep"}
    place.recipe("improve", {**common, "model": "latest:teach", **grpo, "eval": {**EVAL, "every": 2}})
    place.run("sft", "teach.yaml", "--name", "taught")
    place.run("grpo", "improve.yaml", "--name", "improved")
    return place


@pytest.mark.parametrize("run", ["taught", "improved"])
def test_every_step_has_a_line_of_known_finite_metrics(runs, run):
    lines = read_metrics(runs.path / "runs" / run)
    assert [line["step"] for line in lines] == list(range(len(lines)))
    measured = {f"eval/sums/{what}" for what in ("mean", "std", "count")}
    assert lines[0].keys() == {"step", *measured}, "what was measured before training"
    for line in lines:
        for name, value in line.items():
            if name != "step":
                check_metric_name(name)
                assert math.isfinite(value), name


def test_a_runs_folder_stands_for_its_last_checkpoint(runs):
    folder = runs.path / "runs" / "taught"
    assert resolve_model(str(folder), runs=folder.parent) == str(folder / "checkpoints" / "step5")
    (folder.parent / "none").mkdir(exist_ok=True)
    (folder.parent / "none" / "config.yaml").touch()
    with pytest.raises(DataError, match="must have left a checkpoint"):
        resolve_model(str(folder.parent / "none"), runs=folder.parent)


@pytest.mark.parametrize("run", ["taught", "improved"])
def test_the_report_of_a_run_knows_its_plan_its_settings_and_its_scores(runs, run):
    text = (runs.path / "runs" / run / "report.html").read_text(encoding="utf-8")
    data = json.loads(text.partition('id="report-data">')[2].partition("</script>")[0])
    assert data["title"] == run
    assert [card["label"] for card in data["cards"]][:1] == ["evaluation sums"]
    plan, given, _ = data["tables"]
    assert dict(plan["rows"])["machine"].startswith("1 process")
    assert [row[1] for row in given["rows"] if row[0] == "optim.lr"] == ["0.01"]
    assert [row for row in given["rows"] if row[1] == row[2]] == [], "what has its default is left out"


def test_supervised_steps_tell_what_was_trained(runs):
    first, *_, last = runs.steps("taught")
    assert last["policy/loss"] < first["policy/loss"]
    assert first["tokens/trained"] > 8 * 10
    assert [step["data/epoch"] for step in runs.steps("taught")] == [0.2, 0.4, 0.6, 0.8, 1.0]
    assert "eval/sums/mean" in last


def test_an_epoch_is_over_when_every_conversation_was_seen(place):
    place.train("sft", "rest", data={"rows": 10}, steps=None, epochs=1.5, batch_size=4)
    steps = place.steps("rest")
    assert [step["data/epoch"] for step in steps] == pytest.approx([1 / 3, 2 / 3, 1, 4 / 3, 5 / 3])
    whole, rest = sum(step["tokens/trained"] for step in steps[:2]), steps[2]["tokens/trained"]
    assert whole / 8 == pytest.approx(rest / 2, rel=0.2), "the third step has what is left: 2 of 10"


def test_grpo_steps_tell_what_was_sampled_and_trained(runs):
    steps = runs.steps("improved")
    for step in steps:
        assert step["tokens/trained"] == 12 * step["tokens/completion_mean"]
        assert step["group/kept_frac"] == 1.0
        assert step["mismatch/logp_abs_max"] < 1e-4, "engine and trainer are one model"
        assert step["async/staleness_max"] == 0
        assert step["rollout/failed"] == 0
    assert ["eval/sums/mean" in step for step in steps] == [False, True, True]


def test_the_settings_are_written_down_with_every_default(runs):
    written = yaml.safe_load((runs.path / "runs/taught/config.yaml").read_text())
    assert set(written) == set(SFTConfig.model_fields)
    assert written["optim"]["betas"] == [0.9, 0.95]


def test_the_rollouts_of_every_step_are_a_parquet_file_of_groups(runs):
    for step in (1, 2, 3):
        rollouts = runs.rollouts("improved", step)
        assert len(rollouts) == 12
        groups = {rollout.group: [r for r in rollouts if r.group == rollout.group] for rollout in rollouts}
        assert [len(group) for group in groups.values()] == [4, 4, 4]
        for group in groups.values():
            assert len({rollout.prompt for rollout in group}) == 1
            assert sum(rollout.advantage for rollout in group) == pytest.approx(0, abs=1e-5)
        assert {rollout.step for rollout in rollouts} == {step}
        assert {rollout.version for rollout in rollouts} == {step - 1}
        assert all(rollout.reward == sums_reward(rollout.completion, "0") for rollout in rollouts)


def test_no_problem_is_asked_twice_before_all_were_asked(runs):
    prompts = [rollout.prompt for step in (1, 2, 3) for rollout in runs.rollouts("improved", step)[::4]]
    assert len(set(prompts)) == 9


@pytest.mark.parametrize(("run", "steps"), [("taught", ["step2", "step4", "step5"]), ("improved", ["step2", "step3"])])
def test_checkpoints_are_whole_and_load_without_llmrl(runs, run, steps):
    assert runs.checkpoints(run) == steps
    for name in steps:
        folder = runs.path / "runs" / run / "checkpoints" / name
        tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
        prompt = [{"role": "user", "content": "What is 12 + 34?"}]
        inputs = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_tensors="pt")
        assert model(**inputs).logits.isfinite().all()
        made = llmrl.testing.tiny_tokenizer().apply_chat_template(prompt, add_generation_prompt=True)
        assert inputs["input_ids"][0].tolist() == made["input_ids"]


def test_grpo_goes_on_from_the_weights_that_supervised_training_left(runs, tmp_path):
    """One step with a rate of nearly nothing: what it saves is what it started from."""
    base = yaml.safe_load((runs.path / "improve.yaml").read_text())
    name = runs.recipe("still", base, steps=1, optim={"lr": 1e-30}, eval={"every": 0})
    runs.run("grpo", name, "--name", f"still-{tmp_path.name}")
    before = AutoModelForCausalLM.from_pretrained(runs.path / "runs/taught/checkpoints/step5").state_dict()
    after = AutoModelForCausalLM.from_pretrained(runs.path / f"runs/still-{tmp_path.name}/checkpoints/step1")
    for key, value in after.state_dict().items():
        assert torch.equal(value, before[key]), key


def test_eval_measures_a_checkpoint(runs, capsys):
    runs.run("eval", "taught", "--json")
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["checkpoint"], result["env"], result["split"], result["rows"]) == ("step5", "sums", "test", 6)
    assert result["mean"] == runs.steps("taught")[-1]["eval/sums/mean"]
    runs.run("eval", "improved", "--checkpoint", "step2", "eval.rows=4")
    assert "4 problems" in capsys.readouterr().out


def test_the_plan_of_grpo_names_the_four_choices(place):
    words = ["4 prompts x 4 = 16 rollouts", "R - mean_group", "ratio", "aggregation", "KL", "12 prompts"]
    place.train("grpo", "plan", words=words, algo="dr_grpo", steps=1)


@pytest.mark.parametrize(("command", "batch"), [("sft", "8 conversations a step"), ("grpo", "16 rollouts a step")])
def test_the_plan_comes_before_weights_are_loaded_and_a_dry_run_ends_with_it_and_writes_nothing(
    place, command, batch, monkeypatch
):
    name = place.recipe("dry", command)
    before = sorted(place.path.rglob("*"))
    monkeypatch.delattr(f"llmrl.recipes.{command}.load_model")
    words = [batch, "1 process", "tiny qwen2, 1 layers of 32", "of the tokens trained", "stop token trained yes"]
    place.run(command, name, "--dry-run", words=[*words, "3 steps"])
    assert [path for path in sorted(place.path.rglob("*")) if "__pycache__" not in path.parts] == before
    with pytest.raises(NameError, match="load_model"):
        place.run(command, name)
    out = place.capture.readouterr().out
    assert [word for word in words if word not in out] == []


def test_every_algorithm_can_be_named():
    assert set(get_args(GRPOConfig.model_fields["algo"].annotation)) == set(PRESETS)


@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize("algo", PRESETS)
def test_every_algorithm_takes_a_step(place, algo, updates):
    place.train("grpo", "a", algo=algo, steps=2, updates_per_step=updates)
    for step in place.steps("a"):
        assert math.isfinite(step["policy/loss"])
        assert step["policy/grad_norm"] > 0


def test_supervised_training_ends_early_when_it_is_good_enough(place):
    stop = {"at_least": 0.0, "rows": 4, "every": 2, "after": 4}
    place.train("sft", "early", steps=9, env={"name": "sums"}, eval=EVAL, stop=stop)
    assert [step["step"] for step in place.steps("early")] == [1, 2, 3, 4]
    assert place.steps("early")[-1]["eval/sums-validation/mean"] >= 0


def test_sample_conversations_show_what_is_trained(place):
    out = place.train("sft", "samples", words=["«"], steps=1).out
    assert "</answer><|im_end|>»" in out.replace("\n", "")


def test_the_divergence_at_another_temperature_is_zero_before_the_first_update_and_not_after(place):
    place.train("grpo", "kl", grpo={"kl": 0.01}, sampling={"max_tokens": 8, "temperature": 0.7})
    first, second, _ = (step["policy/kl_ref"] for step in place.steps("kl"))
    assert first == pytest.approx(0, abs=1e-9)
    assert second > 1e-6


def test_the_metrics_of_a_step_are_those_of_all_its_updates(place):
    options = {"algo": "sapo", "updates_per_step": 4, "steps": 1, "zero_variance": "keep"}
    place.train("grpo", "updates", **options)
    (step,) = place.steps("updates")
    assert step["policy/ratio_mean"] != 1, "of the updates after the first"
    assert step["mismatch/logp_abs_max"] < 1e-4, "engine against trainer while their weights were the same"
    assert step["mismatch/is_mean"] <= step["mismatch/is_max"]


def test_a_run_that_failed_before_its_first_step_is_corrected_under_its_name_or_begun_by_resume(place):
    recipe = place.recipe("mine", "sft", data={"path": "chats.jsonl", "rows": None})
    good, bad = [{"question": "a", "answer": "b"}], [{"question": "a", "answer": "b"}, {"question": "a", "answer": ""}]
    place.rows("chats.jsonl", bad)  # in the second row, which is read once the run has begun
    place.run("sft", recipe, "--name", "one", code=3)
    place.run("resume", "one", code=3, words=["chats.jsonl"])
    place.rows("chats.jsonl", good)
    place.run("resume", "one")
    assert len(place.steps("one")) == 3
    place.rows("chats.jsonl", bad)
    place.run("sft", recipe, "--name", "two", code=3)
    place.rows("chats.jsonl", good)
    place.run("sft", recipe, "--name", "two")
    place.run("sft", recipe, "--name", "two", code=2, words=["exists"])


def test_the_plan_names_settings_that_an_own_algorithm_does_not_read_and_the_page_draws_its_metrics_together(place):
    own = {"algorithm": "tests.support.twins:Twins", "grpo": {"kl": 0.1, "scale": "loo"}}
    place.train("grpo", "own", steps=2, words=["not used    grpo.scale: Twins does without"], **own)
    drawn = {chart["title"]: chart for chart in charts(read_run(place.path / "runs/own"))}
    assert {line["metric"] for line in drawn["Twin"]["lines"]} == {"twin/loss", "twin/grad_norm", "twin/lr"}
    place.rows("other.jsonl", [{"prompt": "Say x", "answers": "1"}])
    env = {"dataset": "other.jsonl", "reward": "vowels:brief"}
    place.module("vowels", "def brief(completion): return -len(completion)")
    words = ["Twins reads the column 'answer'", "Did you mean 'answers'"]
    place.plan("grpo", code=2, words=words, env=env, algorithm="tests.support.twins:Twins")
