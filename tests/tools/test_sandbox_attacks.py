"""Code that wants out, or wants everything. Each test runs it for real and looks at the host afterwards."""

import errno
import os
import platform
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from llmrl.errors import DeadlineError, MissingDependencyError, UnsupportedError
from llmrl.tools.sandbox import Execution, InterpreterPool, Limits, Sandbox

ROOT = Path(__file__).parent.parent.parent
SECRET = "a-secret-of-the-host-7351"


def sandbox(**limits: int) -> Sandbox:
    try:
        return Sandbox("bubblewrap", Limits(**limits))
    except (MissingDependencyError, UnsupportedError) as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def pool():
    os.environ["SANDBOX_TEST_SECRET"] = SECRET
    made = InterpreterPool(sandbox(), spare=2)
    yield made
    made.close()
    del os.environ["SANDBOX_TEST_SECRET"]


@pytest.fixture
def run(pool, request):
    """Runs code in an interpreter of this test; that of somebody else must not notice."""
    deadline = time.monotonic() + 30
    pool.run(f"mine = {SECRET!r}", conversation="somebody else", deadline=deadline)

    def run(code: str, timeout_s: float = 20.0, conversation: str = request.node.name) -> Execution:
        return pool.run(code, conversation=conversation, deadline=time.monotonic() + timeout_s)

    yield run
    assert run("print(mine)", conversation="somebody else").output == f"{SECRET}\n"
    pool.end(request.node.name)


def namespace_of(run) -> str:
    return run("import os; print(os.readlink('/proc/self/ns/pid'))").output.strip()


def processes_in(namespace: str) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(folder / "ns" / "pid") == namespace and "State:\tZ" not in (folder / "status").read_text():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def wait_until_empty(namespace: str, timeout_s: float = 5.0, but: int = 0) -> None:
    deadline = time.monotonic() + timeout_s
    while len(left := processes_in(namespace)) > but:
        assert time.monotonic() < deadline, f"processes {left} are still there"
        time.sleep(0.01)


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


def test_nothing_outside_of_tmp_can_be_written(run):
    result = run("""
import os, sys
for folder in ('/', '/usr', '/usr/lib', '/etc', '/dev', '/dev/shm', '/proc/sys/kernel', os.path.dirname(os.__file__)):
    try:
        open(folder + '/written', 'w')
        print('wrote', folder)
    except OSError as error:
        print('no')
for path in ('/proc/sys/kernel/core_pattern', '/proc/sysrq-trigger'):
    try:
        open(path, 'w').write('0')
        print('wrote', path)
    except OSError as error:
        print('no')
""")
    assert result.output == "no\n" * 10


def test_the_network_cannot_be_reached(run):
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        local.bind("\0llmrl-sandbox-test")  # an abstract name, which no file system hides
        local.listen()
        result = run(f"""
import socket
for family, address in ((socket.AF_INET, ('127.0.0.1', {server.getsockname()[1]})), (socket.AF_INET, ('1.1.1.1', 53)),
                        (socket.AF_UNIX, chr(0) + 'llmrl-sandbox-test')):
    try:
        client = socket.socket(family)
        client.settimeout(2)
        client.connect(address)
        print('connected', address)
    except OSError as error:
        print('no')
try:
    socket.getaddrinfo('example.com', 80)
    print('resolved')
except OSError:
    print('no')
""")
        for listening in (server, local):
            listening.setblocking(False)
            with pytest.raises(BlockingIOError):
                listening.accept()
    assert result.output == "no\n" * 4


def test_a_fork_bomb_is_bounded_and_leaves_nothing(run):
    namespace = namespace_of(run)
    counted = []
    done = threading.Event()

    def count() -> None:
        while not done.wait(0.1):
            counted.append(len(processes_in(namespace)))

    counter = threading.Thread(target=count)
    counter.start()
    result = run(
        """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
""",
        timeout_s=0.7,
    )
    done.set()
    counter.join()
    assert result.status == "timeout"
    assert 2 < max(counted) <= Limits().processes + 4
    wait_until_empty(namespace)


