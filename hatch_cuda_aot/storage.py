"""Bytes under names on whatever fsspec reaches: a bucket, a web server, a folder.

The one place that knows fsspec and its protocols.  It is imported, with fsspec, by the first read or write.
"""

from __future__ import annotations

import errno
import logging
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from hatch_cuda_aot.errors import BuildError

__all__ = ["MissingPackageError", "Storage", "is_read_only", "is_refusal", "packages_for", "shown"]

#: Protocol -> the package that fsspec needs for it.  For others fsspec's own message says which it is.
_PACKAGES = {
    "abfs": "adlfs",
    "abfss": "adlfs",
    "az": "adlfs",
    "gcs": "gcsfs",
    "gs": "gcsfs",
    "http": "aiohttp",
    "https": "aiohttp",
    "s3": "s3fs",
    "s3a": "s3fs",
    "sftp": "paramiko",
    "smb": "smbprotocol",
    "ssh": "paramiko",
}

_READ_ONLY = frozenset({"http", "https"})

#: Where a file needs its folder first.  Elsewhere making one could make a bucket.
_WITH_FOLDERS = frozenset({"file", "ftp", "local", "sftp", "smb", "ssh"})

#: Loggers that print to stderr, unless somebody wants to hear them, what is an exception as well.
_TALKATIVE = ("adlfs", "fsspec", "gcsfs", "s3fs")

_CONNECT_TIMEOUT = 3
_READ_TIMEOUT = 10


class MissingPackageError(BuildError):
    """A package that the URL's protocol needs is not installed."""


class Storage:
    """What lies below a URL; safe to use from several threads.

    Raises:
        MissingPackageError: with the command that installs what is missing.

    """

    def __init__(self, url: str) -> None:
        protocol = _protocol(url)
        for name in _TALKATIVE:
            logging.getLogger(name).addHandler(logging.NullHandler())
        try:
            from fsspec.core import url_to_fs

            # A file system of our own: fsspec would hand out an earlier one, with the credentials of that time.
            self._fs, root = url_to_fs(url, skip_instance_cache=True, **_options(protocol))
        except ImportError as error:
            raise _missing(url, str(error)) from None
        if hasattr(self._fs, "retries"):
            self._fs.retries = 1  # s3fs and gcsfs would go on for minutes
        # A query, as of a signed URL, goes behind the name.
        self._root, self._mark, self._query = (
            str(root).partition("?") if protocol in _READ_ONLY else (str(root), "", "")
        )
        self._folders = protocol in _WITH_FOLDERS

    def read(self, name: str) -> bytes | None:
        """Return what lies under `name`, or None; raises whatever the file system does if it cannot be asked."""
        try:
            return bytes(self._fs.cat_file(self._path(name)))
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        """Put `content` under `name`; raises whatever the file system does."""
        path = self._path(name)
        try:
            self._fs.pipe_file(path, content)
        except FileNotFoundError:
            if not self._folders:
                raise
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._fs.pipe_file(path, content)

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}{self._mark}{self._query}"


def packages_for(url: str) -> list[str]:
    """Return the packages on PyPI that a URL needs."""
    return ["fsspec", *filter(None, [_PACKAGES.get(_protocol(url))])]


def is_read_only(url: str) -> bool:
    """Tell whether there is no writing to a URL by its very protocol."""
    return _protocol(url) in _READ_ONLY


def is_refusal(error: BaseException) -> bool:
    """Tell whether an error means that the one who asks may not: rights are missing, not the server."""
    if isinstance(error, OSError) and error.errno in {errno.EACCES, errno.EPERM, errno.EROFS}:
        return True
    status = error.status if hasattr(error, "status") else getattr(error, "code", None)  # aiohttp's, or gcsfs's
    return isinstance(error, (PermissionError, NotImplementedError)) or status in {401, 403, "401", "403"}


def shown(url: str, text: str | None = None) -> str:
    """Return a URL, or a text about it, without the secrets that the URL may hold: a password, or a signature."""
    parts = urlsplit(url)
    if text is None:
        host = parts.netloc.rpartition("@")[2]
        return urlunsplit((parts.scheme, host, parts.path, "", "")) if parts.netloc else url.partition("?")[0]
    for secret in filter(None, [parts.query, parts.netloc.rpartition("@")[0], parts.password]):
        text = text.replace(secret, "***")
    return text


def _protocol(url: str) -> str:
    return url.partition("://")[0].lower()


def _options(protocol: str) -> dict[str, Any]:
    """Return what a file system must be told: short timeouts, and what one expects of a client in CI."""
    if protocol in {"s3", "s3a"}:
        config = {
            "connect_timeout": _CONNECT_TIMEOUT,
            "read_timeout": _READ_TIMEOUT,
            "retries": {"max_attempts": 1},
            "max_pool_connections": 32,
        }
        return {"config_kwargs": {**config, **_configured(protocol, "config_kwargs")}}
    if protocol in _READ_ONLY:
        import aiohttp

        timeout = aiohttp.ClientTimeout(sock_connect=_CONNECT_TIMEOUT, sock_read=_READ_TIMEOUT)
        client = {"timeout": timeout, "trust_env": True}  # the environment names proxies and ~/.netrc
        return {"client_kwargs": {**client, **_configured(protocol, "client_kwargs")}}
    return {}


def _configured(protocol: str, name: str) -> dict[str, Any]:
    """Return what the user's configuration of fsspec says; an argument of ours would hide it."""
    from fsspec.config import conf

    value = conf.get(protocol, {}).get(name, {})
    return dict(value) if isinstance(value, dict) else {}


def _missing(url: str, reason: str) -> MissingPackageError:
    packages = packages_for(url)
    message = (
        f"packages that it needs are not installed ({reason}). Install them with\n  pip install {' '.join(packages)}"
    )
    return MissingPackageError(message)
