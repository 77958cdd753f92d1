"""Downloads from a server on this machine: progress of bytes, broken connections, checksums, what is kept."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

import numpy as np
import pytest
from huggingface_hub import constants

from llmrl.data.datasets import (
    D4RLExperienceReplay,
    OpenMLExperienceReplay,
    OpenXExperienceReplay,
    RobosetExperienceReplay,
    downloads,
)
from llmrl.data.datasets.downloads import LEDGER, RemoteFile, fetch, read_ledger, remove_downloads
from llmrl.errors import DataError
from tests.support import public_formats as formats

CONTENT = bytes(range(256)) * 4000


class Server(ThreadingHTTPServer):
    """Serves ``files`` with ranges; ``breaks`` is how many answers end after ``piece`` bytes."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.requests, self.breaks, self.piece = {}, [], 0, 100_000
        self.status = None
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        path = unquote(self.path.partition("?")[0])
        content = self.server.files.get(path)
        self.server.requests.append((path, self.headers.get("Range")))
        if content is None or self.server.status:
            return self.send_error(self.server.status or 404)
        tag = f'"{hashlib.md5(content).hexdigest()}"'
        start = 0
        if self.headers.get("Range") and self.headers.get("If-Range") == tag:
            start = int(self.headers["Range"].removeprefix("bytes=").rstrip("-"))
            if start >= len(content):
                return self.send_error(416)
        self.send_response(206 if start else 200)
        self.send_header("ETag", tag)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        body = content[start:]
        if self.server.breaks:
            self.server.breaks -= 1
            body = body[: self.server.piece]
        self.wfile.write(body)
        self.close_connection = True
        return None

    def log_message(self, *arguments):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(downloads, "PAUSE_S", 0.01)
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_broken_download_resumes_where_it_broke(server, tmp_path):
    server.files["/a.bin"] = CONTENT
    server.breaks = 3
    file = RemoteFile("a.bin", f"{server.url}/a.bin")
    (path,) = fetch("test", [file], tmp_path)
    assert path.read_bytes() == CONTENT
    assert [part for _, part in server.requests] == [None, "bytes=100000-", "bytes=200000-", "bytes=300000-"]
    assert read_ledger(tmp_path)["a.bin"]["sha256"] == hashlib.sha256(CONTENT).hexdigest()
    fetch("test", [file], tmp_path)
    assert len(server.requests) == 4  # what is complete is not asked for again


def test_a_server_that_sends_nothing_is_given_up_and_an_unknown_rest_is_not_continued(server, tmp_path):
    server.files["/a.bin"] = CONTENT
    server.breaks, server.piece = 100, 0
    file = RemoteFile("a.bin", f"{server.url}/a.bin")
    with pytest.raises(DataError, match=r"a\.bin .*broke after 0 of"):
        fetch("test", [file], tmp_path)
    assert len(server.requests) == downloads.ATTEMPTS
    server.breaks = 0
    (tmp_path / "b.bin.part").write_bytes(b"of another file")  # without a known validator it is started again
    server.files["/b.bin"] = CONTENT
    (path,) = fetch("test", [RemoteFile("b.bin", f"{server.url}/b.bin")], tmp_path)
    assert path.read_bytes() == CONTENT


