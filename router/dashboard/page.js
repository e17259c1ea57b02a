"use strict";
(() => {
  // Everything that comes from the gateway is written as text (textContent, setAttribute), never as HTML: names of
  // backends and models are whatever a configuration or an engine says.
  const SVG = "http://www.w3.org/2000/svg";
  const ROWS_PER_PAGE = 32;
  const DECISIONS_SHOWN = 20;
  const POLL_MS = 1000;
  const RETRY_MS = 2000;
  const ANSWER_MS = 5000;
  const HIT_SMOOTHING_S = 30;
  const BRIDGED_POINTS = 5; // a line goes on over so many seconds without a first byte

  // ---- small things

  const byId = (id) => document.getElementById(id);
  function make(tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  }
  function draw(tag, attributes) {
    const element = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    return element;
  }
  // Only what changed is touched: no flicker, no lost selection, and a screen reader hears nothing twice.
  const say = (element, text) => { if (element.textContent !== text) element.textContent = text; };
  const mark = (element, name, value) => { if (element.getAttribute(name) !== value) element.setAttribute(name, value); };
  const hint = (element, text) => text ? mark(element, "title", text) : element.removeAttribute("title");
  const known = (value) => value !== null && value !== undefined && !Number.isNaN(value);
  const NONE = "–";

  function number(value) {
    if (!known(value)) return NONE;
    const size = Math.abs(value);
    if (size >= 1e6) return `${(value / 1e6).toFixed(1)}M`;
    if (size >= 1e4) return `${(value / 1e3).toFixed(1)}k`;
    if (size >= 100 || Number.isInteger(value)) return value.toFixed(0);
    return value.toFixed(size >= 10 ? 1 : 2);
  }
  const rate = (value) => known(value) ? `${number(value)} /s` : NONE;
  const percent = (value) => known(value) ? `${(100 * value).toFixed(value < 0.0995 && value > 0 ? 1 : 0)} %` : NONE;
  function seconds(value) {
    if (!known(value)) return NONE;
    if (value === 0) return "0 ms";
    if (value < 0.00005) return "< 0.1 ms";
    if (value < 0.00995) return `${(1000 * value).toFixed(1)} ms`;
    if (value < 0.9995) return `${(1000 * value).toFixed(0)} ms`;
    return value < 99.95 ? `${value.toFixed(value < 9.995 ? 2 : 1)} s` : `${value.toFixed(0)} s`;
  }
  // A quantile of a histogram is no finer than its lowest bucket.
  const quantile = (value) => known(value) && value <= held.limits.lowest_s ? `under ${seconds(held.limits.lowest_s)}` : seconds(value);
  function span(value) {
    if (value < 90) return `${Math.max(0, Math.round(value))} s`;
    if (value < 5400) return `${Math.round(value / 60)} min`;
    return value < 129600 ? `${(value / 3600).toFixed(1)} h` : `${Math.round(value / 86400)} d`;
  }
  const ago = (value) => value < 1 ? "now" : `${Math.floor(value / 60)}:${String(Math.round(value % 60)).padStart(2, "0")} ago`;
  const two = (value) => String(value).padStart(2, "0");
  const clock = (date) => `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
  const plural = (count, one, many = `${one}s`) => `${number(count)} ${count === 1 ? one : many}`;

  // ---- what is known

  const fresh = () => ({
    boot: "", sample: 0, steps: 0, limits: { kept_s: 600, step_s: 5, window_s: 60, hit_window_s: 300, lowest_s: 0.005 },
    summary: null, order: [], backends: new Map(), totals: {}, decisions: [], decision: 0,
    sparks: new Map(), sparksFor: "", detail: null, detailStep: -1,
  });
  let held = fresh();
  const view = { page: 0, filter: "", onlyOut: false, selected: 0, paused: false };

  function take(told) {
    if (told.boot !== held.boot) {
      held = fresh(); // another process: its samples and numbers begin anew
      held.boot = told.boot;
      closeDetail(false);
    }
    const state = held;
    const gap = told.sample - state.sample;
    state.sample = told.sample;
    state.steps = told.steps;
    if (told.limits) state.limits = told.limits;
    if (told.summary) state.summary = told.summary;
    for (const row of told.backends ?? []) state.backends.set(row.id, row);
    if (told.order) {
      state.order = told.order;
      const living = new Set(told.order);
      for (const id of state.backends.keys()) if (!living.has(id)) state.backends.delete(id);
    }
    for (const [name, values] of Object.entries(told.totals ?? {})) {
      const kept = gap > values.length ? [] : state.totals[name] ?? []; // we slept through more than is kept
      state.totals[name] = kept.concat(values).slice(-state.limits.kept_s);
    }
    for (const decision of told.decisions ?? []) {
      state.decisions.unshift(decision);
      state.decision = decision.number;
    }
    state.decisions.length = Math.min(state.decisions.length, DECISIONS_SHOWN);
    for (const [id, values] of Object.entries(told.sparks ?? {})) state.sparks.set(Number(id), values);
    if ("detail" in told) {
      state.detail = told.detail;
      state.detailStep = told.detail ? told.steps : -1;
      if (told.detail === null) closeDetail(false);
    }
  }

  // ---- plots

  function ceiling(value) {
    if (!(value > 0)) return 1;
    const unit = 10 ** Math.floor(Math.log10(value));
    return unit * [1, 1.5, 2, 3, 4, 5, 6, 8, 10].find((step) => value <= step * unit * 1.0001);
  }

  function line(values, points, top) {
    let path = "";
    let last = -Infinity;
    const start = points - values.length;
    values.forEach((value, at) => {
      if (!known(value)) return;
      const x = start + at;
      const y = (100 - 100 * Math.min(value / top, 1)).toFixed(2);
      path += x - last > BRIDGED_POINTS ? `M${x} ${y}h.01` : `L${x} ${y}`;
      last = x;
    });
    return path;
  }

  class Plot {
    // series: [name, label]; `format` writes a value; `top` fixes the scale; `empty` is said while there is nothing.
    constructor(parent, title, series, { format, step = 1, points, top = null, empty }) {
      Object.assign(this, { series, format, step, points, top, empty, at: null, values: {} });
      const caption = make("figcaption", {}, make("span", { class: "title" }, title));
      this.keys = series.map(([, label], index) => {
        const sign = draw("svg", { viewBox: "0 0 18 8", "aria-hidden": "true" });
        sign.append(draw("path", { class: `line s${index + 1}`, d: "M1 4H17" }));
        const value = make("b");
        caption.append(make("span", { class: "key" }, sign, `${label} `, value));
        return value;
      });
      this.svg = draw("svg", { viewBox: `0 -2 ${points - 1} 104`, preserveAspectRatio: "none", "aria-hidden": "true" });
      this.svg.append(draw("path", { class: "grid", d: `M0 0H${points}M0 50H${points}M0 100H${points}` }));
      this.cursor = draw("path", { class: "cursor", d: "" });
      this.lines = series.map((_, index) => draw("path", { class: `line s${index + 1}`, d: "" }));
      this.svg.append(this.cursor, ...this.lines); // dashes over the solid line: both are seen where they agree
      this.scale = make("span", { class: "top" });
      this.none = make("span", { class: "none" });
      this.plot = make("div", { class: "plot", tabindex: "0", role: "slider", "aria-label": `${title}: time to read`,
        "aria-valuemin": `${-(points - 1) * step}`, "aria-valuemax": "0", "aria-valuenow": "0" }, this.svg, this.scale, this.none);
      this.when = make("span", {}, "now");
      parent.append(make("figure", { class: "chart" }, caption, this.plot,
        make("div", { class: "axis" }, make("span", {}, `${Math.round(points * step / 60)} min ago`), this.when)));
      this.plot.addEventListener("pointermove", (event) => {
        const box = this.plot.getBoundingClientRect();
        this.read(Math.round((1 - (event.clientX - box.left) / box.width) * (points - 1)));
      });
      this.plot.addEventListener("pointerleave", () => this.read(null));
      this.plot.addEventListener("blur", () => this.read(null));
      this.plot.addEventListener("keydown", (event) => {
        const by = { ArrowLeft: 1, ArrowRight: -1, PageUp: 12, PageDown: -12, Home: points, End: -points }[event.key];
        if (by === undefined) return;
        event.preventDefault();
        this.read((this.at ?? 0) + by);
      });
    }
    read(at) { // points before the newest; null: the newest, whichever it is
      this.at = at === null ? null : Math.min(Math.max(at, 0), this.points - 1);
      mark(this.cursor, "d", this.at === null ? "" : `M${this.points - 1 - this.at} 0V100`);
      this.tell();
    }
    tell() {
      const back = this.at ?? 0;
      const texts = this.series.map(([name, label], index) => {
        const values = this.values[name] ?? [];
        const text = this.format(values[values.length - 1 - back]);
        say(this.keys[index], text);
        return `${label} ${text}`;
      });
      const when = ago(back * this.step);
      say(this.when, when);
      mark(this.plot, "aria-valuenow", `${-back * this.step}`);
      mark(this.plot, "aria-valuetext", `${when}: ${texts.join(", ")}`);
    }
    show(values) {
      this.values = values;
      let highest = 0;
      let any = false;
      for (const [name] of this.series) for (const value of values[name] ?? []) {
        if (known(value)) { highest = Math.max(highest, value); any ||= value > 0; }
      }
      const top = this.top ?? ceiling(highest);
      this.series.forEach(([name], index) => mark(this.lines[index], "d", line(values[name] ?? [], this.points, top)));
      say(this.scale, any ? this.format(top) : "");
      say(this.none, any ? "" : this.empty);
      this.tell();
    }
  }

  // A ratio of sums over the points before each: single seconds have too few prompts to tell anything.
  function ratios(part, whole, width) {
    const found = [];
    let above = 0;
    let below = 0;
    for (let at = 0; at < (whole ?? []).length; at += 1) {
      above += part[at] ?? 0;
      below += whole[at] ?? 0;
      if (at >= width) { above -= part[at - width] ?? 0; below -= whole[at - width] ?? 0; }
      found.push(below > 0.5 ? Math.min(Math.max(above / below, 0), 1) : null);
    }
    return found;
  }
  const charts = byId("charts");
  const whole = { points: 600 };
  const plots = {
    requests: new Plot(charts, "Requests per second",
      [["requests", "all"], ["failed", "failed"], ["refused", "turned away"]], { ...whole, format: rate, empty: "no traffic yet" }),
    ttft: new Plot(charts, "Time to first token", [["ttft_p50", "median"], ["ttft_p99", "p99"]],
      { ...whole, format: seconds, empty: "no first token yet" }),
    hits: new Plot(charts, "Prompt tokens found in a cache", [["predicted", "predicted"], ["reported", "engines report"]],
      { ...whole, format: percent, top: 1, empty: "no prompts yet" }),
    load: new Plot(charts, "Requests here", [["in_flight", "in flight"], ["queued", "queued"]],
      { ...whole, format: number, empty: "nothing in flight, nothing queued" }),
  };

  function showPlots({ totals }) {
    plots.requests.show(totals);
    plots.ttft.show(totals);
    plots.hits.show({
      predicted: ratios(totals.predicted_tokens, totals.prompt_tokens, HIT_SMOOTHING_S),
      reported: ratios(totals.hit_tokens, totals.queried_tokens, HIT_SMOOTHING_S),
    });
    plots.load.show(totals);
  }

  // ---- the first questions: can it serve, is it slow, does the cache work, does anything wait

  const failing = (row) => !row.serving && !row.draining;
  function lead(row, state) {
    const why = row.why ? ` (${row.why})` : "";
    return `${row.name}: ${stateOf(row).word} for ${span(state.sample - row.since)}${why}`;
  }

  function verdictOf(state) {
    const { summary } = state;
    const rows = state.order.map((id) => state.backends.get(id)).filter(Boolean);
    const out = rows.filter(failing);
    const reasons = out.slice(0, 3).map((row) => lead(row, state));
    if (out.length > 3) reasons.push(`and ${out.length - 3} more below`);
    const dark = summary.models_without_backend;
    if (dark.length && summary.serving) {
      const rest = summary.models_without_backend_count - dark.length;
      reasons.unshift(`no backend for ${dark.slice(0, 3).join(", ")}${rest + Math.max(dark.length - 3, 0) ? ` and ${rest + Math.max(dark.length - 3, 0)} more models` : ""}`);
    }
    const why = reasons.join(" · ");
    const of = `${number(summary.serving)} of ${plural(summary.backends, "backend")}`;
    if (summary.draining) return ["warn", "Draining: no new requests", `${plural(summary.in_flight, "request")} still in flight`];
    if (!summary.backends) return ["bad", "Cannot serve: no backend yet", "Name one in the configuration under [[backends]], or add it over the admin port."];
    if (!summary.serving) {
      const starting = rows.length > 0 && rows.every((row) => row.state === "starting");
      if (starting) return ["warn", "Starting: no engine has answered yet", why];
      return ["bad", `Cannot serve: none of ${plural(summary.backends, "backend")} is in rotation`, why || plural(summary.draining_backends, "backend") + " draining"];
    }
    const serious = out.length + summary.unlisted_out > 0 || dark.length > 0;
    const notes = [];
    if (summary.refused_per_s > 0) notes.push("turning requests away");
    if (summary.failed_per_s > 0 && summary.failed_per_s >= 0.01 * summary.requests_per_s) notes.push(`${percent(summary.failed_per_s / summary.requests_per_s)} of requests fail`);
    const also = notes.length ? `, ${notes.join(", ")}` : "";
    if (serious) return ["warn", `Serving with ${of}${also}`, why];
    if (notes.length) return ["warn", `Serving with ${of}${also}`, "All engines that are to serve do so; look at what is queued and what fails."];
    if (summary.draining_backends) return ["good", `Serving with ${of}, ${number(summary.draining_backends)} draining`, ""];
    return ["good", `Serving: ${of} in rotation`, summary.requests_per_s ? "" : "No traffic in the last minute."];
  }

  function tile(title) {
    const value = make("p", { class: "value" });
    const more = make("p", { class: "more" });
    const box = make("div", { class: "tile" }, make("h3", {}, title), value, more);
    byId("tiles").append(box);
    return (text, unit, below, level = "") => {
      if (!value.firstChild) value.append(make("span"), " ", make("span", { class: "unit" }));
      say(value.firstChild, text);
      say(value.lastChild, unit);
      say(more, below);
      mark(box, "data-level", level);
      hint(box, below);
    };
  }
  const tiles = {
    requests: tile("Requests"), failed: tile("Failed or turned away"), ttft: tile("Time to first token"),
    queue: tile("Queue"), load: tile("In flight"), hits: tile("Cache hits"),
  };

  function showTiles(state) {
    const { summary } = state;
    const rows = [...state.backends.values()];
    const sum = (name) => rows.some((row) => known(row[name])) ? rows.reduce((all, row) => all + (row[name] ?? 0), 0) : null;
    tiles.requests(number(summary.requests_per_s), "/s", `${rate(summary.left_per_s)} left by clients · ${rate(summary.invalid_per_s)} invalid`);
    const bad = (summary.failed_per_s ?? 0) + (summary.refused_per_s ?? 0);
    tiles.failed(number(known(summary.failed_per_s) ? bad : null), "/s", `${rate(summary.failed_per_s)} failed · ${rate(summary.refused_per_s)} turned away`,
      summary.failed_per_s > 0 ? "bad" : summary.refused_per_s > 0 ? "warn" : "");
    tiles.ttft(quantile(summary.ttft_p50_s), "median", `p99 ${quantile(summary.ttft_p99_s)}`);
    tiles.queue(number(summary.queued), "waiting here", `p99 of the wait ${quantile(summary.queue_p99_s)}`, summary.queued > 0 ? "warn" : "");
    tiles.load(number(summary.in_flight), "requests", `engines: ${number(sum("running"))} running, ${number(sum("waiting"))} waiting`);
    tiles.hits(percent(summary.reported_ratio), "engines report", `predicted ${percent(summary.predicted_ratio)} · last ${span(state.limits.hit_window_s)}`);
  }

  function showVerdict(state) {
    const [level, title, why] = verdictOf(state);
    const sign = { good: "✓", warn: "△", bad: "✕" }[level];
    mark(byId("verdict"), "data-level", level);
    say(byId("verdict-line"), `${sign} ${title}`);
    say(byId("verdict-why"), why);
    hint(byId("verdict-why"), why);
    const { summary } = state;
    say(byId("about"), `${summary.strategy} · version ${summary.version} · up ${span(state.sample)}`);
    const title_now = `${sign} ${summary.serving}/${summary.backends} kvgate`;
    if (document.title !== title_now) document.title = title_now;
  }

  // ---- the table of backends

  const STATES = {
    up: ["good", "✓", "up"], trial: ["warn", "△", "on trial"], starting: ["warn", "○", "starting"],
    ejected: ["bad", "✕", "ejected"], down: ["bad", "✕", "down"],
  };
  function stateOf(row) {
    if (row.deleted) return { level: "warn", sign: "▽", word: "being removed" };
    if (row.draining) return { level: "warn", sign: "▽", word: row.state === "up" ? "draining" : `draining, ${row.state}` };
    const [level, sign, word] = STATES[row.state] ?? ["bad", "?", row.state];
    return { level, sign, word };
  }

  const COLUMNS = [
    ["Backend", "text wide", "14%"], ["State", "text wide", "18%"], ["In flight", "", "5.5%"], ["Running", "", "5.5%"], ["Waiting", "", "5.5%"],
    ["KV in use", "", "8.5%"], ["Predicted", "", "6%"], ["Reported", "", "6%"], ["TTFT mean", "", "6.5%"], ["Attempts", "", "6.5%"],
    ["Failed", "", "5.5%"], ["In flight, 10 min", "rest text", ""],
  ];
  const HINTS = {
    "In flight": "attempts of this gateway on it", Running: "as the engine reports", Waiting: "as the engine reports",
    "KV in use": "share of its KV blocks that running requests hold, as the engine reports", Predicted: "share of prompt tokens that the gateway expected in its cache, last 5 min",
    Reported: "share of prompt tokens that the engine found in its cache, by its own counters, last 5 min", "TTFT mean": "time to first token of requests that it answered, last minute",
    Attempts: "ended in the last minute, repeats included", Failed: "of them by its doing, or answered with 5xx",
  };
  for (const [name, kind, width] of COLUMNS) {
    const head = make("th", { scope: "col", role: "columnheader", class: kind.replace(/wide|rest/, "").trim() }, name);
    if (width) head.style.width = width;
    hint(head, HINTS[name]);
    byId("backends-head").append(head);
  }

  const drawn = new Map(); // number -> what shows it

  function makeRow(id) {
    const cells = COLUMNS.map(([name, kind]) => make("td", { role: "cell", class: kind, "data-label": name }));
    const [who, state, , , , kv, , , , , , spark] = cells;
    const name = make("button", { type: "button", class: "name", "aria-expanded": "false", "aria-controls": "detail" });
    const url = make("span", { class: "second" });
    who.append(name, url);
    const word = make("span", { class: "state" });
    const since = make("span");
    const why = make("span", { class: "second why" });
    state.append(word, since, why);
    const bar = make("i");
    const usage = make("span");
    kv.append(make("span", { class: "meter", "aria-hidden": "true" }, bar), usage);
    const sparkSvg = draw("svg", { class: "spark", viewBox: "0 -4 119 108", preserveAspectRatio: "none", role: "img" });
    const sparkLine = draw("path", { class: "line s1", d: "" });
    sparkSvg.append(sparkLine);
    spark.append(sparkSvg);
    name.addEventListener("click", () => view.selected === id ? closeDetail(true) : openDetail(id));
    const row = make("tr", { role: "row", "aria-selected": "false" }, ...cells);
    return { row, cells, name, url, word, since, why, bar, usage, sparkSvg, sparkLine };
  }

  function showRow(shown, row, state) {
    const { level, sign, word } = stateOf(row);
    say(shown.name, row.name);
    hint(shown.name, row.name);
    const models = row.models_count === 0 ? "no models told yet" : row.models_count === 1 ? row.models[0] : `${row.models[0]} and ${row.models_count - 1} more`;
    say(shown.url, models);
    hint(shown.url, `${row.url}\n${row.models.join("\n")}`);
    mark(shown.word, "class", `state ${level}`);
    say(shown.word, `${sign} ${word}`);
    say(shown.since, ` · ${span(state.sample - row.since)}`);
    say(shown.why, row.why || (row.draining && row.in_flight ? `${plural(row.in_flight, "request")} to end` : ""));
    hint(shown.why, row.why);
    shown.row.classList.toggle("out", !row.serving);
    const texts = [, , number(row.in_flight), number(row.running), number(row.waiting), , percent(row.predicted_ratio),
      percent(row.reported_ratio), seconds(row.ttft_mean_s), rate(row.attempts_per_s), rate(row.failed_per_s)];
    texts.forEach((text, at) => say(shown.cells[at], text));
    shown.cells[10].classList.toggle("alarm", row.failed_per_s > 0);
    say(shown.usage, percent(row.kv_usage));
    shown.bar.style.transform = `scaleX(${Math.min(row.kv_usage ?? 0, 1)})`;
    const values = state.sparks.get(row.id) ?? [];
    const highest = values.reduce((most, value) => known(value) ? Math.max(most, value) : most, 0);
    mark(shown.sparkLine, "d", line(values, 120, ceiling(highest)));
    mark(shown.sparkSvg, "aria-label", values.length ? `in flight over ten minutes, at most ${number(highest)}` : "no history yet");
    const selected = String(view.selected === row.id);
    mark(shown.name, "aria-expanded", selected);
    mark(shown.row, "aria-selected", selected);
  }

  function listed(state) { // those out of rotation first, else the order of the fleet: rows stay where they are
    const text = view.filter.toLowerCase();
    const rows = state.order.map((id) => state.backends.get(id)).filter((row) => row
      && (!view.onlyOut || !row.serving)
      && (!text || [row.name, row.url, stateOf(row).word, ...row.models].some((part) => part.toLowerCase().includes(text))));
    return [...rows.filter((row) => !row.serving), ...rows.filter((row) => row.serving)];
  }

  function visible(state) {
    const rows = listed(state);
    const pages = Math.max(1, Math.ceil(rows.length / ROWS_PER_PAGE));
    view.page = Math.min(view.page, pages - 1);
    return { rows: rows.slice(view.page * ROWS_PER_PAGE, (view.page + 1) * ROWS_PER_PAGE), all: rows.length, pages };
  }

  function showFleet(state) {
    const { rows, all, pages } = visible(state);
    const body = byId("backends-body");
    rows.forEach((row, at) => {
      if (!drawn.has(row.id)) drawn.set(row.id, makeRow(row.id));
      const shown = drawn.get(row.id);
      showRow(shown, row, state);
      if (body.children[at] !== shown.row) body.insertBefore(shown.row, body.children[at] ?? null);
    });
    while (body.children.length > rows.length) body.lastChild.remove();
    for (const id of drawn.keys()) if (!rows.some((row) => row.id === id)) drawn.delete(id);
    byId("backends").hidden = rows.length === 0;
    const unlisted = state.summary.unlisted
      ? `${plural(state.summary.unlisted, "more backend")} not listed (${number(state.summary.unlisted_out)} out of rotation): see GET /backends.` : "";
    const none = state.order.length ? "No backend is like that." : "No backend yet. Name one in the configuration under [[backends]], or add it over the admin port.";
    say(byId("fleet-empty"), rows.length ? unlisted : none);
    byId("fleet-empty").hidden = rows.length > 0 && !unlisted;
    say(byId("page-text"), pages > 1 ? `${view.page + 1} of ${pages} (${number(all)})` : plural(all, "backend"));
    byId("page-back").disabled = view.page === 0;
    byId("page-on").disabled = view.page >= pages - 1;
  }

  // ---- one backend

  let detailPlots = null;
  function openDetail(id) {
    view.selected = id;
    held.detail = null;
    held.detailStep = -1;
    byId("detail").hidden = false;
    const half = { points: 120, step: held.limits.step_s };
    detailPlots ??= {
      load: new Plot(byId("detail-charts"), "Load", [["in_flight", "in flight"], ["running", "running"], ["waiting", "waiting"]], { ...half, format: number, empty: "no load yet" }),
      kv: new Plot(byId("detail-charts"), "KV blocks in use", [["kv_usage", "in use"]], { ...half, format: percent, top: 1, empty: "none in use, or not reported" }),
      hits: new Plot(byId("detail-charts"), "Found in its cache", [["predicted", "predicted"], ["reported", "it reports"]], { ...half, format: percent, top: 1, empty: "no prompts yet" }),
      ttft: new Plot(byId("detail-charts"), "Time to first token", [["ttft", "mean"]], { ...half, format: seconds, empty: "no first token yet" }),
    };
    for (const plot of Object.values(detailPlots)) plot.show({});
    byId("detail-facts").replaceChildren();
    say(byId("change-told"), "");
    show();
    byId("detail-title").focus();
    setPaused(false); // its history has to be asked for
  }
  function closeDetail(refocus) {
    const button = drawn.get(view.selected)?.name;
    view.selected = 0;
    held.detail = null;
    held.detailStep = -1;
    byId("detail").hidden = true;
    if (refocus) button?.focus();
    if (held.summary) show();
  }
  function showDetail(state) {
    const row = state.backends.get(view.selected);
    if (!row) return;
    say(byId("detail-title"), `${row.name}: ${stateOf(row).word}`);
    say(byId("drain"), row.draining ? "Put back" : "Drain");
    byId("drain").hidden = row.deleted;
    const { detail } = state;
    if (!detail || detail.id !== row.id) return;
    const series = detail.series;
    const wide = Math.max(1, Math.round(HIT_SMOOTHING_S / state.limits.step_s));
    detailPlots.load.show(series);
    detailPlots.kv.show(series);
    detailPlots.hits.show({
      predicted: ratios(series.predicted_tokens, series.prompt_tokens, wide),
      reported: ratios(series.hit_tokens, series.queried_tokens, wide),
    });
    detailPlots.ttft.show({ ttft: series.ttft_count.map((count, at) => count > 0 ? series.ttft_sum_s[at] / count : null) });
    const facts = [
      ["Address", row.url], ["Weight", number(detail.weight)],
      ["Models", row.models_count > row.models.length ? `${row.models.join(", ")} and ${row.models_count - row.models.length} more` : row.models.join(", ") || "none told yet"],
      ["KV cache", known(detail.kv_capacity_tokens) ? `${number(detail.kv_capacity_tokens)} tokens` : "size not reported"],
      ["Why out of rotation", row.serving ? "in rotation" : row.why || stateOf(row).word],
      ...Object.entries(detail.hits).map(([name, value]) => [name.replaceAll("_", " "), typeof value === "boolean" ? (value ? "yes" : "no") : name.endsWith("tokens") ? `${number(value)}` : number(value)]),
    ];
    const list = byId("detail-facts");
    while (list.children.length > 2 * facts.length) list.lastChild.remove();
    facts.forEach(([name, text], at) => {
      if (list.children.length <= 2 * at) list.append(make("dt"), make("dd"));
      say(list.children[2 * at], name);
      say(list.children[2 * at + 1], text);
    });
  }

  // ---- drain and undrain: the admin port says who may

  async function changeDraining() {
    const row = held.backends.get(view.selected);
    if (!row) return;
    const token = byId("token").value; // kept nowhere but in its field
    const what = row.draining ? "undrain" : "drain";
    byId("drain").disabled = true;
    let text = "";
    try {
      const answer = await fetch(`backends/${encodeURIComponent(row.name)}/${what}`, {
        method: "POST", cache: "no-store", signal: AbortSignal.timeout(ANSWER_MS),
        headers: token ? { authorization: `Bearer ${token}` } : {},
      });
      if (answer.status === 401) {
        byId("token-label").hidden = false;
        text = token ? "The gateway knows another token." : "This needs the admin token.";
        byId("token").focus();
      } else if (!answer.ok) {
        const told = await answer.json().catch(() => null);
        text = told?.error?.message ?? `The gateway answered ${answer.status}.`;
      } else {
        text = what === "drain" ? "It gets no new requests; those in flight end." : "It may get requests again.";
      }
    } catch {
      text = "The gateway did not answer: nothing is known to have changed.";
    }
    say(byId("change-told"), text);
    byId("drain").disabled = false;
    ask();
  }

  // ---- decisions

  const DECISION_COLUMNS = [
    ["Time", "text bare", "8%"], ["Backend", "text bare", "14%"], ["Reason", "text bare", "12%"], ["Matched tokens", "", "12%", "matched"], ["Prompt tokens", "", "10%", "prompt"],
    ["In flight then", "", "9%", "load"], ["After", "late", "8%"], ["Model", "text late", "13%"], ["Request id", "text id mono", "", "id"],
  ];
  for (const [name, kind, width] of DECISION_COLUMNS) {
    const head = make("th", { scope: "col", role: "columnheader", class: kind.replace(/bare|late|id|mono/g, "").trim() }, name);
    if (width) head.style.width = width;
    byId("decisions-head").append(head);
  }
  hint(byId("decisions-head").children[5], "requests in flight on the backend before this one");
  hint(byId("decisions-head").children[6], "from the request's last byte to the choice, queueing included");

  function showDecisions(state) {
    const body = byId("decisions-body");
    state.decisions.forEach((decision, at) => {
      if (body.children.length <= at) {
        body.append(make("tr", { role: "row" }, ...DECISION_COLUMNS.map(([name, kind, , short]) => make("td", { role: "cell", class: kind, "data-label": short ?? name }))));
      }
      const share = decision.prompt_tokens > 0 ? ` (${percent(Math.min(decision.matched_tokens / decision.prompt_tokens, 1))})` : "";
      const repeat = decision.attempt > 1 ? `, try ${decision.attempt}` : "";
      [clock(new Date(1000 * decision.at)), decision.backend, decision.reason + repeat, number(decision.matched_tokens) + share,
        number(decision.prompt_tokens), number(decision.load), seconds(decision.took_s), decision.model || NONE, decision.request_id,
      ].forEach((text, column) => {
        const cell = body.children[at].children[column];
        say(cell, text);
        if (column === 1 || column > 6) hint(cell, text);
      });
    });
    while (body.children.length > state.decisions.length) body.lastChild.remove();
    byId("choices-empty").hidden = state.decisions.length > 0;
    byId("decisions").hidden = state.decisions.length === 0;
  }

  function show() {
    const state = held;
    if (!state.summary) return;
    showVerdict(state);
    showTiles(state);
    showPlots(state);
    showFleet(state);
    if (view.selected) showDetail(state);
    showDecisions(state);
    byId("figures").removeAttribute("aria-busy");
  }

  // ---- asking, once a second, while somebody looks

  let timer = 0;
  let asking = false;
  let again = false;
  let lostSince = null;

  function question() {
    const state = held;
    const query = new URLSearchParams({ boot: state.boot, after: state.sample, decision: state.decision });
    let sparksFor = state.sparksFor;
    if (state.boot) {
      const ids = visible(state).rows.map((row) => row.id).join(",");
      sparksFor = `${state.steps}:${ids}`;
      if (ids && sparksFor !== state.sparksFor) query.set("sparks", ids);
      if (view.selected) {
        query.set("detail", view.selected);
        if (state.detailStep >= 0) query.set("detail_step", state.detailStep);
      }
    }
    return { query, sparksFor };
  }

  async function ask() {
    if (asking) { again = true; return; }
    clearTimeout(timer);
    asking = true;
    again = false;
    const { query, sparksFor } = question();
    const selected = view.selected;
    try {
      const answer = await fetch(`dashboard/data?${query}`, { cache: "no-store", signal: AbortSignal.timeout(ANSWER_MS) });
      if (!answer.ok) throw new Error(`it answered ${answer.status}`);
      const told = await answer.json();
      if (view.paused) return; // asked before the pause: nothing moves any more
      if (told.detail !== undefined && selected !== view.selected) delete told.detail;
      take(told);
      if (told.sparks) held.sparksFor = sparksFor;
      reached();
      show();
    } catch (error) {
      if (!view.paused) lost(error);
    } finally {
      asking = false;
    }
    if (view.paused || document.hidden) return;
    timer = setTimeout(ask, again ? 0 : lostSince ? RETRY_MS : POLL_MS);
  }

  function link(sign, text) {
    say(byId("link-mark"), sign);
    say(byId("link-text"), text);
  }
  function reached() {
    lostSince = null;
    byId("banner").hidden = true;
    byId("figures").classList.remove("stale");
    link("●", "live");
  }
  function lost(error) {
    lostSince ??= new Date();
    const why = /^it answered/.test(error?.message ?? "") ? ` (${error.message})` : "";
    say(byId("banner"), `The gateway is not reachable since ${clock(lostSince)}${why}. The figures are of that time; asking again every ${RETRY_MS / 1000} s.`);
    byId("banner").hidden = false;
    byId("figures").classList.add("stale");
    mark(byId("verdict"), "data-level", "unknown");
    say(byId("verdict-line"), held.summary ? "? Not reachable: what it does now is not known" : "? Not reachable");
    say(byId("verdict-why"), "");
    if (!document.title.startsWith("?")) document.title = "? kvgate";
    link("✕", "no answer");
  }

  function setPaused(paused) {
    view.paused = paused;
    mark(byId("pause"), "aria-pressed", String(paused));
    if (paused) { clearTimeout(timer); link("❙❙", "paused"); } else { ask(); }
  }
  byId("pause").addEventListener("click", () => setPaused(!view.paused));
  document.addEventListener("visibilitychange", () => { if (!document.hidden && !view.paused) ask(); });
  const turn = (by) => () => { view.page = Math.max(0, view.page + by); show(); ask(); };
  byId("page-back").addEventListener("click", turn(-1));
  byId("page-on").addEventListener("click", turn(1));
  byId("filter").addEventListener("input", (event) => { view.filter = event.target.value.trim(); view.page = 0; show(); });
  byId("only-out").addEventListener("change", (event) => { view.onlyOut = event.target.checked; view.page = 0; show(); });
  byId("drain").addEventListener("click", changeDraining);
  byId("token").addEventListener("keydown", (event) => { if (event.key === "Enter") changeDraining(); });
  byId("detail-close").addEventListener("click", () => closeDetail(true));
  byId("detail").addEventListener("keydown", (event) => { if (event.key === "Escape") closeDetail(true); });
  ask();
})();
