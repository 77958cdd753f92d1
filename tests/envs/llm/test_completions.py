"""A reward sees one and the same string of a turn, whatever the model's family and the env's input mode."""

import pytest
import torch
from tensordict import TensorDict

from llmrl.data import LazyStackStorage, ReplayBuffer
from llmrl.envs.llm import ChatEnv, GSM8KRewardParser, IfEvalScorer
from llmrl.envs.llm.completions import completion_texts, trim_markers
from llmrl.envs.llm.transforms import LengthPenalty, RewardFunction
from llmrl.errors import MissingKeyError
from llmrl.modules.llm.rendering import Renderer
from llmrl.testing import tiny_tokenizer
from tests.support.conversations import fake_policy

FAMILIES = ["qwen3", "llama3", "llama", "gemma", "mistral", "deepseek"]
SAID = ["36", " 6 * 6\n= 36", "3<|im_start|>6"]  # the last holds a control token, as ids may


@pytest.mark.parametrize("family", FAMILIES)
def test_a_reward_sees_the_same_text_in_every_mode(family):
    """Regressions: outside of ChatML a reward saw the end-of-turn marker; control tokens inside of ids vanished."""
    tokenizer = tiny_tokenizer(template=family)
    end = Renderer(tokenizer).codec.end_of_turn
    if family == "gemma":  # its <eos> ends no turn
        tokenizer.eos_token = "<|endoftext|>"
    answers = [torch.tensor(tokenizer(said + end, add_special_tokens=False).input_ids) for said in SAID]
    seen = []
    for mode in ("history", "text", "tokens"):
        for pad_output in (False, True):
            env = ChatEnv(batch_size=[3], input_mode=mode, tokenizer=tokenizer)
            env = env.append_transform(RewardFunction(lambda completion: seen.append(completion) or 1.0))
            policy = fake_policy(tokenizer, answers, input_mode=mode, pad_output=pad_output)
            env.step(policy(env.reset(TensorDict(query=["a", "b c", "d e f"], batch_size=[3]))))
    lead = " " if family in ("llama", "mistral") else ""  # the template's own
    assert seen == [said.removeprefix(lead) for said in SAID] * 6


def test_white_space_and_markers_at_the_end_are_left_out():
    assert trim_markers("36<|im_end|>\n<|endoftext|><|endoftext|> ", ("<|im_end|>", "<|endoftext|>")) == "36"
    assert trim_markers(" 36 \n", ("<|im_end|>",)) == " 36"
    assert trim_markers("<|im_end|>", ("<|im_end|>",)) == ""


def test_ids_without_a_tokenizer_say_that_one_is_missing(tokenizer, say):
    env = ChatEnv(batch_size=[1], input_mode="tokens", tokenizer=tokenizer)
    td = say(env.reset(TensorDict(query="?", batch_size=[1])), ["4"])
    with pytest.raises(MissingKeyError, match=r"mine: the policy's response must be in .* and a tokenizer"):
        completion_texts(td, who="mine")


@pytest.mark.parametrize("mode", ["history", "text", "tokens"])
def test_of_a_conversation_that_is_there_only_as_a_whole_the_last_message_is_the_response(mode, tokenizer, say):
    """Regression: what had only "full" could not be scored."""
    env = ChatEnv(batch_size=[2], input_mode=mode, tokenizer=tokenizer)
    said = ["<answer>36</answer>", ""]
    td = say(env.reset(TensorDict(query=["6 * 6?", "?"], answer=["36", "36"], batch_size=[2])), said)
    view = td.get(mode)
    full = view.full if mode == "history" else view.rows("full")
    whole = TensorDict({mode: type(view).from_rows({"full": full}), "answer": td.get("answer")}, batch_size=[2])
    assert completion_texts(whole, tokenizer, who="mine") == said
    scored = GSM8KRewardParser(tokenizer=tokenizer)(whole)
    assert scored["next", "reward"].flatten().tolist() == [1, 0]


ANSWERS = ["<answer>4</answer>", "<answer>5</answer>"]


def collected(tokenizer, *transforms):
    env = ChatEnv(batch_size=[2])
    for transform in transforms:
        env = env.append_transform(transform)
    td = TensorDict(query="2 + 2?", answer="4", batch_size=[2])
    td.set("instruction_id_list", [["punctuation:no_comma"]] * 2)
    td.set("kwargs", [[{}]] * 2)
    return env.step(fake_policy(tokenizer, ANSWERS)(env.reset(td)))


def exact(completion, answer):
    return answer in completion


@pytest.mark.parametrize(
    "make",
    [GSM8KRewardParser, IfEvalScorer, lambda: RewardFunction(exact), lambda: LengthPenalty(budget=2, coef=0.5)],
    ids=["GSM8KRewardParser", "IfEvalScorer", "RewardFunction", "LengthPenalty"],
)
def test_a_buffer_gives_the_reward_that_the_env_would_have_given(make, tokenizer):
    """Regression: as a buffer's transform they did nothing, or copied token ids into the reward, without a word."""
    zero = RewardFunction(lambda completion: 0.0, name="zero")
    in_env = collected(tokenizer, zero, make())["next"]
    buffer = ReplayBuffer(storage=LazyStackStorage(2), transform=make(), batch_size=2)
    buffer.extend(collected(tokenizer, zero.clone()))
    for _ in range(2):  # what is stored stays as it was
        batch = buffer[:]
        assert batch["next", "reward"].tolist() == in_env["reward"].tolist()
        assert not batch["next", "done"].any()  # where conversations end was decided when they were collected
    assert in_env["reward"].flatten().tolist()[0] != 0
