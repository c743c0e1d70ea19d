"""The connector's settings, from vLLM's `--kv-transfer-config`."""

import ipaddress
from pathlib import Path
from typing import Any

import msgspec

from kvberth.keys import KeyFileError, Keyring, read_key_pair
from kvberth.protocol import Timing, TransferMode

__all__ = ["ConnectorSettings", "SettingsError", "is_loopback"]


_PORTS = 65536


class SettingsError(ValueError):
    """A setting that cannot be used; the text says what would be right."""


class ConnectorSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`kv_connector_extra_config`.

    Attributes:
        transfer_mode: for requests that do not say.
        control_host: where a prefill worker listens, and what it tells decode workers.
        control_advertised: `HOST:PORT` that it tells them instead, where what it listens on cannot be dialled from
            elsewhere (address translation, a mapped port); rank r is looked for at PORT + r.
        lease_seconds: how long a prefill worker holds finished blocks for a decode worker that has not come.
        deadline_seconds: how long a decode worker waits for the KV of one request.
        stream_during_prefill: WRITE each chunk's blocks as soon as it is computed; if false, all at the prompt's end.
            For comparisons: what streaming gains by itself.
        sort_free_blocks: keep vLLM's free blocks in order, for fewer descriptors; without prefix caching only.
        backend: NIXL's back end.
        control_key_file: this engine's secret key, as `kvberth keys new` has made it.
        control_peers_dir: the public keys of the engines and routers that are accepted.
        allow_unauthenticated: without keys, let whoever reaches `control_host` register, even from other machines.
    """

    transfer_mode: TransferMode = TransferMode.PUSH
    control_host: str = "127.0.0.1"
    control_advertised: str = ""
    lease_seconds: float = Timing().lease_seconds
    deadline_seconds: float = Timing().deadline_seconds
    stream_during_prefill: bool = True
    sort_free_blocks: bool = True
    backend: str = "UCX"
    control_key_file: str | None = None
    control_peers_dir: str | None = None
    allow_unauthenticated: bool = False

    @classmethod
    def from_extra_config(cls, extra_config: dict[str, Any]) -> "ConnectorSettings":
        """Check and convert the dictionary that the user wrote.

        Raises:
            SettingsError: an unknown name, or a value that is not possible.
        """
        try:
            settings = msgspec.convert(extra_config, cls)
        except msgspec.ValidationError as error:
            known = ", ".join(cls.__struct_fields__)
            raise SettingsError(f"kv_connector_extra_config: {error}; the settings are {known}") from error
        for name in ("lease_seconds", "deadline_seconds"):
            if getattr(settings, name) <= 0:
                raise SettingsError(f"kv_connector_extra_config: {name} must be above 0")
        if (settings.control_key_file is None) is not (settings.control_peers_dir is None):
            raise SettingsError("kv_connector_extra_config: control_key_file and control_peers_dir need each other")
        host, _, port = settings.control_advertised.rpartition(":")
        if settings.control_advertised and not (host and port.isdecimal() and 0 < int(port) < _PORTS):
            raise SettingsError(
                f"kv_connector_extra_config: control_advertised must be HOST:PORT, not {settings.control_advertised!r}"
            )
        return settings

    def dialled_at(self, control_port: int) -> tuple[str, int]:
        """Host and port by which others find the control channel of rank 0, which listens on `control_port`."""
        host, _, port = self.control_advertised.rpartition(":")
        return (host, int(port)) if host else (self.control_host, control_port)

    def check_listening(self) -> None:
        """Whether a prefill worker may listen where it is told to.

        Raises:
            SettingsError: anybody on the network could register blocks, and nobody has said that this is meant.
        """
        if is_loopback(self.control_host) or self.control_key_file is not None or self.allow_unauthenticated:
            return
        raise SettingsError(
            f"kv_connector_extra_config: control_host {self.control_host} can be reached from other machines, and "
            "without keys whoever reaches it gets KV caches. Make keys with 'kvberth keys new' and give each engine "
            "control_key_file and control_peers_dir (docs/security.md), or set allow_unauthenticated to true"
        )

    def keyring(self) -> Keyring | None:
        """Our keys and the accepted ones, read now; None without keys.

        Raises:
            SettingsError: a file or the directory cannot be used.
        """
        if self.control_key_file is None or self.control_peers_dir is None:
            return None
        try:
            return Keyring(read_key_pair(Path(self.control_key_file)), Path(self.control_peers_dir))
        except KeyFileError as error:
            raise SettingsError(f"kv_connector_extra_config: {error}") from error

    @property
    def timing(self) -> Timing:
        """The protocol's clocks."""
        return Timing(lease_seconds=self.lease_seconds, deadline_seconds=self.deadline_seconds)


def is_loopback(host: str) -> bool:
    """Whether only processes on this machine can connect to `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
