"""Measured runs of a real engine, and what the engine was doing at each time of them.

A run is a folder that `kvberth bench --out` has written. Of its files only the fields that are needed here are read, so
that the emulator depends on no load generator. What an engine was doing is told from the outside, by the arrival times
of chunks:

    sent          first token                                  last token
      |-- prefill --|-- gap --|-- gap --|-- gap --| ... |-- gap --|
                    `------------ decodes, context grows ---------'

A gap is clean if no request was in prefill during it (a waiting request counts as one in prefill). Single gaps are of
little use: two chunks may come in one packet, and a busy client reads late. Such mistakes cancel in the sum of gaps
that follow each other, so these are added up to windows, and since a step's time is linear in what it computes, the
mean gap of a window belongs to the mean number of sequences and of context tokens in it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from kvberth.emulator.errors import EmulatorError

__all__ = ["FirstTokens", "MeasuredRequest", "MeasuredRun", "Windows", "observe", "read_run"]

Floats = npt.NDArray[np.float64]

RECORDS = "requests.jsonl"
SUMMARY = "summary.json"

WINDOW_GAPS = 16
"""The most gaps in a window: jitter at its two ends is shared by these, and steps of one kind stay together."""
LEAST_GAPS = 4
"""In a shorter window the ends count for too much."""
LEAST_SEVERAL_STEPS = 1.5
"""A gap is several steps if it is longer than this many usual ones."""
GUARD_SECONDS = 1e-3
"""A first token may reach the client this much later than other tokens of the step it was computed in."""


class MeasuredRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request as its client saw it; a field means what it does in the records of `kvberth bench`."""

    sent_s: float
    prompt_tokens: int
    output_tokens: int = 0
    status: int | None = None
    error: str | None = None
    ttft_ms: float | None = None
    itl_ms: list[float] = []

    @property
    def was_refused(self) -> bool:
        """It never reached the engine."""
        return self.status not in (None, 200) or (self.error or "").startswith("no connection")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """Requests on one axis of time.

    Attributes:
        started: the date in the run's summary; None without a summary.
        traffic: the server and the seed of the prompts; None if not known.
    """

    name: str
    requests: tuple[MeasuredRequest, ...]
    started: str | None = None
    traffic: tuple[str, int] | None = None


class _Traffic(msgspec.Struct):
    seed: int | None = None


class _Environment(msgspec.Struct):
    started: str
    url: str | None = None
    traffic: _Traffic = msgspec.field(default_factory=_Traffic)


class _Summary(msgspec.Struct):
    environment: _Environment


def read_run(folder: Path) -> MeasuredRun:
    """Read the folder of one run.

    Raises:
        EmulatorError: it holds no records, or what cannot be read.
    """
    path = folder / RECORDS
    decoder = msgspec.json.Decoder(MeasuredRequest)
    requests = []
    try:
        for number, line in enumerate(path.read_bytes().splitlines(), start=1):
            try:
                requests.append(decoder.decode(line))
            except msgspec.MsgspecError as error:
                raise EmulatorError(f"{path}:{number}: is no record of a request: {error}") from error
        path = folder / SUMMARY
        summary = msgspec.json.decode(path.read_bytes(), type=_Summary).environment if path.exists() else None
    except OSError as error:
        raise EmulatorError(f"{path}: {error.strerror}; give folders that `kvberth bench --out` has written") from error
    except msgspec.MsgspecError as error:
        raise EmulatorError(f"{path}: is no summary of a run: {error}") from error
    name = folder.name or folder.resolve().name
    if summary is None:
        return MeasuredRun(name=name, requests=tuple(requests))
    known = summary.url is not None and summary.traffic.seed is not None
    traffic = (str(summary.url), int(summary.traffic.seed or 0)) if known else None
    return MeasuredRun(name=name, requests=tuple(requests), started=summary.started, traffic=traffic)


