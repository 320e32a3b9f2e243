// The fleet map, the headline numbers and the charts.

import { Chart } from "/dashboard/chart.js";
import { empty, fill, h, meter } from "/dashboard/dom.js";
import { bytes, count, DASH, percent, plural, rate, seconds, short, words } from "/dashboard/format.js";
import { failed, served, total } from "/dashboard/series.js";

const MOST_MODELS = 3;

export class Overview {
  constructor(root, { signIn }) {
    this.signIn = signIn;
    this.opened = new Set(); // instances all of whose models are shown
    this.numbers = h("dl", { class: "numbers" });
    this.legend = h("p", { class: "bar-legend muted" });
    this.map = h("div", { class: "map" });
    this.outcomes = h("div");
    this.charts = [
      new Chart({
        title: "Requests", note: "that ended, a second", format: rate,
        lines: [{ label: "served", colour: "--good", fill: true }, { label: "failed or refused", colour: "--bad" }],
      }),
      new Chart({
        title: "Time to the first token", note: "of streams, from their arrival here", format: seconds,
        lines: [{ label: "median", colour: "--accent", fill: true }, { label: "99th percentile", colour: "--warn" }],
      }),
      new Chart({
        title: "Prompt tokens found in caches", note: "share, over 10 s", format: percent, top: 1,
        lines: [{ label: "found by engines", colour: "--hbm", fill: true }, { label: "expected by routing", colour: "--muted", dash: [4, 3] }],
      }),
      new Chart({
        title: "Requests at work", note: "at each moment", format: short, whole: true,
        lines: [{ label: "at instances", colour: "--ddr", fill: true }, { label: "waiting here", colour: "--nvme" }],
      }),
    ];
    this.traffic = h("div", { class: "charts" }, this.charts.map((each) => each.element));
    this.locked = h(
      "div",
      { class: "card locked" },
      h("p", {}, "Traffic, cache tiers, tenants, policies and explanations are for administrators."),
      h("button", { type: "button", class: "primary", onclick: () => this.signIn() }, "Sign in"),
    );
    this.worker = h("p", { class: "muted" });
    root.append(
      this.numbers,
      h("div", { class: "head" }, h("h2", {}, "Fleet"), this.legend),
      this.map,
      h("div", { class: "head" }, h("h2", {}, "Traffic"), this.worker),
      this.locked,
      this.traffic,
      h("div", { class: "head" }, h("h2", {}, "How requests ended"), h("p", { class: "muted" }, "since this gateway started")),
      this.outcomes,
    );
  }

  show(status, series, signedIn) {
    this.locked.hidden = signedIn;
    this.traffic.hidden = !signedIn;
    fill(this.numbers, numbers(status, series, signedIn));
    fill(this.map, status.instances.length ? status.instances.map((each) => instanceCard(each, this.opened)) : empty("No instance is configured. Name one in the settings (", h("code", {}, "instances"), "), or add one with ", h("code", {}, "kvgate admin instances add"), "."));
    fill(this.legend, ...(status.instances.some((each) => each.tiers && Object.keys(each.tiers).length) ? [h("span", { class: "key" }, h("i", { class: "sample cached" }), "cached"), h("span", { class: "key" }, h("i", { class: "sample busy" }), "in use"), h("span", { class: "key" }, h("i", { class: "sample" }), "free")] : []));
    fill(this.worker, status.worker ? `worker ${status.worker.own + 1} of ${status.worker.count}: what this one handles` : signedIn ? "the last ten minutes" : "");
    fill(this.outcomes, outcomes(status.outcomes));
    if (!signedIn) return;
    const times = series.times;
    this.charts[0].show(times, [series.column(served), series.column(failed)]);
    this.charts[1].show(times, [series.column((each) => each.ttft_p50_s), series.column((each) => each.ttft_p99_s)]);
    this.charts[2].show(times, [series.rolling("cached_tokens", "known_tokens"), series.rolling("expected_tokens", "known_tokens")]);
    this.charts[3].show(times, [series.column((each) => each.in_flight), series.column((each) => each.waiting)]);
  }

  redraw() {
    for (const each of this.charts) if (each.plot) each.draw();
  }
}

function numbers(status, series, signedIn) {
  const all = status.instances.length;
  const shown = [["Instances usable", `${status.usable} of ${all}`, status.usable < all || !all ? "warn" : ""]];
  const inFlight = status.instances.reduce((sum, each) => sum + each.in_flight, 0);
  if (signedIn) {
    const last = series.last;
    const latest = (read) => series.intervals.slice(-5).map(read).filter((each) => each !== null).at(-1) ?? null;
    const lately = series.intervals.slice(-5);
    const perS = lately.length ? lately.reduce((sum, each) => sum + total(each), 0) / lately.length : null;
    shown.push(
      ["Requests a second", last ? rate(perS) : DASH],
      ["First token, median", seconds(latest((each) => each.ttft_p50_s))],
      ["Found in caches", percent(series.recent("cached_tokens", "known_tokens"))],
      ["In flight", count(inFlight)],
      ["Waiting", count(status.waiting), status.waiting ? "warn" : ""],
    );
  } else {
    shown.push(["In flight", count(inFlight)]);
  }
  shown.push(["Routing", words(status.policy)]);
  return shown.map(([name, value, tone = ""]) => h("div", { class: tone }, h("dt", {}, name), h("dd", {}, value)));
}