def test_processes_and_threads_beyond_the_limit_are_refused(run):
    result = run("""
import os, signal, threading, time
children = 0
try:
    while children < 1000:
        if os.fork() == 0:
            time.sleep(100)
            os._exit(0)
        children += 1
except OSError as error:
    print(children, type(error).__name__)
""")
    count, name = result.output.split()
    assert 32 < int(count) <= Limits().processes
    assert name == "BlockingIOError"
    result = run("""
threads, stop = 0, threading.Event()
try:
    while threads < 1000:
        threading.Thread(target=stop.wait, daemon=True).start()
        threads += 1
except RuntimeError as error:
    print(threads, error)
stop.set()
""")
    assert 8 < int(result.output.split()[0]) <= Limits().processes
    assert "can't start new thread" in result.output


def test_output_without_end_is_stopped_and_its_beginning_kept(run):
    started = time.monotonic()
    result = run("while True: print('x' * 1000)", timeout_s=15.0)
    assert time.monotonic() - started < 10
    assert result.error == "stopped: it wrote more than 16 MiB of output"
    assert result.output.startswith("x" * 1000 + "\n")
    assert len(result.output) < 66 * 1024
    assert "more bytes of output cut" in result.output


def test_a_64_gib_allocation_is_a_memory_error_and_the_variables_stay(run):
    run("kept = 1")
    result = run("data = bytearray(64 << 30)")
    assert result.error.endswith("MemoryError (the limit is 512 MiB)")
    result = run("""
hoard = []
while True:
    hoard.append(bytearray(16 << 20))
""")
    assert result.error.endswith("MemoryError (the limit is 512 MiB)")
    assert run("hoard = None; kept").output == "1\n"


def test_there_is_no_memory_that_the_limit_does_not_count(run):
    """Regression: System V segments and files in memory held gigabytes beside a limit of 512 MiB, beyond the call."""
    result = run("""
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
for call, *arguments in ((libc.shmget, 0, 200 << 20, 0o1600), (libc.msgget, 0, 0o1600), (libc.semget, 0, 1, 0o1600)):
    print(call(*arguments), errno.errorcode[ctypes.get_errno()])
try:
    os.memfd_create('hoard')
except OSError as error:
    print(errno.errorcode[error.errno])
""")
    assert result.output == "-1 ENOSYS\n" * 3 + "ENOSYS\n"


def test_of_all_sockets_only_local_ones_can_be_opened(run):
    """Regression: AF_VSOCK, which no network namespace holds, reached the host of a virtual machine."""
    result = run("""
import asyncio, socket
for family in range(64):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET):
        for make in (socket.socket, socket.socketpair):
            try:
                print(family, make(family, kind) and make.__name__)
            except OSError as error:
                assert family == socket.AF_UNIX or error.errno == 97, (family, error)  # EAFNOSUPPORT
asyncio.run(asyncio.sleep(0))
""")
    assert (result.error, {line.split()[0] for line in result.output.splitlines()}) == (None, {"1"})


def test_memory_is_bounded_over_all_processes_together():
    """Regression: the limit held for each process, and 64 of them may run."""
    pool = InterpreterPool(sandbox(memory_mib=128, disk_mib=16), spare=0)
    many = """
import os, time
shared = bytearray(32 << 20)
for _ in range(6):
    if os.fork() == 0:
        {grow}
        time.sleep(100)
time.sleep(0.4)
"""
    try:
        result = pool.run(many.format(grow=""), conversation="a", deadline=time.monotonic() + 30)
        assert (result.status, result.error) == ("ok", None)  # what is shared counts once
        code = many.format(grow="own = bytearray(64 << 20)")
        result = pool.run(code + "time.sleep(100)", conversation="a", deadline=time.monotonic() + 30)
    finally:
        pool.close()
    assert result.error == "stopped: its processes, files and sockets took more than 144 MiB of memory together"
    assert result.lost_after


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("n = 0\nwhile True: open(f'/tmp/{n}', 'w').close(); n += 1", "it made more than 8192 files"),
        (
            "import os, socket, time\npairs = []\nfor _ in range(4): os.fork()\nfor _ in range(100):\n"
            "    pairs.append(socket.socketpair()); pairs[-1][0].setblocking(False)\n"
            "    try: pairs[-1][0].send(bytes(1 << 20))\n    except BlockingIOError: pass\ntime.sleep(100)",
            "its processes, files and sockets took more than 144 MiB of memory together",
        ),
    ],
)
def test_empty_files_and_what_sockets_hold_are_memory_too(code, error):
    """Regression: both took hundreds of MiB of the kernel's beside a limit of 64 MiB of files."""
    pool = InterpreterPool(sandbox(memory_mib=128, disk_mib=16), spare=0)
    try:
        result = pool.run(code, conversation=None, deadline=time.monotonic() + 30)
    finally:
        pool.close()
    assert result.error == f"stopped: {error}"


