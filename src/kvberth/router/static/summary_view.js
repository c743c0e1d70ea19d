// The upper half of the page but for the engines: what needs attention, the figures, where time goes, failures.

import { el, reconcile, setAttribute, setStyle, setText, svg } from "./dom.js";
import { amount, clock, duration, percent, plural, rate } from "./format.js";
import { counts, failureGroups, FIRST_PHASES, isFailure, percentile, timeToFirstToken } from "./model.js";

const byId = (id) => document.getElementById(id);

/** `open(read)` shows a request. */
export function showAttention(items, open) {
  byId("attention-section").hidden = items.length === 0;
  reconcile(
    byId("attention"),
    items,
    (item) => item.key,
    () => el("li", {}, el("b"), el("span", { class: "why" }), el("span", { class: "links" })),
    (row, item) => {
      const [title, why, links] = row.children;
      setAttribute(row, "data-level", item.level);
      setText(title, item.title);
      setText(why, item.detail ?? "");
      showLinks(links, item.requests, open);
    },
  );
}

function showLinks(parent, requests, open) {
  reconcile(
    parent,
    requests,
    (read) => read.key,
    requestLink(open),
    (link, read) => setText(link, read.id),
  );
}

function requestLink(open) {
  return (read) => {
    const link = el("button", { type: "button", class: "link id", title: "Show this request" });
    link.addEventListener("click", () => open(read));
    return link;
  };
}

export function showTiles(store) {
  const router = store.requests;
  const ended = router.recent;
  const failed = ended.filter(isFailure).length;
  const ttft = timeToFirstToken(ended).all;
  const whole = ended.filter((read) => read.status < 400).map((read) => read.seconds);
  const waiting = router.inFlight.filter((read) => read.firstToken === null);
  const oldest = waiting.length ? waiting[0].seconds : null;
  const queued = router.queued ? `, ${router.queued} queued` : "";
  const tiles = [
    ["In flight", amount(router.admitted), `of at most ${amount(router.maxInFlight)}${queued}`, (s) => s.inFlight],
    ["Requests per second", rate(store.rate), "answered, over 5 s", (s) => s.rate],
    ["TTFT p50", duration(ttft.p50), `p95 ${duration(ttft.p95)}`],
    ["Whole answer p50", duration(percentile(whole, 0.5)), `p95 ${duration(percentile(whole, 0.95))}`],
    ["Longest wait now", duration(oldest), oldest === null ? "all have their first token" : "without a first token"],
    ["Failed", ended.length ? percent(failed / ended.length) : "–", `${failed} of the last ${ended.length}`],
  ];
  reconcile(
    byId("tiles"),
    tiles,
    ([name]) => name,
    ([name, , , series]) =>
      el("div", {}, el("dt", {}, name), el("dd", {}), el("dd", { class: "quiet" }), series ? sparkline() : null),
    (tile, [, value, note, series]) => {
      setText(tile.children[1], value);
      setText(tile.children[2], note);
      if (series) drawSparkline(tile.children[3], store.samples.map(series));
    },
  );
  setAttribute(byId("tiles").lastElementChild, "data-level", failed > 0 ? "bad" : null);
}

function sparkline() {
  const line = svg("polyline", { fill: "none", "vector-effect": "non-scaling-stroke" });
  return svg(
    "svg",
    { class: "spark", viewBox: "0 0 119 20", preserveAspectRatio: "none", "aria-hidden": "true" },
    line,
  );
}

function drawSparkline(drawing, values) {
  const top = Math.max(1, ...values.map((value) => value ?? 0));
  const points = values.map(
    (value, i) => `${119 - values.length + 1 + i},${(19 - (18 * (value ?? 0)) / top).toFixed(1)}`,
  );
  setAttribute(drawing.firstElementChild, "points", points.join(" "));
}

const PATHS = { none: "not served" };

/** By path, what the mean first-token time is made of; and each phase's median and 95th percentile. */
export function showFirstTokens(requests) {
  const figures = timeToFirstToken(requests);
  const { all } = figures;
  setText(byId("ttft-count"), all.count ? `of ${plural(all.count, "streamed answer")}` : "no streamed answer yet");
  const rows = figures.paths.length > 1 ? [{ path: "all", ...all }, ...figures.paths] : figures.paths;
  const longest = Math.max(...rows.map((row) => sumOf(row.phases)), 1e-9);
  const parent = byId("ttft");
  if (!parent.firstElementChild) {
    parent.append(el("div", { class: "bars" }), el("div", { class: "phases" }));
  }
  parent.hidden = all.count === 0;
  const [bars, phases] = parent.children;
  reconcile(
    bars,
    [{ path: "" }, ...rows],
    (row) => row.path,
    createBarRow,
    (element, row) => {
      if (row.path === "") return;
      drawPhases(
        element.children[1],
        row.phases.filter(({ mean }) => mean > 0),
        longest,
      );
      setText(element.children[2], duration(row.p50));
      setText(element.children[3], duration(row.p95));
    },
  );
  const listed = [{ name: "", head: ["p50", "p95", "n"] }, ...all.phases.filter((phase) => phase.count > 0)];
  reconcile(
    phases,
    listed,
    (phase) => phase.name,
    createPhaseRow,
    (element, phase) => {
      const cells = phase.head ?? [duration(phase.p50), duration(phase.p95), String(phase.count)];
      cells.forEach((text, i) => setText(element.children[i + 1], text));
    },
  );
}

