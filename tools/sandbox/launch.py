"""Starts an interpreter in a sandbox: the command line, the pipes, and the check that this machine supports it."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Literal, get_args

from llmrl.errors import ConfigError, MissingDependencyError, UnsupportedError, check_choice
from llmrl.tools.sandbox.limits import Limits
from llmrl.tools.sandbox.session import Session
from llmrl.tools.sandbox.system_calls import filter_pipe

Kind = Literal["bubblewrap", "subprocess"]

# Visible in a sandbox, read-only: programs, libraries and the interpreter. No home, no /etc, no /var, no data.
_SYSTEM = ["/usr/bin", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache", "/nix/store"]
_TOP = ("/bin", "/lib", "/lib32", "/lib64")  # usually links into /usr
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "2",  # each arena takes 64 MiB of the limited address space
}
# Run first, so that a sandbox is killed first if the machine runs out of memory: in the sandbox /proc is read-only.
_OOM_FIRST = '{ echo 1000 > /proc/self/oom_score_adj; } 2> /dev/null; exec "$0" "$@"'
# Run by root before the inner bubblewrap, so that the sandbox runs as an unused user.
_DROP_ROOT = (
    "import os, sys; user = int(sys.argv[1]); os.setgroups([]); os.setresgid(user, user, user); "
    "os.setresuid(user, user, user); os.execv(sys.argv[2], sys.argv[2:])"
)
_FIRST_USER, _NUM_USERS = 60100, 1000
_users = itertools.count()


class Sandbox:
    """Starts interpreters with restricted rights.

    ``"bubblewrap"``: separate user, process, network, IPC and host-name namespaces; a read-only file system with
    programs and the interpreter, and a private /tmp; an empty environment; no capabilities; only local sockets; no
    tracing, and no system calls that allocate memory which no limit counts (on x86_64 and aarch64). If this process is
    root, the sandbox runs as an unused uid. The memory of all processes, files and sockets together is checked 40 times
    a second. Between calls nothing runs. If the machine runs out of memory, a sandbox is killed first.
    It does not protect against kernel bugs; use of CPU and memory within the limits, and of memory beyond them for
    some hundredths of a second; reading files under /usr and beside the interpreter. As root without CAP_SYS_ADMIN the
    number of processes is not limited.

    ``"subprocess"``: an empty environment, a separate directory, the same limits, and nothing else. It prevents
    accidents. It does not stop code from reading your files, using the network, or starting processes that outlive it.

    ``python`` is an interpreter whose packages the code may use, for example of a virtual environment made for it.
    By default the code has only the standard library of the current interpreter.

    Raises   MissingDependencyError without bubblewrap, UnsupportedError if it cannot start; both name the remedy
    """

    def __init__(self, kind: Kind = "bubblewrap", limits: Limits | None = None, python: str | None = None):
        check_choice("Sandbox", "kind", kind, get_args(Kind))
        self.kind = kind
        self.limits = limits or Limits()
        self.python = os.path.abspath(python) if python else os.path.realpath(sys.executable)
        self._options = ["-I", "-B", *([] if python else ["-S"])]  # -S: without site-packages
        self._worker = resources.files("llmrl.tools.sandbox").joinpath("worker.py").read_text(encoding="utf-8")
        if kind == "bubblewrap":
            check_bubblewrap(self.python)

    def start(self) -> Session:
        """A new interpreter. Its process ends with the *thread* that called this, so call it from a long-lived thread.

        (If this process is killed in the millisecond in which bubblewrap sets up, an idle bwrap process that runs no
        code may be left behind.)
        """
        contained = self.kind == "bubblewrap"
        limits = {**asdict(self.limits), "strict": contained, "processes": self._num_processes()}
        rules = filter_pipe() if contained else None
        requests, answers, output, info = (os.pipe() for _ in range(4))  # each: read end, write end
        ours = (requests[1], answers[0], output[0], info[0])
        inherited = [requests[0], answers[1], info[1], *([] if rules is None else [rules])]
        folder: tempfile.TemporaryDirectory[str] | None = None
        try:
            if contained:
                command = bubblewrap_command(self.python, self.limits.disk_mib, info[1], rules)
                environment, cwd = _ENVIRONMENT, "/"
            else:
                folder = tempfile.TemporaryDirectory(prefix="llmrl-python-", ignore_cleanup_errors=True)
                command, cwd = [], folder.name
                environment = {**_ENVIRONMENT, "HOME": cwd, "TMPDIR": cwd}
            arguments = [str(requests[0]), str(answers[1]), json.dumps(limits), "contained" if contained else "plain"]
            process = subprocess.Popen(
                [*command, self.python, *self._options, "-c", self._worker, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output[1],
                stderr=output[1],
                pass_fds=inherited,
                env=environment,
                cwd=cwd,
                start_new_session=True,
            )
        except BaseException:
            for descriptor in ours:
                os.close(descriptor)
            if folder is not None:
                folder.cleanup()
            raise
        finally:
            # If copies stayed open here, the pipes would not close when the interpreter exits.
            for descriptor in (*inherited, output[1]):
                os.close(descriptor)
        return Session(process, ours, self.limits, folder)

    def _num_processes(self) -> int:
        """The process limit as the kernel counts it: per sandbox if it can, otherwise all processes of this user."""
        own = self.limits.processes + 2  # two for bubblewrap
        kernel = tuple(int(part) for part in re.findall(r"\d+", platform.release())[:2])
        if self.kind == "bubblewrap" and (_is_root() or kernel >= (5, 14)):
            return own
        others, user = 0, os.geteuid()
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it ended in the meantime
                others += len(os.listdir(folder / "task")) if folder.stat().st_uid == user else 0
        return own + others if others else 1 << 20  # not Linux: they cannot be counted, so they are not limited


@cache
def check_bubblewrap(python: str) -> None:
    """Runs a trivial program in a sandbox, once per interpreter, so that an unsuitable machine is detected early."""
    if sys.platform != "linux" or shutil.which("bwrap") is None:
        raise MissingDependencyError(
            "Sandbox: needs the program bwrap (bubblewrap, Linux only), which was not found; run scripts/setup, or "
            "install the package 'bubblewrap' with apt, dnf, pacman or apk. sandbox='subprocess' works without it, but "
            "gives the code the rights of this process."
        )
    rules = filter_pipe()
    command = [*bubblewrap_command(python, disk_mib=1, rules=rules), python, "-I", "-S", "-c", "print('started')"]
    try:
        done = subprocess.run(
            command,
            env=_ENVIRONMENT,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            pass_fds=[] if rules is None else [rules],
            timeout=30,
            cwd="/",
        )
        output = done.stderr.strip() or f"exit code {done.returncode}"
        works = done.stdout.strip() == "started"
    except subprocess.TimeoutExpired:
        works, output = False, "it did not end within 30 s"
    finally:
        if rules is not None:
            os.close(rules)
    if not works:
        raise UnsupportedError(
            f"Sandbox: bubblewrap must be able to start {python}: got: {output}. Usually user namespaces are off: "
            "in a container start it with --security-opt seccomp=unconfined (or --privileged); on Ubuntu 24.04 set "
            "sysctl kernel.apparmor_restrict_unprivileged_userns=0. sandbox='subprocess' works without them, but gives "
            "the code the rights of this process."
        )


def bubblewrap_command(python: str, disk_mib: int, info: int | None = None, rules: int | None = None) -> list[str]:
    """The command line up to the interpreter. Root runs two bubblewraps: the outer one gives an unused uid read access.

    ``info`` is the descriptor on which bubblewrap reports the first process of the sandbox; ``rules`` is the one from
    which it reads the system call filter.
    """
    bwrap, options = _bubblewrap()
    view = _view(python)
    command = ["/bin/sh", "-c", _OOM_FIRST, bwrap, "--die-with-parent"]
    command += [] if info is None else ["--info-fd", str(info)]
    if _is_root():
        # Each sandbox gets another user, because the kernel counts processes per user.
        user = _FIRST_USER + next(_users) % _NUM_USERS
        # The outer one has a process namespace too: when its first process ends, all others end, whatever their user.
        command += ["--unshare-pid", "--dir", "/tmp", *view, "--dev-bind", "/dev", "/dev", "--bind", "/proc", "/proc"]
        command += ["--", python, "-I", "-S", "-c", _DROP_ROOT, str(user), bwrap, "--die-with-parent"]
    command += ["--new-session", "--unshare-user", "--unshare-all", "--cap-drop", "ALL"]
    command += ["--uid", "1000", "--gid", "1000", "--hostname", "sandbox"]
    command += [] if rules is None else ["--seccomp", str(rules)]
    command += ["--disable-userns"] if "--disable-userns" in options else []
    command += ["--size", str(disk_mib << 20)] if "--size" in options else []
    command += ["--tmpfs", "/tmp", *view, "--proc", "/proc", "--dev", "/dev"]  # the interpreter may be below /tmp
    command += [part for folder in ("/dev", "/proc", "/") for part in ("--remount-ro", folder)]
    command += ["--chdir", "/tmp", "--"]
    return command


@cache
def _bubblewrap() -> tuple[str, frozenset[str]]:
    """The path of bwrap, and the options that its version supports."""
    path = os.path.realpath(shutil.which("bwrap") or "bwrap")
    text = subprocess.run([path, "--help"], capture_output=True, text=True, timeout=30).stdout
    return path, frozenset(re.findall(r"--[a-z-]+", text))


@cache
def _view(python: str) -> tuple[str, ...]:
    """The arguments that bind programs, libraries and the interpreter at their usual paths."""
    code = "import json, sys; print(json.dumps([sys.prefix, sys.base_prefix, sys.exec_prefix]))"
    try:
        done = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, timeout=30, check=True)
        prefixes = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ConfigError(f"Sandbox: python must be a Python interpreter: got {python!r}: {error}.") from None
    inside = [f"{prefix}/{name}" for prefix in prefixes for name in ("bin", "lib", "lib64", "pyvenv.cfg")]
    paths = [path for path in dict.fromkeys([*_SYSTEM, *inside, _bubblewrap()[0], python]) if os.path.exists(path)]
    arguments: list[str] = []
    for path in _TOP:
        if os.path.islink(path):
            arguments += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            paths.append(path)
    # Parent folders are listed explicitly, because only the owner can access those that bubblewrap adds by itself.
    folders = sorted({str(parent) for path in paths for parent in Path(path).parents} - {"/"})
    for folder in folders:
        if not any(folder == path or folder.startswith(f"{path}/") for path in paths):
            arguments += ["--dir", folder]
    for path in sorted(paths):
        if not any(path.startswith(f"{other}/") for other in paths):
            arguments += ["--ro-bind", path, path]
    return tuple(arguments)


@cache
def _is_root() -> bool:
    """True if this process may become another user: CAP_SETGID, CAP_SETUID and CAP_SYS_ADMIN."""
    status = Path("/proc/self/status").read_text()
    effective = int(re.search(r"CapEff:\s*(\w+)", status)[1], 16)  # type: ignore[index]
    return os.geteuid() == 0 and all(effective >> number & 1 for number in (6, 7, 21))
