"""The system calls that code in a sandbox may not make, as the filter that bubblewrap installs (seccomp).

They are of two kinds: memory that no limit counts (System V segments and queues, files in memory), and parts of the
kernel that computing never needs and that faults are found in most. Each answers as a kernel that lacks it.
"""

from __future__ import annotations

import errno
import os
import platform
import struct
from pathlib import Path

__all__ = ["filter_pipe"]

# name: its number on x86_64, on aarch64
_REFUSED = {
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
}
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # the column above, the kernel's AUDIT_ARCH
_X32 = 0x40000000  # x86_64 calls by other numbers

_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.ENOSYS


def filter_pipe() -> int | None:
    """A pipe to read the filter from, to be closed by the caller; None where there is none for this machine."""
    if platform.machine() not in _MACHINES or not Path("/proc/sys/kernel/seccomp").is_dir():
        return None
    column, architecture = _MACHINES[platform.machine()]
    numbers = [row[column] for row in _REFUSED.values()]
    refuse = len(numbers) + 5  # the place of the last instruction
    program = [
        (_LOAD, 0, 0, 4),  # the architecture: a program may call as a 32-bit one does
        (_EQUAL, 0, refuse - 2, architecture),
        (_LOAD, 0, 0, 0),  # the number
        (_AT_LEAST, refuse - 4, 0, _X32),
        *((_EQUAL, refuse - 5 - place, 0, number) for place, number in enumerate(numbers)),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _REFUSE),
    ]
    read, write = os.pipe()
    os.write(write, b"".join(struct.pack("=HBBI", *instruction) for instruction in program))
    os.close(write)
    return read
