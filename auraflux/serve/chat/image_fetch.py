"""Fetch an image from a URL that a client sent: only from public addresses, within limits on size, time and redirects.

The address that is connected to is the one that was checked, so that a name which resolves differently the second time leads
nowhere else. Proxies of the environment are not used.
"""

import http.client
import ipaddress
import socket
import ssl
import time
from urllib.parse import urljoin, urlsplit

from auraflux.errors import InputError
from auraflux.vision.image import MAX_NBYTES

MAX_REDIRECTS = 3
TIMEOUT_S = 10.0  # for all of it
PIECE = 1 << 16
PORTS = {"http": 80, "https": 443}


def fetch_image(url: str) -> bytes:
    """Return the bytes that a URL leads to."""
    end = time.monotonic() + TIMEOUT_S
    for _ in range(MAX_REDIRECTS + 1):
        found = _get(url, end)
        if isinstance(found, bytes):
            return found
        url = found
    raise InputError(f"the URL redirects more than {MAX_REDIRECTS} times.")


def _get(url: str, end: float) -> bytes | str:
    """Return the content of a URL, or the URL that it redirects to."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or PORTS.get(parts.scheme, 0)
        path = f"{parts.path or '/'}{'?' + parts.query if parts.query else ''}"
        path.encode("ascii")
    except ValueError:
        raise InputError("the URL is not valid.") from None
    if parts.scheme not in PORTS or not host or parts.username or parts.password:
        raise InputError("the URL must be http or https, without a user name.")
    connection = http.client.HTTPConnection(host, port, timeout=_left(end))
    try:
        connection.sock = _connect(host, port, end, parts.scheme == "https")
        connection.request("GET", path, headers={"Accept": "image/*", "User-Agent": "auraflux", "Accept-Encoding": "identity"})
        response = connection.getresponse()
        location = response.getheader("Location")
        if response.status in (301, 302, 303, 307, 308) and location:
            return urljoin(url, location)
        if response.status != 200:
            raise InputError(f"the URL answered with status {response.status}.")
        return _read(connection.sock, response, end)
    except (OSError, http.client.HTTPException, UnicodeError) as err:
        raise InputError(f"the URL cannot be fetched: {type(err).__name__}.") from None
    finally:
        connection.close()


def _read(sock: socket.socket | None, response: http.client.HTTPResponse, end: float) -> bytes:
    found = bytearray()
    while piece := response.read1(PIECE):
        found += piece
        if len(found) > MAX_NBYTES:
            raise InputError(f"the image has more than {MAX_NBYTES:,} bytes.")
        if sock is not None and not response.isclosed():
            sock.settimeout(_left(end))
    return bytes(found)


def _connect(host: str, port: int, end: float, secure: bool) -> socket.socket:
    """Connect to the first public address of a host."""
    addresses = [entry[4] for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    for address in addresses:
        if not is_public(str(address[0])):
            raise InputError("the URL leads to an address that is not public.")
    failure: OSError | None = None
    for address in addresses:
        try:
            # numbers, so that the name is not resolved again
            sock = socket.create_connection((str(address[0]), port), timeout=_left(end))
        except OSError as err:
            failure = err
            continue
        return ssl.create_default_context().wrap_socket(sock, server_hostname=host) if secure else sock
    raise failure or OSError("no address")


def is_public(address: str) -> bool:
    """Return whether an address may be connected to: public, also where it stands for an IPv4 address."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        inner = found.ipv4_mapped or found.sixtofour or (found.teredo[1] if found.teredo else None)
        # 64:ff9b::/96 and 64:ff9b:1::/48 translate to IPv4
        if inner is None and found in ipaddress.ip_network("64:ff9b::/32"):
            inner = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
        if inner is not None:
            found = inner
    return found.is_global and not found.is_multicast


def _left(end: float) -> float:
    left = end - time.monotonic()
    if left <= 0:
        raise InputError(f"the URL did not answer within {TIMEOUT_S:.0f} s.")
    return left
