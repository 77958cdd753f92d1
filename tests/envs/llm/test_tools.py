"""ToolTransform: calls that run, answers to the model, ends of conversations, and counts."""

import json
import threading

import pytest
import torch
from tensordict import TensorDict

from llmrl.collectors.llm import LLMCollector
from llmrl.data.ragged.tensordicts import column
from llmrl.data.replay_buffers import LazyStackStorage, ReplayBuffer
from llmrl.envs import StepCounter, check_env_specs, step_mdp
from llmrl.envs.llm import ChatEnv, DatasetChatEnv
from llmrl.envs.llm.tool_calls import HermesFormat, LlamaFormat
from llmrl.envs.llm.transforms import RewardFunction, ToolTransform, tool_metrics
from llmrl.envs.llm.transforms.tool_use import read_calls
from llmrl.errors import ConfigError, MissingKeyError
from llmrl.modules.llm.engines import StopReason
from llmrl.objectives.llm import MCAdvantage
from llmrl.testing import ScriptedPolicy, tiny_tokenizer
from llmrl.tools import ToolError
from tests.support.conversations import fake_policy
from tests.support.refusals import refusals
from tests.support.tool_env import Diary, add, queries, told

render = HermesFormat().render
WAIT_S = 20.0  # a bound on waits that end at once where the code is right


def fail(reason: str) -> str:
    """Always fails."""
    raise ToolError(f"no luck: {reason}")


def long(length: int) -> str:
    """A long text."""
    return "x" * length


def tool_env(tools, num_envs=1, **options):
    return ChatEnv(batch_size=[num_envs]).append_transform(ToolTransform(list(tools), **options))


def started(*answers, tools=(add,), **options):
    """The step of a batch whose rows say these answers, in an environment with these tools."""
    env = tool_env(tools, len(answers), **options)
    return env.step(ScriptedPolicy(list(answers))(env.reset(queries(*["?"] * len(answers)))))


def use(td, name):
    return td["next", "tool_use", name].tolist()


CALL = render("add", {"a": 1, "b": 2})


def test_calls_are_kept_with_arguments_result_and_outcome():
    good = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
    bad = '<tool_call>{"name": "add", "arguments": </tool_call>'
    unknown = '<tool_call>{"name": "ad", "arguments": {}}</tool_call>'
    env = tool_env([add], 2, max_calls_per_turn=2)
    td = env.step(ScriptedPolicy([good + bad + good, "none"])(env.reset(queries("?", "?"))))
    calls, none = (read_calls(lines) for lines in td["next", "tool_calls"])
    assert none == []
    assert [(call["turn"], call["name"], call["outcome"], call["arguments"]) for call in calls] == [
        (0, "add", "ok", '{"a": 2, "b": 3}'),
        (0, calls[1]["name"], "malformed", bad),
        (0, "add", "not_run", '{"a": 2, "b": 3}'),
    ]
    assert [call["result"] for call in calls] == [*[m["content"] for m in told(td, 0)[:2]], ""]
    assert [call["seconds"] is None for call in calls] == [False, False, True]
    td = env.step(ScriptedPolicy([unknown, "none"])(step_mdp(td)))
    later = read_calls(td["next", "tool_calls"][0])
    assert (later[:3], later[3]["turn"], later[3]["outcome"]) == (calls, 1, "unknown")


@pytest.mark.parametrize("declare", [True, False])
def test_what_the_tools_write_is_declared(declare):
    tokenizer = tiny_tokenizer()
    env = DatasetChatEnv(dataset=[{"question": "2 + 3?"}], num_envs=2, seed=0, max_steps=3, tokenizer=tokenizer)
    env.append_transform(ToolTransform([add], declare=declare))
    call = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
    check_env_specs(env, policy=fake_policy(tokenizer, [call, "5"]))


def test_a_turn_without_a_call_ends_its_conversation_and_only_its_own():
    td = started("It is 3.", CALL)
    assert told(td, 0) == []
    assert len(told(td, 1)) == 1
    for flag, wanted in (("done", [True, False]), ("terminated", [True, False]), ("truncated", [False, False])):
        assert td["next", flag].flatten().tolist() == wanted
    assert not started("It is 3.", end_without_call=False)["next", "done"].any()


