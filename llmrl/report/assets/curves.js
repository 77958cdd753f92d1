"use strict";
// The page of a run: headline, warnings, charts with one cursor, tables. Text of a run is text, never markup.
(() => {
  const HEIGHT = 200, LEFT = 52, RIGHT = 12, TOP = 10, BOTTOM = 22;
  const COLOURS = 7, DASHES = ["", "6 3", "2 3", "9 3 2 3"];
  const state = { log: false, smoothing: 0, cursor: null, zoom: null };
  const charts = [];
  const byId = (id) => document.getElementById(id);

  // --- elements ------------------------------------------------------------------------------------------------------

  /** Makes marks that change the direction of text, and halves of surrogate pairs, visible. */
  function visible(text) {
    const named = (mark) => `[U+${mark.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}]`;
    const marks = /[\u0000-\u0008\u000b-\u001f\u200e\u200f\u202a-\u202e\u2066-\u2069]|\p{Surrogate}/gu;
    return String(text).replace(marks, named);
  }

  function fill(node, attributes, children) {
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.append(...children.map((child) => (child instanceof Node ? child : document.createTextNode(visible(child)))));
    return node;
  }
  const html = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
  const svg = (tag, attributes = {}, ...children) =>
    fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

  const colour = (index) => `var(--c${index % COLOURS})`;
  const dash = (index) => DASHES[Math.floor(index / COLOURS) % DASHES.length] || (index % 2 ? "7 2.5" : "");

  // --- numbers -------------------------------------------------------------------------------------------------------

  function plain(value, digits = 3) {
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size < 0.001 || size >= 1e6) return value.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e");
    return String(Number(value.toPrecision(digits)));
  }

  function format(value, kind, digits) {
    if (value === null || value === undefined) return "–";
    if (kind === "percent") return `${Number((100 * value).toPrecision(3))}%`;
    if (kind === "seconds") return `${plain(value)} s`;
    if (kind === "count" && Math.abs(value) >= 1000) {
      const [size, unit] = Math.abs(value) >= 1e9 ? [1e9, "G"] : Math.abs(value) >= 1e6 ? [1e6, "M"] : [1e3, "k"];
      return `${Number((value / size).toPrecision(3))}${unit}`;
    }
    return plain(value, digits);
  }

  /** Round values between two ends, about ``count`` at most. */
  function ticks(low, high, count) {
    const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
    const size = power * [1, 2, 2.5, 5, 10].find((factor) => power * factor >= raw * 0.999);
    const found = [];
    for (let at = Math.ceil(low / size - 1e-9); at * size <= high + size * 1e-9; at++) found.push(at * size);
    return found.map((value) => Number(value.toPrecision(12)));
  }

  function logTicks(low, high) {
    const first = Math.ceil(Math.log10(low) - 1e-9), last = Math.floor(Math.log10(high) + 1e-9);
    if (last - first < 1) return ticks(low, high, 4).filter((value) => value > 0);
    const every = Math.ceil((last - first + 1) / 5);
    return Array.from({ length: last - first + 1 }, (_, i) => 10 ** (first + i)).filter((_, i) => i % every === 0);
  }

  /** The index of the value nearest to ``x`` in an ascending list. */
  function nearest(values, x) {
    let low = 0, high = values.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (values[middle] < x) low = middle + 1; else high = middle;
    }
    return low > 0 && x - values[low - 1] <= values[low] - x ? low - 1 : low;
  }

  /** An exponential moving average with bias correction for its start. */
  function smooth(values, weight) {
    let mean = 0, total = 0;
    return values.map((value) => {
      mean = weight * mean + (1 - weight) * value;
      total = weight * total + (1 - weight);
      return mean / total;
    });
  }

  // --- one chart -----------------------------------------------------------------------------------------------------

  class Chart {
    constructor(spec) {
      this.spec = spec;
      this.lines = spec.stacked ? stacked(spec.lines) : spec.lines;
      this.steps = [...new Set(this.lines.flatMap((line) => line.x))].sort((a, b) => a - b);
      this.at = html("span", { class: "at" });
      this.legend = html("div", { class: "legend" });
      const access = { tabindex: "0", role: "slider", "aria-label": visible(spec.title) };
      this.plot = svg("svg", { class: "plot", preserveAspectRatio: "none", ...access });
      const head = html("div", { class: "head" }, html("h3", {}, spec.title), this.at);
      this.element = html("article", { class: "chart" }, head, html("p", { class: "note" }, spec.note || ""));
      this.element.append(this.plot, this.legend);
      this.values = this.lines.map((line, index) => this.legendEntry(line, line.colour ?? index));
      this.listen();
    }

    legendEntry(line, index) {
      const swatch = (child) => svg("svg", { width: 22, height: 10, "aria-hidden": "true" }, child);
      const box = (name) => swatch(svg("rect", { width: 22, height: 10, rx: 2, fill: colour(index), class: name }));
      const look = { class: "line", stroke: colour(index), "stroke-dasharray": dash(index) };
      const sample = this.spec.stacked ? box("area") : swatch(svg("path", { d: "M1 5H21", ...look }));
      const value = html("b");
      this.legend.append(html("span", { title: visible(line.metric) }, sample, line.label, value));
      if (this.spec.band && index === 0) this.legend.append(html("span", {}, box("band"), this.spec.band.label));
      return value;
    }

    listen() {
      const stepAt = (event) => this.unscaleX(event.clientX - this.plot.getBoundingClientRect().left);
      let pressed = null;
      this.plot.addEventListener("pointerdown", (event) => {
        if (event.pointerType === "mouse" && event.button === 0) pressed = stepAt(event);
      });
      this.plot.addEventListener("pointermove", (event) => {
        if (pressed !== null) this.select(pressed, stepAt(event));
        setCursor(this.steps[nearest(this.steps, stepAt(event))]);
      });
      this.plot.addEventListener("pointerup", (event) => {
        const range = pressed === null ? [] : [pressed, stepAt(event)].sort((a, b) => a - b);
        pressed = null;
        if (range.length && Math.abs(this.x(range[1]) - this.x(range[0])) > 8) setZoom(range);
        else this.select(0, 0);
      });
      this.plot.addEventListener("pointerleave", () => { pressed = null; this.select(0, 0); setCursor(null); });
      this.plot.addEventListener("dblclick", () => setZoom(null));
      this.plot.addEventListener("blur", () => setCursor(null));
      this.plot.addEventListener("keydown", (event) => {
        const shown = this.shownSteps(), last = shown.length - 1;
        const here = state.cursor === null ? last : nearest(shown, state.cursor);
        const page = Math.max(1, Math.round(last / 10));
        const moves = { ArrowLeft: here - 1, ArrowRight: here + 1, Home: 0, End: last };
        Object.assign(moves, { PageDown: here - page, PageUp: here + page });
        if (event.key in moves) {
          setCursor(shown[Math.min(last, Math.max(0, moves[event.key]))]);
          event.preventDefault();
        } else if (event.key === "Escape") { setCursor(null); setZoom(null); }
      });
    }

    shownSteps() {
      const [low, high] = this.range;
      const shown = this.steps.filter((step) => step >= low && step <= high);
      return shown.length ? shown : this.steps;
    }

    select(from, to) {
      this.plot.querySelector(".selection")?.remove();
      if (from === to) return;
      const [left, right] = [this.x(from), this.x(to)].sort((a, b) => a - b);
      const size = { width: right - left, height: HEIGHT - TOP - BOTTOM };
      this.plot.append(svg("rect", { class: "selection", x: left, y: TOP, ...size }));
    }

    draw() {
      const width = this.plot.clientWidth || 400;
      const { spec } = this, first = this.steps[0], last = this.steps[this.steps.length - 1];
      this.range = state.zoom && state.zoom[0] <= last && state.zoom[1] >= first ? state.zoom : [first, last];
      if (this.range[0] === this.range[1]) this.range = [this.range[0] - 1, this.range[1] + 1];
      this.x = (step) => LEFT + ((step - this.range[0]) / (this.range[1] - this.range[0])) * (width - LEFT - RIGHT);
      this.unscaleX = (x) => this.range[0] + ((x - LEFT) / (width - LEFT - RIGHT)) * (this.range[1] - this.range[0]);
      const logarithmic = state.log && !spec.stacked && this.lines.some((line) => line.y.some((value) => value > 0));
      this.plot.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
      this.plot.setAttribute("data-scale", logarithmic ? "log" : "linear");
      const [low, high] = this.extent(logarithmic);
      const transform = logarithmic ? Math.log : (value) => value;
      const bottom = transform(low), top = transform(high);
      this.y = (value) => HEIGHT - BOTTOM - ((transform(value) - bottom) / (top - bottom)) * (HEIGHT - TOP - BOTTOM);
      const drawable = (value) => value !== null && (!logarithmic || value > 0);
      const [left, inside] = [LEFT - 4, width - LEFT - RIGHT + 8];
      const clip = svg("svg", { x: left, width: inside, height: HEIGHT, viewBox: `${left} 0 ${inside} ${HEIGHT}` });
      const nodes = this.axes(width, logarithmic ? logTicks(low, high) : ticks(low, high, 5));
      if (spec.band && !spec.stacked) clip.append(this.bandPath(spec.band, drawable));
      this.lines.forEach((line, index) => clip.append(...this.linePaths(line, line.colour ?? index, drawable)));
      (spec.whiskers || []).forEach((set, index) =>
        clip.append(...this.whiskers(set, this.lines[index].colour ?? index, drawable)));
      for (const event of spec.events || []) clip.append(...this.event(event));
      this.mark = svg("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
      this.plot.replaceChildren(...nodes, clip, this.mark);
      this.showCursor();
    }

    /** The smallest and the largest visible value, with a margin. */
    extent(logarithmic) {
      const shown = (step, value) => step >= this.range[0] && step <= this.range[1] && (!logarithmic || value > 0);
      const inside = (x, values) => values.filter((value, i) => shown(x[i], value));
      const sets = this.lines.map((line) => inside(line.x, line.y));
      for (const set of [this.spec.band || [], ...(this.spec.whiskers || [])].filter((set) => set.x)) {
        sets.push(inside(set.x, set.low), inside(set.x, set.high));
      }
      if (this.spec.stacked) sets.push([0]);
      const all = sets.flat();
      if (!all.length) return logarithmic ? [0.1, 10] : [0, 1];
      let low = all.reduce((a, b) => Math.min(a, b)), high = all.reduce((a, b) => Math.max(a, b));
      if (logarithmic) return low === high ? [low / 2, high * 2] : [low / 1.1, high * 1.1];
      if (this.spec.kind === "percent" && low >= 0) [low, high] = [0, Math.max(high, 0.02)];
      if (low === high) [low, high] = low === 0 ? [0, 1] : [Math.min(0, low), Math.max(0, high)];
      const room = (high - low) * 0.05;
      return [low >= 0 && low < room * 4 ? 0 : low - room, high + room];
    }

    axes(width, values) {
      const nodes = [], span = Math.abs(values[1] - values[0]) || 1;
      const largest = Math.max(...values.map(Math.abs));
      const digits = Math.max(4, 1 + Math.ceil(Math.log10(largest / span))); // enough to distinguish two ticks
      for (const value of values) {
        const y = this.y(value);
        nodes.push(svg("line", { class: "rule", x1: LEFT, x2: width - RIGHT, y1: y, y2: y }));
        const text = format(value, this.spec.kind, digits);
        nodes.push(svg("text", { x: LEFT - 7, y: y + 3.5, "text-anchor": "end" }, text));
      }
      for (const step of ticks(this.range[0], this.range[1], Math.max(2, width / 90)).filter(Number.isInteger)) {
        nodes.push(svg("text", { x: this.x(step), y: HEIGHT - 5, "text-anchor": "middle" }, String(step)));
      }
      nodes.push(svg("text", { x: 2, y: HEIGHT - 5 }, "step"));
      return nodes;
    }

    path(x, y, drawable) {
      let text = "", pen = "M";
      for (let i = 0; i < x.length; i++) {
        if (!drawable(y[i])) { pen = "M"; continue; }
        text += `${pen}${this.x(x[i]).toFixed(1)} ${this.y(y[i]).toFixed(1)}`;
        pen = "L";
      }
      return text;
    }

    linePaths(line, index, drawable) {
      if (this.spec.stacked) {
        const below = this.path([...line.x].reverse(), [...line.base].reverse(), drawable).replace("M", "L");
        const d = `${this.path(line.x, line.y, drawable)}${below}Z`;
        return [svg("path", { d, class: "area", fill: colour(index) })];
      }
      const look = { class: "line", stroke: colour(index), "stroke-dasharray": dash(index) };
      const raw = svg("path", { ...look, d: this.path(line.x, line.y, drawable) });
      if (this.spec.whiskers || line.x.length === 1) {
        const dot = (x, y) => svg("circle", { cx: this.x(x), cy: this.y(y), r: 3, fill: colour(index) });
        return [raw, ...line.x.flatMap((x, i) => (drawable(line.y[i]) ? [dot(x, line.y[i])] : []))];
      }
      if (!state.smoothing) return [raw];
      raw.setAttribute("class", "line raw");
      return [raw, svg("path", { ...look, d: this.path(line.x, smooth(line.y, state.smoothing), drawable) })];
    }

    bandPath(band, drawable) {
      const upper = this.path(band.x, band.high, drawable);
      const lower = this.path([...band.x].reverse(), [...band.low].reverse(), drawable).replaceAll("M", "L");
      const d = upper && lower ? `${upper.replace(/(?!^)M/g, "L")}${lower}Z` : "";
      return svg("path", { class: "band", fill: colour(0), d });
    }

    whiskers(set, index, drawable) {
      return set.x.filter((_, i) => drawable(set.low[i])).map((step, i) => {
        const x = this.x(step), low = this.y(set.low[i]), high = this.y(set.high[i]);
        const d = `M${x} ${low}V${high}M${x - 3} ${low}h6M${x - 3} ${high}h6`;
        return svg("path", { class: "whisker", stroke: colour(index), d });
      });
    }

    event({ x, label }) {
      const at = this.x(x), look = { class: "event", x1: at, x2: at, y1: TOP, y2: HEIGHT - BOTTOM };
      return [svg("line", look), svg("text", { class: "event", x: at + 3, y: TOP + 9 }, label)];
    }

    showCursor() {
      const step = state.cursor, values = [];
      const shown = step !== null && step >= this.range[0] && step <= this.range[1];
      this.mark.setAttribute("visibility", shown ? "visible" : "hidden");
      if (shown) for (const end of ["x1", "x2"]) this.mark.setAttribute(end, this.x(step));
      let own = null;
      this.lines.forEach((line, index) => {
        const at = step === null ? line.x.length - 1 : nearest(line.x, step);
        own = own === null || Math.abs(line.x[at] - step) < Math.abs(own - step) ? line.x[at] : own;
        const value = format(line.own ? line.own[at] : line.y[at], this.spec.kind);
        this.values[index].textContent = value;
        values.push(`${visible(line.label)} ${value}`);
      });
      this.at.textContent = step === null ? "" : `step ${own}`;
      const attributes = { valuemin: this.steps[0], valuemax: this.steps[this.steps.length - 1], valuenow: own };
      attributes.valuetext = `step ${own}: ${values.join(", ")}`;
      for (const [name, value] of Object.entries(attributes)) this.plot.setAttribute(`aria-${name}`, value);
    }
  }

  /** Stacks lines: ``y`` becomes the upper edge, ``base`` the lower one, ``own`` the value. */
  function stacked(lines) {
    let base = lines[0].y.map(() => 0);
    return lines.map((line) => {
      const lower = base;
      base = lower.map((value, i) => value + line.y[i]);
      return { ...line, own: line.y, y: base, base: lower };
    });
  }

  // --- the page ------------------------------------------------------------------------------------------------------

  let waiting = false;
  function setCursor(step) {
    if (step === state.cursor) return;
    state.cursor = step;
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; charts.forEach((chart) => chart.showCursor()); });
  }

  function setZoom(range) {
    state.zoom = range;
    byId("zoom").hidden = range === null;
    redraw();
  }

  const redraw = () => charts.forEach((chart) => chart.draw());

  function show(data) {
    document.title = `${visible(data.title)} · llmrl`;
    byId("title").textContent = visible(data.title);
    byId("subtitle").textContent = visible(data.subtitle);
    byId("status").textContent = `as of ${data.written}`;
    byId("notes").replaceChildren(...data.notes.map((note) => html("p", { class: "note" }, note)));
    byId("cards").replaceChildren(...data.cards.map(({ label, value, note }) =>
      html("div", { class: "card" }, html("div", { class: "label" }, label), html("div", { class: "value" }, value),
        html("div", { class: "note" }, note))));
    byId("findings").replaceChildren(...data.findings.map(({ text, remedy }) =>
      html("div", { class: "finding" }, html("p", {}, text), html("p", { class: "remedy" }, remedy))));
    showCharts(data.charts);
    const constant = data.constant.map(({ label, value, kind }) => `${label} ${format(value, kind)}`);
    byId("constant").textContent = constant.length ? `Constant: ${visible(constant.join(" · "))}` : "";
    showTables("first-tables", data.first_tables);
    showTables("tables", data.tables);
  }

  function showCharts(specs) {
    const focused = document.activeElement?.closest?.(".chart")?.querySelector("h3").textContent;
    charts.splice(0, charts.length, ...specs.map((spec) => new Chart(spec)));
    const sections = [...new Set(specs.map((spec) => spec.section))];
    const links = sections.map((name, i) => html("a", { href: `#section${i}` }, name));
    const others = { "#rollouts": "Rollouts", "#tables": "Settings" };
    const more = Object.entries(others).map(([href, name]) => html("a", { href }, name));
    byId("sections").replaceChildren(...links, ...more);
    byId("charts").replaceChildren(...sections.flatMap((name, i) => {
      const inside = charts.filter(({ spec }) => spec.section === name).map(({ element }) => element);
      return [html("h2", { id: `section${i}` }, name), html("div", { class: "grid" }, ...inside)];
    }));
    redraw();
    charts.find(({ spec }) => visible(spec.title) === focused)?.plot.focus({ preventScroll: true });
  }

  function showTables(id, tables) {
    const opened = new Map([...byId(id).children].map((entry) => [entry.dataset.title, entry.open]));
    byId(id).replaceChildren(...tables.filter(({ rows }) => rows.length).map(({ title, columns, rows, open }) => {
      const head = html("tr", {}, ...columns.map((name) => html("th", { scope: "col" }, name)));
      const body = rows.map((row) => html("tr", {}, ...row.map((cell) => html("td", {}, cell))));
      const table = html("table", {}, html("thead", {}, head), html("tbody", {}, ...body));
      const entry = html("details", {}, html("summary", {}, title), html("div", { class: "scroll" }, table));
      entry.dataset.title = title;
      entry.open = opened.get(title) ?? open;
      return entry;
    }));
  }

  function showRollouts(data) {
    byId("sections").querySelector("[href='#rollouts']").hidden = !data;
    if (data) renderRollouts(byId("rollouts"), data, byId("highlights"));
  }

  function setTheme(theme) {
    document.documentElement.dataset.theme = theme;
    byId("theme").textContent = theme === "dark" ? "light" : "dark";
    byId("theme").setAttribute("aria-label", `switch to ${byId("theme").textContent} colours`);
  }

  /** A page opened from disk may have no local storage. */
  function remembered(theme) {
    try {
      if (theme) localStorage.setItem("llmrl-theme", theme);
      return localStorage.getItem("llmrl-theme");
    } catch {
      return null;
    }
  }

  function listen() {
    const preferred = matchMedia("(prefers-color-scheme: dark)");
    const system = () => remembered() || (preferred.matches ? "dark" : "light");
    setTheme(system());
    preferred.addEventListener("change", () => setTheme(system()));
    byId("theme").addEventListener("click", () => {
      setTheme(byId("theme").textContent);
      remembered(document.documentElement.dataset.theme);
    });
    byId("log").addEventListener("click", () => {
      state.log = !state.log;
      byId("log").setAttribute("aria-pressed", state.log);
      redraw();
    });
    byId("smoothing").addEventListener("input", (event) => { state.smoothing = Number(event.target.value); redraw(); });
    byId("zoom").addEventListener("click", () => setZoom(null));
    let width = innerWidth;
    addEventListener("resize", () => {
      if (innerWidth !== width) requestAnimationFrame(redraw);
      width = innerWidth;
    });
  }

  /** Asks the server of `llmrl watch` for newer numbers; the rollouts are not redrawn while they have the focus. */
  function follow() {
    let shown = "";
    setInterval(async () => {
      try {
        const answer = await fetch("data", { cache: "no-store" });
        if (!answer.ok) throw new Error(await answer.text());
        const text = await answer.text();
        if (text === shown) return;
        shown = text;
        const { report, rollouts } = JSON.parse(text);
        show(report);
        if (!byId("rollouts").contains(document.activeElement)) showRollouts(rollouts);
      } catch (error) {
        byId("status").textContent = `llmrl watch does not answer; this is what it had last (${error.message})`;
        shown = "";
      }
    }, 3000);
  }

  listen();
  show(JSON.parse(byId("report-data").textContent));
  showRollouts(JSON.parse(byId("rollouts-data").textContent));
  if (document.body.dataset.live === "yes") follow();
})();
