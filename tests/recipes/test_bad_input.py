"""Mistakes in settings and data: each is one clear message and an exit code, before anything is trained."""

import math
import re
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmrl.errors import ConfigError
from llmrl.objectives.llm import SFTLoss
from llmrl.run.config import find_recipe, load_config
from llmrl.testing import tiny_model, tiny_tokenizer
from llmrl.train.data.sft import tokenize_chats
from llmrl.train.settings import GRPOConfig, SFTConfig
from llmrl.train.settings.preferences import DPOConfig, RewardConfig
from llmrl.train.settings.unused import _NEEDS
from tests.recipes.conftest import MIX

GOOD = {"prompt": "2 + 2?", "completion": "four"}
LONG = {"prompt": "2 + 2?", "completion": "four " * 50}
ASKED = {"prompt": "2 + 2? " * 40, "completion": "four"}
AT_MOST_40 = {"max_length": 40}
ASK, TELL = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "four"}
SUMS = {"name": "sums"}


# --- settings: exit code 2, before torch is imported


@pytest.mark.parametrize(
    ("command", "changes", "override", "messages"),
    [
        ("sft", {"batchsize": 8}, "steps=3", ["bad.yaml:2", "batchsize", "batch_size"]),
        ("grpo", {}, "sampling.temprature=0.5", ["sampling.temprature", "sampling.temperature"]),
        ("grpo", {"group_size": 1}, "steps=3", ["a group of 1", "at least 2"]),
        ("grpo", {"env": {"tools": ["calculater"], "max_turns": 2}}, "steps=3", ["Did you mean 'calculator'?"]),
    ],
)
def test_a_mistake_in_the_settings_is_explained_before_torch_is_imported(place, command, changes, override, messages):
    name = place.recipe("bad", command, **changes)
    code = (
        "import sys; from llmrl.commands.cli import main; code = main(sys.argv[1:]);"
        "assert 'torch' not in sys.modules, 'torch was imported'; sys.exit(code)"
    )
    arguments = [sys.executable, "-c", code, command, name, override]
    done = subprocess.run(arguments, capture_output=True, text=True, cwd=place.path, check=False)
    assert done.returncode == 2, done.stderr
    assert all(message in done.stderr for message in messages), done.stderr
    assert not (place.path / "runs").exists()


