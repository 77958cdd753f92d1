"""`RecordingEndpoint` with the real OpenAI client: what it is answered, and the rows that its calls become."""

import gc
import json
import random
import socket
import sys
import threading
from collections import Counter

import httpx
import pytest
import torch

from llmrl.endpoint import RecordingEndpoint
from llmrl.endpoint.calls import CallGraph
from llmrl.endpoint.chat import ChatRequest, answer_message
from llmrl.envs.llm.tool_calls import call_format
from llmrl.errors import ConfigError, DataError
from llmrl.modules.llm.conversation import TurnSampler
from llmrl.modules.llm.engines import SamplingParams, TransformersEngine
from llmrl.modules.llm.rendering import Renderer
from llmrl.testing import FakeEngine, tiny_model, tiny_tokenizer
from tests.support.processes import wait_until

openai = pytest.importorskip("openai", reason="the client that the endpoint is tested with")
TOKENIZER = tiny_tokenizer()
ADD = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
TOOLS = [{"type": "function", "function": ADD}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'


def ask(text):
    return {"role": "user", "content": text}


@pytest.fixture
def endpoint_of():
    opened = []

    def make(engine, **settings):
        opened.append(RecordingEndpoint(engine, settings.pop("tokenizer", TOKENIZER), **settings))
        return opened[-1]

    yield make
    for endpoint in opened:
        endpoint.close()


def client_of(endpoint, key, **options):
    return openai.OpenAI(base_url=endpoint.base_url, api_key=key, max_retries=0, **options)


def transformers_engine(seed=0):
    ids = {"eos_token_ids": TOKENIZER.eos_token_id, "pad_token_id": TOKENIZER.pad_token_id}
    return TransformersEngine(tiny_model(TOKENIZER), tokenizer=TOKENIZER, seed=seed, **ids)


def trained(rows):
    """The trained ids of each row, in order."""
    ids, masks = rows.get(("tokens", "full"), as_list=True), rows.get(("masks", "all_assistant_mask"), as_list=True)
    return [row[mask].tolist() for row, mask in zip(ids, masks, strict=True)]


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_is_one_row_of_exactly_the_sampled_ids(endpoint_of, stream):
    endpoint = endpoint_of(transformers_engine(), params=SamplingParams(max_new_tokens=12))
    key = endpoint.begin({"answer": 4}, group=7)
    client, messages, sampled, prompts = client_of(endpoint, key), [ask("2+2?")], [], []
    extra = {"return_token_ids": True}
    for turn in range(3):
        given = {"model": "m", "messages": messages, "logprobs": True, "extra_body": extra}
        if stream:
            content, ids = "", []
            for chunk in client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **given):
                if not chunk.choices:
                    assert chunk.usage.completion_tokens == len(ids)
                    continue
                if prompt := getattr(chunk, "prompt_token_ids", None):
                    prompts.append(prompt)
                content += chunk.choices[0].delta.content or ""
                ids += getattr(chunk.choices[0], "token_ids", None) or []
                reason = chunk.choices[0].finish_reason or "none"
            assert reason in ("stop", "length")
        else:
            answer = client.chat.completions.create(**given)
            content, ids = answer.choices[0].message.content, answer.choices[0].token_ids
            prompts.append(answer.prompt_token_ids)
            assert len(answer.choices[0].logprobs.content) == len(ids) == answer.usage.completion_tokens
        sampled.append(ids)
        messages = [*messages, {"role": "assistant", "content": content}, ask(f"and {turn}?")]
    rows = endpoint.finish(key, 0.5)
    assert rows.batch_size == (1,)
    assert trained(rows) == [[token for ids in sampled for token in ids]]
    [ids] = rows.get(("tokens", "full"), as_list=True)
    assert ids.tolist() == prompts[-1] + sampled[-1]
    for before, answer, after in zip(prompts, sampled, prompts[1:], strict=False):
        assert after[: len(before) + len(answer)] == before + answer
    assert rows["group_id"].tolist() == [7]
    assert rows.get("answer").tolist() == [4], "the columns of the data are those of the row"
    assert rows["next", "reward"].flatten().tolist() == [0.5]
    # The log-probs are those of the policy: scoring the row gives them again.
    [mask] = rows.get(("masks", "all_assistant_mask"), as_list=True)
    [scores] = transformers_engine().score([ids])
    [recorded] = rows.get(("log_probs", "full"), as_list=True)
    assert torch.allclose(recorded[mask], scores[mask], atol=1e-5)
    assert not recorded[~mask].any()


