"""Files are whole or not there at all, and a name keeps what it stands for."""

import os
import threading
from pathlib import Path

from modenorm.lab.training.files import write_whole


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