@pytest.mark.parametrize(
    ("command", "changes", "messages"),
    [
        ("grpo", {"updates_per_step": 3}, ["updates_per_step 3 must divide prompts_per_step 4"]),
        ("grpo", {"min_group_size": 5}, ["min_group_size 5 is more than group_size 4"]),
        ("grpo", {"env": {"reward": None}}, ["env chat needs reward"]),
        ("grpo", {"env": {"reward": None, "dataset": None}}, ["env chat needs dataset and reward"]),
        ("grpo", {"group_size": "many"}, ["group_size"]),
        *(
            ("grpo", {"env": {**MIX, **env}, **changes}, [message])
            for env, changes, message in (
                ({"mix": [SUMS]}, {}, "at least two sources: got 1"),
                ({"mix": [SUMS, {**SUMS, "dataset": "units.jsonl"}]}, {}, "sums is there twice; set source"),
                ({"mix": [{**SUMS, "weight": 0}, *MIX["mix"]]}, {}, "env.mix.0.weight  should be greater than 0"),
                ({"mix": [{**SUMS, "weight": -1}, *MIX["mix"]]}, {}, "env.mix.0.weight  should be greater than 0"),
                ({"mix": [{**SUMS, "agent": "agent.py"}, *MIX["mix"]]}, {}, "a source cannot be an agent"),
                ({"mix": [{**SUMS, "retries": 1}, *MIX["mix"]]}, {}, "set retries beside mix"),
                (
                    {"mix": [{**SUMS, "tool_timeout_s": 3}, *MIX["mix"]]},
                    {},
                    "env.mix.0.tool_timeout_s  needs",
                ),
                ({"reward": "vowels:share"}, {}, "reward beside mix would have no effect"),
                ({"max_turns": 3}, {}, "is the most of its sources, 2: got 3"),
                ({}, {"grpo": {"scale": "batch"}}, "not comparable: got grpo.scale batch"),
                ({}, {"algo": "reinforce++"}, "algo reinforce++, which whitens"),
                ({}, {"eval": {"dataset": "prompts.jsonl"}}, "set eval_dataset in those of env.mix"),
            )
        ),
        ("ppo", {"env": MIX}, ["not comparable: got ppo"]),
        ("sft", {"env": {"mix": [SUMS, {"name": "big_sums"}]}}, ["env.mix is for recipes that sample"]),
        ("grpo", {"optim": {"lr": -1.0}}, ["optim.lr"]),
        ("grpo", {"max_failed": 1.5}, ["max_failed"]),
        ("ppo", {"ppo": {"critic_warmup": 3}}, ["ppo.critic_warmup must leave steps", "got 3 of 3"]),
        ("ppo", {"parallel": {"context": 2}}, ["a critic reads whole sequences"]),
        ("sft", {"stop": {"at_least": 0.5}}, ["stop needs env"]),
        ("rejection", {"algorithm": "my_file:Mine"}, ["llmrl rejection has one already"]),
        ("sft", {"eval": {"every": 2}}, ["bad.yaml:", "eval.every", "eval.dataset=FILE", "has no effect: got 2"]),
        ("dpo", {"eval": {"dataset": "held.jsonl", "every": -1}}, ["eval.every"]),
        *(
            ("grpo", {section: {name: value}}, [f"{section}.{name}"])
            for section, name, values in (
                ("optim", "lr", (math.inf, math.nan, 1e300)),
                ("optim", "weight_decay", (math.inf,)),
                ("optim", "betas", ([5, -1], [math.nan, 0.9])),
                ("sampling", "max_tokens", (10**29,)),
                ("sampling", "temperature", (math.inf,)),
                ("parallel", "timeout_s", (math.inf, 1e18)),
                ("env", "reward_deadline_s", (math.inf,)),
                ("grpo", "kl", (math.inf,)),
                ("grpo", "entropy", (1e30,)),
                ("grpo", "correction_band", ([0.5, math.inf],)),
            )
            for value in values
        ),
        ("grpo", {"env": {"reward": "exits:score"}}, ["importing 'exits' failed: SystemExit: 5"]),
        ("grpo", {"env": {"reward": "leaves:score"}}, ["importing 'leaves' failed: GeneratorExit"]),
        ("grpo", {"env": {"reward": "raises:score"}}, ["reading 'score' of 'raises' failed: RuntimeError: mine"]),
        ("grpo", {"env": {"reward": "nowhere:score"}}, ["nowhere"]),
        ("grpo", {"env": {"reward": "vowels:shares"}}, ["Did you mean 'share'?"]),
        ("grpo", {"env": {"reward": "vowels"}}, ["must be 'package.module:name'"]),
        ("sft", {"optim": {"muon": {"lr": 0.1}}}, ["optim.muon is for optim.name muon: got adamw"]),
        ("dpo", {"dpo": {"kind": "ipo", "label_smoothing": 0.1}}, ["label_smoothing is for kind sigmoid"]),
        ("grpo", {"beta": 0.1}, ["did you mean  grpo.kl"]),
        ("dpo", {"dpo": {"kind": "kto", "reference": "none"}}, ["kto compares whole answers with a reference"]),
        ("reward", {"data": {"label_column": "good"}}, ["data.label_column are for dpo.kind kto"]),
        ("dpo", {"dpo": {"desirable_weight": 2}}, ["desirable_weight and undesirable_weight are for kind kto"]),
        ("dpo", {"dpo": {"bta": 0.1}}, ["did you mean  dpo.beta"]),
        ("grpo", {"env": {"mix": [{"name": "sums", "wieght": 2}]}}, ["did you mean  env.mix.0.weight  (prompts per"]),
        ("grpo", {"env": {"mix": [{"name": "sums", "zzzzzz": 2}]}}, ["known here    env.mix.0.name, env.mix.0.opt"]),
        ("grpo", {"env": {"mix": [{"weight": 0}]}}, ["env.mix.0.weight", "it means      env.mix.*.weight"]),
        *(
            ("grpo", {"eval": {"sets": {"easy": own}, **beside}}, words)
            for own, beside, words in (
                ({"datset": "a.jsonl"}, {}, ["eval.sets.easy must name a dataset"]),
                ({"dataset": "a.jsonl", "tols": []}, {}, ["did you mean  eval.sets.easy.tools"]),
                ({"name": "sum"}, {}, ["eval.sets.easy.name", "Did you mean 'sums'"]),
                ({"name": "sums", "weight": 2}, {}, ["eval.sets.easy: a set of problems cannot have weight"]),
                ({"name": "sums", "agent": "mine:run"}, {}, ["cannot have agent"]),
                ({"name": "sums", "source": "other"}, {}, ["cannot have source"]),
                ({"name": "sums", "retries": 9}, {}, ["eval.sets: retries must be the same for all sets"]),
                ({"name": "sums", "tool_format": "hermes"}, {}, ["eval.sets.easy.tool_format  needs env.tools"]),
                ({"name": "sums"}, {"dataset": "a.jsonl"}, ["leave out eval.dataset and eval.split"]),
            )
        ),
        ("grpo", {"eval": {"sets": {"a/b": {"name": "sums"}}}}, ["a name must consist of letters"]),
        ("sft", {"eval": {"sets": {"easy": {"name": "sums"}}}}, ["eval.sets are problems of an environment: set env"]),
        *(
            ("grpo", {"curriculum": curriculum}, words)
            for curriculum, words in (
                ({"windw": 2}, ["did you mean  curriculum.window"]),
                ({"pools": {"easy": {"abve": 1}}}, ["did you mean  curriculum.pools.easy.above"]),
                ({"pools": {"easy": {"above": 1}}}, ["one pool must have neither above nor below, for the rest"]),
                ({"pools": {"a": {}, "b": {}}}, ["for the rest: got a and b"]),
                ({"pools": {"unseen": {}}}, ["named by a word other than unseen"]),
                ({"pools": {"a": {"above": 2, "below": 1}, "b": {}}}, ["pools.a: above must be less than below"]),
                ({"pools": {"a": {"weight": 0}}}, ["curriculum.pools.a.weight", "should be greater than or equal to"]),
            )
        ),
        ("grpo", {"env": MIX, "eval": {"sets": {"easy": {"name": "sums"}}}}, ["leave out their eval_dataset"]),
        ("reward", {"env": {"name": "sums"}}, ["env is for models that generate"]),
        ("reward", {"packing": "on"}, ["packing is for models that generate"]),
        ("reward", {"parallel": {"mode": "fsdp2", "context": 2}}, ["parallel.context is for models that generate"]),
        ("reward", {"model_options": {"float32_head": True}}, ["float32_head is for models that generate"]),
        ("reward", {"reward": {"first_share": 0.5}}, ["first_share is for level token"]),
    ],
)
def test_settings_that_cannot_be_run_are_refused(place, command, changes, messages):
    (place.path / "exits.py").write_text("import sys; sys.exit(5)")
    (place.path / "leaves.py").write_text("raise GeneratorExit")
    (place.path / "raises.py").write_text("def __getattr__(name):\n    raise RuntimeError('mine')\n")
    place.train(command, "bad", code=2, words=messages, **changes)
    assert not (place.path / "runs").exists()


