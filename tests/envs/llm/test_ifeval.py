"""IFEval: strict and loose evaluation, the reward, and the environment around them."""

import json
import sys

import pytest
import torch
from tensordict import TensorDict

from llmrl.data.ragged.tensordicts import column
from llmrl.envs.llm import ChatEnv, IFEvalEnv, IFEvalScoreData, IfEvalScorer
from llmrl.envs.llm.ifeval import Instructions, evaluate
from llmrl.errors import ConfigError, DataError, MissingDependencyError, MissingKeyError
from llmrl.modules.llm.engines import StopReason
from tests.support.refusals import refusals

NO_COMMA, QUOTED = "punctuation:no_comma", "startend:quotation"


def told(**instructions):
    return Instructions.of([name.replace("__", ":") for name in instructions], list(instructions.values()), "row 1")


LOOSELY = ['Sure:\n"a"', '"a"\nBye.', 'Sure:\n"a"\nBye.', '*"a"*', '*Sure:*\n**"a"**', '**"a"**\nBye.']
LOOSELY += ['Sure:\n**"a"**\nBye.']
NOT_AT_ALL = ['Sure:\nhere:\n"a"', "a", "", " \n"]


@pytest.mark.parametrize(
    ("response", "verdict"),
    [
        ('"a"', (True, True)),
        *((text, (False, True)) for text in LOOSELY),
        *((text, (False, False)) for text in NOT_AT_ALL),
    ],
)
def test_loose_evaluation_forgives_first_line_last_line_and_asterisks(response, verdict):
    found = evaluate(response, told(startend__quotation={}))
    assert (*found.strict, *found.loose) == verdict


def test_an_empty_response_follows_nothing_even_if_it_breaks_nothing():
    assert evaluate("", told(punctuation__no_comma={})).strict == [False]
    assert evaluate("*", told(punctuation__no_comma={})).strict == [True]


def test_the_reward_of_a_batch_of_scores_has_its_shape():
    scores = torch.stack([IFEvalScoreData.of([True, False], [True, True]), IFEvalScoreData.of([True], [True])])
    scorer = IfEvalScorer()
    assert scorer.default_reward_aggregator(scores[0], ["t"], ["a"]).shape == ()
    assert scorer.default_reward_aggregator(scores).tolist() == pytest.approx([0.3 * 0.5 + 0.2 + 0.1, 1.0])
    rewards = scorer.default_reward_aggregator(scores.unsqueeze(-1), ["t"], ["a"])
    assert (rewards.shape, rewards.dtype) == ((2, 1), torch.float32)
    assert rewards[1].item() == pytest.approx(1.15)


def step(answered, responses, instructions=(NO_COMMA,), **options):
    count = len(responses)
    env = ChatEnv(batch_size=[count]).append_transform(IfEvalScorer(**options))
    columns = {"instruction_id_list": [list(instructions)] * count, "kwargs": [[{} for _ in instructions]] * count}
    return answered(env, responses, **columns)["next"]


def test_a_perfect_response_gets_1_15_and_an_empty_one_0(answered):
    perfect = "<think>no commas</think><answer>fine</answer>"
    after = step(answered, [perfect, "", "<think>x", "<answer>a, b</answer>", "fine", "a, b"])
    assert after["reward"].flatten().tolist() == pytest.approx([1.15, 0.0, 0.05, 0.1, 1.0, 0.0])
    assert after["reward"].shape == (6, 1, 1)
    assert after["terminated"].flatten().tolist() == [True, False, False, True, False, False]
    assert after["ifeval_score"].prompt_level_strict_acc.shape == (6, 1)


@pytest.mark.parametrize(("weights", "reward"), [({}, 0.55), ({"format_weights": [0, 1, 0, 0]}, 0.6)])
def test_the_reward_is_the_weighted_sum_of_the_four_numbers_and_the_blocks(answered, weights, reward):
    # strict: one of two; loose (first line left out): both. 0.4*0 + 0.3*0.5 + 0.2*1 + 0.1*1 + 0.1 for the answer block
    after = step(answered, ['<answer>Sure:\n"a"</answer>'], [NO_COMMA, QUOTED], **weights)
    assert after["reward"].item() == pytest.approx(reward)


def test_the_structured_aggregation_counts_blocks_and_being_complete(answered):
    perfect = "<think>no commas</think><answer>fine</answer>"
    after = step(answered, [perfect, "", "<answer>a, b</answer>"], aggregate_reward="structured")
    assert after["reward"].flatten().tolist() == pytest.approx([2.2, 0.2, 0.7])
    scorer = IfEvalScorer(aggregate_reward="structured")
    score = IFEvalScoreData.of([True], [True])
    assert scorer.default_reward_aggregator(score, ["t"], ["a", "b"], False).item() == pytest.approx(1.5)


def test_every_reward_is_within_0_and_1_2(answered):
    pieces = ["<think>", "</think>", "<answer>", "</answer>", "a, b", "c", "\n"]
    picked = torch.randint(len(pieces), (200, 8), generator=torch.Generator().manual_seed(0)).tolist()
    reward = step(answered, ["".join(pieces[i] for i in row) for row in picked])["reward"]
    assert reward.min() >= 0
    assert reward.max() <= 1.2


