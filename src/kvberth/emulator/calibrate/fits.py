"""Fits the five figures of a timing to what was observed of a real, undivided engine.

The timing is linear in its figures (see `kvberth.emulator.timing`), and they are fitted in two parts.

1. Gaps between tokens while nobody was in prefill give the first three:

       gap = step + sequence * (sequences) + context_token * (their contexts)

   in the mean over each window of up to 16 gaps. A step is seen by each of its sequences and counts once.

2. First tokens of requests that were alone in their prefill, best on an otherwise idle engine, give the others:

       ttft = overhead + step * ceil(prompt / batched_tokens) + prompt_token * prompt + prompt_pair * prompt**2 / 2

   with `step` from the first part. Chunked or whole, a prompt has prompt**2 / 2 pairs. Where others decoded meanwhile,
   their part of each step is taken off, and half a step for the one that ran when the request came.

What cannot be told from the outside:
* `overhead` is what a request costs whatever its length: connection, HTTP, scheduling. It is reported and is no part of
  the profile, since an emulated engine has a real API server and pays it again.
* What the API server spends per prompt token (tokenizing, JSON) is part of `prompt_token`. An emulated engine pays this
  twice; it is least with prompts of token ids, which `kvberth bench` sends.
* With one batch size, `sequence` is part of `step`; with contexts of one length, `context_token` is part of `sequence`;
  with two prompt lengths, `prompt_pair` is part of `prompt_token`. Such a figure stays as in the base profile.
* Prompts that a prefix cache knows take less time than the formula says; nothing in the records shows it.
"""

from dataclasses import dataclass

import numpy as np

from kvberth.emulator.calibrate.least_squares import solve
from kvberth.emulator.calibrate.measured import FirstTokens, Floats, Windows
from kvberth.emulator.errors import EmulatorError
from kvberth.emulator.profile import Profile, Timing

__all__ = ["OVERHEAD", "UNITS", "Fit", "choose", "fit_decode", "fit_prefill"]

LEAST_WINDOWS = 8
"""For a fit, and of a batch size for it to count."""
LEAST_FIRST_TOKENS = 5
"""For a fit, per length that it needs to tell apart."""
LEAST_RATIO = 1.25
"""Between two lengths that count as different."""

