"""The folder of compiled kernels: where it is, what is taken from it, and that nothing about it makes a call fail."""

import errno
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ddtree.cuda import driver, kept, notices
from ddtree.cuda.kept import cache_folder, entry_path, keep, read_kept


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "new" / "folder"


@pytest.fixture
def said(monkeypatch) -> list[str]:
    """What is said once, in this test."""
    lines: list[str] = []
    monkeypatch.setattr(kept, "say_once", lambda text: text in lines or lines.append(text))
    return lines


@pytest.mark.parametrize("choice", ["", " ", "off", "OFF"])
def test_the_environment_turns_it_off(choice):
    assert cache_folder({"DDTREE_CACHE": choice}) is None
    assert entry_path(None, "scale", "ptx") is None and read_kept(None) is None
    keep(None, b"")


def test_unset_it_is_the_users_own_and_a_relative_one_is_made_absolute(tmp_path, monkeypatch):
    monkeypatch.delenv("DDTREE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder().is_relative_to(tmp_path) and cache_folder().name == "ddtree"
    monkeypatch.setenv("DDTREE_CACHE", "~/kernels")
    assert cache_folder() == tmp_path / "kernels"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DDTREE_CACHE", "kernels")
    assert cache_folder() == tmp_path / "kernels"


@pytest.mark.skipif(os.name == "nt", reason="homes are found in another way")
@pytest.mark.parametrize("choice", [None, "~/kernels"])
def test_without_a_home_nothing_is_kept(monkeypatch, choice):
    import pwd

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    for name in ("HOME", "XDG_CACHE_HOME", "DDTREE_CACHE"):
        monkeypatch.delenv(name, raising=False)
    if choice:
        monkeypatch.setenv("DDTREE_CACHE", choice)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert cache_folder() is None


def test_entries_that_are_cut_changed_copied_or_not_ours_are_not_taken_and_are_replaced(folder):
    path, other = entry_path(folder, "scale", "cubin", "a"), entry_path(folder, "scale", "cubin", "b")
    keep(path, b"machine\ncode")
    whole = path.read_bytes()
    assert read_kept(path) == b"machine\ncode" and read_kept(other) is None
    other.write_bytes(whole)
    assert read_kept(other) is None
    for damaged in (whole[:-1], whole[:40], b"", whole + b"x", whole.replace(b"code", b"c0de"), b"\x7fELF not ours"):
        path.write_bytes(damaged)
        assert read_kept(path) is None, damaged
        keep(path, b"machine\ncode")
        assert read_kept(path) == b"machine\ncode"


@pytest.mark.parametrize("content", [b"", b"\n", b"\n\n// \n", bytes(range(256))])
def test_any_content_is_kept(folder, content):
    path = entry_path(folder, "scale", "ptx", "a")
    keep(path, content)
    assert read_kept(path) == content


def test_a_folder_that_cannot_be_is_said_once_and_nothing_fails(tmp_path, said):
    (tmp_path / "file").write_text("")
    for name in "ab":
        keep(entry_path(tmp_path / "file", name, "ptx"), b"text")
        assert read_kept(entry_path(tmp_path / "file", name, "ptx")) is None
    wanted = f"compiled kernels are not kept in {tmp_path / 'file'} ("
    assert said and all(line.startswith(wanted) and "set DDTREE_CACHE to another folder" in line for line in said)
    assert len(said) == len(set(said)) <= 2  # it does not exist, and it cannot be made


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT])
def test_a_full_disk_or_a_folder_to_read_only_leaves_no_scratch_file(folder, monkeypatch, said, number):
    before, after = entry_path(folder, "before", "ptx"), entry_path(folder, "after", "ptx")
    keep(before, b"text")
    write = Path.write_bytes

    def fail(path: Path, data: bytes) -> int:
        write(path, data[: len(data) // 2])
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(Path, "write_bytes", fail)
    keep(after, b"text" * 1000)
    assert list(folder.iterdir()) == [before]
    assert read_kept(before) == b"text" and read_kept(after) is None
    assert len(said) == 1 and os.strerror(number) in said[0] and str(folder) in said[0]


def test_an_entry_that_may_not_be_read_is_said_and_made_again(folder, monkeypatch, said):
    keep(entry_path(folder, "a", "ptx"), b"text")

    def refuse(path: Path) -> bytes:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert read_kept(entry_path(folder, "a", "ptx")) is None and len(said) == 1


def test_an_interrupted_write_leaves_nothing(folder, monkeypatch):
    def interrupt(source: object, target: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        keep(entry_path(folder, "a", "ptx"), b"text")
    assert list(folder.iterdir()) == []


def test_the_oldest_entries_and_old_scratch_files_go_and_others_files_stay(folder, monkeypatch):
    monkeypatch.setattr(kept, "_MOST", 1000)
    folder.mkdir(parents=True)
    now = time.time()
    ages = {"a.ptx": 30, "b.cubin": 20, "c.ptx": 10, "notes.txt": 9999, "d.part": 9999, "e.part": 5}
    for name, age in ages.items():
        (folder / name).write_bytes(bytes(400))
        os.utime(folder / name, (now - age, now - age))
    new = entry_path(folder, "new", "ptx")
    keep(new, bytes(100))
    assert {path.name for path in folder.iterdir()} == {"c.ptx", "e.part", "notes.txt", new.name}


def test_an_entry_that_another_process_deleted_meanwhile_is_no_error(folder, monkeypatch):
    monkeypatch.setattr(kept, "_MOST", 0)
    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(keep, entry_path(folder, "a", "ptx", str(i)), bytes(1000)) for i in range(200)]:
            done.result()
    assert list(folder.glob("*.part")) == []


RACE = """
import sys
from pathlib import Path
from ddtree.cuda.kept import entry_path, keep, read_kept
folder = Path(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
taken = 0
for i in range(300):
    path = entry_path(folder, "a", "ptx", str(i % 3))
    found = read_kept(path)
    assert found in (None, bytes([i % 3]) * 100_000), "half an entry"
    taken += found is not None
    if i % 7 == 0 or found is None:
        keep(path, bytes([i % 3]) * 100_000)
print(taken)
"""


def test_processes_that_write_and_read_the_same_entries_see_whole_ones_or_none(folder):
    command = [sys.executable, "-W", "error", "-c", RACE, str(folder)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    running = [subprocess.Popen(command, **pipes) for _ in range(3)]
    for process in running:
        assert process.stdout.readline() == "ready\n"
    answers = []
    for process in running:
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in running:
        answers.append(int(process.communicate()[0]))
        assert process.returncode == 0
    assert all(answer > 250 for answer in answers) and len(list(folder.iterdir())) == 3


def test_what_is_said_goes_to_standard_error_once_and_can_be_silenced(capsys, monkeypatch):
    monkeypatch.delenv("DDTREE_QUIET", raising=False)
    notices.say_once.cache_clear()
    notices.say_once("a line")
    notices.say_once("a line")
    assert capsys.readouterr() == ("", "ddtree: a line\n")
    monkeypatch.setenv("DDTREE_QUIET", "1")
    notices.say("a line")
    monkeypatch.setattr(sys, "stderr", None)
    monkeypatch.delenv("DDTREE_QUIET")
    notices.say("a line")  # pythonw has none
    assert capsys.readouterr() == ("", "")


def test_quick_work_is_silent_and_slow_work_is_announced_also_when_it_fails():
    told: list[str] = []
    with notices.announced("compiling a", after=30, speak=told.append):
        pass
    with pytest.raises(ValueError), notices.announced("compiling b", "; not kept", after=0, speak=told.append):
        time.sleep(0.2)
        raise ValueError
    assert len(told) == 1 and told[0].startswith("compiling b, ") and told[0].endswith(" s so far; not kept")


def test_machine_code_of_another_driver_is_other_machine_code(tmp_path):
    here = tmp_path / "version"
    here.write_text("NVRM version: 580.65.06\nGCC version\n")
    one = driver.driver_release(type("", (), {"cuDriverGetVersion": lambda: (0, 13000)}), str(here))
    assert one == "13000 NVRM version: 580.65.06"
    here.write_text("NVRM version: 580.82.07\nGCC version\n")
    assert driver.driver_release(type("", (), {"cuDriverGetVersion": lambda: (0, 13000)}), str(here)) != one
    assert driver.driver_release(type("", (), {"cuDriverGetVersion": lambda: (0, 13010)}), str(tmp_path)) == "13010"
