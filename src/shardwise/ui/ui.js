// Asks for what has changed, again and again. What is shown is named after the # of the address.
const main = document.querySelector("main");
const word = document.querySelector("#word");
const token = new URLSearchParams(location.search).get("token");
const usual = 1000 * Number(document.body.dataset.every);
const shown = new Map();
let timer;
let turn = 0;
const say = (text) => {
  word.textContent = text;
  word.hidden = !text;
};
const chosen = () => new URLSearchParams(location.hash.slice(1));
const choose = (names, rank) => {
  const next = new URLSearchParams(names.map((name) => ["run", name]));
  if (rank) next.set("rank", rank);
  location.hash = next;
};
// Nothing is taken away from under a pointer that reads a point, or out of a selection.
const isRead = (place) => {
  const selection = getSelection();
  const inside = !selection.isCollapsed && place.contains(selection.anchorNode);
  return inside || place.querySelector(".lit") !== null;
};
const replace = (place, html) => {
  const focused = place.contains(document.activeElement) ? document.activeElement.id : "";
  const open = [...place.querySelectorAll("details")].map((each) => each.open);
  const logs = [...place.querySelectorAll(".log")].map((log) => [
    log.scrollTop, log.scrollTop + log.clientHeight >= log.scrollHeight - 4]);
  place.innerHTML = html;
  place.querySelectorAll("details").forEach((each, at) => {
    if (at < open.length) each.open = open[at];
  });
  place.querySelectorAll(".log").forEach((log, at) => {
    const [top, isAtEnd] = logs[at] ?? [0, true];
    log.scrollTop = isAtEnd ? log.scrollHeight : top;
  });
  place.querySelectorAll("figure").forEach(readable);
  if (focused) document.getElementById(focused)?.focus();
};
const show = (parts) => {
  const wanted = new Set(parts.map((part) => part.name));
  [...main.children].forEach((place) => {
    if (wanted.has(place.dataset.name)) return;
    place.remove();
    shown.delete(place.dataset.name);
  });
  parts.forEach((part, at) => {
    let place = [...main.children].find((each) => each.dataset.name === part.name);
    if (!place) {
      place = document.createElement("div");
      place.dataset.name = part.name;
      place.id = `part-${part.name}`;
    }
    if (main.children[at] !== place) main.insertBefore(place, main.children[at] ?? null);
    if (part.html === undefined || isRead(place)) return;
    replace(place, part.html);
    shown.set(part.name, part.digest);
  });
  const names = chosen().getAll("run");
  main.querySelectorAll("input[name=run]").forEach((box) => {
    box.checked = names.includes(box.value);
  });
};
const look = async () => {
  clearTimeout(timer);
  const own = ++turn;
  const began = performance.now();
  const asked = chosen();
  asked.set("token", token);
  shown.forEach((digest) => asked.append("have", digest));
  try {
    const answer = await fetch(`view?${asked}`, { cache: "no-store" });
    const text = await answer.text();
    if (own !== turn) return;
    if (answer.ok) show(JSON.parse(text).parts);
    say(answer.ok ? "" : text);
  } catch (error) {
    if (own !== turn) return;
    say("the server does not answer; start `shardwise ui` again, and open what it prints");
  }
  // A large run is asked for more seldom: at most a fifth of the time is spent on answers.
  timer = setTimeout(look, Math.max(usual, 4 * (performance.now() - began)));
};
document.addEventListener("change", (event) => {
  const names = chosen().getAll("run");
  if (event.target.name === "run") {
    // A new one comes last, so that the others keep their colours.
    const others = names.filter((name) => name !== event.target.value);
    const next = event.target.checked ? [...others, event.target.value] : others;
    choose(next, chosen().get("rank"));
  }
  if (event.target.name === "rank") choose(names, event.target.value);
});
document.addEventListener("visibilitychange", () => {
  if (document.hidden) clearTimeout(timer);
  else look();
});
addEventListener("hashchange", look);
say("");
look();
