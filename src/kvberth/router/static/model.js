// What follows from what the router says of its requests. Pure: JSON in, plain objects out; no DOM, no clock.
//
// Times are in seconds. A request's events and phases count from its arrival.

export const PHASES = ["queue", "prefill", "transfer", "decode"];
/** Those before the first token. */
export const FIRST_PHASES = PHASES.slice(0, 3);

const CLIENT_LEFT = 499;
const TOO_MANY = 429;
const STUCK_SECONDS = 10;
const STUCK_TIMES_USUAL = 5;
const STUCK_WHOLE_SECONDS = 60;

/** One request, with what the lists and the figures need of its events. */
export function request(said) {
  const ended = said.events.find((event) => event.what === "ended");
  const seconds = ended ? ended.at_seconds : said.age_seconds;
  const firstToken = said.events.find((event) => event.what === "first_token")?.at_seconds ?? null;
  const read = {
    key: `${said.arrived_at} ${said.request_id}`,
    id: said.request_id,
    endpoint: said.endpoint,
    arrivedAt: said.arrived_at,
    endedAt: ended ? said.arrived_at + seconds : null,
    seconds,
    status: said.status,
    mode: said.mode,
    path: said.path,
    events: said.events,
    phases: said.phases.map((each) => ({ name: each.name, begin: each.begin_seconds, end: each.end_seconds })),
    firstToken,
    prefill: lastFact(said.events, "prefill_sent", "engine") ?? null,
    decode: lastFact(said.events, "decode_sent", "engine") ?? null,
    isStreamed: lastFact(said.events, "admitted", "streamed") ?? null,
    promptTokens: lastFact(said.events, "admitted", "prompt_tokens") ?? null,
    binding: lastFact(said.events, "binding_chosen", "binding") ?? null,
    undividedReason: lastFact(said.events, "left_undivided", "reason") ?? null,
    error: ended?.facts.error ?? null,
    message: ended?.facts.message ?? null,
    legFailures: legFailures(said.events),
    isStuck: false,
  };
  read.phase = read.phases.at(-1)?.name ?? "queue";
  read.outcome = outcome(read);
  return read;
}

/** `running`, `ok`, `rescued` (a failure was hidden), `failed`, `refused` (429), `rejected` (other 4xx) or `left`. */
function outcome(read) {
  if (read.status === null) return "running";
  if (read.status === CLIENT_LEFT) return "left";
  if (read.status === TOO_MANY) return "refused";
  // A stream that breaks has begun with 200, and ends with the router's error.
  if (read.status >= 500 || (read.status < 400 && read.error !== null)) return "failed";
  if (read.status >= 400) return "rejected";
  return read.legFailures.length > 0 ? "rescued" : "ok";
}

export function isFailure(read) {
  return read.outcome === "failed" || read.outcome === "refused";
}

function lastFact(events, what, fact) {
  return events.findLast((event) => event.what === what)?.facts[fact];
}

/** A leg's failures, each with the engine to which that leg had been sent. */
function legFailures(events) {
  const engines = {};
  const failures = [];
  for (const { at_seconds: at, what, facts } of events) {
    if (what === "prefill_sent") engines.prefill = facts.engine;
    else if (what === "decode_sent") engines.decode = facts.engine;
    else if (what === "leg_failed") {
      failures.push({ at, leg: facts.leg, kind: facts.kind, detail: facts.detail, engine: engines[facts.leg] ?? null });
    }
  }
  return failures;
}

/** The share `q` of the values is at most this: the nearest rank. Null of none. */
export function percentile(values, q) {
  if (values.length === 0) return null;
  const sorted = Float64Array.from(values).sort();
  return sorted[Math.max(0, Math.ceil(q * sorted.length) - 1)];
}

function spread(values) {
  return { count: values.length, p50: percentile(values, 0.5), p95: percentile(values, 0.95) };
}

function phaseSeconds(read, name) {
  const phase = read.phases.find((each) => each.name === name);
  return phase ? phase.end - phase.begin : null;
}

