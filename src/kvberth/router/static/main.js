// Asks the router every second and has what it says drawn. The only module that knows of the network and the clock.

import { el, setAttribute, setText } from "./dom.js";
import { showEngines } from "./engines_view.js";
import { clock } from "./format.js";
import { attention, enginesOfHealth, shortName, verdict } from "./health.js";
import { isFailure } from "./model.js";
import { RequestList } from "./requests_view.js";
import { Store } from "./store.js";
import { showAttention, showFailures, showFirstTokens, showMix, showTiles } from "./summary_view.js";

const EVERY_MS = 1000;
const LONGEST_PAUSE_MS = 8000;
const PATIENCE_MS = 5000;
const KEY = "kvberth-admin-key";
const SLOWEST = 20;
const ICON_COLOURS = { ok: "#1a7f4b", warn: "#b7791f", bad: "#c53030", unknown: "#7a8594" };
const FILTERS = {
  All: (recent) => recent,
  Failed: (recent) => recent.filter(isFailure),
  "Failures hidden": (recent) => recent.filter((read) => read.outcome === "rescued"),
  Slowest: (recent) => [...recent].sort((a, b) => slowness(b) - slowness(a)).slice(0, SLOWEST),
};

const byId = (id) => document.getElementById(id);
const store = new Store();
const flight = new RequestList(byId("flight"), draw);
const recent = new RequestList(byId("recent"), draw);
let health = null;
let engines = null;
let access = "unknown"; // of the admin API: open, key, local, or unknown
let failedSince = null;
let numFailed = 0;
let isPaused = false;
let filter = "All";
let timer = null;
let asking = null;

class UnreachableError extends Error {}

/** An answer's status and JSON. Throws `UnreachableError` if there is none in time. */
async function ask(path, signal) {
  const key = sessionStorage.getItem(KEY);
  const headers = key === null || path === "health" ? {} : { authorization: `Bearer ${key}` };
  try {
    const response = await fetch(path, { headers, signal, cache: "no-store", credentials: "omit" });
    return { status: response.status, json: await response.json() };
  } catch (error) {
    throw new UnreachableError(String(error));
  }
}

async function poll() {
  clearTimeout(timer);
  asking?.abort();
  const mine = (asking = new AbortController());
  const patience = setTimeout(() => mine.abort(), PATIENCE_MS);
  try {
    const [said, known, requests] = await Promise.all([
      ask("health", mine.signal),
      ask("kvberth/engines", mine.signal),
      ask(`kvberth/requests?after=${store.endedTotal}`, mine.signal),
    ]);
    if (mine !== asking) return;
    take(said, known, requests);
    numFailed = 0;
    failedSince = null;
  } catch (error) {
    if (mine !== asking) return;
    if (!(error instanceof UnreachableError)) throw error;
    numFailed += 1;
    failedSince ??= Date.now() / 1000;
  } finally {
    clearTimeout(patience);
    if (mine === asking) {
      asking = null;
      if (!isPaused && !document.hidden) {
        timer = setTimeout(poll, Math.min(LONGEST_PAUSE_MS, EVERY_MS * 2 ** Math.min(numFailed, 4)));
      }
    }
  }
  draw();
}

function take(said, known, requests) {
  if (said.status !== 200 && said.status !== 503) throw new UnreachableError(`/health answered ${said.status}`);
  health = said.json;
  access = { 200: "open", 401: "key", 403: "local", 421: "local" }[requests.status] ?? "unknown";
  if (access === "open") store.take(requests.json, performance.now() / 1000);
  else store.forget();
  engines = known.status === 200 ? known.json.engines : enginesOfHealth(health);
}

