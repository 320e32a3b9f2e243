// Tenants and how their quotas stand.

import { empty, fill, h, meter } from "/dashboard/dom.js";
import { count, short } from "/dashboard/format.js";

export class Tenants {
  constructor(root) {
    this.body = h("div", {});
    root.append(h("div", { class: "head" }, h("h2", {}, "Tenants and quotas"), h("p", { class: "muted" }, "what counts within the last minute")), this.body);
  }

  show(status) {
    const open = status.open
      ? h("p", { class: "note" }, "There is no API key yet: any key is accepted, and each is a tenant of its own. ", h("code", {}, "kvgate admin keys add NAME"), " makes the first one.")
      : null;
    if (!status.tenants.length) {
      fill(this.body, open, empty("No tenant is known by name. ", h("code", {}, "kvgate admin tenants add NAME"), " makes one."));
      return;
    }
    const head = ["Tenant", "Requests a minute", "Tokens a minute", "At once", "Context", "Priority", "Class"];
    fill(
      this.body,
      open,
      h(
        "div",
        { class: "card wide" },
        h("table", { class: "stacking" }, h("thead", {}, h("tr", {}, head.map((each) => h("th", { scope: "col" }, each)))), h("tbody", {}, status.tenants.map((each) => row(each, head)))),
      ),
    );
  }
}

function row(each, head) {
  const used = each.usage;
  const cells = [
    use(used?.requests, each.requests_per_min, each, head[1]),
    use(used?.tokens, each.tokens_per_min, each, head[2]),
    use(used?.running, each.concurrency, each, head[3]),
    each.context_tokens === null ? h("span", { class: "muted" }, "no limit") : `${short(each.context_tokens)} tokens`,
    each.priority,
    each.slo,
  ];
  return h(
    "tr",
    {},
    h("th", { scope: "row" }, each.tenant, each.suspended ? h("span", { class: "pill bad" }, "suspended") : null),
    cells.map((cell, number) => h("td", { "data-label": head[number + 1] }, cell)),
  );
}

function use(used, limit, each, label) {
  if (limit === null) return h("span", { class: "muted" }, "no limit");
  if (used === undefined) return h("span", { class: "why" }, `limit ${short(limit)}; use unknown: ${each.problem ?? "not counted"}`);
  const share = used / limit;
  return h("span", { class: "use" }, h("span", {}, h("b", {}, count(used)), ` of ${short(limit)}`), meter(share, `${each.tenant}, ${label}: ${used} of ${limit}`, share >= 1 ? "bad" : share >= 0.8 ? "warn" : "good"));
}
