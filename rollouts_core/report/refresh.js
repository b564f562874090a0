// The refresh of a served page. It fetches the page again at intervals, and replaces the elements with data-live whose
// content changed. An element with data-list gets the children of the new page: children with known ids stay. All other
// elements stay, with their focus, ticks and scroll positions. The event "newdata" names the new data of a run's page.
"use strict";
(() => {
  const body = document.body, MAX_SHARE = 0.1, BACK_MS = 15000;
  const clock = () => new Date().toLocaleTimeString("en-GB");
  const wait = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

  let connection = "there", goneAt = "";
  function tell(state) {
    if (connection === state || (state === "there" && connection === "back")) return;
    if (state === "gone" && connection !== "gone") goneAt = clock();
    const place = document.getElementById("connection");
    connection = state === "there" && connection === "gone" ? "back" : state;
    place.className = connection;
    place.textContent = {
      gone: `The server has not answered since ${goneAt}. The page shows the state of that time and keeps trying.`,
      refused: "The login has expired, or the server no longer has this page: reload the page.",
      back: `The server answers again since ${clock()}.`, there: "",
    }[connection];
    if (connection === "back") setTimeout(() => { if (connection === "back") { connection = "there"; place.className = place.textContent = ""; } }, BACK_MS);
  }

  const held = new Map();
  const parts = (root) => [...root.querySelectorAll("[data-live]")];
  /** Give a list the children of its new version. Children with known ids are moved at most, not replaced. */
  function arrange(list, fresh) {
    const wanted = [...fresh.children], ids = new Set(wanted.map((child) => child.id));
    for (const child of [...list.children]) if (!ids.has(child.id)) child.remove();
    const known = new Map([...list.children].map((child) => [child.id, child]));
    let next = list.firstElementChild;
    for (const child of wanted) {
      const own = known.get(child.id) || child;
      if (own === next) next = next.nextElementSibling;
      else list.insertBefore(own, next);
    }
  }
  function take(fresh) {
    const focused = document.activeElement, given = parts(fresh);
    for (const list of [...fresh.querySelectorAll("[data-list]")]) {
      const own = document.getElementById(list.id);
      if (own && own !== list) arrange(own, list);
    }
    if (document.activeElement !== focused && focused.isConnected) focused.focus({ preventScroll: true });
    for (const part of given) {
      const text = part.innerHTML, element = document.getElementById(part.id);
      if (held.get(part.id) === text) continue;
      held.set(part.id, text);
      if (!element || element === part) continue;
      element.replaceChildren(...part.childNodes);
      element.className = part.className;
    }
    const changed = ["views", "curves", "pages"].filter((name) => body.dataset[name] !== fresh.body.dataset[name]);
    for (const name of changed) body.dataset[name] = fresh.body.dataset[name];
    if (changed.length) dispatchEvent(new CustomEvent("newdata", { detail: changed }));
  }

  /** Fetch the page and update this one; returns how long the request took. */
  async function refresh() {
    const began = performance.now(), answer = await fetch(location.pathname + location.search).catch(() => null);
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
  wait(Number(body.dataset.refreshMs)).then(follow);
  window.served = { tell, wait };
})();
