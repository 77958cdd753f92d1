"""A language model as judge, behind a small local server of the OpenAI protocol."""

import contextlib
import json
import math
import re
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from llmrl.envs.llm import ChatEnv, DatasetChatEnv
from llmrl.envs.llm.rewards import JudgeReward
from llmrl.envs.llm.transforms import RewardFunction
from llmrl.errors import ConfigError, DeadlineError, RolloutError
from tests.support.processes import wait_until
from tests.support.refusals import refusals


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.requests.append({"path": self.path, **body})
            server.headers.append(dict(self.headers))
            number = len(server.requests)
        said = server.reply(body, number)
        if isinstance(said, str):
            said = (200, json.dumps({"choices": [{"message": {"content": said}}]}).encode())
        status, data, *headers = said
        with contextlib.suppress(OSError):  # the client has gone
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            for name, value in (headers[0] if headers else {}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

    def log_message(self, *args):
        pass


class Server(ThreadingHTTPServer):
    """Answers ``/v1/chat/completions`` by ``reply(request, number)``: text, or (status, bytes[, headers])."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests, self.headers, self.lock = [], [], threading.Lock()
        self.reply = lambda request, number: "SCORE: 7"
        self.release = threading.Event()  # what a slow reply waits for
        self.url = f"http://127.0.0.1:{self.server_port}/v1"


@pytest.fixture
def server(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=[0.01], daemon=True)
        thread.start()
        yield server
        server.release.set()
        server.shutdown()
    thread.join(timeout=10)


def judge(server, **options):
    return JudgeReward(server.url, "judge-7b", **{"backoff_s": 0.01, "timeout_s": 20.0, **options})


def test_the_judge_sees_request_and_response_and_its_score_is_scaled(server):
    assert judge(server)("Four.", query="2 + 2?") == 0.7
    (request,) = server.requests
    assert request["path"] == "/v1/chat/completions"
    assert (request["model"], request["temperature"]) == ("judge-7b", 0.0)
    (message,) = request["messages"]
    assert message["role"] == "user"
    assert "<request>\n2 + 2?\n</request>" in message["content"]
    assert "<response>\nFour.\n</response>" in message["content"]


def test_prompt_system_sampling_scale_and_key_can_be_chosen(server, monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret")
    server.reply = lambda request, number: "Thinking... GRADE=3 no, GRADE=4."
    reward = judge(
        server, prompt='{completion} ({answer}, {level}) as {{"a": 1}}', system="Be strict.", parse=r"grade=(\d)",
        scale=5, sampling={"temperature": 0.5, "seed": 1}, api_key_env="MY_KEY",
    )  # fmt: skip
    assert reward("{level}", answer="4", level=None) == 0.8
    (request,) = server.requests
    assert request["messages"] == [
        {"role": "system", "content": "Be strict."},
        {"role": "user", "content": '{level} (4, ) as {"a": 1}'},
    ]
    assert (request["temperature"], request["seed"], request["max_tokens"]) == (0.5, 1, 1024)
    assert server.headers[0]["Authorization"] == "Bearer secret"


def test_a_query_of_messages_is_shown_as_a_dialogue(server):
    judge(server)("4", query=[{"role": "system", "content": "S"}, {"role": "user", "content": "U"}])
    assert "system: S\n\nuser: U" in server.requests[0]["messages"][0]["content"]


SCORES = {"SCORE: 10": 1.0, "**Score:** 2.5": 0.25, "score 1, or rather\nSCORE: 3": 0.3, "Score = 0/10": 0.0}
SCORES["<think>SCORE: 9</think>Hm. SCORE: 1"] = 0.1


@pytest.mark.parametrize(("said", "score"), SCORES.items())
def test_the_last_score_outside_thinking_counts(server, said, score):
    assert judge(server).score(said) == pytest.approx(score)


@pytest.mark.parametrize("said", ["good", "SCORE: high", "<think>SCORE: 9</think>", "SCORE: 11", "SCORE: -1"])
def test_an_answer_without_a_usable_score_is_an_error_not_a_zero(server, said):
    with pytest.raises(RolloutError, match="JudgeReward"):
        judge(server).score(said)


def test_a_custom_parser_may_find_nothing(server):
    reward = judge(server, parse=lambda text: None if "unsure" in text else 5.0)
    assert (reward.score("unsure"), reward.score("x")) == (None, 0.5)


def rows(answered, reward, completions, **options):
    transform = RewardFunction(reward, **options)
    env = ChatEnv(batch_size=[len(completions)]).append_transform(transform)
    after = answered(env, completions, query=[f"q{n}" for n in range(len(completions))])["next"]
    return after["reward"].flatten().tolist(), transform


def test_a_batch_is_judged_concurrently_and_in_order(server, answered):
    together = threading.Barrier(4)  # passes only if four requests are there at once

    def reply(request, number):
        together.wait(timeout=20)
        return f"SCORE: {request['messages'][0]['content'][-1]}"

    server.reply = reply
    reward = judge(server, prompt="{query} {completion}", concurrency=4)
    values, transform = rows(answered, reward, ["1", "2", "3", "4"])
    assert values == pytest.approx([0.1, 0.2, 0.3, 0.4])
    transform.close()


RUBRIC = [{"criterion": "It is right.", "weight": 2}, "It is brief.", {"criterion": "It insults.", "weight": -1}]


def test_a_rubric_gives_the_weighted_sum_of_its_scores(server, answered):
    good = "1. fine\n1. SCORE: 2\n<think>2. SCORE: 9</think>\n**1. SCORE: 5**\n2) Score = 10\n3. SCORE: 1"
    said = {"good": good, "bad": "1. SCORE: 5\n3. SCORE: 1", "wild": "1. SCORE: 50\n2. SCORE: 1\n3. SCORE: 0"}
    server.reply = lambda request, number: next(
        s for n, s in said.items() if f"\n{n}\n" in str(request["messages"][0]["content"])
    )
    values, transform = rows(answered, judge(server, rubric=RUBRIC), ["good", "bad", "wild"])
    assert values[0] == pytest.approx(2 * 0.5 + 1.0 - 0.1)
    assert all(math.isnan(value) for value in values[1:]), "a criterion without a score is not a score of zero"
    assert transform.counters["errors"] == 2
    assert "1. It is right.\n2. It is brief.\n3. It insults." in server.requests[0]["messages"][0]["content"]


def test_a_group_is_compared_in_one_request_and_fails_as_a_whole(server, say):
    def reply(request, number):
        text = request["messages"][0]["content"]
        shown = re.findall(r"<response \d>\n(\w+)\n", text)
        return "SCORE: 1" if "hard" in text else "\n".join(f"{n}. SCORE: {said[-1]}" for n, said in enumerate(shown, 1))

    server.reply = reply
    transform = RewardFunction(judge(server, group=True))
    rows = [{"query": "easy"}, {"query": "hard"}]
    env = DatasetChatEnv(dataset=rows, num_envs=2, repeats=3, group_repeats=True, shuffle=False)
    td = env.append_transform(transform).reset()
    values = env.step(say(td, ["a1", "a2", "a3", "b1", "b2", "b3"]))["next", "reward"].flatten().tolist()
    assert values[:3] == pytest.approx([0.1, 0.2, 0.3])
    assert all(math.isnan(value) for value in values[3:])
    assert len(server.requests) == 2, "one for each group"
    assert transform.counters["errors"] == 3
    assert "must have a line" in transform.first_error
    transform.close()


def test_an_overloaded_server_is_asked_again_when_it_says_or_after_a_pause_that_grows(server, monkeypatch):
    replies = [(500, b"busy"), (429, b"", {"Retry-After": "1"}), "SCORE: 5"]
    server.reply = lambda request, number: replies[number - 1]
    reward, waited = judge(server), []
    monkeypatch.setattr(reward.api._closed, "wait", lambda seconds: waited.append(seconds) or False)
    assert reward("a", query="q") == 0.5
    assert 0.005 <= waited[0] <= 0.015  # backoff_s is 0.01
    assert waited[1:] == [1.0]
    assert reward.api.counters == {"requests": 3, "retries": 2}


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ((500, b"broken"), "500.*'broken'"),
        ((200, b"<html>not json</html>"), "choices.0..message.content: got '<html>not json"),
        ((200, b'{"choices": []}'), "choices.0..message.content"),
        ((200, b'{"choices": [{"message": {"content": null}}]}'), "choices.0..message.content"),
    ],
)
def test_a_server_that_stays_broken_costs_the_row_with_the_reason(server, answered, reply, message):
    server.reply = lambda request, number: reply if "bad" in request["messages"][0]["content"] else "SCORE: 5"
    values, transform = rows(answered, judge(server, retries=1), ["good", "bad"])
    assert values[0] == 0.5
    assert math.isnan(values[1]), "no score is not a score of zero"
    assert transform.counters["errors"] == 1
    with pytest.raises(RolloutError, match=message):
        transform.fn("bad", query="q")
    assert len(server.requests) == 1 + 2 + 2


def test_a_request_that_the_server_refuses_is_not_repeated(server):
    server.reply = lambda request, number: (404, b'{"error": "no model judge-7b"}')
    with pytest.raises(ConfigError, match=r"status 404.*no model judge-7b"):
        judge(server)("a", query="q")
    assert len(server.requests) == 1


def test_a_server_that_is_too_slow_is_given_up_at_the_deadline(server):
    def reply(request, number):
        server.release.wait(30)
        return "SCORE: 5"

    server.reply = reply
    with pytest.raises(DeadlineError, match=r"must answer within timeout_s = 0\.3"):
        judge(server, timeout_s=0.3, retries=1)("a", query="q")
    wait_until(lambda: len(server.requests) == 2)  # the handler may still be reading the last one


def test_a_server_that_drips_is_given_up_at_the_deadline(monkeypatch):
    stop = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))

    def drip():
        connection, _ = listener.accept()
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
        with contextlib.suppress(OSError):  # the client has gone
            while not stop.wait(0.05):
                connection.sendall(b" ")
        connection.close()

    thread = threading.Thread(target=drip, daemon=True)
    thread.start()
    monkeypatch.delenv("http_proxy", raising=False)
    reward = JudgeReward(f"http://127.0.0.1:{listener.getsockname()[1]}/v1", "m", timeout_s=0.5, retries=0)
    with pytest.raises(DeadlineError, match="within timeout_s"):
        reward("a", query="q")
    stop.set()
    thread.join(timeout=10)
    listener.close()


def test_a_server_that_is_not_there_is_an_error_with_its_address():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        reward = JudgeReward(f"http://127.0.0.1:{port}/v1", "m", retries=1, backoff_s=0.01)
        with pytest.raises(RolloutError, match=f"http://127.0.0.1:{port}/v1/chat/completions must answer: .*refused"):
            reward("a", query="q")


URL = "http://localhost/v1"
test_settings_that_cannot_work_are_refused = refusals(
    (ConfigError, "url must begin with http", lambda: JudgeReward("localhost:8000", "m")),
    (ConfigError, "prompt must have {completion}", lambda: JudgeReward(URL, "m", prompt="no place")),
    (ConfigError, "prompt must have {completions}", lambda: JudgeReward(URL, "m", prompt="{completion}", group=True)),
    (ConfigError, "prompt must have {rubric}", lambda: JudgeReward(URL, "m", prompt="{completion}", rubric=["x"])),
    (ConfigError, "give one of them", lambda: JudgeReward(URL, "m", group=True, rubric=["x"])),
    (ConfigError, "a criterion must be", lambda: JudgeReward(URL, "m", rubric=[{"criterion": "x", "wieght": 2}])),
    (ConfigError, "a criterion or more", lambda: JudgeReward(URL, "m", rubric=[])),
    (ConfigError, "parse .*regular expression", lambda: JudgeReward(URL, "m", parse="(")),
    (ConfigError, "must have a group", lambda: JudgeReward(URL, "m", parse=r"\d")),
    (ConfigError, "scale", lambda: JudgeReward(URL, "m", scale=0)),
    (ConfigError, "timeout_s must be positive", lambda: JudgeReward(URL, "m", timeout_s=0)),
)
