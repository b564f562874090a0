// The loader of a run's live page: it fetches blocks from the server, and starts the views of the report.
(() => {
  const { tell, wait } = window.served;

  /** A block of data as text; null if the server has no such block. Waits for a server that does not answer. */
  window.loadBlock = async (name) => {
    for (;;) {
      const place = `${location.pathname}/blocks/${name.split("/").map(encodeURIComponent).join("/")}`;
      const answer = await fetch(place).catch(() => null);
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
  if (typeof DecompressionStream !== "undefined") window.runBlock("viewer");
})();
