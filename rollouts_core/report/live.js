// The loader of a live page. It fetches blocks from the server. It also fetches the page again at intervals, and replaces
// the elements with data-live whose content changed. The event "newdata" tells viewer.js of new curves and samples.
"use strict";
(() => {
  const path = location.pathname, body = document.body, MAX_SHARE = 0.1, BACK_MS = 15000;
  const wait = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
  const clock = () => new Date().toLocaleTimeString("en-GB");

  /** A block of data as text; null if the server has no such block. Waits for a server that does not answer. */
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
      gone: `The server has not answered since ${goneAt}. The page shows the state of that time and keeps trying.`,
      refused: "The login has expired, or the server no longer has the run: reload the page.",
      back: `The server answers again since ${clock()}.`, there: "",
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

  /** Fetch the page and update this one; returns how long the request took. */
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
