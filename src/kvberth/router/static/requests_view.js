// The lists of requests: a bar of phases for each, and behind a click what happened to it, and when.
//
// A list in which a request is open stands still: what is read must not move. Its requests are kept up to date, those
// that have ended among them.

import { el, reconcile, setAttribute, setStyle, setText } from "./dom.js";
import { amount, clock, duration } from "./format.js";
import { percentile, PHASES } from "./model.js";

const ROWS = 50;
// A bar longer than this many times what three in four take is cut off, so that a few cannot flatten the others.
const LONGEST_TIMES_USUAL = 3;
const USUAL = 0.75;
const STEPS = [1, 1.5, 2, 3, 4, 5, 6, 8, 10];
const OUTCOMES = {
  running: "in flight",
  ok: "ok",
  rescued: "ok, a failure hidden",
  failed: "failed",
  refused: "refused",
  rejected: "rejected",
  left: "client left",
};
const WORDS = {
  admitted: "admitted",
  binding_chosen: "binding chosen",
  prefill_sent: "sent to prefill worker",
  prefill_began: "prefill began",
  decode_sent: "sent to decode worker",
  registered: "decode worker registered",
  prefill_done: "prefill done",
  transferred: "all KV transferred",
  first_token: "first token",
  leg_failed: "leg failed",
  continued: "continued elsewhere",
  left_undivided: "served undivided",
  ended: "ended",
};

export class RequestList {
  /** `changed()` asks for a new drawing. */
  constructor(parent, changed) {
    this.changed = changed;
    this.opened = new Set();
    this.shown = new Map(); // by key, in the order in which they are listed
    this.seen = new Set();
    this.rows = ROWS;
    this.note = el("p", { class: "held" });
    this.empty = el("p", { class: "empty" });
    const names = ["arrived", "request", "path · binding", "prefill → decode"].map((text) => el("span", {}, text));
    this.ticks = el("div");
    this.axis = el("div", { class: "axis", "aria-hidden": "true" }, ...names, this.ticks, el("span", {}, "took"));
    this.list = el("ol");
    this.more = el("button", { type: "button", class: "more" });
    this.more.addEventListener("click", () => {
      this.rows = this.rows === ROWS ? Infinity : ROWS;
      changed();
    });
    parent.append(this.note, this.empty, this.axis, this.list, this.more);
  }

  /**
   * Draws `requests` in their order. `known` has, by key, the newest of every request there is, `nameOf` an engine's
   * short name by its URL.
   */
  show(requests, known, nameOf, emptyText) {
    this.nameOf = nameOf;
    for (const key of this.opened) if (!this.shown.has(key) && !known.has(key)) this.opened.delete(key);
    let listed = requests.slice(0, this.rows);
    let numNew = 0;
    if (this.opened.size > 0 && [...this.opened].some((key) => this.shown.has(key))) {
      listed = [...this.shown.values()].map((read) => known.get(read.key) ?? read);
      numNew = requests.filter((read) => !this.seen.has(read.key)).length;
    } else {
      this.seen = new Set(requests.map((read) => read.key));
    }
    this.shown = new Map(listed.map((read) => [read.key, read]));
    const isHeld = this.opened.size > 0;
    setText(this.note, isHeld ? `This list stands still while a request is open. ${numNew} new.` : "");
    this.note.hidden = !isHeld;
    this.more.hidden = isHeld || requests.length <= ROWS;
    setText(this.more, this.rows === ROWS ? `Show all ${requests.length}` : `Show ${ROWS}`);
    const scale = axisLength(listed.map((read) => read.seconds));
    this.#drawAxis(scale);
    this.axis.hidden = listed.length === 0;
    this.empty.hidden = listed.length > 0;
    setText(this.empty, emptyText);
    reconcile(
      this.list,
      listed,
      (read) => read.key,
      (read) => this.#create(read),
      (row, read) => this.#update(row, read, scale),
    );
  }

  /** Opens a request and brings it into view; it is put on top where the list does not show it. */
  open(read) {
    if (!this.shown.has(read.key)) this.shown = new Map([[read.key, read], ...this.shown]);
    this.opened.add(read.key);
    this.changed();
    const row = this.list.elementsByKey.get(read.key);
    row.firstElementChild.focus({ preventScroll: true });
    row.scrollIntoView({ block: "nearest" });
  }

  /** Closes all that is open, so that other requests can be shown. */
  close() {
    this.opened.clear();
    this.shown.clear();
  }