def test_checksums_that_were_published_or_recorded_count_and_other_files_are_not_removed(server, tmp_path):
    server.files["/a.bin"] = CONTENT
    good = f"md5:{hashlib.md5(CONTENT).hexdigest()}"
    url = f"{server.url}/a.bin"
    fetch("test", [RemoteFile("inner/a.bin", url, good, len(CONTENT))], tmp_path)
    with pytest.raises(DataError, match=r"got sha256:.*expected sha256:00"):
        fetch("test", [RemoteFile("b.bin", url, "sha256:00")], tmp_path)
    with pytest.raises(DataError, match=r"got 1,024,000 bytes, expected 5"):
        fetch("test", [RemoteFile("b.bin", url, None, 5)], tmp_path)
    assert not list(tmp_path.glob("b.bin*"))
    (tmp_path / "mine.txt").write_text("mine")
    remove_downloads(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [LEDGER, "mine.txt"]
    server.files["/a.bin"] = CONTENT[:-1]
    with pytest.raises(DataError, match="downloaded the first time"):
        fetch("test", [RemoteFile("inner/a.bin", url)], tmp_path)


def test_an_address_that_is_wrong_is_not_tried_again_and_a_busy_server_is(server, tmp_path):
    with pytest.raises(DataError, match=r"nothing must be readable: HTTP Error 404"):
        fetch("test", [RemoteFile("a", f"{server.url}/nothing")], tmp_path)
    assert len(server.requests) == 1
    server.status = 503
    with pytest.raises(DataError, match="503"):
        fetch("test", [RemoteFile("a", f"{server.url}/nothing")], tmp_path)
    assert len(server.requests) == 1 + downloads.ATTEMPTS


# --- datasets ---
def test_a_dataset_is_downloaded_built_and_cleared_up(server, tmp_path):
    class Local(D4RLExperienceReplay):
        base_url = server.url

    written = formats.write_d4rl(tmp_path / "raw.hdf5", {"terminals": [9]})
    server.files["/gym_mujoco_v2/hopper_medium-v2.hdf5"] = (tmp_path / "raw.hdf5").read_bytes()
    server.breaks, server.piece = 1, 1000
    dataset = Local("hopper-medium-v2", root=tmp_path / "root")
    np.testing.assert_array_equal(dataset[:]["observation"], written["observations"])
    folder = dataset.data_path_root
    names = ["build.lock", "checkpoint.1", "checkpoint.current", "downloads"]
    assert sorted(path.name for path in folder.iterdir()) == names
    assert [path.name for path in (folder / "downloads").iterdir()] == [LEDGER]
    server.requests.clear()
    Local("hopper-medium-v2", root=tmp_path / "root")
    assert server.requests == []
    server.files.clear()
    with pytest.raises(DataError, match="404"):
        Local("hopper-medium-v2", root=tmp_path / "root", download="force")
    assert len(Local("hopper-medium-v2", root=tmp_path / "root")) == 10  # what was there still is
    dataset.delete()
    assert list((tmp_path / "root").iterdir()) == []


def test_openml_asks_for_the_address_and_the_checksum(server, tmp_path):
    class Local(OpenMLExperienceReplay):
        base_url = f"{server.url}/json/data"

    arff = formats.ARFF.encode()
    about = {"url": f"{server.url}/data/179.arff", "md5_checksum": hashlib.md5(arff).hexdigest()}
    server.files |= {"/json/data/179": json.dumps({"data_set_description": about}).encode(), "/data/179.arff": arff}
    assert len(Local("adult_num", 2, root=tmp_path)) == 3
    server.files["/data/179.arff"] = arff + b"\n"
    with pytest.raises(DataError, match=r"179\.arff .*published: got md5:"):
        Local("adult_onehot", 2, root=tmp_path)
    server.files["/json/data/24"] = b"{}"
    with pytest.raises(DataError, match=r"json/data/24"):
        Local("mushroom_num", 2, root=tmp_path)


@pytest.fixture
def hub(server, monkeypatch):
    """Lets the hub's own client ask the server of the test."""
    template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    for name, value in (("HF_HUB_OFFLINE", False), ("ENDPOINT", server.url), ("HUGGINGFACE_CO_URL_TEMPLATE", template)):
        monkeypatch.setattr(constants, name, value)

    def add(repository, folder, files):
        tree = []
        for name, content in files.items():
            checksum = hashlib.sha256(content).hexdigest()
            lfs = {"oid": checksum, "size": len(content), "pointerSize": 130}
            entry = {"type": "file", "oid": "0" * 40, "size": len(content), "path": f"{folder}/{name}", "lfs": lfs}
            tree.append(entry)
            server.files[f"/datasets/{repository}/resolve/main/{folder}/{name}"] = content
        server.files[f"/api/datasets/{repository}/tree/main/{folder}"] = json.dumps(tree).encode()

    return add


def test_files_of_the_hub_are_listed_with_their_checksums(server, hub, tmp_path):
    name = "FK1-v4(human)/human_demos_by_playdata"
    formats.write_roboset(tmp_path / "a.h5", [3])
    content = (tmp_path / "a.h5").read_bytes()
    hub("jdvakil/RoboSet_Sim", name, {"sub/b.h5": content, "a.h5": content, "notes.txt": b"hello"})
    dataset = RobosetExperienceReplay(name, root=tmp_path / "root")
    assert dataset[:]["seed"].tolist() == [0, 0, 0, 1, 1, 1]
    assert not any(path.endswith("notes.txt") for path, _ in server.requests)
    server.files[f"/datasets/jdvakil/RoboSet_Sim/resolve/main/{name}/a.h5"] = content[:-1] + b"x"
    with pytest.raises(DataError, match=r"must be what was published"):
        RobosetExperienceReplay(name, root=tmp_path / "other")
    with pytest.raises(DataError, match="on the hub must list its folder"):
        RobosetExperienceReplay("DAPG(human)/pen_v2d-v1", root=tmp_path / "other")


def test_a_stream_downloads_one_file_at_a_time_and_keeps_none(server, hub, tmp_path):
    files = {}
    for number, lengths in enumerate([[3, 4], [5]]):
        formats.write_openx(tmp_path / "a.tar", lengths)
        files[f"cmu_stretch_{number}.tar"] = (tmp_path / "a.tar").read_bytes()
    hub("jxu124/OpenX-Embodiment", "cmu_stretch", files)
    arguments = {"root": tmp_path / "root", "streaming": True, "shuffle": False}
    with pytest.raises(DataError, match="download must be True"):
        OpenXExperienceReplay("cmu_stretch", download=False, **arguments)
    assert not server.requests, "no request without permission"
    dataset = OpenXExperienceReplay("cmu_stretch", **arguments)
    stream = iter(dataset)
    assert [len(next(stream)) for _ in range(2)] == [3, 4]
    assert [path for path, _ in server.requests if path.endswith(".tar")] == [
        "/datasets/jxu124/OpenX-Embodiment/resolve/main/cmu_stretch/cmu_stretch_0.tar"
    ]
    assert [len(rows) for rows in stream] == [5]
    assert not (tmp_path / "root").exists()


def test_a_full_disk_is_told_and_the_next_call_goes_on(server, tmp_path, largest_file):
    server.files["/a.bin"] = CONTENT
    file = RemoteFile("a.bin", f"{server.url}/a.bin")
    with largest_file(50_000), pytest.raises(DataError, match=r"test: cannot write the download to .*: .*make room"):
        fetch("test", [file], tmp_path)
    assert not (tmp_path / "a.bin").exists()
    (path,) = fetch("test", [file], tmp_path)
    assert path.read_bytes() == CONTENT
    assert server.requests == [("/a.bin", None), ("/a.bin", "bytes=50000-")]
