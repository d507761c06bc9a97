
// ---- what is kept over a reload -----------------------------------------------------------------

const DATA = JSON.parse(document.getElementById("data").textContent);
const at = (id) => document.getElementById(id);

const kept = Object.assign({ from: null, to: null, paused: false, open: [], logs: [], kinds: [], top: 0 }, history.state);

function keep() {
  kept.open = [...document.querySelectorAll("details[open]")].map((node) => node.dataset.key);
  kept.top = window.scrollY;
  history.replaceState(kept, "");
}

// ---- head ---------------------------------------------------------------------------------------

function head() {
  at("title").textContent = DATA.title;
  at("pill").textContent = DATA.state;
  at("pill").classList.add(DATA.state);
  at("why").textContent = DATA.why;
  for (const tile of DATA.tiles) {
    at("tiles").append(make("div", {}, make("dt", {}, tile.label), make("dd", { class: "value" }, tile.value), make("dd", { class: "more" }, tile.note)));
  }
  if (DATA.fingerprint) {
    at("fingerprint").hidden = false;
    at("fingerprint").append("Fingerprint ", make("code", {}, DATA.fingerprint));
  }
  for (const text of DATA.problems) at("problems").append(make("p", { class: "note warn" }, text));
}

// ---- curves -------------------------------------------------------------------------------------

let charts = [];
let hovering = false;

const [first, last] = DATA.span;
const whole = first < last ? [first, last] : [first - 0.5, last + 0.5];

const board = {
  marks: DATA.marks,
  view: () => (kept.from === null ? whole : [kept.from, kept.to]),
  look(from, to) {
    const low = from === null ? null : Math.max(whole[0], Math.min(from, to));
    const high = from === null ? null : Math.min(whole[1], Math.max(from, to));
    const all = from === null || !(low < high) || (low <= whole[0] && high >= whole[1]);
    kept.from = all ? null : low;
    kept.to = all ? null : high;
    keep();
    redraw();
  },
  isLog: (title) => kept.logs.includes(title),
  setLog(title, on) {
    kept.logs = kept.logs.filter((one) => one !== title).concat(on ? [title] : []);
    keep();
  },
  busy(on) { hovering = on; },
};

function redraw() {
  const [from, to] = board.view();
  at("from").value = Math.ceil(from);
  at("to").value = Math.floor(to);
  for (const chart of charts) chart.draw();
}

function curves() {
  for (const spec of DATA.charts) {
    const chart = new Chart(spec, board);
    charts.push(chart);
    at(`charts-${spec.group}`).append(chart.node);
  }
  for (const group of ["curves", "resources"]) {
    if (!at(`charts-${group}`).children.length) at(`charts-${group}`).append(make("p", { class: "hint" }, group === "curves" ? "No step has been taken yet." : "No rank has written a line yet."));
  }
  at("range").addEventListener("submit", (event) => {
    event.preventDefault();
    board.look(Number(at("from").value), Number(at("to").value));
  });
  at("reset").addEventListener("click", () => board.look(null, null));
  if (DATA.marks.length) at("marks-note").hidden = false;
  const left = DATA.ranks.resources_left_out;
  if (left) at("resources-note").textContent = `The first ranks are drawn; ${left} more are left out.`;
  let width = 0;
  new ResizeObserver(() => {
    if (document.body.clientWidth !== width) { width = document.body.clientWidth; redraw(); }
  }).observe(document.body);
  redraw();
}

// ---- ranks --------------------------------------------------------------------------------------

const time = (seconds) => (seconds === null ? "none" : seconds >= 1 ? `${seconds.toPrecision(3)} s` : `${Number((seconds * 1000).toPrecision(3))} ms`);
const colourOf = (phase) => (["data", "forward", "backward", "communication", "update", "checkpoint", "other"].includes(phase) ? `var(--p-${phase})` : "var(--quiet)");

