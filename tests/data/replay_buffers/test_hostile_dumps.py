"""Dumps and shared folders of an attacker: with right checksums, and files that run code when unpickled."""

import hashlib
import io
import json
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, TensorDict, tensorclass
from torch.utils import _pytree as pytree

from llmrl.data.replay_buffers import (
    H5StorageCheckpointer,
    LazyMemmapStorage,
    ListStorage,
    ReplayBuffer,
    SamplerWithoutReplacement,
    StorageEnsemble,
)
from llmrl.data.replay_buffers.checkpointers.base import default_for
from llmrl.data.replay_buffers.directory import MANIFEST, _own_digest, current_directory, write_manifest
from llmrl.errors import CheckpointError
from tests.support.buffers import Counting, holding


@tensorclass
class Answer:
    ids: torch.Tensor
    source: Any


class Payload:
    """Unpickled, it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def buffer_of(*rows: Any) -> ReplayBuffer:
    buffer = holding(list(rows), ListStorage(4), sampler=SamplerWithoutReplacement(), transform=Counting())
    return buffer


def reseal(folder: Path) -> None:
    """Rewrites the checksums of all manifests, inner ones first."""
    for file in sorted(folder.rglob(MANIFEST), key=lambda file: -len(file.parts)):
        content = json.loads(file.read_text())
        kind, number = content.pop("format"), content.pop("format_version")
        for name in ("files", "checksum", "llmrl"):
            del content[name]
        write_manifest(file.parent, kind, number, content)


def edit(folder: Path, change: Callable[[Any], Any]) -> None:
    """Changes every dict of the manifest of the rows."""
    file = folder / "storage" / MANIFEST

    def walk(node: Any) -> Any:
        if isinstance(node, dict):
            change(node)
        for entry in node.values() if isinstance(node, dict) else node if isinstance(node, list) else []:
            walk(entry)
        return node

    file.write_text(json.dumps(walk(json.loads(file.read_text()))))


def replace_state(folder: Path, name: str, content: bytes) -> None:
    assert (folder / name).exists()
    (folder / name).write_bytes(content)


def point_to(folder: Path, tag: str, content: bytes) -> None:
    """Lets every value of this tag refer to bytes in a file of its own."""
    (folder / "storage" / "planted.memmap").write_bytes(content)
    found = []

    def change(node: dict[str, Any]) -> None:
        if tag in node:
            found.append(node)
            node[tag] = ["planted.memmap", "uint8", [len(content)], 0]

    edit(folder, change)
    assert found


def array_of(payload: Payload) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.array([payload], dtype=object), allow_pickle=True)
    return buffer.getvalue()


PLACES = {
    "transforms": lambda folder, content, payload: replace_state(folder, "transform.t", content),
    "sampler": lambda folder, content, payload: replace_state(folder, "sampler/state.pt", content),
    "writer": lambda folder, content, payload: replace_state(folder, "writer/state.pt", content),
    "values": lambda folder, content, payload: point_to(folder, "object", content),
    "array": lambda folder, content, payload: point_to(folder, "array", array_of(payload)),
}
HOW = {"pickle": pickle.dumps, "torch": lambda value: (torch.save(value, buffer := io.BytesIO()), buffer.getvalue())[1]}


def refuse(buffer: Any, path: Path, ran: Path, match: str = "must") -> None:
    before = pytree.tree_map(str, buffer.state_dict())
    with pytest.raises(CheckpointError, match=match):
        buffer.loads(path)
    assert not ran.exists()
    assert pytree.tree_map(str, buffer.state_dict()) == before


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("place", PLACES)
def test_nothing_that_a_dump_holds_is_executed(place, how, tmp_path):
    ran, dump = tmp_path / "ran", tmp_path / "dump"
    row = {"z": 1j, "numpy": np.arange(3), "answer": Answer(torch.ones(2), source=torch.Size([1]))}
    buffer_of(row, row).dumps(dump)
    payload = Payload(ran)
    PLACES[place](current_directory(dump), HOW[how]([payload]), payload)
    reseal(current_directory(dump))
    refuse(buffer_of("mine"), dump, ran)


def dumped_to_hdf5(row: Any, dump: Path) -> ListStorage:
    storage = ListStorage(4)
    storage.checkpointer = H5StorageCheckpointer(checkpoint_file="rows.h5")
    storage.set(slice(0, 1), [row])
    with pytest.warns(UserWarning, match="stored as they are"):
        storage.dumps(dump)
    return storage


def test_nothing_that_an_hdf5_file_holds_is_executed(tmp_path):
    h5py = pytest.importorskip("h5py")
    ran, dump = tmp_path / "ran", tmp_path / "dump"
    storage = dumped_to_hdf5(1j, dump)
    content = HOW["torch"]([Payload(ran)])
    folder = current_directory(dump)
    manifest = json.loads((folder / MANIFEST).read_text())
    (node,) = manifest["rows"]["list"]
    name, _, shape = node["object"]
    shape[:] = [len(content)]
    (folder / MANIFEST).write_text(json.dumps(manifest))
    with h5py.File(folder / "rows.h5", "a") as file:
        del file[name]
        file[name] = np.frombuffer(content, dtype=np.uint8)
    reseal(folder)
    refuse(storage, dump, ran)


def test_nothing_that_an_ensemble_of_storages_holds_is_executed(tmp_path):
    def ensemble() -> StorageEnsemble:
        members = StorageEnsemble(ListStorage(2), transforms=[Counting()])
        members.checkpointer = default_for(members)
        members.storages[0].set(slice(0, 1), ["a"])
        return members

    ran, dump = tmp_path / "ran", tmp_path / "dump"
    ensemble().dumps(dump)
    replace_state(current_directory(dump), "transforms.pt", HOW["torch"]([Payload(ran)]))
    reseal(current_directory(dump))
    refuse(ensemble(), dump, ran)


def test_nothing_that_a_shared_folder_holds_is_executed(tmp_path):
    ran = tmp_path / "ran"
    storage = LazyMemmapStorage(4, scratch_dir=tmp_path / "own")
    other = pickle.loads(pickle.dumps(storage))
    storage.set(slice(0, 2), TensorDict(a=torch.ones(2), batch_size=[2]))
    (schema,) = (tmp_path / "own").glob("*schema*")
    schema.write_bytes(HOW["torch"]([Payload(ran)]))
    with pytest.raises(CheckpointError, match="must be its schema"):
        other[:]
    assert not ran.exists()


def test_a_name_in_a_dump_imports_no_foreign_module(tmp_path, monkeypatch):
    ran, dump = tmp_path / "ran", tmp_path / "dump"
    buffer_of(Answer(torch.ones(2), source=None)).dumps(dump)
    (tmp_path / "planted.py").write_text(f"import os\nos.mkdir({str(ran)!r})\n")
    monkeypatch.syspath_prepend(tmp_path)
    foreign = ("planted:Answer", "os:system", "os:path.join")
    for name in (*foreign, "llmrl.data.replay_buffers:ReplayBuffer", "llmrl.nowhere:Answer", "llmrl.data:Nowhere"):
        edit(current_directory(dump), lambda node, name=name: node.update({"class": name}) if "class" in node else None)
        reseal(current_directory(dump))
        refuse(buffer_of("mine"), dump, ran, match=f"{name}.*(before loading|load another one)")
    assert "planted" not in sys.modules


def rename_file(folder: Path, outside: Path) -> None:
    edit(folder, lambda node: node.update(tensors=[str(outside), *node["tensors"][1:]]) if "tensors" in node else None)
    reseal(folder)


def list_file(folder: Path, outside: Path) -> None:
    """The checksums vouch for the file too."""
    rename_file(folder, outside)
    for where in (folder / "storage", folder):
        manifest = json.loads((where / MANIFEST).read_text())
        for name in manifest["files"]:
            digest = hashlib.sha256((where / name).read_bytes()).hexdigest()
            manifest["files"][name] = {"bytes": (where / name).stat().st_size, "sha256": digest}
        if where.name == "storage":
            digest = hashlib.sha256(outside.read_bytes()).hexdigest()
            manifest["files"][str(outside)] = {"bytes": outside.stat().st_size, "sha256": digest}
        manifest["checksum"] = _own_digest(manifest)
        (where / MANIFEST).write_text(json.dumps(manifest))


def link_file(folder: Path, outside: Path) -> None:
    (file,) = (folder / "storage").glob("*.memmap")
    file.unlink()
    file.symlink_to(outside)
    reseal(folder)


def link_state(folder: Path, outside: Path) -> None:
    (folder / "sampler" / "state.pt").rename(outside)
    (folder / "sampler" / "state.pt").symlink_to(outside)
    reseal(folder)


def link_part(folder: Path, outside: Path) -> None:
    outside.unlink()
    (folder / "sampler").rename(outside)
    (folder / "sampler").symlink_to(outside)


@pytest.mark.parametrize("name", [rename_file, list_file, link_file, link_state, link_part])
def test_a_file_outside_of_the_dump_is_not_read(name, tmp_path):
    dump, outside = tmp_path / "dump", tmp_path / "outside"
    buffer_of(torch.ones(3)).dumps(dump)
    outside.write_bytes(bytes(12))
    name(current_directory(dump), outside)
    refuse(buffer_of("mine"), dump, tmp_path / "ran", match="must|outside")


@pytest.mark.parametrize("kind", ["link", "external data", "virtual data"])
def test_an_hdf5_file_that_leads_to_another_file_is_not_followed(kind, tmp_path):
    h5py = pytest.importorskip("h5py")
    dump, outside = tmp_path / "dump", tmp_path / "outside.h5"
    storage = dumped_to_hdf5(torch.ones(3), dump)
    folder = current_directory(dump)
    name = json.loads((folder / MANIFEST).read_text())["rows"]["tensors"][0]
    with h5py.File(outside, "w") as file:
        file["secret"] = np.zeros(3, dtype=np.float32)
    with h5py.File(folder / "rows.h5", "a") as file:
        del file[name]
        if kind == "link":
            file[name] = h5py.ExternalLink(str(outside), "secret")
        elif kind == "external data":
            file.create_dataset(name, (3,), "f4", external=[(str(outside), 0, 12)])
        else:
            layout = h5py.VirtualLayout((3,), "f4")
            layout[:] = h5py.VirtualSource(str(outside), "secret", shape=(3,))
            file.create_virtual_dataset(name, layout)
    reseal(folder)
    refuse(storage, dump, tmp_path / "ran", match="must lie in this file")


@pytest.mark.parametrize(
    ("tag", "change"),
    [
        ("columns", lambda node: node["columns"].pop()),
        ("tensors", lambda node: node.update({"eval": node.pop("tensors")})),
        ("tensors", lambda node: node["tensors"].__setitem__(2, [10**6])),
    ],
    ids=["cut off", "unknown tag", "too long"],
)
def test_a_manifest_that_dumps_does_not_write_loads_nothing(tag, change, tmp_path):
    buffer_of(Answer(torch.ones(2), source=None), torch.ones(3)).dumps(tmp_path)
    edit(current_directory(tmp_path), lambda node: change(node) if tag in node else None)
    reseal(current_directory(tmp_path))
    refuse(buffer_of("mine"), tmp_path, tmp_path / "ran")


def test_a_transform_or_a_field_that_is_not_data_is_refused_when_it_is_dumped(tmp_path):
    buffer = buffer_of("mine")
    buffer.dumps(tmp_path)
    buffer.transforms[0].seen = Counting()
    with pytest.raises(CheckpointError, match=r"transform\.t.*buffers\.Counting"):
        buffer.dumps(tmp_path)
    with pytest.raises(CheckpointError, match=r"buffers\.Counting"):
        buffer_of(TensorDict(a=NonTensorData(Counting()))).dumps(tmp_path)
    other = buffer_of("another")
    other.loads(tmp_path)
    assert (other.transforms[0].seen, other[:]) == (0, ["mine"])
