"""Files are whole or not there at all, and a name keeps what it stands for."""

import os
import threading
from pathlib import Path

import pytest

from modenorm.lab.training.files import check_file, write_whole


def test_a_link_is_followed(tmp_path: Path) -> None:
    link, target = tmp_path / "link.html", tmp_path / "elsewhere" / "page.html"
    target.parent.mkdir()
    link.symlink_to(target)
    for content in (b"first", b"second"):
        write_whole(link, content)
        assert link.is_symlink()
        assert target.read_bytes() == content


def test_a_device_is_not_replaced() -> None:
    """A terminal stands for /dev/null, which whoever may write to /dev would lose."""
    ours, theirs = os.openpty()
    write_whole(Path(os.ttyname(theirs)), b"numbers")
    assert os.read(ours, 100) == b"numbers"
    for descriptor in (ours, theirs):
        os.close(descriptor)


def test_a_pipe_receives_the_content(tmp_path: Path) -> None:
    pipe, received = tmp_path / "pipe", list[bytes]()
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: received.append(pipe.read_bytes()), daemon=True)
    reader.start()
    write_whole(pipe, b"numbers")
    reader.join(timeout=10)
    assert received == [b"numbers"]
    assert pipe.is_fifo()


def test_a_folder_is_no_file() -> None:
    for check in (check_file, lambda path: write_whole(path, b"numbers")):
        with pytest.raises(IsADirectoryError, match=r"^\. is a folder: name a file in it$"):
            check(Path("."))


def test_what_cannot_be_written_is_told_before_the_work(tmp_path: Path) -> None:
    check_file(tmp_path / "new" / "page.html")
    assert list(tmp_path.iterdir()) == [tmp_path / "new"]
    assert not list((tmp_path / "new").iterdir())
    (tmp_path / "notes").write_text("no folder")
    with pytest.raises(NotADirectoryError, match="notes is a file, not a folder: choose another"):
        check_file(tmp_path / "notes" / "deep" / "page.html")
    check_file(tmp_path / "notes")  # which may be replaced


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="there nobody may write")
def test_a_folder_that_takes_no_files_is_told_before_the_work() -> None:
    with pytest.raises(OSError, match=r"cannot write /proc: .*; nothing was done: .* folder"):
        check_file(Path("/proc/page.html"))
