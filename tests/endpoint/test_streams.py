"""Streams: pieces come while an answer is sampled, and say what an answer in one piece says; ids are those of rows."""

import asyncio
import json
import random
import threading

import httpx
import pytest

from llmrl.endpoint import RecordingEndpoint
from llmrl.endpoint.streams import CertainText
from llmrl.envs.llm.tool_calls import call_format
from llmrl.modules.llm.engines import SamplingParams, StopReason, TransformersEngine
from llmrl.modules.llm.rendering import Renderer
from llmrl.testing import FakeEngine, tiny_model, tiny_tokenizer
from tests.support.processes import wait_until
from tests.support.template_families import NAMES

TOKENIZER = tiny_tokenizer()
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'


class TypingEngine(FakeEngine):
    """Tells of its ids one by one; waits for ``go`` after the third."""

    concurrent = True

    def __init__(self, answers):
        super().__init__(answers, tokenizer=TOKENIZER, streams=True)
        self.go = threading.Event()
        self.num_told = 0

    def generate(self, prompts, params, *, hear, **options):
        def told(row, ids, log_probs):
            assert self.num_told < 3 or self.go.wait(60)
            self.num_told += 1
            return hear(row, ids, log_probs)

        return super().generate(prompts, params, hear=told, **options)


def events(lines):
    """The data of server-sent events."""
    for line in lines:
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def texts_of(path, found):
    """What a client of the API at ``path`` makes of an event: the text, if it adds any."""
    for event in found:
        if path.endswith("completions"):
            yield from (choice["delta"].get("content") or "" for choice in event["choices"])
        elif path.endswith("responses"):
            yield event["delta"] if event["type"] == "response.output_text.delta" else ""
        else:
            yield event.get("delta", {}).get("text") or ""


PATHS = pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])


def request(path, **fields):
    asked = "input" if path.endswith("responses") else "messages"
    limit = {"max_tokens": 100} if path.endswith("messages") else {}
    return {"model": "m", asked: [{"role": "user", "content": "2+2?"}], "stream": True, **limit, **fields}


@PATHS
def test_text_comes_before_the_answer_is_complete(path):
    engine = TypingEngine(["one two three four five"])
    with RecordingEndpoint(engine, TOKENIZER) as endpoint:
        key = endpoint.begin()
        headers = {"x-api-key": key}
        with httpx.stream("POST", endpoint.url + path, json=request(path), headers=headers, timeout=60) as stream:
            texts = texts_of(path, events(stream.iter_lines()))
            first = next(text for text in texts if text)
            assert not engine.go.is_set()
            engine.go.set()
            rest = list(texts)
        assert first + "".join(rest) == "one two three four five"
        rows = endpoint.finish(key, 1.0)
        [ids] = rows.get(("tokens", "full"), as_list=True)
        assert TOKENIZER.decode(ids).endswith("one two three four five<|im_end|>")


@PATHS
def test_a_client_that_leaves_ends_the_sampling(path):
    engine = TypingEngine(["one two three four five six seven"])
    with RecordingEndpoint(engine, TOKENIZER) as endpoint:
        key = endpoint.begin()
        headers = {"x-api-key": key}
        with httpx.stream("POST", endpoint.url + path, json=request(path), headers=headers, timeout=60) as stream:
            next(text for text in texts_of(path, events(stream.iter_lines())) if text)
        wait_until(lambda: endpoint.counters["left"], 60)
        engine.go.set()
        wait_until(lambda: endpoint.counters["abandoned"], 60)
        assert engine.num_told <= 4, "the engine goes on after it was told that the row is not wanted"
        assert endpoint.finish(key, 1.0) is None


@pytest.mark.parametrize(
    ("said", "fields", "content", "calls"),
    [
        (f"One moment. {CALL}", {"tools": TOOLS}, "One moment.", 1),
        (f"{CALL}\n{CALL}", {"tools": TOOLS}, None, 2),
        ("a <tool_call> that is none", {"tools": TOOLS}, "a <tool_call> that is none", 0),
        ("a < b <tool", {"tools": TOOLS}, "a < b <tool", 0),
        ("日本語 é 🙂", {}, "日本語 é 🙂", 0),
        ("one ENDED two", {"stop": ["ENDED", "EN TWO"]}, "one ", 0),
        ("one EN one", {"stop": "ENDED"}, "one EN one", 0),
    ],
)
def test_a_stream_says_what_an_answer_in_one_piece_says(said, fields, content, calls):
    class Stopping(TypingEngine):
        """Ends an answer at a stop string, as engines that read text do."""

        def _answer(self, prompt, stops, limit):
            ids, log_probs, reason = super()._answer(prompt, stops, limit)
            for size in range(len(ids)):
                if any(stop in TOKENIZER.decode(ids[:size]) for stop in self.stop_strings):
                    return ids[:size], log_probs[:size], StopReason.STOP_STRING
            return ids, log_probs, reason

        def generate(self, prompts, params, **options):
            self.stop_strings = params.stop_strings
            return super().generate(prompts, params, **options)

    engine = Stopping([said])
    engine.go.set()
    with RecordingEndpoint(engine, TOKENIZER, train="all") as endpoint:
        key = endpoint.begin()
        body = request("/v1/chat/completions", return_token_ids=True, **fields)
        found = []
        for stream in (False, True):
            answer = httpx.post(
                f"{endpoint.base_url}/chat/completions", json={**body, "stream": stream}, headers={"x-api-key": key}
            ).raise_for_status()
            if stream:
                chunks = [c for event in events(answer.text.splitlines()) for c in event["choices"]]
                deltas = [chunk["delta"] for chunk in chunks]
                text = "".join(delta.get("content") or "" for delta in deltas) or None
                made = [call["function"] for delta in deltas for call in delta.get("tool_calls") or ()]
                found.append((text, made, [token for chunk in chunks for token in chunk.get("token_ids") or ()]))
                assert len([chunk for chunk in chunks if chunk["finish_reason"]]) == 1
            else:
                [choice] = answer.json()["choices"]
                made = [call["function"] for call in choice["message"].get("tool_calls") or ()]
                found.append((choice["message"]["content"], made, choice["token_ids"]))
        assert found[0] == found[1]
        assert (found[1][0], len(found[1][1])) == (content, calls)
        rows = endpoint.finish(key, 1.0)
        [ids], [mask] = (rows.get(key, as_list=True) for key in (("tokens", "full"), ("masks", "all_assistant_mask")))
        assert ids[mask].tolist() == found[1][2], "the first is a retry, which is not trained"


