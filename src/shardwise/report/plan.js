// Figures are looked up, never computed: but for the budget's share of a billion tokens.
const data = JSON.parse(document.getElementById("data").textContent);
const by = (id) => document.getElementById(id);
const GIB = 2 ** 30;
const bytes = (count) => `${(count / GIB).toFixed(1)} GiB`;
const grouped = (value) => Math.round(value).toLocaleString("en-US");
const percent = (share) => `${(100 * share).toFixed(1)}%`;
const duration = (seconds) => {
  const whole = Math.max(0, Math.round(seconds));
  const [days, hours] = [Math.floor(whole / 86400), Math.floor(whole / 3600) % 24];
  const [minutes, secs] = [Math.floor(whole / 60) % 60, whole % 60];
  const two = (value) => String(value).padStart(2, "0");
  if (days) return `${days}d${two(hours)}h`;
  if (hours) return `${hours}h${two(minutes)}m`;
  return minutes ? `${minutes}m${two(secs)}s` : `${secs}s`;
};
const seconds = (value) => {
  for (const [unit, size] of [["ms", 1e-3], ["us", 1e-6]]) {
    if (size <= value && value < 1000 * size) return `${(value / size).toFixed(1)} ${unit}`;
  }
  return value < 60 ? `${value.toFixed(2)} s` : duration(value);
};
const sum = (values) => values.reduce((all, value) => all + value, 0);

const knobs = data.knobs.map((knob) => by(`knob-${knob.name}`));
const spotAt = (places) => data.spots[
  places.reduce((index, place, number) => index * data.knobs[number].shown.length + place, 0)];
const own = spotAt(data.knobs.map((knob) => knob.at));
const billions = data.tokens / 1e9;
// (figure, its value at a spot, in words)
const figures = [
  ["speed", (spot) => spot.speed, (value) => `${grouped(value)}`],
  ["mfu", (spot) => spot.mfu, percent],
  ["memory", (spot) => sum(spot.held), bytes],
  ["step", (spot) => spot.step, seconds],
  ["time", (spot) => spot.hours && spot.hours * billions, (hours) => duration(3600 * hours)],
  ["cost", (spot) => spot.usd && spot.usd * billions, (usd) => `USD ${grouped(usd)}`],
];
const fill = (id, words, amounts, whole, show) => {
  const svg = by(id);
  if (!svg) return;
  let begin = 0;
  [...svg.querySelectorAll("rect")].forEach((rect, place) => {
    const share = whole ? (amounts[place] || 0) / whole : 0;
    rect.setAttribute("x", `${100 * begin}%`);
    rect.setAttribute("width", `${100 * share}%`);
    rect.querySelector("title").textContent = `${words[place]}: ${show(amounts[place] || 0)}`;
    begin += share;
  });
};
const show = () => {
  const places = knobs.map((knob) => Number(knob.value));
  knobs.forEach((knob, number) => {
    const shown = data.knobs[number].shown[places[number]];
    knob.setAttribute("aria-valuetext", shown);
    knob.closest("label").querySelector("output").textContent = shown;
  });
  const found = spotAt(places);
  const spot = typeof found === "number" ? { held: [] } : found;
  const label = data.labels[typeof found === "number" ? found : found.label];
  const capacity = data.capacity[places[0]];
  const total = sum(spot.held);
  const state = typeof found === "number" ? "none" : found.fits ? "fits" : "too large";
  by("try-label").className = `verdict ${{ none: "skip", fits: "pass" }[state] ?? "fail"}`;
  by("try-label").textContent = {
    none: label,
    fits: `fits: ${label}`,
    "too large": `does not fit, even with ${label}`,
  }[state];
  for (const [name, value, words] of figures) {
    const [here, before] = [value(spot), value(own)];
    by(`try-${name}`).textContent = here ? words(here) : "-";
    // Steps of other batches are of different lengths, so their times say nothing.
    const change = here && before && name !== "step" ? here / before - 1 : 0;
    const sign = change > 0 ? "+" : "−";
    by(`than-${name}`).textContent =
      Math.abs(change) >= 0.0005 ? ` ${sign}${percent(Math.abs(change))}` : "";
  }
  // What is far too large ends at the bar's end.
  const scale = Math.max(capacity / data.share, total);
  fill("try-held", data.memory, spot.held, scale, bytes);
  by("try-limit").style.left = `${(100 * capacity) / scale}%`;
  by("try-limit").title = `${bytes(capacity)}: the device`;
  fill("try-terms", data.terms, spot.terms || [], spot.step || 0, seconds);
  const words = data.knobs.map((knob, number) => knob.overrides[places[number]]);
  by("try-command").textContent = ["shardwise plan run.yaml", ...words, data.kept].join(" ");
};
knobs.forEach((knob) => knob.addEventListener("input", show));
by("try-back").addEventListener("click", () => {
  data.knobs.forEach((knob, number) => {
    knobs[number].value = knob.at;
  });
  show();
});
show();
// A reader's own prices.
for (const price of document.querySelectorAll("#prices input")) {
  price.addEventListener("input", () => {
    const usd = Number(price.value) * Number(price.dataset.hours);
    price.closest("tr").querySelector("output").textContent = price.value ? grouped(usd) : "-";
  });
}