def busy_ticks(namespace: str) -> list[int]:
    """The processor time of its processes so far, as the kernel counts it."""
    return [
        int(part) for pid in processes_in(namespace) for part in Path(f"/proc/{pid}/stat").read_text().split()[13:15]
    ]


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
    assert run("before = count; time.sleep(0.1); print(count > before)").output == "True\n"


def test_a_stopped_interpreter_has_no_way_to_go_on_by_itself(run):
    """A timer or a descriptor can send its owner any signal, a tracer can keep one from it."""
    result = run(f"""
import ctypes, errno, fcntl
libc = ctypes.CDLL(None, use_errno=True)
for number in {(222, 101, 310, 311) if platform.machine() == "x86_64" else (107, 117, 270, 271)}:
    print(libc.syscall(number, 0, 0, 0, 0, 0, 0), errno.errorcode[ctypes.get_errno()])
try:
    fcntl.fcntl(1, 10, 18)  # F_SETSIG, SIGCONT
except OSError as error:
    print(errno.errorcode[error.errno])
""")
    assert result.output == "-1 ENOSYS\n" * 4 + "EINVAL\n"


def test_if_memory_runs_out_the_sandbox_goes_first_whatever_it_wants(run):
    """Regression: the code could lower its score."""
    result = run("""
import os
for path in ('/proc/self/oom_score_adj', '/proc/1/oom_score_adj', '/proc/self/oom_adj'):
    for value in ('0', '-1000'):
        try:
            open(path, 'w').write(value)
            print('wrote', path)
        except OSError:
            print('no')
print(open('/proc/self/oom_score_adj').read(), open('/proc/1/oom_score_adj').read())
""")
    assert result.output == "no\n" * 6 + "1000\n 1000\n\n"


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


def test_files_are_bounded_one_by_one_and_together(run):
    result = run("""
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
""")
    assert result.output == f"{errno.EFBIG} 16\n{errno.ENOSPC}\n"


@pytest.mark.parametrize("ending", ["", "time.sleep(100)"])
def test_sleeping_grandchildren_end_with_the_call(run, ending):
    namespace = namespace_of(run)
    result = run(
        f"""
import os, subprocess, time
subprocess.Popen(['sleep', '1000'], start_new_session=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        subprocess.Popen(['sleep', '1001'])
        time.sleep(1000)
    os._exit(0)
time.sleep(0.2)
print(len([name for name in os.listdir('/proc') if name.isdigit()]))
{ending}
""",
        timeout_s=1.0,
    )
    assert int(result.output) >= 5  # the first process, the interpreter, two sleeps, the grandchild
    if ending:
        assert result.status == "timeout"
        wait_until_empty(namespace)
    else:
        assert result.status == "ok"
        wait_until_empty(namespace, but=2)  # the first process and the interpreter
        assert namespace_of(run) == namespace


WRITE_EVERYWHERE = """
import os
for name in os.listdir('/proc/self/fd'):
    if int(name) > 2:
        try:
            os.write(int(name), {data})
        except OSError:
            pass
"""


