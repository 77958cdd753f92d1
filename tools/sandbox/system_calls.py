"""The system calls that a sandbox refuses, as a seccomp filter that bubblewrap installs.

They are of three kinds: memory that no limit counts (System V segments and queues, files in memory), access to another
process or ways out of a stop (tracing, timers with a chosen signal), and kernel features that computing never needs and
that have the most bugs. These include all sockets except local ones, since some families belong to no network
namespace. A refused call fails as on a kernel without it.
"""

from __future__ import annotations

import errno
import os
import platform
import socket
import struct
from pathlib import Path

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
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "timer_create": (222, 107),
}
# name: its two numbers, the index of the argument to compare, the value, True if it must be equal, the error
_CONDITIONAL = {
    "socket": ((41, 198), 0, socket.AF_UNIX, True, errno.EAFNOSUPPORT),
    "socketpair": ((53, 199), 0, socket.AF_UNIX, True, errno.EAFNOSUPPORT),
    "setsockopt": ((54, 208), 2, 7, False, errno.EPERM),  # SO_SNDBUF: what a socket holds is memory
    "fcntl": ((72, 25), 1, 10, False, errno.EINVAL),  # F_SETSIG: could send SIGCONT
}
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # the column above, the kernel's AUDIT_ARCH
_X32 = 0x40000000  # x86_64 system calls with other numbers start here

_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000
# Offsets in the record that the filter reads; an argument has 8 bytes, low half first.
_ARCHITECTURE, _NUMBER, _ARGUMENTS = 4, 0, 16


def filter_pipe() -> int | None:
    """A pipe to read the filter from, to be closed by the caller; None if this machine has no filter."""
    if platform.machine() not in _MACHINES or not Path("/proc/sys/kernel/seccomp").is_dir():
        return None
    read, write = os.pipe()
    os.write(write, b"".join(struct.pack("=HBBI", *instruction) for instruction in _program(platform.machine())))
    os.close(write)
    return read


def _program(machine: str) -> list[tuple[int, int, int, int]]:
    """The BPF instructions: operation, number to skip if true, number to skip if false, operand."""
    column, architecture = _MACHINES[machine]
    refuse = (_RETURN, 0, 0, _REFUSE | errno.ENOSYS)
    program = [
        *((_LOAD, 0, 0, _ARCHITECTURE), (_EQUAL, 1, 0, architecture), refuse),  # 32-bit system calls
        *((_LOAD, 0, 0, _NUMBER), (_AT_LEAST, 0, 1, _X32), refuse),
    ]
    for numbers in _REFUSED.values():
        program += [(_EQUAL, 0, 1, numbers[column]), refuse]
    for numbers, argument, value, required, error in _CONDITIONAL.values():
        ends = [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _REFUSE | error)]
        program += [(_EQUAL, 0, 4, numbers[column]), (_LOAD, 0, 0, _ARGUMENTS + 8 * argument)]
        program += [(_EQUAL, 0, 1, value), *(ends if required else reversed(ends))]
    return [*program, (_RETURN, 0, 0, _ALLOW)]
