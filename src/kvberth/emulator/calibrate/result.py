"""Makes a profile of the fits, and says what is doubtful about it. Pure."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from kvberth.emulator.calibrate.fits import OVERHEAD, UNITS, Fit, choose, fit_decode, fit_prefill
from kvberth.emulator.calibrate.measured import MeasuredRun, observe
from kvberth.emulator.errors import EmulatorError
from kvberth.emulator.profile import Profile, Timing, profile_names

__all__ = ["Calibration", "Figure", "calibrate"]

MOST_ERROR = 0.10
"""Above this median error the linear model does not hold."""
MOST_DOUBT = 0.25
"""A figure whose standard error is a larger part of it than this is called uncertain."""
MOST_TOKENS_PER_CHUNK = 1.1
"""With more, a gap is no step."""
_DIGITS = 4
"""Of a fitted figure; no run tells more."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of the timing, in the unit that ends its name.

    Attributes:
        base: of the base profile.
        standard_error: of `fitted`, roughly; None if it is the base's, or came out at 0.
        kept_because: why it is the base's; None if it was fitted.
    """

    name: str
    base: float
    fitted: float
    standard_error: float | None
    kept_because: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A profile with fitted timing, and how well it fits.

    Attributes:
        overhead_ms: per request, beside the model; no part of the profile.
        gaps, first_tokens: how many were used.
        gap_error, first_token_error: median of |measured - modelled| / measured; of gaps, over windows of them.
        warnings: what makes the figures doubtful.
    """

    profile: Profile
    figures: tuple[Figure, ...]
    overhead_ms: float
    gaps: int
    first_tokens: int
    gap_error: float
    first_token_error: float
    warnings: tuple[str, ...]


def calibrate(
    runs: Sequence[MeasuredRun], base: Profile, name: str, *, batched_tokens: int | None = None
) -> Calibration:
    """Fit the timing to all requests of `runs`; the rest of the profile is that of `base`.

    Args:
        name: of the new profile.
        batched_tokens: the most tokens per step of the measured engine, which the new profile takes over; None for the
            base's.

    Raises:
        EmulatorError: the runs cannot tell the figures; names a run that could, where there is one.
    """
    _check_name(name)
    if batched_tokens is not None and batched_tokens < 1:
        raise EmulatorError(f"batched_tokens: must be 1 or more, not {batched_tokens}")
    windows, firsts = observe(runs)
    decode = fit_decode(windows, base)
    firsts = choose(firsts)
    prefill = fit_prefill(firsts, decode, batched_tokens or base.engine.batched_tokens, base)
    figures = tuple(_figure(key, base, decode if key in decode.values else prefill) for key in UNITS)
    warnings = [*_warnings_of_runs(runs), *_warnings_of_fit(figures, decode, prefill)]
    if not firsts.was_idle.all():
        warnings.append("first tokens were measured while others decoded; a run with --rate 0.5 would be more exact")
    overhead_ms = prefill.values[OVERHEAD] * 1e3
    return Calibration(
        profile=_profile(base, name, runs, figures, decode, prefill, overhead_ms, batched_tokens),
        figures=figures,
        overhead_ms=overhead_ms,
        gaps=decode.count,
        first_tokens=prefill.count,
        gap_error=decode.error,
        first_token_error=prefill.error,
        warnings=tuple(warnings),
    )


def _check_name(name: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise EmulatorError(f"name: {name!r} must be of letters, digits, '.', '_' and '-', such as my-model-2xl40s")
    if name in profile_names():
        raise EmulatorError(f"name: {name} comes with kvberth; take another one, such as {name}-measured")


def _figure(key: str, base: Profile, fit: Fit) -> Figure:
    unit = UNITS[key]
    value = getattr(base.timing, key) if key in fit.kept else _rounded(fit.values[key] / unit)
    doubt = fit.standard_errors.get(key)
    return Figure(
        name=key,
        base=getattr(base.timing, key),
        fitted=value,
        standard_error=None if doubt is None else _rounded(doubt / unit),
        kept_because=fit.kept.get(key),
    )


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def _warnings_of_runs(runs: Sequence[MeasuredRun]) -> list[str]:
    warnings = []
    for run in runs:
        if run.started is None:
            warnings.append(f"{run.name} has no summary: requests that had not ended when it stopped are not known")
        if failed := sum(request.error is not None for request in run.requests):
            warnings.append(f"{run.name}: {failed} requests failed, and what they cost the engine is not known")
        gaps = sum(len(request.itl_ms) for request in run.requests)
        tokens = sum(request.output_tokens - 1 for request in run.requests if request.itl_ms)
        if tokens > gaps * MOST_TOKENS_PER_CHUNK:
            warnings.append(
                f"{run.name}: {tokens / gaps:.1f} tokens per chunk; with speculative decoding, or a client that reads "
                "late, steps cannot be told apart"
            )
    traffic = [run.traffic for run in runs if run.traffic is not None]
    if len(set(traffic)) < len(traffic):
        warnings.append(
            "several runs on one server have the same seed, so that their prompts begin alike; unless its prefix cache "
            "was off, give each run a --seed of its own"
        )
    return warnings


def _warnings_of_fit(figures: Sequence[Figure], decode: Fit, prefill: Fit) -> list[str]:
    warnings = []
    for what, fit in (("gaps between tokens", decode), ("first tokens", prefill)):
        if fit.error > MOST_ERROR:
            warnings.append(f"the {what} are off by {fit.error:.0%} in the median: the linear model does not hold")
    for figure in figures:
        if figure.kept_because:
            warnings.append(f"{figure.name} is the base profile's: {figure.kept_because}")
        elif figure.fitted == 0:
            warnings.append(f"{figure.name} came out at 0: the runs do not show it")
        elif figure.standard_error is not None and figure.standard_error > MOST_DOUBT * figure.fitted:
            warnings.append(f"{figure.name} is uncertain: more requests, or other lengths and rates, would help")
    return warnings


def _profile(
    base: Profile,
    name: str,
    runs: Sequence[MeasuredRun],
    figures: Sequence[Figure],
    decode: Fit,
    prefill: Fit,
    overhead_ms: float,
    batched_tokens: int | None,
) -> Profile:
    engine = base.engine
    sources = {key: text for key, text in base.sources.items() if key.partition(".")[0] != "timing"}
    if batched_tokens is not None:
        engine = msgspec.structs.replace(engine, batched_tokens=batched_tokens)
        sources["engine.batched_tokens"] = "of the engine that the timing was measured on"
    of_runs = ", ".join(run.name if run.started is None else f"{run.name} ({run.started})" for run in runs)
    from_gaps = (
        f"fitted by kvberth emulator calibrate to {decode.count} gaps between tokens of the runs {of_runs}; "
        f"median error {decode.error:.1%}"
    )
    from_first_tokens = (
        f"fitted by kvberth emulator calibrate to {prefill.count} first tokens of the runs {of_runs}; median error "
        f"{prefill.error:.1%}; with the API server's time per prompt token, without {overhead_ms:.2f} ms per request"
    )
    for figure in figures:
        key = f"timing.{figure.name}"
        fitted = from_gaps if figure.name in decode.values else from_first_tokens
        original = base.sources.get(key, base.sources.get("timing"))
        kept = f"profile {base.name}, since {figure.kept_because}: {original}"
        sources[key] = kept if figure.kept_because else fitted
    profile = Profile(
        name=name,
        title=f"{name}: timing measured, the rest as in {base.name}",
        model=base.model,
        engine=engine,
        timing=Timing(**{figure.name: figure.fitted for figure in figures}),
        link=base.link,
        sources=sources,
    )
    profile.check()
    return profile
