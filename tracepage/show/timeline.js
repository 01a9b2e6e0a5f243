// Draws each .timeline of the page with flame-chart-js; its events are in the script element beside it (timeline.py has the format).
"use strict";

const SPARE = ["#84bbf5", "#f5ab7e", "#8ed3a0", "#c8b4f0", "#ddd57c", "#f393b4", "#71d0c6", "#e9c46a"];
const BLOCK = 17, WAITS = "GPU waits, by cause";
const charts = [], elements = [...document.querySelectorAll(".timeline")];
const contents = elements.map(element => JSON.parse(element.querySelector("script").textContent));
const ends = contents.flatMap(({ tracks }) => tracks.map(({ events }) => events.reduce((sum, value, i) => (i % 6 ? sum : sum + value), 0)));
const [scale, unit] = Math.max(...ends) < 2e6 ? [1e3, "us"] : [1e6, "ms"]; // ns in the unit of all timelines
Object.getPrototypeOf(flameChartJs.UIPlugin).defaultMaxListeners = 1000; // of its event emitters: some per track
let mirrored = false; // while the view of one timeline is copied to the others

const style = name => getComputedStyle(document.documentElement).getPropertyValue(name);
const number = value => Number(value.toPrecision(3)).toLocaleString("en");
const time = ns => ns < 1e3 ? `${number(ns)} ns` : ns < 1e6 ? `${number(ns / 1e3)} us` : `${number(ns / 1e6)} ms`;

function settings(tooltip) {
  const [ink, paper, line] = ["--ink", "--paper", "--line"].map(style);
  const main = {
    blockHeight: BLOCK - 1, font: "11px system-ui, sans-serif", fontColor: "#111111", backgroundColor: paper,
    tooltipBackgroundColor: paper, tooltipHeaderFontColor: ink, tooltipBodyFontColor: ink, tooltipShadowColor: ink,
  };
  const dotsColor = innerWidth < 640 ? style("--track") : ink; // beside long names there is no place for them
  const title = { height: 16, color: style("--track"), strokeColor: line, dotsColor, font: "10px system-ui, sans-serif" };
  return {
    options: { timeUnits: unit, hotkeys: { active: false }, tooltip },
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
    node.level = row;
    (row ? rows[row - 1].children : roots).push(node);
    rows[row] = node;
    data.nodes.push(node);
  }
  return { roots, depth: rows.length };
}

