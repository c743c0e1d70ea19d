// What an operator should know first: how the router and each engine are, and what needs attention. Pure.
//
// Levels, from the worst on: bad, warn, off (on purpose), unknown, ok.

import { amount, duration, percent, plural } from "./format.js";
import { awaitedEngine, counts, failureGroups, isFailure } from "./model.js";

/** Shares of a KV cache in use. */
export const FULL = 0.95;
export const NEARLY_FULL = 0.8;

const RANK = { bad: 0, warn: 1, off: 2, unknown: 3, ok: 4 };
// The router itself believes a reading for so long.
const STALE_LOAD_SECONDS = 10;
const NEARLY_AT_LIMIT = 0.9;
const LATELY_SECONDS = 300;
const LISTED = 8;
const LONGEST_ID = 16;
const SAID = { "breaker open": "left out for a while" };

/** "Decode worker decode-0, http://10.0.0.4:8000". */
function engineName(engine) {
  const kind = { prefill: "Prefill worker", decode: "Decode worker" }[engine.role] ?? "Engine";
  return `${kind} ${engine.engine_id ? `${engine.engine_id}, ` : ""}${engine.url}`;
}

/** A short name for the engine with this URL: its id if that is one to read, its address else. */
export function shortName(engines, url) {
  const id = engines.find((engine) => engine.url === url)?.engine_id;
  return id && id.length <= LONGEST_ID ? id : url.replace(/^https?:\/\//, "");
}

/** Whether new requests may go there. */
export function isUsable(engine) {
  return engine.ready && !engine.draining && engine.breaker.state !== "open";
}

/** The router's own verdict, in a word and a sentence. */
export function verdict(health) {
  const down = [...health.prefill, ...health.decode].filter((engine) => !engine.ready).length;
  switch (health.status) {
    case "ok":
      return down === 0
        ? { level: "ok", word: "Serving", why: "Prefill and decode workers can be used." }
        : { level: "ok", word: "Serving", why: `${plural(down, "engine is", "engines are")} down; the others serve.` };
    case "degraded":
      return { level: "warn", word: "Degraded", why: "No prefill worker can be used: requests are served undivided." };
    case "unavailable":
      return { level: "bad", word: "Down", why: "No decode worker can be used: requests are answered with 503." };
    default:
      return { level: "unknown", word: String(health.status), why: "" };
  }
}

/** The engines as `/health` tells them to everybody, in the form of the admin API as far as is known. */
export function enginesOfHealth(health) {
  const listed = (role, engines) =>
    engines.map((engine) => ({ ...engine, role, load: null, breaker: { state: engine.breaker }, isPartial: true }));
  return [...listed("prefill", health.prefill), ...listed("decode", health.decode), ...listed(null, health.unknown)];
}

/** An engine's state: a word, and why where that is not obvious. */
export function engineState(engine) {
  const { breaker, load } = engine;
  if (engine.leaving || engine.draining) {
    const word = engine.leaving ? "leaving" : "draining";
    const held = engine.in_flight + (engine.transfers ?? 0);
    return { level: "off", word, why: engine.problem ?? (held ? "gets no new requests" : "may be stopped") };
  }
  if (!engine.ready) {
    return { level: engine.problem === "not heard from yet" ? "unknown" : "bad", word: "down", why: engine.problem };
  }
  if (breaker.state === "open") {
    const failures = breaker.failures_in_a_row;
    const why = failures ? `failed ${failures} times in a row, ${retry(breaker.retry_in_seconds)}` : "fails requests";
    return { level: "bad", word: "breaker open", why };
  }
  if (breaker.state !== "closed")
    return { level: "warn", word: "on trial", why: "one request at a time, after failures" };
  if (engine.isPartial) return { level: "ok", word: "ready", why: null };
  if (load === null) return { level: "warn", word: "ready", why: "its load is not known" };
  if (load.age_seconds > STALE_LOAD_SECONDS) {
    return { level: "warn", word: "ready", why: `its load was last read ${duration(load.age_seconds)} ago` };
  }
  if (load.kv_usage >= FULL && load.waiting > 0) {
    return { level: "warn", word: "full", why: `KV cache ${percent(load.kv_usage)} used, ${load.waiting} waiting` };
  }
  return { level: "ok", word: "ready", why: null };
}

function retry(seconds) {
  return seconds > 0 ? `tried again in ${Math.ceil(seconds)} s` : "tried again with the next request";
}

/**
 * What needs attention, the worst first: `{key, level, title, detail, requests}`; `requests` are those to look at.
 * `router` is null while only `/health` may be seen.
 */
export function attention(health, engines, router, now) {
  const items = [];
  const add = (key, level, title, detail = null, requests = []) => items.push({ key, level, title, detail, requests });
  if (health.status !== "ok") {
    const { level, word, why } = verdict(health);
    add("verdict", level, word, why);
  }
  for (const engine of engines) {
    const { level, word, why } = engineState(engine);
    if (level === "ok") continue;
    const title = word === "ready" ? `${engineName(engine)}: ${why}` : `${engineName(engine)} is ${SAID[word] ?? word}`;
    add(`engine ${engine.url}`, level, title, word === "ready" ? null : why);
  }
  if (router !== null) addRequests(add, router, now);
  items.sort((a, b) => RANK[a.level] - RANK[b.level]);
  const rest = items.splice(LISTED);
  if (rest.length > 0) add("rest", rest[0].level, `And ${rest.length} more`, "the engines among them are listed below");
  return items;
}

function addRequests(add, router, now) {
  const stuck = router.inFlight.filter((read) => read.isStuck);
  if (stuck.length > 0) {
    const where = counts(stuck.map(whereStuck)).map(([place, count]) => `${count} ${place}`);
    const title = `${plural(stuck.length, "request waits", "requests wait")} unusually long`;
    add("stuck", "bad", title, `${where.join(", ")}; the oldest for ${duration(stuck[0].seconds)}`, stuck.slice(0, 3));
  }
  const lately = router.recent.filter((read) => now - read.endedAt < LATELY_SECONDS);
  const failed = lately.filter(isFailure);
  if (failed.length > 0) {
    const share = percent(failed.length / lately.length);
    const title = `${plural(failed.length, "request")} of the last ${lately.length} failed (${share})`;
    const [worst] = failureGroups(failed).filter((group) => group.isSeen);
    add("failed", failed.length * 20 >= lately.length ? "bad" : "warn", title, reasonOf(worst), [worst.last]);
  }
  const rescued = failureGroups(lately).filter((group) => !group.isSeen);
  if (rescued.length > 0) {
    const total = rescued.reduce((sum, group) => sum + group.count, 0);
    const title = `${plural(total, "failure")} hidden from clients in the last ${LATELY_SECONDS / 60} minutes`;
    add("rescued", "warn", title, reasonOf(rescued[0]), [rescued[0].last]);
  }
  if (router.queued > 0 || router.admitted >= NEARLY_AT_LIMIT * router.maxInFlight) {
    const title = `The router is ${router.admitted >= router.maxInFlight ? "at" : "near"} its limit`;
    const detail = `${amount(router.admitted)} of ${amount(router.maxInFlight)} in flight, ${router.queued} queued`;
    add("limit", "warn", title, detail);
  }
}

function whereStuck(read) {
  const engine = awaitedEngine(read);
  return `in ${read.phase}${engine === null ? "" : ` at ${engine}`}`;
}

function reasonOf(group) {
  const where = group.engine === null ? "" : ` at ${group.engine}`;
  const times = group.count > 1 ? `${group.count} × ` : "";
  return `${times}${group.reason}${where}${group.detail ? `: ${group.detail}` : ""}`;
}