function ranks() {
  const { rows, order, stragglers } = DATA.ranks;
  const place_ = at("phases");
  if (!rows.length) return place_.append(make("p", { class: "hint" }, "No rank has written a line yet."));
  for (const one of stragglers) {
    const times = one.others > 0 ? `, ${(one.seconds / one.others).toPrecision(3)} times as long` : "";
    at("stragglers").append(make("p", { class: "note warn" }, make("b", {}, `Rank ${one.rank} is a straggler in ${one.phase}: `), `${time(one.seconds)} a step against ${time(one.others)} of the other ranks${times}, in ${Math.round(one.share * 100)} % of the run.`));
  }
  if (!stragglers.length && rows.length > 1) at("stragglers").append(make("p", { class: "hint" }, "No stragglers: no rank stays well above the others."));
  if (!order.length) return place_.append(make("p", { class: "hint" }, "This run measured no phases."));
  const sum = (row) => order.reduce((total, name) => total + (row.phases[name] || 0), 0);
  const most = Math.max(...rows.map(sum)) || 1;
  const card = make("div", { class: "card" }, make("h3", {}, "Where a step's time goes, on average"));
  for (const row of rows) {
    const parts = order.filter((name) => row.phases[name] > 0).map((name) => make("i", { title: `${name}: ${time(row.phases[name])}`, style: { width: `${(100 * row.phases[name]) / most}%`, background: colourOf(name) } }));
    card.append(make("div", { class: "bar-row" }, make("span", {}, `rank ${row.rank}`), make("div", { class: "bar", "aria-hidden": "true" }, ...parts), make("span", { class: "num" }, time(sum(row)))));
  }
  card.append(make("ul", { class: "legend" }, ...order.map((name) => make("li", {}, make("span", { class: "key", style: { background: colourOf(name) } }), name))));
  const names = ["rank", "steps", "a step", "slowest", ...order].map((name, number) => make("th", { scope: "col", class: number ? "num" : "" }, name));
  const body = rows.map((row) => {
    const values = [row.steps.toLocaleString("en-US"), time(row.step_seconds), time(row.slowest), ...order.map((name) => time(row.phases[name] || 0))];
    return make("tr", {}, make("th", { scope: "row" }, String(row.rank)), ...values.map((value) => make("td", { class: "num" }, value)));
  });
  card.append(make("details", { "data-key": "phases" }, make("summary", {}, "Numbers"), make("div", { class: "wide", tabindex: 0, role: "group", "aria-label": "Phases by rank" }, make("table", {}, make("thead", {}, make("tr", {}, ...names)), make("tbody", {}, ...body)))));
  place_.append(card);
}

// ---- events -------------------------------------------------------------------------------------

const KINDS = { RunStarted: "start", RunEnded: "end", RunFailed: "failure", RunStopped: "end", CheckpointSaved: "checkpoint", CheckpointFailed: "checkpoint failed", Resumed: "resume", Stopping: "stop", Quarantined: "quarantine", Notice: "notice" };
const word = (event) => (event.kind === "Notice" && event.warning ? "warning" : KINDS[event.kind] || event.kind);