@pytest.mark.parametrize(
    "data",
    [
        "b'garbage' * 100",
        "bytes(300000)",
        "b'[]\\n'",
        'b\'{"id": "x", "error": null}\\n\'',
        "b'[' * 50000 + b'\\n'",
    ],
)
def test_what_is_written_to_the_protocol_pipe_is_an_error_of_that_call_alone(run, data):
    result = run(WRITE_EVERYWHERE.format(data=data))
    assert result.error == "the interpreter's answer could not be read"
    assert result.lost_after
    assert run("6 * 7").output == "42\n"


def test_the_code_has_no_descriptor_but_its_own_and_the_two_of_the_protocol(run):
    result = run("""
import os
for name in sorted(os.listdir('/proc/self/fd'), key=int):
    if os.path.islink(f'/proc/self/fd/{name}'):  # that of the listing is gone
        print(os.readlink(f'/proc/self/fd/{name}').partition(':')[0])
""")
    assert result.output.splitlines() == ["/dev/null", *["pipe"] * 4]


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


@pytest.mark.parametrize(
    "code",
    [
        "import os; os.closerange(3, 256)",
        "import os; os.closerange(0, 256)",
        "import os; os._exit(0)",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "import ctypes; ctypes.string_at(0)",
        "import json, os; json.dumps = os.write = None; import builtins; builtins.__dict__.clear()",
    ],
)
def test_an_interpreter_that_ends_itself_is_an_error_of_that_call_and_is_replaced(run, code):
    result = run(code, timeout_s=5)
    assert result.status in ("ok", "error")
    run("1", timeout_s=5)
    assert run("6 * 7").output == "42\n"


def test_spoiling_the_request_pipe_ends_the_interpreter_and_the_next_call_has_another(run):
    namespace = namespace_of(run)
    run("import os; [os.set_blocking(n, False) for n in range(3, 256) if os.path.exists(f'/proc/self/fd/{n}')]")
    wait_until_empty(namespace)
    result = run("6 * 7")
    assert (result.status, result.lost_after) == ("error", True)
    assert result.error.startswith("the interpreter ended")
    assert run("6 * 7").output == "42\n"


def test_links_and_proc_lead_nowhere(run):
    result = run("""
import os
os.symlink('/etc/shadow', '/tmp/link')
os.symlink('/proc/1/root', '/tmp/root')
for path in ('/tmp/link', '/tmp/root/etc/shadow', '/proc/1/root/etc/shadow', '/proc/1/cwd/etc/shadow',
             '/proc/self/root/etc/passwd', '/proc/1/root/work', '/proc/1/mem', '/proc/kcore', '/dev/mem', '/dev/kmsg'):
    try:
        open(path, 'rb').read(1)
        print('read', path)
    except OSError:
        print('no')
for pid in (1, os.getppid()):
    for name in os.listdir(f'/proc/{pid}/fd') if os.access(f'/proc/{pid}/fd', os.R_OK) else ():
        target = os.readlink(f'/proc/{pid}/fd/{name}')
        if not target.startswith(('pipe:', '/dev/null', 'anon_inode:')):
            print('descriptor', target)
""")
    assert result.output == "no\n" * 10


def test_privileges_cannot_be_had(run):
    result = run("""
import ctypes, os, re
libc = ctypes.CDLL(None, use_errno=True)
print(re.search(r'CapEff:\\s*(\\w+)', open('/proc/self/status').read())[1])
print(re.search(r'NoNewPrivs:\\s*(\\w+)', open('/proc/self/status').read())[1])
CLONE_NEWUSER, CLONE_NEWNS = 0x10000000, 0x20000
print(libc.unshare(CLONE_NEWUSER), libc.unshare(CLONE_NEWNS))
print(libc.mount(b'none', b'/tmp', b'tmpfs', 0, None), libc.chroot(b'/tmp'))
try:
    os.setuid(0)
except OSError as error:
    print(type(error).__name__)
import resource
try:
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
except ValueError:
    print('no more memory')
""")
    lines = result.output.splitlines()
    assert lines == ["0000000000000000", "1", "-1 -1", "-1 -1", lines[4], "no more memory"]
    assert lines[4] in ("PermissionError", "OSError")


