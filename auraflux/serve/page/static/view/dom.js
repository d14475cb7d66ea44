// Creates elements. Text enters the page only as text nodes.

export const byId = (id) => document.getElementById(id);

// Create an element. Names that are properties of it are set as properties, others as attributes.
export function el(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined) continue;
    if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  for (const child of children) if (child !== null && child !== undefined) element.append(child);
  return element;
}

// Create one of the icons defined in index.html.
export function icon(name) {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  const use = document.createElementNS(space, "use");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  use.setAttribute("href", `#icon-${name}`);
  svg.append(use);
  return svg;
}

// Create an icon button; the label is its tooltip and its accessible name.
export function iconButton(name, label, onclick) {
  return el("button", { type: "button", className: "icon-button", title: label, ariaLabel: label, onclick }, icon(name));
}

// Change the icon and the label of a button.
export function relabel(button, name, label) {
  button.replaceChildren(icon(name));
  button.title = label;
  button.ariaLabel = label;
}

// Make `wanted` the children of `parent`. Elements already in place are not moved, because moving loses focus and scroll.
export function arrange(parent, wanted) {
  wanted.forEach((element, at) => {
    if (parent.children[at] !== element) parent.insertBefore(element, parent.children[at] ?? null);
  });
  while (parent.children.length > wanted.length) parent.lastElementChild.remove();
}