@pytest.mark.parametrize("text", ["One moment. ", ""])
def test_calls_of_tools_come_apart_from_the_text_and_the_next_prompt_has_the_sampled_ids(endpoint_of, text):
    sampled = text + CALL
    endpoint = endpoint_of(FakeEngine([sampled, "It is 4."], tokenizer=TOKENIZER))
    client = client_of(endpoint, key := endpoint.begin())
    given = {"model": "m", "tools": TOOLS}
    answer = client.chat.completions.create(messages=[ask("2+2?")], **given).choices[0]
    [call] = answer.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 2})
    assert (answer.message.content, answer.finish_reason) == (text.strip() or None, "tool_calls")
    repeated = answer.message.model_dump(exclude_none=True)  # as an agent sends it back: no content if it is null
    repeated["tool_calls"][0]["function"]["arguments"] = '{ "a":2 }'
    result = {"role": "tool", "content": "4", "tool_call_id": call.id}
    client.chat.completions.create(messages=[ask("2+2?"), repeated, result], **given)
    rows = endpoint.finish(key, 1.0)
    assert [TOKENIZER.decode(ids) for ids in trained(rows)] == [f"{sampled}<|im_end|>It is 4.<|im_end|>"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_forced_call_is_the_first_answer_that_has_it_and_is_not_trained(endpoint_of, choice, stream):
    other = CALL.replace("add", "sub")
    first = ["4.", other] if isinstance(choice, dict) else ["4."]
    endpoint = endpoint_of(FakeEngine([*first, CALL, "It is 4."], tokenizer=TOKENIZER))
    client = client_of(endpoint, key := endpoint.begin())
    tools = [*TOOLS, {"type": "function", "function": {**ADD, "name": "sub"}}]
    messages, said = [ask("2+2?")], []
    for forced in (choice, "auto"):
        given = {"messages": messages, "tools": tools, "tool_choice": forced, "stream": stream}
        answer = client.chat.completions.create(model="m", **given)
        if stream:
            pieces = [choice.delta for chunk in answer for choice in chunk.choices]
            calls = [call.model_dump() for piece in pieces for call in piece.tool_calls or ()]
            message = {"role": "assistant", "content": "".join(piece.content or "" for piece in pieces)}
            message |= {"tool_calls": calls} if calls else {}
        else:
            message = answer.choices[0].message.model_dump(exclude_none=True)
        said.append(message)
        messages = [*messages, message, {"role": "tool", "content": "4", "tool_call_id": "x"}]
    assert [[call["function"]["name"] for call in m.get("tool_calls", ())] for m in said] == [["add"], []]
    rollout = endpoint.rollout(key)
    rows = endpoint.finish(key, 1.0)
    assert [TOKENIZER.decode(ids) for ids in trained(rows)] == ["It is 4.<|im_end|>"]
    assert [call["why"] for call in rollout.record] == ["tool_choice demanded its calls", ""]
    assert endpoint.counters["not_trained/tool_choice"] == endpoint.counters["trained"] == 1


def test_a_forced_call_that_the_model_does_not_make_is_refused(endpoint_of):
    endpoint = endpoint_of(engine := FakeEngine(["4."], tokenizer=TOKENIZER))
    client = client_of(endpoint, endpoint.begin())
    with pytest.raises(openai.BadRequestError, match="none of 8 answers had the calls"):
        client.chat.completions.create(model="m", messages=[ask("2+2?")], tools=TOOLS, tool_choice="required")
    assert len(engine.prompts) == 8


def test_each_sampled_token_is_trained_once_whatever_an_agent_asks(endpoint_of):
    counter = iter(range(100))
    endpoint = endpoint_of(FakeEngine(lambda prompt: f"answer {next(counter)}", tokenizer=TOKENIZER), train="all")
    client = client_of(endpoint, key := endpoint.begin())

    def say(messages, **options):
        choices = client.chat.completions.create(model="m", messages=messages, **options).choices
        return [*messages, choices[-1].message.model_dump(exclude_none=True)]

    main = say([ask("task")])  # answer 0
    helper = say([{"role": "system", "content": "You help."}, ask("sub-task")])  # 1
    say([*main, ask("not good")])  # 2: tried again below, so never continued
    main = say([*main, ask("not good")])  # 3
    helper = say([*helper, ask("more")])  # 4
    main = say([*main, ask("go on")])  # 5
    say([*main, ask("left")])  # 6
    say([*main, ask("right")], n=2)  # 7 and 8: the client takes the last
    say([main[0], {"role": "assistant", "content": "edited"}, ask("compacted")])  # 9
    rollout = endpoint.rollout(key)
    by_choice = {}
    for choice in ("main", "longest", "all"):
        numbers = [[int(n.turn.message["content"].split()[1]) for n in path(leaf)] for leaf in rollout.leaves(choice)]
        by_choice[choice] = numbers
    assert by_choice["main"] == [[0, 3, 5, 6], [0, 3, 5, 8]]
    assert by_choice["longest"] == [[0, 3, 5, 6]]
    assert by_choice["all"] == [[0, 3, 5, 6], [0, 3, 5, 8], [1, 4], [9]]
    described = rollout.describe(rollout.leaves("main"), "main")
    assert [(call["parent"], call["row"]) for call in described] == [
        *[(-1, 0), (-1, -1), (0, -1), (0, 0), (1, -1), (3, 0), (5, 0), (5, -1), (5, 1), (-1, -1)]
    ]
    beside, other = "the client went on with another answer", "of another conversation, which train main leaves out"
    left_out = {place: call["why"] for place, call in enumerate(described) if call["row"] < 0}
    assert left_out == {1: other, 2: beside, 4: other, 7: beside, 9: other}
    assert [(call["question"], call["answer"]) for call in described[-2:]] == [
        ("right", "answer 8"),
        ("compacted", "answer 9"),
    ]
    rows = endpoint.finish(key, 1.0)
    said = [TOKENIZER.decode(ids).replace("<|im_end|>", " ").split() for ids in trained(rows)]
    trained_in = [[int(word) for word in row if word != "answer"] for row in said]
    assert trained_in == [[0, 3, 5, 6], [8], [1, 4], [9]]
    assert [[n for n, call in enumerate(rollout.record) if call["row"] == row] for row in range(4)] == trained_in
    assert rows["next", "done"].flatten().tolist() == [False, False, False, True]
    assert rows["next", "reward"].sum() == 1.0, "a rollout counts once, however many rows it has"
    assert rollout.counters["roots"] == 3
    assert rollout.counters["retries"] == 2


def path(leaf):
    return [*(path(leaf.parent) if leaf.parent else ()), leaf]


def test_two_agents_with_one_key_and_one_question_are_two_rows(endpoint_of):
    counter, both = iter(range(100)), threading.Barrier(2)
    engine = FakeEngine(lambda prompt: f"answer {next(counter)}", tokenizer=TOKENIZER)
    endpoint = endpoint_of(engine, train="all")
    key, seen = endpoint.begin(), [[], []]

    def agent(number):
        client, messages = client_of(endpoint, key), [ask("task")]
        for _ in range(4):
            both.wait(60)
            answer = client.chat.completions.create(model="m", messages=messages).choices[0].message
            seen[number].append(answer.content)
            messages += [answer.model_dump(exclude_none=True), ask("go on")]

    threads = [threading.Thread(target=agent, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    rows = [TOKENIZER.decode(ids) for ids in trained(endpoint.finish(key, 1.0))]
    assert sorted(rows) == sorted("".join(f"{text}<|im_end|>" for text in own) for own in seen)


def test_a_template_that_rewrites_earlier_turns_begins_another_row_of_the_same_path(endpoint_of):
    renderer = Renderer(TOKENIZER, chat_template_name="qwen3")
    endpoint = endpoint_of(FakeEngine(["<think>\nhm\n</think>\n\nyes", "no"], tokenizer=TOKENIZER), tokenizer=renderer)
    client = client_of(endpoint, key := endpoint.begin())
    first = client.chat.completions.create(model="m", messages=[ask("a")]).choices[0].message
    messages = [ask("a"), first.model_dump(exclude_none=True), ask("b")]
    client.chat.completions.create(model="m", messages=messages)
    assert endpoint.rollout(key).counters["rewritten"] == 1
    rows = endpoint.finish(key, 1.0)
    assert [TOKENIZER.decode(ids) for ids in trained(rows)] == [
        "<think>\nhm\n</think>\n\nyes<|im_end|>",
        "no<|im_end|>",
    ]


def test_a_request_continues_the_longest_conversation_that_it_repeats_and_of_several_answers_the_newest():
    draws, counter = random.Random(0), iter(range(1000))
    sampler = TurnSampler(
        Renderer(TOKENIZER), FakeEngine(lambda prompt: f"answer {next(counter)}", tokenizer=TOKENIZER)
    )
    graph, calls, depths = CallGraph(), [], []
    for _ in range(150):
        messages = [] if not calls or draws.random() < 0.1 else list(draws.choice(calls[-30:])[0])
        messages = messages[: draws.randint(1, len(messages))] if messages and draws.random() < 0.2 else messages
        if draws.random() < 0.1 and len(messages) > 2:
            messages[draws.randrange(len(messages))] = ask("edited")
        messages.append(ask(draws.choice(["a", "b"])))
        asked, [turn] = graph.sample(sampler, messages)
        graph.add(asked, turn, turn.message)
        repeated = [own for own in calls if [dict(message) for message in messages[: len(own[0])]] == own[0]]
        longest = max((len(own[0]) for own in repeated), default=0)
        expected = [own[1] for own in repeated if len(own[0]) == longest]
        assert turn.parent is (expected[-1] if expected else None)
        calls.append(([*messages, turn.message], turn))
        depths.append(len(turn.path()))
    assert max(depths) > 5
    assert depths.count(1) > 5


@pytest.mark.parametrize(("tools", "most"), [(None, 8), (TOOLS, 60)])
def test_twenty_more_turns_add_few_steps_of_python_to_a_turn(tools, most):
    """``most``: calls of functions. Of those with tools each message that is more than a role and a text is read."""
    answers = [CALL, "4"] if tools else ["4"]
    sampler = TurnSampler(Renderer(TOKENIZER), FakeEngine(answers, tokenizer=TOKENIZER))
    form = call_format("hermes", "")
    for _ in range(2):  # a template is tried on each shape of a conversation, once
        messages, counts, graph = [ask("2+2?")], [], CallGraph()
        for _ in range(24):
            body, steps = json.dumps({"messages": messages, "tools": tools}).encode(), Counter()
            sys.setprofile(lambda frame, event, argument, steps=steps: steps.update({event: 1}))
            request = ChatRequest.read(body)
            asked, [turn] = graph.sample(sampler, request.chat(), tools=request.offered)
            said = answer_message(turn, form, "x")
            graph.add(asked, turn, said)
            sys.setprofile(None)
            result = {"role": "tool", "tool_call_id": "x", "content": "4"} if said.get("tool_calls") else ask("More?")
            messages += [said, result]
            counts.append(steps["call"])
    assert len(turn.path()) == 24
    assert 200 < counts[-1] < counts[3] + most


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"respose_format": {}}, ["respose_format", "Did you mean 'response_format'?"]),
        ({"response_format": {"type": "json_object"}}, ["json_object", "constrained"]),
        ({"tool_choice": "required"}, ["tool_choice", "no tools"]),
        ({"tool_choice": {"type": "function", "function": {"name": "sub"}}, "tools": TOOLS}, ["tool_choice", "sub"]),
        ({"top_logprobs": 3}, ["top_logprobs"]),
        ({"temperature": -1}, ["temperature", "-1"]),
        ({"messages": []}, ["messages"]),
        ({"messages": [{**ask("hi"), "weight": 1}]}, ["messages[0].weight", "known: role, content"]),
        ({"messages": [{"role": "robot", "content": "x"}]}, ["messages[0].role", "robot"]),
        ({"messages": [ask([{"type": "image_url", "image_url": {"url": "x"}}])]}, ["only text", "image_url"]),
        ({"messages": [ask("x " * 500)]}, ["fewer than"]),
        ({"messages": [ask("x " * (25 << 20))]}, ["fewer than", "52428800 characters"]),  # not tokenised: minutes
    ],
)
def test_requests_that_cannot_be_answered_are_refused_with_the_field(endpoint_of, change, words):
    engine = FakeEngine(["a"], tokenizer=TOKENIZER)
    engine.context_length = 100
    endpoint = endpoint_of(engine)
    key = endpoint.begin()
    body = {"model": "m", "messages": [ask("hi")], **change}
    answer = httpx.post(f"{endpoint.base_url}/chat/completions", json=body, headers={"x-api-key": key})
    assert answer.status_code == 400
    for word in words:
        assert word in answer.json()["error"]["message"]
    assert endpoint.finish(key, 0.0) is None


