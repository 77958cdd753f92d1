"""Training towards a teacher: without a reward, by every estimator; and the teachers and settings that are refused."""

import pytest
from transformers import AutoTokenizer

from llmrl.modules.llm.model_files import loaded
from tests.recipes.conftest import MIX, OWN_ENGINE
from tests.support.saved_models import save_tiny

PROMPTS = {"env": {"name": "chat", "dataset": "prompts.jsonl", "reward": None}, "group_size": 1, "prompts_per_step": 16}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A wider model with seven more rows of embeddings for the same tokens."""
    folder = tmp_path_factory.mktemp("teacher")
    save_tiny(folder, hidden_size=64, heads=2)
    return str(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"divergence": "jsd", "beta": 0.3}, {"estimator": "topk", "k": 5}, {"estimator": "sample"}],
    ids=["full", "jsd", "topk", "sample"],
)
def test_a_student_comes_closer_to_its_teacher_without_a_reward(place, teacher, options):
    changes = {**PROMPTS, "steps": 5, "updates_per_step": 2, "distill": {"teacher": teacher, **options}}
    place.train("distill", "run", words=["no reward is trained on", "KL teacher", f"teacher {teacher}"], **changes)
    rows = place.metrics("run")
    distances = [row["policy/kl_teacher"] for row in rows if "policy/kl_teacher" in row]
    assert len(distances) == 5
    if options.get("estimator") != "sample":  # which is of a few tokens: its mean is in tests/objectives
        assert distances[-1] < 0.9 * distances[0]
    assert all(row["reward/mean"] == 0 and row["group/kept_frac"] == 1 for row in rows if "reward/mean" in row)
    words = ["answers are measured by a reward: the distill run run has none"]
    place.run("eval", "runs/run", "--data", "prompts.jsonl", code=2, words=words)


def test_the_divergence_may_be_added_to_the_loss_by_reward_and_is_resumed(place, teacher):
    given = {"steps": 3, "distill": {"teacher": teacher, "weight_reward": 0.5}, "zero_variance": "refill"}
    words = ["0.5 x the loss by reward", "not used    zero_variance: Distill does without"]
    place.train("distill", "both", words=words, **given)
    place.run("resume", "runs/both", "steps=4")
    rows = [row for row in place.metrics("both") if "policy/kl_teacher" in row]
    assert len(rows) == 4
    assert rows[-1]["reward/std"] > 0


@pytest.mark.parametrize("command", ["grpo", "ppo"])
def test_a_teacher_is_a_term_of_grpo_and_of_ppo(place, teacher, command):
    """By its name alone, or as a section; it is named in the plan, and measured."""
    words = ["1 x KL(student, teacher) over the whole vocabulary", f"teacher {teacher}", "KL teacher"]
    place.train(command, "run", words=words, grpo={"teacher": teacher})
    rows = [row for row in place.metrics("run") if "policy/kl_teacher" in row]
    assert len(rows) == (3 if command == "grpo" else 2)  # a critic begins alone
    assert rows[-1]["reward/std"] > 0
    given = [f"grpo.teacher.model={teacher}", "grpo.teacher.weight=0.1", "grpo.teacher.estimator=topk"]
    place.train(command, "topk", *given, words=["0.1 x KL(student, teacher) over its 64 likeliest"], steps=2)
    assert all(row["policy/kl_teacher"] > 0 for row in place.metrics("topk") if "policy/kl_teacher" in row)


@pytest.mark.parametrize("estimator", ["full", "sample"])
def test_the_student_without_its_adapters_is_the_teacher_that_its_files_are(place, estimator):
    """Also of a head that is trained, of which a teacher of the whole vocabulary has the original."""
    save_tiny("start", tied=False)
    given = {"model": "start", "lora": {"r": 4, "modules_to_save": ["lm_head"]}, "optim": {"lr": 5e-2}}
    for name, teacher in (("base", "base"), ("files", "./start")):
        place.train("grpo", name, grpo={"teacher": {"model": teacher, "estimator": estimator}}, **given)
    distances = [row["policy/kl_teacher"] for row in place.metrics("base") if "policy/kl_teacher" in row]
    assert abs(distances[0]) < 1e-6 < 1e-3 < abs(distances[-1])
    place.same("base", "files", tolerance=1e-5, step=3)


@pytest.mark.slow
def test_the_student_with_a_demonstration_teaches_the_student_without(place):
    """Also of several turns and sources, ahead of the trainer, and in a resumed run; beside a reward as well."""
    own = {"teacher": "self", "demonstration": "answer"}
    words = ["teacher self, which reads answer in its prompt"]
    sources = {"dataset": None, "reward": None, "mix": [{**source, "eval_dataset": None} for source in MIX["mix"]]}
    place.module("own_engine", OWN_ENGINE)
    ahead = {"engine": "own_engine:make", "max_staleness": 2}
    given = {"env": sources, "rollout": ahead, "checkpoint": {"every": 2}}
    place.train("distill", "run", words=words, distill=own, **given)
    place.run("resume", "runs/run", "steps=5")
    distances = [row["policy/kl_teacher"] for row in place.metrics("run") if "policy/kl_teacher" in row]
    assert len(distances) == 5
    assert min(distances) > 0
    own = {
        "model": "self",
        "demonstration": "answer",
        "estimator": "topk",
        "k": 5,
        "demonstration_text": " {demonstration}",
    }
    place.train("grpo", "both", words=words, grpo={"teacher": own})


@pytest.mark.parametrize(
    ("command", "changes", "words"),
    [
        ("grpo", {"grpo": {"teacher": {"model": "other"}}}, "grpo.teacher: other must have the student's vocabulary"),
        ("grpo", {"grpo": {"teacher": "http://localhost:1"}}, "estimator full needs the teacher's logits"),
        ("grpo", {"grpo": {"teacher": {"weight": 2.0}}}, "grpo.teacher.model  must be given"),
        (
            "grpo",
            {"grpo": {"teacher": {"model": "other", "estimator": "sample", "temperature": 0.5}}},
            "grpo.teacher.temperature: estimator sample needs that of sampling, 1.0: got 0.5",
        ),
        (
            "grpo",
            {"grpo": {"teacher": "other", "observation": 0.1}, "env": {"tools": ["calculator"], "max_turns": 2}},
            "grpo.observation is for grpo.teacher.estimator",
        ),
        ("grpo", {"grpo": {"teacher": "base"}}, "grpo.teacher.model: base is the student without its adapters, and it"),
        ("grpo", {"grpo": {"teacher": "other"}, "parallel": {"context": 2}}, "grpo.teacher: must run with parallel"),
        ("rejection", {"grpo": {"teacher": "other"}}, "grpo.teacher: the loss must be GRPOLoss or a subclass"),
        ("distill", {"grpo": {"teacher": "other"}, "distill": {"teacher": "other"}}, "grpo.teacher: llmrl distill has"),
    ],
)
def test_a_term_that_cannot_be_trained_is_refused_before_weights_are_read(place, teacher, command, changes, words):
    tokenizer = loaded(AutoTokenizer.from_pretrained, teacher)
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained("other")
    place.plan(command, code=2, words=[words], **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"estimator": "sample", "divergence": "forward"},
            "estimator sample estimates divergence reverse: got forward",
        ),
        ({"beta": 0.5}, "beta is for divergence jsd: got reverse"),
        ({"k": 5}, "k is for estimator topk: got full"),
        ({"teacher": "http://localhost:1"}, "estimator full needs the teacher's logits, which a server does not give"),
        ({"estimator": "sample", "temperature": 0.5}, "needs that of sampling, 1.0: got 0.5"),
        (
            {"teacher": "http://localhost:1", "estimator": "topk", "temperature": 2.0},
            "scores at temperature 1: got 2.0",
        ),
        ({"weight_reward": 1.0}, "compares the rewards of a group: set group_size to at least 2"),
        ({"teacher": ""}, "must name the teacher: got none"),
        ({"teacher": "self"}, "self is the student as it is, which teaches nothing without a demonstration"),
        ({"demonstration": "answer", "demonstration_text": "x"}, "demonstration_text must have {demonstration} in it"),
        ({"demonstration_text": "{demonstration}"}, "demonstration_text needs demonstration"),
        (
            {"teacher": "http://localhost:1", "estimator": "sample", "demonstration": "answer"},
            "demonstration is for a teacher beside the student",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(place, teacher, changes, words):
    place.plan("distill", code=2, words=[words], **PROMPTS, distill={"teacher": teacher, **changes})


def test_answers_without_a_reward_are_not_measured(place, teacher):
    source = {"dataset": "prompts.jsonl", "eval_dataset": "prompts.jsonl"}
    sources = [source | {"name": "sums"}, source]
    given = {"group_size": 1, "distill": {"teacher": teacher}}
    mixed = place.plan("distill", env={"dataset": None, "reward": None, "mix": sources}, **given)
    assert mixed.out.count("12 problems measured") == 2, "in all, and of the source that has a reward"
    words = ["eval.dataset: answers are measured by a reward: got none"]
    place.plan("distill", "eval.dataset=prompts.jsonl", code=2, words=words, env={"reward": None}, **given)


def test_a_teacher_with_other_tokens_or_another_end_is_refused_by_name_before_weights_are_read(place, teacher):
    plan = {**PROMPTS, "code": 2, "distill": {"teacher": "other"}}
    save_tiny("other")
    (place.path / "other" / "model.safetensors").unlink()
    tokenizer = loaded(AutoTokenizer.from_pretrained, teacher)
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained("other")
    place.plan(
        "distill", words=["other must have the student's vocabulary", "1 have another id, such as '<new>'"], **plan
    )
    tokenizer = loaded(AutoTokenizer.from_pretrained, teacher)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(7)
    tokenizer.save_pretrained("other")
    place.plan("distill", words=["other must have the student's eos_token: got"], **plan)