function events() {
  const kinds = [...new Set(DATA.events.map(word))];
  if (!kinds.length) return at("event-table").append(make("p", { class: "hint" }, "Nothing has happened yet."));
  const body = make("tbody", {});
  const show = () => {
    const rows = DATA.events.filter((event) => !kept.kinds.length || kept.kinds.includes(word(event)));
    body.replaceChildren(...rows.map((event) => {
      const when = typeof event.time === "number" ? new Date(event.time * 1000).toLocaleString("sv-SE") : "";
      const step = typeof event.step === "number" ? event.step.toLocaleString("en-US") : "";
      return make("tr", {}, make("td", { class: "when" }, when), make("td", { class: "num" }, step), make("td", { class: event.warning ? "tag warn" : "tag" }, word(event)), make("td", {}, event.text));
    }));
  };
  if (kinds.length > 1) {
    for (const kind of kinds) {
      const button = make("button", { type: "button", "aria-pressed": String(kept.kinds.includes(kind)) }, `${kind} ${DATA.events.filter((event) => word(event) === kind).length}`);
      button.addEventListener("click", () => {
        const on = !kept.kinds.includes(kind);
        kept.kinds = kept.kinds.filter((one) => one !== kind).concat(on ? [kind] : []);
        button.setAttribute("aria-pressed", String(on));
        keep();
        show();
      });
      at("event-filter").append(button);
    }
  }
  show();
  const names = [["time", ""], ["step", "num"], ["what", ""], ["", ""]].map(([name, kind]) => make("th", { scope: "col", class: kind }, name));
  at("event-table").append(make("div", { class: "card wide" }, make("table", { class: "event" }, make("thead", {}, make("tr", {}, ...names)), body)));
  if (DATA.events_left_out) at("event-table").append(make("p", { class: "hint" }, `${DATA.events_left_out} earlier events stand in events.jsonl.`));
}

// ---- what the run was ---------------------------------------------------------------------------

function pairs(title, rows) {
  const body = rows.map(([name, value]) => make("tr", {}, make("th", { scope: "row" }, name), make("td", {}, value)));
  return make("div", { class: "card" }, make("h3", {}, title), make("table", { class: "pairs" }, make("tbody", {}, ...body)));
}

function made_of() {
  for (const command of DATA.reproduce.commands) at("commands").append(make("pre", { class: "command", tabindex: 0 }, command));
  for (const note of DATA.reproduce.notes) at("commands").append(make("p", { class: "hint" }, note));
  const digest = [["SHA-256", DATA.digest.value], ["lines", DATA.digest.lines.toLocaleString("en-US")], ["made by", make("code", {}, DATA.digest.command)]];
  const left = make("div", {}, pairs("Ledger's digest: equal in equal runs", digest));
  if (DATA.numerics.length) left.append(make("div", { style: { marginTop: "0.9rem" } }, pairs("Numerics key: what the bits depend on", DATA.numerics)));
  at("facts").classList.add("facts");
  at("facts").append(pairs("Settings and versions", DATA.facts), left);
  at("recipe-text").append(DATA.recipe === null ? make("p", { class: "hint" }, "This run was made from Python, without a recipe.") : make("pre", { tabindex: 0 }, DATA.recipe));
}

// ---- a run that goes on -------------------------------------------------------------------------

function ago(seconds) {
  if (seconds < 90) return `${Math.max(0, Math.round(seconds))} s`;
  return seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3600)} h`;
}

function age() {
  const seconds = Date.now() / 1000 - DATA.written;
  const late = seconds > Math.max(120, 20 * DATA.every);
  const text = late ? `No news for ${ago(seconds)}: the run may have ended without a word. ` : `Updated ${ago(seconds)} ago.`;
  if (at("age").textContent !== text) at("age").textContent = text;
}

function reading() {
  const chosen = document.getSelection();
  return kept.paused || document.hidden || hovering || (chosen && !chosen.isCollapsed) || document.activeElement instanceof HTMLInputElement;
}

function follow() {
  if (!DATA.running) return;
  const button = at("pause");
  const label = () => {
    button.textContent = kept.paused ? "Go on updating" : "Pause updates";
    button.setAttribute("aria-pressed", String(kept.paused));
  };
  at("fresh").hidden = false;
  label();
  button.addEventListener("click", () => { kept.paused = !kept.paused; label(); keep(); });
  age();
  setInterval(age, 1000);
  setInterval(() => {
    if (reading()) return;
    keep();
    location.reload();
  }, Math.max(250, DATA.every * 1000));
}

head();
curves();
ranks();
events();
made_of();
for (const node of document.querySelectorAll("details")) node.open = kept.open.includes(node.dataset.key);
if (kept.top) window.scrollTo(0, kept.top);
follow();