def test_keys_bodies_and_distributions_of_others_are_refused_or_overridden(endpoint_of):
    endpoint = endpoint_of(FakeEngine(["a"], tokenizer=TOKENIZER), max_body=1000)
    key = endpoint.begin()
    with pytest.raises(DataError, match=r"RecordingEndpoint.begin.*'seed'"):
        endpoint.begin({"seed": 1})
    with pytest.raises(openai.AuthenticationError):
        client_of(endpoint, "sk-stranger").chat.completions.create(model="m", messages=[ask("hi")])
    with pytest.raises(openai.APIStatusError) as large:
        client_of(endpoint, key).chat.completions.create(model="m", messages=[ask("x" * 2000)])
    assert large.value.status_code == 413
    client = client_of(endpoint, key)
    client.chat.completions.create(model="m", messages=[ask("hi")], temperature=0.1, user="me", store=True)
    assert endpoint.counters["overridden/temperature"] == 1
    assert [model.id for model in client.models.list()] == ["llmrl"]
    assert endpoint._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY), "else each answer takes 40 ms more"
    endpoint.finish(key, 0.0)
    with pytest.raises(openai.AuthenticationError):
        client.chat.completions.create(model="m", messages=[ask("late")])


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel counts the segments of a connection")
def test_an_answer_is_one_segment_of_tcp(endpoint_of):
    endpoint = endpoint_of(FakeEngine(["a"], tokenizer=TOKENIZER))
    key, body = endpoint.begin(), json.dumps({"messages": [ask("hi")]})
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-api-key: {key}\r\ncontent-length: {len(body)}\r\n\r\n"
    with socket.create_connection(endpoint._socket.getsockname()) as client:
        client.settimeout(60)
        for number in (1, 2):
            client.sendall((head + body).encode())
            said = b""
            while not said.endswith(b"}}"):
                said += client.recv(1 << 16)
            assert json.loads(said.partition(b"\r\n\r\n")[2])["choices"][0]["message"]["content"] == "a"
            received = client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 160)[152:156]  # tcpi_data_segs_in
            assert int.from_bytes(received, sys.byteorder) == number