def test_only_what_may_begin_a_call_a_stop_string_or_a_character_is_held_back():
    renderer = Renderer(TOKENIZER)
    text = CertainText(renderer, call_format("hermes", ""), ["STOP"], [TOKENIZER.eos_token_id])
    shown = [
        (said, text.add(TOKENIZER.encode(said)))
        for said in ("Hi <", "b> S", "TO", "NE <tool", "s> ", "x<tool_call>", "y")
    ]
    assert shown == [
        ("Hi <", "Hi"),
        ("b> S", " <b>"),
        ("TO", ""),
        ("NE <tool", " STONE"),
        ("s> ", " <tools>"),
        ("x<tool_call>", " x"),
        ("y", ""),
    ]
    bytes_of = CertainText(renderer, None, [], [])
    assert [bytes_of.add([token]) for token in TOKENIZER.encode("é", add_special_tokens=False)][-1] == "é"


@pytest.mark.slow
def test_of_200_random_conversations_the_stream_the_answer_and_the_row_have_the_same_ids():
    """Each conversation is held twice with one seed, streamed and not, in the format of each family."""
    numbers = random.Random(0)
    words = ["Hi", "12+30?", "é", "日本", "<b>", "a\n\nb", "🙂", "sure", " ok "]
    compared = 0
    for place, name in enumerate(NAMES):
        tokenizer = tiny_tokenizer(template=name)
        ids = {"eos_token_ids": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
        # Double precision: the two calls are batched with different others, and single precision's sums would differ.
        engine = TransformersEngine(tiny_model(tokenizer).double(), tokenizer=tokenizer, seed=place, **ids)
        talks = [[" ".join(numbers.choices(words, k=3)) for _ in range(numbers.randint(1, 3))] for _ in range(17)]
        with RecordingEndpoint(engine, tokenizer, params=SamplingParams(max_new_tokens=6), train="main") as endpoint:
            keys = [[endpoint.begin(seed=number) for number in range(17)] for _ in range(2)]
            seen = asyncio.run(hold_all(endpoint.base_url, keys, talks))
            for number in range(17):
                pair = [seen[stream][number] for stream in (0, 1)]
                assert pair[0] == pair[1], (name, talks[number])
                for own in (keys[0][number], keys[1][number]):
                    rows = endpoint.finish(own, 1.0)
                    masks = rows.get(("masks", "all_assistant_mask"), as_list=True)
                    rows_ids = rows.get(("tokens", "full"), as_list=True)
                    trained = [row[mask].tolist() for row, mask in zip(rows_ids, masks, strict=True)]
                    sampled = [token for _, own_ids in pair[0] for token in own_ids]
                    assert [token for row in trained for token in row] == sampled
                    compared += len(sampled)
    assert compared > 2000


async def hold_all(url, keys, talks):
    async with httpx.AsyncClient(timeout=120) as client:
        both = [
            asyncio.gather(*map(hold, [client] * 17, [url] * 17, own, talks, [stream] * 17))
            for stream, own in enumerate(keys)
        ]
        return await asyncio.gather(*both)


async def hold(client, url, key, questions, stream):
    """The texts and ids of a conversation."""
    messages, seen = [], []
    for question in questions:
        messages.append({"role": "user", "content": question})
        body = {"messages": messages, "stream": bool(stream), "return_token_ids": True}
        answer = await client.post(f"{url}/chat/completions", json=body, headers={"x-api-key": key})
        answer.raise_for_status()
        found = list(events(answer.text.splitlines())) if stream else [answer.json()]
        choices = [choice for event in found for choice in event["choices"]]
        texts = [choice.get("delta", choice.get("message")).get("content") or "" for choice in choices]
        seen.append(("".join(texts), [token for choice in choices for token in choice.get("token_ids") or ()]))
        messages.append({"role": "assistant", "content": seen[-1][0]})
    return seen