RECIPES = {
    "sft": (SFTConfig, "data.path=rows.jsonl"),
    "dpo": (DPOConfig, "data.path=rows.jsonl"),
    "reward": (RewardConfig, "data.path=rows.jsonl"),
    "grpo": (GRPOConfig, "env.name=sums"),
}
WITHOUT_EFFECT = [  # recipe, a setting without effect, and what gives it one
    ("sft", "eval.every=3", "eval.dataset=held.jsonl"),
    ("dpo", "eval.rows=3", "env.name=sums"),
    ("reward", "eval.rows=3", "data.path=org/pairs"),
    ("sft", "eval.split=dev", "eval.dataset=org/held"),
    ("sft", "eval.split=dev", "env.name=sums"),
    ("dpo", "eval.batch_size=3", "env.name=sums"),
    ("sft", "eval.max_tokens=9", "env.name=sums"),
    (
        "grpo",
        "env={name: chat, dataset: rows.jsonl, reward: 'vowels:share'} eval.max_tokens=9",
        "eval.dataset=held.jsonl",
    ),
    ("sft", "eval.dataset=held.jsonl env.name=sums stop.at_least=1 stop.split=dev", "eval.dataset=org/held"),
    ("dpo", "data.split=dev", "data.path=org/pairs"),
    ("sft", "data.name=main", "data.path=org/pairs"),
    ("dpo", "data.margin_column=margin", None),
    ("sft", "env.name=sums env.split=dev", None),
    ("grpo", "env.dataset=rows.jsonl env.split=dev", "env.dataset=org/rows"),
    ("grpo", "env.config=main", "env.name=gsm8k"),
    ("sft", "env.name=sums env.max_prompt_tokens=9", None),
    ("sft", "env.name=sums env.too_long=drop", None),
    ("sft", "env.name=sums env.max_conversation_tokens=9", None),
    ("grpo", "env.on_rewrite=new_record", "env.max_turns=2"),
    ("grpo", "env.tool_format=hermes", "env.tools=[calculator] env.max_turns=2"),
    ("grpo", "env.tool_timeout_s=3", "env.tools=[calculator] env.max_turns=2"),
    ("grpo", "env.declare_tools=true", "env.tools=[calculator] env.max_turns=2"),
    ("grpo", "env.name=gsm8k env.reward_deadline_s=3", "env.reward=vowels:share"),
    ("grpo", "refill_rounds=9", "zero_variance=refill"),
    ("grpo", "zero_variance=keep min_spread=0.1", "zero_variance=drop"),
    ("grpo", "grpo.scale=raw zero_variance=keep", "grpo.scale=group"),
    ("grpo", "grpo.kl_estimator=k2", "grpo.kl=0.1"),
    ("grpo", "grpo.observation=0.1", "env.max_turns=2"),
    ("grpo", "grpo.surrogate=reinforce grpo.clip=[0.1,0.1]", "grpo.surrogate=cispo"),
    ("grpo", "rollout.probe_factor=9", "rollout.engine=vllm"),
]


