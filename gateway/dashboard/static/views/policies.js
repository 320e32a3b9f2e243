// Which policies run, what others would have found, and the swap: on all instances or on none.

import { empty, fill, h } from "/dashboard/dom.js";
import { percent, plural, words } from "/dashboard/format.js";
import { admin } from "/dashboard/gateway.js";
import { parse, render } from "/dashboard/spec.js";

const KINDS = { eviction: "Eviction from HBM", "eviction:ddr": "Eviction from DDR", "eviction:nvme": "Eviction from NVMe", schedule: "Order of the waiting queue", shadow: "Shadows" };

export class Policies {
  constructor(root, { confirm }) {
    this.confirm = confirm;
    this.policies = null;
    this.turn = 0;
    this.problem = h("div", { role: "alert" });
    this.running = h("div", {});
    this.shadows = h("div", {});
    this.kind = h("select", { id: "swap-kind", name: "kind", onchange: () => this.describe() });
    this.name = h("input", { id: "swap-name", name: "name", list: "swap-names", autocomplete: "off", spellcheck: "false", placeholder: "s3fifo or mq(lifetime=2)", required: true, oninput: () => this.describe() });
    this.names = h("datalist", { id: "swap-names" });
    this.about = h("p", { class: "muted", id: "swap-about" });
    this.button = h("button", { type: "submit", class: "primary", disabled: true }, "Swap"); // until it is known what runs
    this.result = h("div", { role: "status" });
    this.swapForm = h(
      "form",
      { class: "card", id: "swap-form", onsubmit: (event) => this.asked(event) },
      h("div", { class: "row fields" }, h("div", {}, h("label", { for: "swap-kind" }, "What it decides"), this.kind), h("div", { class: "grow" }, h("label", { for: "swap-name" }, "Policy"), this.name, this.names), this.button),
      this.about,
      this.result,
    );
    this.follow = h("input", { id: "follow", name: "follow", spellcheck: "false", autocomplete: "off", placeholder: "lru,s3fifo,adaptive" });
    this.followResult = h("div", { role: "status" });
    this.followForm = h(
      "form",
      { class: "card", id: "follow-form", onsubmit: (event) => this.followed(event) },
      h("div", { class: "row fields" }, h("div", { class: "grow" }, h("label", { for: "follow" }, "Candidates that are followed beside the policy in charge, with commas; empty is none"), this.follow), h("button", { type: "submit" }, "Follow")),
      this.followResult,
    );
    root.append(
      this.problem,
      h("div", { class: "head" }, h("h2", {}, "In charge"), h("p", { class: "muted" }, "what each instance runs")),
      this.running,
      h("div", { class: "head" }, h("h2", {}, "Shadow comparison"), h("p", { class: "muted" }, "blocks that each policy found, or would have found, in HBM")),
      this.shadows,
      this.followForm,
      h("div", { class: "head" }, h("h2", {}, "Swap a policy"), h("p", { class: "muted" }, "on all instances or on none; cached blocks stay")),
      this.swapForm,
    );
  }

  // An answer that a later question has overtaken is dropped: it may be older than a swap.
  async refresh() {
    const turn = ++this.turn;
    const [policies, shadows] = await Promise.all([admin("GET", "/policies"), admin("GET", "/policies/shadow")]);
    if (turn !== this.turn) return;
    this.policies = policies;
    this.show(policies, shadows);
  }

  show(policies, shadows) {
    const said = JSON.stringify([policies, shadows]);
    if (said === this.said) return;
    this.said = said;
    fill(this.problem);
    if (!this.swapping) this.button.disabled = false;
    fill(this.running, running(policies));
    fill(this.shadows, this.standings(policies, shadows));
    const kinds = [...new Set(Object.values(policies.instances).flatMap((each) => each.running.map((one) => one.kind)))].filter((each) => each !== "shadow").sort();
    const chosen = this.kind.value;
    fill(this.kind, (kinds.length ? kinds : ["eviction"]).map((each) => h("option", { value: each, selected: each === chosen }, KINDS[each] ?? each)));
    this.describe();
    if (document.activeElement !== this.follow) {
      const followed = policies.data.find((each) => each.kind === "shadow")?.name ?? Object.values(policies.instances).flatMap((each) => each.running).find((each) => each.kind === "shadow")?.name;
      if (followed !== undefined && !this.follow.value) this.follow.value = followed;
    }
  }

  known() {
    const kind = this.kind.value;
    const list = kind.startsWith("eviction") ? "available" : kind === "schedule" ? "strategies" : "";
    return Object.assign({}, ...Object.values(this.policies?.instances ?? {}).map((each) => each[list]));
  }

  describe() {
    const known = this.known();
    fill(this.names, Object.keys(known).sort().map((each) => h("option", { value: each })));
    const about = known[this.name.value.split("(")[0].trim()];
    const now = this.now(this.kind.value);
    fill(this.about, about ? `${this.name.value.split("(")[0].trim()}: ${about}` : now.length ? `Now: ${now.join(", ")}` : "No instance says what it runs.");
  }

  now(kind) {
    return [...new Set(Object.values(this.policies?.instances ?? {}).flatMap((each) => each.running.filter((one) => one.kind === kind).map(render)))];
  }

