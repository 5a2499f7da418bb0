// Draws every .plot of the page with uPlot: width of its column, colours of the system's theme, axis room measured by the labels.
(() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const colours = ["#3f76ae", "#d0661b", "#3d8b40", "#9a55ad", "#b8860b", "#2a9d9d", "#c2416b", "#7a7a85"]; // legible on both themes
  const short = value => {
    const size = Math.abs(value);
    if (value === 0) return "0";
    if (size >= 1e9) return +(value / 1e9).toPrecision(4) + "G";
    if (size >= 1e6) return +(value / 1e6).toPrecision(4) + "M";
    if (size >= 1e4) return +(value / 1e3).toPrecision(4) + "k";
    return size < 1e-3 ? value.toExponential(1) : String(+value.toPrecision(5));
  };
  const drawn = [];
  const draw = (box, chart) => {
    box.querySelector(".uplot")?.remove();
    const style = getComputedStyle(document.documentElement);
    const dim = style.getPropertyValue("--dim"), line = style.getPropertyValue("--line");
    const font = "12px system-ui, sans-serif";
    const axis = { stroke: dim, font, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 } };
    const labels = (_, values) => values.map(value => value == null ? "" : short(value));
    const room = (plot, values) => {
      if (!values) return 50;
      plot.ctx.font = font;
      return 18 + Math.ceil(Math.max(...values.map(text => plot.ctx.measureText(text).width)));
    };
    const points = chart.data[0].length;
    // no tick between two steps or two clients
    const whole = chart.data[0].every(Number.isInteger) && !chart.log ? { incrs: [1, 2, 5, 10, 20, 50, ...Array.from({ length: 12 }, (_, i) => [1, 2, 5].map(n => n * 10 ** (i + 2))).flat()] } : {};
    const bound = { class: "bound", stroke: "transparent", width: 0, spanGaps: true, points: { show: false } };
    const options = {
      width: Math.max(box.clientWidth - 16, 200), height: 220,
      scales: chart.log ? { x: { time: false, distr: 3, log: 2 }, y: { distr: 3, log: 2 } } : { x: { time: false } },
      cursor: { points: { size: 6 }, drag: { x: true, y: false } },
      axes: [{ ...axis, ...whole, values: labels, label: chart.x, labelFont: font, labelSize: 18, size: 34, space: 60 }, { ...axis, values: labels, size: room }],
      series: [{ label: chart.x, value: (_, v) => v == null ? "" : short(v) }, ...chart.names.map((name, i) => ({
        label: name || box.closest("figure").querySelector("figcaption").textContent, stroke: colours[i % colours.length], width: 1.5, spanGaps: true,
        points: { show: points < 30, size: 5 }, value: (_, v) => v == null ? "" : String(+v.toPrecision(6)),
      })), ...chart.bands.flatMap(() => [bound, bound])],
      bands: chart.bands.map((line, i) => ({ series: [0, 1].map(side => chart.names.length + 1 + 2 * i + side), fill: colours[line % colours.length] + "2e" })),
    };
    // without a pointer, and on a phone, the legend shows the last values
    const last = chart.data.map(column => column.findLastIndex(value => value != null));
    const rest = plot => setTimeout(() => plot.cursor.idx == null && plot.setLegend({ idxs: last }));
    options.hooks = { draw: [rest], setCursor: [rest] };
    return new uPlot(options, chart.data, box);
  };
  for (const box of document.querySelectorAll(".plot")) {
    const chart = JSON.parse(box.querySelector("script").textContent);
    const held = { box, chart, plot: draw(box, chart) };
    drawn.push(held);
    new ResizeObserver(() => held.plot.setSize({ width: Math.max(box.clientWidth - 16, 200), height: 220 })).observe(box);
  }
  dark.addEventListener("change", () => drawn.forEach(held => { held.plot.destroy(); held.plot = draw(held.box, held.chart); }));
})();