function draw() {
  drawConnection();
  if (health === null) return;
  drawAccess();
  const router = store.requests;
  const open = (read) => (read.status === null && !recentHas(read) ? flight : recent).open(read);
  showAttention(attention(health, engines, router, Date.now() / 1000), open);
  showEngines(engines);
  for (const section of document.querySelectorAll("[data-needs=requests]")) section.hidden = router === null;
  if (router === null) return;
  showTiles(store);
  showFirstTokens(router.recent);
  showMix(router);
  showFailures(router.recent, open);
  const known = new Map([...router.inFlight, ...router.recent].map((read) => [read.key, read]));
  const { inFlightTotal, inFlight } = router;
  const listed =
    inFlightTotal > inFlight.length ? `the oldest ${inFlight.length} of ${inFlightTotal}` : String(inFlightTotal);
  setText(byId("flight-count"), listed);
  const nameOf = (url) => shortName(engines, url);
  flight.show(inFlight, known, nameOf, "Nothing is in flight.");
  setText(byId("recent-count"), `the last ${router.recent.length}`);
  recent.show(FILTERS[filter](router.recent), known, nameOf, "None yet.");
}

function recentHas(read) {
  return store.requests.recent.some((each) => each.key === read.key);
}

function drawConnection() {
  const isLost = numFailed > 0;
  const said = isLost ? lost() : health === null ? null : verdict(health);
  if (said !== null) {
    const badge = byId("verdict");
    setAttribute(badge, "data-level", said.level);
    setText(badge.firstElementChild, said.word);
    setText(badge.lastElementChild, said.why);
    const title = `${said.level === "ok" ? "" : `${said.word}: `}kvberth router`;
    if (document.title !== title) document.title = title;
    drawIcon(said.level);
  }
  setAttribute(document.body, "data-stale", isLost && health !== null);
  setText(byId("live"), isPaused ? "paused" : isLost ? "trying again" : health === null ? "connecting" : "live");
  setAttribute(byId("live"), "data-live", !isPaused && !isLost);
}

function lost() {
  const shown = health === null ? "" : " What is shown is from then.";
  return { level: "bad", word: "Unreachable", why: `The router gives no answer since ${clock(failedSince)}.${shown}` };
}

function drawIcon(level) {
  const colour = ICON_COLOURS[level] ?? ICON_COLOURS.unknown;
  const circle = `<circle cx="8" cy="8" r="7" fill="${colour}"/>`;
  const drawing = `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16">${circle}</svg>`;
  setAttribute(document.querySelector("link[rel=icon]"), "href", `data:image/svg+xml,${encodeURIComponent(drawing)}`);
}

function drawAccess() {
  const hasKey = sessionStorage.getItem(KEY) !== null;
  byId("key-form").hidden = access !== "key";
  byId("local-only").hidden = access !== "local";
  byId("forget").hidden = !hasKey || access !== "open";
  setText(byId("key-problem"), access === "key" && hasKey ? "That is not the router's admin key." : "");
}

function slowness(read) {
  return read.firstToken ?? read.seconds;
}

function pause(wanted) {
  isPaused = wanted;
  setAttribute(byId("pause"), "aria-pressed", String(isPaused));
  setText(byId("pause"), isPaused ? "Go on" : "Pause");
  clearTimeout(timer);
  if (!isPaused) poll();
  else draw();
}

function makeFilters() {
  for (const name of Object.keys(FILTERS)) {
    const button = el("button", { type: "button", "aria-pressed": String(name === filter) }, name);
    button.addEventListener("click", () => {
      filter = name;
      recent.close();
      for (const each of byId("filters").children) setAttribute(each, "aria-pressed", String(each === button));
      draw();
    });
    byId("filters").append(button);
  }
}

byId("pause").addEventListener("click", () => pause(!isPaused));
byId("forget").addEventListener("click", () => {
  sessionStorage.removeItem(KEY);
  poll();
});
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, byId("key").value.trim());
  byId("key").value = "";
  poll();
});
document.addEventListener("visibilitychange", () => {
  clearTimeout(timer);
  if (document.hidden || isPaused) return;
  store.forget(); // it may be another router by now
  poll();
});
makeFilters();
poll();
