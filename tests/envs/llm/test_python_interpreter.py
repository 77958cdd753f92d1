"""PythonInterpreter: code blocks of a turn, their output, and their state."""

import pytest

from llmrl.envs.llm import ChatEnv
from llmrl.envs.llm.transforms import PythonInterpreter
from llmrl.errors import ConfigError
from llmrl.testing import ScriptedPolicy
from tests.support.tool_env import Diary, queries, told


@pytest.fixture
def python_env():
    made = []

    def make(num, **options):
        interpreter = PythonInterpreter(sandbox="subprocess", timeout=60, **options)
        made.append(ChatEnv(batch_size=[num]).append_transform(interpreter))
        return made[-1]

    yield make
    for env in made:
        env.close()


def fenced(code, word="python"):
    return f"```{word}\n{code}\n```"


def test_code_blocks_succeed_and_fail_in_the_documented_words(python_env):
    env = python_env(3)
    two_blocks = f"One:\n{fenced('print(6 * 7)')}\nTwo:\n{fenced('print(1)' + chr(10) + '1 / 0', 'Py')}"
    td = env.step(ScriptedPolicy([two_blocks, "No code.", fenced("1")])(env.reset(queries("x", "y", "z"))))
    first, second = told(td, 0)
    assert first == {
        "role": "tool", "content": "Code block 1 executed successfully:\n42\n", "name": "python",
        "tool_call_id": "call_0_0_0",
    }  # fmt: skip
    assert second["content"].startswith("Code block 2 failed:\n1\n"), "what was printed before the error is kept"
    assert "ZeroDivisionError" in second["content"]
    assert told(td, 1) == []
    assert td["next", "done"].flatten().tolist() == [False, True, False]


def test_a_persistent_interpreter_remembers_within_a_conversation_and_not_beyond(python_env):
    env = python_env(2, persistent=True)
    td = env.step(ScriptedPolicy([fenced("x = 1"), fenced("x = 2")])(env.reset(queries("a", "b"))))
    td = env.step(ScriptedPolicy([fenced("print(x)")])(env.step_mdp(td)))
    for row, value in enumerate(("1", "2")):
        assert told(td, row)[0]["content"] == f"Code block 1 executed successfully:\n{value}\n"
    td = env.step(ScriptedPolicy([fenced("1 / 0")])(env.step_mdp(td)))
    td = env.step(ScriptedPolicy([fenced("print(x)")])(env.step_mdp(td)))
    assert told(td, 0)[0]["content"].endswith("\n1\n"), "an error does not end it"
    td = env.step(ScriptedPolicy([fenced("print(x)")])(env.reset(queries("a", "b"))))
    assert "NameError" in told(td, 0)[0]["content"]


def test_environments_may_share_an_interpreter():
    diary = Diary()
    diary.name = "python_executor"
    diary.parameters = {"type": "object", "properties": {"code": {"type": "string"}}}
    diary.call = lambda arguments, *, conversation, deadline: arguments["code"].upper()
    services = {"lab": {"python_executor": diary}}
    env = ChatEnv(batch_size=[1]).append_transform(PythonInterpreter(services=services, namespace="lab"))
    td = env.step(ScriptedPolicy([fenced("a")])(env.reset(queries("?"))))
    assert told(td)[0]["content"] == "Code block 1 executed successfully:\nA"
    with pytest.raises(ConfigError, match="Did you mean 'python_executor'"):
        PythonInterpreter(services=services["lab"], service_name="python_executer")
    with pytest.raises(ConfigError, match="namespace 'labs'"):
        PythonInterpreter(services=services, namespace="labs")
