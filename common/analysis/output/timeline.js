// Draws each .timeline of the page with flame-chart-js; its events are in the script element beside it (timeline.py has the format).
"use strict";

const COLOURS = {
  embed: "#c8b4f0", norm: "#8ed3a0", attention: "#f5ab7e", mlp: "#84bbf5", loss: "#f393b4", residual: "#ddd57c", optimizer: "#71d0c6",
  communication: "#ff8a80", backward: "#d7cfc4", launch: "#e9c46a", "runtime call": "#cdbb88", other: "#bdbdbd",
  "matrix products": "#84bbf5", reductions: "#8ed3a0", elementwise: "#ddd57c", copies: "#c8b4f0",
};
const SPARE = ["#84bbf5", "#f5ab7e", "#8ed3a0", "#c8b4f0", "#ddd57c", "#f393b4", "#71d0c6", "#e9c46a"];
const BLOCK = 17, DIM = "rgba(128, 128, 128, 0.25)";
const charts = [], elements = [...document.querySelectorAll(".timeline")];
const contents = elements.map(element => JSON.parse(element.querySelector("script").textContent));
const ends = contents.flatMap(({ tracks }) => tracks.map(({ events }) => events.reduce((sum, value, i) => (i % 6 ? sum : sum + value), 0)));
const [scale, unit] = Math.max(...ends) < 2e6 ? [1e3, "us"] : [1e6, "ms"]; // ns in the unit of all timelines
Object.getPrototypeOf(flameChartJs.UIPlugin).defaultMaxListeners = 1000; // of its event emitters: some per track
let mirrored = false; // while the view of one timeline is copied to the others

const style = name => getComputedStyle(document.documentElement).getPropertyValue(name);
const number = value => Number(value.toPrecision(3)).toLocaleString("en");
const time = ns => ns < 1e3 ? `${number(ns)} ns` : ns < 1e6 ? `${number(ns / 1e3)} us` : `${number(ns / 1e6)} ms`;
const amount = (value, unit) => {
  const [factor, prefix] = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"], [0, ""]].find(([least]) => value >= least);
  return `${number(value / (factor || 1))} ${prefix}${unit}`;
};

function settings() {
  const [ink, paper, line] = ["--ink", "--paper", "--line"].map(style);
  const main = {
    blockHeight: BLOCK - 1, font: "11px system-ui, sans-serif", fontColor: "#111111", backgroundColor: paper,
    tooltipBackgroundColor: paper, tooltipHeaderFontColor: ink, tooltipBodyFontColor: ink, tooltipShadowColor: ink,
  };
  const title = { height: 16, color: style("--track"), strokeColor: line, font: "10px system-ui, sans-serif" };
  return {
    options: { timeUnits: unit, hotkeys: { active: false } },
    styles: { main, timeGridPlugin: { font: main.font, fontColor: ink }, togglePlugin: title },
  };
}

// The events of a track as nodes: an event lies in the first row that is free when it starts.
function nodes(data, { name: track, events }) {
  const roots = [], rows = []; // the last event of each row
  let start = 0;
  for (let i = 0; i < events.length; i += 6) {
    const [delta, duration, name, group, detail, beside] = events.slice(i, i + 6), colour = data.colours[group];
    start += delta;
    const node = {
      name: data.names[name], start: start / scale, duration: duration / scale, color: colour, children: [],
      end: start + duration, ns: [start, duration, beside], colour, group: data.groups[group], detail, track,
    };
    const free = rows.findIndex(({ end }) => end <= start), row = free < 0 ? rows.length : free;
    (row ? rows[row - 1].children : roots).push(node);
    rows[row] = node;
    data.nodes.push(node);
  }
  return { roots, depth: rows.length };
}