const sumOf = (phases) => phases.reduce((sum, phase) => sum + phase.mean, 0);

function createBarRow({ path }) {
  if (path === "")
    return el(
      "div",
      { class: "head" },
      ...["path", "mean, by phase", "p50", "p95"].map((text) => el("span", {}, text)),
    );
  return el("div", {}, el("span", {}, path), el("span", { class: "bar", role: "img" }), el("span"), el("span"));
}

function createPhaseRow(phase) {
  const name =
    phase.name === "" ? el("span", {}, "phase") : el("span", { class: "key", "data-phase": phase.name }, phase.name);
  return el("div", { class: phase.head ? "head" : null }, name, el("span"), el("span"), el("span"));
}

function drawPhases(bar, phases, longest) {
  reconcile(
    bar,
    phases,
    ({ name }) => name,
    ({ name }) => el("span", { "data-phase": name }),
    (part, { mean }) => setStyle(part, "width", `${(mean / longest) * 100}%`),
  );
  setAttribute(bar, "aria-label", `mean: ${phases.map(({ name, mean }) => `${name} ${duration(mean)}`).join(", ")}`);
  setAttribute(bar, "title", bar.getAttribute("aria-label"));
}

/** How the recent ones were served and bound; and what all since the router's start came to. */
export function showMix(router) {
  const ended = router.recent;
  setText(byId("mix-count"), `the last ${ended.length}`);
  const bindings = ended.filter((read) => read.binding !== null && read.undividedReason === null);
  const since = new Map();
  for (const { path, count } of router.answered) since.set(path, (since.get(path) ?? 0) + count);
  const rows = [
    ["path", counts(ended.map((read) => read.path))],
    ["binding", counts(bindings.map((read) => read.binding))],
    ["undivided because", counts(ended.map((read) => read.undividedReason).filter((reason) => reason !== null))],
    ["since start", [...since].sort((a, b) => b[1] - a[1])],
  ].filter(([, parts]) => parts.length > 0);
  reconcile(
    byId("mix"),
    rows,
    ([name]) => name,
    createMixRow,
    (element, [, parts]) => {
      const total = parts.reduce((sum, [, count]) => sum + count, 0);
      const [, bar, legend] = element.children;
      reconcile(
        bar,
        parts,
        ([value]) => value,
        ([value]) => el("span", { "data-value": value }),
        (part, [, count]) => setStyle(part, "width", `${(count / total) * 100}%`),
      );
      reconcile(
        legend,
        parts,
        ([value]) => value,
        ([value]) => el("li", { "data-value": value }, PATHS[value] ?? value, " ", el("b")),
        (entry, [, count]) => setText(entry.lastElementChild, `${amount(count)} (${percent(count / total)})`),
      );
    },
  );
}

function createMixRow([name]) {
  const bar = el("div", { class: "bar", "aria-hidden": "true" });
  return el("div", { class: "mix-row" }, el("h3", {}, name), bar, el("ul", { class: "legend" }));
}

export function showFailures(requests, open) {
  const groups = failureGroups(requests);
  const seen = groups.filter((group) => group.isSeen).reduce((sum, group) => sum + group.count, 0);
  const hidden = groups.reduce((sum, group) => sum + group.count, 0) - seen;
  setText(byId("failures-count"), groups.length ? `${seen} seen by clients, ${hidden} hidden from them` : "");
  byId("failures-none").hidden = groups.length > 0;
  const list = byId("failures");
  reconcile(
    list,
    groups,
    (group) => group.key,
    () => createFailure(),
    (row, group) => {
      const [count, reason, where, detail, last] = row.children;
      setAttribute(row, "data-level", group.isSeen ? "bad" : "warn");
      setText(count, `${group.count} ×`);
      setText(reason, group.reason);
      setText(where, [group.engine, group.isSeen ? null : "hidden from the client"].filter(Boolean).join(" · "));
      setText(detail, group.detail ?? "");
      setText(last.firstElementChild, `last at ${clock(group.lastAt)}: `);
      showLinks(last.lastElementChild, [group.last], open);
    },
  );
}

function createFailure() {
  const last = el("span", { class: "last" }, el("span"), el("span"));
  const texts = ["where", "detail"].map((name) => el("span", { class: name }));
  return el("li", {}, el("span", { class: "count" }), el("b"), ...texts, last);
}
