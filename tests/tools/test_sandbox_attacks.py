"""Code that wants out: to the host's files, network, processes and privileges, or to the pipes of its own answer.

Each test runs it for real and looks at the host afterwards; `attempt` prints "no" where a call is refused.
"""

import errno
import os
import platform
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.processes import processes_in
from tests.support.sandbox import SECRET, namespace_of

ROOT = Path(__file__).parent.parent.parent


def test_secrets_in_the_environment_are_not_visible(run):
    result = run("""
import glob, os
print(dict(os.environ))
for path in glob.glob('/proc/*/environ'):
    print(path, open(path, 'rb').read())
""")
    assert "/proc/1/environ" in result.output
    assert SECRET not in result.output
    assert set(eval(result.output.splitlines()[0])) <= {
        *("PATH", "HOME", "LANG", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MALLOC_ARENA_MAX", "PWD")
    }


def test_files_of_the_host_are_not_there(run, tmp_path):
    (tmp_path / "secret.txt").write_text(SECRET)
    paths = ["/etc/shadow", "/etc/passwd", "/etc/hostname", "/var/log", str(tmp_path / "secret.txt"), str(ROOT)]
    paths += [str(Path.home() / name) for name in (".ssh", ".netrc", ".cache", ".bashrc")]
    result = run(f"""
import os
for path in {paths!r}:
    print(os.path.exists(path))
for top in ('/etc', '/root', '/home', '/work', '/mnt', '/var', '/srv', '/opt'):
    for folder, _, files in os.walk(top):
        if 'lib' not in folder and 'bin' not in folder:
            print('file', *files)
""")
    lines = result.output.splitlines()
    assert lines[: len(paths)] == ["False"] * len(paths)
    assert {word for line in lines[len(paths) :] for word in line.split()} <= {"file", "ld.so.cache"}


NO = "no\n"
ATTACKS = {  # what the code wants -> what it is to print, and the code
    "to write outside of /tmp": (
        NO * 10,
        """
import os
folders = '/', '/usr', '/usr/lib', '/etc', '/dev', '/dev/shm', '/proc/sys/kernel', os.path.dirname(os.__file__)
for path in (*(folder + '/written' for folder in folders), '/proc/sys/kernel/core_pattern', '/proc/sysrq-trigger'):
    attempt(lambda path: open(path, 'w').write('0'), path)
""",
    ),
    "to follow links and /proc out of the sandbox": (
        NO * 10,
        """
import os
os.symlink('/etc/shadow', '/tmp/link')
os.symlink('/proc/1/root', '/tmp/root')
for path in ('/tmp/link', '/tmp/root/etc/shadow', '/proc/1/root/etc/shadow', '/proc/1/cwd/etc/shadow',
             '/proc/self/root/etc/passwd', '/proc/1/root/work', '/proc/1/mem', '/proc/kcore', '/dev/mem', '/dev/kmsg'):
    attempt(lambda path: open(path, 'rb').read(1), path)
for pid in (1, os.getppid()):
    for name in os.listdir(f'/proc/{pid}/fd') if os.access(f'/proc/{pid}/fd', os.R_OK) else ():
        target = os.readlink(f'/proc/{pid}/fd/{name}')
        if not target.startswith(('pipe:', '/dev/null', 'anon_inode:')):
            print('descriptor', target)
""",
    ),
    # Regression: the code could lower its score, and outlive the trainer when memory runs out.
    "to lower its score for the killer of processes": (
        NO * 10,
        """
scores = '/proc/self/oom_score_adj', '/proc/1/oom_score_adj'
for path in (*scores, *scores, '/proc/self/oom_adj'):
    for value in ('0', '-1000'):
        attempt(lambda path, value: open(path, 'w').write(value), path, value)
assert [open(path).read() for path in scores] == ['1000\\n'] * 2
""",
    ),
    "privileges": (
        "0000000000000000 1\n-1 -1\n-1 -1\nno\nno more memory\n",
        """
import ctypes, os, re, resource
libc = ctypes.CDLL(None, use_errno=True)
status = open('/proc/self/status').read()
print(re.search(r'CapEff:\\s*(\\w+)', status)[1], re.search(r'NoNewPrivs:\\s*(\\w+)', status)[1])
CLONE_NEWUSER, CLONE_NEWNS = 0x10000000, 0x20000
print(libc.unshare(CLONE_NEWUSER), libc.unshare(CLONE_NEWNS))
print(libc.mount(b'none', b'/tmp', b'tmpfs', 0, None), libc.chroot(b'/tmp'))
attempt(os.setuid, 0)
try:
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
except ValueError:
    print('no more memory')
""",
    ),
    # A timer or a descriptor can send its owner any signal, a tracer can keep one from it.
    "to go on by itself while it is stopped": (
        "-1 ENOSYS\n" * 4 + NO,
        f"""
import ctypes, errno, fcntl
libc = ctypes.CDLL(None, use_errno=True)
for number in {(222, 101, 310, 311) if platform.machine() == "x86_64" else (107, 117, 270, 271)}:
    print(libc.syscall(number, 0, 0, 0, 0, 0, 0), errno.errorcode[ctypes.get_errno()])
attempt(fcntl.fcntl, 1, 10, 18)  # F_SETSIG, SIGCONT
""",
    ),
    # Regression: System V segments and files in memory held gigabytes beside a limit of 512 MiB, beyond the call.
    "memory that does not count": (
        "-1 ENOSYS\n" * 3 + NO,
        """
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
for call, *arguments in ((libc.shmget, 0, 200 << 20, 0o1600), (libc.msgget, 0, 0o1600), (libc.semget, 0, 1, 0o1600)):
    print(call(*arguments), errno.errorcode[ctypes.get_errno()])
attempt(os.memfd_create, 'hoard')
""",
    ),
    "files without end, in one and in many": (
        f"{errno.EFBIG} 16\n{errno.ENOSPC}\n",
        """
import os
def write(name, mib):
    try:
        with open(name, 'wb') as file:
            for _ in range(mib):
                file.write(bytes(1 << 20))
        return 'wrote'
    except OSError as error:
        return error.errno
print(write('/tmp/large', 17), os.path.getsize('/tmp/large') >> 20)
print([write(f'/tmp/part{number}', 15) for number in range(6)][-1])
""",
    ),
    # Regression: AF_VSOCK, which no network namespace holds, reached the host of a virtual machine.
    "any socket but a local one": (
        "{<AddressFamily.AF_UNIX: 1>}\n",
        """
import asyncio, socket
opened = set()
for family in range(64):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET):
        for make in (socket.socket, socket.socketpair):
            try:
                opened.add(socket.AddressFamily(family) if make(family, kind) else None)
            except OSError as error:
                assert family == socket.AF_UNIX or error.errno == 97, (family, error)  # EAFNOSUPPORT
asyncio.run(asyncio.sleep(0))
print(opened)
""",
    ),
    "a descriptor but its own and the two of the protocol": (
        "/dev/null\n" + "pipe\n" * 4,
        """
import os
for name in sorted(os.listdir('/proc/self/fd'), key=int):
    if os.path.islink(f'/proc/self/fd/{name}'):  # that of the listing is gone
        print(os.readlink(f'/proc/self/fd/{name}').partition(':')[0])
""",
    ),
}


@pytest.mark.parametrize(("output", "code"), ATTACKS.values(), ids=ATTACKS)
def test_what_the_code_wants_is_refused(run, output, code):
    result = run(code)
    assert (result.output, result.error) == (output, None)


def test_the_network_cannot_be_reached(run):
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        local.bind("\0llmrl-sandbox-test")  # an abstract name, which no file system hides
        local.listen()
        result = run(f"""
import socket
def connect(family, address):
    client = socket.socket(family)
    client.settimeout(2)
    client.connect(address)
attempt(connect, socket.AF_INET, ('127.0.0.1', {server.getsockname()[1]}))
attempt(connect, socket.AF_INET, ('1.1.1.1', 53))
attempt(connect, socket.AF_UNIX, chr(0) + 'llmrl-sandbox-test')
attempt(socket.getaddrinfo, 'example.com', 80)
""")
        for listening in (server, local):
            listening.setblocking(False)
            with pytest.raises(BlockingIOError):
                listening.accept()
    assert result.output == "no\n" * 4


def test_processes_of_the_host_cannot_be_signalled(run):
    with subprocess.Popen(["sleep", "60"]) as bystander:
        result = run(f"""
import os, signal
attempt(os.kill, {bystander.pid}, signal.SIGKILL)
attempt(os.kill, {os.getpid()}, signal.SIGKILL)
try:
    os.kill(1, signal.SIGKILL)
    os.kill(-1, signal.SIGKILL)
except ProcessLookupError:
    pass
print('still here')
""")
        assert bystander.poll() is None
        bystander.kill()
    assert result.output == "no\nno\nstill here\n"


def test_files_in_tmp_are_private(run):
    name = f"/tmp/llmrl-sandbox-{os.getpid()}"
    assert run(f"open('{name}', 'w').write('mine'); print(open('{name}').read())").output == "mine\n"
    code = f"import os; print(os.path.exists('{name}'), os.listdir('/tmp'))"
    assert run(code, conversation="bystander").output == "False []\n"
    assert not Path(name).exists()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the machine code is that of x86_64")
def test_calls_in_the_manner_of_32_bit_programs_are_refused(run):
    result = run("""
import ctypes, mmap
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(bytes.fromhex('53b814000000cd805bc3'))  # push rbx; mov eax, 20 (getpid); int 0x80; pop rbx; ret
address = ctypes.addressof(ctypes.c_char.from_buffer(page))
print(ctypes.CFUNCTYPE(ctypes.c_int)(address)())
""")
    assert result.output == "-38\n" or "crashed" in result.error  # a kernel without them


def busy_ticks(namespace: str) -> list[int]:
    """The processor time of its processes so far, as the kernel counts it."""
    stats = [Path(f"/proc/{pid}/stat").read_text().split() for pid in processes_in(namespace)]
    return [int(part) for stat in stats for part in stat[13:15]]


def test_nothing_runs_between_calls_and_threads_go_on_in_the_next(run):
    """Regression: a thread used up a core after the answer, as did children where the code replaced os.kill."""
    namespace = namespace_of(run)
    result = run("""
import os, threading, time
count = 0
def burn():
    global count
    while True:
        count += 1
threading.Thread(target=burn, daemon=True).start()
os.kill = lambda *arguments: None
if os.fork() == 0:
    os.setsid()
    while True:
        if os.fork() == 0:
            time.sleep(0.01)
            os._exit(0)
        time.sleep(0.02)
""")
    assert result.error is None
    assert len(processes_in(namespace)) == 2  # the first process and the interpreter
    before = busy_ticks(namespace)
    time.sleep(0.2)
    assert busy_ticks(namespace) == before
    code = "before = count\nwhile count == before: time.sleep(0.01)\nprint('it went on')"
    assert run(code).output == "it went on\n"


def writes_everywhere(data: str) -> str:
    return f"""
import os
for name in os.listdir('/proc/self/fd'):
    if int(name) > 2:
        try:
            os.write(int(name), {data})
        except OSError:
            pass
"""


GARBAGE = "the interpreter's answer could not be read"


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (writes_everywhere("b'garbage' * 100"), GARBAGE),
        (writes_everywhere("bytes(60000)"), GARBAGE),
        (writes_everywhere("bytes(1 << 20)"), GARBAGE),  # larger than what is read of an answer
        (writes_everywhere("b'[]\\n'"), GARBAGE),
        (writes_everywhere("""b'{"id": "x", "error": null}\\n'"""), GARBAGE),
        (writes_everywhere("b'[' * 50000 + b'\\n'"), GARBAGE),
        ("import os; os.closerange(3, 256)", None),
        ("import os; os.closerange(0, 256)", None),
        ("import os; os._exit(0)", None),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", None),
        ("import ctypes; ctypes.string_at(0)", None),
        ("import json, os; json.dumps = os.write = None; import builtins; builtins.__dict__.clear()", None),
    ],
)
def test_code_that_spoils_its_answer_or_its_interpreter_has_an_error_alone(run, code, error):
    result = run(code)
    if error is not None:
        assert (result.error, result.lost_after) == (error, True)
    else:
        assert result.status in ("ok", "error")
        run("1")
    assert run("6 * 7").output == "42\n"