@pytest.mark.parametrize(("recipe", "given", "needed"), WITHOUT_EFFECT)
def test_a_setting_without_effect_is_refused_and_taken_beside_what_it_needs(place, recipe, given, needed):
    """Regression: eval.rows and the like were taken and not read."""
    config, base = RECIPES[recipe]
    overrides = ["model=tiny", base, *re.split(r" (?=[a-z_.]+=)", given)]
    name = overrides[-1].partition("=")[0]
    with pytest.raises(ConfigError, match=rf"^command line  {re.escape(name)}  needs .*; it has no effect: got .*$"):
        load_config(config, None, overrides)
    if needed:
        load_config(config, None, [*overrides, *re.split(r" (?=[a-z_.]+=)", needed)])


def test_a_packaged_recipe_is_judged_by_what_is_set_beside_it(place):
    """Its evaluation of problems has no effect on rows of the user's own; what the user sets has one, or is refused."""
    rows = ["env={name: chat, dataset: prompts.jsonl, reward: 'vowels:share'}", "model=tiny"]
    assert load_config(GRPOConfig, find_recipe("gsm8k_grpo"), rows).config.eval.rows == 500
    for setting in ("eval.every=3", "eval={every: 3}"):
        with pytest.raises(ConfigError, match=r"eval\.every  needs rows that are not trained on"):
            load_config(GRPOConfig, find_recipe("gsm8k_grpo"), [*rows, setting])


