"""Every test here starts without data folders of its own; `real_data` looks for the real ones."""

import contextlib
import http.server
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gradwire.data import files

# taken before the tests hide it
_GIVEN = os.environ.get(files.FOLDER_VARIABLE)
_BESIDE = Path(__file__).parents[2].parent / "shared" / "data"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and no data folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(files.FOLDER_VARIABLE, raising=False)
    return tmp_path / "cache" / "gradwire"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty data folder that GRADWIRE_DATA names."""
    path = tmp_path / "data"
    path.mkdir()
    monkeypatch.setenv(files.FOLDER_VARIABLE, str(path))
    return path


@pytest.fixture
def real_data(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Path]]:
    """`real_data("mnist", name, ...)`: the paths of real files, or the test is skipped."""

    def look(where: str, *names: str) -> list[Path]:
        root = Path(_GIVEN) if _GIVEN else _BESIDE
        if root.is_dir():
            monkeypatch.setenv(files.FOLDER_VARIABLE, str(root))
        found = [files.find(name, (where,)) for name in names]
        if None in found:
            pytest.skip(f"{where} not found: set {files.FOLDER_VARIABLE}")
        return [path for path in found if path is not None]

    return look


class Server:
    """Serves `pages`; a page is (bytes, declared length), and None never answers."""

    def __init__(self) -> None:
        self.pages: dict[str, tuple[bytes, int] | None] = {}
        self.num_requests = 0
        self.stop = threading.Event()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.num_requests += 1
                if self.path not in outer.pages:
                    self.send_error(404)
                    return
                page = outer.pages[self.path]
                if page is None:
                    outer.stop.wait(10)
                    return
                self.send_response(200)
                self.send_header("Content-Length", str(page[1]))
                self.end_headers()
                with contextlib.suppress(ConnectionError):  # the client may hang up
                    self.wfile.write(page[0])

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/"

    def put(self, name: str, content: bytes, declared: int | None = None) -> str:
        self.pages[f"/{name}"] = (content, len(content) if declared is None else declared)
        return self.url + name


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = Server()
    thread = threading.Thread(target=server.http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.stop.set()
    server.http.shutdown()
    thread.join()
    server.http.server_close()
