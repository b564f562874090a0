// The loader of a page that a server renders about a run under way: it fetches blocks, and the page again, and replaces
// elements with data-live whose content changed. viewer.js hears of new curves and samples by the event "newdata".
"use strict";
(() => {
  const path = location.pathname, body = document.body, MAX_SHARE = 0.1, BACK_MS = 15000;
  const wait = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
  const clock = () => new Date().toLocaleTimeString("en-GB");

  /** A block of data as text; null if there is none. A server that is gone is waited for. */
  window.loadBlock = async (name) => {
    for (;;) {
      const answer = await fetch(`${path}/blocks/${name.split("/").map(encodeURIComponent).join("/")}`).catch(() => null);
      if (answer) return answer.ok ? answer.text() : null;
      tell("gone");
      await wait(1000);
    }
  };
  window.runBlock = async (name) => {
    const script = document.createElement("script");
    script.textContent = await window.loadBlock(name);
    document.head.append(script);
  };

  let connection = "there", goneAt = "";
  function tell(state) {
    if (connection === state || (state === "there" && connection === "back")) return;
    if (state === "gone" && connection !== "gone") goneAt = clock();
    const place = document.getElementById("connection");
    connection = state === "there" && connection === "gone" ? "back" : state;
    place.className = connection;
    place.textContent = {
      gone: `The server does not answer since ${goneAt}. The page shows the state of that time, and asks again.`,
      refused: "The server asks for the login again, or no longer knows the run: reload the page.",
      back: `The server is back since ${clock()}.`, there: "",
    }[connection];
    if (connection === "back") setTimeout(() => { if (connection === "back") { connection = "there"; place.className = place.textContent = ""; } }, BACK_MS);
  }

  const held = new Map();
  const parts = (root) => [...root.querySelectorAll("[data-live]")];
  function take(fresh) {
    for (const article of fresh.querySelectorAll("article[id]")) {
      if (!document.getElementById(article.id)) document.querySelector("#view-overview > h2").after(article);
    }
    for (const part of parts(fresh)) {
      const text = part.innerHTML, element = document.getElementById(part.id);
      if (held.get(part.id) === text) continue;
      held.set(part.id, text);
      if (element) element.replaceChildren(...part.childNodes);
    }
    const changed = ["views", "curves", "pages"].filter((name) => body.dataset[name] !== fresh.body.dataset[name]);
    for (const name of changed) body.dataset[name] = fresh.body.dataset[name];
    if (changed.length) dispatchEvent(new CustomEvent("newdata", { detail: changed }));
  }

  /** Ask for the page; returns how long that took. */
  async function refresh() {
    const began = performance.now(), answer = await fetch(path).catch(() => null);
    if (!answer) tell("gone");
    else if (!answer.ok) tell("refused");
    else {
      const text = await answer.text().catch(() => null);
      if (text === null) return tell("gone");
      take(new DOMParser().parseFromString(text, "text/html"));
      tell("there");
      body.dataset.refreshed = Number(body.dataset.refreshed || 0) + 1;
    }
    return performance.now() - began;
  }

  async function follow() {
    for (;;) {
      const took = document.hidden ? 0 : await refresh();
      await wait(Math.max(Number(body.dataset.refreshMs), (took || 0) / MAX_SHARE));
    }
  }

  for (const part of parts(document)) held.set(part.id, part.innerHTML);
  if (typeof DecompressionStream !== "undefined") window.runBlock("viewer");
  wait(Number(body.dataset.refreshMs)).then(follow);
})();