/** Where the time to the first token went, of the streamed requests whose answer has begun: by path and by phase. */
export function timeToFirstToken(requests) {
  const begun = requests.filter((read) => read.firstToken !== null && read.status !== null && read.status < 400);
  const of = (some) => ({
    ...spread(some.map((read) => read.firstToken)),
    phases: FIRST_PHASES.map((name) => {
      const seconds = some.map((read) => phaseSeconds(read, name)).filter((each) => each !== null);
      // Means add up to a bar; a request that has no such phase spent nothing in it.
      return { name, ...spread(seconds), mean: seconds.reduce((sum, each) => sum + each, 0) / (some.length || 1) };
    }),
  });
  const paths = [...new Set(begun.map((read) => read.path))].sort();
  return { all: of(begun), paths: paths.map((path) => ({ path, ...of(begun.filter((read) => read.path === path)) })) };
}

/** How many requests each value has, most first: `[[value, count], ...]`. */
export function counts(values) {
  const found = new Map();
  for (const value of values) found.set(value, (found.get(value) ?? 0) + 1);
  return [...found].sort((a, b) => b[1] - a[1]);
}

/**
 * Failures with the same reason, those that clients saw first, then the most frequent.
 * `reason` is in the router's words, `engine` null where no engine was to blame.
 */
export function failureGroups(requests) {
  const groups = new Map();
  const add = (read, isSeen, reason, detail, engine, at) => {
    const key = JSON.stringify([isSeen, reason, detail && withoutNumbers(detail), engine]);
    const group = groups.get(key) ?? { key, isSeen, reason, detail, engine, count: 0, lastAt: 0, last: read };
    group.count += 1;
    if (at >= group.lastAt) Object.assign(group, { lastAt: at, last: read, detail });
    groups.set(key, group);
  };
  for (const read of requests) {
    if (isFailure(read)) {
      const cause = read.legFailures.at(-1);
      const reason = [read.status < 400 ? "stream broken" : read.status, read.error ?? cause?.kind];
      const detail = cause ? `${cause.leg} leg: ${cause.detail}` : read.message;
      add(read, true, reason.filter(Boolean).join(" "), detail, cause?.engine ?? null, read.endedAt);
    }
    // The last one of a failed request has just been counted.
    for (const each of isFailure(read) ? read.legFailures.slice(0, -1) : read.legFailures) {
      add(read, false, `${each.leg} leg ${each.kind}`, each.detail, each.engine, read.arrivedAt + each.at);
    }
  }
  return [...groups.values()].sort((a, b) => b.isSeen - a.isSeen || b.count - a.count || b.lastAt - a.lastAt);
}

/** Ports and durations differ between failures that are the same to a person. */
function withoutNumbers(text) {
  return text.replace(/[0-9]+/g, "#");
}

/** Marks the requests in flight that wait much longer than is usual here. */
export function markStuck(inFlight, recent) {
  const limit = stuckAfter(recent);
  for (const read of inFlight) {
    const allowed = read.isStreamed === false ? limit.whole : limit.firstToken;
    read.isStuck = read.firstToken === null && read.seconds > allowed;
  }
}

/** The engine that a request waits for in its present phase. */
export function awaitedEngine(read) {
  return read.phase === "prefill" && read.prefill !== null ? read.prefill : read.decode;
}

/** How long a request may go without its first token, or without its end if its answer comes in one piece. */
function stuckAfter(recent) {
  const answered = recent.filter((read) => read.status !== null && read.status < 400);
  const firstTokens = answered.map((read) => read.firstToken).filter((each) => each !== null);
  const wholes = answered.filter((read) => read.isStreamed === false).map((read) => read.seconds);
  return {
    firstToken: Math.max(STUCK_SECONDS, STUCK_TIMES_USUAL * (percentile(firstTokens, 0.95) ?? 0)),
    whole: Math.max(STUCK_WHOLE_SECONDS, STUCK_TIMES_USUAL * (percentile(wholes, 0.95) ?? 0)),
  };
}
