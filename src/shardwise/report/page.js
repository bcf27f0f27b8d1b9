"use strict";
// Under the pointer, the finger or the arrow keys: what the nearest point says, below its picture.
const readable = (figure) => {
  const svg = figure.querySelector("svg");
  const readout = figure.querySelector(".readout");
  const points = svg ? [...svg.querySelectorAll(".point")] : [];
  if (!readout || !points.length) return;
  const usual = readout.textContent;
  const centres = points.map((point) => {
    const box = point.getBBox();
    return [box.x + box.width / 2, box.y + box.height / 2];
  });
  // Along a line the step matters more than the height; rows lie below each other.
  const across = { point: 1, row: 0 }[svg.dataset.near] ?? 4;
  const axis = across ? 0 : 1;
  const order = points.map((_, place) => place)
    .sort((a, b) => centres[a][axis] - centres[b][axis]);
  let lit = -1;
  const light = (place) => {
    if (lit >= 0) points[lit].classList.remove("lit");
    lit = place;
    if (lit >= 0) points[lit].classList.add("lit");
    readout.textContent = lit >= 0 ? points[lit].querySelector("title").textContent : usual;
  };
  const follow = (event) => {
    const under = points.indexOf(event.target);
    if (under >= 0) return light(under);
    const here = new DOMPoint(event.clientX, event.clientY);
    const { x, y } = here.matrixTransform(svg.getScreenCTM().inverse());
    let nearest = -1;
    let least = Infinity;
    centres.forEach((centre, place) => {
      const far = (across * (centre[0] - x)) ** 2 + (centre[1] - y) ** 2;
      if (far < least) [nearest, least] = [place, far];
    });
    light(nearest);
  };
  svg.addEventListener("pointermove", follow);
  svg.addEventListener("pointerdown", follow);
  svg.addEventListener("pointerleave", (event) => {
    // A finger that is lifted leaves what it pointed at.
    if (event.pointerType !== "touch") light(-1);
  });
  const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
  svg.setAttribute("tabindex", "0");
  svg.addEventListener("keydown", (event) => {
    const last = order.length - 1;
    let place = order.indexOf(lit);
    if (event.key in steps) place = Math.min(last, Math.max(0, place + steps[event.key]));
    else if (event.key === "Home") place = 0;
    else if (event.key === "End") place = last;
    else return;
    event.preventDefault();
    light(order[place]);
  });
  svg.addEventListener("focus", () => {
    if (svg.matches(":focus-visible") && lit < 0) {
      const chosen = points.findIndex((point) => point.classList.contains("chosen"));
      light(chosen >= 0 ? chosen : order[0]);
    }
  });
  svg.addEventListener("blur", () => light(-1));
  readout.setAttribute("aria-live", "polite");
};
document.querySelectorAll("figure").forEach(readable);
// A live report loads itself again; the last one that is written no longer does.
const reload = Number(document.body.dataset.reload);
if (reload > 0) {
  setInterval(() => {
    if (!document.hidden) location.reload();
  }, 1000 * reload);
}
