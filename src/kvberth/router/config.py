"""What the router is told at start: validated once, read everywhere, changed never.

Nothing here opens a socket or looks at a clock.
"""

import re
from dataclasses import dataclass, field
from enum import StrEnum

from kvberth.router.binding import Binding
from kvberth.router.choice import DecodePolicy, PrefillPolicy
from kvberth.router.engines import engine_url
from kvberth.router.hosts import is_loopback

__all__ = ["Mode", "RouterConfig"]


class Mode(StrEnum):
    """How the KV cache comes to the decode worker: P WRITEs (`push`) or D READs (`pull`)."""

    PUSH = "push"
    PULL = "pull"


_HOST_NAME = re.compile(r"[A-Za-z0-9._-]+|[0-9A-Fa-f]*:[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*")  # a name or an address

_DURATIONS = (
    "connect_timeout_seconds",
    "first_token_timeout_seconds",
    "health_interval_seconds",
    "client_stall_seconds",
    "queue_timeout_seconds",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Settings of one router.

    `engines` are base URLs of vLLM engines, such as `http://10.0.0.4:8000`; each says itself whether it is a prefill or
    a decode worker. Of those in `prefill` and `decode` it is asserted: one that says otherwise is not used. More may
    be named in `engines_file`, which is read again on SIGHUP. Without any prefill worker every request is served
    undivided, which is useful as a baseline.

    A request goes to the prefill worker that saw the beginning of its prompt if its queue is at most
    `affinity_seconds` longer than the shortest.

    A decode worker that is estimated to lack fewer than `local_prefill_tokens` of a prompt computes them itself, and no
    prefill worker is asked; 0 is never. `max_retries` is how many failures of its decode legs one request may have
    hidden from its client. With `continue_streams` a stream whose engine goes away is continued on another one; for
    that the engines are asked for token ids, which the client does not see.

    `first_token_timeout_seconds` bounds a leg's wait for its first byte where that byte is a token: the prefill leg
    always, the decode leg of a streamed request. An engine answers an unstreamed request only when its last token is
    made, so there only `total_timeout_seconds` applies.

    `max_queue` is 0 because engines queue already: what is in flight waits there, behind no more than `max_in_flight`
    others. Whoever lowers that bound, to keep the engines' queues short, gives bursts a place to wait with `max_queue`.

    `api_key` are the keys of clients; with any, or with `engine_api_key`, the engines never see a client's key. They do
    not open the admin API, and `admin_api_key` opens nothing else.

    What changes engines is served at `admin_host` and `admin_port` only, and nowhere without `admin_port`. Without
    `admin_api_key` it serves loopback clients only, as does what shows engines and requests at `port`.

    Where the page and the admin API are served on the loopback address, or without a key, they are served under its
    names only, and those in `allowed_host`.

    `control_key_file` is the router's own key on the control channels of prefill workers that want one, and
    `control_peers_dir` has theirs (`kvberth keys`).

    With `otlp_traces_endpoint`, the address of a collector as vLLM takes it, requests are traced.

    Raises `ValueError` with one line that names the setting.
    """

    engines: tuple[str, ...] = ()
    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    engines_file: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    admin_host: str = "127.0.0.1"
    admin_port: int | None = None
    admin_api_key: str | None = field(default=None, repr=False)
    allowed_host: tuple[str, ...] = ()
    mode: Mode = Mode.PUSH
    binding: Binding = Binding.AUTO
    connect_timeout_seconds: float = 5.0
    first_token_timeout_seconds: float = 300.0
    total_timeout_seconds: float | None = None
    health_interval_seconds: float = 1.0
    prefill_policy: PrefillPolicy = PrefillPolicy.QUEUE
    decode_policy: DecodePolicy = DecodePolicy.FREE_KV
    affinity_seconds: float = 0.5
    local_prefill_tokens: int = 0
    max_retries: int = 2
    continue_streams: bool = True
    client_stall_seconds: float = 60.0
    max_in_flight: int = 2048
    max_queue: int = 0
    queue_timeout_seconds: float = 30.0
    max_body_bytes: int = 32 * 1024 * 1024
    api_key: tuple[str, ...] = field(default=(), repr=False)
    engine_api_key: str | None = field(default=None, repr=False)
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    engine_ca_file: str | None = None
    engine_insecure: bool = False
    control_key_file: str | None = None
    control_peers_dir: str | None = None
    otlp_traces_endpoint: str | None = None

    def __post_init__(self) -> None:
        for name in ("engines", "prefill", "decode"):
            object.__setattr__(self, name, tuple(_engine_url(name, url) for url in getattr(self, name)))
        object.__setattr__(self, "mode", Mode(self.mode))
        object.__setattr__(self, "binding", Binding(self.binding))
        object.__setattr__(self, "prefill_policy", PrefillPolicy(self.prefill_policy))
        object.__setattr__(self, "decode_policy", DecodePolicy(self.decode_policy))
        if not self.engines and not self.decode and self.engines_file is None:
            raise ValueError("engines, decode, engines_file: at least one is needed, or nobody could answer")
        urls = self.engines + self.prefill + self.decode
        if repeated := sorted({url for url in urls if urls.count(url) > 1}):
            raise ValueError(f"engines, prefill, decode: {repeated[0]} is named more than once")
        self._check_numbers()
        self._check_keys()
        self._check_addresses()
        self._check_files()
        if self.engine_insecure and self.engine_ca_file is not None:
            raise ValueError("engine_ca_file, engine_insecure: only one of them makes sense")

    @property
    def passes_credentials(self) -> bool:
        """Whether engines get the keys that clients send."""
        return not self.api_key and self.engine_api_key is None

    def _check_numbers(self) -> None:
        if not self.affinity_seconds >= 0:
            raise ValueError(f"affinity_seconds: must be 0 or above, got {self.affinity_seconds}")
        for name in _DURATIONS:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}: must be above 0, got {getattr(self, name)}")
        if self.total_timeout_seconds is not None and self.total_timeout_seconds <= 0:
            raise ValueError(f"total_timeout_seconds: must be above 0 or none, got {self.total_timeout_seconds}")
        for name in ("max_in_flight", "max_body_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1, got {getattr(self, name)}")
        for name in ("max_queue", "local_prefill_tokens", "max_retries"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: must be 0 or more, got {getattr(self, name)}")

    def _check_keys(self) -> None:
        for key in (*self.api_key, self.engine_api_key, self.admin_api_key):
            if key is not None and (not key or not key.isascii() or not key.isprintable() or " " in key):
                raise ValueError("api_key, engine_api_key, admin_api_key: a key is printable ASCII without spaces")
        if self.admin_api_key in self.api_key:
            raise ValueError("admin_api_key: must not be one of api_key, or every client could take the engines away")

    def _check_addresses(self) -> None:
        if self.admin_port is not None:
            if self.admin_port == self.port:
                raise ValueError(f"admin_port: {self.port} is the port of the clients' API")
            if self.admin_api_key is None and not is_loopback(self.admin_host):
                raise ValueError(
                    f"admin_host: {self.admin_host} can be reached by others; admin_api_key is needed there"
                )
        for name in self.allowed_host:
            if not _HOST_NAME.fullmatch(name):
                raise ValueError(f"allowed_host: {name!r} is no name of a host, without scheme and port")

    def _check_files(self) -> None:
        for one, other in (("ssl_certfile", "ssl_keyfile"), ("control_key_file", "control_peers_dir")):
            if (getattr(self, one) is None) is not (getattr(self, other) is None):
                raise ValueError(f"{one}, {other}: one needs the other")


def _engine_url(setting: str, url: str) -> str:
    try:
        return engine_url(url)
    except ValueError as error:
        raise ValueError(f"{setting}: {error}") from error
