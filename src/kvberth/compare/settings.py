"""What is to be compared, and on which traffic. Checked once; starts nothing."""

import math
import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import msgspec

from kvberth.bench import Arrivals
from kvberth.compare.modes import EMULATED_ONLY, Mode

__all__ = ["DEFAULT_MODES", "CompareSettings", "TraceChoice", "make", "published", "quick"]

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,40}")
"""It becomes part of file names."""

DEFAULT_MODES = (Mode.PUSH, Mode.PUSH_WHOLE, Mode.PULL, Mode.VLLM_PULL, Mode.VLLM_PUSH, Mode.COLOCATED)


class TraceChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A file of recorded traffic, and what of it is sent.

    Attributes:
        file: its path.
        sha256: of the file, so that a comparison is resumed with the same.
        requests: how many are sent, the first ones.
        rate: requests per second as they were recorded; None for a trace without times.
        speeds: how much faster than it was recorded; each is a cell of its own.
        skip_bad_rows: leave out what cannot be sent.
    """

    file: str
    sha256: str
    requests: int
    rate: float | None
    speeds: tuple[float, ...] = (1.0,)
    skip_bad_rows: bool = False

    @property
    def name(self) -> str:
        """For people."""
        return PurePath(self.file).name


class CompareSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One comparison. A resumed one must have the same.

    Attributes:
        model: a name or a folder, as for vLLM; with `emulate`, a profile. Not used with `attach`.
        attach: URLs of running deployments by the names of their modes; nothing is started then.
        modes: what to compare, by name.
        rates: requests per second.
        prompts: tokens per prompt, or that a turn adds. Each rate is measured with each.
        trace: in place of random prompts; each of `rates`, or each of its speeds, is a cell.
        output_tokens: per answer; None takes those of the trace.
        arrivals: `TRACE` for a trace's own times.
        cancel_share, cancel_seconds, prefix_share, prefixes, turns: as those of `RandomTraffic`.
        prefix_caching: of all engines; None is where the traffic has beginnings that come again.
        seconds: how long to send per cell; `least_requests` and more are sent in any case.
        repetitions: how often all of it is measured, with fresh engines each time.
        extra: the cells of the published grid beside it: prefix caches and fragmented memory, chunks of 4,096 tokens,
            inline posting, and the decode load alone.
        warmup_requests: of mixed lengths, before the first cell, so that memory is in its steady state.
        engine_args: for every engine of every mode.
        price_per_gpu_hour: in any currency; None leaves costs out.
        gpus_per_engine: what one engine of the deployment has.

    Raises:
        ValueError: one line that names the setting and what would be right.
    """

    model: str = ""
    emulate: bool = False
    emulate_link: bool = False
    attach: dict[str, str] = {}
    modes: tuple[str, ...] = DEFAULT_MODES
    rates: tuple[float, ...] = (1, 2, 4, 8)
    prompts: tuple[int, ...] = (1024, 4096, 16384)
    trace: TraceChoice | None = None
    output_tokens: int | None = 128
    arrivals: Arrivals = Arrivals.UNIFORM
    cancel_share: float = 0.0
    cancel_seconds: float | None = None
    prefix_share: float = 0.0
    prefixes: int = 1
    turns: int = 1
    prefix_caching: bool | None = None
    seconds: float = 10.0
    least_requests: int = 16
    repetitions: int = 3
    extra: bool = False
    warmup_requests: int = 24
    seed: int = 0
    engine_args: tuple[str, ...] = ()
    price_per_gpu_hour: float | None = None
    gpus_per_engine: int = 1

    def __post_init__(self) -> None:
        self._check_modes()
        for name in ("modes", "rates", "prompts"):
            values = getattr(self, name)
            if not values:
                raise ValueError(f"{name}: at least one is needed")
            if len(set(values)) < len(values):
                raise ValueError(f"{name}: each one once, not {', '.join(f'{each}' for each in values)}")
        if not all(0 < rate < math.inf for rate in self.rates):
            raise ValueError(f"rates: must be above 0 requests per second, not {min(self.rates):g}")
        least = {"output_tokens": 2, "least_requests": 2, "repetitions": 1, "warmup_requests": 0, "gpus_per_engine": 1}
        if min(self.prompts) < 1:
            raise ValueError(f"prompts: must be 1 token or more, not {min(self.prompts)}")
        for name, lowest in least.items():
            value = getattr(self, name)
            if value is not None and value < lowest:
                raise ValueError(f"{name}: must be {lowest} or more, not {value}")
        if not 0 < self.seconds < math.inf:
            raise ValueError(f"seconds: must be above 0, not {self.seconds:g}")
        self._check_traffic()
        if not 0 <= self.cancel_share < 1:
            raise ValueError(f"cancel_share: must be 0 or more and below 1, not {self.cancel_share:g}")
        if self.price_per_gpu_hour is not None and not 0 <= self.price_per_gpu_hour < math.inf:
            raise ValueError(f"price_per_gpu_hour: must be 0 or more, not {self.price_per_gpu_hour:g}")

    @property
    def has_prefix_caching(self) -> bool:
        """Whether engines keep prefixes."""
        if self.prefix_caching is not None:
            return self.prefix_caching
        return self.trace is not None or self.turns > 1 or self.prefix_share > 0

    def _check_traffic(self) -> None:
        """What the load generator does not check, since it is no setting of its traffic."""
        if self.trace is None:
            if self.arrivals not in (Arrivals.POISSON, Arrivals.UNIFORM):
                raise ValueError(f"arrivals: must be poisson or uniform, not {self.arrivals}")
            if self.output_tokens is None:
                raise ValueError("output_tokens: must be given, since there is no trace to say")
        else:
            if not self.trace.speeds or len(set(self.trace.speeds)) < len(self.trace.speeds):
                raise ValueError("speed: at least one is needed, and each one once")
            if self.arrivals == Arrivals.TRACE and self.trace.rate is None:
                raise ValueError(f"arrivals: {self.trace.file} has no times to go by; take poisson or uniform")
            if self.prefix_share:
                raise ValueError("prefix_share: a trace has beginnings of its own")
        if self.extra and (self.trace is not None or self.turns > 1 or self.prefix_share):
            raise ValueError("extra: these cells have random prompts, no trace, turns or shared beginnings")

    def _check_modes(self) -> None:
        if self.attach:
            if wrong := [name for name in self.attach if not _NAME.fullmatch(name)]:
                raise ValueError(f"attach: {wrong[0]!r} is no name for a mode; use letters, digits, '-', '_' and '.'")
            if self.model:
                raise ValueError("attach: running deployments have their models; give no model or profile beside them")
            if self.extra:
                raise ValueError("extra: these cells need engines that are started for them, not attached ones")
            return
        if not self.model:
            raise ValueError("model: give a model, a profile to emulate, or deployments to attach")
        known = [str(mode) for mode in Mode if mode is not Mode.DECODE_ONLY]
        for mode in self.modes:
            if mode not in known:
                raise ValueError(f"modes: {mode!r} is none; known are {', '.join(known)}")
            if mode in EMULATED_ONLY and not self.emulate:
                raise ValueError(
                    f"modes: {mode} is for emulated engines; the router cannot find real ones that have it"
                )

    def differences(self, other: "CompareSettings") -> dict[str, tuple[Any, Any]]:
        """What is measured otherwise, by the setting's name. Prices are not: they change no measurement."""
        names = [name for name in self.__struct_fields__ if name not in ("price_per_gpu_hour", "gpus_per_engine")]
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in names}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def make(chosen: Mapping[str, Any]) -> CompareSettings:
    """Settings from plain values.

    Raises:
        ValueError: one line that names the setting and what would be right.
    """
    try:
        return msgspec.convert(chosen, CompareSettings)
    except msgspec.ValidationError as error:
        # What the class itself refuses comes back wrapped.
        raise ValueError(f"{error.__cause__ or error}") from error


def quick() -> dict[str, Any]:
    """Settings for a first look: under ten minutes on two cores, one repetition of the cells that tell most."""
    return {
        "modes": DEFAULT_MODES,
        "rates": (1.0, 8.0),
        "prompts": (1024, 16384),
        "seconds": 3.0,
        "least_requests": 8,
        "repetitions": 1,
        "warmup_requests": 16,
    }


def published() -> dict[str, Any]:
    """Settings of the published grid: under 75 minutes on two cores, three repetitions, with the extra cells."""
    return {"modes": DEFAULT_MODES, "least_requests": 12, "extra": True}