def test_all_settings_that_need_others_have_an_example():
    assert {given.split()[-1].partition("=")[0] for _, given, _ in WITHOUT_EFFECT} == {*_NEEDS}


OFFLOAD = ("memory.offload=parameters",)
ENABLE_LORA = ("rollout.engine=vllm", "rollout.options={enable_lora: true}")


@pytest.mark.parametrize(
    ("command", "overrides", "words"),
    [
        ("sft", OFFLOAD, ["memory.offload=parameters needs parallel.mode=fsdp2"]),
        ("sft", (*OFFLOAD, "parallel.mode=fsdp2", "optim.name=adamw_8bit"), ["got fsdp2 and adamw_8bit"]),
        ("sft", (*OFFLOAD, "parallel.mode=fsdp2"), ["memory.offload=parameters needs several processes"]),
        ("sft", ("optim.name=adamw_8bit", "parallel.mode=fsdp2"), ["adamw_8bit cannot be used with parallel.mode"]),
        ("sft", ("parallel.context=3",), ["2 attention heads and 1 key/value heads cannot be shared by 3 ranks"]),
        ("sft", ("parallel.context=2", "packing=on"), ["use packing=auto"]),
        ("sft", ("parallel.context=2", "memory.compile=true"), ["use memory.compile=false"]),
        ("sft", ("parallel.context=2", "--gpu", "H100:7"), ["parallel.context must divide the 7 processes: got 2"]),
        ("sft", ("parallel.context=2", "--gpu", "H100"), ["parallel.context must divide the 1 processes: got 2"]),
        ("sft", ("--gpu", "1:8"), ["must fit on 8 x 1 GB"]),
        ("sft", ("model_options.router_aux_loss=0.1",), ["router_aux_loss must be 0 or null", "Qwen2ForCausalLM"]),
        ("grpo", ("rollout.routing_replay=on",), ["it is not a mixture of experts"]),
        ("grpo", ("lora.dropout=0.1",), ["lora.dropout: must be 0 for grpo"]),
        ("grpo", ENABLE_LORA, ["enable_lora cannot be used without lora"]),
        ("grpo", (*ENABLE_LORA, "lora.quantize=nf4"), ["enable_lora cannot be used with lora.quantize"]),
        ("grpo", ("rollout.engine=vllm", "rollout.options={max_model_len: 9}"), ["use rollout.max_model_len"]),
    ],
)
def test_settings_that_exclude_each_other_are_errors_of_the_plan(place, command, overrides, words):
    place.plan(command, *overrides, code=2, words=words)


def test_a_critic_must_have_the_tokenizer_of_the_policy(place):
    tokenizer = tiny_tokenizer()
    place.plan("ppo", f"ppo.critic={save_critic(tokenizer)}", words=["critic: critic, lr 0.01"])
    tokenizer.add_tokens(["<more>"])
    words = ["ppo.critic: must have the policy's tokenizer: got critic", "'<more>'"]
    place.plan("ppo", f"ppo.critic={save_critic(tokenizer)}", code=2, words=words)


def save_critic(tokenizer):
    tiny_model(tokenizer).save_pretrained("critic")
    tokenizer.save_pretrained("critic")
    return "critic"


def test_a_reward_must_find_its_columns_in_the_dataset(place):
    place.module("needy", "def score(completion, difficulty):\n    return 1.0\n")
    place.train("grpo", "b", code=2, words=["'difficulty' must be a column"], env={"reward": "needy:score"})


def test_a_run_to_resume_must_exist_and_one_without_a_checkpoint_begins(place):
    place.run("resume", "nowhere", code=2)
    place.train("sft", "empty", code=3, data={"path": place.rows("empty.jsonl", [])})
    place.run("resume", "empty", code=3, words=["empty.jsonl"])


# --- data, models, templates: exit code 3

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
UNJUDGED = {"reward": None, "rewards": [{"reward_model": {"model": "./no-model-here"}}]}
CHAT = {"name": "chat", "dataset": "prompts.jsonl", "reward": "vowels:share"}


