// Elements without markup: texts are only ever set as text, so nothing that an instance says can become part of the page.

export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "width%") element.style.width = `${Math.max(0, Math.min(100, value))}%`;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((each) => each !== null && each !== undefined && each !== false));
  return element;
}

// Swaps what is in an element; who had the focus there has it again, when there is still one with that id.
export function fill(element, ...children) {
  const focused = element.contains(document.activeElement) ? document.activeElement.id : "";
  element.replaceChildren(...children.flat().filter((each) => each !== null && each !== undefined && each !== false));
  if (focused) document.getElementById(focused)?.focus();
}

export function empty(...words) {
  return h("p", { class: "empty" }, ...words);
}

export function meter(share, label, tone = "") {
  const percent = Math.round(Math.max(0, Math.min(1, share)) * 100);
  return h(
    "span",
    { class: `meter ${tone}`, role: "meter", "aria-valuemin": 0, "aria-valuemax": 100, "aria-valuenow": percent, "aria-label": label },
    h("span", { "width%": percent }),
  );
}