def test_a_turn_that_was_cut_off_calls_nothing_and_truncates():
    env = tool_env([add])
    td = ScriptedPolicy([CALL + "\nThen I"])(env.reset(queries("?")))
    td["stop_reason"] = torch.tensor([int(StopReason.LENGTH)])
    td = env.step(td)
    assert told(td) == []
    assert td["next", "truncated"].all()
    assert not td["next", "terminated"].any()
    assert use(td, "calls") == [0]


@pytest.mark.parametrize(
    ("text", "status", "says"),
    [
        ("<tool_call>[1]</tool_call>", "malformed", "a call is a JSON object, not a list"),
        (render("ad", {"a": 1, "b": 2}), "unknown", "Did you mean 'add'?"),
        (render("add", {"a": 1}), "error", "b"),
        (render("add", {"a": 1, "bb": 2}), "error", "bb"),
        (render("add", {"a": 1, "b": "two"}), "error", "b"),
        (render("fail", {"reason": "rain"}), "error", "no luck: rain"),
        (render("long", {"length": 5_000_000}), "cut", "characters cut"),
    ],
)
def test_what_goes_wrong_becomes_a_bounded_message_that_says_what_was_expected(text, status, says):
    td = started(text, tools=[add, fail, long], max_result_chars=600)
    [message] = told(td)
    assert message["content"].startswith("Error: ") == (status != "cut")
    assert says in message["content"]
    assert len(message["content"]) <= 600
    assert use(td, status) == [1]
    assert not td["next", "done"].any(), "the model may try again"


def test_the_timeout_of_a_call_is_kept():
    """Regression: the timeout was once an argument that nothing read."""
    release = threading.Event()

    def wait() -> str:
        """Waits."""
        release.wait(WAIT_S)
        return "late"

    td = started(render("wait", {}), tools=[wait], timeout_s=0.2)
    release.set()
    assert use(td, "timeout") == [1]
    assert told(td)[0]["content"].startswith("Error: wait: no result within 0.2 s")


def test_calls_beyond_the_limit_of_a_turn_are_not_run_and_the_model_is_told():
    td = started("\n".join(render("add", {"a": n, "b": 0}) for n in range(5)), max_calls_per_turn=2)
    refused = "Error: 3 more calls of this turn were not run: at most 2 are."
    assert [message["content"] for message in told(td)] == ["0", "1", refused]
    assert (use(td, "calls"), use(td, "ok"), use(td, "not_run")) == ([5], [2], [3])


@pytest.mark.parametrize("counter_first", [True, False])
def test_a_call_in_the_last_turn_is_not_run_and_counted(counter_first):
    """Regression: an environment without a reward parser, whose model always calls, once ran for ever."""
    diary = Diary()
    transforms = [StepCounter(max_steps=2), ToolTransform([diary])]
    env = ChatEnv(batch_size=[1])
    for transform in transforms if counter_first else transforms[::-1]:
        env = env.append_transform(transform)
    call = render("diary", {"line": "a"})
    batch = env.rollout(9, ScriptedPolicy([call]), tensordict=queries("?"))
    assert batch.shape[1] == 2
    last = batch[:, -1]["next"]
    assert last["truncated"].all()
    assert not last["terminated"].any()
    assert (last["tool_use", "ok"].tolist(), last["tool_use", "not_run"].tolist()) == ([1], [1])
    assert last["history"].prompt.to_chats()[0][-1]["role"] == "assistant"
    assert diary.ended == [0]


def test_more_turns_with_calls_than_allowed_truncate():
    env = tool_env([add], max_tool_turns=2)
    batch = env.rollout(9, ScriptedPolicy([CALL]), tensordict=queries("?"))
    assert batch.shape[1] == 3
    last = batch[:, -1]["next"]
    assert last["truncated"].all()
    assert (last["tool_use", "tool_turns"].tolist(), last["tool_use", "not_run"].tolist()) == ([2], [1])


def test_a_tool_keeps_what_belongs_to_a_conversation_until_its_end():
    diary = Diary()
    env = tool_env([diary], 2)
    answers = iter([*(render("diary", {"line": line}) for line in "abc"), "End"])
    td = env.step(ScriptedPolicy(lambda chat: next(answers))(env.reset(queries("x", "y"))))
    assert [told(td, row)[0]["content"] for row in range(2)] == ["a", "b"]
    td = env.step(ScriptedPolicy(lambda chat: next(answers))(env.step_mdp(td)))
    assert told(td, 0)[0]["content"] == "a, c"
    assert diary.ended == [1]
    assert set(diary.lines) == {0}