_STEP, _SEQUENCE, _CONTEXT, _TOKEN, _PAIR = Timing.__struct_fields__
UNITS = {_STEP: 1e-6, _SEQUENCE: 1e-6, _CONTEXT: 1e-9, _TOKEN: 1e-6, _PAIR: 1e-12}
"""Seconds in the unit of each figure."""
OVERHEAD = "overhead"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The outcome of one part, in seconds.

    Attributes:
        kept: why, for those values that are the base's.
        error: median relative error. count: of what was fitted to.
    """

    values: dict[str, float]
    standard_errors: dict[str, float]
    kept: dict[str, str]
    error: float
    count: int


def fit_decode(windows: Windows, base: Profile) -> Fit:
    if len(windows.gaps) < LEAST_WINDOWS:
        raise EmulatorError(
            f"too few gaps between tokens ({windows.gaps.sum():.0f}) that no prefill disturbed: "
            "run `kvberth bench` with a lower --rate, or with more --output-tokens"
        )
    kept = {}
    sizes, counts = np.unique(np.round(windows.sequences), return_counts=True)
    if np.count_nonzero(counts >= LEAST_WINDOWS) < 2:
        kept[_SEQUENCE] = f"only batches of {sizes[np.argmax(counts)]:.0f} were measured"
    if len(_different(windows.context_tokens / windows.sequences)) < 2:
        kept[_CONTEXT] = "only contexts of one length were measured"
    return _fit(
        {_STEP: np.ones_like(windows.gaps), _SEQUENCE: windows.sequences, _CONTEXT: windows.context_tokens},
        windows.seconds,
        base,
        kept,
        precision=windows.gaps,
        share=1 / windows.sequences,
        count=int(windows.gaps.sum()),
    )


def choose(firsts: FirstTokens) -> FirstTokens:
    """Those of an idle engine, unless they are too few to tell as many lengths apart as all of them can."""
    needed = min(3, len(_different(firsts.prompt_tokens)))
    if len(firsts.seconds) < LEAST_FIRST_TOKENS * max(needed, 1):
        raise EmulatorError(
            f"too few requests ({len(firsts.seconds)}) were alone in their prefill: "
            "run `kvberth bench` with a lower --rate too, such as --rate 0.5, or with more --requests"
        )
    idle = FirstTokens(*(getattr(firsts, name)[firsts.was_idle] for name in FirstTokens.__slots__))
    enough = len(idle.seconds) >= LEAST_FIRST_TOKENS * needed and len(_different(idle.prompt_tokens)) >= needed
    return idle if enough else firsts


def fit_prefill(firsts: FirstTokens, decode: Fit, batched_tokens: int, base: Profile) -> Fit:
    lengths = _different(firsts.prompt_tokens)
    if len(lengths) < 2:
        (length,) = lengths
        other = length * 8 if length * 9 <= base.model.context_tokens else max(length // 8, 1)
        raise EmulatorError(
            f"prompts of one length ({length}) cannot tell the time per token from the time per request: "
            f"run `kvberth bench --prompt-tokens {other} --rate 0.5` too, and a third length for the quadratic term"
        )
    prompt = firsts.prompt_tokens
    return _fit(
        {OVERHEAD: np.ones_like(prompt), _TOKEN: prompt, _PAIR: prompt**2 / 2},
        firsts.seconds,
        base,
        {} if len(lengths) > 2 else {_PAIR: "only two prompt lengths were measured"},
        known=_steps_seconds(firsts, decode, batched_tokens),
        count=len(prompt),
    )


def _steps_seconds(firsts: FirstTokens, decode: Fit, batched_tokens: int) -> Floats:
    """What the first part says of the time to each first token."""
    step, sequence, context = decode.values.values()
    each = step + sequence * firsts.sequences + context * firsts.context_tokens
    chunks = np.ceil(firsts.prompt_tokens / np.maximum(batched_tokens - firsts.sequences, 1))
    seconds: Floats = each * (chunks + np.where(firsts.sequences > 0, 0.5, 0.0))
    return seconds


def _different(lengths: Floats) -> list[int]:
    """The least length, and each that is far enough above the one before."""
    found: list[int] = []
    for length in np.unique(np.round(lengths)).astype(int).tolist():
        if not found or length >= found[-1] * LEAST_RATIO:
            found.append(length)
    return found


def _fit(
    columns: dict[str, Floats],
    seconds: Floats,
    base: Profile,
    kept: dict[str, str],
    *,
    precision: Floats | None = None,
    share: Floats | None = None,
    known: Floats | float = 0.0,
    count: int,
) -> Fit:
    """Fit `seconds` less what is known and what is kept of the base profile."""
    ones = np.ones_like(seconds)
    fixed = {key: getattr(base.timing, key) * UNITS[key] for key in kept}
    target = seconds - known - sum((value * columns[key] for key, value in fixed.items()), 0.0 * ones)
    names = [key for key in columns if key not in fixed]
    solution = solve(
        np.stack([columns[key] for key in names], axis=1),
        target,
        precision=ones if precision is None else precision,
        share=ones if share is None else share,
        signed=tuple(index for index, key in enumerate(names) if key == OVERHEAD),
    )
    fitted = dict(zip(names, solution.values.tolist(), strict=True))
    doubts = dict(zip(names, solution.standard_errors.tolist(), strict=True))
    return Fit(
        values={key: fixed.get(key, fitted.get(key, 0.0)) for key in columns},
        standard_errors={key: doubt for key, doubt in doubts.items() if np.isfinite(doubt)},
        kept=kept,
        error=float(np.median(np.abs(solution.residual) / np.maximum(seconds, 1e-9))),
        count=count,
    )
