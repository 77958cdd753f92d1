"""The Responses and the Messages API with the clients that are made for them: the same rows as by chat completions."""

import json

import httpx
import pytest

from llmrl.endpoint import RecordingEndpoint
from llmrl.testing import FakeEngine, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CALL = 'One moment. <tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'


opened = []


@pytest.fixture(autouse=True)
def _closed():
    yield
    while opened:
        opened.pop().close()


class Responses:
    """OpenAI's client; what it says and what it is answered, in words of its own."""

    tools = ({"type": "function", "name": "add", "parameters": SCHEMA, "strict": True},)
    cut = "incomplete"

    def __init__(self, endpoint, key):
        self.module = pytest.importorskip("openai")
        self.client = self.module.OpenAI(base_url=endpoint.base_url, api_key=key, max_retries=0)
        opened.append(self.client)

    def ask(self, messages, stream=False, limit=None, **options):
        given = {"model": "m", "input": messages, "instructions": "Be brief.", "store": False, **options}
        given |= {"max_output_tokens": limit} if limit else {}
        if not stream:
            return self.client.responses.create(**given)
        with self.client.responses.stream(**given) as stream:
            events = list(stream)
        final = events[-1].response  # of response.completed or response.incomplete
        assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == final.output_text
        return final

    def read(self, answer):
        calls = [(item.name, json.loads(item.arguments)) for item in answer.output if item.type == "function_call"]
        return answer.output_text, calls, answer.status

    def after(self, answer, result):
        said = [item.model_dump(exclude_none=True) for item in answer.output]
        call = next(item.call_id for item in answer.output if item.type == "function_call")
        return [*said, {"type": "function_call_output", "call_id": call, "output": result}]


class Messages:
    """Anthropic's client."""

    tools = ({"name": "add", "input_schema": SCHEMA},)
    cut = "max_tokens"

    def __init__(self, endpoint, key):
        self.module = pytest.importorskip("anthropic")
        self.client = self.module.Anthropic(base_url=endpoint.url, api_key=key, max_retries=0)
        opened.append(self.client)

    def ask(self, messages, stream=False, limit=1000, **options):
        given = {"model": "m", "messages": messages, "max_tokens": limit, "system": "Be brief.", **options}
        if not stream:
            return self.client.messages.create(**given)
        with self.client.messages.stream(**given) as events:
            deltas, final = list(events.text_stream), events.get_final_message()
        assert "".join(deltas) == "".join(block.text for block in final.content if block.type == "text")
        return final

    def read(self, answer):
        calls = [(block.name, block.input) for block in answer.content if block.type == "tool_use"]
        return "".join(block.text for block in answer.content if block.type == "text"), calls, answer.stop_reason

    def after(self, answer, result):
        said = [block.model_dump(exclude_none=True) for block in answer.content]
        call = next(block.id for block in answer.content if block.type == "tool_use")
        content = [{"type": "tool_result", "tool_use_id": call, "content": result}]
        return [{"role": "assistant", "content": said}, {"role": "user", "content": content}]


KINDS = pytest.mark.parametrize("kind", [Responses, Messages])


def trained_texts(rows):
    ids, masks = rows.get(("tokens", "full"), as_list=True), rows.get(("masks", "all_assistant_mask"), as_list=True)
    return [TOKENIZER.decode(row[mask]) for row, mask in zip(ids, masks, strict=True)]


@KINDS
@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_with_a_tool_is_one_row_of_the_sampled_ids(kind, stream):
    engine = FakeEngine([CALL, "It is 4."], tokenizer=TOKENIZER, streams=stream)
    with RecordingEndpoint(engine, TOKENIZER) as endpoint:
        client = kind(endpoint, key := endpoint.begin())
        messages = [{"role": "user", "content": "2+2?"}]
        answer = client.ask(messages, stream, tools=list(kind.tools))
        text, calls, _ = client.read(answer)
        assert (text, calls) == ("One moment.", [("add", {"a": 2})])
        messages += client.after(answer, "4")
        if kind is Messages:  # what an agent counts before it asks; nothing is recorded
            counted = {"model": "m", "messages": messages, "system": "Be brief.", "tools": list(kind.tools)}
            count = client.client.messages.count_tokens(**counted).input_tokens
        last = client.ask(messages, stream, tools=list(kind.tools))
        assert kind is Responses or count == last.usage.input_tokens
        assert client.read(last)[:2] == ("It is 4.", [])
        assert last.usage.output_tokens > 1
        rows = endpoint.finish(key, 1.0)
    assert trained_texts(rows) == [f"{CALL}<|im_end|>It is 4.<|im_end|>"]
    [prompt] = rows.get(("text", "prompt"), as_list=True)
    assert "Be brief." in prompt