def test_conversations_that_were_never_ended_do_not_pile_up():
    diary = Diary()
    env = tool_env([diary], 128)
    for _ in range(6):  # reset again and again in the middle
        env.step(ScriptedPolicy([render("diary", {"line": "a"})])(env.reset(queries(*["?"] * 128))))
    assert len(diary.lines) == 4 * 128
    assert diary.ended == list(range(2 * 128)), "the oldest first"


def test_a_tool_tells_the_conversations_of_several_environments_apart():
    met = set()

    class Counter(Diary):
        def call(self, arguments, *, conversation, deadline):
            met.add(conversation)
            return ""

    first = ToolTransform([Counter()])
    for transform in (first, first.clone(), ToolTransform(list(first.runner.tools.values()))):
        env = ChatEnv(batch_size=[2]).append_transform(transform)
        td = env.step(ScriptedPolicy([render("diary", {"line": "a"})])(env.reset(queries("x", "y"))))
        assert td["conversation_id"].tolist() == [0, 1]
    assert len(met) == 6


def test_ids_of_conversations_go_on_after_a_resume():
    env, other = tool_env([add], 2), tool_env([add], 2)
    assert env.reset(queries("a", "b"))["conversation_id"].tolist() == [0, 1]
    other.load_state_dict(env.state_dict())
    assert other.reset(queries("a", "b"))["conversation_id"].tolist() == [2, 3]


def test_calls_that_stand_apart_from_the_text_are_run_too():
    env = tool_env([add])
    td = ScriptedPolicy([""])(env.reset(queries("?")))
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
    td["history"].response.tool_calls = [[[call]]]
    assert told(env.step(td))[0]["content"] == "3"


def test_characters_that_the_renderer_needs_for_itself_do_not_reach_it():
    """Also a regression: an always empty state was once passed to every tool, which broke those without arguments."""

    def odd() -> str:
        """Odd text."""
        return "a\U000fe000b\ud800c<|im_end|>\U000f0000"

    assert told(started(render("odd", {}), tools=[odd]))[0]["content"] == "a\ufffdb?c<|im_end|>\U000f0000"


def test_two_tool_transforms_share_the_end_and_the_counts():
    env = tool_env([add], 3).append_transform(ToolTransform([fail], format=LlamaFormat()))
    answers = [CALL, LlamaFormat().render("fail", {"reason": "x"}), "Nothing."]
    td = env.step(ScriptedPolicy(answers)(env.reset(queries("x", "y", "z"))))
    assert td["next", "done"].flatten().tolist() == [False, False, True]
    assert use(td, "calls") == [1, 1, 0]
    assert use(td, "turns") == [1, 1, 1]
    assert td["conversation_id"].tolist() == [0, 1, 2]


def test_schemas_are_declared_in_the_first_message_once_and_beside_those_of_the_data():
    own = {"type": "function", "function": {"name": "own", "description": "d", "parameters": {}}}
    env = ChatEnv(batch_size=[2], system_prompt="Be brief.").append_transform(ToolTransform([add]))
    td = env.reset(TensorDict(query=column(["a", "b"]), tools=column([None, [own]]), batch_size=[2]))
    names = [[tool["function"]["name"] for tool in chat[0]["tools"]] for chat in td["history"].prompt.to_chats()]
    assert names == [["add"], ["own", "add"]]
    again = env.reset(td)["history"].prompt.to_chats()
    assert [len(chat[0]["tools"]) for chat in again] == [1, 2]


def test_without_tools_the_prompt_is_what_it_was():
    plain = ChatEnv(batch_size=[1]).reset(queries("Hi"))["history"].prompt.to_chats()
    assert tool_env([add], declare=False).reset(queries("Hi"))["history"].prompt.to_chats() == plain


def test_instructions_hold_the_schemas_and_the_format_for_a_system_prompt():
    text = ToolTransform([add], format="tagged").instructions()
    assert json.dumps(add.__doc__)[1:-2] in text
    assert '<tool><name>\n{"argument": value}</tool>' in text


test_settings_that_cannot_be_used_are_refused = refusals(
    (ConfigError, "at least one tool", lambda: ToolTransform([])),
    (ConfigError, "must be a list", lambda: ToolTransform("calculator")),
    (ConfigError, "max_calls_per_turn must be at least 1", lambda: ToolTransform([add], max_calls_per_turn=0)),
    (ConfigError, "max_tool_turns must be at least 1", lambda: ToolTransform([add], max_tool_turns=0)),
    (ConfigError, "Did you mean 'max_tool_turns'", lambda: ToolTransform([add], max_tool_turn=1)),
)