def test_the_aggregation_can_be_replaced_or_left_out(answered):
    seen = []

    def mine(score, think_blocks, answer_blocks, complete):
        seen.append((score.inst_level_strict_acc.item(), think_blocks, answer_blocks, complete))
        return 7

    assert step(answered, ["<think>t</think><answer>a</answer>"], aggregate_reward=mine)["reward"].item() == 7
    assert seen == [(1.0, ["t"], ["a"], True)]
    after = step(answered, ["a"], aggregate_reward=False, set_done_if_answer=False)
    assert "reward" not in after.keys()
    assert after["ifeval_score"].inst_level_loose_acc.item() == 1.0


def test_a_response_that_was_cut_off_is_not_complete(say):
    seen = []
    scorer = IfEvalScorer(aggregate_reward=lambda score, think, answer, complete: seen.append(complete) or 0.0)
    env = ChatEnv(batch_size=[2]).append_transform(scorer)
    td = TensorDict(query=column(["q"] * 2), instruction_id_list=column([[NO_COMMA]] * 2), batch_size=[2])
    td.set("kwargs", column([[{}]] * 2))
    td = say(env.reset(td), ["a", "b"])
    td["stop_reason"] = torch.tensor([int(StopReason.EOS), int(StopReason.LENGTH)])
    env.step(td)
    assert seen == [True, False]


WORDS = "length_constraints:number_words"
ROWS = [
    {"key": 7, "prompt": "Hi", "instruction_id_list": [NO_COMMA], "kwargs": [{"num_words": None, "letter": None}]},
    {"key": 8, "prompt": "Ho", "instruction_id_list": [WORDS, QUOTED]}
    | {"kwargs": [{"relation": "at least", "num_words": 2, "letter": None}, {}]},
]


def test_the_environment_reads_a_local_file_of_the_public_format(tmp_path, say):
    path = tmp_path / "input_data.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)), encoding="utf-8")
    env = IFEvalEnv(dataset=path, num_envs=2, shuffle=False)
    td = env.reset()
    assert td.get("key").tolist() == [7, 8]
    assert td.get("kwargs").tolist() == [[{}], [{"num_words": 2, "relation": "at least"}, {}]]
    td = env.step(say(td, ["<answer>a</answer>", '<answer>"a b"</answer>']))
    assert td["next", "reward"].flatten().tolist() == pytest.approx([1.1, 1.1])
    assert td["next", "done"].all()


def with_row(**change):
    """An environment whose second row differs in this from a good one."""
    return IFEvalEnv(dataset=[ROWS[0], {**ROWS[0], **change}])


MISSPELT = {"instruction_id_list": ["punctuation:no_coma"]}
MORE_THAN = {"instruction_id_list": [WORDS], "kwargs": [{"num_words": 3, "relation": "more than"}]}
test_what_cannot_be_checked_is_named_when_the_environment_is_made = refusals(
    (DataError, "row 2 .*'punctuation:no_coma'.*Did you mean", lambda: with_row(**MISSPELT)),
    (DataError, "row 2 .*argument 'keywords': .*none", lambda: with_row(instruction_id_list=["keywords:existence"])),
    (DataError, "row 2 .*one entry of kwargs per", lambda: with_row(instruction_id_list=[QUOTED, QUOTED])),
    (DataError, "row 2 .*column 'instruction_id_list'", lambda: with_row(instruction_id_list=None)),
    (DataError, "relation .*row 2 .*'less than' or 'at least': got 'more than'", lambda: with_row(**MORE_THAN)),
    (ConfigError, "four numbers that sum to 1", lambda: IfEvalScorer(format_weights=[1, 1, 1, 1])),
    (ConfigError, "True, False, 'structured' or a function", lambda: IfEvalScorer(aggregate_reward="sum")),
)


def test_an_instruction_that_cannot_be_checked_is_named_at_a_step(answered):
    with pytest.raises(DataError, match="row 1 of the batch has 'no:such'"):
        step(answered, ["a"], ["no:such"])
    with pytest.raises(MissingKeyError, match="'instruction_id_list'"):
        answered(ChatEnv(batch_size=[1]).append_transform(IfEvalScorer()), ["4"])


def test_langdetect_is_asked_for_only_by_instructions_that_need_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "langdetect", None)
    IFEvalEnv(dataset=ROWS)
    row = {"prompt": "a", "instruction_id_list": ["change_case:english_capital"], "kwargs": [{}]}
    with pytest.raises(MissingDependencyError, match=r"english_capital' of row 1.*pip install 'llmrl\[ifeval\]'"):
        IFEvalEnv(dataset=[row])


def test_every_turn_has_a_score_of_its_own(say):
    env = IFEvalEnv(dataset=ROWS, num_envs=2, shuffle=False, max_steps=2)
    td = env.step(say(env.reset(), ["a, b", "b"]))
    assert td["next", "ifeval_score"].prompt_level_strict_acc.flatten().tolist() == [0.0, 0.0]
    after = env.step(say(env.step_mdp(td), ["a", '"b c"']))["next"]
    assert after["ifeval_score"].prompt_level_strict_acc.flatten().tolist() == [1.0, 1.0]
