// The rollout viewer of a run's report: renderRollouts(element, data, highlights), data as llmrl.report.rollouts makes
// it. Three rollouts of the last step go into the element ``highlights``. An address that ends in
// #rollout=STEP.GROUP.NUMBER selects one.
//
// Model output is inserted as text (textContent, append of strings), never as HTML. The list draws only the visible
// rows, and a conversation a bounded number of tokens, so that interactions cost the same for any number of rows.
"use strict";

window.renderRollouts = (() => {
  const ROW = 66; // pixels of a row of the list, as in rollouts.css
  const TOKENS = 3000; // drawn at a time, over all conversations side by side
  const CARDS = 64; // conversations side by side
  const CALL_TEXT = 60; // characters of a call's last message beside its numbers
  const FOLDED = 120; // a longer system message, with tools say, would push the answer below the fold
  const views = new WeakMap(); // element -> state that its viewer keeps when new data arrive

  // ---- Colours: blue and orange, distinguishable with red-green colour blindness ----

  const BLUE = [0, 114, 178], ORANGE = [230, 120, 0], GREEN = [0, 158, 115];
  const shade = (rgb, strength) => `rgba(${rgb.join(",")},${(0.75 * Math.min(1, strength)).toFixed(3)})`;
  const MODES = {
    trained: { label: "trained or not" },
    engine: { label: "log-prob of the engine", low: ORANGE },
    trainer: { label: "log-prob of the trainer", low: ORANGE },
    difference: { label: "trainer minus engine", low: ORANGE, high: BLUE },
    advantage: { label: "advantage", low: ORANGE, high: BLUE },
    ratio: { label: "ratio", low: ORANGE, high: BLUE, log: true },
    entropy: { label: "entropy", high: GREEN },
  };

  function numberAt(record, mode, place) {
    if (mode === "difference") {
      const trainer = numberAt(record, "trainer", place), engine = numberAt(record, "engine", place);
      return trainer === null || engine === null ? null : trainer - engine;
    }
    return record[mode]?.[place] ?? null;
  }

  // The 99th percentile of a mode's absolute values: its colour is strongest there.
  function reach(rollouts, mode) {
    const sizes = [], { log } = MODES[mode];
    for (const { record } of rollouts) {
      for (let place = 0; record && place < record.ids.length; place++) {
        const value = numberAt(record, mode, place);
        if (value !== null) sizes.push(Math.abs(log ? Math.log(Math.max(value, 1e-9)) : value));
      }
    }
    sizes.sort((a, b) => a - b);
    return Math.max(sizes[Math.ceil(0.99 * (sizes.length - 1))] ?? 1, 1e-3);
  }

  function colour(record, mode, place, most) {
    if (mode === "trained") {
      if (record.trained[place] === "1") return shade(BLUE, 0.45);
      return numberAt(record, "engine", place) === null ? null : shade(ORANGE, 0.45);
    }
    const value = numberAt(record, mode, place);
    if (value === null) return null;
    const { low, high, log } = MODES[mode], size = log ? Math.log(Math.max(value, 1e-9)) : value;
    const side = size < 0 ? low : high;
    return side ? shade(side, Math.abs(size) / most) : null;
  }

  // ---- Text ----

  const NAMES = { " ": "\u200b·", "\n": "⏎\n", "\t": "⇥\t", "\x7f": "␡" }; // \u200b: a line may end before the dot
  const HIDDEN = /[\p{Cc}\p{Cf}\p{Cs}\p{Zs}\p{Zl}\p{Zp}]/gu;
  function visible(text, keepSpaces) {
    return text.replace(HIDDEN, (letter) => {
      if (keepSpaces && letter === " ") return letter;
      if (letter in NAMES) return NAMES[letter];
      const code = letter.codePointAt(0);
      return code < 32 ? String.fromCharCode(0x2400 + code) : `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
    });
  }

  const whole = (text) => (typeof text === "string" ? text : `${text[0]}\n[… ${text[1]} characters left out …]\n${text[2]}`);
  const beginning = (text) => (typeof text === "string" ? text : text[0]);
  // The end of a prompt, where the question is, without the markers behind it.
  const question = (text) => whole(text).replace(/<[|｜][^<>]*[|｜]>/g, " ").replace(/\s+(assistant|model)?\s*$/, "").slice(-160);
  const shown = (value) => (value === null || value === undefined ? "none" : String(Number(value.toPrecision(4))));

  function make(tag, attributes = {}, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (typeof value === "function") node.addEventListener(name, value);
      else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
    }
    node.append(...children.filter((child) => child !== null && child !== undefined));
    return node;
  }

  const table = (facts) => make("dl", { class: "rv-dl" }, ...facts.map(([name, value]) =>
    make("div", {}, make("dt", {}, visible(name, true)), make("dd", {}, visible(String(value), true)))));

  // ---- The viewer of one element ----

  class Viewer {
    constructor(element, data, kept) {
      this.element = element;
      this.data = data;
      this.rollouts = data.rollouts;
      this.control = new Set(data.control);
      this.state = { query: "", step: "", stop: "", tools: "", record: "", sort: "step", descending: false, mode: "trained",
        view: "one", least: "", most: "", shortest: "", longest: "", selected: null, ...kept };
      const [name, before] = [(rollout) => JSON.stringify([rollout.step, rollout.group, rollout.completion]), this.state.selected];
      this.state.selected = (before && this.rollouts.find((rollout) => name(rollout) === name(before))) ?? this.rollouts.find(({ record }) => record) ?? null;
      const addressed = location.hash.startsWith("#rollout=") && this.rollouts.find((rollout) => this.address(rollout) === location.hash);
      if (addressed && !before) this.state.selected = addressed;
      const rewards = this.rollouts.map(({ reward }) => reward).filter((reward) => reward !== null);
      this.extremes = [rewards.reduce((a, b) => Math.min(a, b), 0), rewards.reduce((a, b) => Math.max(a, b), 0)];
      this.reaches = {};
      this.tokens = new WeakMap(); // span -> [record, place, span of its message]
      this.build();
      this.refresh();
    }

    build() {
      const field = (name, label, control) => make("label", {}, make("span", {}, label), this.bind(name, control));
      const choice = (...options) => make("select", {}, ...options.map(([value, label]) => make("option", { value }, visible(label, true))));
      const number = () => make("input", { type: "number", step: "any" });
      const range = (name, low, high) => make("span", { class: "rv-range" }, field(low, `${name} from`, number()), field(high, "to", number()));
      const steps = this.data.steps.map((step) => [String(step), String(step)]);
      const stops = [...new Set(this.rollouts.map((rollout) => rollout.stop_reason))].sort().map((stop) => [stop, stop]);
      this.search = this.bind("query", make("input", { type: "search", placeholder: "search ( / )", "aria-label": "search in the texts" }));
      this.count = make("span", { class: "rv-count", "aria-live": "polite" });
      const bar = make("div", { class: "rv-bar" }, this.search,
        make("details", { class: "rv-filters", open: innerWidth > 800 }, make("summary", {}, "filters"), make("div", { class: "rv-bar" },
        field("step", "step", choice(["", "all"], ...steps)),
        field("stop", "stop reason", choice(["", "all"], ...stops)),
        field("tools", "tools", choice(["", "all"], ["called", "called"], ["failed", "a call failed"], ["none", "not called"])),
        field("record", "numbers per token", choice(["", "all"], ["yes", "recorded"])),
        range("reward", "least", "most"), range("tokens", "shortest", "longest"),
        field("sort", "sort by", choice(["step", "step"], ["reward", "reward"], ["tokens", "length"], ["stop_reason", "stop reason"],
          ["calls", "tool calls"])),
        field("descending", "descending", make("input", { type: "checkbox" })))), this.count);
      this.spacer = make("div", { class: "rv-spacer" });
      this.list = make("div", { class: "rv-list", role: "listbox", tabindex: "0", "aria-label": "rollouts",
        scroll: () => this.drawRows(), keydown: (event) => this.listKey(event), click: (event) => this.listClick(event) }, this.spacer);
      this.detail = make("div", { class: "rv-detail", keydown: (event) => this.tokenKey(event),
        pointerover: (event) => this.showTip(event.target), pointerleave: () => this.hideTip(),
        focusin: (event) => this.showTip(event.target), focusout: () => this.hideTip() });
      this.tip = make("div", { class: "rv-tip", role: "tooltip", id: "rv-tip", hidden: true });
      const { num_rollouts: all, num_steps: ofRun } = this.data, count = this.rollouts.length, those = this.data.steps;
      const sample = count === all && those.length === ofRun ? `All ${all} rollouts of the run.`
        : `${count} of the ${all} rollouts of ${those.length} of ${ofRun} steps; the run's folder has all in rollouts/.`;
      this.element.classList.add("rv");
      this.element.replaceChildren(make("h2", {}, "Rollouts"),
        make("p", { class: "rv-note" }, sample),
        ...unreadable(this.data), bar, make("div", { class: "rv-panes" }, this.list, this.detail), this.tip);
      this.ending = new AbortController();
      document.addEventListener("keydown", (event) => this.pageKey(event), { signal: this.ending.signal });
      new ResizeObserver(() => this.drawRows()).observe(this.list);
    }

    // An input whose value is this.state[name].
    bind(name, control) {
      const key = control.type === "checkbox" ? "checked" : "value";
      control[key] = this.state[name];
      control.setAttribute("name", name);
      control.addEventListener("input", () => { this.state[name] = control[key]; this.refresh(); });
      return control;
    }

    // ---- The list ----

    refresh() {
      const state = this.state, query = state.query.toLowerCase();
      const bound = (text, other) => (text === "" ? other : Number(text));
      const least = bound(state.least, -Infinity), most = bound(state.most, Infinity);
      const shortest = bound(state.shortest, 0), longest = bound(state.longest, Infinity);
      const bounded = state.least !== "" || state.most !== "";
      this.found = this.sorted().filter((rollout) =>
        (state.step === "" || rollout.step === Number(state.step)) &&
        (state.stop === "" || rollout.stop_reason === state.stop) &&
        (state.record === "" || rollout.record) &&
        (state.tools === "" || this.toolsFit(rollout, state.tools)) &&
        (!bounded || (rollout.reward !== null && rollout.reward >= least && rollout.reward <= most)) &&
        rollout.tokens >= shortest && rollout.tokens <= longest &&
        (query === "" || this.searched(rollout).includes(query)));
      this.count.textContent = `${this.found.length} of ${this.rollouts.length}`;
      this.spacer.style.height = `${this.found.length * ROW}px`;
      this.list.scrollTop = Math.min(this.list.scrollTop, this.found.length * ROW);
      if (!this.found.includes(this.state.selected)) this.select(this.found[0] ?? null);
      else this.select(this.state.selected);
    }

    sorted() {
      const { sort, descending } = this.state, key = `${sort} ${descending}`;
      if (this.sortedBy !== key) {
        const value = (rollout) => (sort === "calls" ? rollout.tool_calls.length : rollout[sort]);
        const order = (a, b) => (a < b ? -1 : a > b ? 1 : 0) * (descending ? -1 : 1);
        this.inOrder = [...this.rollouts].sort((one, other) => {
          const a = value(one), b = value(other);
          return a === null || b === null ? (a === null) - (b === null) : order(a, b); // no reward: at the end
        });
        this.sortedBy = key;
      }
      return this.inOrder;
    }

    toolsFit(rollout, asked) {
      if (asked === "none") return rollout.tool_calls.length === 0;
      return rollout.tool_calls.some((call) => asked === "called" || call.outcome !== "ok");
    }

    searched(rollout) {
      this.texts ??= new WeakMap();
      let text = this.texts.get(rollout);
      if (text === undefined) {
        const calls = rollout.tool_calls.flatMap((call) => [call.name, call.arguments, call.result]);
        const asked = (rollout.model_calls ?? []).flatMap((call) => [call.question, call.answer]);
        text = [rollout.prompt, rollout.completion, ...calls, ...asked].map(whole).join("\n").toLowerCase();
        this.texts.set(rollout, text);
      }
      return text;
    }

    drawRows() {
      const height = this.list.clientHeight || 400;
      const first = Math.max(0, Math.floor(this.list.scrollTop / ROW) - 4);
      const last = Math.min(this.found.length, Math.ceil((this.list.scrollTop + height) / ROW) + 4);
      const rows = [];
      for (let place = first; place < last; place++) rows.push(this.drawRow(this.found[place], place));
      this.spacer.replaceChildren(...rows);
    }

    drawRow(rollout, place) {
      const selected = rollout === this.state.selected;
      const facts = ["", `${rollout.tokens} tokens`, rollout.stop_reason];
      if (rollout.tool_calls.length) facts.push(`${rollout.tool_calls.length} calls`);
      const start = beginning(rollout.completion).slice(0, 160), prompt = question(rollout.prompt);
      const row = make("div", { class: "rv-row", role: "option", id: `rv-row-${place}`, "aria-selected": String(selected),
        "aria-posinset": place + 1, "aria-setsize": this.found.length },
        make("div", { class: "rv-facts" }, `step ${rollout.step} · `, this.rewardBar(rollout), visible(facts.join(" · "), true)),
        make("div", { class: "rv-prompt" }, visible(prompt, true).replaceAll("\n", "")),
        make("div", { class: "rv-start" }, visible(start, true).replaceAll("\n", "")));
      row.style.top = `${place * ROW}px`;
      return row;
    }

    // The reward as a number and as a bar between the smallest and the largest one (0 included).
    rewardBar({ reward }) {
      const [low, high] = this.extremes, bar = make("span", { class: "rv-reward" }, `reward ${shown(reward)}`);
      if (reward !== null && high > low) {
        const fill = make("i"), part = (reward - low) / (high - low);
        fill.style.width = `${(100 * part).toFixed(1)}%`;
        fill.style.backgroundColor = shade(reward < 0 ? ORANGE : BLUE, 0.9);
        bar.append(make("span", { class: "rv-meter" }, fill));
      }
      return bar;
    }

    address(rollout) {
      const group = this.rollouts.filter(({ step, group }) => step === rollout.step && group === rollout.group);
      return `#rollout=${rollout.step}.${rollout.group}.${group.indexOf(rollout)}`;
    }

    // Cards of three rollouts of the last step; a click shows one in the viewer.
    highlights(element) {
      const last = this.rollouts.filter(({ step, reward }) => step === this.data.steps.at(-1) && reward !== null);
      const by = (value) => last.reduce((best, rollout) => (best === null || value(rollout) > value(best) ? rollout : best), null);
      const chosen = new Map(); // a rollout has one card
      for (const [label, rollout] of [["best of the last step", by(({ reward }) => reward)], ["worst", by(({ reward }) => -reward)],
        ["most surprising: far above its group", by(({ advantage }) => advantage ?? -Infinity)]]) {
        if (rollout && !chosen.has(rollout)) chosen.set(rollout, label);
      }
      element.replaceChildren(...[...chosen].map(([rollout, label]) => {
        const open = () => { this.state.view = "one"; this.select(rollout); this.drawDetail(); this.element.scrollIntoView(); };
        return make("article", { class: "card rv" }, make("div", { class: "label" }, label),
          make("div", { class: "rv-facts" }, this.rewardBar(rollout), ` advantage ${shown(rollout.advantage)} · ${rollout.tokens} tokens`),
          make("div", { class: "rv-prompt" }, visible(question(rollout.prompt), true)),
          make("div", { class: "rv-answer" }, visible(beginning(rollout.completion).slice(0, 300), true)),
          make("button", { type: "button", click: open }, "show"));
      }));
    }

    listClick(event) {
      const row = event.target.closest("[role=option]");
      if (row) this.select(this.found[Number(row.getAttribute("aria-posinset")) - 1]);
    }

    listKey(event) {
      const page = Math.max(1, Math.floor(this.list.clientHeight / ROW) - 1), end = this.found.length;
      const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -end, End: end };
      if (event.key in moves && end) {
        event.preventDefault();
        const place = this.found.indexOf(this.state.selected) + moves[event.key];
        this.select(this.found[Math.max(0, Math.min(end - 1, place))]);
      } else if (event.key === "Enter" || event.key === "ArrowRight") {
        event.preventDefault();
        this.detail.querySelector(".rv-token")?.focus();
      }
    }

    pageKey(event) {
      const writing = event.target.closest?.("input, select, textarea, [contenteditable]");
      if (event.key === "/" && !writing && !event.ctrlKey && !event.metaKey && !event.altKey) {
        event.preventDefault();
        this.search.focus();
      } else if (event.key === "Escape" && this.element.contains(event.target)) {
        this.hideTip();
        this.list.focus();
      }
    }

    select(rollout) {
      const place = this.found.indexOf(rollout), height = this.list.clientHeight || 400;
      if (place >= 0) {
        const top = place * ROW;
        if (top < this.list.scrollTop) this.list.scrollTop = top;
        if (top + ROW > this.list.scrollTop + height) this.list.scrollTop = top + ROW - height;
        this.list.setAttribute("aria-activedescendant", `rv-row-${place}`);
      } else this.list.removeAttribute("aria-activedescendant");
      const changed = rollout !== this.state.selected || !this.detail.hasChildNodes();
      this.state.selected = rollout;
      this.drawRows();
      if (changed) this.drawDetail();
    }

    // ---- Conversations ----

    drawDetail() {
      const rollout = this.state.selected;
      this.hideTip();
      if (!rollout) {
        this.detail.replaceChildren(make("p", { class: "rv-note" }, "No rollout fits these filters."));
        return;
      }
      const group = this.rollouts.filter((other) => other.step === rollout.step && other.group === rollout.group);
      const elsewhere = this.rollouts.filter((other) => rollout.prompt_id && other.prompt_id === rollout.prompt_id && other.step !== rollout.step);
      const view = elsewhere.length || this.state.view !== "steps" ? this.state.view : "one";
      const tab = (name, label, disabled, title) => make("button", { type: "button", "aria-pressed": String(view === name), disabled, title,
        click: () => { this.state.view = name; this.drawDetail(); } }, label);
      const modes = make("select", { name: "mode" });
      for (const [mode, { label }] of Object.entries(MODES)) modes.append(make("option", { value: mode }, label));
      modes.value = this.state.mode;
      modes.addEventListener("input", () => { this.state.mode = modes.value; this.drawDetail(); this.detail.querySelector("[name=mode]").focus(); });
      const head = make("div", { class: "rv-head" },
        make("div", { class: "rv-tabs" }, tab("one", "conversation"), tab("group", `group of ${group.length}`, group.length < 2),
          tab("steps", `other steps (${elsewhere.length})`, elsewhere.length === 0, "the same prompt in other steps")),
        ...(view === "one" && !rollout.record
          ? [make("span", { class: "rv-note" }, "Its tokens are not recorded: token_records of each step are.")]
          : [make("label", {}, make("span", {}, "colour"), modes), this.legend()]));
      const body = { one: () => this.drawOne(rollout), group: () => this.drawGroup(group), steps: () => this.drawSteps(rollout, elsewhere) };
      this.detail.replaceChildren(head, ...body[view]());
      this.detail.querySelector(".rv-token")?.setAttribute("tabindex", "0");
    }

    drawOne(rollout) {
      const rewards = Object.entries(rollout.rewards).map(([name, value]) => [`reward ${name}`, shown(value)]);
      const ofData = Object.entries(rollout.columns ?? {}).map(([name, value]) => [`data: ${name}`, whole(value)]);
      const facts = [["reward", shown(rollout.reward)], ...rewards, ["advantage", shown(rollout.advantage)], ...ofData, ["step", rollout.step],
        ["weights of step", rollout.version], ["group", rollout.group], ["prompt", rollout.prompt_id], ["stop reason", rollout.stop_reason], ["tokens", rollout.tokens]];
      const copy = (text, label) => make("button", { type: "button", click: (event) => copyText(text(), event.target) }, label);
      const link = () => `${location.href.split("#")[0]}${this.address(rollout)}`;
      const { record, ...values } = rollout;
      return [table(facts), make("div", { class: "rv-head" }, copy(link, "copy link"), copy(() => JSON.stringify(values, null, 2), "copy as JSON")),
        ...this.modelCalls(rollout), ...this.conversation(rollout, TOKENS, true)];
    }

    // The calls of an agent: what each continues, and the row of the rollout that trains its tokens. Where several continue
    // one call, each of them and what follows it is indented.
    modelCalls(rollout) {
      const calls = rollout.model_calls ?? [], rows = Math.max(-1, ...calls.map(({ row }) => row)) + 1;
      if (!calls.length) return [];
      const fork = (place) => calls.filter(({ parent }) => parent === place).length > 1;
      const depths = [];
      for (const { parent } of calls) depths.push(parent < 0 ? 0 : depths[parent] + fork(parent));
      const told = calls.map((call, place) => {
        const after = call.parent < 0 ? "" : ` after ${call.parent + 1}`, row = call.row < 0 ? `no row: ${whole(call.why)}` : `row ${call.row + 1}`;
        const sizes = `${call.prompt_tokens} prompt tokens · ${call.tokens} sampled`, begins = whole(call.question).slice(0, CALL_TEXT);
        const node = make("details", { class: "rv-call" },
          make("summary", {}, visible(`call ${place + 1}${after} · ${row} · ${sizes} · ${whole(call.stop_reason)} · ${begins}`, true)),
          make("div", { class: "rv-role" }, "last message"), make("div", { class: "rv-text" }, visible(whole(call.question), true)),
          make("div", { class: "rv-role" }, "answer"), make("div", { class: "rv-text" }, visible(whole(call.answer), true)));
        node.style.marginLeft = `${1 + 1.5 * Math.min(depths[place], 8)}rem`;
        node.style.borderLeft = `4px solid ${shade(call.row < 0 ? ORANGE : BLUE, 0.45)}`;
        return node;
      });
      const more = rollout.num_model_calls - calls.length, head = [`${rollout.num_model_calls} calls of the model, ${rows} rows`];
      if (rows > 1) head.push(`the conversation below is row ${rows}, and blue what it trains`);
      if (more) head.push(`the first ${calls.length} are shown`);
      if (rollout.untrained) head.push(rollout.untrained);
      return [make("details", { class: "rv-turn", open: rows > 1 }, make("summary", {}, head.join(" · ")), ...told)];
    }

    drawGroup(group) {
      const cards = group.slice(0, CARDS);
      const each = Math.floor(TOKENS / cards.length);
      return [this.promptOf(group[0]), make("div", { class: "rv-cards" }, ...cards.map((rollout) => this.card(rollout, each)))];
    }

    drawSteps(rollout, elsewhere) {
      const steps = [...new Set(elsewhere.map((other) => other.step))];
      this.state.other = steps.includes(this.state.other) ? this.state.other : steps[rollout.step > steps[0] ? 0 : steps.length - 1];
      const choice = make("select", { name: "other" }, ...steps.map((step) => make("option", { value: step }, `step ${step}`)));
      choice.value = String(this.state.other);
      choice.addEventListener("input", () => { this.state.other = Number(choice.value); this.drawDetail(); this.detail.querySelector("[name=other]").focus(); });
      const others = elsewhere.filter((other) => other.step === this.state.other).slice(0, CARDS - 1);
      const each = Math.floor(TOKENS / (others.length + 1));
      const column = (...cards) => make("div", { class: "rv-column" }, ...cards);
      return [make("label", {}, make("span", {}, "beside"), choice), this.promptOf(rollout),
        make("div", { class: "rv-two" }, column(this.card(rollout, each)), column(...others.map((other) => this.card(other, each))))];
    }

    promptOf(rollout) {
      return make("details", { class: "rv-turn" }, make("summary", {}, "prompt"), make("div", { class: "rv-text" }, visible(whole(rollout.prompt), true)));
    }

    card(rollout, limit) {
      const facts = ` · advantage ${shown(rollout.advantage)} · ${rollout.tokens} tokens · ${rollout.stop_reason}`;
      const open = () => { this.state.view = "one"; this.select(rollout); this.drawDetail(); };
      return make("article", { class: `rv-card${rollout === this.state.selected ? " rv-chosen" : ""}` },
        make("button", { type: "button", class: "rv-facts", click: open }, `step ${rollout.step} · `, this.rewardBar(rollout), visible(facts, true)), ...this.conversation(rollout, limit, false));
    }

    // The messages of a conversation, without its prompt if that is shown elsewhere.
    conversation(rollout, limit, withPrompt) {
      const { record } = rollout, calls = [...rollout.tool_calls], parts = [];
      if (!record) {
        if (withPrompt) parts.push(this.message("prompt", [visible(whole(rollout.prompt), true)]));
        parts.push(this.message("answer", [visible(whole(rollout.completion), true)]));
        return [...parts, ...calls.map((call) => this.call(call))];
      }
      let place = 0, drawn = 0;
      for (const [role, turn, count] of record.spans) {
        const end = place + count, [cutAt, leftOut] = record.left_out, nodes = [];
        const isPrompt = turn === 0 && role !== "assistant";
        for (; place < end && !(isPrompt && !withPrompt) && drawn < limit; place++, drawn++) {
          if (place === cutAt && leftOut) nodes.push(make("span", { class: "rv-gap" }, `[… ${leftOut} tokens left out …]`));
          nodes.push(this.token(record, place, role, turn));
        }
        place = end;
        if (nodes.length) parts.push(this.message(role, nodes));
        const now = calls.filter((call) => role === "assistant" && call.turn === turn);
        parts.push(...now.map((call) => this.call(calls.splice(calls.indexOf(call), 1)[0])));
      }
      if (drawn === limit && record.ids.length > limit) parts.push(make("p", { class: "rv-note" }, `${limit} tokens are shown here.`));
      return [...parts, ...calls.map((call) => this.call(call))];
    }

    message(role, nodes) {
      if (role === "system" && nodes.length > FOLDED) {
        const body = make("div", { class: "rv-text" }, ...nodes);
        return make("details", { class: "rv-turn" }, make("summary", {}, `system, ${nodes.length} tokens`), body);
      }
      return make("div", { class: "rv-turn" }, make("div", { class: "rv-role" }, visible(role, true)), make("div", { class: "rv-text" }, ...nodes));
    }

    call(call) {
      const time = call.seconds === null ? "" : ` · ${shown(call.seconds)} s`;
      return make("details", { class: `rv-call${call.outcome === "ok" ? "" : " rv-failed"}` },
        make("summary", {}, visible(`${call.name} · ${call.outcome}${time}`, true)),
        make("div", { class: "rv-role" }, "arguments"), make("div", { class: "rv-text" }, visible(whole(call.arguments), true)),
        make("div", { class: "rv-role" }, "result"), make("div", { class: "rv-text" }, visible(whole(call.result), true)));
    }

    token(record, place, role, turn) {
      const id = record.ids[place], span = document.createElement("span");
      span.className = this.control.has(id) ? "rv-token rv-control" : "rv-token";
      span.textContent = visible(this.data.vocabulary[id] ?? `<id ${id}>`);
      span.tabIndex = -1;
      const shade = colour(record, this.state.mode, place, this.reachOf(this.state.mode));
      if (shade) span.style.backgroundColor = shade;
      this.tokens.set(span, { record, place, role, turn });
      return span;
    }

    reachOf(mode) {
      return (this.reaches[mode] ??= mode === "trained" ? 1 : reach(this.rollouts, mode));
    }

    legend() {
      const { mode } = this.state, { low, high, log } = MODES[mode], most = this.reachOf(mode);
      const swatch = (paint) => { const box = make("span", { class: "rv-swatch" }); box.style.backgroundColor = paint; return box; };
      const legend = make("div", { class: "rv-legend", role: "img", "aria-label": `colours: ${MODES[mode].label}` });
      if (mode === "trained") {
        legend.append(swatch(shade(BLUE, 0.45)), "trained ", swatch(shade(ORANGE, 0.45)), "sampled, not trained ", swatch("transparent"), "not sampled");
        return legend;
      }
      const end = (size) => shown(log ? Math.exp(size) : size);
      if (low) legend.append(end(-most), ...[1, 0.75, 0.5, 0.25].map((part) => swatch(shade(low, part))));
      legend.append(end(0));
      if (high) legend.append(...[0.25, 0.5, 0.75, 1].map((part) => swatch(shade(high, part))), end(most));
      return legend;
    }

    // ---- One token ----

    tokenKey(event) {
      const token = event.target.closest(".rv-token"), keys = ["ArrowLeft", "ArrowRight", "Home", "End"];
      if (!token || !keys.includes(event.key)) return;
      event.preventDefault();
      const all = [...this.detail.querySelectorAll(".rv-token")], place = all.indexOf(token);
      const next = { ArrowLeft: place - 1, ArrowRight: place + 1, Home: 0, End: all.length - 1 }[event.key];
      const target = all[Math.max(0, Math.min(all.length - 1, next))];
      token.tabIndex = -1;
      target.tabIndex = 0;
      target.focus();
    }

    showTip(target) {
      const token = target.closest(".rv-token"), found = token && this.tokens.get(token);
      if (!found) return this.hideTip();
      const { record, place, role, turn } = found, id = record.ids[place];
      const facts = [["id", id], ["text", visible(this.data.vocabulary[id] ?? "").replaceAll(/[\u200b\n\t]/g, "")], ["message", `${role}, turn ${turn + 1}`],
        ["trained", record.trained[place] === "1" ? "yes" : "no"]];
      for (const mode of Object.keys(MODES)) if (mode !== "trained") facts.push([MODES[mode].label, shown(numberAt(record, mode, place))]);
      this.tip.replaceChildren(table(facts));
      this.tip.hidden = false;
      this.described?.removeAttribute("aria-describedby");
      this.described = token;
      token.setAttribute("aria-describedby", "rv-tip");
      const box = token.getBoundingClientRect(), own = this.tip.getBoundingClientRect();
      const below = box.bottom + 6 + own.height < window.innerHeight;
      this.tip.style.left = `${Math.max(4, Math.min(box.left, window.innerWidth - own.width - 8))}px`;
      this.tip.style.top = `${below ? box.bottom + 6 : Math.max(4, box.top - own.height - 6)}px`;
    }

    hideTip() {
      this.tip.hidden = true;
      this.described?.removeAttribute("aria-describedby");
    }
  }

  // A page from a file may not use the clipboard; then the text is selected for a copy by hand.
  async function copyText(text, button) {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "copied";
    } catch {
      const area = make("textarea", { readonly: true, rows: 3 });
      area.value = text;
      button.replaceWith(area);
      area.select();
    }
  }

  const inWords = (steps) => (steps.length > 2 && steps.at(-1) - steps[0] === steps.length - 1
    ? `${steps[0]} to ${steps.at(-1)}` : steps.join(", "));

  // The message about damaged files.
  const unreadable = (data) => (data?.unreadable?.length
    ? [make("p", { class: "rv-note" }, `The rollouts of step ${inWords(data.unreadable)} cannot be read: their files are damaged or gone.`)]
    : []);

  // Shows the data in the element; a later call with new data keeps filters and selection.
  return (element, data, highlights) => {
    const before = views.get(element);
    before?.ending.abort();
    if (!data || !data.rollouts.length) {
      element.replaceChildren(...unreadable(data));
      return;
    }
    const viewer = new Viewer(element, data, before?.state);
    views.set(element, viewer);
    if (highlights) viewer.highlights(highlights);
  };
})();