@pytest.mark.parametrize(
    ("command", "changes", "messages"),
    [
        ("sft", {"data": {"path": "gone.jsonl"}}, ["gone.jsonl", "does not"]),
        ("grpo", {"env": {"dataset": "gone.parquet"}}, ["gone.parquet"]),
        ("sft", {"data": {"path": "odd.jsonl"}}, ["odd.jsonl:1 must have a prompt column", "Did you mean 'prompt'?"]),
        (
            "grpo",
            {"env": {"dataset": "odd.jsonl", "prompt_column": "question"}},
            ["'question' is missing in odd.jsonl:1"],
        ),
        ("sft", {"data": {"path": "empty.jsonl"}}, ["at least one row: empty.jsonl"]),
        ("grpo", {"env": {"dataset": "empty.jsonl"}}, ["at least one row: empty.jsonl"]),
        ("sft", {"data": {"path": "broken.jsonl"}}, ["broken.jsonl, line 2 must be JSON"]),
        ("sft", {"data": {"path": "chats.jsonl"}}, ["an assistant turn: chats.jsonl:2 has only user"]),
        ("sft", {"model": "./no-model-here"}, ["./no-model-here: must be the folder of a model"]),
        ("grpo", {"env": UNJUDGED}, ["reward_model.model ./no-model-here: must be the folder"]),
        ("sft", {"model": "latest:sums_sft"}, ["a run of sums_sft", "in runs/"]),
        (
            "sft",
            {"data": {"path": "long.jsonl"}, **AT_MOST_40},
            ["max_length = 40", "long.jsonl:2: ", "too_long=truncate"],
        ),
        ("sft", {"data": {"path": "asked.jsonl"}, **AT_MOST_40, "too_long": "truncate"}, ["no token is left to train"]),
        ("grpo", {"env": {"max_prompt_tokens": 2, "too_long": "drop"}}, ["all 12", "env.max_prompt_tokens = 2"]),
        (
            "grpo",
            {"env": {**MIX, "max_prompt_tokens": 60, "too_long": "drop"}},
            ["source big_sums: ", "all 12 are longer"],
        ),
        (
            "grpo",
            {"env": {**MIX, "mix": [SUMS, {**SUMS, "source": "own", "dataset": "sourced.jsonl"}]}},
            ["'env_source'"],
        ),
        ("sft", {"env": CHAT, "stop": {"at_least": 0.5}}, ["env chat", "in eval.dataset"]),
        ("dpo", {"data": {"path": "same.jsonl"}}, ["same.jsonl:1"]),
        *(
            (command, {"eval": {"dataset": f"{name}.jsonl"}}, words)
            for command in ("sft", "dpo", "reward")
            for name, words in {
                "gone": ["gone.jsonl", "does not"],
                "odd": ["odd.jsonl:1"],
                "empty": ["at least one row: empty.jsonl"],
            }.items()
        ),
        ("reward", {"eval": {"split": "train"}}, ["eval.split must be pairs that are not"]),
        (
            "reward",
            {"data": {"path": "pairs.jsonl", "margin_column": "gap"}, "eval": {"dataset": "pairs.jsonl"}},
            ["'gap' must be a number: pairs.jsonl:1 has None"],
        ),
        ("sft", {"chat_template": "qwem"}, ["Did you mean 'qwen'?"]),
        ("sft", {"chat_template": SILENT}, ["assistant"]),
        ("sft", {"chat_template": UNMARKED}, ["assistant"]),
        ("grpo", {"chat_template": FORGETFUL, "env": {"max_turns": 2}}, ["max_turns=1", "env.on_rewrite=new_record"]),
    ],
)
def test_what_cannot_be_trained_on_is_named(place, command, changes, messages):
    place.rows("sourced.jsonl", [{"prompt": "2 + 2?", "answer": "4", "env_source": "web"}])
    place.rows("odd.jsonl", [{"promt": "2 + 2?", "completion": "four"}])
    place.rows("empty.jsonl", [])
    (place.path / "broken.jsonl").write_text('{"prompt": "a", "completion": "b"}\n{"prompt": \n')
    place.rows("chats.jsonl", [{"messages": [ASK, TELL]}, {"messages": [ASK]}])
    place.rows("long.jsonl", [GOOD, LONG, GOOD])
    place.rows("asked.jsonl", [ASKED])
    place.rows("same.jsonl", [{"prompt": "2 + 2?", "chosen": "four", "rejected": "four"}])
    place.rows("pairs.jsonl", [{"prompt": "2 + 2?", "chosen": "four", "rejected": "five"}])
    assert "Traceback" not in place.train(command, "bad", code=3, words=messages, **changes).err


