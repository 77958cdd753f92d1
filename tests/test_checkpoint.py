import errno
import os
import signal
import subprocess
import sys
import textwrap
import threading
from contextlib import nullcontext

import pytest

from llmrl.commands.recipes import reading_checkpoint
from llmrl.errors import CheckpointError, ConfigError, DataError
from llmrl.run.checkpoint import CheckpointStore, InterruptGuard, check_files, latest_checkpoint
from llmrl.run.run_dir import RunDir


def writer(content: str):
    def write(folder):
        (folder / "sub").mkdir()
        (folder / "sub" / "weights").write_text(content)

    return write


def content(path) -> str:
    return (path / "sub" / "weights").read_text()


def test_the_last_checkpoints_are_kept_and_the_newest_is_found_by_number_not_by_name(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    for step in (2, 9, 10):
        store.save(step, writer(str(step)))
    assert store.steps() == [9, 10]
    assert content(store.latest()) == "10"
    assert latest_checkpoint(tmp_path) == tmp_path / "checkpoints" / "step10"


def test_a_run_without_checkpoints_has_no_latest(tmp_path):
    assert CheckpointStore(tmp_path).latest() is None
    assert latest_checkpoint(tmp_path / "nothing") is None
    with pytest.raises(ConfigError, match="keep=0"):
        CheckpointStore(tmp_path, keep=0)


def test_the_same_step_is_replaced_by_the_newer_state(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    store.save(5, writer("old"))
    store.save(5, writer("new"))
    assert content(store.latest()) == "new"
    assert [path.name for path in store.folder.iterdir()] == ["step5"]


def test_a_full_disk_leaves_the_previous_checkpoint_and_says_how_much_room_there_is(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    store.save(1, writer("good"))

    def full(folder):
        (folder / "half").write_text("x" * 100)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(CheckpointError, match=r"step 2 .*No space left on device .*GiB free.*; step1 is intact"):
        store.save(2, full)
    assert [path.name for path in store.folder.iterdir()] == ["step1"]
    store.save(3, writer("later"))
    assert content(store.latest()) == "later"


def test_a_second_interrupt_during_a_save_removes_the_draft_and_is_not_swallowed(tmp_path):
    def interrupted(folder):
        (folder / "half").touch()
        raise KeyboardInterrupt

    store = CheckpointStore(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        store.save(1, interrupted)
    assert list(store.folder.iterdir()) == []


def test_kill_in_the_middle_of_a_save_leaves_the_previous_checkpoint(tmp_path):
    script = textwrap.dedent("""
        import sys, time
        from llmrl.run.checkpoint import CheckpointStore

        def slow(folder):
            (folder / "half").write_text("half")
            print("writing", flush=True)
            time.sleep(60)

        store = CheckpointStore(sys.argv[1], keep=1)
        store.save(1, lambda folder: (folder / "weights").write_text("whole"))
        store.save(2, slow)
    """)
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "writing\n"
        child.kill()
    assert latest_checkpoint(tmp_path).name == "step1"
    assert any(path.name.startswith(".draft") for path in (tmp_path / "checkpoints").iterdir())
    store = CheckpointStore(tmp_path)
    assert [path.name for path in store.folder.iterdir()] == ["step1"]
    assert (store.latest() / "weights").read_text() == "whole"


def test_leftovers_are_cleaned_by_a_writer_only_and_a_half_done_replacement_is_undone(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(3, writer("three"))
    os.rename(store.folder / "step3", store.folder / ".replaced-step3")  # killed between the two renames
    (store.folder / ".draft-step4").mkdir()
    (store.folder / ".pruned-step1").mkdir()
    assert CheckpointStore(tmp_path, writer=False).latest() is None
    assert len(list(store.folder.iterdir())) == 3
    assert content(CheckpointStore(tmp_path).latest()) == "three"
    assert [path.name for path in store.folder.iterdir()] == ["step3"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_becomes_a_flag_and_the_old_handler_comes_back(number):
    before = signal.getsignal(number)
    with InterruptGuard() as guard:
        assert not guard.requested
        signal.raise_signal(number)
        assert guard.requested
    assert signal.getsignal(number) is before


def test_a_closed_terminal_stops_no_run_that_was_started_with_nohup():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with InterruptGuard() as guard:
            signal.raise_signal(signal.SIGHUP)
            assert not guard.requested
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_interrupt_raises_at_once_but_an_echo_of_the_first_does_not():
    for debounce_s, outcome in ((3600, nullcontext()), (0, pytest.raises(KeyboardInterrupt))):
        with InterruptGuard(debounce_s=debounce_s) as guard:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGTERM)  # torchrun passes the terminal's signal on
            with outcome:
                signal.raise_signal(signal.SIGINT)
        assert guard.requested


def test_outside_the_main_thread_signals_are_left_alone():
    before, seen = signal.getsignal(signal.SIGINT), []

    def enter():
        with InterruptGuard() as guard:
            seen.append((signal.getsignal(signal.SIGINT), guard.requested))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [(before, False)]


def test_a_checkpoint_that_is_read_stays_until_it_has_been_read(tmp_path):
    run, store = RunDir(tmp_path), CheckpointStore(tmp_path, keep=1)
    store.save(1, lambda folder: (folder / "weights").write_text("1"))
    with reading_checkpoint(run) as last, reading_checkpoint(run, "step1") as named:
        for step in (2, 3):
            store.save(step, lambda folder: (folder / "weights").write_text("2"))
        assert last == named
        assert check_files(last) == ["weights"]
        assert store.steps() == [1, 3]
    store.save(4, lambda folder: (folder / "weights").write_text("4"))
    assert store.steps() == [4]
    with pytest.raises(DataError, match="got step1, there: step4"), reading_checkpoint(run, "step1"):
        pass
