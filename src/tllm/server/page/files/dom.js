// Making elements. Text is always set as text, never as HTML: names of nodes and replies come from elsewhere.

const SVG = "http://www.w3.org/2000/svg";

export const find = (id) => document.getElementById(id);

/** An HTML element with attributes and children; `className` and properties that begin with "on" are set as such. */
export function element(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** The same for SVG. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/** Give an element these children in place of those that it had. */
export function replace(parent, ...children) {
  parent.replaceChildren(...children.flat().filter((child) => child !== null && child !== ""));
}

/** A table of text: its titles and its rows. */
export function table(titles, rows) {
  const cells = (tag, values) => values.map((value) => element(tag, tag === "th" ? { scope: "col" } : {}, value));
  return element(
    "table",
    {},
    element("thead", {}, element("tr", {}, ...cells("th", titles))),
    element("tbody", {}, ...rows.map((row) => element("tr", {}, ...cells("td", row)))),
  );
}

function fill(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null) made.setAttribute(name, value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== ""));
  return made;
}