  #drawAxis(scale) {
    const ticks = [0, 0.25, 0.5, 0.75, 1].map((share) => ({ share, text: duration(share * scale) }));
    const update = (tick, { text }) => setText(tick, text);
    reconcile(
      this.ticks,
      ticks,
      (tick) => tick.share,
      () => el("span"),
      update,
    );
  }

  #create(read) {
    const head = el(
      "button",
      { type: "button", class: "request", "aria-expanded": "false" },
      el("span", { class: "time" }),
      el("span", { class: "id" }, read.id),
      el("span", { class: "path" }),
      el("span", { class: "path engines-of" }),
      el("span", { class: "bar", role: "img" }),
      el("span", { class: "seconds" }),
      el("span", { class: "outcome" }),
    );
    head.addEventListener("click", () => {
      if (!this.opened.delete(read.key)) this.opened.add(read.key);
      this.changed();
    });
    return el("li", {}, head, el("div", { class: "details" }));
  }

  #update(row, read, scale) {
    const [head, details] = row.children;
    const [time, , path, where, bar, seconds, outcome] = head.children;
    const isOpen = this.opened.has(read.key);
    setAttribute(row, "data-outcome", read.outcome);
    setAttribute(head, "aria-expanded", isOpen ? "true" : "false");
    setText(time, clock(read.arrivedAt));
    setText(path, describePath(read));
    setAttribute(path, "title", describePath(read));
    setText(where, [read.prefill, read.decode].map((url) => (url === null ? "–" : this.nameOf(url))).join(" → "));
    setAttribute(where, "title", where.textContent);
    drawBar(bar, read, scale);
    setText(seconds, duration(read.seconds));
    setAttribute(row, "data-stuck", read.isStuck);
    const status =
      read.status === null
        ? `${read.phase}${read.isStuck ? ", long" : ""}`
        : `${read.status} ${OUTCOMES[read.outcome]}`;
    setText(outcome, read.error === null ? status : `${read.status} ${read.error}`);
    details.hidden = !isOpen;
    if (isOpen) showDetails(details, read);
  }
}

function drawBar(bar, read, scale) {
  const share = (seconds) => `${Math.min(1, seconds / scale) * 100}%`;
  reconcile(
    bar,
    read.phases,
    (phase) => phase.name,
    (phase) => el("span", { "data-phase": phase.name }),
    (part, phase) => {
      setStyle(part, "left", share(phase.begin));
      setStyle(part, "width", `calc(${share(phase.end)} - ${share(phase.begin)})`);
    },
  );
  setAttribute(bar, "data-cut", read.seconds > scale);
  setAttribute(bar, "aria-label", describePhases(read));
  setAttribute(bar, "title", describePhases(read));
}

/** "push · jit", "undivided · beam_search"; the path of a request in flight is the one that it is on now. */
function describePath({ path, mode, binding, undividedReason }) {
  if (undividedReason !== null) return `undivided · ${undividedReason}`;
  return [path === "none" ? mode : path, binding].filter(Boolean).join(" · ");
}

function describePhases(read) {
  return read.phases.map((phase) => `${phase.name} ${duration(phase.end - phase.begin)}`).join(", ");
}

/** A round length of time that nearly all fit into. */
function axisLength(seconds) {
  if (seconds.length === 0) return 1;
  const wanted = Math.max(0.001, Math.min(percentile(seconds, 1), LONGEST_TIMES_USUAL * percentile(seconds, USUAL)));
  const power = 10 ** Math.floor(Math.log10(wanted));
  return STEPS.map((step) => step * power).find((length) => length >= wanted * 0.999);
}

function showDetails(parent, read) {
  if (!parent.firstElementChild) parent.append(el("dl"), el("ol", { class: "events" }));
  const [facts, events] = parent.children;
  const isPhase = (name) => PHASES.includes(name);
  const said = [
    ["request", read.id],
    ["endpoint", read.endpoint],
    ["prompt", read.promptTokens === null ? null : `about ${amount(read.promptTokens)} tokens`],
    ["mode", read.mode || null],
    ["first token", read.firstToken === null ? null : `after ${duration(read.firstToken)}`],
    ...read.phases.map((phase) => [phase.name, duration(phase.end - phase.begin)]),
    ["outcome", OUTCOMES[read.outcome]],
  ].filter(([, value]) => value !== null);
  reconcile(
    facts,
    said,
    ([name]) => name,
    ([name]) => el("div", {}, el("dt", isPhase(name) ? { class: "key", "data-phase": name } : {}, name), el("dd")),
    (entry, [, value]) => setText(entry.lastElementChild, value),
  );
  const numbered = read.events.map((event, i) => ({
    i,
    event,
    since: event.at_seconds - (read.events[i - 1]?.at_seconds ?? 0),
  }));
  reconcile(
    events,
    numbered,
    ({ i }) => i,
    createEvent,
    () => {},
  );
}

/** An event never changes once it has happened. */
function createEvent({ event, since }) {
  const facts = Object.entries(event.facts).map(([name, value]) =>
    el("span", { class: "fact" }, el("i", {}, name.replaceAll("_", " ")), " ", String(value)),
  );
  return el(
    "li",
    { "data-what": event.what },
    el("span", { class: "at" }, duration(event.at_seconds)),
    el("span", { class: "since" }, `+${duration(since)}`),
    el("b", {}, WORDS[event.what] ?? event.what),
    el("span", { class: "facts" }, ...facts),
  );
}
