"""The shared level of the cache, on a folder and on a web server: results travel, and no trouble there reaches the build."""

from __future__ import annotations

import base64
import contextlib
import errno
import socket
import sys
import threading
import time
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from hatch_cuda_aot import shared as shared_module
from hatch_cuda_aot.cache import Cache, open_cache
from hatch_cuda_aot.compile.tasks import FloorResult
from hatch_cuda_aot.errors import BuildError
from hatch_cuda_aot.shared import SharedLevel
from hatch_cuda_aot.storage import is_read_only, is_refusal, packages_for, shown

pytest.importorskip("fsspec")
pytest.importorskip("aiohttp")

KEYS = [f"{number:02x}" * 32 for number in range(40)]
RESULTS = {key: FloorResult("7.8", number) for number, key in enumerate(KEYS)}


class Machine:
    """A cache with a folder of its own and a shared level; hears the warnings."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.warnings: list[str] = []
        self.cache = Cache(folder, SharedLevel(url, self.warnings.append))

    def fetch(self, *keys: str) -> list[Any]:
        futures = [self.cache.fetch(key) for key in keys]
        return [None if future is None else future.result(30) for future in futures]

    def put(self, *keys: str) -> None:
        with self.cache:
            for key in keys:
                self.cache.put(key, RESULTS[key])


class Server:
    """A web server for a folder; what is asked is noted, and answers can be held back or replaced."""

    def __init__(self, folder: Path) -> None:
        self.requests: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.statuses: list[int] = []  # of the next answers, in place of the files
        self.always = 0
        self.pause = 0.0
        ours = self

        class Handler(SimpleHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def __init__(self, *args: Any) -> None:
                super().__init__(*args, directory=str(folder))

            def do_GET(self) -> None:
                ours.requests.append(f"{self.command} {self.path}")
                ours.headers.append(dict(self.headers))
                time.sleep(ours.pause)
                status = ours.statuses.pop() if ours.statuses else ours.always
                if status:
                    self.send_error(status)
                else:
                    super().do_GET()

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A web server for the folder ``served``."""
    (tmp_path / "served").mkdir()
    server = Server(tmp_path / "served")
    thread = threading.Thread(target=server.server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.server.shutdown()
    server.server.server_close()
    thread.join()


@pytest.fixture
def silent() -> Iterator[str]:
    """The URL of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=100) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


@pytest.fixture
def closed() -> str:
    """A URL where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return f"http://127.0.0.1:{listening.getsockname()[1]}"


def entry(folder: Path, key: str) -> Path:
    """Return an entry's file."""
    return folder / key[:2] / key


def test_folder(tmp_path: Path) -> None:
    """What one machine puts another one fetches, and then has in its own folder; what nobody put is no result."""
    url = (tmp_path / "not" / "there" / "yet").as_uri()
    first, second = Machine(tmp_path / "first", url), Machine(tmp_path / "second", url)
    first.put(*KEYS[:3])
    assert second.cache.get(KEYS[0]) is None
    assert second.fetch(*KEYS[:4]) == [*(RESULTS[key] for key in KEYS[:3]), None]
    assert [second.cache.get(key) for key in KEYS[:4]] == [*(RESULTS[key] for key in KEYS[:3]), None]
    assert first.warnings == second.warnings == []


def test_everything_is_written_before_the_end(tmp_path: Path) -> None:
    """Leaving the cache waits for what is being written, also when the build failed."""
    machine = Machine(tmp_path / "own", (tmp_path / "shared").as_uri())
    for key in KEYS:
        machine.cache.put(key, RESULTS[key])
    machine.cache.__exit__(BuildError, BuildError("a source does not compile"), None)
    assert all(entry(tmp_path / "shared", key).is_file() for key in KEYS)


def test_an_interrupted_build_waits_for_nothing(tmp_path: Path, silent: str) -> None:
    """Ctrl-C ends the build at once, whatever is under way."""
    machine = Machine(tmp_path / "own", silent)
    future = machine.cache.fetch(KEYS[0])
    assert future is not None
    end = threading.Thread(target=machine.cache.__exit__, args=(KeyboardInterrupt, KeyboardInterrupt(), None))
    end.daemon = True
    end.start()
    end.join(10)
    assert not end.is_alive()
    assert future.result(10) is None
    assert machine.warnings == []


def test_web_server(tmp_path: Path, server: Server) -> None:
    """The folder of any machine's cache can be served; through HTTP it is read, and never written."""
    Machine(tmp_path / "served", (tmp_path / "elsewhere").as_uri()).put(*KEYS[:2])
    machine = Machine(tmp_path / "own", server.url)
    assert machine.fetch(*KEYS[:3]) == [RESULTS[KEYS[0]], RESULTS[KEYS[1]], None]
    assert machine.cache.get(KEYS[0]) == RESULTS[KEYS[0]]
    machine.put(*KEYS)
    assert sorted(server.requests) == [f"GET /{key[:2]}/{key}" for key in KEYS[:3]]
    assert machine.warnings == []


def test_credentials_in_the_url(tmp_path: Path, server: Server) -> None:
    """A password is sent, and a query stays behind the name; neither shows in a warning."""
    server.always = 500
    url = server.url.replace("127", "me:s3cret@127") + "/cache/?sig=s1gnature"
    machine = Machine(tmp_path / "own", url)
    assert machine.fetch(KEYS[0]) == [None]
    assert server.requests[0] == f"GET /cache/{KEYS[0][:2]}/{KEYS[0]}?sig=s1gnature"
    assert server.headers[0]["Authorization"] == f"Basic {base64.b64encode(b'me:s3cret').decode()}"
    (warning,) = machine.warnings
    assert warning.startswith(
        f"the shared cache {server.url}/cache/ is not used by this build: ClientResponseError: 500"
    )
    assert "s3cret" not in warning
    assert "s1gnature" not in warning


@pytest.mark.parametrize("damage", ["flipped", "empty", "page", "swapped"])
def test_damaged_entries(tmp_path: Path, damage: str) -> None:
    """What is not this very key's entry is no result and stays out of the own folder; the next build mends it."""
    shared = tmp_path / "shared"
    first, second = (Machine(tmp_path / name, shared.as_uri()) for name in ("first", "second"))
    first.put(*KEYS[:3])
    contents = [entry(shared, key).read_bytes() for key in KEYS[:2]]
    for number in (0, 1):
        content = contents[number]
        bad = {
            "flipped": content[:-1] + bytes([content[-1] ^ 1]),
            "empty": b"",
            "page": b"<html>Please log in</html>",
            "swapped": contents[1 - number],
        }[damage]
        entry(shared, KEYS[number]).write_bytes(bad)
    assert second.fetch(*KEYS[:3]) == [None, None, RESULTS[KEYS[2]]]
    assert [entry(tmp_path / "second", key).exists() for key in KEYS[:3]] == [False, False, True]
    (warning,) = second.warnings
    assert warning.startswith(f"the shared cache {shared.as_uri()} holds entries that are damaged, ")
    assert any(f"{key[:2]}/{key}" in warning for key in KEYS[:2])
    second.put(*KEYS[:2])
    third = Machine(tmp_path / "third", shared.as_uri())
    assert third.fetch(*KEYS[:3]) == [RESULTS[key] for key in KEYS[:3]]
    assert third.warnings == []


def test_the_own_folder_comes_first(tmp_path: Path) -> None:
    """What is in the own folder is not asked for elsewhere, nor replaced from there."""
    shared = tmp_path / "shared"
    machine = Machine(tmp_path / "own", shared.as_uri())
    machine.put(KEYS[0])
    entry(shared, KEYS[0]).write_bytes(b"bad")
    assert machine.cache.get(KEYS[0]) == RESULTS[KEYS[0]]


def test_nobody_listens(tmp_path: Path, closed: str) -> None:
    """An unreachable cache is one warning, however much is asked; after it nothing more is tried."""
    machine = Machine(tmp_path / "own", closed)
    assert machine.fetch(*KEYS) == [None] * len(KEYS)
    (warning,) = machine.warnings
    assert warning.startswith(
        f"the shared cache {closed} is not used by this build: ClientConnectorError: Cannot connect"
    )
    assert machine.cache.fetch(KEYS[0]) is None
    machine.put(*KEYS)
    assert machine.cache.get(KEYS[0]) == RESULTS[KEYS[0]]
    assert len(machine.warnings) == 1


def test_no_answer(tmp_path: Path, silent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that never answers is given up after a while; a build does not hang."""
    monkeypatch.setattr(shared_module, "PATIENCE", 0.4)
    machine = Machine(tmp_path / "own", silent)
    assert machine.fetch(*KEYS) == [None] * len(KEYS)
    with machine.cache:
        pass
    assert machine.warnings == [
        f"the shared cache {silent} is not used by this build: it did not answer within 0 seconds"
    ]


def test_slow_answers(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that is slower than the compiler is given up once that is clear."""
    monkeypatch.setattr(shared_module, "TOO_SLOW", 0.01)
    server.pause = 0.05
    machine = Machine(tmp_path / "own", server.url)
    assert machine.fetch(*KEYS) == [None] * len(KEYS)
    (warning,) = machine.warnings
    assert "is not used by this build: it takes 0." in warning
    assert shared_module.ENOUGH <= len(server.requests) <= shared_module.ENOUGH + shared_module.THREADS


def test_one_lost_answer(tmp_path: Path, server: Server) -> None:
    """A request that fails is tried once more: one lost answer of many means nothing."""
    Machine(tmp_path / "served", (tmp_path / "elsewhere").as_uri()).put(KEYS[0])
    server.statuses = [503]
    machine = Machine(tmp_path / "own", server.url)
    assert machine.fetch(KEYS[0]) == [RESULTS[KEYS[0]]]
    assert len(server.requests) == 2
    assert machine.warnings == []


@pytest.mark.parametrize("status", [401, 403])
def test_refused(tmp_path: Path, server: Server, status: int) -> None:
    """Missing rights to read end it at once, and the warning says what to check."""
    server.always = status
    machine = Machine(tmp_path / "own", server.url)
    assert machine.fetch(*KEYS) == [None] * len(KEYS)
    (warning,) = machine.warnings
    assert warning.endswith("; check the credentials, and that they may read and list there")
    assert len(server.requests) <= shared_module.THREADS


@pytest.mark.parametrize(
    ("url", "missing", "install"),
    [
        ("s3://bucket/prefix", "fsspec", "pip install fsspec s3fs"),
        ("s3://bucket/prefix", "s3fs", "pip install fsspec s3fs"),
        ("https://host/path", "aiohttp", "pip install fsspec aiohttp"),
        ("gs://bucket", "gcsfs", "pip install fsspec gcsfs"),
    ],
)
def test_missing_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, missing: str, install: str) -> None:
    """A package that is not installed is a warning with the command that installs it; the build goes on."""
    from fsspec.registry import _registry

    for name in [name for name in sys.modules if name.partition(".")[0] == missing]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, missing, None)
    for protocol in ("s3", "gs"):
        monkeypatch.delitem(_registry, protocol, raising=False)
    machine = Machine(tmp_path / "own", url)
    assert machine.fetch(*KEYS[:3]) == [None] * 3
    (warning,) = machine.warnings
    assert warning.startswith(
        f"the shared cache {url} is not used by this build: packages that it needs are not installed"
    )
    assert warning.endswith(f"Install them with\n  {install}")


