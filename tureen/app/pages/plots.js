
// The plots: the last ten minutes of a figure as lines, its newest value, and its value at a point in time.

const SPAN = 300, SAMPLE_S = 2, WIDTH = 600, HEIGHT = 100;
const rate = (value) => (value < 100 ? value.toFixed(1) : count(value));
const time = (value) => (value < 1 ? `${(value * 1000).toFixed(value < 0.1 ? 1 : 0)} ms` : value < 90 ? `${value.toFixed(1)} s` : `${Math.floor(value / 60)} min ${Math.floor(value % 60)} s`);
const share = (value) => `${(value * 100).toFixed(value < 0.1 ? 1 : 0)} %`;
const PLOTS = [
  { name: "Output", about: "Tokens that all requests generate in a second.", unit: "tokens/s", format: rate, series: [["output_tokens_per_s", ""]] },
  { name: "Prompts", about: "Prompt tokens that the server takes in a second, those from the prefix cache included.", unit: "tokens/s", format: rate, series: [["prompt_tokens_per_s", ""]] },
  { name: "Requests", about: "Running requests are being computed. Waiting requests need free memory first.", unit: "", format: count, series: [["num_running", "running"], ["num_waiting", "waiting"]] },
  { name: "KV cache held by requests", about: "The share of the KV cache that running requests need. Near 100 %, new requests wait.", unit: "", format: share, most: 1, series: [["kv_share", ""]] },
  { name: "Time to first token", about: "The time from the arrival of a request to its first token. 95 % of the requests were faster than the second figure.", unit: "", format: time, series: [["ttft_mean_s", "mean"], ["ttft_p95_s", "95 %"]] },
  { name: "Time between tokens", about: "The time from one token of an answer to the next. 95 % of the gaps were shorter than the second figure.", unit: "", format: time, series: [["itl_mean_s", "mean"], ["itl_p95_s", "95 %"]] },
];
function makePlot(plot) {
  const numbers = plot.series.map(() => make("b", {}));
  const labels = plot.series.map(([, label], index) => make("span", { className: "number" }, ...(label ? [make("i", { className: index ? "second" : "" })] : []), numbers[index], ` ${[plot.unit, label].filter(Boolean).join(" ")}`));
  const most = make("output", {}), svg = drawn("svg", { class: "plot", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
  const reader = makeReader(plot), box = make("div", { className: "plot-box" }, svg, reader.cursor, reader.slider);
  const node = make("figure", {}, make("figcaption", {}, make("h3", {}, explained(plot.name, plot.about)), ...labels), box, make("div", { className: "axis" }, make("span", { textContent: "10 min ago" }), most, make("span", { textContent: "now" })));
  reader.onRead = (text) => { most.textContent = text ?? most.dataset.top; };
  return { node, update: (samples) => { updatePlot(plot, samples, numbers, most, svg); reader.update(samples); } };
}

/** Returns what reads a plot at a point: a slider over it, which the pointer and the arrow keys move. */
function makeReader(plot) {
  const slider = make("input", { type: "range", min: 1 - SPAN, max: 0, value: 0, "aria-label": `${plot.name}: value at a point in time` });
  const cursor = make("span", { className: "cursor", hidden: true });
  const reader = { slider, cursor, samples: [], onRead: () => {}, update(samples) { reader.samples = samples; if (!cursor.hidden) show(); } };
  const textAt = (offset) => {
    const newest = reader.samples.at(-1)?.number ?? 0, sample = reader.samples.find((one) => one.number === newest + offset);
    const values = plot.series.filter(([name]) => (sample?.[name] ?? null) !== null).map(([name, label]) => [plot.format(sample[name]), plot.unit, label].filter(Boolean).join(" "));
    return `${offset ? `${time(-offset * SAMPLE_S)} ago` : "now"}: ${values.join(", ") || "no value"}`;
  };
  function show() {
    const offset = Number(slider.value);
    cursor.hidden = false;
    cursor.style.setProperty("--at", `${(1 + offset / (SPAN - 1)) * 100}%`);
    slider.setAttribute("aria-valuetext", textAt(offset));
    reader.onRead(textAt(offset));
  }
  const hide = () => { if (document.activeElement !== slider) { cursor.hidden = true; reader.onRead(null); } };
  slider.addEventListener("pointermove", (event) => {
    const { left, width } = slider.getBoundingClientRect();
    slider.value = Math.round(((event.clientX - left) / width - 1) * (SPAN - 1));
    show();
  });
  for (const name of ["input", "focus"]) slider.addEventListener(name, show);
  for (const name of ["pointerleave", "blur"]) slider.addEventListener(name, hide);
  slider.setAttribute("aria-valuetext", "no value");
  return reader;
}

function updatePlot(plot, samples, numbers, most, svg) {
  const newest = samples.length ? samples[samples.length - 1].number : 0;
  const values = samples.flatMap((sample) => plot.series.map(([name]) => sample[name])).filter((value) => value !== null);
  const top = plot.most || Math.max(0, ...values) || 1;
  svg.replaceChildren();
  const told = plot.series.map(([name, label], index) => {
    const seen = samples.filter((sample) => sample[name] !== null);
    const last = seen.length ? plot.format(seen[seen.length - 1][name]) : "none yet";
    numbers[index].textContent = seen.length ? last : "–";
    let points = [];
    const flush = () => { if (points.length) svg.append(drawn("polyline", { points: (points.length > 1 ? points : [points[0], points[0]]).join(" "), ...(index ? { class: "second" } : {}) })); points = []; };
    for (const sample of samples) {
      if (sample[name] === null) { flush(); continue; }
      const x = WIDTH - ((newest - sample.number) / (SPAN - 1)) * WIDTH;
      points.push(`${x.toFixed(1)},${(HEIGHT - 2 - (sample[name] / top) * (HEIGHT - 6)).toFixed(1)}`);
    }
    flush();
    const range = seen.length ? `, from ${plot.format(Math.min(...seen.map((sample) => sample[name])))} to ${plot.format(Math.max(...seen.map((sample) => sample[name])))}` : "";
    return `${label ? label + " " : ""}${last}${range}`;
  });
  most.dataset.top = values.length ? `top: ${plot.format(top)}` : "nothing yet";
  most.textContent = most.dataset.top;
  svg.setAttribute("aria-label", `${plot.name}${plot.unit ? `, ${plot.unit}` : ""}, over the last ten minutes: ${told.join("; ")}`);
}

