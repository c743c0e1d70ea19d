"""The engines file: one engine per line, its URL and, if it is to be asserted, its role. The parsing is pure.

# prefill workers
http://10.0.0.4:8000  prefill
http://10.0.0.5:8000            # it says itself what it is
"""

from dataclasses import dataclass
from pathlib import Path

from kvberth.router.engines import Role, engine_url

__all__ = ["EnginesFileError", "NamedEngine", "parse_engines", "read_engines_file"]

_ROLES = {role.word: role for role in Role}


class EnginesFileError(ValueError):
    """The file cannot be used; the text names it, the line and what is wrong."""


@dataclass(frozen=True, slots=True)
class NamedEngine:
    url: str
    role: Role | None = None


def read_engines_file(path: Path) -> list[NamedEngine]:
    """Raises `EnginesFileError`."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise EnginesFileError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise EnginesFileError(f"{path}: is not UTF-8 text") from error
    try:
        return parse_engines(text)
    except ValueError as error:
        raise EnginesFileError(f"{path}: {error}") from error


def parse_engines(text: str) -> list[NamedEngine]:
    """Raises `ValueError` that names the line."""
    named: dict[str, NamedEngine] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            engine = _engine(words)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from error
        if engine.url in named:
            raise ValueError(f"line {number}: {engine.url} is named more than once")
        named[engine.url] = engine
    return list(named.values())


def _engine(words: list[str]) -> NamedEngine:
    url = engine_url(words[0])
    match words[1:]:
        case []:
            return NamedEngine(url)
        case [role] if role in _ROLES:
            return NamedEngine(url, _ROLES[role])
        case rest:
            raise ValueError(f"expected a URL and perhaps {' or '.join(_ROLES)}, got {' '.join(rest)!r} behind the URL")
