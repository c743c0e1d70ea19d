"""What the router is told at start: validated once, read everywhere, changed never.

Nothing here opens a socket or looks at a clock.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from urllib.parse import urlsplit

__all__ = ["Mode", "RouterConfig"]


class Mode(StrEnum):
    """How the KV cache comes to the decode worker: P WRITEs (`push`) or D READs (`pull`)."""

    PUSH = "push"
    PULL = "pull"


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

    `prefill` and `decode` are base URLs of vLLM engines, such as `http://10.0.0.4:8000`. Without any `prefill` URL
    every request is served undivided, which is useful as a baseline.

    `first_token_timeout_seconds` bounds a leg's wait for its first byte where that byte is a token: the prefill leg
    always, the decode leg of a streamed request. An engine answers an unstreamed request only when its last token is
    made, so there only `total_timeout_seconds` applies.

    `max_queue` is 0 because engines queue already: what is in flight waits there, behind no more than `max_in_flight`
    others. Whoever lowers that bound, to keep the engines' queues short, gives bursts a place to wait with `max_queue`.

    `api_key` are the keys of clients; with any, or with `engine_api_key`, the engines never see a client's key.

    Raises `ValueError` with one line that names the setting.
    """

    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    mode: Mode = Mode.PUSH
    connect_timeout_seconds: float = 5.0
    first_token_timeout_seconds: float = 300.0
    total_timeout_seconds: float | None = None
    health_interval_seconds: float = 1.0
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

    def __post_init__(self) -> None:
        object.__setattr__(self, "prefill", tuple(_engine_url("prefill", url) for url in self.prefill))
        object.__setattr__(self, "decode", tuple(_engine_url("decode", url) for url in self.decode))
        object.__setattr__(self, "mode", Mode(self.mode))
        if not self.decode:
            raise ValueError("decode: at least one engine URL is needed")
        urls = self.prefill + self.decode
        if repeated := sorted({url for url in urls if urls.count(url) > 1}):
            raise ValueError(f"prefill, decode: {repeated[0]} is named more than once")
        for name in _DURATIONS:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}: must be above 0, got {getattr(self, name)}")
        if self.total_timeout_seconds is not None and self.total_timeout_seconds <= 0:
            raise ValueError(f"total_timeout_seconds: must be above 0 or none, got {self.total_timeout_seconds}")
        for name in ("max_in_flight", "max_body_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1, got {getattr(self, name)}")
        if self.max_queue < 0:
            raise ValueError(f"max_queue: must be 0 or more, got {self.max_queue}")
        for key in (*self.api_key, *([] if self.engine_api_key is None else [self.engine_api_key])):
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise ValueError("api_key, engine_api_key: a key is printable ASCII without spaces")
        if (self.ssl_certfile is None) is not (self.ssl_keyfile is None):
            raise ValueError("ssl_certfile, ssl_keyfile: one needs the other")
        if self.engine_insecure and self.engine_ca_file is not None:
            raise ValueError("engine_ca_file, engine_insecure: only one of them makes sense")

    @property
    def passes_credentials(self) -> bool:
        """Whether engines get the keys that clients send."""
        return not self.api_key and self.engine_api_key is None


def _engine_url(setting: str, url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ValueError(f"{setting}: {url!r} is no engine URL, expected something like http://127.0.0.1:8001")
    return url.rstrip("/")