class Timeline {
  constructor(element, data) {
    Object.assign(this, { element, data, box: element.querySelector(".canvas"), found: element.querySelector(".found"), tracks: [] });
    data.nodes = [];
    data.colours = data.groups.map((name, i) => COLOURS[name] || SPARE[i % SPARE.length]);
    const { FlameChartContainer, FlameChartPlugin, TimeGridPlugin, TogglePlugin, TimeseriesPlugin } = flameChartJs;
    const plugins = [new TimeGridPlugin()], add = (name, plugin, height) => {
      plugin.height = height;
      plugins.push(new TogglePlugin(name), plugin);
    };
    for (const track of data.tracks) {
      const { roots, depth } = nodes(data, track), plugin = new FlameChartPlugin({ data: roots, name: track.name });
      const place = plugin.calcRect.bind(plugin);
      plugin.calcRect = (...event) => { // or an event under a quarter of a pixel is not drawn
        const rect = place(...event);
        return { ...rect, w: Math.max(rect.w, 0.25) };
      };
      plugin.on("select", ({ node }) => node && this.show(node.source));
      this.tracks.push(plugin);
      add(track.name, plugin, depth * BLOCK + 4);
    }
    if (data.memory.length) {
      const points = data.memory.map(([ns, mib]) => [ns / scale, mib]);
      const look = { type: "bar", fillColor: "#f5ab7e80", lineColor: "#d5752f" };
      add("memory, MiB", new TimeseriesPlugin({ data: [{ points, name: "allocated", units: " MiB", min: 0, style: look }] }), 70);
    }
    this.height = plugins.reduce((sum, { height }) => sum + height, 24);
    const canvas = Object.assign(element.querySelector("canvas"), { width: this.box.clientWidth, height: this.height });
    this.chart = new FlameChartContainer({ canvas, plugins, settings: settings() });
    this.engine = this.chart.renderEngine;
    this.chart.timeGrid.calcNumberFix = function () { return Math.max(0, 1 - Math.floor(Math.log10(this.delta))); }; // or 7.4 reads "7"
    this.chart.setSettings(settings());
    this.matches = data.nodes;
    this.listen();
    this.legend();
    for (const name of ["setZoom", "setPositionX"]) this.mirror(name);
  }

  // What moves or zooms this timeline moves and zooms the others, so that two runs stay on one scale.
  mirror(name) {
    const own = this.engine[name].bind(this.engine);
    this.engine[name] = value => {
      const result = own(value);
      if (!mirrored) {
        mirrored = true;
        for (const other of charts.filter(other => other !== this)) {
          other.engine[name](value);
          other.chart.render();
        }
        mirrored = false;
      }
      return result;
    };
  }

  view(from, to) {
    const { min, max, width } = this.engine, shown = Math.min(to - from, max - min);
    this.engine.setZoom(width / shown);
    this.engine.setPositionX(Math.min(Math.max(from, min), max - shown));
    this.chart.render();
  }

  // Zooms by a factor around the middle, and moves by a share of the width.
  move(factor, share) {
    const width = this.engine.getRealView(), middle = this.engine.positionX + width * (0.5 + share);
    this.view(middle - width * factor / 2, middle + width * factor / 2);
  }

  do(action) {
    const moves = { in: [0.5, 0], out: [2, 0], left: [1, -0.25], right: [1, 0.25] };
    if (moves[action]) this.move(...moves[action]);
    else if (action === "next") this.go(1, this.matches);
    else this.view(0, this.engine.max);
  }

  // Chooses the event after (or before) the chosen one.
  go(by, among) {
    if (!among.length) return;
    const at = among.indexOf(this.chosen), next = at < 0 ? 0 : (at + by + among.length) % among.length;
    const node = among[next], width = Math.max(8 * node.duration, 1e3 / scale);
    this.view(node.start - width / 2, node.start + node.duration + width / 2);
    this.show(node);
    for (const plugin of this.tracks) {
      const data = plugin.flatTree.find(flat => flat.source === node);
      plugin.selectedRegion = data ? { data, type: "node" } : null;
    }
    if (among === this.matches) this.found.textContent = `${next + 1} of ${among.length}`;
  }

  // Events that pass keep their colour; `name` is that of their group, if they are one.
  keep(passes, name) {
    this.matches = this.data.nodes.filter(passes);
    for (const node of this.data.nodes) node.color = DIM;
    for (const node of this.matches) node.color = node.colour;
    for (const plugin of this.tracks) plugin.initData();
    this.chart.render();
    const some = this.matches.length < this.data.nodes.length, ns = this.matches.reduce((sum, node) => sum + node.ns[1], 0);
    this.found.textContent = some ? `${this.matches.length} events, ${time(ns)}` : "";
    for (const made of this.element.querySelectorAll("[data-group]")) made.setAttribute("aria-pressed", made.dataset.group === name);
  }