def test_unknown_protocol(tmp_path: Path) -> None:
    """A protocol that fsspec does not know is a warning in its words."""
    machine = Machine(tmp_path / "own", "nonsense://x")
    assert machine.fetch(KEYS[0]) == [None]
    assert machine.warnings == [
        "the shared cache nonsense://x is not used by this build: ValueError: Protocol not known: nonsense"
    ]


def test_nothing_is_opened_for_nothing(tmp_path: Path, closed: str) -> None:
    """As long as the own folder has everything, the shared level is not touched."""
    with Machine(tmp_path / "own", "memory://x").cache as cache:
        cache.put(KEYS[0], RESULTS[KEYS[0]])
    machine = Machine(tmp_path / "own", closed)
    with machine.cache:
        assert machine.cache.get(KEYS[0]) == RESULTS[KEYS[0]]
    level = machine.cache._shared
    assert level is not None
    assert (level._threads, level._storage) == (0, None)


def test_turned_off() -> None:
    """``HATCH_CUDA_AOT_CACHE=0`` turns off both levels; without a URL there is one."""
    assert open_cache({"HATCH_CUDA_AOT_CACHE": "0"}, "s3://bucket/prefix") is None
    cache = open_cache({})
    assert cache is not None
    assert cache.fetch(KEYS[0]) is None


