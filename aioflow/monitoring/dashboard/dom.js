// A page is described by plain objects and brought into the document by comparing it with what stands there, so that focus,
// selection, scrolling and open <details> survive an update each second.
//
// Text only ever becomes a text node or an attribute's value: names of jobs and operators are never read as HTML.

const SVG = "http://www.w3.org/2000/svg";
const FIRST_ONLY = new Set(["open", "value", "checked"]); // What the user changes from then on.

/** An HTML element. `attributes` may hold `key`, `style` (an object) and handlers (`onclick`); children may nest, null is nothing. */
export function h(tag, attributes, ...children) {
  return { tag, space: null, attributes: attributes ?? {}, children: flat(children), key: attributes?.key };
}

/** An SVG element. */
export function s(tag, attributes, ...children) {
  return { tag, space: SVG, attributes: attributes ?? {}, children: flat(children), key: attributes?.key };
}

/** Make the children of `parent` what `children` describe. */
export function render(parent, ...children) {
  sync(parent, flat(children));
}

function flat(children) {
  const found = [];
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false || child === "") continue;
    found.push(typeof child === "object" ? child : { text: String(child) });
  }
  return found;
}

function sync(parent, list) {
  const keyed = new Map();
  for (const node of parent.childNodes) {
    if (node.described?.key !== undefined) keyed.set(node.described.key, node);
  }
  let at = parent.firstChild;
  list.forEach((next, index) => {
    const found = next.key === undefined ? counterpart(at, list, index) : keyed.get(next.key);
    if (found && fits(found, next)) {
      if (next.key === undefined) {
        // What stood before it is in the description no more.
        while (at !== found) at = dropped(at);
      }
      if (found === at) at = at.nextSibling;
      else parent.insertBefore(found, at);
      update(found, next);
      return;
    }
    parent.insertBefore(make(next), at);
  });
  while (at) at = dropped(at);
}

/** The node that becomes `list[index]`: the one at hand, or one behind it unless the one at hand is wanted later. */
function counterpart(at, list, index) {
  if (!at || fits(at, list[index])) return at;
  if (list.slice(index + 1).some((later) => fits(at, later))) return null;
  for (let node = at; node; node = node.nextSibling) {
    if (fits(node, list[index])) return node;
    if (node.described?.key !== undefined) return null;
  }
  return null;
}

function dropped(node) {
  const next = node.nextSibling;
  node.remove();
  return next;
}

function fits(node, next) {
  const before = node.described;
  return before !== undefined && before.tag === next.tag && before.key === next.key;
}

function make(next) {
  if (next.tag === undefined) {
    const node = document.createTextNode(next.text);
    node.described = next;
    return node;
  }
  const node = next.space ? document.createElementNS(next.space, next.tag) : document.createElement(next.tag);
  node.described = { tag: next.tag, key: next.key, attributes: {} };
  update(node, next);
  return node;
}

function update(node, next) {
  const before = node.described;
  node.described = next;
  if (next.tag === undefined) {
    if (before.text !== next.text) node.data = next.text;
    return;
  }
  sync(node, next.children);
  for (const [name, value] of Object.entries(next.attributes)) {
    if (before.attributes[name] !== value) set(node, name, value, before.attributes[name]);
  }
  for (const name of Object.keys(before.attributes)) {
    if (!(name in next.attributes)) set(node, name, null, before.attributes[name]);
  }
}

function set(node, name, value, before) {
  if (name === "key") return;
  if (name.startsWith("on")) {
    node[name] = value;
  } else if (name === "style") {
    // Through the object model: the content security policy forbids style attributes.
    for (const [property, one] of Object.entries(value ?? {})) node.style.setProperty(property, one);
    for (const property of Object.keys(before ?? {})) {
      if (!(property in (value ?? {}))) node.style.removeProperty(property);
    }
  } else if (FIRST_ONLY.has(name)) {
    if (before === undefined && value !== null) node[name] = value;
  } else if (value === null || value === undefined || value === false) {
    node.removeAttribute(name);
  } else {
    node.setAttribute(name, value === true ? "" : value);
  }
}
