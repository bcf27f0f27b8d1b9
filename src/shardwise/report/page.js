"use strict";
// Under the pointer (or finger): the nearest point's value in words, below its plot.
for (const figure of document.querySelectorAll("figure.plot")) {
  const svg = figure.querySelector("svg");
  const readout = figure.querySelector(".readout");
  if (!svg || !readout) continue;
  const points = [...svg.querySelectorAll("circle.point")];
  const usual = readout.textContent;
  let lit = null;
  const light = (point) => {
    if (lit) lit.classList.remove("lit");
    lit = point;
    if (lit) lit.classList.add("lit");
    readout.textContent = lit ? lit.querySelector("title").textContent : usual;
  };
  svg.addEventListener("pointermove", (event) => {
    const here = new DOMPoint(event.clientX, event.clientY);
    const { x, y } = here.matrixTransform(svg.getScreenCTM().inverse());
    let nearest = null;
    let least = Infinity;
    for (const point of points) {
      // The step matters more than the height.
      const dx = 4 * (point.cx.baseVal.value - x);
      const dy = point.cy.baseVal.value - y;
      const far = dx * dx + dy * dy;
      if (far < least) [nearest, least] = [point, far];
    }
    light(nearest);
  });
  svg.addEventListener("pointerleave", () => light(null));
}
// A live report loads itself again; the last one that is written no longer does.
const reload = Number(document.body.dataset.reload);
if (reload > 0) {
  setInterval(() => {
    if (!document.hidden) location.reload();
  }, 1000 * reload);
}