@dataclass(frozen=True, slots=True, eq=False)
class Windows:
    """Clean gaps that followed each other in one request. Arrays of shape (windows,).

    Attributes:
        seconds: the mean gap.
        sequences, context_tokens: that its steps decoded and read, in the mean.
        gaps: how many.
    """

    seconds: Floats
    sequences: Floats
    context_tokens: Floats
    gaps: Floats


@dataclass(frozen=True, slots=True, eq=False)
class FirstTokens:
    """First tokens of requests during whose prefill no other was in prefill. Arrays of shape (requests,).

    Attributes:
        seconds: from sending to the first token.
        prompt_tokens: of the request.
        sequences, context_tokens: that decoded meanwhile, in the middle of that time.
        was_idle: none decoded in all of that time.
    """

    seconds: Floats
    prompt_tokens: Floats
    sequences: Floats
    context_tokens: Floats
    was_idle: npt.NDArray[np.bool_]


def observe(runs: Sequence[MeasuredRun]) -> tuple[Windows, FirstTokens]:
    """What can be fitted of all runs together, each on its own axis of time."""
    timelines = [_Timeline(run.requests) for run in runs]
    windows = [timeline.windows() for timeline in timelines]
    firsts = [timeline.first_tokens() for timeline in timelines]
    return (
        Windows(*(np.concatenate([getattr(each, name) for each in windows]) for name in Windows.__slots__)),
        FirstTokens(*(np.concatenate([getattr(each, name) for each in firsts]) for name in FirstTokens.__slots__)),
    )


class _Timeline:
    """Who was in prefill and who decoded at any time of one run."""

    def __init__(self, requests: Sequence[MeasuredRequest]) -> None:
        begun = [each for each in requests if each.ttft_ms is not None]
        # Whatever became of them, they may have been in prefill from their sending on.
        lost = [each.sent_s for each in requests if each.ttft_ms is None and not each.was_refused]
        self._sent = np.array([each.sent_s for each in begun])
        self._first = self._sent + np.array([each.ttft_ms or 0.0 for each in begun]) / 1e3
        self._prompt = np.array([each.prompt_tokens for each in begun], dtype=float)
        self._gap = np.concatenate([np.zeros(0), *(each.itl_ms for each in begun)]) / 1e3
        counts = np.array([len(each.itl_ms) for each in begun], dtype=int)
        self._owner = np.repeat(np.arange(len(begun)), counts)
        since_first = _cumulative_within(self._gap, counts)
        self._end = self._first[self._owner] + since_first
        self._last = self._first.copy()
        has_gaps = counts > 0
        self._last[has_gaps] += since_first[np.cumsum(counts)[has_gaps] - 1]
        self._prefill_starts = np.sort(np.concatenate([self._sent, lost]))
        self._prefill_ends = np.sort(np.concatenate([self._first, np.full(len(lost), np.inf)]))
        self._is_clean = self._in_prefill(self._end - self._gap - GUARD_SECONDS, self._end) == 0
        self._tokens = _tokens_per_gap(self._gap, self._is_clean, counts, [each.output_tokens for each in begun])
        # The first token adds the prompt to what is read, each further one itself; the last takes all away.
        decoded = np.bincount(self._owner, self._tokens, minlength=len(begun))
        times = np.concatenate([self._first, self._end, self._last])
        order = np.argsort(times, kind="stable")
        ones, none = np.ones(len(begun)), np.zeros(len(self._gap))
        self._times = times[order]
        self._sequences = _running_sum(np.concatenate([ones, none, -ones])[order])
        self._contexts = _running_sum(np.concatenate([self._prompt, self._tokens, -(self._prompt + decoded)])[order])

    def windows(self) -> Windows:
        """Windows of clean gaps."""
        begin = self._end - self._gap
        sequences, contexts = self._decoding_at(begin + self._gap / 2)
        # A window ends where cleanness or the request changes, and after `WINDOW_GAPS`.
        is_first = np.ones(len(begin), dtype=bool)
        is_first[1:] = (np.diff(self._owner) != 0) | (np.diff(self._is_clean.astype(int)) != 0)
        at_first = np.flatnonzero(is_first)
        place = np.arange(len(begin)) - np.repeat(at_first, np.diff([*at_first, len(begin)]))
        starts = np.flatnonzero(is_first | (place % WINDOW_GAPS == 0))
        if not len(starts):
            return Windows(np.zeros(0), np.zeros(0), np.zeros(0), np.zeros(0))
        usable = self._is_clean[starts] & (np.diff([*starts, len(begin)]) >= LEAST_GAPS)
        gaps, seconds, sequences, contexts = (
            np.add.reduceat(each, starts)[usable]
            for each in (self._tokens, self._gap, self._tokens * sequences, self._tokens * contexts)
        )
        return Windows(seconds / gaps, sequences / gaps, contexts / gaps, gaps)

    def first_tokens(self) -> FirstTokens:
        """First tokens of those that were alone in their prefill."""
        alone = self._in_prefill(self._sent, self._first) == 1
        sequences, contexts = self._decoding_at((self._sent + self._first) / 2)
        begun_before = np.searchsorted(np.sort(self._first), self._first, "left")
        ended_before = np.searchsorted(np.sort(self._last), self._sent - GUARD_SECONDS, "left")
        seconds = self._first - self._sent
        was_idle = begun_before == ended_before
        return FirstTokens(seconds[alone], self._prompt[alone], sequences[alone], contexts[alone], was_idle[alone])

    def _in_prefill(self, begin: Floats, end: Floats) -> npt.NDArray[np.int64]:
        """How many requests were in prefill at some time between `begin` and `end`."""
        started = np.searchsorted(self._prefill_starts, end, "left")
        ended = np.searchsorted(self._prefill_ends, begin, "right")
        return started - ended

    def _decoding_at(self, times: Floats) -> tuple[Floats, Floats]:
        """Sequences that decoded, and the tokens of context that they read."""
        place = np.searchsorted(self._times, times, "left")  # so that a gap of 0 lies before what ends with it
        return self._sequences[place], self._contexts[place]


