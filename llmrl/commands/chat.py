"""``llmrl chat RUN|MODEL``: a conversation in the terminal, with the run's tools, system prompt and sampling."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from llmrl.envs.llm import ChatEnv
from llmrl.envs.llm.transforms import ToolTransform
from llmrl.envs.llm.transforms.tool_messages import append_messages
from llmrl.envs.utils import step_mdp
from llmrl.errors import DataError, LLMRLError
from llmrl.modules.llm.engines import StopReason
from llmrl.modules.llm.policies import LLMWrapperBase, TransformersWrapper
from llmrl.run.console import make_console, note, warn
from llmrl.run.printable import printable
from llmrl.tools import load_tool
from llmrl.train.distributed import Session
from llmrl.train.models.loading import load_model, load_tokenizer
from llmrl.train.settings.grpo import SamplingSettings
from llmrl.train.settings.model import ModelSource
from llmrl.train.tasks import Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HELP = """\
/tokens  ids, texts and log-probs of the last answer
/reset   begin a new conversation
/exit    leave (also Ctrl-D)
Ctrl-C stops an answer and takes back your last message."""
_MAX_TOOL_TURNS = 16  # in a row, if the run sets no limit


def chat(
    config: ModelSource,
    *,
    runs: Path,
    tools: Sequence[str],
    system: str | None,
    temperature: float | None,
    max_tokens: int | None,
    seed: int | None,
) -> int:
    """Reads messages from standard input until it ends, streams the answers to the terminal, returns 0.

    ``config``       settings of a run, with its checkpoint as the model; or settings with only a model
    ``tools``        replace the run's tools; ``system`` replaces its system prompt
    ``temperature``  and ``max_tokens`` replace the run's sampling settings (without a run: 1 and 1024)

    Raises  DataError if the model cannot be loaded; TemplateError if it has no usable chat template;
            ConfigError for an unknown tool
    """
    console, env = make_console(), getattr(config, "env", None)
    sampling = getattr(config, "sampling", SamplingSettings()).generate_kwargs
    sampling |= {"max_new_tokens": max_tokens} if max_tokens else {}
    sampling |= {} if temperature is None else {"temperature": temperature}
    with Session(config) as session:
        tokenizer = load_tokenizer(config, runs=runs)
        own_tools = _tools(config, tokenizer, tools)
        model = load_model(config, tokenizer, session, runs=runs)
        policy = TransformersWrapper(
            model, tokenizer=tokenizer, generate_kwargs=sampling | {"seed": seed}, inplace=False
        )
        if system is None and env is not None:
            system = env.system_prompt
        max_turns = env.max_turns if own_tools is not None and env is not None and not tools else _MAX_TOOL_TURNS
        with closing(
            Conversation(policy, console, tools=own_tools, system=system, max_turns=max_turns)
        ) as conversation:
            named = ", ".join(own_tools.runner.tools) if own_tools is not None else "none"
            note(console, f"{config.model} · tools: {named} · /help lists the commands")
            _talk(conversation, console)
    return 0


def _tools(config: ModelSource, tokenizer: PreTrainedTokenizerBase, names: Sequence[str]) -> ToolTransform | None:
    """The tools by ``names``, else those of the run; their transform lets only the user end the conversation."""
    if names:
        return ToolTransform([load_tool(name) for name in names], tokenizer=tokenizer, end_without_call=False)
    env = getattr(config, "env", None)
    if env is None or not env.tools:
        return None
    transform = Task(env, tokenizer).tools
    transform.options = replace(transform.options, end_without_call=False)
    return transform


def _talk(conversation: Conversation, console: Console) -> None:
    commands = {
        "/tokens": conversation.print_tokens,
        "/reset": conversation.reset,
        "/help": lambda: console.print(HELP),
    }
    while True:
        try:
            said = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        except UnicodeDecodeError as error:
            raise DataError(
                f"llmrl chat: standard input must be {error.encoding} text: byte {error.object[error.start]:#04x} is "
                "not; convert it, for Latin-1 with: iconv -f LATIN1 -t UTF-8."
            ) from error
        except KeyboardInterrupt:
            console.print()
            return
        if said in ("/exit", "/quit"):
            return
        if said.startswith("/"):
            if said not in commands:
                warn(console, f"{said.split()[0]} is not a command; known: {', '.join([*commands, '/exit'])}")
                continue
            commands[said]()
        elif said:
            try:
                conversation.say(said)
            except LLMRLError as error:  # text that cannot be encoded, or a conversation that is too long
                if not sys.stdin.isatty():
                    raise
                warn(console, f"{error} The message is taken back.")


@dataclass
class Conversation:
    """The messages so far, and the policy and the tools that answer; everything is printed to ``console``."""

    policy: LLMWrapperBase
    console: Console
    tools: ToolTransform | None = None
    system: str | None = None
    max_turns: int = _MAX_TOOL_TURNS  # of the policy after each user message
    drawn: list[tuple[int, float]] = field(default_factory=list)  # ids and log-probs of the last turn
    _state: TensorDictBase | None = None

    def __post_init__(self) -> None:
        self._env: Any = ChatEnv(batch_size=[1], system_prompt=self.system, tokenizer=self.policy.tokenizer)
        if self.tools is not None:
            self._env = self._env.append_transform(self.tools)
        self.policy.engine.on_tokens = self._on_tokens

    def say(self, text: str) -> None:
        """Adds the user's message and prints the answer, tool calls and their results. Ctrl-C undoes all of it."""
        before = self._state
        state = self._with(text)
        try:
            for _ in range(self.max_turns):
                state = self._turn(state)
                if state.get("history").prompt.to_chats()[0][-1]["role"] == "assistant":
                    break
            else:
                warn(self.console, f"the last calls were answered, but {self.max_turns} turns are the limit")
        except KeyboardInterrupt:
            self.console.print()
            warn(self.console, "stopped: the message and its answer are taken back")
            state = before
        self._state = state

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation so far."""
        return [] if self._state is None else self._state.get("history").prompt.to_chats()[0]

    def _with(self, text: str) -> TensorDictBase:
        if self._state is None:
            return self._env.reset(TensorDict({"query": text}, batch_size=[1]))
        state = self._state.copy()
        append_messages(state, "history", [[{"role": "user", "content": text}]], None)
        return state

    def _turn(self, state: TensorDictBase) -> TensorDictBase:
        """Runs one turn of the policy and the tools that it called."""
        self.drawn, self._shown = [], 0
        answered = self.policy(state.copy())
        columns = (answered.get(name).rows("response")[0].tolist() for name in ("tokens", "log_probs"))
        self.drawn = list(zip(*columns, strict=True))  # not every engine reports tokens one by one
        cut = answered.get("stop_reason").item() == StopReason.LENGTH
        if cut and not self.drawn:  # the policy ends a conversation that fills the model, without computing it
            said = state.get("history").prompt.to_chats()[0][-1]["content"]
            raise DataError(
                f"llmrl chat: a conversation must be shorter than the {self.policy.context_length} tokens that the "
                f"model takes: with a message of {len(said)} characters it is not; shorten it, or start a new "
                "conversation (/reset)."
            )
        self._show(end=True)
        self.console.print()
        if cut:
            warn(self.console, "the answer was cut: it reached the limit of tokens (--max-tokens)")
        following = step_mdp(self._env.step(answered))
        for message in following.get("history").prompt.to_chats()[0][::-1]:
            if message["role"] != "tool":
                break
            self.console.print(Text(printable(f"[{message.get('name', 'tool')}] {message['content']}"), "cyan"))
        return following

    def _on_tokens(self, token_N: Tensor, log_prob_N: Tensor) -> None:
        self.drawn.append((int(token_N[0]), float(log_prob_N[0])))
        self._show()

    def _show(self, *, end: bool = False) -> None:
        """Prints the new text, without control tokens; an incomplete last character waits for its remaining bytes."""
        # The whole turn is decoded each time, because one character may span several tokens.
        text = self.policy.tokenizer.decode([token for token, _ in self.drawn], skip_special_tokens=True)
        if not end:
            text = text.rstrip("\ufffd")
        self.console.print(Text(printable(text[self._shown :])), end="", soft_wrap=True)
        self._shown = max(self._shown, len(text))

    def print_tokens(self) -> None:
        """Prints the ids, texts and log-probs of the last turn."""
        if not self.drawn:
            note(self.console, "there is no answer yet")
            return
        table = Table("id", "text", "log-prob", box=None, pad_edge=False)
        for token, log_prob in self.drawn:
            table.add_row(str(token), Text(repr(self.policy.tokenizer.decode([token]))), f"{log_prob:.4f}")
        self.console.print(table)

    def reset(self) -> None:
        """Begins a new conversation."""
        self._state, self.drawn = None, []
        note(self.console, "a new conversation")

    def close(self) -> None:
        """Closes the tools."""
        self.policy.engine.on_tokens = None
        if self.tools is not None:
            self.tools.close()