  standings(policies, shadows) {
    if (!Object.keys(shadows.instances).length) return empty("No instance with policies is usable now.");
    const problems = Object.entries(shadows.instances).filter(([, each]) => each.problem).map(([name, each]) => h("p", { class: "problem" }, `${name}: ${each.problem}`));
    if (!shadows.candidates.length) return [...problems, empty("No candidates are followed. Name some below: each sees the same requests as the policy in charge, and costs a little of one core.")];
    const inCharge = new Set(Object.values(shadows.instances).map((each) => each.in_charge).filter(Boolean));
    const best = shadows.candidates[0]?.hit_ratio;
    return [
      ...problems,
      h(
        "ol",
        { class: "card standings" },
        shadows.candidates.map((each, place) => {
          const verdict = shadows.leads.find((one) => one.policy === each.policy)?.verdict;
          const running = this.now("eviction").includes(each.policy) || (inCharge.has(each.policy) && !each.policy.includes("("));
          return h(
            "li",
            { class: running ? "running" : "" },
            h("span", { class: "who" }, h("b", { class: "mono" }, each.policy), running ? h("span", { class: "pill" }, "in charge") : verdict ? h("span", { class: "pill" }, verdict) : null),
            h("span", { class: "bar", role: "img", "aria-label": `${each.policy} found ${percent(each.hit_ratio)}` }, h("span", { class: place === 0 && best && verdict !== "tie" ? "best" : "", "width%": (each.hit_ratio ?? 0) * 100 })),
            h("b", { class: "share" }, percent(each.hit_ratio)),
            h("span", { class: "muted of" }, `of ${plural(each.lookups, "look-up")}`),
            running ? h("span", { class: "action" }) : h("button", { type: "button", class: "action", id: `swap-to-${place}`, onclick: () => this.swap("eviction", each.policy) }, "Swap to this"),
          );
        }),
      ),
    ];
  }

  async asked(event) {
    event.preventDefault();
    await this.swap(this.kind.value, this.name.value);
  }

  async swap(kind, text) {
    let policy;
    try {
      policy = parse(text);
    } catch (error) {
      this.say(this.result, "problem", error.message);
      return;
    }
    const instances = Object.keys(this.policies?.instances ?? {});
    const before = this.now(kind).join(", ") || "what runs now";
    if (!(await this.confirm(`Swap to ${render(policy)}?`, `${KINDS[kind] ?? kind}: ${before} becomes ${render(policy)} on ${plural(instances.length, "instance")}. If one of them refuses, all stay as they are. Cached blocks stay.`))) return;
    this.swapping = this.button.disabled = true;
    this.say(this.result, "muted", "Asking all instances…");
    const [tone, outcome] = await this.told(kind, policy);
    this.said = "";
    await this.refresh().catch((error) => this.say(this.problem, "problem", error.message)); // the next swap is from this version
    this.swapping = this.button.disabled = false;
    this.say(this.result, tone, outcome);
  }

  async told(kind, policy) {
    try {
      const done = await admin("PUT", `/policies/${encodeURIComponent(kind)}`, { body: policy, headers: this.condition(kind) });
      const steps = Object.entries(done.instances).map(([name, each]) => `${name} ${words(each.step)}`);
      return ["done", `Done: ${render(policy)} is in charge (${steps.join(", ")}).`];
    } catch (error) {
      return ["problem", error.message];
    }
  }

  // Only the version that was seen here is changed: who else changed it meanwhile is not overwritten.
  condition(kind) {
    const known = this.policies?.data.find((each) => each.kind === kind);
    return known ? { "if-match": `"${known.version}"` } : { "if-none-match": "*" };
  }

  async followed(event) {
    event.preventDefault();
    const name = this.follow.value.trim();
    try {
      await admin("PUT", "/policies/shadow", { body: { name, params: {} }, headers: this.condition("shadow") });
      this.said = "";
      await this.refresh();
      this.say(this.followResult, "done", name ? "They are followed from now on." : "None is followed from now on.");
    } catch (error) {
      this.say(this.followResult, "problem", error.message);
    }
  }

  say(where, tone, text) {
    fill(where, h("p", { class: tone }, text));
  }
}

function running(policies) {
  const instances = Object.entries(policies.instances);
  if (!instances.length) return empty("No instance with policies is usable now.");
  const kinds = [...new Set(instances.flatMap(([, each]) => each.running.map((one) => one.kind)))].filter((each) => each !== "shadow").sort();
  const problems = instances.flatMap(([name, each]) => [each.problem, ...each.problems].filter(Boolean).map((text) => h("p", { class: "problem" }, `${name}: ${text}`)));
  if (!kinds.length) return [...problems, empty("No instance says which policies it runs.")];
  return [
    ...problems,
    h(
      "div",
      { class: "card wide" },
      h(
        "table",
        { class: "stacking" },
        h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Instance"), kinds.map((each) => h("th", { scope: "col" }, KINDS[each] ?? each)))),
        h(
          "tbody",
          {},
          instances.map(([name, each]) =>
            h("tr", {}, h("th", { scope: "row" }, name), kinds.map((kind) => {
              const one = each.running.find((policy) => policy.kind === kind);
              return h("td", { "data-label": KINDS[kind] ?? kind }, one ? h("span", { class: "mono" }, render(one)) : h("span", { class: "muted" }, "none"));
            })),
          ),
        ),
      ),
    ),
  ];
}
