// A line chart over time, drawn into an SVG element.

const SVG = "http://www.w3.org/2000/svg";
const EDGE = { left: 46, right: 12, top: 12, bottom: 24 };

function node(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// Returns a step of 1, 2 or 5 times a power of ten, so that about `parts` steps make `most`.
function tick(most, parts) {
  const rough = most / parts;
  const power = 10 ** Math.floor(Math.log10(rough));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
}

export class Chart {
  constructor(svg, { formatY }) {
    this.svg = svg;
    this.formatY = formatY;
  }

  // `lines`: [{ points: [[x, y]], classes, area }]. `scaleX` maps x to 0..1. `ticksX`: [[x, label]].
  draw({ lines, scaleX, ticksX, mostY, ceiling = null, now = null }) {
    const width = this.svg.clientWidth || 600;
    const height = this.svg.clientHeight || 220;
    const inner = { width: width - EDGE.left - EDGE.right, height: height - EDGE.top - EDGE.bottom };
    const x = (value) => EDGE.left + scaleX(value) * inner.width;
    const y = (value) => EDGE.top + (1 - Math.min(1, value / mostY)) * inner.height;
    const made = [];
    const step = tick(mostY, 4);
    for (let value = 0; value <= mostY * 1.001; value += step) {
      made.push(node("line", { class: "grid", x1: EDGE.left, x2: width - EDGE.right, y1: y(value), y2: y(value) }));
      made.push(node("text", { class: "tick", x: EDGE.left - 6, y: y(value) + 4, "text-anchor": "end" }, this.formatY(value)));
    }
    for (const [value, label] of ticksX) {
      made.push(node("text", { class: "tick", x: x(value), y: height - 7, "text-anchor": "middle" }, label));
    }
    if (ceiling !== null) {
      made.push(node("line", { class: "ceiling", x1: EDGE.left, x2: width - EDGE.right, y1: y(ceiling), y2: y(ceiling) }));
    }
    if (now !== null) {
      made.push(node("line", { class: "now", x1: x(now), x2: x(now), y1: EDGE.top, y2: height - EDGE.bottom }));
    }
    for (const { points, classes, area } of lines) {
      if (!points.length) continue;
      const path = points.map(([px, py], index) => `${index ? "L" : "M"}${x(px).toFixed(1)} ${y(py).toFixed(1)}`).join("");
      if (area) {
        const [first, last] = [points[0][0], points.at(-1)[0]];
        made.push(node("path", { class: `area ${classes}`, d: `${path}L${x(last).toFixed(1)} ${y(0)}L${x(first).toFixed(1)} ${y(0)}Z` }));
      }
      made.push(node("path", { class: `line ${classes}`, d: path }));
    }
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.replaceChildren(...made);
  }
}

// Returns about `parts` ticks [value, label] for 0..most seconds.
export function timeTicks(most, parts, format) {
  const step = tick(most, parts);
  return Array.from({ length: Math.floor(most / step + 0.001) }, (_, index) => [(index + 1) * step, format((index + 1) * step)]);
}

// Returns the top of a chart for values up to `most`.
export const roundUp = (most) => Math.ceil(most / tick(most, 4)) * tick(most, 4);