  show(node) {
    this.chosen = node;
    const [start, duration, beside] = node.ns, pairs = Object.fromEntries(this.data.details[node.detail]);
    const onDevice = node.track.startsWith("GPU"), own = onDevice || beside < 0 ? duration : beside;
    const rows = [["event", node.name], ["track", node.track], ["start", time(start)], ["time", time(duration)]];
    if (beside >= 0) rows.push([onDevice ? "from its launch call to its start" : "self time", time(beside)]);
    for (const [label, value] of Object.entries(pairs)) {
      if (label === "FLOPs") rows.push([label, value ? `${amount(value, "FLOP")}, ${amount(1e9 * value / own, "FLOP/s")}` : "none that count"]);
      else if (label === "bytes") rows.push([label, `at least ${amount(value, "B")}, ${amount(1e9 * value / own, "B/s")}`]);
      else if (label === "limit") {
        const [us, limit] = value;
        rows.push(["limit", `${limit}: at least ${time(1e3 * us)}`], ["how near", `${number(1e5 * us / own)} % of its limit`]);
      } else rows.push([label, value]);
    }
    if (onDevice && !pairs.bytes) rows.push(["FLOPs and bytes", "not known: the trace has no shapes of this work"]);
    const list = this.element.querySelector(".chosen");
    list.replaceChildren(...rows.map(texts => {
      const row = document.createElement("div");
      row.append(...["dt", "dd"].map((kind, i) => Object.assign(document.createElement(kind), { textContent: texts[i] })));
      return row;
    }));
    list.hidden = false;
  }

  legend() {
    const add = (name, act) => {
      const made = Object.assign(document.createElement("button"), { textContent: name, onclick: () => act(made) });
      this.element.querySelector(".groups").append(made);
      return made;
    };
    for (const [name, ...times] of this.data.steps) add(name, () => this.view(...times.map(ns => ns / scale)));
    const known = Object.keys(COLOURS), rank = name => (known.indexOf(name) + known.length + 1) % (known.length + 1);
    for (const name of this.data.groups.toSorted((one, other) => rank(one) - rank(other))) {
      const made = add(name, ({ ariaPressed }) => {
        const wanted = ariaPressed === "true" ? null : name;
        for (const chart of charts) chart.keep(node => !wanted || node.group === wanted, wanted);
      });
      Object.assign(made, { ariaPressed: "false" }).dataset.group = name;
      made.prepend(document.createElement("i"));
      made.firstChild.style.background = this.data.colours[this.data.groups.indexOf(name)];
    }
  }

  listen() {
    const { box, chart, data } = this, search = this.element.querySelector("input"), on = (name, act, early) => box.addEventListener(name, act, early);
    for (const made of this.element.querySelectorAll("[data-do]")) made.onclick = () => this.do(made.dataset.do);
    search.oninput = () => this.keep(node => node.name.toLowerCase().includes(search.value.trim().toLowerCase()));
    search.onkeydown = event => event.key === "Enter" && this.go(event.shiftKey ? -1 : 1, this.matches);
    on("keydown", event => {
      const { track } = this.chosen || data.nodes.find(node => node.track.startsWith("GPU")) || data.nodes[0];
      const own = data.nodes.filter(node => node.track === track);
      const acts = { // the library's own keys do nothing where a frame is still to be drawn
        ArrowLeft: () => this.move(1, -0.1), ArrowRight: () => this.move(1, 0.1), ArrowUp: () => this.move(0.8, 0), ArrowDown: () => this.move(1.25, 0),
        "+": () => this.do("in"), "-": () => this.do("out"), 0: () => this.do("all"),
        ".": () => this.go(1, own), ",": () => this.go(-1, own), "/": () => search.focus(),
      };
      if (event.ctrlKey || event.metaKey || event.altKey || !acts[event.key]) return;
      acts[event.key]();
      event.preventDefault();
    });
    // The wheel alone scrolls the page.
    on("wheel", event => event.ctrlKey || event.metaKey || Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.stopPropagation(), true);
    on("pointermove", event => event.pointerType === "touch" && this.move(1, -event.movementX / this.engine.width));
    new ResizeObserver(() => box.clientWidth && chart.resize(box.clientWidth, this.height)).observe(box);
    matchMedia("(prefers-color-scheme: dark)").onchange = () => chart.setSettings(settings());
  }
}

elements.forEach((element, i) => charts.push(new Timeline(element, contents[i])));
const longest = Math.max(...charts.map(({ engine }) => engine.max));
for (const { engine, chart } of charts) {
  engine.setMinMax(0, longest);
  engine.resetView();
  engine.children.forEach(child => child.resetView());
  chart.render();
}