class Timeline {
  constructor(element, data) {
    Object.assign(this, { element, data, box: element.querySelector(".canvas"), tracks: [], marked: [] });
    data.nodes = [];
    data.colours = data.groups.map((name, i) => COLOURS[name] || SPARE[i % SPARE.length]);
    const { FlameChartContainer, FlameChartPlugin, TimeGridPlugin, TogglePlugin } = flameChartJs;
    const plugins = [new TimeGridPlugin()];
    for (const track of data.tracks) {
      const { roots, depth } = nodes(data, track), plugin = new FlameChartPlugin({ data: roots, name: track.name });
      const place = plugin.calcRect.bind(plugin);
      plugin.calcRect = (...event) => { // or an event under a quarter of a pixel is not drawn
        const rect = place(...event);
        return { ...rect, w: Math.max(rect.w, 0.25) };
      };
      const draw = plugin.render.bind(plugin);
      plugin.render = () => {
        draw();
        for (const { start, duration, level } of this.marked.filter(node => node.track === track.name)) {
          const { x, y, w } = plugin.calcRect(start, duration, level);
          plugin.renderEngine.addRect({ color: style("--ink"), x, y: y + BLOCK - 4, w: Math.max(w, 1), h: 3 }, 3);
        }
      };
      plugin.on("select", ({ node }) => node && this.show(node.source));
      plugin.height = depth * BLOCK + 4;
      this.tracks.push(plugin);
      plugins.push(new TogglePlugin(track.name), plugin);
    }
    this.height = plugins.reduce((sum, { height }) => sum + height, 24);
    const canvas = Object.assign(element.querySelector("canvas"), { width: this.box.clientWidth, height: this.height });
    this.chart = new FlameChartContainer({ canvas, plugins, settings: settings(this.tooltip.bind(this)) });
    this.engine = this.chart.renderEngine;
    this.roundTicks(this.chart.timeGrid);
    this.hover();
    this.chart.setSettings(settings(this.tooltip.bind(this)));
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

  // Lines of the grid lie at 1, 2 or 5 times a power of ten, not closer than 85 pixels.
  roundTicks(grid) {
    grid.recalc = () => {
      const { min, width, positionX } = this.engine, shown = this.engine.getRealView();
      const least = (85 * shown) / width, power = 10 ** Math.floor(Math.log10(least));
      grid.delta = power * [1, 2, 5, 10].find(factor => factor * power >= least);
      grid.start = Math.floor((positionX - min) / grid.delta);
      grid.end = grid.start + Math.ceil(shown / grid.delta) + 1;
      grid.accuracy = Math.max(0, -Math.floor(Math.log10(grid.delta)));
    };
    grid.renderTimes = engine => {
      engine.setCtxValue("fillStyle", style("--ink"));
      engine.setCtxFont(engine.styles.font);
      grid.forEachTime((place, value) => {
        const text = value.toFixed(grid.accuracy) + unit, start = place + engine.blockPaddingLeftRight;
        if (place >= 0 && start + engine.ctx.measureText(text).width <= engine.width) engine.fillText(text, start, engine.charHeight);
      });
    };
  }

  // Where a stream is empty, the mouse finds the wait.
  hover() {
    const { interactionsEngine: mouse } = this.chart, region = mouse.getHoveredRegion.bind(mouse);
    const [waits] = this.tracks.filter(({ name }) => name === WAITS);
    mouse.getHoveredRegion = () => {
      const event = region(), now = this.engine.pixelToTime(mouse.mouse.x) + this.engine.positionX;
      const stream = this.tracks.find(({ interactionsEngine }) => interactionsEngine === mouse.hoveredInstance);
      if (event || !waits || !stream?.name.startsWith("GPU")) return event;
      const wait = waits.flatTree.find(({ source: { start, duration } }) => start <= now && now <= start + duration);
      return wait ? { type: "cluster", id: mouse.hoveredInstance.id, data: { nodes: [wait] } } : null;
    };
  }

  // The name in as many lines as it needs, inside the timeline.
  tooltip(region, engine, place) {
    if (!region) return;
    const { source } = region.data, [start, duration] = source.ns, width = this.engine.width - 30;
    const letters = Math.floor(width / this.engine.ctx.measureText("m").width);
    const lines = [...source.name.match(new RegExp(`.{1,${letters}}`, "g")), `time: ${time(duration)}`, `start: ${time(start)}`];
    const widest = Math.max(...lines.map(line => this.engine.ctx.measureText(line).width)), tall = 20 + 14 * lines.length;
    const x = Math.max(0, Math.min(place.x, width - widest)), y = place.y + tall > this.height ? place.y - tall : place.y;
    engine.renderTooltipFromData(lines.map(text => ({ text })), { x, y });
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

  // Events of this group keep their colour (all, if it is null).
  keep(group) {
    for (const node of this.data.nodes) node.color = !group || node.group === group ? node.colour : style("--track");
    for (const plugin of this.tracks) plugin.initData();
    this.chart.render();
    for (const made of this.element.querySelectorAll("[data-group]")) made.setAttribute("aria-pressed", made.dataset.group === group);
  }

  // All parts of the wait that this is a part of.
  parts({ name, ns }) {
    return this.data.nodes.filter(other => other.track === WAITS && other.name === name && other.ns[2] === ns[2]);
  }

  show(node) {
    const [start, duration, beside] = node.ns, onDevice = node.track.startsWith("GPU");
    const rows = [["event", node.name], ["track", node.track], ["start", time(start)], ["time", time(duration)]];
    this.marked = [node];
    if (node.track === WAITS) {
      this.marked = this.parts(node);
      if (this.marked.length > 1) rows[3][1] = `${time(beside)} in ${this.marked.length} parts, of which this takes ${time(duration)}`;
    } else if (beside >= 0) rows.push([onDevice ? "from its launch call to its start" : "self time", time(beside)]);
    rows.push(...this.data.details[node.detail]);
    const list = this.element.querySelector(".chosen");
    list.replaceChildren(...rows.map(texts => {
      const row = document.createElement("div");
      row.append(...["dt", "dd"].map((kind, i) => Object.assign(document.createElement(kind), { textContent: texts[i] })));
      return row;
    }));
    list.hidden = false;
    this.chart.render();
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
        for (const chart of charts) chart.keep(wanted);
      });
      Object.assign(made, { ariaPressed: "false" }).dataset.group = name;
      made.prepend(document.createElement("i"));
      made.firstChild.style.background = this.data.colours[this.data.groups.indexOf(name)];
    }
  }

  listen() {
    const moves = { in: [0.5, 0], out: [2, 0], left: [1, -0.25], right: [1, 0.25] };
    for (const made of this.element.querySelectorAll("[data-do]")) {
      const { do: action } = made.dataset;
      made.onclick = () => (action === "all" ? this.view(0, this.engine.max) : this.move(...moves[action]));
    }
    // The wheel alone scrolls the page.
    this.box.addEventListener("wheel", event => event.ctrlKey || event.metaKey || Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.stopPropagation(), true);
    new ResizeObserver(() => this.box.clientWidth && this.chart.resize(this.box.clientWidth, this.height)).observe(this.box);
  }
}

// A link to a wait shows it with half as much time on both sides, marks all its parts, and selects the longest.
for (const link of document.querySelectorAll("a[data-from]")) {
  link.addEventListener("click", () => {
    const { data } = charts[0], [from, to] = ["from", "to"].map(name => (link.dataset[name] - data.begin) / scale);
    charts[0].view(1.5 * from - to / 2, 1.5 * to - from / 2);
    const first = data.nodes.find(({ ns, track }) => track === WAITS && ns[0] === link.dataset.from - data.begin);
    charts[0].show(charts[0].parts(first).reduce((most, part) => (part.duration > most.duration ? part : most)));
  });
}

elements.forEach((element, i) => charts.push(new Timeline(element, contents[i])));
const longest = Math.max(...charts.map(({ engine }) => engine.max));
for (const { engine, chart } of charts) {
  engine.setMinMax(0, longest);
  engine.resetView();
  engine.children.forEach(child => child.resetView());
  chart.render();
}
