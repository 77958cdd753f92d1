"""Sampled ids are the truth: from the engine through wrapper, environment and buffer to the loss, bit for bit."""

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from llmrl.data.llm.chat import History
from llmrl.data.ragged.tensordicts import column
from llmrl.data.replay_buffers import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement
from llmrl.envs.llm import ChatEnv
from llmrl.envs.llm.chat import next_prompt
from llmrl.envs.utils import step_mdp
from llmrl.errors import RolloutError
from llmrl.modules.llm import ChatHistory, LLMWrapperBase, Text, TokenScores
from llmrl.objectives.llm import GRPOLoss
from tests.support.conversations import Recorder, chats, fake_policy, history_td, prompt_after, rows

NUM = 1000


class Actor(nn.Module):
    """Keeps what the loss hands to the model, row by row: the ids, and which of them are trained."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def token_scores(self, input_ids, attention_mask, select, *, entropy=False):
        for ids, kept, chosen in zip(input_ids, attention_mask, select, strict=True):
            self.rows.append((ids[kept], chosen[kept]))
        log_probs = torch.zeros(input_ids.shape, requires_grad=True)
        return TokenScores(log_probs, torch.zeros(input_ids.shape) if entropy else None)


def random_ids(tokenizer, number, seed=0):
    """Rows of 1 to 20 ids from the whole vocabulary, some of one awkward kind only; half end with end-of-turn."""
    generator = torch.Generator().manual_seed(seed)

    def draw(high, *shape):
        return torch.randint(high, shape, generator=generator)

    kinds = {
        "anything": torch.arange(len(tokenizer)),
        "white space": tokenizer(" \n\t  \n\n \r\n", add_special_tokens=False, return_tensors="pt").input_ids[0],
        "half of a character": torch.tensor(tokenizer.encode("é漢🙂", add_special_tokens=False)[::2]),
        "markers": torch.tensor([*tokenizer.encode("<|im_start|><think></think><tool_call><|endoftext|>")]),
    }
    rows = []
    for row in range(number):
        pool = list(kinds.values())[row % len(kinds)]
        ids = pool[draw(len(pool), int(draw(20, 1)) + 1)]
        rows.append(torch.cat([ids, torch.tensor([tokenizer.eos_token_id])]) if row % 8 < 4 else ids)
    return rows


def dialog(policy, questions, num_turns=1, tool=None):
    """The last turn of a rollout, as a collector makes it; ``tool(turn)`` is what the environment answers."""
    env = ChatEnv(batch_size=[len(questions)])
    td: TensorDictBase = env.reset(TensorDict(query=column(questions), batch_size=[len(questions)]))
    td["group_id"] = torch.arange(len(questions))
    for turn in range(num_turns):
        td = env.step(policy(td))
        if turn + 1 < num_turns:
            after = step_mdp(td)
            after["history"] = prompt_after(after["history"].prompt, [[tool(turn)]] * len(questions))
            after["group_id"] = td["group_id"]
            td = after
    td["advantage"] = torch.ones(len(questions), 1, 1)
    return td


def through_buffer_and_loss(td, batch_size):
    """The ids, trained masks and log-probs that reach the model from a buffer filled with ``td``, by group id."""
    buffer = ReplayBuffer(storage=LazyStackStorage(len(td)), sampler=SamplerWithoutReplacement(), batch_size=batch_size)
    buffer.extend(td)
    actor, found = Actor(), {}
    loss = GRPOLoss(actor)
    for _ in range(len(td) // batch_size):
        batch = buffer.sample()
        start = len(actor.rows)
        output = loss(batch)
        assert output.loss_objective.isfinite()
        log_probs = batch.get(("log_probs", "full"), as_list=True)
        for group, row, log_prob in zip(batch["group_id"].tolist(), actor.rows[start:], log_probs, strict=True):
            found[group] = (*row, log_prob)
    return found


@pytest.mark.parametrize("pad_output", [False, True])
def test_a_thousand_random_sequences_reach_the_loss_as_they_were_sampled(tokenizer, pad_output):
    answers = random_ids(tokenizer, NUM)
    texts = tokenizer.batch_decode(answers)
    retokenised = tokenizer(texts, add_special_tokens=False).input_ids
    changed = sum(new != ids.tolist() for new, ids in zip(retokenised, answers, strict=True))
    assert changed > NUM / 2  # through text, most of them would come back as other ids
    engine = Recorder(answers, tokenizer=tokenizer)
    policy = LLMWrapperBase(engine, tokenizer=tokenizer, pad_output=pad_output)
    td = dialog(policy, [f"Question {row}" for row in range(NUM)])
    assert len(engine.drawn) == NUM
    found = through_buffer_and_loss(td, batch_size=250)
    assert sorted(found) == list(range(NUM))
    for row, (prompt, ids, log_probs) in enumerate(engine.drawn):
        seen, trained, behaviour = found[row]
        assert torch.equal(seen, torch.cat([prompt, ids]))
        assert torch.equal(seen[trained], ids)
        assert trained.nonzero()[0] == len(prompt)
        assert torch.equal(behaviour[behaviour != 0], log_probs)


@pytest.mark.parametrize("pad_output", [False, True])
def test_five_turns_with_tools_store_the_ids_that_the_engine_saw(tokenizer, pad_output):
    num, num_turns, limit = 20, 5, 12
    engine = Recorder(random_ids(tokenizer, num * num_turns, seed=1), tokenizer=tokenizer)
    options = {"max_new_tokens": limit}
    policy = LLMWrapperBase(engine, tokenizer=tokenizer, pad_output=pad_output, generate_kwargs=options)

    def tool(turn):
        return {"role": "tool" if turn % 2 else "user", "content": f"result\n\n{turn} é  "}

    td = dialog(policy, [f"Question {row}" for row in range(num)], num_turns, tool)
    cut_off = [len(ids) == limit and ids[-1] != tokenizer.eos_token_id for _, ids, _ in engine.drawn]
    assert any(cut_off)
    assert not all(cut_off)
    found = through_buffer_and_loss(td, batch_size=10)
    for row in range(num):
        turns = engine.drawn[row::num]
        seen, trained, behaviour = found[row]
        last_prompt, last_ids, _ = turns[-1]
        assert torch.equal(seen, torch.cat([last_prompt, last_ids]))
        for prompt, ids, _ in turns:
            assert torch.equal(seen[: len(prompt) + len(ids)], torch.cat([prompt, ids]))
        assert torch.equal(seen[trained], torch.cat([ids for _, ids, _ in turns]))
        assert torch.equal(behaviour[behaviour != 0], torch.cat([log_probs for _, _, log_probs in turns]))
        assert "result\n\n3 é  " in (text := tokenizer.decode(seen))
        assert td["text"].rows("full")[row] == text


@pytest.mark.parametrize("mode", ["text", "tokens"])
def test_the_other_modes_carry_the_ids_too(tokenizer, mode):
    engine = Recorder(random_ids(tokenizer, 40, seed=2), tokenizer=tokenizer)
    policy = LLMWrapperBase(engine, tokenizer=tokenizer, input_mode=mode)
    env = ChatEnv(batch_size=[10], input_mode=mode, tokenizer=tokenizer)
    td = env.reset(TensorDict(query=column([f"Question {row}" for row in range(10)]), batch_size=[10]))
    for _ in range(4):
        td = step_mdp(env.step(policy(td)))
    stored, masks = td["tokens"].rows("prompt"), td["masks"].rows("prompt_assistant_mask")
    for row in range(10):
        turns = engine.drawn[row::10]
        assert torch.equal(stored[row], torch.cat([turns[-1][0], turns[-1][1]]))
        assert torch.equal(stored[row][masks[row]], torch.cat([ids for _, ids, _ in turns]))


@pytest.mark.parametrize("pad_output", [False, True])
def test_plain_log_probs_are_carried_beside_the_truncated_ones(tokenizer, pad_output):
    engine = Recorder(["one", "two", "three", "four", "five", "six"], tokenizer=tokenizer)
    options = {"top_k": 5, "max_new_tokens": 9}  # FakeEngine's plain log-probs are twice the truncated ones
    policy = LLMWrapperBase(engine, tokenizer=tokenizer, pad_output=pad_output, generate_kwargs=options)
    td = dialog(policy, ["Hi", "Hello"], 3, lambda turn: {"role": "user", "content": "go on"})
    full, plain = (td["log_probs"].rows(name) for name in ("full", "plain"))
    for row in range(2):
        sampled = torch.cat([log_probs for _, _, log_probs in engine.drawn[row::2]])
        assert torch.equal(full[row][full[row] != 0], sampled)
        assert torch.equal(plain[row], 2 * full[row])


def carried(td, *, tool=None):
    """The next turn's prompt side, as an environment leaves it; ``tool`` adds a message to every conversation."""
    after = TensorDict(next_prompt(td), td.batch_size)
    if tool is not None:
        after["history"] = prompt_after(after["history"].prompt, [[tool]] * len(td))
    return after


