// Where a prompt would go now, and why. Asking changes nothing.

import { fill, h } from "/dashboard/dom.js";
import { count, DASH, percent, plural, seconds, words } from "/dashboard/format.js";
import { admin } from "/dashboard/gateway.js";

export class Explain {
  constructor(root) {
    this.model = h("select", { id: "explain-model", required: true });
    this.tenant = h("input", { id: "explain-tenant", value: "anonymous", list: "explain-tenants", spellcheck: "false", autocomplete: "off", required: true });
    this.tenants = h("datalist", { id: "explain-tenants" });
    this.form = h("select", { id: "explain-form" }, h("option", { value: "messages" }, "One chat message"), h("option", { value: "prompt" }, "Plain text"));
    this.prompt = h("textarea", { id: "explain-prompt", rows: 6, required: true, placeholder: "The prompt, as a client would send it" });
    this.result = h("div", { role: "status", "aria-live": "polite" });
    root.append(
      h("div", { class: "head" }, h("h2", {}, "Where would this prompt go?"), h("p", { class: "muted" }, "asking changes nothing")),
      h(
        "form",
        { class: "card", id: "explain-box", onsubmit: (event) => this.ask(event) },
        h("div", { class: "row fields" }, h("div", { class: "grow" }, h("label", { for: "explain-model" }, "Model"), this.model), h("div", {}, h("label", { for: "explain-tenant" }, "Tenant"), this.tenant, this.tenants), h("div", {}, h("label", { for: "explain-form" }, "As"), this.form)),
        h("label", { for: "explain-prompt" }, "Prompt"),
        this.prompt,
        h("div", { class: "row end" }, h("button", { type: "submit", class: "primary" }, "Explain")),
      ),
      this.result,
    );
  }

  show(status) {
    const models = [...new Set(status.instances.flatMap((each) => each.models))].sort();
    if (models.join() !== this.models) {
      this.models = models.join();
      const chosen = this.model.value;
      fill(this.model, models.length ? models.map((each) => h("option", { value: each, selected: each === chosen }, each)) : h("option", { value: "" }, "no model is served"));
    }
    const names = status.tenants.map((each) => each.tenant);
    if (names.join() !== this.names) {
      this.names = names.join();
      fill(this.tenants, names.map((each) => h("option", { value: each })));
    }
  }

  async ask(event) {
    event.preventDefault();
    const text = this.prompt.value;
    const prompt = this.form.value === "messages" ? { messages: [{ role: "user", content: text }] } : { prompt: text };
    try {
      const said = await admin("POST", "/explain", { body: { model: this.model.value, tenant: this.tenant.value, ...prompt } });
      fill(this.result, answer(said));
    } catch (error) {
      fill(this.result, h("p", { class: "problem" }, error.message));
    }
  }
}

function answer(said) {
  const known = { tokens: "known by its tokens", text: "known by its text", hashes: "known by its blocks", none: "without a fingerprint" }[said.fingerprint];
  const size = said.prompt_tokens === null ? "Its length is not known" : plural(said.prompt_tokens, "token");
  const share = said.prompt_tokens ? ` (${percent(said.matched_tokens / said.prompt_tokens)})` : "";
  return [
    h(
      "div",
      { class: "card verdict" },
      h("p", { class: "big" }, said.instance ? ["To ", h("b", {}, said.instance)] : "Nowhere: no instance can take it"),
      h("p", {}, `${sentence(words(said.reason))}${said.basis ? `, by ${words(said.basis)}` : ""}. ${size}, ${known}; ${count(said.matched_tokens)} of them cached there${share}. ${said.predicted_ttft_s === null ? "When its first token comes is not predicted" : `Its first token is expected after ${seconds(said.predicted_ttft_s)}`}. Routing policy: ${words(said.policy)}.`),
      said.separation ? h("p", {}, `${said.separation.prefill} would compute the prompt: ${words(said.separation.reason)}${said.separation.transport ? `, handed over by ${words(said.separation.transport)}` : ""}.`) : null,
    ),
    said.candidates.length ? candidates(said) : null,
    said.left_out.length
      ? [h("div", { class: "head" }, h("h2", {}, "Left out")), h("ul", { class: "card plain" }, said.left_out.map((each) => h("li", {}, h("b", {}, each.instance), ` ${each.why}`)))]
      : null,
    said.plan ? h("details", { class: "card" }, h("summary", {}, "What would be done, step by step"), h("pre", {}, said.plan)) : null,
  ].filter(Boolean).flat();
}

const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1);

function candidates(said) {
  const terms = [...new Set(said.candidates.flatMap((each) => Object.keys(each.cost_s)))];
  const most = Math.max(1e-9, ...said.candidates.map((each) => each.total_s ?? 0));
  const head = ["Instance", "Cached there", "In flight", "Cost", ""];
  return [
    h("div", { class: "head" }, h("h2", {}, "Candidates"), h("p", { class: "legend" }, terms.map((each, number) => h("span", { class: "key" }, h("i", { class: "swatch", "data-term": number % 6 }), words(each.replace(/_s$/, "")))))),
    h(
      "div",
      { class: "card wide" },
      h(
        "table",
        { class: "stacking" },
        h("thead", {}, h("tr", {}, head.map((each) => h("th", { scope: "col" }, each)))),
        h(
          "tbody",
          {},
          said.candidates.map((each) =>
            h(
              "tr",
              { class: each.chosen ? "chosen" : "" },
              h("th", { scope: "row" }, each.instance, each.chosen ? h("span", { class: "pill good" }, "chosen") : null),
              h("td", { "data-label": head[1] }, `${plural(each.matched_tokens, "token")}${where(each.tokens_by_tier)}`),
              h("td", { "data-label": head[2] }, count(each.in_flight)),
              h("td", { "data-label": head[3] }, each.total_s === null ? DASH : seconds(each.total_s)),
              h("td", { class: "cost" }, h("span", { class: "stack", role: "img", "aria-label": terms.map((term) => `${words(term)} ${seconds(each.cost_s[term] ?? 0)}`).join(", "), title: terms.map((term) => `${words(term)} ${seconds(each.cost_s[term] ?? 0)}`).join(", ") }, terms.map((term, number) => h("span", { "data-term": number % 6, "width%": ((each.cost_s[term] ?? 0) / most) * 100 })))),
            ),
          ),
        ),
      ),
    ),
  ];
}

function where(tokens) {
  const tiers = Object.entries(tokens).filter(([, value]) => value);
  return tiers.length ? ` (${tiers.map(([name, value]) => `${name} ${count(value)}`).join(", ")})` : "";
}

