"""What the router is told at start: validated once, read everywhere, changed never.

Nothing here opens a socket or looks at a clock.
"""

from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import urlsplit

from kvberth.router.binding import Binding

__all__ = ["Mode", "RouterConfig"]


class Mode(StrEnum):
    """How the KV cache comes to the decode worker: P WRITEs (`push`) or D READs (`pull`)."""

    PUSH = "push"
    PULL = "pull"


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Settings of one router.

    `prefill` and `decode` are base URLs of vLLM engines, such as `http://10.0.0.4:8000`. Without any `prefill` URL
    every request is served undivided, which is useful as a baseline.

    `first_token_timeout_seconds` bounds a leg's wait for its first byte where that byte is a token: the prefill leg
    always, the decode leg of a streamed request. An engine answers an unstreamed request only when its last token is
    made, so there only `total_timeout_seconds` applies.

    Raises `ValueError` with one line that names the setting.
    """

    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    mode: Mode = Mode.PUSH
    binding: Binding = Binding.EARLY
    bind_margin_seconds: float = 0.01
    connect_timeout_seconds: float = 5.0
    first_token_timeout_seconds: float = 300.0
    total_timeout_seconds: float | None = None
    health_interval_seconds: float = 1.0
    max_in_flight: int = 2048
    max_body_bytes: int = 32 * 1024 * 1024

    def __post_init__(self) -> None:
        object.__setattr__(self, "prefill", tuple(_engine_url("prefill", url) for url in self.prefill))
        object.__setattr__(self, "decode", tuple(_engine_url("decode", url) for url in self.decode))
        object.__setattr__(self, "mode", Mode(self.mode))
        object.__setattr__(self, "binding", Binding(self.binding))
        if not self.decode:
            raise ValueError("decode: at least one engine URL is needed")
        urls = self.prefill + self.decode
        if repeated := sorted({url for url in urls if urls.count(url) > 1}):
            raise ValueError(f"prefill, decode: {repeated[0]} is named more than once")
        for name in ("connect_timeout_seconds", "first_token_timeout_seconds", "health_interval_seconds"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}: must be above 0, got {getattr(self, name)}")
        if self.total_timeout_seconds is not None and self.total_timeout_seconds <= 0:
            raise ValueError(f"total_timeout_seconds: must be above 0 or none, got {self.total_timeout_seconds}")
        for name in ("max_in_flight", "max_body_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1, got {getattr(self, name)}")


def _engine_url(setting: str, url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ValueError(f"{setting}: {url!r} is no engine URL, expected something like http://127.0.0.1:8001")
    return url.rstrip("/")
