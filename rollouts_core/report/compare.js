// The view "curves" of a comparison: curves of several runs on common axes. viewer.js has the other views.
//
//     curves block (compared_curves.py): stages -> metrics -> values per run
"use strict";
(() => {
  const { $, VIEWS, el, count, loadJson, curveState, smoothed, valueRange, tick, exact, fillCurves } = window.viewerParts;
  const letterOf = (place) => String.fromCharCode(65 + place);

  const overlayView = {
    stages: null, plots: [], hidden: new Set(),

    async show(root) {
      if (this.stages) return this.draw();
      this.stages = (await loadJson("curves")) || [];
      await window.runBlock("plot");
      const runs = this.stages.length ? this.stages[0].runs.length : 0;
      const shows = (place) => el("label", { class: "check" }, el("input", { type: "checkbox", checked: true, onchange: (event) => { if (event.target.checked) this.hidden.delete(place); else this.hidden.add(place); this.draw(); } }),
        el("span", { class: `letter run-${letterOf(place)}` }, letterOf(place)));
      fillCurves(this, root, "", ...Array.from({ length: runs }, (_, place) => shows(place)));
    },

    draw() {
      this.plots.forEach((plot) => plot.destroy());
      this.plots = [];
      const open = new Set([...this.body.querySelectorAll("details[open]")].map((each) => each.dataset.stage));
      const fits = ({ name, title }) => !curveState.filter || `${name} ${title}`.toLowerCase().includes(curveState.filter);
      const waiting = [];
      const sections = this.stages.flatMap((stage) => {
        const family = [], chosen = stage.metrics.filter(fits);
        const grid = (metrics, mounts) => el("div", { class: "cards charts" }, metrics.map((metric) => this.figure(stage, metric, family, mounts)));
        const main = chosen.filter(({ isMain }) => isMain), others = chosen.filter(({ isMain }) => !isMain);
        const rest = el("details", { "data-stage": stage.label, open: open.has(stage.label) || Boolean(curveState.filter) }, el("summary", {}, `${others.length} further metrics`));
        const fill = () => {
          if (!rest.open || rest.dataset.built) return;
          rest.dataset.built = "1";
          const mounts = [];
          rest.append(grid(others, mounts));
          mounts.forEach((mount) => mount());
        };
        rest.addEventListener("toggle", fill);
        const shown = main.length ? grid(main, waiting) : "";
        waiting.push(fill);
        return chosen.length ? [el("h3", {}, stage.label), stage.note ? el("p", { class: "note" }, stage.note) : "", shown, others.length ? rest : ""] : [];
      });
      this.body.replaceChildren(...sections.filter((node) => node !== ""));
      waiting.forEach((mount) => mount());
    },

    figure(stage, metric, family, mounts) {
      const value = el("span", {}), box = el("div", { class: "plot", tabindex: "0", role: "img" }), legend = el("p", { class: "legend" });
      mounts.push(() => this.plot(stage, metric, family, { box, value, legend }));
      return el("figure", { class: "chart" }, el("figcaption", {}, el("b", {}, metric.title), value), box, legend, metric.note ? el("p", { class: "note" }, metric.note) : "");
    },

    /** The points of each visible run that has the metric. A run that rarely has a value is drawn without gaps. */
    linesOf(stage, metric) {
      return metric.values.flatMap((values, place) => {
        if (!values || this.hidden.has(place)) return [];
        const known = values.map((each) => (curveState.isLog && each !== null && each <= 0 ? null : each));
        const isSparse = known.filter((each) => each !== null).length < 0.5 * known.length;
        const places = known.map((_, i) => i).filter((i) => !isSparse || known[i] !== null);
        const raw = places.map((i) => known[i]), numbers = raw.filter((each) => each !== null);
        if (!numbers.length) return [];
        return [{ place, isSparse, xs: places.map((i) => stage.runs[place].steps[i]), ys: curveState.smoothing ? smoothed(raw, curveState.smoothing) : raw, ends: `${exact(numbers[0])} → ${exact(numbers[numbers.length - 1])}`, isPoint: numbers.length === 1 }];
      });
    },

    plot(stage, metric, family, { box, value, legend }) {
      const lines = this.linesOf(stage, metric);
      const tell = (texts) => legend.replaceChildren(...lines.map(({ place }, i) => el("span", {}, el("i", { class: `run-${letterOf(place)}` }), `${letterOf(place)} ${texts[i]}`)));
      tell(lines.map(({ ends }) => ends));
      box.setAttribute("aria-label", `${metric.title}, ${stage.label}: ${lines.map(({ place, ends }) => `${letterOf(place)} ${ends}`).join(", ") || "no values"}; arrow keys move along the ${stage.xName}s`);
      if (!lines.length) return;
      const style = getComputedStyle(document.body), ink = (name) => style.getPropertyValue(name).trim();
      const axis = { stroke: ink("--soft"), grid: { stroke: ink("--rule"), width: 1 }, ticks: { stroke: ink("--rule"), size: 4 }, font: "11px system-ui, sans-serif" };
      const joined = lines.length > 1 ? window.uPlot.join(lines.map(({ xs, ys }) => [xs, ys])) : [lines[0].xs, lines[0].ys];
      const xs = joined[0];
      const plot = new window.uPlot({
        width: box.clientWidth || 300, height: 168, legend: { show: false }, padding: [8, 18, 0, 0],
        cursor: { sync: { key: stage.label, scales: ["x", null] }, y: false, drag: { x: true, y: false, setScale: true }, points: { size: 7 } },
        scales: { x: { time: false }, y: { distr: curveState.isLog ? 3 : 1, range: (u) => {
          const { min, max } = u.scales.x, isSeen = (x) => min === null || min === undefined || (x >= min && x <= max);
          return valueRange(lines.flatMap((line) => line.ys.filter((_, i) => isSeen(line.xs[i]))), metric);
        } } },
        axes: [{ ...axis, space: 46, size: 26, values: (_, ticks) => ticks.map((at) => (at % 1 && stage.xName === "step" ? "" : count(at))) },
          { ...axis, size: (_, labels) => 14 + 6.6 * Math.max(4, ...(labels || []).map((label) => label.length)), space: 30, values: (_, ticks) => ticks.map(tick) }],
        series: [{}, ...lines.map(({ place, isSparse, isPoint }) => ({ stroke: ink(`--run-${letterOf(place)}`), width: 1.6, points: { show: isPoint || isSparse, size: 4 } }))],
        hooks: {
          setCursor: [(u) => {
            const i = u.cursor.idx, isOut = i === null || i === undefined;
            value.textContent = isOut ? "" : `${stage.xName} ${tick(xs[i])}`;
            tell(lines.map(({ ends }, line) => (isOut ? ends : exact(joined[line + 1][i] ?? null))));
          }],
          setScale: [(u, key) => {
            if (key !== "x" || this.isZooming) return;
            this.isZooming = true;
            for (const other of family) if (other !== u) other.setScale("x", { min: u.scales.x.min, max: u.scales.x.max });
            this.isZooming = false;
          }],
        },
      }, joined, box);
      family.push(plot);
      this.plots.push(plot);
      plot.over.addEventListener("dblclick", () => family.forEach((each) => each.setScale("x", { min: xs[0], max: xs[xs.length - 1] })));
      let at = null;
      box.addEventListener("keydown", (event) => {
        const moves = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[event.key];
        if (moves === undefined) return;
        event.preventDefault();
        at = Math.max(0, Math.min(xs.length - 1, (at === null ? (moves > 0 ? -1 : xs.length) : at) + moves));
        legend.setAttribute("aria-live", "polite");
        plot.setCursor({ left: plot.valToPos(xs[at], "x"), top: plot.over.clientHeight / 2 });
      });
    },
  };

  VIEWS.curves.view = overlayView;
  const link = document.querySelector('#views a[href="#run"]');
  if (link) link.textContent = "Runs";
})();