def test_asking_the_same_prompt_again_uses_the_same_ids(tokenizer):
    policy = fake_policy(tokenizer, ["one", "two", "three", "four"])
    td = policy(history_td(chats(["Hi"])))
    policy(td)
    assert torch.equal(policy.engine.prompts[0], policy.engine.prompts[1])
    later = policy(carried(td, tool={"role": "user", "content": "more"}))
    before = int(rows(later, "masks", "all_assistant_mask")[0].sum())
    [mask] = rows(policy(later), "masks", "all_assistant_mask")
    assert torch.equal(policy.engine.prompts[2], policy.engine.prompts[3])
    assert mask.sum() == before - len(policy.engine.answers[2]) + len(policy.engine.answers[3])


def test_text_mode_tokenises_only_what_was_appended(tokenizer):
    policy = fake_policy(tokenizer, [torch.tensor([300, 301, 302]), "end"], input_mode="text")
    td = policy(TensorDict({"text": Text.from_rows({"prompt": ["Hello "]})}, [1]))
    step = carried(td)
    step["text"] = Text.from_rows({"prompt": [td["text"].rows("full")[0] + " more"]})
    policy(step)
    added = tokenizer.encode(" more", add_special_tokens=False)
    assert policy.engine.prompts[1].tolist() == [*rows(td, "tokens", "full")[0].tolist(), *added]
    assert int(rows(step, "masks", "all_assistant_mask")[0].sum()) == 3 + len(policy.engine.answers[1])


def test_a_conversation_that_lost_messages_is_an_error(tokenizer):
    policy = fake_policy(tokenizer, ["one"])
    td = carried(policy(history_td(chats(["Hi"]))))
    td["history"] = ChatHistory.from_rows({"prompt": History.from_chats(chats(["Hi"]))})
    with pytest.raises(RolloutError, match="only grows"):
        policy(td)