def _tokens_per_gap(
    gaps: Floats, is_clean: npt.NDArray[np.bool_], counts: npt.NDArray[np.int64], output_tokens: Sequence[int]
) -> Floats:
    """How many tokens came with the chunk after each gap; `counts` gaps are of one request.

    The record does not say. Where there were more tokens than chunks, those gaps get one more each that are longest for
    their tokens: clean ones while they look like several steps, then any.
    """
    tokens = np.ones(len(gaps))
    missing = np.where(counts > 0, np.asarray(output_tokens, dtype=int) - 1 - counts, 0)
    starts = np.cumsum(counts) - counts
    for index in np.flatnonzero(missing > 0).tolist():
        own = slice(starts[index], starts[index] + counts[index])
        lengths = _without_late_chunks(gaps[own])
        clean = np.where(is_clean[own], lengths, 0.0)
        several = LEAST_SEVERAL_STEPS * np.median(lengths)
        for _ in range(missing[index]):
            each = clean / tokens[own]
            each = each if each.max() > several else lengths / tokens[own]
            tokens[own.start + np.argmax(each)] += 1
    return tokens


def _without_late_chunks(gaps: Floats) -> Floats:
    """A long gap before one of almost nothing is no sign of several tokens: its chunk only came late."""
    late = np.flatnonzero(gaps[1:] < np.median(gaps) / 4)
    evened = gaps.copy()
    evened[late] = (gaps[late] + gaps[late + 1]) / 2
    return evened


def _cumulative_within(values: Floats, counts: npt.NDArray[np.int64]) -> Floats:
    """Running sums that start anew after each `counts` values."""
    total = _running_sum(values)
    since: Floats = total[1:] - np.repeat(total[np.cumsum(counts) - counts], counts)
    return since


def _running_sum(values: Floats) -> Floats:
    """Of shape (values + 1,): the sum of all before."""
    return np.concatenate([[0.0], np.cumsum(values)])
