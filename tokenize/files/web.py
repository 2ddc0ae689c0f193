"""Files at http:// and https:// URLs: sequential reads, and seeks if the server supports ranges.

After a lost connection, reading resumes at the position reached. A server without ranges sends the
file from the beginning, and the bytes already read are skipped. A response that ends early is an
error, not the end of the file, unless the server sends no Content-Length: then nobody can tell.
"""

from __future__ import annotations

import http.client
import io
import re
import socket
import ssl
import urllib.error
import urllib.request
from typing import Any

from ...console.errors import InputError, StorageError
from ...dataplane.storage.remote import retry

TIMEOUT = 60.0
"""Seconds without a byte after which a connection is closed."""
SKIP_BYTES = 1 << 20


def request_information(url: str) -> dict[str, Any]:
    """Return a file's size, if the server sends it, and headers that identify the version."""
    with WebFile(url) as file:
        file.connect()
        return {"size": file.size, **file.version}


class WebFile(io.RawIOBase):
    """A file on a web server, read over one connection at a time."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.position = 0
        self.size: int | None = None
        self.version: dict[str, str] = {}
        self._response: http.client.HTTPResponse | None = None
        self._sought = False

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_END:
            self.connect()
            if self.size is None:
                raise InputError(f"{self.url}: the server does not send its size", hint=DOWNLOAD)
        target = (
            offset
            + {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.size or 0}[whence]
        )
        if target != self.position:
            self._disconnect()
            self.position, self._sought = target, True
        return target

    def tell(self) -> int:
        return self.position

    def readinto(self, buffer: Any) -> int:
        data = retry("read", self.url, lambda: self._read(len(buffer)))
        buffer[: len(data)] = data
        self.position += len(data)
        return len(data)

    def connect(self) -> None:
        """Send the request, to read size and version from the response headers."""
        if self._response is None:
            retry("read", self.url, self._connect)

    def close(self) -> None:
        self._disconnect()
        super().close()

    def _read(self, size: int) -> bytes:
        if self.size is not None and self.position >= self.size:
            return b""
        try:
            if self._response is None:
                self._connect()
            assert self._response is not None
            data = self._response.read(size)
        except (OSError, http.client.HTTPException) as error:
            self._disconnect()
            raise _to_os_error(error) from None
        if not data and self.size is not None and self.position < self.size:
            self._disconnect()
            raise ConnectionError(
                f"the response ended after {self.position:,} of {self.size:,} bytes"
            )
        return data

    def _connect(self) -> None:
        request = urllib.request.Request(self.url, headers={"Range": f"bytes={self.position}-"})
        try:
            response = urllib.request.urlopen(request, timeout=TIMEOUT)
        except urllib.error.HTTPError as error:
            if error.code == 416:  # range not satisfiable: the file is empty
                self.size = self.position
                return
            raise _to_os_error(error) from None
        except (OSError, http.client.HTTPException) as error:
            raise _to_os_error(error) from None
        self._response = response
        content_range = re.fullmatch(
            r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", "")
        )
        length = response.headers.get("Content-Length")
        total = content_range[2] if content_range else length
        version = {
            key: response.headers[key] for key in VERSION_HEADERS if response.headers.get(key)
        }
        if self.version and version != self.version:
            raise InputError(f"{self.url} changed while it was read")
        self.version = version
        self.size = int(total) if total and total != "*" else None
        if self.position and not content_range:
            if self._sought:
                raise InputError(
                    f"{self.url}: the server does not support byte ranges, which this format needs",
                    hint=DOWNLOAD,
                )
            self._skip()

    def _skip(self) -> None:
        """Skip the bytes already read: the server ignored the range and sends the whole file."""
        assert self._response is not None
        num_remaining = self.position
        while num_remaining:
            data = self._response.read(min(num_remaining, SKIP_BYTES))
            if not data:
                raise ConnectionError("the response ended before the position already reached")
            num_remaining -= len(data)

    def _disconnect(self) -> None:
        if self._response is not None:
            self._response.close()
            self._response = None


VERSION_HEADERS = ("ETag", "Last-Modified")
DOWNLOAD = "download the file, and pass its path"


def _to_os_error(error: Exception) -> Exception:
    """Convert a web error into an OSError; its class decides whether the request is retried."""
    if isinstance(error, urllib.error.HTTPError):
        if error.code in (404, 410):
            return FileNotFoundError(str(error))
        if error.code in (401, 403):
            return PermissionError(str(error))
        if error.code in (408, 429) or error.code >= 500:
            return ConnectionError(f"the server answered {error.code} {error.reason}")
        return OSError(f"the server answered {error.code} {error.reason}")
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(reason, ssl.SSLCertVerificationError):
        return StorageError(
            f"the server's certificate is not trusted: {reason.verify_message}",
            hint="set SSL_CERT_FILE to the certificate file of the authority that signed it",
        )
    if isinstance(reason, (TimeoutError, ConnectionError, socket.gaierror)):
        return reason
    return ConnectionError(str(reason) or type(reason).__name__)