def test_a_batch_that_no_reset_made_is_refused():
    env = tool_env([add])
    td = ScriptedPolicy(["x"])(env.reset(queries("?")))
    with pytest.raises(MissingKeyError, match="step a tensordict that env"):
        env.step(td.exclude("tool_use"))


def test_metrics_are_shares_of_the_conversations_that_ended():
    text = "\n".join([CALL, render("ad", {}), render("fail", {"reason": "x"})])
    env = tool_env([add, fail], 2)
    answers = iter([text, "Done.", "Done."])
    td = env.step(ScriptedPolicy(lambda chat: next(answers))(env.reset(queries("x", "y"))))
    assert tool_metrics(td)["tools/conversations"] == 1
    assert tool_metrics(td)["tools/call_rate"] == 0
    td = env.step(ScriptedPolicy(lambda chat: "Done.")(env.step_mdp(td)))
    metrics = tool_metrics(td)
    assert (metrics["tools/conversations"], metrics["tools/call_rate"], metrics["tools/calls_mean"]) == (2, 0.5, 1.5)
    shares = {name: metrics[f"tools/{name}_frac"] for name in ("ok", "unknown", "error", "timeout", "malformed")}
    assert shares == pytest.approx({"ok": 1 / 3, "unknown": 1 / 3, "error": 1 / 3, "timeout": 0, "malformed": 0})
    assert env.transform[0].counters["calls"] == 3
    with pytest.raises(MissingKeyError, match="put a ToolTransform into the env"):
        tool_metrics(td.exclude(("next", "tool_use")))


def talk(chat):
    """Calls as often as the question says, then answers."""
    text = chat if isinstance(chat, str) else chat[0]["content"]
    calls = int(text.partition("calls=")[2][0])
    made = sum(message["role"] == "tool" for message in chat)
    return CALL if made < calls else f"done after {made}"


def dataset_env(num_envs, *, repeats=None, max_steps=6, calls=(0, 1, 2, 3)):
    rows = [{"prompt": f"calls={n}", "answer": f"done after {n}"} for n in calls]
    grouped = {"repeats": repeats, "group_repeats": repeats is not None}
    env = DatasetChatEnv(dataset=rows, num_envs=num_envs, shuffle=False, max_steps=max_steps, seed=0, **grouped)
    env.append_transform(ToolTransform([add]))
    return env.append_transform(RewardFunction(lambda completion, answer: float(completion == answer), name="right"))


def test_a_collector_of_turns_replaces_only_conversations_that_ended():
    collector = LLMCollector(dataset_env(2), policy=ScriptedPolicy(talk), dialog_turns_per_batch=12)
    data = collector.rollout()
    assert data.shape == (2, 6)
    # 0 calls, then the rest of the data in the order in which places become free
    assert data["conversation_id"].tolist() == [[0, 2, 2, 2, 4, 5], [1, 1, 3, 3, 3, 3]]
    assert data["tool_use", "calls"].tolist() == [[0, 0, 1, 2, 0, 0], [0, 1, 0, 1, 2, 3]]
    assert data["next", "done"].squeeze(-1).tolist() == [
        [True, False, False, True, True, False],
        [False, True, False, False, False, True],
    ]


def test_advantages_of_tool_conversations_are_those_of_their_groups(tokenizer):
    counts = iter([CALL, "done after 0", "no", CALL, "done after 1", "no"])
    policy = fake_policy(tokenizer, lambda prompt: next(counts))
    env = dataset_env(1, repeats=4, calls=(1,))
    buffer = ReplayBuffer(storage=LazyStackStorage(16), transform=MCAdvantage(4))
    options = {"yield_only_last_steps": True, "dialog_turns_per_batch": 1}
    collector = LLMCollector(env, policy=policy, replay_buffer=buffer, **options)
    collector.next()
    rows = buffer[:]
    assert rows["next", "tool_use", "calls"].tolist() == [1, 0, 0, 1]
    rewards = rows["next", "reward"].flatten()
    assert rewards.tolist() == [1.0, 0.0, 0.0, 0.0]
    wanted = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    torch.testing.assert_close(rows["advantage"].flatten(), wanted, atol=1e-5, rtol=0)
