import hashlib
import http.server
import sys
import threading

import pytest
from typer.testing import CliRunner

from modenorm.lab.cli.data import app
from modenorm.lab.data import DataError, catalog, download

FILES = {"train_32x32.mat": bytes(range(256)) * 2000, "test_32x32.mat": b"test" * 1000}


class Server(http.server.ThreadingHTTPServer):
    cut = 0  # bytes after which the next answer breaks off
    ranges = True


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        server = self.server
        data = FILES.get(self.path.lstrip("/"))
        wanted = self.headers.get("Range") if server.ranges else None
        server.asked.append((self.path, wanted))
        if data is None:
            self.send_error(404)
            return
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted else 0
        if start >= len(data):
            self.send_error(416)
            return
        self.send_response(206 if wanted else 200)
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        body = data[start:]
        if server.cut:
            body, server.cut = body[: server.cut], 0
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    server = Server(("127.0.0.1", 0), Handler)
    server.asked = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    svhn = catalog.PUBLISHED["svhn"]
    monkeypatch.setenv("NO_PROXY", "*")
    object.__setattr__(svhn, "address", f"http://127.0.0.1:{server.server_port}/")
    for name, data in FILES.items():
        monkeypatch.setitem(svhn.downloads, name, hashlib.md5(data).hexdigest())
    yield server
    object.__setattr__(svhn, "address", "http://ufldl.stanford.edu/housenumbers/")
    server.shutdown()
    server.server_close()


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)


def get(root, **options):
    seen = []
    paths = download.download("svhn", root, lambda *args: seen.append(args), **options)
    return paths, seen


def test_download_and_progress(server, tmp_path):
    paths, seen = get(tmp_path)
    assert {path.name: path.read_bytes() for path in paths} == FILES
    assert seen[-1] == ("test_32x32.mat", 4000, 4000)
    assert len(list(tmp_path.iterdir())) == 2
    get(tmp_path)
    assert len(server.asked) == 2, "files that are there are not asked for again"


def test_broken_connection_is_resumed(server, tmp_path):
    server.cut = 3 << 16
    get(tmp_path)
    ranges = [wanted for path, wanted in server.asked if "train" in path]
    assert ranges == [None, f"bytes={3 << 16}-"]
    assert (tmp_path / "train_32x32.mat").read_bytes() == FILES["train_32x32.mat"]


@pytest.mark.parametrize("ranges", [True, False])
def test_part_of_an_earlier_try(server, tmp_path, ranges):
    server.ranges = ranges
    (tmp_path / "train_32x32.mat.part").write_bytes(FILES["train_32x32.mat"][:1000])
    get(tmp_path)
    assert (tmp_path / "train_32x32.mat").read_bytes() == FILES["train_32x32.mat"]


@pytest.mark.parametrize("part", [b"wrong" * 3, bytes(600_000), FILES["train_32x32.mat"]])
def test_wrong_or_complete_part(server, tmp_path, part):
    (tmp_path / "train_32x32.mat.part").write_bytes(part)
    get(tmp_path)
    assert (tmp_path / "train_32x32.mat").read_bytes() == FILES["train_32x32.mat"]
    assert not (tmp_path / "train_32x32.mat.part").exists()


def test_wrong_hash(server, tmp_path, monkeypatch):
    monkeypatch.setitem(catalog.PUBLISHED["svhn"].downloads, "train_32x32.mat", "0" * 32)
    with pytest.raises(DataError, match=r"train_32x32.mat: http.* has another md5, expected 0000"):
        get(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_other_file_in_the_way_is_kept(server, tmp_path):
    path = tmp_path / "train_32x32.mat"
    path.write_bytes(b"mine")
    with pytest.raises(DataError, match=r"train_32x32.mat: md5 .*--force replaces it"):
        get(tmp_path)
    assert path.read_bytes() == b"mine"
    get(tmp_path, force=True)
    assert path.read_bytes() == FILES["train_32x32.mat"]


def test_missing_on_the_server(server, tmp_path, monkeypatch):
    monkeypatch.delitem(FILES, "train_32x32.mat")
    with pytest.raises(DataError, match=r"cannot get .*HTTPError"):
        get(tmp_path)


def test_without_network(server, tmp_path):
    server.shutdown()
    server.server_close()
    result = CliRunner().invoke(app, ["download", "svhn", "--data", str(tmp_path)])
    assert result.exit_code == 2
    assert "ConnectionError); check the network, or put the file there by hand" in result.output


def test_command(server, tmp_path):
    result = CliRunner().invoke(app, ["download", "svhn", "--data", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "svhn: 2 files in" in result.output


def test_unknown_name(tmp_path):
    with pytest.raises(DataError, match="cannot download 'builtin': expected one of mnist"):
        download.download("builtin", tmp_path, print)


def test_without_pooch(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(DataError, match="downloads need 'pooch'"):
        get(tmp_path)