function outcomes(counts) {
  const all = Object.values(counts).reduce((sum, each) => sum + each, 0);
  if (!all) return empty("No request has ended yet.");
  return h(
    "ul",
    { class: "card outcomes" },
    Object.entries(counts)
      .filter(([name, value]) => value || name === "ok")
      .map(([name, value]) => h("li", {}, h("span", {}, words(name)), meter(value / all, `${words(name)}: ${percent(value / all)}`, name === "ok" ? "good" : name === "client_error" || name === "cancelled" ? "" : "bad"), h("b", {}, count(value)))),
  );
}

function instanceCard(each, opened) {
  const state = each.draining ? "draining" : each.state;
  const troubled = each.state !== "healthy" || each.draining || (each.breaker && each.breaker !== "closed");
  return h(
    "article",
    { class: `card instance ${state}`, "aria-label": `Instance ${each.id}, ${state}` },
    h(
      "header",
      {},
      h("span", { class: `state ${state}` }, state),
      h("h3", {}, each.id),
      h("span", { class: "pill" }, each.role ?? "role unknown"),
    ),
    h("div", { class: "where muted" }, models(each, opened), h("span", { class: "mono" }, each.url)),
    load(each),
    tiers(each),
    troubled && h("p", { class: "why" }, why(each)),
    each.query_tokens ? h("p", { class: "muted" }, `${percent(each.hit_tokens / each.query_tokens)} of ${short(each.query_tokens)} prompt tokens found in its prefix cache since its start`) : null,
  );
}

// A card is made anew every two seconds: who opened it finds it open.
function models(each, opened) {
  const first = each.models.slice(0, MOST_MODELS).join(", ");
  const rest = each.models.slice(MOST_MODELS);
  if (!rest.length) return h("span", {}, first || "serves nothing yet");
  const note = (event) => (event.target.open ? opened.add(each.id) : opened.delete(each.id));
  return h(
    "details",
    { class: "models", open: opened.has(each.id), ontoggle: note },
    h("summary", { id: `models-of-${each.id}` }, h("span", {}, first), " ", h("span", { class: "more" }, `+${count(rest.length)} more`)),
    h("p", {}, rest.join(", ")),
  );
}

function why(each) {
  if (each.breaker && each.breaker !== "closed") return `Its breaker is ${words(each.breaker)}: ${each.breaker_reason}`;
  if (each.leaving) return "It leaves: finishes what it has, then it is forgotten.";
  if (each.draining) return "It finishes what it has and is given nothing new.";
  return each.reason || "No reason was given.";
}

function load(each) {
  const limit = each.request_limit;
  const parts = [plural(each.in_flight, "request") + " from here"];
  if (each.running !== null && each.running !== undefined) parts.push(`${count(each.running)} running`, `${count(each.waiting)} waiting`);
  return h(
    "div",
    { class: "load" },
    h("span", {}, parts.join(" · ")),
    limit ? h("span", { class: each.in_flight >= limit ? "pill bad" : "muted" }, each.in_flight >= limit ? `at its limit of ${count(limit)}` : `limit ${count(limit)}`) : null,
  );
}

const ORDER = ["HBM", "DDR", "NVME", "REMOTE"];

function tiers(each) {
  const known = Object.entries(each.tiers ?? {}).sort(([one], [other]) => ORDER.indexOf(one) - ORDER.indexOf(other));
  if (known.length) return h("div", { class: "tiers" }, known.map(([name, held]) => tier(name, held)));
  const resident = Object.entries(each.resident_blocks ?? {});
  if (resident.length) return h("p", { class: "muted" }, `holds ${resident.map(([name, blocks]) => `${plural(blocks, "block")} in ${name}`).join(", ")}`);
  return h("p", { class: "muted" }, each.tiers ? "Its engine does not report cache tiers." : "No cached block is known of.");
}

function tier(name, held) {
  const capacity = held.capacity_blocks;
  const cached = Math.min(held.cached_blocks, held.used_blocks);
  const busy = Math.max(0, held.used_blocks - cached);
  const share = (blocks) => (capacity ? (blocks / capacity) * 100 : 0);
  const size = held.block_bytes ? `${bytes(held.used_blocks * held.block_bytes)} of ${bytes(capacity * held.block_bytes)}` : `${count(held.used_blocks)} of ${plural(capacity, "block")}`;
  const label = `${name}: ${count(cached)} blocks cached, ${count(busy)} in use, ${count(Math.max(0, capacity - held.used_blocks))} free`;
  return h(
    "div",
    { class: `tier ${name.toLowerCase()}` },
    h("span", { class: "name" }, name),
    h("span", { class: "stack", role: "img", "aria-label": label, title: label }, h("span", { class: "cached", "width%": share(cached) }), h("span", { class: "busy", "width%": share(busy) })),
    h("span", { class: "size" }, capacity ? size : "empty"),
  );
}
