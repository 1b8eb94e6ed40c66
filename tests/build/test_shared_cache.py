"""The shared cache on a real S3 server, and in wheel builds from end to end."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from hatchling.builders.wheel import WheelBuilder

from hatch_cuda_aot.cache import Cache
from hatch_cuda_aot.compile.tasks import FloorResult
from hatch_cuda_aot.project import Project
from hatch_cuda_aot.shared import SharedLevel
from tests.build.conftest import PACKAGES
from tests.wheels import copy_project, frontend_environ, only_wheel

KEYS = [f"{number:02x}" * 32 for number in range(40)]
RESULTS = {key: FloorResult("7.8", number) for number, key in enumerate(KEYS)}

URL = "s3://results/some/prefix"


class Bucket:
    """A bucket on an S3 server of our own, and the environment that leads there."""

    def __init__(self, client: Any, environ: dict[str, str]) -> None:
        self._client = client
        self.environ = environ

    def entries(self) -> dict[str, bytes]:
        found = self._client.list_objects_v2(Bucket="results").get("Contents", [])
        return {
            item["Key"]: self._client.get_object(Bucket="results", Key=item["Key"])["Body"].read() for item in found
        }

    def put(self, name: str, content: bytes) -> None:
        self._client.put_object(Bucket="results", Key=name, Body=content)

    def deny(self, action: str) -> None:
        """Refuse one action to everybody."""
        resources = ["arn:aws:s3:::results", "arn:aws:s3:::results/*"]
        statement = {"Effect": "Deny", "Principal": "*", "Action": action, "Resource": resources}
        policy = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
        self._client.put_bucket_policy(Bucket="results", Policy=policy)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Bucket]:
    """An empty bucket on a server that this test starts."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    environ = {
        "AWS_ACCESS_KEY_ID": "me",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_CONFIG_FILE": str(tmp_path / "none"),
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "none"),
    }
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    client = pytest.importorskip("boto3").client("s3")
    client.create_bucket(Bucket="results")
    yield Bucket(client, environ)
    urllib.request.urlopen(f"http://{host}:{port}/moto-api/reset", b"").close()  # what it holds outlives a server
    server.stop()


class Machine:
    """A cache with a folder of its own and the bucket below it; hears the warnings."""

    def __init__(self, folder: Path, url: str = URL) -> None:
        self.warnings: list[str] = []
        self.cache = Cache(folder, SharedLevel(url, self.warnings.append))

    def fetch(self, *keys: str) -> list[Any]:
        futures: list[Future[Any] | None] = [self.cache.fetch(key) for key in keys]
        return [None if future is None else future.result(60) for future in futures]

    def put(self, *keys: str) -> None:
        with self.cache:
            for key in keys:
                self.cache.put(key, RESULTS[key])


def test_s3(tmp_path: Path, bucket: Bucket) -> None:
    """What one machine puts into a bucket another one fetches, in parallel; the own folder then has it as well."""
    first, second = Machine(tmp_path / "first"), Machine(tmp_path / "second")
    first.put(*KEYS[1:])
    assert sorted(bucket.entries()) == [f"some/prefix/{key[:2]}/{key}" for key in KEYS[1:]]
    assert second.fetch(*KEYS) == [None, *(RESULTS[key] for key in KEYS[1:])]
    assert [second.cache.get(key) for key in KEYS] == [None, *(RESULTS[key] for key in KEYS[1:])]
    assert first.warnings == second.warnings == []


def test_s3_that_refuses_writes(tmp_path: Path, bucket: Bucket) -> None:
    """Who may only read reads on; that nothing was written is one warning."""
    Machine(tmp_path / "first").put(KEYS[0])
    bucket.deny("s3:PutObject")
    second = Machine(tmp_path / "second")
    with second.cache:
        for key in KEYS[1:]:
            second.cache.put(key, RESULTS[key])
        assert second.fetch(KEYS[0]) == [RESULTS[KEYS[0]]]
    assert second.warnings == [f"the shared cache {URL} takes no results of this build: PermissionError: Forbidden"]
    assert len(bucket.entries()) == 1