def test_a_template_that_forgets_is_fine_for_one_turn(place):
    place.train("grpo", "b", words=["prefix-preserving NO"], chat_template=FORGETFUL, steps=1)


# --- too long


def chats(place, rows=(GOOD, LONG, GOOD), **settings):
    place.rows("chats.jsonl", rows)
    return tokenize_chats(SFTConfig(model={}, data={"path": "chats.jsonl"}, **settings), tiny_tokenizer())


def test_a_conversation_longer_than_the_limit_can_lose_its_end(place):
    whole, cut = chats(place), chats(place, max_length=40, too_long="truncate")
    assert [len(ids) for ids in cut.ids] == [len(whole.ids[0]), 40, len(whole.ids[2])]
    assert cut.ids[1].tolist() == whole.ids[1][:40].tolist()
    assert cut.masks[1].tolist() == whole.masks[1][:40].tolist()
    assert cut.num_too_long == 1


def test_a_conversation_longer_than_the_limit_can_be_split_without_losing_a_trained_token(place):
    whole, split = chats(place), chats(place, max_length=40, too_long="split")
    assert len(split) > 3
    assert max(map(len, split.ids)) == 40
    pieces = list(zip(split.ids, split.masks, strict=True))[1:-1]
    trained = [token for ids, mask in pieces for token in ids[mask].tolist()]
    assert trained == whole.ids[1][whole.masks[1]].tolist()
    assert split.num_too_long == 1
    counts = [SFTLoss(torch.nn.Identity()).count_step(data.as_rows()).tokens for data in (whole, split)]
    assert counts[0] == counts[1] == sum(int(mask.sum()) for mask in whole.masks)


def test_pieces_without_a_trained_token_are_dropped(place):
    cut = chats(place, [ASKED, GOOD], max_length=40, too_long="truncate")
    assert (len(cut), cut.num_too_long) == (1, 1)


def test_the_number_of_cut_conversations_is_part_of_the_plan(place):
    place.rows("chats.jsonl", [GOOD, LONG, GOOD] * 4)
    changes = {"data": {"path": "chats.jsonl"}, "max_length": 40, "too_long": "truncate"}
    place.plan("sft", words=["4 longer than 40 tokens, truncate"], **changes)


def test_a_prompt_longer_than_the_limit_is_an_error_or_dropped(place):
    rows = [{"prompt": f"Say {'many words ' * (30 * (i == 2))} {i}", "answer": ""} for i in range(6)]
    env = {"dataset": place.rows("mixed.jsonl", rows), "max_prompt_tokens": 30}
    place.train("grpo", "a", code=3, words=["max_prompt_tokens = 30", ":3 has", "env.too_long=drop"], env=env)
    place.train("grpo", "dropped", words=["5 prompts · 1 longer than 30 tokens"], env=env | {"too_long": "drop"})
    prompts = {rollout.prompt for step in (1, 2, 3) for rollout in place.rollouts("dropped", step)}
    assert len(prompts) == 5


def test_a_model_whose_files_lack_a_weight_is_refused(place):
    folder, name = place.path / "lacking", "model.layers.0.mlp.up_proj.weight"
    tokenizer = tiny_tokenizer()
    tiny_model(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    del weights[name]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    place.train("sft", "lacking", code=3, words=["in none of its files", name], model=str(folder))