def test_a_client_that_is_given_up_still_closes_its_connection_before_that_ends(endpoint_of):
    """Regression: the garbage collector finalised younger objects first, and warned of connections left open."""

    class Connection:
        is_closed = False

        def __del__(self):
            seen.append(self.is_closed)

    class Client:
        def __del__(self):
            self.connection.is_closed = True

    def connect(client):
        client.connection = Connection()
        client.connection.owner = client

    seen, client, later = [], Client(), Client()
    gc.collect()
    connect(client)
    with endpoint_of(FakeEngine(["yes"], tokenizer=TOKENIZER)):
        connect(later)
    del client, later
    gc.collect()
    assert seen == [True, True]


def test_a_port_in_use_is_named(endpoint_of):
    port = int(endpoint_of(FakeEngine(["a"], tokenizer=TOKENIZER)).url.rpartition(":")[2])
    with pytest.raises(ConfigError, match=rf"127.0.0.1:{port}: .*in use.*choose another port"):
        endpoint_of(FakeEngine(["a"], tokenizer=TOKENIZER), port=port)


def test_a_request_that_is_repeated_gets_the_same_answer(endpoint_of):
    counter = iter(range(100))
    endpoint = endpoint_of(FakeEngine(lambda prompt: f"answer {next(counter)}", tokenizer=TOKENIZER))
    key = endpoint.begin()
    body = {"model": "m", "messages": [ask("hi")]}

    def post(**headers):
        headers = {"authorization": f"Bearer {key}", **headers}
        answer = httpx.post(f"{endpoint.base_url}/chat/completions", json=body, headers=headers)
        return answer.json()["choices"][0]["message"]["content"]

    assert [post(), post(**{"x-stainless-retry-count": "1"}), post()] == ["answer 0", "answer 0", "answer 1"]
    assert [post(**{"idempotency-key": "k"}) for _ in range(2)] == ["answer 2"] * 2
    assert endpoint.counters["replayed"] == 2