@pytest.mark.parametrize(
    ("url", "packages", "read_only"),
    [
        ("s3://bucket/prefix", ["fsspec", "s3fs"], False),
        ("gs://bucket", ["fsspec", "gcsfs"], False),
        ("gcs://bucket", ["fsspec", "gcsfs"], False),
        ("az://container", ["fsspec", "adlfs"], False),
        ("HTTPS://host/path", ["fsspec", "aiohttp"], True),
        ("http://host/path", ["fsspec", "aiohttp"], True),
        ("file:///folder", ["fsspec"], False),
        ("webdav://host", ["fsspec"], False),
    ],
)
def test_protocols(url: str, packages: list[str], read_only: bool) -> None:  # noqa: FBT001
    """A protocol has its package, and HTTP is read only."""
    assert packages_for(url) == packages
    assert is_read_only(url) is read_only


class Answered(Exception):  # noqa: N818
    """An error with an HTTP status, as aiohttp and gcsfs have it."""

    def __init__(self, **attributes: object) -> None:
        self.__dict__.update(attributes)


@pytest.mark.parametrize(
    ("error", "refused"),
    [
        (PermissionError("Access Denied"), True),
        (OSError(errno.EROFS, "Read-only file system"), True),
        (OSError(errno.EACCES, "Permission denied"), True),
        (NotImplementedError(), True),
        (Answered(status=403), True),
        (Answered(status=401), True),
        (Answered(code="403"), True),
        (Answered(status=500), False),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (FileNotFoundError("The specified bucket does not exist"), False),
        (TimeoutError(), False),
    ],
)
def test_refusals(error: Exception, refused: bool) -> None:  # noqa: FBT001
    """Missing rights are told from a server in trouble."""
    assert is_refusal(error) is refused


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("s3://bucket/prefix", "s3://bucket/prefix"),
        ("file:///folder", "file:///folder"),
        ("https://me:pw@host:1/path?sig=x#y", "https://host:1/path"),
        ("https://token@host/path", "https://host/path"),
        ("memory://?x", "memory://"),
    ],
)
def test_no_secret_is_shown(url: str, expected: str) -> None:
    """A URL is shown without password, token and query."""
    assert shown(url) == expected


def test_warnings_stop_at_the_first_trouble(tmp_path: Path, closed: str) -> None:
    """Trouble that comes from many threads at once is told once."""
    for _ in range(5):
        machine = Machine(tmp_path / "own", closed)
        with contextlib.ExitStack() as stack:
            stack.enter_context(machine.cache)
            for key in KEYS:
                machine.cache.fetch(key)
        assert len(machine.warnings) == 1