def test_a_well_forged_answer_does_not_shift_later_answers(run):
    forged = run("""
import json, os, sys
frame = sys._getframe()
while 'request' not in frame.f_locals:
    frame = frame.f_back
data = json.dumps({'id': frame.f_locals['request']['id'], 'error': None}).encode()
os.write(frame.f_locals['replies'], data + b'\\n')
print('forged')
""")
    assert forged.status in ("ok", "error")  # its own answer, which it may spoil
    answers = [run(f"print({number})") for number in range(3)]
    assert all(answer.output == f"{n}\n" for n, answer in enumerate(answers) if answer.status == "ok")
    assert [answer.status for answer in answers[1:]] == ["ok", "ok"]


def test_spoiling_the_request_pipe_ends_the_interpreter_and_the_next_call_has_another(run):
    run("import os; [os.set_blocking(n, False) for n in range(3, 256) if os.path.exists(f'/proc/self/fd/{n}')]")
    assert [run("6 * 7").output for _ in range(20)] == ["42\n"] * 20, "the request is there first"
    run(
        "import fcntl\nfor n in range(3, 256):\n"
        "    if os.path.exists(f'/proc/self/fd/{n}') and fcntl.fcntl(n, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:\n"
        "        os.dup2(os.open(os.devnull, os.O_RDONLY), n)"
    )
    result = run("6 * 7")
    assert (result.status, result.lost_after) == ("error", True)
    assert result.error.startswith("the interpreter ended")
    assert run("6 * 7").output == "42\n"


def test_threads_that_print_beside_later_calls_do_not_end_the_interpreter(run):
    """A thread inside ``print`` holds no reference to the stream of its call."""
    code = (
        "import threading\nkept = 1\ndef go():\n    while True:\n        print('x')\n"
        "for _ in range(3):\n    threading.Thread(target=go, daemon=True).start()"
    )
    run(code)
    for _ in range(5):
        assert run("print('mine', kept)").error is None
