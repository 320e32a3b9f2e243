// Wires the page: which view is shown, who is signed in, and asking the gateway every two seconds.

import { h, fill } from "/dashboard/dom.js";
import { count, plural } from "/dashboard/format.js";
import { admin, call, session } from "/dashboard/gateway.js";
import { Series } from "/dashboard/series.js";
import { Explain } from "/dashboard/views/explain.js";
import { Overview } from "/dashboard/views/overview.js";
import { Policies } from "/dashboard/views/policies.js";
import { Tenants } from "/dashboard/views/tenants.js";

const EVERY_MS = 2000;
const POLICIES_EVERY_MS = 10000;
const PUBLIC = ["overview"];

const find = (id) => document.getElementById(id);
const series = new Series();
const overview = new Overview(find("view-overview"), { signIn: askKey });
const tenants = new Tenants(find("view-tenants"));
const policies = new Policies(find("view-policies"), { confirm: confirmed });
const explain = new Explain(find("view-explain"));
const views = ["overview", "tenants", "policies", "explain"];
let policiesAt = 0;
let answeredAt = null;
let asked = false;
let rounds = Promise.resolve();
let answer = () => {};

function chosenView() {
  const name = location.hash.slice(1);
  return views.includes(name) && (session.key || PUBLIC.includes(name)) ? name : "overview";
}

function showView() {
  const wanted = location.hash.slice(1);
  if (views.includes(wanted) && !PUBLIC.includes(wanted) && !session.key) askKey();
  const name = chosenView();
  for (const each of views) {
    find(`view-${each}`).hidden = each !== name;
    const link = document.querySelector(`nav a[href="#${each}"]`);
    if (each === name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (name === "policies") policiesAt = 0;
}

function banner(text) {
  const place = find("banner");
  if (place.textContent !== text) place.textContent = text;
  place.hidden = !text;
}

async function once() {
  try {
    const signedIn = Boolean(session.key);
    const status = signedIn ? await admin("GET", `/status?after=${series.after}&process=${series.process}`) : await call("GET", "/dashboard/fleet");
    if (signedIn) series.add(status.process, status.intervals);
    answeredAt = Date.now();
    overview.show(status, series, signedIn);
    if (signedIn) {
      tenants.show(status);
      explain.show(status);
    }
    document.title = `${status.usable} of ${plural(status.instances.length, "instance")} usable · kvgate`;
    let problem = "";
    if (signedIn && chosenView() === "policies" && Date.now() - policiesAt >= POLICIES_EVERY_MS) {
      policiesAt = Date.now();
      await policies.refresh().catch((error) => {
        if (error.status === 401) throw error;
        problem = `Policies can't be shown: ${error.message}`;
      });
    }
    banner(problem);
  } catch (error) {
    if (error.status === 401 && session.key) {
      leave();
      askKey(`The gateway does not take this key any more: ${error.message}.`);
    } else if (error.status === 401) {
      banner("This gateway shows its fleet to operators alone: sign in with the admin key.");
      if (!asked) askKey();
      asked = true;
    } else {
      const ago = answeredAt === null ? "" : ` What is shown is ${count(Math.round((Date.now() - answeredAt) / 1000))} s old.`;
      banner(`${error.message}${ago} Trying again every two seconds.`);
    }
  }
}

// One after the other: two answers to the same question would be added twice.
function round() {
  rounds = rounds.then(once);
  return rounds;
}

async function forever() {
  for (;;) {
    if (!document.hidden) await round();
    await new Promise((resolve) => setTimeout(resolve, EVERY_MS));
  }
}

function askKey(problem = "") {
  const dialog = find("login");
  find("login-problem").textContent = problem;
  find("login-problem").hidden = !problem;
  if (!dialog.open) dialog.showModal();
  find("key").focus();
}

async function enter(event) {
  event.preventDefault();
  const key = find("key").value.trim();
  try {
    await admin("GET", "/status?after=9007199254740992", { key });
  } catch (error) {
    find("key").select();
    askKey(error.status === 401 ? "This is not the admin key." : error.message);
    return;
  }
  session.open(key);
  find("key").value = "";
  find("login").close();
  signed();
  showView();
  await round();
  find("main").focus({ preventScroll: true });
}

function leave() {
  session.close();
  series.clear();
  signed();
  showView();
}

function signed() {
  find("sign").textContent = session.key ? "Sign out" : "Sign in";
  document.body.classList.toggle("signed-in", Boolean(session.key));
}

function confirmed(title, text) {
  const dialog = find("confirm");
  fill(find("confirm-title"), title);
  fill(find("confirm-text"), h("span", {}, text));
  dialog.showModal();
  find("confirm-yes").focus();
  return new Promise((resolve) => {
    answer = resolve;
  });
}

// The browser tells of a close later, perhaps only when the next question is asked already: that is no answer to it.
function closed() {
  if (!find("confirm").open) answer(false);
}

function themed(theme) {
  find("theme").textContent = `Theme: ${theme}`;
  overview.redraw();
}

find("theme").addEventListener("click", () => themed(window.kvgateTheme.next()));
find("sign").addEventListener("click", async () => {
  if (!session.key) {
    askKey();
    return;
  }
  leave();
  location.hash = "#overview";
  await round();
});
find("login-form").addEventListener("submit", enter);
find("login-cancel").addEventListener("click", () => find("login").close());
find("login").addEventListener("close", () => {
  if (!session.key && location.hash && !PUBLIC.includes(location.hash.slice(1))) location.hash = "#overview";
});
find("confirm").addEventListener("submit", (event) => answer(event.submitter?.value === "yes"));
find("confirm").addEventListener("cancel", () => answer(false));
find("confirm").addEventListener("close", closed);
window.addEventListener("hashchange", async () => {
  showView();
  scrollTo(0, 0);
  await round();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => overview.redraw());
document.addEventListener("visibilitychange", () => !document.hidden && round());

themed(window.kvgateTheme.get());
signed();
showView();
forever();
