"""`llmrl watch`: who gets an answer, and what is in it."""

from __future__ import annotations

import http.client
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading

import pytest

import llmrl.report.watch as module
from llmrl.report.watch import ReportServer
from tests.support.runs import evaluation, make_run


@pytest.fixture
def server(tmp_path):
    run = make_run(tmp_path / "runs" / "try1", 3)
    (run.path / "checkpoints").mkdir()
    made = ReportServer(run.path)
    threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


def ask(server, path, host=None, method="GET"):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.putrequest(method, path, skip_host=True)
    connection.putheader("Host", host or f"127.0.0.1:{server.server_port}")
    connection.endheaders()
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer, text


def test_the_page_and_its_numbers_are_served_under_the_token(server):
    answer, text = ask(server, f"/{server.token}/")
    assert answer.status == 200
    assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
    assert 'data-live="yes"' in text
    assert "connect-src 'self'" in text
    answer, text = ask(server, f"/{server.token}/data", host=f"localhost:{server.server_port}")
    assert answer.status == 200
    assert json.loads(text)["report"]["title"] == "try1"
    assert (answer.headers["Cache-Control"], answer.headers["X-Content-Type-Options"]) == ("no-store", "nosniff")
    assert not (server.run_dir / "report.html").exists(), "nothing is written"


HIDDEN = ("/", "/x/", "/{token}x/", "/{token}", "/{token}/metrics.jsonl", "/{token}/../../etc/passwd")
HIDDEN += ("/{token}//data", "/{token}/data/x", "/{token}/%64ata", "/\x80/", "/data", "//data")


@pytest.mark.parametrize("path", HIDDEN)
def test_nothing_else_is_reachable(server, path):
    path = path.format(token=server.token)
    if not path.isascii():
        with pytest.raises((UnicodeEncodeError, http.client.InvalidURL)):
            ask(server, path)
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=30) as raw:
            raw.sendall(f"GET {path} HTTP/1.0\r\nHost: 127.0.0.1:{server.server_port}\r\n\r\n".encode("latin-1"))
            assert b" 404 " in raw.recv(100)
    else:
        assert ask(server, path)[0].status == 404


FOREIGN = ("evil.test", "evil.test:{port}", "127.0.0.1", "127.0.0.1:1", "127.0.0.1.x.test:{port}")


@pytest.mark.parametrize("host", FOREIGN)
def test_another_host_name_is_refused_even_with_the_token(server, host):
    assert ask(server, f"/{server.token}/data", host=host.format(port=server.server_port))[0].status == 403


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_it_can_only_be_read(server, method):
    assert ask(server, f"/{server.token}/data", method=method)[0].status == 501


def test_new_steps_appear_and_a_damaged_file_is_said_until_it_is_whole_again(server, monkeypatch):
    monkeypatch.setattr(module, "SHARE", math.inf)
    metrics = server.run_dir / "metrics.jsonl"
    whole = metrics.read_text()
    metrics.write_text(whole + json.dumps({"step": 4, **evaluation(0.8)}) + "\n" + '{"step": 5, "rew')
    card = json.loads(ask(server, f"/{server.token}/data")[1])["report"]["cards"][0]
    assert card["value"] == "0.5 → 0.8"
    metrics.write_text("damaged\n" + whole)
    answer, text = ask(server, f"/{server.token}/data")
    assert answer.status == 503
    assert "metrics.jsonl:1" in text
    metrics.write_text(whole)
    assert ask(server, f"/{server.token}/data")[0].status == 200


def test_files_that_change_all_the_time_are_read_for_a_small_share_of_it(server):
    before = ask(server, f"/{server.token}/data")[1]
    with (server.run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 4, **evaluation(0.8)}) + "\n")
    server._next = {"report": math.inf, "rollouts": 0.0}
    assert ask(server, f"/{server.token}/data")[1] == before
    server._next["report"] = 0.0
    assert ask(server, f"/{server.token}/data")[1] != before


def test_every_server_has_a_token_of_its_own_on_this_machine_alone(server, tmp_path):
    with ReportServer(server.run_dir) as other:
        assert other.token != server.token
        assert len(other.token) >= 20
        assert other.server_address[0] == "127.0.0.1"


def test_a_port_in_use_is_one_line_with_what_to_do(server, run_llmrl, monkeypatch):
    monkeypatch.setattr(os, "nice", lambda by: 0)
    watch, port = ("watch", server.run_dir, "--port"), server.server_port
    run_llmrl(*watch, port, code=2, words=[f"port {port} is in use; choose another with --port"])
    run_llmrl(*watch, "99999", code=2, words=["port 99999 cannot be used"])
    run_llmrl("watch", "no-run", code=2)


def test_the_command_prints_its_address_and_ends_with_ctrl_c(tmp_path):
    run = make_run(tmp_path / "a", 2)
    command = [sys.executable, "-m", "llmrl.commands.cli", "watch", str(run.path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        url = process.stdout.readline().split()[-1]
        process.stdout.readline()
        connection = http.client.HTTPConnection(url.split("/")[2], timeout=30)
        connection.request("GET", f"/{url.split('/')[3]}/data")
        assert json.loads(connection.getresponse().read())["report"]["title"] == "a"
        connection.close()
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 0
        assert process.stdout.read() == "watch     ended\n"
    finally:
        process.kill()
        process.communicate()
