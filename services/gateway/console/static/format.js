// Formats of numbers and times.

export function count(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value >= 1e6) return `${(value / 1e6).toFixed(value >= 1e7 ? 0 : 1)}M`;
  if (value >= 1e4) return `${(value / 1e3).toFixed(value >= 1e5 ? 0 : 1)}k`;
  return value >= 100 || Number.isInteger(value) ? Math.round(value).toLocaleString("en") : value.toFixed(1);
}

export function share(value) {
  return value === null || Number.isNaN(value) ? "–" : `${(100 * value).toFixed(value > 0 && value < 0.1 ? 1 : 0)}%`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.0995) return `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)} ms`;
  if (value < 9.95) return `${value.toFixed(1)} s`;
  if (value < 120) return `${Math.round(value)} s`;
  if (value < 7200) return `${Math.round(value / 60)} min`;
  return `${(value / 3600).toFixed(1)} h`;
}

// The probability of a token. Small probabilities such as 0.0004 are not rounded to 0%.
export function probability(value) {
  const percent = 100 * value;
  if (percent >= 99.95) return "100%";
  if (percent < 0.01) return "<0.01%";
  return `${percent.toFixed(percent < 1 ? 2 : 1)}%`;
}

// Creates an element with classes and text. The text is never parsed as HTML.
export function element(name, classes = "", text = null) {
  const made = document.createElement(name);
  if (classes) made.className = classes;
  if (text !== null) made.textContent = text;
  return made;
}
