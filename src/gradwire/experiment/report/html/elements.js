"use strict";
// Elements of the page: nothing is ever parsed as HTML.

const $ = (id) => document.getElementById(id);

/** An element with attributes, listeners (`onclick`) and children. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (typeof value === "boolean" && name.startsWith("aria-"))
      element.setAttribute(name, String(value));
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined)
      element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

const option = (value, text, isChosen) => make("option", { value, selected: isChosen }, text);

function select(name, choices, chosen, onchoose) {
  const list = make("select", {
    "aria-label": name,
    onchange: (event) => onchoose(event.target.value),
  });
  for (const [value, text] of choices) list.append(option(value, text, value === chosen));
  return list;
}

function checkbox(text, isChecked, onchoose) {
  const box = make("input", {
    type: "checkbox",
    onchange: (event) => onchoose(event.target.checked),
  });
  box.checked = isChecked;
  return make("label", {}, box, text);
}

/** A table of text. The first column is text, others are numbers unless listed in `texts`. */
function plainTable(head, rows, { texts = [], caption = "", high = true } = {}) {
  const kind = (column) => (column === 0 || texts.includes(column) ? "text" : null);
  const body = rows.map((row) =>
    make(
      "tr",
      {},
      row.map((cell, column) => make("td", { class: kind(column) }, cell)),
    ),
  );
  const titles = head.map((title, column) =>
    make("th", { scope: "col", class: kind(column) }, title),
  );
  const table = make(
    "table",
    { "aria-label": caption || null },
    make("thead", {}, make("tr", {}, titles)),
    make("tbody", {}, body),
  );
  return make(
    "div",
    {
      class: high ? "scroll high" : "scroll",
      tabindex: "0",
      role: "region",
      "aria-label": caption || "Table",
    },
    table,
  );
}

/** Details that hold a table, which is made when they are opened, and again when data change. */
function tableDetails(title, build) {
  const place = make("div");
  const details = make("details", { ontoggle: () => fill() }, make("summary", {}, title), place);
  const fill = () => place.replaceChildren(...(details.open ? [build()] : []));
  return { details, fill };
}
