"""The limits of an interpreter; measures and stops the processes of its sandbox from the host.

The host reads the sandbox's own /proc and sends signals through its entries, so that a reused process number cannot be
mistaken for another process.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from llmrl.errors import ConfigError, did_you_mean

_FIRST, _WORKER = "1", "2"  # the numbers in the sandbox: bubblewrap's own process, the interpreter
_INODE_KIB = 2  # kernel memory of an empty file
_FEW_DESCRIPTORS = 8  # a process with at most this many cannot hold much memory in sockets
_STOP_S, _LOOK_S = 1.0, 1e-9  # for all to stop; between two checks (the kernel rounds it up to 50 us)
_PAGE_KIB = mmap.PAGESIZE // 1024


@dataclass(frozen=True)
class Limits:
    """Upper bounds for one interpreter. Time is bounded by the deadline of each call.

    >>> Limits(memory_mib=256).processes
    64
    """

    memory_mib: int = 512  # address space of one process; plus disk_mib: memory of all processes together
    cpu_s: int = 60  # processor time of one process, over all calls of a conversation
    processes: int = 64  # processes and threads
    output_kib: int = 64  # kept from a call's output; code that writes 256 times as much is stopped
    file_mib: int = 16  # one file
    disk_mib: int = 64  # all files, plus 2 KiB for each; they are kept in memory

    def __post_init__(self) -> None:
        for field in fields(self):
            value, least = getattr(self, field.name), 64 if field.name == "memory_mib" else 1  # Python itself needs 64
            if type(value) is not int or value < least:
                raise ConfigError(f"Limits: {field.name} must be a whole number of at least {least}: got {value!r}.")

    @classmethod
    def of(cls, given: Limits | Mapping[str, int] | None) -> Limits:
        """The limits from an instance, or from a mapping with defaults for the rest. Raises ConfigError."""
        if isinstance(given, cls):
            return given
        known = [field.name for field in fields(cls)]
        for name in given or {}:
            if name not in known:
                raise ConfigError(f"Limits: {name!r} must be one of {', '.join(known)}.{did_you_mean(name, known)}")
        return cls(**(given or {}))


class Processes:
    """All processes in the namespace below ``first``, the host's number of bubblewrap's process.

    Must be made before the sandbox runs any code. Raises OSError if the host cannot see the processes.
    """

    def __init__(self, first: int):
        pid = str(first)
        while children := Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            pid = children[0]  # each process has one child; the last one is the interpreter
        self._proc = _open(f"/proc/{pid}/root/proc")
        self._files = _open(f"/proc/{pid}/root/tmp")
        self._worker = _open(_WORKER, self._proc)

    def close(self) -> None:
        """Closes the descriptors, which keep the namespace alive."""
        for descriptor in (self._proc, self._files, self._worker):
            os.close(descriptor)

    def excess(self, limits: Limits) -> str | None:
        """The limit that all processes together exceed, in words; None if there is none."""
        disk = os.fstatvfs(self._files)
        # The file system is in memory, and its size limit does not count the inodes of empty files.
        inodes_kib = (disk.f_files - disk.f_ffree) * _INODE_KIB
        if inodes_kib > limits.disk_mib << 10:
            return f"it made more than {(limits.disk_mib << 10) // _INODE_KIB} files"
        total_mib = limits.memory_mib + limits.disk_mib
        left_kib = (total_mib << 10) - inodes_kib - (disk.f_blocks - disk.f_bfree) * disk.f_frsize // 1024
        pids = self._pids()
        left_kib -= self._socket_kib(pids)
        # Resident sizes count shared pages once per process: quick to read, and never too small.
        if sum(map(self._resident_kib, pids)) <= left_kib or sum(map(self._proportional_kib, pids)) <= left_kib:
            return None
        return f"its processes, files and sockets took more than {total_mib} MiB of memory together"

    def stop(self) -> bool:
        """Waits until the interpreter has stopped itself and kills every other process; False after a second.

        The host does not stop the interpreter: if the host did so just before the interpreter stops itself, it would
        stop again after `resume`.
        """
        deadline = time.monotonic() + _STOP_S
        while True:
            state, threads = self._state(_WORKER)
            if state == "T" or self._ended(_WORKER):  # from here on it cannot start processes
                if state == "T" and threads == 1 and self._is_alone():  # the usual case: nothing needs to be listed
                    return True
                others = [pid for pid in self._pids() if pid not in (_FIRST, _WORKER) and not self._ended(pid)]
                if not others:
                    return True
                for pid in others:
                    with contextlib.suppress(OSError):
                        descriptor = _open(pid, self._proc)
                        self._signal(descriptor, signal.SIGKILL)
                        os.close(descriptor)
            if time.monotonic() > deadline:
                return False
            time.sleep(_LOOK_S)  # a busy wait would keep an interpreter on the same core from stopping

    def _is_alone(self) -> bool:
        """True if only the stopped interpreter and the first process, the ancestor of all others, are left."""
        # The order matters: a process whose parent ends between the two reads becomes a child of the first.
        return not self._children(_WORKER) and self._children(_FIRST) == [_WORKER]

    def _children(self, pid: str) -> list[str]:
        return self._read(pid, f"task/{pid}/children").split()

    def resume(self) -> None:
        """Lets the interpreter continue."""
        self._signal(self._worker, signal.SIGCONT)

    def _pids(self) -> list[str]:
        return [name for name in os.listdir(self._proc) if name.isdigit()]

    def _signal(self, descriptor: int, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, number)

    def _state(self, pid: str) -> tuple[str, int]:
        """The state letter of the process's first thread, and its number of threads."""
        fields = self._read(pid, "stat").rpartition(")")[2].split()
        return (fields[0], int(fields[17])) if fields else ("X", 0)

    def _ended(self, pid: str) -> bool:
        state, threads = self._state(pid)
        return state in "ZX" and threads <= 1

    def _resident_kib(self, pid: str) -> int:
        fields = self._read(pid, "statm").split()
        return int(fields[1]) * _PAGE_KIB if fields else 0

    def _proportional_kib(self, pid: str) -> int:
        for line in self._read(pid, "smaps_rollup").splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1])
        return self._resident_kib(pid)

    def _socket_kib(self, pids: list[str]) -> int:
        found = set()
        for pid in pids:
            with contextlib.suppress(OSError):
                folder = _open(f"{pid}/fd", self._proc)
                try:
                    names = os.listdir(folder)
                    for name in names if len(names) > _FEW_DESCRIPTORS else ():
                        with contextlib.suppress(OSError):
                            if (target := os.readlink(name, dir_fd=folder)).startswith("socket:"):
                                found.add(target)
                finally:
                    os.close(folder)
        # Each socket counts as full, at the default size, which the sandbox cannot raise (see `system_calls`).
        return len(found) * int(Path("/proc/sys/net/core/wmem_default").read_text()) // 1024 if found else 0

    def _read(self, pid: str, name: str) -> str:
        """The beginning of a process's file in /proc; empty if the process has ended."""
        try:
            descriptor = os.open(f"{pid}/{name}", os.O_RDONLY, dir_fd=self._proc)
        except OSError:
            return ""
        try:
            return os.read(descriptor, 4096).decode("utf-8", "replace")
        except OSError:
            return ""
        finally:
            os.close(descriptor)


def _open(path: str, folder: int | None = None) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY, dir_fd=folder)