@KINDS
@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_are_apart_and_an_answer_at_its_limit_says_so(kind, stream):
    said = {"role": "assistant", "content": "yes", "reasoning_content": "hm"}  # as gpt-oss's template reads answers
    with RecordingEndpoint(FakeEngine(["a", "one two three"], tokenizer=TOKENIZER), TOKENIZER) as endpoint:
        endpoint.message = lambda turn: said
        client = kind(endpoint, endpoint.begin())
        answer = client.ask([{"role": "user", "content": "a"}], stream)
        assert client.read(answer)[0] == "yes"
        parts = answer.output if kind is Responses else answer.content
        assert "hm" in parts[0].model_dump_json()
        assert client.read(client.ask([{"role": "user", "content": "b"}], stream, limit=2))[2] == kind.cut


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (Responses, {"previous_response_id": "resp_1"}, ["previous_response_id", "send the whole conversation"]),
        (Responses, {"tools": [{"type": "web_search"}]}, ["tools", "web_search"]),
        (Responses, {"tool_choice": "required"}, ["tool_choice", "no tools"]),
        (Responses, {"text": {"format": {"type": "json_object"}}}, ["response_format", "constrained"]),
        (Responses, {"extra_body": {"instruction": "x"}}, ["Did you mean 'instructions'?"]),
        (Messages, {"tool_choice": {"type": "any"}}, ["tool_choice", "no tools"]),
        (Messages, {"tool_choice": {"type": "some"}}, ["tool_choice", "some"]),
        (Messages, {"tools": [{"type": "bash_20250124", "name": "bash"}]}, ["tools", "bash_20250124"]),
        (Messages, {"extra_body": {"top_k": 5}}, ["top_k is not a field"]),
        (Messages, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, ["only text", "image"]),
    ],
)
def test_what_cannot_be_sampled_is_refused_in_the_form_of_the_client(kind, options, words):
    with RecordingEndpoint(FakeEngine(["a"], tokenizer=TOKENIZER), TOKENIZER) as endpoint:
        client = kind(endpoint, key := endpoint.begin())
        with pytest.raises(client.module.BadRequestError) as refused:
            client.ask(**{"messages": [{"role": "user", "content": "hi"}], **options})
        for word in words:
            assert word in refused.value.message
        with pytest.raises(client.module.AuthenticationError):
            kind(endpoint, "sk-other").ask([{"role": "user", "content": "hi"}])
        assert endpoint.finish(key, 0.0) is None


def test_ids_are_answered_with_ids_and_a_prompt_that_begins_with_a_call_continues_it():
    engine = FakeEngine(["four", "eight", "other"], tokenizer=TOKENIZER)
    with RecordingEndpoint(engine, TOKENIZER, train="all", max_tokens=200) as endpoint:
        key = endpoint.begin()

        def post(ids, **fields):
            body = {"model": "m", "token_ids": ids, "sampling_params": {"logprobs": 1, "temperature": 1.0}, **fields}
            return httpx.post(f"{endpoint.url}/inference/v1/generate", json=body, headers={"x-api-key": key})

        first = TOKENIZER.encode("2+2?")
        sampled, prompts = [], [first]
        for more in ("4+4?", ""):
            answer = post(prompts[-1], return_token_ids=True, cache_salt="1").json()
            [choice] = answer["choices"]
            assert answer["prompt_token_ids"] == prompts[-1]
            assert [entry["token"] for entry in choice["logprobs"]["content"]] == [
                f"token_id:{token}" for token in choice["token_ids"]
            ]
            assert choice["finish_reason"] == "stop"
            sampled.append(choice["token_ids"])
            prompts.append(prompts[-1] + choice["token_ids"] + TOKENIZER.encode(more))
        post(TOKENIZER.encode("another task"))
        for fields, words in (
            ({"stream": True}, "stream"),
            ({"sampling_params": {"top_k": 5}}, "top_k"),
            ({"features": {"a": 1}}, "features"),
            ({"token_ids": first * 100}, "fewer than the 200 tokens"),
        ):
            refused = post(first, **fields) if "token_ids" not in fields else post(fields["token_ids"])
            assert refused.status_code == 400
            assert words in refused.json()["error"]["message"]
        [model] = httpx.get(f"{endpoint.base_url}/models").json()["data"]
        assert model["max_model_len"] == 200
        rows = endpoint.finish(key, 1.0)
    assert trained_texts(rows) == ["four<|im_end|>eight<|im_end|>", "other<|im_end|>"]
    [ids, _] = rows.get(("tokens", "full"), as_list=True)
    assert ids.tolist() == prompts[1] + sampled[1]