def test_processes_of_the_host_cannot_be_signalled(run):
    with subprocess.Popen(["sleep", "60"]) as bystander:
        result = run(f"""
import os, signal
for pid in ({bystander.pid}, {os.getpid()}):
    try:
        os.kill(pid, signal.SIGKILL)
        print('killed', pid)
    except ProcessLookupError:
        print('no')
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


def test_what_is_written_to_tmp_is_seen_by_nobody_else(run, tmp_path):
    name = f"/tmp/llmrl-sandbox-{os.getpid()}"
    assert run(f"open('{name}', 'w').write('mine'); print(open('{name}').read())").output == "mine\n"
    code = f"import os; print(os.path.exists('{name}'), os.listdir('/tmp'))"
    assert run(code, conversation="somebody else").output == "False []\n"
    assert not Path(name).exists()


def test_processor_time_is_bounded():
    pool = InterpreterPool(sandbox(cpu_s=1), spare=0)
    try:
        started = time.monotonic()
        result = pool.run("while True: pass", conversation=None, deadline=started + 30)
    finally:
        pool.close()
    assert time.monotonic() - started < 15
    assert result.error.startswith("the interpreter was stopped: it used up its 1 s of processor time")


def test_closing_the_pool_leaves_no_process_and_no_descriptor():
    before = len(os.listdir("/proc/self/fd"))
    pool = InterpreterPool(sandbox(), spare=2)
    deadline = time.monotonic() + 30
    code = "import os, subprocess; subprocess.Popen(['sleep', '100']); print(os.readlink('/proc/self/ns/pid'))"
    namespaces = [pool.run(code, conversation=name, deadline=deadline).output.strip() for name in "abc"]
    assert len(set(namespaces)) == 3
    pool.close()
    assert [pid for namespace in namespaces for pid in processes_in(namespace)] == []
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    assert [pid for pid in children if "bwrap" in Path(f"/proc/{pid}/stat").read_text()] == []
    assert len(os.listdir("/proc/self/fd")) <= before  # an earlier test's interpreter may just have been freed


def test_closing_a_pool_that_is_busy_and_still_starts_others_leaves_no_process():
    """Regression: those that had just been started, and large trees on a busy machine, outlived it."""
    pool = InterpreterPool(sandbox(), spare=8, max_interpreters=8)
    code = "import os\nfor _ in range(5): os.fork()\nwhile True: pass"
    deadline = time.monotonic() + 60
    outcomes: list[str] = []

    def call(name: int) -> None:
        try:
            outcomes.append(pool.run(code, conversation=name, deadline=deadline).status)
        except DeadlineError as error:
            outcomes.append(str(error))

    threads = [threading.Thread(target=call, args=[name]) for name in range(6)]
    before = set(bubblewraps())
    for thread in threads:
        thread.start()
    while pool.counters["started"] < 7:
        time.sleep(0.01)
    pool.close()
    assert set(bubblewraps()) - before == set()
    for thread in threads:
        thread.join(timeout=10)
    assert set(outcomes) <= {"error", "InterpreterPool: was closed while a call was waiting."}
    assert len(outcomes) == 6


def bubblewraps() -> list[int]:
    """Those of this process and those that lost their parent, also where they ended and were not reaped."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            name, _, rest = (folder / "stat").read_text().partition(") ")
            if name.endswith("(bwrap") and rest.split()[1] in ("1", str(os.getpid())):
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def test_the_sandbox_dies_with_a_host_that_is_killed():
    sandbox()
    script = """
import sys, time
from llmrl.tools.sandbox import InterpreterPool, Sandbox
pool = InterpreterPool(Sandbox(), spare=0)
code = "import os, time; print(os.readlink('/proc/self/ns/pid'))"
print(pool.run(code, conversation=0, deadline=time.monotonic() + 30).output, flush=True)
pool.run("import os; os.fork(); time.sleep(1000)", conversation=0, deadline=time.monotonic() + 1000)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as host:
        namespace = host.stdout.readline().strip()
        assert namespace.startswith("pid:[")
        assert processes_in(namespace)
        host.send_signal(signal.SIGKILL)
    wait_until_empty(namespace)
