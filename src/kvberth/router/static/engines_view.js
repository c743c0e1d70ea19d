// The table of engines: on a narrow screen each is a card.

import { el, reconcile, setAttribute, setStyle, setText } from "./dom.js";
import { amount, percent } from "./format.js";
import { engineState, FULL, isUsable, NEARLY_FULL } from "./health.js";

const ENGINE_COLUMNS = [
  ["Engine", () => null],
  ["State", () => null],
  ["Running", (engine) => amount(engine.load?.running)],
  ["Waiting", (engine) => amount(engine.load?.waiting)],
  ["KV cache", () => null],
  ["From here", (engine) => amount(engine.in_flight)],
  ["Prompt tokens", (engine) => amount(engine.prompt_tokens_in_flight)],
  [
    "Prefill rate",
    (engine) => (engine.prefill_tokens_per_second ? `${amount(engine.prefill_tokens_per_second)}/s` : "–"),
  ],
];
const COLUMN_TITLES = {
  Running: "Requests the engine computed when it was last asked, all routers' together",
  Waiting: "Requests that waited in the engine when it was last asked",
  "KV cache": "Share of the KV cache in use when last asked, and tokens free now",
  "From here": "Requests this router has there",
  "Prompt tokens": "Estimated prompt tokens of this router's requests there",
  "Prefill rate": "Prompt tokens per second, as measured by this router",
};

export function showEngines(engines) {
  const order = { prefill: 0, decode: 1 };
  const sorted = [...engines].sort((a, b) => (order[a.role] ?? 2) - (order[b.role] ?? 2));
  const table = document.getElementById("engines");
  table.hidden = engines.length === 0;
  table.nextElementSibling.hidden = engines.length > 0;
  const usable = (role) => {
    const those = engines.filter((engine) => engine.role === role);
    return `${those.filter(isUsable).length} of ${those.length} ${role}`;
  };
  setText(
    document.getElementById("engines-count"),
    engines.length ? `usable: ${usable("prefill")}, ${usable("decode")}` : "",
  );
  const rows = [null, ...sorted];
  reconcile(
    table,
    rows,
    (engine) => engine?.url ?? "",
    (engine) => (engine ? engineRow() : engineHead()),
    updateEngine,
  );
}

function engineHead() {
  const cells = ENGINE_COLUMNS.map(([name]) =>
    el("span", { role: "columnheader", title: COLUMN_TITLES[name] ?? null }, name),
  );
  return el("div", { role: "row", class: "engine head" }, ...cells);
}

function engineRow() {
  const cells = ENGINE_COLUMNS.map(([name]) => el("span", { role: "cell", "data-name": name }));
  cells[0].append(el("span", { class: "role" }), el("b"), el("span", { class: "url" }));
  cells[1].append(el("b", { class: "state" }), el("span", { class: "why" }));
  cells[4].append(el("span", { class: "meter", "aria-hidden": "true" }, el("span")), el("span"));
  return el("div", { role: "row", class: "engine" }, ...cells);
}

function updateEngine(row, engine) {
  if (engine === null) return;
  const cells = row.children;
  const state = engineState(engine);
  setAttribute(row, "data-level", state.level);
  setAttribute(row, "data-role", engine.role);
  setAttribute(row, "data-silent", engine.load === null);
  const [role, name, url] = cells[0].children;
  setText(role, engine.role ?? "role not known");
  setText(name, engine.engine_id ?? "");
  setText(url, engine.url);
  setText(cells[1].children[0], state.word);
  setText(cells[1].children[1], state.why ?? "");
  ENGINE_COLUMNS.forEach(([, text], i) => {
    const said = text(engine);
    if (said !== null) setText(cells[i], said);
  });
  const [meter, figure] = cells[4].children;
  const usage = engine.load?.kv_usage ?? null;
  meter.hidden = usage === null;
  setStyle(meter.firstElementChild, "width", `${Math.min(1, usage ?? 0) * 100}%`);
  setAttribute(meter, "data-level", usage >= FULL ? "bad" : usage >= NEARLY_FULL ? "warn" : null);
  const free = engine.free_kv_tokens === null || engine.free_kv_tokens === undefined ? "" : engine.free_kv_tokens;
  setText(figure, usage === null ? "–" : percent(usage) + (free === "" ? "" : `, ${amount(Math.max(0, free))} free`));
}
