"""ChatML text, with the tool markup and the thinking that Qwen's models write.

Only the markers are parsed: contents come back character for character. Text cannot tell a quoted marker from a control
token; token streams can.
"""

from __future__ import annotations

import re

from llmrl.data.llm.parsers.turns import Message, read_call

_START, _END, _END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
_TOOL_CALL = re.compile(r"\n?<tool_call>\n?(.*?)\n?</tool_call>", re.DOTALL)
_RESPONSE = "<tool_response>\n"
_RESPONSE_END = re.compile(r"\n</tool_response>(?=\n?\Z|\n?<tool_response>\n)\n?")

_THINKING = re.compile(r"<think>\n(.*?)\n</think>\n\n", re.DOTALL)
_BEFORE_CALLS = re.compile(r"<think>\n(.*?)\n</think>\n", re.DOTALL)  # the line end before a call belongs to the call


def parse_chatml(text: str) -> list[Message]:
    """Reads a ChatML conversation.

    Reads    text  turns between ``<|im_start|>role\\n`` and ``<|im_end|>``; ``<|endoftext|>`` ends a turn as well
    Returns  messages, without one for a trailing generation prompt. ``<tool_call>`` blocks of the assistant become
             ``"tool_calls"`` (one whose body is not a JSON object stays in the content), ``<tool_response>`` blocks of
             a user turn become ``"tool"`` messages

    >>> parse_chatml("<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHel")
    [{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Hel', 'is_complete': False}]
    """
    messages: list[Message] = []
    turns = text.split(_START)[1:]
    for index, turn in enumerate(turns):
        role, _, body = turn.partition("\n")
        if not body and role == "assistant" and index == len(turns) - 1:
            break
        content, ended, _ = body.partition(_END)
        if _END_OF_TEXT in content:
            content, ended, _ = content.partition(_END_OF_TEXT)
        if role == "assistant":
            new = [_assistant_message(content)]
        elif role == "user" and _RESPONSE in content and (results := _tool_responses(content)):
            new = [{"role": "tool", "content": result} for result in results]
        else:
            new = [{"role": role, "content": content}]
        if not ended:
            new[-1]["is_complete"] = False
        messages += new
    return messages


def parse_qwen3(text: str) -> list[Message]:
    """Reads a Qwen 3 conversation: as ChatML, with the thinking of an answer separately in ``"reasoning_content"``.

    An empty block is left out. A block that does not end, or does not begin the answer, stays in the content.

    >>> parse_qwen3("<|im_start|>assistant\\n<think>\\n2+2\\n</think>\\n\\n4<|im_end|>")
    [{'role': 'assistant', 'content': '4', 'reasoning_content': '2+2'}]
    """
    messages = parse_chatml(text)
    for message in messages:
        if message["role"] != "assistant":
            continue
        thinking = _THINKING.match(message["content"])
        if not thinking and "tool_calls" in message:
            thinking = _BEFORE_CALLS.fullmatch(message["content"])
        if thinking:
            message["content"] = message["content"][thinking.end() :]
            if thinking[1]:
                message["reasoning_content"] = thinking[1]
    return messages


def _assistant_message(content: str) -> Message:
    """The assistant's text and, separately, the tool calls at its end."""
    # Backwards from the end, up to the first text that is not a valid call: calls quoted before it stay in the content.
    calls = []
    end = len(content)
    while (match := _last_call(content, end)) and (call := read_call(match.group(1), "arguments")):
        calls.append(call)
        end = match.start()
    message: Message = {"role": "assistant", "content": content[:end]}
    if calls:
        message["tool_calls"] = calls[::-1]
    return message


def _last_call(text: str, end: int) -> re.Match[str] | None:
    start = text.rfind("<tool_call>", 0, end)
    if start < 0:
        return None
    start -= text[max(0, start - 1) : start] == "\n"
    return _TOOL_CALL.fullmatch(text, start, end)


def _tool_responses(text: str) -> list[str]:
    """The results that a text consists of; an empty list if it contains anything else."""
    results = []
    place = int(text.startswith("\n"))
    while text.startswith(_RESPONSE, place) and (end := _RESPONSE_END.search(text, place + len(_RESPONSE))):
        results.append(text[place + len(_RESPONSE) : end.start()])
        place = end.end()
    return results if place == len(text) else []
