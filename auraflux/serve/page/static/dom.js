// Makes elements. Text only ever enters the page as text nodes.

export const byId = (id) => document.getElementById(id);

// Make an element; properties that the element has are set as such, the others as attributes.
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

// Draw one of the icons that index.html holds.
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

// Make a button that shows an icon and says its label to those who point at it or listen.
export function iconButton(name, label, onclick) {
  return el("button", { type: "button", className: "icon-button", title: label, ariaLabel: label, onclick }, icon(name));
}

// Show another icon on a button, with the label that goes with it.
export function relabel(button, name, label) {
  button.replaceChildren(icon(name));
  button.title = label;
  button.ariaLabel = label;
}

// Make `parent` hold exactly `wanted`, leaving alone what is in its place: a moved element loses focus and scroll.
export function arrange(parent, wanted) {
  wanted.forEach((element, at) => {
    if (parent.children[at] !== element) parent.insertBefore(element, parent.children[at] ?? null);
  });
  while (parent.children.length > wanted.length) parent.lastElementChild.remove();
}
