// Elements made and kept up to date. Text goes in as text only: what clients and engines say is never markup.

const SVG = "http://www.w3.org/2000/svg";

/** An element with attributes and children; a string among the children is text, null is nothing. */
export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** The same for SVG. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) setAttribute(element, name, value);
  element.append(...children.filter((child) => child !== null));
  return element;
}

/** Sets an attribute, or removes it for null and false, and touches nothing that is so already. */
export function setAttribute(element, name, value) {
  if (value === null || value === false || value === undefined) {
    if (element.hasAttribute(name)) element.removeAttribute(name);
  } else if (element.getAttribute(name) !== String(value)) {
    element.setAttribute(name, value === true ? "" : String(value));
  }
}

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** A style by way of the object model, which the page's policy allows; style attributes it does not. */
export function setStyle(element, name, value) {
  if (element.style.getPropertyValue(name) !== value) element.style.setProperty(name, value);
}

/**
 * Makes the children of `parent` those of `items`, in their order: an item's element is made once, by `create`, found
 * again by its key, and brought up to date by `update(element, item)`. What does not move is not touched, so that
 * focus, selection and scrolling stay.
 */
export function reconcile(parent, items, keyOf, create, update) {
  const known = (parent.elementsByKey ??= new Map());
  const wanted = new Map();
  for (const item of items) {
    const key = keyOf(item);
    const element = known.get(key) ?? create(item);
    wanted.set(key, element);
    update(element, item);
  }
  for (const [key, element] of known) if (!wanted.has(key)) element.remove();
  let next = parent.firstElementChild;
  for (const element of wanted.values()) {
    if (element === next) next = next.nextElementSibling;
    else parent.insertBefore(element, next);
  }
  parent.elementsByKey = wanted;
}