def test_s3_that_refuses_reads(tmp_path: Path, bucket: Bucket) -> None:
    """Who may not read gets one warning, which says what to check."""
    Machine(tmp_path / "first").put(*KEYS)
    bucket.deny("s3:GetObject")
    second = Machine(tmp_path / "second")
    assert second.fetch(*KEYS) == [None] * len(KEYS)
    advice = "check the credentials, and that they may read and list there"
    assert second.warnings == [
        f"the shared cache {URL} is not used by this build: PermissionError: Forbidden; {advice}"
    ]


def test_s3_without_the_bucket(tmp_path: Path, bucket: Bucket) -> None:  # noqa: ARG001
    """A bucket that does not exist is one warning, and is not created."""
    machine = Machine(tmp_path / "own", "s3://resutls/prefix")
    machine.put(*KEYS)
    (warning,) = machine.warnings
    assert warning.endswith("FileNotFoundError: The specified bucket does not exist")


def test_requirements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build with a shared cache requires what its protocol needs, also if only the environment names one."""
    project = copy_project(PACKAGES / "vars", tmp_path / "project")

    def required() -> list[str]:
        found = Project(WheelBuilder(str(project))).requirements()
        return [name for name in found if not name.startswith(("cuda-", "nvidia-"))]

    for name in ("HATCH_CUDA_AOT_CACHE", "HATCH_CUDA_AOT_CACHE_URL"):
        monkeypatch.delenv(name, raising=False)
    assert required() == []
    monkeypatch.setenv("HATCH_CUDA_AOT_CACHE_URL", URL)
    assert required() == ["fsspec", "s3fs"]
    monkeypatch.setenv("HATCH_CUDA_AOT_CACHE", "0")
    assert required() == []
    monkeypatch.delenv("HATCH_CUDA_AOT_CACHE")
    monkeypatch.delenv("HATCH_CUDA_AOT_CACHE_URL")
    with (project / "pyproject.toml").open("a") as file:
        file.write('cache-url = "https://host/path"\n')
    assert required() == ["fsspec", "aiohttp"]


def test_wheels(tmp_path: Path, bucket: Bucket, wheelhouse: Path) -> None:
    """pip and uv fetch what S3 needs by themselves; a second machine compiles nothing, and all wheels are the same.

    Nor does it matter for the wheel that every entry is damaged, or that the server is gone: it is one warning, and after
    the former the cache is mended.
    """
    project = copy_project(PACKAGES / "vars", tmp_path / "project")

    def build(machine: str, *command: str, **changes: str) -> tuple[bytes, str]:
        environ = {
            **frontend_environ(wheelhouse),
            **bucket.environ,
            "HATCH_CUDA_AOT_CACHE_URL": URL,
            "HATCH_CUDA_AOT_CACHE_DIR": str(tmp_path / machine),
            **changes,
        }
        output = run([sys.executable, "-m", *command, machine, "."], project, environ)
        return only_wheel(project / machine).read_bytes(), output

    pip = ("pip", "wheel", "-v", "--no-deps", "--wheel-dir")
    uv = ("uv", "build", "--wheel", "--out-dir")
    wheel, output = build("first", *pip)
    entries = bucket.entries()
    assert len(entries) == 4  # two front ends, a cubin, a floor
    assert "0 of 4 results from the cache" in output
    assert "shared cache" not in output

    again, output = build("second", *pip)
    assert again == wheel
    assert "4 of 4 results from the cache" in output
    assert "shared cache" not in output

    names = sorted(entries)
    for name, other in zip(names, names[1:] + names[:1], strict=True):
        bucket.put(name, entries[other])
    again, output = build("third", *uv)
    assert again == wheel
    assert "0 of 4 results from the cache" in output
    assert output.count("shared cache") == output.count("holds entries that are damaged") == 1
    assert bucket.entries() == entries

    again, output = build("fourth", *uv, AWS_ENDPOINT_URL="http://127.0.0.1:9")
    assert again == wheel
    assert output.count("shared cache") == output.count("is not used by this build: EndpointConnectionError") == 1


def run(command: list[str], folder: Path, environ: dict[str, str]) -> str:
    done = subprocess.run(
        command, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    return done.stdout
