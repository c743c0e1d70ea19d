"""Under which names a router on the loopback address is looked at.

A browser shows a page of any site, and that site's name can be made to stand for 127.0.0.1 a moment later (DNS
rebinding): the page then reads from the router as from its own site. The `Host` header still has the site's name. Pure.
"""

import ipaddress
import re
from collections.abc import Iterable, Sequence

from kvberth.router.errors import RouterError

__all__ = ["HostNames", "is_loopback", "is_loopback_address"]

_NAME_AND_PORT = re.compile(r"(\[[^\]]*\]|[^:]*)(:[0-9]*)?")


class HostNames:
    """The names that a request may give its server.

    Args:
        bound: where the server listens.
        allowed: further names.
    """

    def __init__(self, bound: str, allowed: Iterable[str]) -> None:
        self.is_local = is_loopback(bound)
        self._known = {bound.lower(), *(name.lower() for name in allowed)}

    def check(self, said: Sequence[str]) -> None:
        """Raises `RouterError` unless a request's `Host` is a loopback name, where we listen, or one of `allowed`."""
        if not said or not all(self._is_known(each) for each in said):
            message = f"This is not served under the name {', '.join(said)[:80]!r}. Use localhost, or --allowed-host."
            raise RouterError(421, message, code="unknown_host")

    def _is_known(self, host: str) -> bool:
        parts = _NAME_AND_PORT.fullmatch(host.strip().lower())
        if parts is None:
            return False
        name = parts[1].strip("[]").removesuffix(".")
        return name in self._known or name.endswith(".localhost") or is_loopback(name)


def is_loopback(host: str) -> bool:
    """Whether this address or name is the machine's own, for its own programs only."""
    return host.lower() == "localhost" or is_loopback_address(host)


def is_loopback_address(host: str) -> bool:
    """The same of an address alone: names prove nothing of where a client is."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