def test_many_rollouts_at_the_same_time_do_not_mix(endpoint_of):
    endpoint = endpoint_of(transformers_engine(), params=SamplingParams(max_new_tokens=6))
    found = {}

    def agent(number):
        key = endpoint.begin({"number": number}, group=number)
        client, messages = client_of(endpoint, key), [ask(f"task {number}")]
        for _ in range(2):
            answer = client.chat.completions.create(model="m", messages=messages, stream=number % 2 == 0)
            if number % 2 == 0:
                content = "".join(chunk.choices[0].delta.content or "" for chunk in answer)
            else:
                content = answer.choices[0].message.content
            messages = [*messages, {"role": "assistant", "content": content}, ask("more")]
        found[number] = endpoint.finish(key, float(number))

    threads = [threading.Thread(target=agent, args=(number,)) for number in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert sorted(found) == list(range(24))
    for number, rows in found.items():
        assert rows.batch_size == (1,)
        assert f"task {number}<" in rows.get(("text", "prompt"), as_list=True)[0]
        assert rows["next", "reward"].flatten().tolist() == [number]


def test_the_first_call_is_the_one_that_was_asked_first(endpoint_of):
    asked, release = threading.Event(), threading.Event()

    def slow_for_main(prompt):
        if "task" in TOKENIZER.decode(prompt):
            asked.set()
            assert release.wait(60)
            return "main"
        return "title"

    engine = FakeEngine(slow_for_main, tokenizer=TOKENIZER)
    engine.concurrent = True  # the endpoint does not join calls
    endpoint = endpoint_of(engine)
    client = client_of(endpoint, key := endpoint.begin())
    main = threading.Thread(target=client.chat.completions.create, kwargs={"model": "m", "messages": [ask("task")]})
    main.start()
    assert asked.wait(60)
    client.chat.completions.create(model="m", messages=[ask("A heading, please.")])
    release.set()
    main.join(60)
    assert [TOKENIZER.decode(ids) for ids in trained(endpoint.finish(key, 1.0))] == ["main<|im_end|>"]


def test_a_stream_is_kept_open_and_a_client_that_leaves_it_is_not_recorded(endpoint_of, monkeypatch):
    monkeypatch.setattr("llmrl.endpoint.server._KEEP_ALIVE_S", 0.05)
    release = threading.Event()
    endpoint = endpoint_of(FakeEngine(lambda prompt: "late" * release.wait(60), tokenizer=TOKENIZER))
    key = endpoint.begin()
    body = {"messages": [ask("hi")], "stream": True}
    with httpx.stream(
        "POST", f"{endpoint.base_url}/chat/completions", json=body, headers={"x-api-key": key}, timeout=60
    ) as stream:
        assert next(stream.iter_lines()) == ": waiting"
    wait_until(lambda: endpoint.counters["left"], 60)
    release.set()
    wait_until(lambda: endpoint.counters["abandoned"], 60)
    assert endpoint.finish(key, 1.0) is None


def test_a_client_that_leaves_ends_its_own_call_only(endpoint_of):
    waiting, release = threading.Event(), threading.Event()

    def slow(prompt):
        waiting.set()
        assert release.wait(60)
        return "late"

    endpoint = endpoint_of(FakeEngine(slow, tokenizer=TOKENIZER))
    key = endpoint.begin()
    with pytest.raises(openai.APITimeoutError):
        client_of(endpoint, key, timeout=0.5).chat.completions.create(model="m", messages=[ask("hi")])
    assert waiting.wait(60)
    wait_until(lambda: endpoint.counters["left"], 60)
    release.set()
    answer = client_of(endpoint, key).chat.completions.create(model="m", messages=[ask("again")])
    assert answer.choices[0].message.content == "late"
    assert [TOKENIZER.decode(ids) for ids in trained(endpoint.finish(key, 1.0))] == ["late<|im_end|>"]
    assert endpoint.counters["abandoned"] == 1


def test_requests_are_held_while_weights_arrive_and_then_answered(endpoint_of):
    engine, asked = FakeEngine(["a"], tokenizer=TOKENIZER), threading.Event()
    generate, said = engine.generate, []

    def noting(*arguments, **options):
        asked.set()
        return generate(*arguments, **options)

    engine.generate = noting
    endpoint = endpoint_of(engine)
    client = client_of(endpoint, key := endpoint.begin())

    def ask_once():
        said.append(client.chat.completions.create(model="m", messages=[ask("hi")]).choices[0].message.content)

    with endpoint.paused():
        thread = threading.Thread(target=ask_once)
        thread.start()
        wait_until(lambda: endpoint._sampling.num_waiting == 1, 60)
        engine.version = 5
        assert not asked.is_set()
    thread.join(60)
    assert said == ["a"]
    assert endpoint.finish(key, 1.0)["policy_version"].tolist() == [5]


def test_with_a_seed_answers_are_the_same_whatever_else_is_asked_at_the_same_time(endpoint_of):
    endpoint = endpoint_of(transformers_engine(), params=SamplingParams(max_new_tokens=8))
    keys = [endpoint.begin(seed=seed) for seed in (3, 4, 3)]
    for key in keys:
        for number in range(2):
            client_of(endpoint, key).chat.completions.create(model="m", messages=[ask(f"hi {number}")], n=2)
    first, other, again = (trained(endpoint.finish(key, 1.0)) for key in keys)
    assert first == again != other


def test_an_answer_that_ends_at_its_limit_says_so(endpoint_of):
    endpoint = endpoint_of(FakeEngine(["one two three four"], tokenizer=TOKENIZER))
    client = client_of(endpoint, endpoint.begin())
    answer = client.chat.completions.create(model="m", messages=[ask("hi")], max_completion_tokens=2)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 2
