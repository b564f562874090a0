// The views of a report: tables, samples, groups, curves. Plain JavaScript, no framework, no build step.
//
// `window.loadBlock` loads blocks of data (packed.py). assets.py and live.js each define one.
// Text of models, data and users is set only as textContent, never as markup.
//
//     #samples?set=rl&step=10&reward=<1     the table of samples, filtered
//     #sample/rl/10/144/3                   set, step, group, place in the group
//     #group/rl/10/144    #prompt/12        the samples of a group side by side; one prompt across steps
//     #samples?set=rl&at=120                 on a live page: the samples of step 120 and neighbouring steps
//     #held-out?win=rl&lose=sft             prompts on which rl gets a higher reward than sft
//     #answers/12         #curves  #sft-rows?outcome=cut  #run
"use strict";
(() => {
  const $ = (id) => document.getElementById(id);
  const ROW_PX = 34, OVERSCAN = 12, MAX_TOKENS = 3000, MAX_CACHED_CHUNKS = 48, MAX_CARDS = 64;
  const numberFormat = new Intl.NumberFormat("en-US", { maximumFractionDigits: 3 });
  const number = (value) => (value === null || value === undefined ? "–" : numberFormat.format(value).replace("-", "−"));
  const count = (value) => value.toLocaleString("en-US");

  function el(tag, attributes, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (value === false || value === null || value === undefined) continue;
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else element.setAttribute(name, value === true ? "" : value);
    }
    element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
    return element;
  }

  // ---------------------------------------------------------------- data

  const loadJson = async (name) => { const text = await window.loadBlock(name); return text === null ? null : JSON.parse(text); };

  const chunks = new Map();
  function loadChunk(place) {
    const { chunkNames, chunks: firsts, prompts, groups } = index, name = chunkNames ? chunkNames[place] : `chunk-${place}`;
    const held = chunks.get(name);
    chunks.delete(name);
    const chunk = held || loadJson(name).then((chunk) => readGroups(chunk, (group) => prompts[groups.prompt[firsts[place] + group]]));
    chunks.set(name, chunk);
    if (chunks.size > MAX_CACHED_CHUNKS) chunks.delete(chunks.keys().next().value);
    return chunk;
  }

  let index = null, vocabulary = { texts: {}, special: new Set(), ends: new Set() };

  function prepareIndex(read) {
    const groups = read.groups, starts = [0];
    groups.size.forEach((size) => starts.push(starts[starts.length - 1] + size));
    const groupOf = new Uint32Array(starts[starts.length - 1]);
    groups.size.forEach((size, group) => groupOf.fill(group, starts[group], starts[group] + size));
    const byAddress = new Map(groups.group.map((id, group) => [`${read.sets[groups.set[group]].key}/${groups.step[group]}/${id}`, group]));
    return { ...read, starts, groupOf, byAddress, size: groupOf.length };
  }

  // A live page holds one block of samples at a time: the samples of neighbouring steps or of one prompt,
  // or the held-out answers. `index.page` describes the block.
  const isLive = () => document.body.dataset.views !== undefined;
  let asked = 0, loading = 0;
  async function takePage(name) {
    const mine = ++asked;
    loading++;
    const read = await loadJson(name).finally(() => { loading--; });
    if (!read || mine !== asked) return;
    if (samplesView.table && index.page.name !== read.page.name) samplesView.table.clear(); // rows of the former block
    index = prepareIndex(read);
    takeWords(read.vocabulary);
  }
  function takeWords({ texts, special, ends }) {
    Object.assign(vocabulary.texts, texts);
    special.forEach((token) => vocabulary.special.add(token));
    ends.forEach((token) => vocabulary.ends.add(token));
  }
  const hasStep = (set, step) => index && index.page.set === set && step >= index.page.first && (step <= index.page.last || index.page.last === index.page.newest);
  /** Load the block with the samples that a view shows. */
  async function holdFor(name, parts, query) {
    const [set, step, group] = parts;
    if (name === "held-out" || name === "answers" || (set || "").startsWith("heldout-") || (query.set || "").startsWith("heldout-")) {
      if (!index || index.page.set !== "held-out") await takePage("page/held-out");
    } else if (name === "prompt") {
      if (!index || index.page.name !== `prompt/${parts.join("/")}`) await takePage(`prompt/${parts.join("/")}`);
    } else if (name === "sample" || name === "group") {
      if (!index || !index.byAddress.has(`${set}/${step}/${group}`)) await takePage(`page/${set}/${step}`);
    } else if (name === "step") {
      if (!hasStep(set, Number(step))) await takePage(`page/${set}/${step}`);
    } else if (name === "samples") {
      const named = /\d+/.exec(query.step || ""), at = named ? Number(named[0]) : query.at === undefined ? null : Number(query.at);
      const wanted = query.set || document.body.dataset.pages.split("/")[0], isThere = index && index.page.set === wanted;
      if (!(at === null ? isThere && index.page.last === index.page.newest : hasStep(wanted, at))) await takePage(`page/${wanted}/${at === null ? "last" : at}`);
    }
  }

  const setOf = (group) => index.sets[index.groups.set[group]];
  const addressOf = (group) => `${setOf(group).key}/${index.groups.step[group]}/${index.groups.group[group]}`;
  const promptOf = (group) => `#prompt/${isLive() ? addressOf(group) : index.groups.prompt[group]}`;
  const hashOf = (row) => { const group = index.groupOf[row]; return `#sample/${addressOf(group)}/${row - index.starts[group]}`; };

  // rollout_codec.py encodes each number as a character.
  const numbersOf = (text) => Array.from(text, (character) => {
    const code = character.codePointAt(0), plain = code < 0xd800 ? code : code - 0x800;
    return plain - 35 - (plain > 92 ? 1 : 0);
  });
  const logprobsOf = (text) => numbersOf(text).map((level) => -(level < 100 ? level : level < 190 ? 10 * (level - 90) : 100 * (level - 180)));

  /** The groups of a chunk. The numbers of a sample are decoded on first use. */
  function readGroups(chunk, previewOf) {
    let next = 0;
    return chunk.sizes.map((size, group) => {
      const samples = [];
      for (let i = 0; i < size; i++, next++) {
        const { e, ...rest } = chunk.rest[next] || {}, t = chunk.t[next], l = chunk.l[next], m = chunk.m[next];
        samples.push({
          ...rest, v: chunk.v[next], get tokens() { return numbersOf(t); }, get logprobs() { return l === null ? null : logprobsOf(l); },
          get byTrainer() { return e === undefined ? null : logprobsOf(e); }, get mask() { return m ? unrolled(m) : new Array([...t].length).fill(1); },
        });
      }
      return { turns: chunk.turns[group] || [["user", previewOf(group)]], answer: chunk.answer[group], prefix: numbersOf(chunk.prefix[group]), samples };
    });
  }

  async function loadGroup(group) {
    let place = 0;
    while (place + 1 < index.chunks.length && index.chunks[place + 1] <= group) place++;
    return (await loadChunk(place))[group - index.chunks[place]];
  }

  // A token may be a part of a character. Lone surrogates U+DC80..U+DCFF are bytes, joined with those of neighbouring tokens.
  const BYTES = /[\udc80-\udcff]/, utf8 = new TextDecoder();
  function tokenTexts(tokens) {
    const texts = tokens.map((token) => vocabulary.texts[token] ?? `⟨${token}⟩`);
    for (let start = 0; start < texts.length; start++) {
      if (!BYTES.test(texts[start])) continue;
      let end = start;
      while (end < texts.length && BYTES.test(texts[end])) end++;
      const joined = texts.slice(start, end).join("").replace(/[\udc80-\udcff]+/g, (run) =>
        utf8.decode(Uint8Array.from(run, (each) => each.charCodeAt(0) - 0xdc00)));
      texts[start] = joined;
      texts.fill("", start + 1, end);
      start = end;
    }
    return texts;
  }

  function unrolled(runs) {
    const values = [];
    for (let i = 0; i < runs.length; i += 2) for (let n = runs[i + 1]; n > 0; n--) values.push(runs[i]);
    return values;
  }

  function responseOf(sample) {
    if (sample.text !== undefined) return sample.text;
    const mask = sample.mask, trained = sample.tokens.filter((_, i) => mask[i]);
    const isSpecial = (token) => vocabulary.special.has(token);
    if (!sample.raw) return tokenTexts(trained.filter((token) => !isSpecial(token))).join("");
    return tokenTexts(trained.filter((token) => !vocabulary.ends.has(token))).join("");
  }

  const completionOf = (sample) => (sample.turns ? sample.turns.map(([role, content]) => `${role}: ${content}`).join("\n") : responseOf(sample));

  // ---------------------------------------------------------------- a table of any length

  /** A table whose document holds only the visible rows. `columns`: {key, title, css, sort, cell(row) -> text or node}. */
  class VirtualTable {
    constructor(columns, { label, open, sorted, onSort }) {
      Object.assign(this, { columns, open, onSort, rows: [], active: 0, drawn: new Map() });
      this.sorted = sorted;
      this.body = el("tbody", { onclick: (event) => this.clicked(event) });
      this.head = el("tr", {});
      this.table = el("table", { class: "virtual", "aria-label": label }, el("thead", {}, this.head), this.body);
      this.element = el("div", { class: "viewport", tabindex: "0", role: "region", "aria-label": label, onscroll: () => this.soon(), onkeydown: (event) => this.move(event) }, this.table);
      new ResizeObserver(() => this.soon()).observe(this.element);
    }

    /** Replace the rows. With `isUpdate` rows were only added: scroll position, focus and selection stay. */
    setRows(rows, isUpdate = false) {
      const place = new Map(isUpdate ? rows.map((row, i) => [row, i]) : []), top = this.element.scrollTop;
      const first = place.get(this.rows[Math.floor(top / ROW_PX)]), active = place.get(this.rows[this.active]);
      const drawn = [...this.drawn].flatMap(([i, line]) => (place.has(this.rows[i]) ? [[place.get(this.rows[i]), line]] : []));
      this.drawn = new Map(drawn);
      for (const [i, line] of drawn) { line.dataset.place = i; line.setAttribute("aria-rowindex", i + 2); }
      this.rows = rows;
      this.active = active ?? Math.min(this.active, Math.max(0, rows.length - 1));
      const newTop = isUpdate && top && first !== undefined ? first * ROW_PX + (top % ROW_PX) : 0;
      this.table.setAttribute("aria-rowcount", rows.length + 1);
      if (!isUpdate) this.drawHead();
      this.draw(newTop);
      this.element.scrollTop = newTop;
    }

    clear() {
      this.rows = [];
      this.drawn = new Map();
    }

    drawHead() {
      const [key, isDown] = this.sorted;
      this.head.replaceChildren(...this.columns.map((column) => {
        const order = key === column.key ? (isDown ? "descending" : "ascending") : null;
        const mark = order ? (isDown ? " ↓" : " ↑") : "";
        const content = column.sort ? el("button", { type: "button", onclick: () => this.onSort(column.key) }, column.title + mark) : column.title;
        return el("th", { scope: "col", class: column.css, "aria-sort": order }, content);
      }));
    }

    soon() {
      if (this.waits) return;
      this.waits = true;
      requestAnimationFrame(() => { this.waits = false; this.draw(); });
    }

    draw(top = this.element.scrollTop) {
      const first = Math.max(0, Math.floor(top / ROW_PX) - OVERSCAN);
      const visible = Math.min(160, Math.ceil(this.element.clientHeight / ROW_PX) + 2 * OVERSCAN);
      const last = Math.min(this.rows.length, first + visible);
      const hadFocus = this.body.contains(document.activeElement);
      const spacer = () => el("tr", { class: "spacer", "aria-hidden": "true" }, el("td", {})); // a colspan would include hidden columns
      const above = spacer(), below = spacer();
      above.firstChild.style.height = `${first * ROW_PX}px`;
      below.firstChild.style.height = `${(this.rows.length - last) * ROW_PX}px`;
      const drawn = new Map();
      for (let place = first; place < last; place++) drawn.set(place, this.drawn.get(place) || this.drawRow(place));
      this.drawn = drawn;
      for (const [place, line] of drawn) line.querySelector("a").tabIndex = place === this.active ? 0 : -1;
      const lines = [above, ...drawn.values(), below];
      const kept = new Set(lines);
      for (const line of [...this.body.children]) if (!kept.has(line)) line.remove();
      lines.forEach((line, i) => { if (this.body.children[i] !== line) this.body.insertBefore(line, this.body.children[i] || null); });
      if (hadFocus && !this.body.contains(document.activeElement)) this.focusActive();
    }

    drawRow(place) {
      const row = this.rows[place];
      const cells = this.columns.map((column, i) => {
        const content = column.cell(row);
        if (i > 0) return el("td", { class: column.css }, content);
        const link = el("a", { href: this.open(row) }, content);
        return el("td", { class: column.css }, link);
      });
      return el("tr", { "aria-rowindex": place + 2, "data-place": place }, cells);
    }

    clicked(event) {
      const line = event.target.closest("tr[data-place]");
      if (!line || event.target.closest("a") || String(getSelection())) return;
      location.hash = this.open(this.rows[Number(line.dataset.place)]);
    }

    move(event) {
      if (event.key === "Enter" && event.target === this.element && this.rows.length) location.hash = this.open(this.rows[this.active]);
      const page = Math.max(1, Math.floor(this.element.clientHeight / ROW_PX) - 2);
      const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity }[event.key];
      if (steps === undefined) return;
      event.preventDefault();
      this.active = Math.max(0, Math.min(this.rows.length - 1, this.active + steps));
      const top = this.active * ROW_PX, box = this.element;
      if (top < box.scrollTop) box.scrollTop = top;
      if (top + 2 * ROW_PX > box.scrollTop + box.clientHeight) box.scrollTop = top + 2 * ROW_PX - box.clientHeight;
      this.draw();
      this.focusActive();
    }

    focusActive() {
      const link = this.body.querySelector(`tr[data-place="${this.active}"] a`);
      (link || this.element).focus({ preventScroll: true });
    }
  }

  // ---------------------------------------------------------------- tokens in colour

  const LOGPROB_BOUNDS = [10, 30, 70, 120, 200, 300, 500], SIGNED_BOUNDS = [0.05, 0.25, 0.75, 1.5];
  const signedBin = (value, scale) => {
    if (value === null || value === undefined) return "";
    const size = SIGNED_BOUNDS.filter((bound) => Math.abs(value) * scale >= bound).length;
    return size ? `${value > 0 ? "up" : "down"}-${size}` : "";
  };
  const COLOURS = {
    logprob: {
      title: "log-prob",
      has: (view) => Boolean(view.logprobs),
      css: (view, i) => { const size = LOGPROB_BOUNDS.filter((bound) => -view.logprobs[i] >= bound).length; return view.mask[i] && size ? `heat-${size}` : ""; },
      legend: () => [["", "p > 0.9"], ["heat-2", "0.6"], ["heat-4", "0.2"], ["heat-6", "0.03"], ["heat-7", "p < 0.01"]],
    },
    advantage: {
      title: "advantage",
      has: (view) => Boolean(view.advantages),
      css: (view, i) => (view.mask[i] ? signedBin(view.advantages[i], 1) : ""),
      legend: () => [["down-4", "−1.5"], ["down-2", "−0.25"], ["", "0"], ["up-2", "+0.25"], ["up-4", "+1.5"]],
    },
    mask: {
      title: "loss mask",
      has: () => true,
      css: (view, i) => (view.mask[i] ? "trained" : "untrained"),
      legend: () => [["trained", "trained"], ["untrained", "not trained"]],
    },
    version: {
      title: "policy version",
      has: (view) => view.versions.some((each) => each !== null),
      css: (view, i) => (view.versions[i] === null ? "" : `hue-${view.versions[i] % 6}`),
      legend: (view) => [...new Set(view.versions.filter((each) => each !== null))].map((each) => [`hue-${each % 6}`, `version ${each}`]),
    },
    mismatch: {
      title: "trainer − engine",
      has: (view) => Boolean(view.logprobs && view.byTrainer),
      css: (view, i) => (view.mask[i] ? signedBin((view.byTrainer[i] - view.logprobs[i]) / 100, 5) : ""),
      legend: () => [["down-4", "−0.3 nats"], ["down-1", "−0.01"], ["", "0"], ["up-1", "+0.01"], ["up-4", "+0.3"]],
    },
  };
  let colour = "logprob";

  /** Per-token arrays of a whole sample, including the prefix. */
  function tokenView(group, sample, advantage) {
    const zeros = new Array(group.prefix.length).fill(0), padded = (values) => (values ? zeros.concat(values) : null);
    const tokens = group.prefix.concat(sample.tokens), mask = padded(sample.mask), versions = new Array(tokens.length).fill(null);
    if (typeof sample.v === "number") versions.fill(sample.v, zeros.length);
    else for (const [version, start, end] of sample.v || []) versions.fill(version, start, end);
    const same = advantage === null || advantage === undefined ? null : mask.map((weight) => (weight ? advantage : 0));
    return { tokens, mask, versions, advantages: padded(sample.a) || same, texts: tokenTexts(tokens), logprobs: padded(sample.logprobs), byTrainer: padded(sample.byTrainer) };
  }

  function describeToken(view, i) {
    const parts = [`token ${i} of ${view.tokens.length}: “${visible(view.texts[i])}”`, `id ${view.tokens[i]}`, view.mask[i] ? "trained" : "not trained"];
    if (view.mask[i] && view.logprobs) parts.push(`log-prob ${number(view.logprobs[i] / 100)} (p ${number(Math.exp(view.logprobs[i] / 100))})`);
    if (view.mask[i] && view.byTrainer) parts.push(`trainer ${number(view.byTrainer[i] / 100)}`);
    if (view.mask[i] && view.advantages) parts.push(`advantage ${number(view.advantages[i])}`);
    if (view.versions[i] !== null) parts.push(`version ${view.versions[i]}`);
    return parts.join(" · ");
  }
  const visible = (text) => text.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/^ +| +$/g, (spaces) => "␣".repeat(spaces.length)) || "∅";

  /** A block of tokens. The mouse, or the arrow keys if the block has the focus, choose the token that the readout describes. */
  const makeReadout = () => el("output", { class: "readout", "aria-live": "polite" }, "Point at a token, or focus the text and use the arrow keys.");
  function tokenBlock(view, { from = 0, label, shared }) {
    const readout = shared || makeReadout();
    const block = el("div", { class: `tokens by-${colour}`, tabindex: "0", role: "group", "aria-label": `${label}; arrow keys move from token to token` });
    let current = null, shown = from;
    const css = COLOURS[colour];
    const more = el("button", { type: "button", class: "plain", onclick: () => grow() });
    const grow = () => {
      const end = Math.min(view.tokens.length, shown + MAX_TOKENS);
      const added = [];
      for (let i = shown; i < end; i++) {
        const hue = css.has(view) ? css.css(view, i) : "";
        const special = vocabulary.special.has(view.tokens[i]) ? " special" : "";
        added.push(el("span", { class: `t ${hue}${special}${view.texts[i].endsWith("\n") ? " newline" : ""}`, "data-i": i }, view.texts[i] || "∅"));
      }
      block.append(...added);
      shown = end;
      more.textContent = `show ${count(Math.min(MAX_TOKENS, view.tokens.length - end))} more of ${count(view.tokens.length)} tokens`;
      more.hidden = end >= view.tokens.length;
    };
    const point = (span) => {
      if (!span || span === current) return;
      if (current) current.classList.remove("current");
      current = span;
      current.classList.add("current");
      readout.textContent = describeToken(view, Number(span.dataset.i));
    };
    block.addEventListener("mouseover", (event) => point(event.target.closest(".t")));
    block.addEventListener("click", (event) => point(event.target.closest(".t")));
    block.addEventListener("focus", () => point(current || block.querySelector(".t")));
    block.addEventListener("keydown", (event) => {
      const next = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling", ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[event.key];
      if (!next && event.key !== "Home" && event.key !== "End") return;
      event.preventDefault();
      point(event.key === "Home" ? block.firstElementChild : event.key === "End" ? block.lastElementChild : (current || block.firstElementChild)[next]);
      if (current) current.scrollIntoView({ block: "nearest" });
    });
    grow();
    return el("div", { class: "token-box" }, block, more, shared ? "" : readout);
  }

  function colourPicker(view, redraw) {
    const choices = Object.entries(COLOURS).map(([key, { title, has }]) => {
      const missing = !has(view);
      return el("button", { type: "button", "aria-pressed": String(colour === key), disabled: missing, title: missing ? "not recorded for this sample" : null,
        onclick: () => { colour = key; redraw(); } }, title);
    });
    const legend = COLOURS[colour].has(view) ? COLOURS[colour].legend(view) : [];
    return el("div", { class: "picker" },
      el("span", { class: "segments", role: "group", "aria-label": "Colour tokens by" }, choices),
      el("span", { class: "key" }, legend.map(([css, text]) => el("span", {}, el("i", { class: `t ${css}` }, " "), text))));
  }

  // ---------------------------------------------------------------- conversations

  const LONG_CHARS = 1200;
  function textNodes(text) {
    if (text.length <= LONG_CHARS) return [el("pre", { dir: "auto" }, text)];
    const start = text.slice(0, 600);
    return [el("details", { class: "long" }, el("summary", {}, el("span", { class: "start" }, start), el("span", { class: "more" }, `… show all ${count(text.length)} characters`)), el("pre", { dir: "auto" }, text))];
  }

  /** Text with its thoughts collapsed: from `<think>` to `</think>`, or to the end if the tag is not closed. */
  function spokenNodes(text) {
    const nodes = [];
    let rest = text;
    const fold = (thought, isOpen) => nodes.push(el("details", { class: "think" }, el("summary", {}, `thought, ${count(thought.length)} characters${isOpen ? ", not closed" : ""}`), el("pre", { dir: "auto" }, thought)));
    const closing = rest.indexOf("</think>"), opening = rest.indexOf("<think>");
    if (closing >= 0 && (opening < 0 || closing < opening)) { fold(rest.slice(0, closing).trim()); rest = rest.slice(closing + 8); }
    for (;;) {
      const start = rest.indexOf("<think>");
      if (start < 0) break;
      if (rest.slice(0, start).trim()) nodes.push(...textNodes(rest.slice(0, start).trim()));
      const end = rest.indexOf("</think>", start);
      fold(rest.slice(start + 7, end < 0 ? undefined : end).trim(), end < 0);
      rest = end < 0 ? "" : rest.slice(end + 8);
    }
    if (rest.trim()) nodes.push(...textNodes(nodes.length ? rest.trim() : rest));
    return nodes.length ? nodes : [el("p", { class: "note" }, "(nothing)")];
  }

  function turnNode([role, content, more], css) {
    const extra = more || {}, nodes = [];
    if (extra.reasoning_content) nodes.push(...spokenNodes(`<think>${extra.reasoning_content}</think>`));
    if (content || !extra.tool_calls) nodes.push(...(role === "assistant" ? spokenNodes(content) : textNodes(content)));
    for (const call of extra.tool_calls || []) {
      const asked = call.function || call;
      const args = typeof asked.arguments === "string" ? asked.arguments : JSON.stringify(asked.arguments, null, 1);
      nodes.push(el("div", { class: "call" }, el("b", {}, `calls ${asked.name}`), el("pre", {}, args || "")));
    }
    const name = role === "tool" ? `result of ${extra.name || "a tool"}` : extra.name ? `${role} (${extra.name})` : role;
    return el("div", { class: `turn ${role === "assistant" ? `said ${css}` : role === "tool" ? "tool" : "asked"}` }, el("div", { class: "role" }, name), nodes);
  }

  const rewardChip = (reward, css) => el("span", { class: `chip ${css || ""}` }, `reward ${number(reward)}`);

  function facts(row, sample) {
    const status = index.statuses[index.status[row]];
    const pairs = [["Reward", number(index.reward[row])]];
    for (const [name, values] of Object.entries(index.terms)) pairs.push([name, number(values[row])]);
    if (index.advantage && index.advantage[row] !== null) pairs.push(["Advantage", number(index.advantage[row])]);
    pairs.push(["Outcome", status === "truncated" ? "cut off at the limit" : status], ["Sampled tokens", count(index.length[row])]);
    if (index.version && index.version[row] !== null) pairs.push(["Policy version", count(index.version[row])]);
    for (const [name, value] of Object.entries(sample.notes || {})) pairs.push([name, typeof value === "string" ? value : JSON.stringify(value)]);
    return el("dl", { class: "facts" }, pairs.map(([what, text]) => el("div", { class: text.length > 40 ? "long" : null }, el("dt", {}, what), el("dd", {}, text.length > 300 ? `${text.slice(0, 300)}…` : text))));
  }

  // ---------------------------------------------------------------- the table of samples

  const COMPARISON = /^\s*(<=|>=|<|>|=|!=)?\s*(-?\d+(?:\.\d+)?)\s*(?:(?:\.\.|–|to|-)\s*(-?\d+(?:\.\d+)?))?\s*$/;
  /** A test of numbers for "1", "<1", ">= 0.5" or "3..10"; null for other text and for no text. */
  function numberTest(text) {
    const found = COMPARISON.exec(text || "");
    if (!found) return null;
    const value = Number(found[2]);
    if (found[3] !== undefined) return (each) => each !== null && each >= value && each <= Number(found[3]);
    return { "<": (e) => e !== null && e < value, ">": (e) => e !== null && e > value, "<=": (e) => e !== null && e <= value, ">=": (e) => e !== null && e >= value, "!=": (e) => e !== value }[found[1]] || ((each) => each === value);
  }

  const NUMBERS = ["step", "reward", "advantage", "length", "version"];
  const columnOf = {
    step: (row) => index.groups.step[index.groupOf[row]], reward: (row) => index.reward[row],
    advantage: (row) => (index.advantage ? index.advantage[row] : null), length: (row) => index.length[row],
    version: (row) => (index.version ? index.version[row] : null), outcome: (row) => index.status[row],
    prompt: (row) => index.prompts[index.groups.prompt[index.groupOf[row]]],
  };
  const valueOf = (key) => columnOf[key] || ((row) => index.terms[key.slice(5)][row]);

  const numberKeys = () => [...NUMBERS, ...Object.keys(index.terms).map((name) => `term:${name}`)];

  function selectRows(query) {
    const set = index.sets.findIndex(({ key }) => key === query.set);
    const tests = numberKeys().map((key) => [valueOf(key), numberTest(query[key])]).filter(([, test]) => test);
    const status = query.outcome ? index.statuses.indexOf(query.outcome) : -1;
    const prompt = query.prompt === undefined ? -1 : Number(query.prompt);
    const rows = [];
    for (let row = 0; row < index.size; row++) {
      const group = index.groupOf[row];
      if (index.groups.set[group] !== set || (prompt >= 0 && index.groups.prompt[group] !== prompt)) continue;
      if (status >= 0 && index.status[row] !== status) continue;
      if (tests.every(([read, test]) => test(read(row)))) rows.push(row);
    }
    return rows;
  }

  function sortRows(rows, key, isDown) {
    const read = valueOf(key), sign = isDown ? -1 : 1;
    const keyed = rows.map((row) => [read(row), row]);
    keyed.sort(([a, rowA], [b, rowB]) => {
      if (a === b) return rowA - rowB;
      if (a === null || a === undefined) return 1;
      if (b === null || b === undefined) return -1;
      return sign * (a < b ? -1 : 1);
    });
    return keyed.map(([, row]) => row);
  }

  let searching = 0;
  /** Find the rows whose prompt or completion contains the text, and report progress. */
  async function searchRows(rows, text, progress) {
    const mine = ++searching, needle = text.toLowerCase(), found = [];
    let told = performance.now(), lastGroup = -1, group = null, asked = "";
    for (let i = 0; i < rows.length; i++) {
      const number = index.groupOf[rows[i]];
      if (number !== lastGroup) {
        group = await loadGroup(number);
        asked = group.turns.map(([, content]) => content).join("\n").toLowerCase();
        lastGroup = number;
      }
      const sample = group.samples[rows[i] - index.starts[number]];
      if (asked.includes(needle) || completionOf(sample).toLowerCase().includes(needle)) found.push(rows[i]);
      if (performance.now() - told > 60) {
        progress(i / rows.length);
        await new Promise((resolve) => setTimeout(resolve));
        if (mine !== searching) return null;
        told = performance.now();
      }
    }
    return mine === searching ? found : null;
  }

  /** A cell that is filled when the chunk of its row is loaded. */
  function previewCell(row) {
    const cell = el("span", { class: "preview" }, "");
    const group = index.groupOf[row], place = row - index.starts[group];
    loadGroup(group).then((read) => { cell.textContent = completionOf(read.samples[place]).replace(/\s+/g, " ").slice(0, 160); });
    return cell;
  }

  const sampleColumns = () => [
    { key: "step", title: "Step", css: "num", sort: true, cell: (row) => count(columnOf.step(row)) },
    { key: "prompt", title: "Prompt", css: "text", sort: true, cell: (row) => el("span", { class: "preview" }, columnOf.prompt(row)) },
    { key: "answer", title: "Completion", css: "text wide", sort: false, cell: previewCell },
    { key: "reward", title: "Reward", css: "num", sort: true, cell: (row) => number(index.reward[row]) },
    ...Object.keys(index.terms).map((name) => ({ key: `term:${name}`, title: name, css: "num wide", sort: true, cell: (row) => number(index.terms[name][row]) })),
    ...(index.advantage ? [{ key: "advantage", title: "Advantage", css: "num wide", sort: true, cell: (row) => number(index.advantage[row]) }] : []),
    { key: "length", title: "Tokens", css: "num mid", sort: true, cell: (row) => count(index.length[row]) },
    { key: "outcome", title: "Outcome", css: "mid", sort: true, cell: (row) => index.statuses[index.status[row]] },
    ...(index.version ? [{ key: "version", title: "Version", css: "num wide", sort: true, cell: (row) => number(index.version[row]) }] : []),
  ];

  function field(label, control) { return el("label", { class: "field" }, el("span", {}, label), control); }
  const debounced = (call, ms) => { let timer = 0; return (...args) => { clearTimeout(timer); timer = setTimeout(() => call(...args), ms); }; };

  const samplesView = {
    async show(root, [], query) {
      if (!index) return root.replaceChildren(el("h2", {}, "Samples"), el("p", { class: "note" }, missingNote()));
      if (root.dataset.built !== this.shape()) this.build(root);
      this.query = { ...query, set: query.set || index.sets[0].key };
      for (const control of this.controls) {
        const value = this.query[control.name] ?? "";
        if (document.activeElement !== control) control.value = value;
        control.toggleAttribute("aria-invalid", numberKeys().includes(control.name) && value !== "" && !numberTest(value));
      }
      this.controls.find(({ name }) => name === "set").value = this.query.set;
      this.chip.hidden = this.query.prompt === undefined;
      this.chip.textContent = `✕ prompt: ${(index.prompts[this.query.prompt] || "").slice(0, 60)}`;
      this.apply();
    },

    build(root) {
      root.dataset.built = this.shape();
      const changed = debounced(() => this.changed(), 180);
      const input = (name, title, hint, size) => field(title, el("input", { name, type: name === "q" ? "search" : "text", placeholder: hint, size, autocomplete: "off", spellcheck: "false", oninput: changed }));
      const choose = (name, title, options) => field(title, el("select", { name, onchange: () => this.changed() }, options.map(([value, text]) => el("option", { value }, text))));
      const used = [...new Set(index.status)].map((status) => index.statuses[status]);
      const form = el("form", { class: "filters", role: "search", "aria-label": "Filter samples", onsubmit: (event) => event.preventDefault() },
        choose("set", "Samples of", index.sets.map((set) => [set.key, set.isTraining ? set.label : `${set.label}, held-out`])),
        input("q", "Search", "text of prompt or completion   ( / )", 26), input("step", "Step", "10 or 5..20", 9), input("reward", "Reward", "<1", 7),
        ...Object.keys(index.terms).map((name) => input(`term:${name}`, name, ">0", 7)),
        input("advantage", "Advantage", ">0", 7), input("length", "Tokens", ">100", 7), index.version ? input("version", "Version", "3..5", 7) : "",
        choose("outcome", "Outcome", [["", "any"], ...used.map((status) => [status, status])]),
        el("button", { type: "button", class: "plain", onclick: () => { location.hash = `#samples?set=${encodeURIComponent(this.query.set)}`; } }, "clear"));
      this.controls = [...form.querySelectorAll("input, select")];
      this.chip = el("button", { type: "button", class: "chip", hidden: true, onclick: () => { delete this.query.prompt; this.changed(); } });
      this.said = el("p", { class: "note", role: "status" });
      this.table = new VirtualTable(sampleColumns(), { label: "Samples", open: hashOf, sorted: ["step", false], onSort: (key) => this.sort(key) });
      this.pager = el("p", { class: "pager note" });
      root.replaceChildren(el("h2", {}, "Samples"), ...index.notes.map((note) => el("p", { class: "note sampled" }, note)), form, this.chip, this.pager, this.said, this.table.element);
    },

    /** The steps whose samples the table has, and links to other steps. */
    page() {
      const { page } = index, link = (at, text) => (at === null || at === undefined ? "" : el("a", { href: `#samples?${new URLSearchParams({ set: page.set, at })}` }, text));
      const steps = (first, last) => (first === last ? `step ${count(first)}` : `steps ${count(first)} to ${count(last)}`);
      if (!page || !page.oldest) return [];
      const isWhole = page.first === page.oldest && page.last === page.newest;
      return [isWhole ? `All ${steps(page.first, page.last)}.` : `The table has ${steps(page.first, page.last)} of ${count(page.oldest)} to ${count(page.newest)}; a number in the field “Step” shows others.`,
        link(page.before, "← earlier"), link(page.after, "later →"), page.after === null ? "" : link(page.newest, "newest")];
    },

    /** Show new samples of the same steps or of later steps. */
    async update() {
      if (!index || !this.table) return this.open(parseHash().query);
      if (loading) return;
      await takePage(index.page.name);
      if (parseHash().name !== "samples") return;
      if ($("view-samples").dataset.built === this.shape()) await this.apply(true); else await this.show($("view-samples"), [], this.query);
    },

    /** A key that changes with the sets, columns and outcomes that the view offers. */
    shape: () => JSON.stringify([index.sets.map(({ key }) => key), sampleColumns().map(({ key }) => key), [...new Set(index.status)].sort()]),

    changed() {
      const query = { ...this.query };
      for (const control of this.controls) if (control.value) query[control.name] = control.value; else delete query[control.name];
      delete query.at;
      history.replaceState(null, "", `#samples?${new URLSearchParams(query)}`);
      document.body.dataset.shown = location.hash;
      this.open(query);
    },

    async open(query) {
      if (isLive()) await holdFor("samples", [], query);
      await this.show($("view-samples"), [], query);
    },

    sort(key) {
      const [current, isDown] = this.table.sorted;
      this.query.sort = key === current && !isDown ? `-${key}` : key;
      this.changed();
    },

    async apply(isUpdate = false) {
      const { q = "", sort = isLive() ? "-step" : "step" } = this.query;
      const current = index;
      this.table.sorted = [sort.replace(/^-/, ""), sort.startsWith("-")];
      const all = selectRows({ set: this.query.set }).length;
      let rows = selectRows(this.query);
      searching++;
      if (q) rows = await searchRows(rows, q, (done) => { if (!isUpdate) this.said.textContent = `searching … ${Math.round(100 * done)} %`; });
      if (rows === null || current !== index) return;
      rows = sortRows(rows, ...this.table.sorted);
      const rewards = rows.map((row) => index.reward[row]).filter((reward) => reward !== null);
      const mean = rewards.length ? `, mean reward ${number(rewards.reduce((sum, each) => sum + each, 0) / rewards.length)}` : "";
      this.said.textContent = `${count(rows.length)} of ${count(all)} samples${mean}`;
      this.pager.replaceChildren(...this.page().flatMap((node) => [node, " "]));
      this.table.setRows(rows, isUpdate);
    },
  };

  const missingNote = () => isLive() ? "The run has no samples yet." : document.body.dataset.samples === "none"
    ? "This report was written without samples (report.samples = \"none\")." : "The run directory has no samples.";

  // ---------------------------------------------------------------- one sample, one group, one prompt

  function rowAt(set, step, group, place) {
    const found = index ? index.byAddress.get(`${set}/${step}/${group}`) : undefined;
    if (found === undefined) return null;
    const row = index.starts[found] + Number(place || 0);
    return row < index.starts[found + 1] ? row : null;
  }

  const lost = (root) => root.replaceChildren(el("h2", {}, isLive() ? "Not there" : "Not in this file"), el("p", { class: "note" }, isLive() ? "The run directory does not have the sample." : "This report does not hold the sample. The run directory has all samples."), el("p", {}, el("a", { href: "#samples" }, "All samples")));

  const sampleView = {
    async show(root, [set, step, id, place]) {
      const row = rowAt(set, step, id, place);
      if (row === null) return lost(root);
      const number_ = index.groupOf[row], group = await loadGroup(number_), at = row - index.starts[number_];
      const sample = group.samples[at], size = index.groups.size[number_], address = addressOf(number_), kind = setOf(number_);
      const view = tokenView(group, sample, index.advantage ? index.advantage[row] : null);
      if (!COLOURS[colour].has(view)) colour = view.logprobs ? "logprob" : "mask";
      const step_ = (offset) => `#sample/${address}/${(at + offset + size) % size}`;
      const tokens = el("div", {});
      const drawTokens = () => tokens.replaceChildren(colourPicker(view, drawTokens), tokenBlock(view, { label: "Tokens of the sample" }));
      drawTokens();
      const said = sample.turns || [["assistant", responseOf(sample)]];
      root.replaceChildren(
        el("div", { class: "crumbs" }, el("a", { href: `#samples?set=${kind.key}` }, kind.isTraining ? kind.label : `${kind.label}, held-out`), kind.isTraining ? el("a", { href: `#step/${kind.key}/${step}` }, `step ${step}`) : "", el("a", { href: `#group/${address}` }, `group ${id}`), el("span", {}, `sample ${at + 1} of ${size}`),
          el("span", { class: "push" }), size > 1 ? el("a", { href: step_(-1), rel: "prev" }, "← previous") : "", size > 1 ? el("a", { href: step_(1), rel: "next" }, "next →") : ""),
        el("h2", {}, kind.isTraining ? `Step ${step}: sample ${at + 1} of ${size}` : `${kind.label}: held-out answer`),
        el("div", { class: "split" },
          el("article", { class: "card conversation" }, group.turns.map((turn) => turnNode(turn, kind.css)), said.map((turn) => turnNode(turn, kind.css)),
            group.answer ? el("div", { class: "turn reference" }, el("div", { class: "role" }, "reference answer"), textNodes(group.answer)) : ""),
          el("aside", { class: "card", "aria-label": "Facts about the sample" }, facts(row, sample), el("p", { class: "links" }, el("a", { href: `#group/${address}` }, `All ${size} of the group`), el("a", { href: promptOf(number_) }, "This prompt across steps")))),
        view.tokens.length ? el("h3", {}, "Tokens") : "", view.tokens.length ? el("div", { class: "card" }, tokens) : "");
    },
  };

  const groupView = {
    async show(root, [set, step, id]) {
      const first = rowAt(set, step, id, 0);
      if (first === null) return lost(root);
      const number_ = index.groupOf[first], group = await loadGroup(number_), kind = setOf(number_), address = addressOf(number_);
      const rewards = group.samples.map((_, i) => index.reward[first + i]), graded = rewards.filter((each) => each !== null);
      const mean = graded.length ? graded.reduce((sum, each) => sum + each, 0) / graded.length : null;
      const top = graded.length ? Math.max(...graded) : null, isSplit = new Set(graded).size > 1;
      const views = group.samples.map((sample, i) => tokenView(group, sample, index.advantage ? index.advantage[first + i] : null));
      const cards = el("div", { class: "group" }), picker = el("div", {}), readout = makeReadout();
      if (!COLOURS[colour].has(views[0])) colour = views[0].logprobs ? "logprob" : "mask";
      const draw = () => {
        picker.replaceChildren(colourPicker(views[0], draw));
        cards.replaceChildren(...group.samples.slice(0, MAX_CARDS).map((sample, i) => {
          const row = first + i, above = rewards[i] === null || mean === null ? null : rewards[i] - mean;
          const header = el("header", {}, el("a", { href: `#sample/${address}/${i}` }, `sample ${i + 1}`), rewardChip(rewards[i], isSplit ? (rewards[i] === top ? "best" : "rest") : ""),
            isSplit && above !== null ? el("span", { class: "note" }, `${above >= 0 ? "+" : ""}${number(above)} to the mean`) : "", index.advantage ? el("span", { class: "note" }, `advantage ${number(index.advantage[row])}`) : "",
            el("span", { class: "note" }, `${count(index.length[row])} tokens${index.statuses[index.status[row]] === "truncated" ? ", cut off" : ""}`));
          return el("article", { class: "card" }, header, tokenBlock(views[i], { from: group.prefix.length, label: `Tokens of sample ${i + 1}`, shared: readout }));
        }));
      };
      draw();
      root.replaceChildren(
        el("div", { class: "crumbs" }, el("a", { href: `#samples?set=${kind.key}` }, kind.label), el("a", { href: `#step/${kind.key}/${step}` }, `step ${step}`), el("span", {}, `group ${id}`), el("span", { class: "push" }), el("a", { href: promptOf(number_) }, "this prompt across steps")),
        el("h2", {}, `Step ${step}: group ${id}`),
        el("p", { class: "soft" }, `${count(group.samples.length)} completions, baseline (mean reward) ${number(mean)}${isSplit ? "" : "; all rewards are equal, so a comparison within the group teaches nothing"}`),
        promptCard(group),
        el("div", { class: "card sticky" }, picker, readout), cards, group.samples.length > MAX_CARDS ? el("p", { class: "note" }, `The first ${MAX_CARDS} are shown. The table has all.`) : "");
    },
  };

  /** A table of groups with their rewards and best completion. `first` is the first column, which names the group; `address` is that of the view. */
  function groupsTable(groups, title, first, address, sort = "group") {
    const highest = index.reward.reduce((most, each) => (each !== null && each > most ? each : most), -Infinity), [key, isDown] = [sort.replace(/^-/, ""), sort.startsWith("-")];
    const rewardsOf = (group) => index.reward.slice(index.starts[group], index.starts[group + 1]);
    const meanOf = (group) => { const graded = rewardsOf(group).filter((each) => each !== null); return graded.length ? graded.reduce((sum, each) => sum + each, 0) / graded.length : null; };
    const dots = (group) => {
      const rewards = rewardsOf(group), css = (reward) => (reward !== null && reward >= highest ? "full" : reward > 0 ? "half" : "");
      return el("span", { class: "dots", role: "img", "aria-label": `rewards ${rewards.map(number).join(", ")}` }, rewards.slice(0, 32).map((reward) => el("i", { class: css(reward) })));
    };
    const best = (group) => {
      const rewards = rewardsOf(group), place = Math.max(0, rewards.indexOf(Math.max(...rewards.filter((each) => each !== null))));
      const link = el("a", { href: `#sample/${addressOf(group)}/${place}`, class: "preview", tabindex: "-1" }, "…");
      loadGroup(group).then((read) => { link.textContent = completionOf(read.samples[place]).replace(/\s+/g, " ").slice(0, 160) || "(nothing)"; });
      return link;
    };
    const columns = [{ key: "group", title, css: "text", sort: true, cell: first }, { key: "mean", title: "Mean reward", css: "num mean", sort: true, cell: (group) => number(meanOf(group)) },
      { key: "rewards", title: "Rewards", css: "text", sort: false, cell: dots }, { key: "best", title: "Best completion", css: "text wide", sort: false, cell: best }];
    const table = new VirtualTable(columns, { label: "Groups", open: (group) => `#group/${addressOf(group)}`, sorted: [key, isDown], onSort: (name) => { location.hash = `${address}?sort=${name === key && !isDown ? "-" : ""}${name}`; } });
    const value = key === "mean" ? meanOf : (group) => group;
    return { element: table.element, fill: () => table.setRows([...groups].sort((a, b) => (isDown ? -1 : 1) * ((value(a) ?? -Infinity) - (value(b) ?? -Infinity)) || a - b)) };
  }

  const promptCard = (group) => el("article", { class: "card conversation" }, group.turns.map((turn) => turnNode(turn, "")), group.answer ? el("div", { class: "turn reference" }, el("div", { class: "role" }, "reference answer"), textNodes(group.answer)) : "");

  const promptView = {
    async show(root, parts, query) {
      const prompt = parts.length > 1 ? 0 : Number(parts[0]); // a live page holds only one prompt
      if (!index || !(prompt >= 0 && prompt < index.prompts.length)) return lost(root);
      const groups = index.groups.prompt.flatMap((each, group) => (each === prompt ? [group] : []));
      const when = (group) => (setOf(group).isTraining ? `step ${count(index.groups.step[group])}` : `${setOf(group).label}, held-out`);
      const table = groupsTable(groups, "When", when, `#prompt/${parts.join("/")}`, query.sort);
      root.replaceChildren(el("div", { class: "crumbs" }, el("a", { href: "#samples" }, "samples"), el("span", {}, "one prompt")), el("h2", {}, "One prompt across steps"),
        ...index.notes.filter((note) => note.startsWith("The search")).map((note) => el("p", { class: "note sampled" }, note)), promptCard(await loadGroup(groups[0])), table.element);
      table.fill();
    },
  };

  const stepView = {
    /** Links to the previous and the next step. */
    crumbs(set, step) {
      const steps = index ? [...new Set(index.groups.step.filter((_, group) => setOf(group).key === set))] : [], at = steps.indexOf(Number(step));
      const page = (index && index.page) || {}, before = steps[at - 1] ?? page.before, after = steps[at + 1] ?? page.after;
      const go = (to, rel, text) => (at >= 0 && to !== undefined && to !== null ? el("a", { href: `#step/${set}/${to}`, rel }, text) : "");
      return el("div", { class: "crumbs" }, el("a", { href: `#samples?set=${set}${isLive() ? `&at=${step}` : ""}` }, "samples"), el("span", {}, `step ${step}`), el("span", { class: "push" }), go(before, "prev", `← step ${before}`), go(after, "next", `step ${after} →`));
    },

    /** A later step may have been written meanwhile: update the links. */
    async update() {
      const [set, step] = parseHash().parts, crumbs = document.querySelector("#view-detail > .crumbs");
      if (loading || !index || !crumbs || crumbs.querySelector("[rel=next]")) return;
      await takePage(index.page.name);
      const fresh = this.crumbs(set, step).querySelector("[rel=next]");
      if (fresh && parseHash().parts.join() === [set, step].join()) crumbs.append(fresh);
    },

    async show(root, [set, step], query) {
      const groups = index ? index.groups.step.flatMap((each, group) => (each === Number(step) && setOf(group).key === set ? [group] : [])) : [];
      const crumbs = this.crumbs(set, step);
      if (!groups.length) return root.replaceChildren(crumbs, el("h2", {}, `Step ${step}`), el("p", { class: "note" }, isLive() ? "The run directory has no samples of the step." : "This report holds no sample of the step. The run directory has all samples."));
      const table = groupsTable(groups, "Prompt", (group) => el("span", { class: "preview" }, index.prompts[index.groups.prompt[group]]), `#step/${set}/${step}`, query.sort);
      root.replaceChildren(crumbs, el("h2", {}, `Step ${step}: ${count(groups.length)} groups`), table.element);
      table.fill();
    },
  };

  // ---------------------------------------------------------------- held-out answers

  function heldOut() {
    if (!index || index.heldOut) return index && index.heldOut;
    const models = index.sets.flatMap((set, place) => (set.isTraining ? [] : [{ ...set, place, name: set.key.replace(/^heldout-/, "") }]));
    const prompts = new Map();
    index.groups.prompt.forEach((prompt, group) => {
      const model = models.findIndex(({ place }) => place === index.groups.set[group]);
      if (model < 0) return;
      const id = index.groups.group[group];
      if (!prompts.has(id)) prompts.set(id, { id, prompt, groups: models.map(() => null), rewards: models.map(() => null) });
      const rewards = index.reward.slice(index.starts[group], index.starts[group + 1]).filter((each) => each !== null);
      const entry = prompts.get(id);
      entry.groups[model] = group;
      entry.rewards[model] = rewards.length ? rewards.reduce((sum, each) => sum + each, 0) / rewards.length : null;
    });
    index.heldOut = { models, prompts: [...prompts.values()] };
    return index.heldOut;
  }

  const heldOutView = {
    async update() {
      const size = index && index.size;
      if (!loading) await takePage("page/held-out");
      if (index && index.size !== size) await this.show($("held-out-live"), [], parseHash().query);
    },

    async show(root, [], query) {
      const held = heldOut();
      if (!held || !held.models.length) return root.replaceChildren();
      const { models, prompts } = held, at = (name) => models.findIndex((model) => model.name === name);
      const beats = (entry, a, b) => entry.rewards[a] !== null && entry.rewards[b] !== null && entry.rewards[a] > entry.rewards[b];
      const link = (change) => `#held-out?${new URLSearchParams(change)}`;
      const matrix = el("table", { class: "matrix" }, el("caption", { class: "note" }, "Prompts on which the model of the row gets a higher reward than the model of the column. A number filters the list."),
        el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "better ↓ than →"), models.map((model) => el("th", { scope: "col", class: "num" }, model.label)))),
        el("tbody", {}, models.map((rowModel, a) => el("tr", {}, el("th", { scope: "row" }, el("b", { class: rowModel.css }, rowModel.label)), models.map((columnModel, b) => {
          if (a === b) return el("td", { class: "num soft" }, "·");
          const wins = prompts.filter((entry) => beats(entry, a, b)).length;
          const isChosen = query.win === rowModel.name && query.lose === columnModel.name;
          return el("td", { class: "num" }, el("a", { href: link({ win: rowModel.name, lose: columnModel.name }), "aria-current": isChosen ? "true" : null, class: "cell", "aria-label": `${rowModel.label} better than ${columnModel.label}: ${wins} prompts` }, `${count(wins)}`));
        })))));
      const win = at(query.win), lose = at(query.lose), isFiltered = win >= 0 && lose >= 0;
      let shown = isFiltered ? prompts.filter((entry) => beats(entry, win, lose)) : prompts;
      const sort = query.sort || "prompt", key = sort.replace(/^-/, ""), isDown = sort.startsWith("-");
      if (key !== "prompt") shown = [...shown].sort((x, y) => (isDown ? -1 : 1) * ((x.rewards[at(key)] ?? -1e9) - (y.rewards[at(key)] ?? -1e9)));
      const columns = [{ key: "prompt", title: "Prompt", css: "text", sort: true, cell: (entry) => el("span", { class: "preview" }, index.prompts[entry.prompt]) },
        ...models.map((model, i) => ({ key: model.name, title: model.label, css: "num", sort: true, cell: (entry) => number(entry.rewards[i]) }))];
      const table = new VirtualTable(columns, { label: "Held-out prompts", open: (entry) => `#answers/${entry.id}`, sorted: [key, isDown], onSort: (name) => { location.hash = link({ ...query, sort: name === key && !isDown ? `-${name}` : name }); } });
      const said = isFiltered ? `${count(shown.length)} of ${count(prompts.length)} prompts: ${models[win].label} gets a higher reward than ${models[lose].label}.` : `${count(prompts.length)} prompts. The numbers are mean rewards.`;
      root.replaceChildren(el("h2", {}, "Held-out answers"), ...index.notes.filter((note) => note.startsWith("Held-out")).map((note) => el("p", { class: "note sampled" }, note)),
        el("div", { class: "card scroll" }, matrix), el("p", { class: "note", role: "status" }, said, isFiltered ? " " : "", isFiltered ? el("a", { href: "#held-out" }, "Show all") : ""), table.element);
      table.setRows(shown);
    },
  };

  const answersView = {
    async show(root, [id]) {
      const held = heldOut(), entry = held && held.prompts.find((each) => each.id === Number(id));
      if (!entry) return lost(root);
      const place = held.prompts.indexOf(entry), near = (offset) => held.prompts[(place + offset + held.prompts.length) % held.prompts.length].id;
      const read = await Promise.all(entry.groups.map((group) => (group === null ? null : loadGroup(group))));
      const asked = read.find((group) => group), highest = Math.max(...entry.rewards.filter((each) => each !== null)), isSplit = new Set(entry.rewards).size > 1;
      root.replaceChildren(
        el("div", { class: "crumbs" }, el("a", { href: "#held-out" }, "held-out answers"), el("span", {}, `prompt ${place + 1} of ${held.prompts.length}`), el("span", { class: "push" }), el("a", { href: `#answers/${near(-1)}` }, "← previous"), el("a", { href: `#answers/${near(1)}` }, "next →")),
        el("h2", {}, "Answers side by side"),
        promptCard(asked),
        el("div", { class: "group" }, read.map((group, model) => {
          if (!group) return "";
          const { label, css } = held.models[model], first = index.starts[entry.groups[model]];
          return el("article", { class: "card" }, el("header", {}, el("b", { class: css }, label), rewardChip(entry.rewards[model], isSplit ? (entry.rewards[model] === highest ? "best" : "rest") : "")),
            group.samples.slice(0, MAX_CARDS).map((sample, i) => el("div", { class: "turn" }, el("div", { class: "role" }, el("a", { href: hashOf(first + i) }, `completion ${i + 1}`), ` · reward ${number(index.reward[first + i])} · ${index.statuses[index.status[first + i]]}`), sample.turns ? sample.turns.map((turn) => turnNode(turn, css)) : spokenNodes(responseOf(sample)))));
        })));
    },
  };

  // ---------------------------------------------------------------- curves

  const curveState = { smoothing: 0, isLog: false, isWhole: false, filter: "" };

  /** Exponential moving average; gaps stay gaps. */
  function smoothed(values, share) {
    let mean = null, weight = 0;
    return values.map((value) => {
      if (value === null) return null;
      mean = mean === null ? value * (1 - share) : mean * share + value * (1 - share);
      weight = weight * share + (1 - share);
      return mean / weight;
    });
  }

  /** The range of an axis: the 1st to the 99th percentile, so that outliers do not flatten the curve, or all values if that is hardly wider. */
  function valueRange(values, { fromZero, minHigh }) {
    const sorted = values.filter((value) => value !== null && Number.isFinite(value)).sort((a, b) => a - b);
    if (!sorted.length) return [0, 1];
    let [low, high] = [sorted[0], sorted[sorted.length - 1]];
    if (!curveState.isWhole && sorted.length >= 20) {
      const at = (share) => sorted[Math.round(share * (sorted.length - 1))], [inner, outer] = [at(0.01), at(0.99)], span = outer - inner || Math.abs(outer) || 1;
      if (high - outer > 1.5 * span) high = outer;
      if (inner - low > 1.5 * span) low = inner;
    }
    if (curveState.isLog) return [low > 0 ? low : Math.min(...sorted.filter((value) => value > 0), 1), high > 0 ? high * 1.05 : 1];
    if (fromZero) [low, high] = [Math.min(0, low), Math.max(high, minHigh || 0)];
    const room = 0.06 * (high - low) || 0.1 * Math.abs(high) || 0.5;
    return [low >= 0 ? Math.max(0, low - room) : low - room, high + room];
  }

  /** A number with a few digits; tiny and huge numbers have an exponent. */
  const digits = (value, precision) => {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value), isExtreme = size && (size < 1e-4 || size >= 1e7);
    return (isExtreme ? value.toExponential(precision - 1).replace("e+", "e") : value.toLocaleString("en-US", { maximumSignificantDigits: precision })).replace(/-/g, "−");
  };
  const tick = (value) => (value === null ? "" : digits(value, 3));
  const exact = (value) => digits(value, 4);

  /** Build a view of curves: filters that change `curveState`, a note, and the body that `view.draw` fills. */
  function fillCurves(view, root, hint, ...filters) {
    const set = (change) => { Object.assign(curveState, change); view.draw(); };
    const toggle = (name, title) => el("label", { class: "check" }, el("input", { type: "checkbox", onchange: (event) => set({ [name]: event.target.checked }) }), title);
    const out = el("output", {}, "off");
    view.body = el("div", {});
    root.replaceChildren(
      el("div", { class: "filters" },
        field("Smoothing", el("span", { class: "range" }, el("input", { type: "range", min: "0", max: "0.98", step: "0.02", value: "0", "aria-label": "Smoothing", oninput: debounced((event) => { out.textContent = Number(event.target.value) ? event.target.value : "off"; set({ smoothing: Number(event.target.value) }); }, 60) }), out)),
        field("Metric", el("input", { type: "search", placeholder: "name", size: "16", "aria-label": "Show metrics with this in the name", oninput: debounced((event) => set({ filter: event.target.value.trim().toLowerCase() }), 150) })),
        toggle("isLog", "log axis"), toggle("isWhole", "with outliers"), ...filters),
      el("p", { class: "note" }, `Drag to zoom, double-click to reset. The crosshair is at the same step in all curves of a stage.${hint}`), view.body);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => view.draw());
    addEventListener("resize", debounced(() => { if (!$("view-curves").hidden) view.draw(); }, 150));
    view.draw();
  }

  const curvesView = {
    stages: null, plots: [],
    async show(root) {
      if (this.stages && !isLive()) return this.draw();
      this.stages = (await loadJson("curves")) || [];
      if (this.body) return this.draw();
      if (!this.stages.length) return root.closest("section").classList.add("no-curves");
      await window.runBlock("plot");
      fillCurves(this, root, " A click on a step of RL, or Enter, shows its groups.");
    },

    /** Add new points to the curves. If the set of curves changed, draw all of them again. */
    async update() {
      if (!this.body) return this.show($("curves-live"));
      const shape = () => JSON.stringify(this.stages.map((stage) => [stage.label, stage.metrics.map(({ name }) => name), Object.keys(stage.constant)]));
      const before = shape();
      this.stages = (await loadJson("curves")) || this.stages;
      if (shape() !== before) return this.draw();
      for (const plot of this.plots) {
        const stage = this.stages.find(({ label }) => label === plot.source.stage), metric = stage.metrics.find(({ name }) => name === plot.source.metric);
        plot.take(stage, metric);
      }
    },

    draw() {
      if (!this.stages.length) return;
      this.plots.forEach((plot) => plot.destroy());
      this.plots = [];
      const open = new Set([...this.body.querySelectorAll("details[open]")].map((each) => each.dataset.stage));
      const shown = ({ name, title }) => !curveState.filter || `${name} ${title}`.toLowerCase().includes(curveState.filter);
      const sections = this.stages.map((stage) => {
        const family = [], chosen = stage.metrics.filter(shown);
        const grid = (metrics) => el("div", { class: "cards charts" }, metrics.map((metric) => this.figure(stage, metric, family)));
        const main = chosen.filter(({ isMain }) => isMain), others = chosen.filter(({ isMain }) => !isMain);
        const rest = el("details", { "data-stage": stage.label, open: open.has(stage.label) || Boolean(curveState.filter) || !main.length });
        const fill = () => { if (rest.open && !rest.dataset.built) { rest.dataset.built = "1"; rest.append(grid(others)); this.mount(rest); } };
        rest.append(el("summary", {}, `${others.length} further metrics`));
        rest.addEventListener("toggle", fill);
        const constant = Object.entries(stage.constant).filter(([name]) => shown({ name, title: name }));
        return [el("h3", {}, el("span", { class: stage.css }, stage.label)), main.length ? grid(main) : "", others.length ? rest : "",
          constant.length ? el("p", { class: "note" }, "Constant: ", constant.map(([name, value]) => `${name} ${exact(value)}`).join(", "), ".") : "", fill];
      });
      this.body.replaceChildren(...sections.flatMap((nodes) => nodes.slice(0, -1)).filter((node) => node !== ""));
      this.mount(this.body);
      sections.forEach((nodes) => nodes[nodes.length - 1]());
    },

    figure(stage, metric, family) {
      const value = el("span", { "aria-live": "off" });
      const box = el("div", { class: "plot", tabindex: "0", role: "img" });
      const figure = el("figure", { class: "chart" }, el("figcaption", {}, el("b", {}, metric.title), value), box, metric.note ? el("p", { class: "note" }, metric.note) : "");
      box.mountPlot = () => this.plot(stage, metric, family, box, value);
      return figure;
    },

    mount(root) {
      for (const box of root.querySelectorAll(".plot")) if (box.mountPlot) { box.mountPlot(); box.mountPlot = null; }
    },

    /** The points of a curve: steps, values, and the smoothed values. */
    read(stage, metric) {
      const known = metric.values.map((each) => (curveState.isLog && each !== null && each <= 0 ? null : each));
      const isSparse = known.filter((each) => each !== null).length < 0.5 * known.length;
      const places = known.map((_, i) => i).filter((i) => !isSparse || known[i] !== null);
      const xs = places.map((i) => stage.steps[i]), raw = places.map((i) => known[i]);
      const numbers = raw.filter((each) => each !== null), ends = numbers.length ? `${exact(numbers[0])} → ${exact(numbers[numbers.length - 1])}` : "no value above 0";
      return { xs, raw, line: curveState.smoothing ? smoothed(raw, curveState.smoothing) : raw, isSparse, numbers, ends };
    },

    plot(stage, metric, family, box, value) {
      const style = getComputedStyle(document.body), ink = (name) => style.getPropertyValue(name).trim(), color = ink(`--${stage.css}`) || ink("--accent");
      let { xs, raw, line, isSparse, numbers, ends } = this.read(stage, metric);
      const tell = () => {
        value.textContent = ends;
        box.setAttribute("aria-label", `${metric.title}, ${stage.label}: ${ends}; arrow keys move along the ${stage.xName}s`);
      };
      tell();
      const axis = { stroke: ink("--soft"), grid: { stroke: ink("--rule"), width: 1 }, ticks: { stroke: ink("--rule"), size: 4 }, font: "11px system-ui, sans-serif" };
      const faint = curveState.smoothing > 0;
      const plot = new window.uPlot({
        width: box.clientWidth || 300, height: 168, legend: { show: false }, padding: [8, 18, 0, 0],
        cursor: { sync: { key: stage.label, scales: ["x", null] }, y: false, drag: { x: true, y: false, setScale: true }, points: { size: 7 } },
        scales: { x: { time: false }, y: { distr: curveState.isLog ? 3 : 1, range: (u) => {
          const [low, high] = [u.scales.x.min, u.scales.x.max], seen = low === null || low === undefined ? raw : raw.filter((_, i) => xs[i] >= low && xs[i] <= high);
          return valueRange(seen, metric);
        } } },
        axes: [{ ...axis, space: 46, size: 26, values: (_, ticks) => ticks.map((at) => (at % 1 && stage.xName === "step" ? "" : count(at))) }, { ...axis, size: (_, labels) => 14 + 6.6 * Math.max(4, ...(labels || []).map((label) => label.length)), space: 30, values: (_, ticks) => ticks.map(tick) }],
        series: [{}, { stroke: color, width: faint ? 1 : 1.6, alpha: faint ? 0.3 : 1, points: { show: numbers.length === 1 || isSparse, size: 4 } }, ...(faint ? [{ stroke: color, width: 2, points: { show: false } }] : [])],
        hooks: {
          setCursor: [(u) => { const i = u.cursor.idx; value.textContent = i === null || i === undefined ? ends : `${stage.xName} ${tick(xs[i])}: ${exact(line[i])}`; }],
          setScale: [(u, key) => {
            if (key !== "x" || this.isZooming) return;
            this.isZooming = true;
            for (const other of family) if (other !== u) other.setScale("x", { min: u.scales.x.min, max: u.scales.x.max });
            this.isZooming = false;
          }],
          draw: [(u) => {
            if (stage.mark === null) return;
            const x = u.valToPos(stage.mark, "x", true), { ctx, bbox } = u;
            if (x < bbox.left || x > bbox.left + bbox.width) return;
            ctx.save();
            ctx.strokeStyle = ink("--soft"); ctx.setLineDash([4, 4]); ctx.beginPath(); ctx.moveTo(x, bbox.top); ctx.lineTo(x, bbox.top + bbox.height); ctx.stroke();
            ctx.restore();
          }],
        },
      }, faint ? [xs, raw, line] : [xs, raw], box);
      plot.source = { stage: stage.label, metric: metric.name };
      plot.take = (newStage, newMetric) => {
        const isZoomed = plot.scales.x.min > xs[0] || plot.scales.x.max < xs[xs.length - 1];
        ({ xs, raw, line, isSparse, numbers, ends } = this.read(newStage, newMetric));
        if (plot.cursor.idx === null || plot.cursor.idx === undefined) tell();
        plot.setData(faint ? [xs, raw, line] : [xs, raw], !isZoomed);
        if (isZoomed) plot.redraw();
      };
      family.push(plot);
      this.plots.push(plot);
      const open = (i) => { if (stage.set && i !== null && i !== undefined) location.hash = `#step/${stage.set}/${Math.round(xs[i])}`; };
      let down = 0;
      plot.over.addEventListener("mousedown", (event) => { down = event.clientX; });
      plot.over.addEventListener("click", (event) => { if (Math.abs(event.clientX - down) < 4) open(plot.cursor.idx); });
      plot.over.addEventListener("dblclick", () => family.forEach((each) => each.setScale("x", { min: xs[0], max: xs[xs.length - 1] })));
      let at = null;
      box.addEventListener("keydown", (event) => {
        const moves = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[event.key];
        if (event.key === "Enter") return open(at);
        if (moves === undefined) return;
        event.preventDefault();
        at = Math.max(0, Math.min(xs.length - 1, (at === null ? (moves > 0 ? -1 : xs.length) : at) + moves));
        value.setAttribute("aria-live", "polite");
        plot.setCursor({ left: plot.valToPos(xs[at], "x"), top: plot.over.clientHeight / 2 });
      });
    },
  };

  // ---------------------------------------------------------------- rows of SFT

  let sftRows = null;
  async function loadRows() {
    if (!sftRows) {
      sftRows = await loadJson("rows");
      if (sftRows && sftRows.vocabulary) takeWords({ ...sftRows.vocabulary, texts: { ...vocabulary.texts, ...sftRows.vocabulary.texts } });
      if (sftRows) sftRows.rows.forEach((row, place) => Object.assign(row, { place, tokens: row.t ? numbersOf(row.t) : [], mask: unrolled(row.m || []) }));
    }
    return sftRows;
  }
  const rowText = (row) => (row.t ? tokenTexts(row.tokens).join("") : row.reason).replace(/\s+/g, " ").slice(0, 240);
  const numTrained = (row) => row.mask.filter(Boolean).length;

  function histogram({ lengthCounts, maxLength }) {
    if (!lengthCounts.length) return "";
    const ns = "http://www.w3.org/2000/svg", most = Math.max(...lengthCounts, 1), bar = 300 / lengthCounts.length;
    const make = (tag, attributes, text) => { const node = document.createElementNS(ns, tag); Object.entries(attributes).forEach(([name, value]) => node.setAttribute(name, value)); if (text) node.textContent = text; return node; };
    const svg = make("svg", { viewBox: "0 0 340 150", role: "img", "aria-label": `Lengths of the samples in tokens, up to the limit ${maxLength}` });
    lengthCounts.forEach((each, i) => svg.append(make("rect", { class: "bin", x: 20 + i * bar, width: Math.max(1, bar - 1), y: 120 - (110 * each) / most, height: (110 * each) / most })));
    svg.append(make("path", { class: "axis", d: "M20,120H320" }), make("path", { class: "mark", d: "M320,8V120" }), make("text", { class: "x", x: 20, y: 136 }, "0"), make("text", { class: "x", x: 170, y: 136 }, count(maxLength / 2)), make("text", { class: "x", x: 312, y: 136 }, count(maxLength)), make("text", { class: "x", x: 170, y: 149 }, "tokens; dashed: the limit"));
    return el("figure", { class: "chart" }, el("figcaption", {}, el("b", {}, "Lengths"), el("span", {}, `most in a bin: ${count(most)}`)), svg);
  }

  const rowsView = {
    async show(root, [], query) {
      const read = await loadRows();
      if (!read) return root.replaceChildren(el("h2", {}, "SFT rows"), el("p", { class: "note" }, document.body.dataset.samples === "all" ? "The run directory does not record rows of SFT." : "This report was written without rows of SFT."));
      const outcomes = [...new Set(read.rows.map(({ outcome }) => outcome))], sort = query.sort || "row", key = sort.replace(/^-/, ""), isDown = sort.startsWith("-");
      const readValue = { row: (row) => row.place, text: rowText, tokens: (row) => row.tokens.length, trained: numTrained, outcome: (row) => row.outcome }[key] || ((row) => row.place);
      const shown = read.rows.filter(({ outcome }) => !query.outcome || outcome === query.outcome)
        .sort((a, b) => { const [x, y] = [readValue(a), readValue(b)]; return x === y ? a.place - b.place : (isDown ? -1 : 1) * (x < y ? -1 : 1); });
      const link = (change) => `#sft-rows?${new URLSearchParams(Object.entries({ ...query, ...change }).filter(([, value]) => value))}`;
      const columns = [
        { key: "row", title: "Row", css: "num", sort: true, cell: (row) => count(row.row) },
        { key: "text", title: "Text", css: "text", sort: true, cell: (row) => el("span", { class: "preview" }, rowText(row)) },
        { key: "tokens", title: "Tokens", css: "num", sort: true, cell: (row) => (row.tokens.length ? count(row.tokens.length) : "–") },
        { key: "trained", title: "Trained", css: "num mid", sort: true, cell: (row) => (row.tokens.length ? count(numTrained(row)) : "–") },
        { key: "outcome", title: "Outcome", css: "mid", sort: true, cell: (row) => row.outcome },
        ...(read.rows.some(({ reason }) => reason) ? [{ key: "reason", title: "Reason", css: "text wide", sort: false, cell: (row) => row.reason }] : []),
      ];
      const table = new VirtualTable(columns, { label: "Rows of SFT", open: (row) => `#sft-row/${row.place}`, sorted: [key, isDown], onSort: (name) => { location.hash = link({ sort: name === key && !isDown ? `-${name}` : name }); } });
      const facts_ = [["Rows", count(read.numRows)], ["Left out", `${count(read.numDropped)}${read.numDropped ? `, longer than ${count(read.maxLength)} tokens` : ""}`], ["Trained tokens", read.trainedShare === null ? "–" : `${digits(100 * read.trainedShare, 3)} %`], ["Limit", `${count(read.maxLength)} tokens`]];
      root.replaceChildren(el("h2", {}, "SFT rows as training saw them"),
        el("div", { class: "halves" }, el("div", { class: "card" }, el("dl", { class: "facts" }, facts_.map(([what, text]) => el("div", {}, el("dt", {}, what), el("dd", {}, text)))), el("p", { class: "note" }, `${count(read.rows.length)} rows at even distances, and the first ones that were left out. `, el("code", { class: "unbroken" }, "rollouts validate --show N"), " prints rows in the same way.")), histogram(read)),
        el("p", { class: "note" }, ["", ...outcomes].map((outcome) => el("a", { class: "chip", href: `#sft-rows${outcome ? `?outcome=${outcome}` : ""}`, "aria-current": (query.outcome || "") === outcome ? "true" : null }, outcome || "all"))),
        table.element);
      table.setRows(shown);
    },
  };

  const rowView = {
    async show(root, [place]) {
      const read = await loadRows(), row = read && read.rows[Number(place)];
      if (!row) return lost(root);
      const view = { tokens: row.tokens, mask: row.mask, versions: row.tokens.map(() => null), advantages: null, logprobs: null, byTrainer: null, texts: tokenTexts(row.tokens) };
      colour = "mask";
      const near = (offset) => `#sft-row/${(row.place + offset + read.rows.length) % read.rows.length}`;
      root.replaceChildren(
        el("div", { class: "crumbs" }, el("a", { href: "#sft-rows" }, "SFT rows"), el("span", {}, `row ${count(row.row)}`), el("span", { class: "push" }), el("a", { href: near(-1), rel: "prev" }, "← previous"), el("a", { href: near(1), rel: "next" }, "next →")),
        el("h2", {}, `Row ${count(row.row)}: ${row.outcome}`), el("p", { class: "soft path" }, read.sources[row.s]), row.reason ? el("p", {}, row.reason) : "",
        el("p", { class: "soft" }, row.tokens.length ? `${count(row.tokens.length)} tokens, ${count(numTrained(row))} of them trained on` : "Nothing of the row is trained on."),
        row.tokens.length ? el("div", { class: "card" }, el("p", { class: "key" }, COLOURS.mask.legend().map(([css, text]) => el("span", {}, el("i", { class: `t ${css}` }, " "), text))), tokenBlock(view, { label: "Tokens of the row" })) : "");
    },
  };

  // ---------------------------------------------------------------- settings

  const runView = {
    async show(root) {
      const settings = root.childElementCount ? null : await loadJson("settings");
      if (!settings) return;
      const changed = settings.filter(([, , , isChanged]) => isChanged).length;
      const lines = settings.map(([name, value, normal, isChanged]) => el("tr", { class: isChanged ? "selected" : null }, el("td", { class: "path" }, name), el("td", { class: "path" }, value), el("td", { class: "path soft" }, normal)));
      const head = ["Setting", "Value", "Default"].map((title) => el("th", { scope: "col" }, title));
      root.append(el("h2", {}, "All settings"), el("details", { class: "card settings" }, el("summary", {}, `${settings.length} settings, ${changed} differ from their defaults`),
        el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, head)), el("tbody", {}, lines)))));
    },
  };

  // ---------------------------------------------------------------- addresses

  const VIEWS = {
    overview: { root: "overview" }, run: { root: "settings-live", view: runView, page: "run" }, curves: { root: "curves-live", view: curvesView, page: "curves" },
    "sft-rows": { root: "sft-rows", view: rowsView }, "sft-row": { root: "detail", view: rowView, nav: "sft-rows" }, step: { root: "detail", view: stepView, nav: "samples" },
    samples: { root: "samples", view: samplesView }, sample: { root: "detail", view: sampleView, nav: "samples" },
    group: { root: "detail", view: groupView, nav: "samples" }, prompt: { root: "detail", view: promptView, nav: "samples" },
    "held-out": { root: "held-out-live", view: heldOutView, page: "held-out" }, answers: { root: "detail", view: answersView, nav: "held-out" },
  };

  function parseHash() {
    const [path, query] = location.hash.replace(/^#/, "").split("?");
    const [name, ...parts] = path.split("/").map((part) => { try { return decodeURIComponent(part); } catch { return part; } });
    return { name: VIEWS[name] ? name : "overview", parts, query: Object.fromEntries(new URLSearchParams(query || "")) };
  }

  async function route(event) {
    const { name, parts, query } = parseHash(), chosen = VIEWS[name], shown = chosen.page || chosen.root, root = $(chosen.page ? chosen.root : `view-${chosen.root}`);
    for (const section of document.querySelectorAll("main > [data-view]")) section.hidden = section.dataset.view !== shown;
    for (const link of document.querySelectorAll("#views a")) {
      const isHere = link.getAttribute("href") === `#${chosen.nav || name}`;
      if (isHere) link.setAttribute("aria-current", "page"); else link.removeAttribute("aria-current");
    }
    const views = $("views"), here = views.querySelector("[aria-current]");
    if (here) views.scrollLeft = here.offsetLeft - (views.clientWidth - here.offsetWidth) / 2;
    document.body.dataset.view = name;
    if (event) scrollTo(0, 0);
    if (isLive() && chosen.view) await holdFor(name, parts, query);
    if (chosen.view) await chosen.view.show(root, parts, query);
    document.body.dataset.shown = location.hash;
  }

  /** Run a script that changes views of this page, such as compare.js, with access to the parts that it needs. */
  async function runBeside(block) {
    window.viewerParts = { $, VIEWS, el, count, loadJson, curveState, smoothed, valueRange, tick, exact, fillCurves };
    await window.runBlock(block);
  }

  /** Links to the views that have content. */
  function drawNav() {
    const entries = [["overview", "Overview"], ["curves", "Curves"], ["samples", "Samples"], ["held-out", "Held-out"], ["sft-rows", "SFT rows"], ["run", "Run"]];
    const has = (name) => isLive() ? document.body.dataset.views.split(" ").includes(name) : $(`view-${VIEWS[name].page || VIEWS[name].root}`) && (name !== "sft-rows" || $("data-rows"));
    const linkTo = ([name]) => $("views").querySelector(`[href="#${name}"]`);
    entries.forEach((entry, i) => {
      const [name, title] = entry;
      if (has(name) && !linkTo(entry)) $("views").insertBefore(el("a", { href: `#${name}` }, title), entries.slice(i + 1).map(linkTo).find(Boolean) || null);
    });
    $("views").hidden = false;
  }

  async function start() {
    if (!isLive()) {
      const [read, words] = await Promise.all([loadJson("index"), loadJson("vocabulary")]);
      if (read) index = prepareIndex(read);
      if (words) takeWords(words);
    }
    document.head.append(el("style", {}, await window.loadBlock("style")));
    document.body.classList.add("live");
    drawNav();
    if ($("data-compare")) await runBeside("compare");
    addEventListener("newdata", async ({ detail }) => {
      drawNav();
      const { view } = VIEWS[parseHash().name];
      const isShown = view === curvesView ? detail.includes("curves") : detail.includes("pages");
      if (isShown && view && view.update) await view.update();
    });
    addEventListener("hashchange", route);
    addEventListener("keydown", (event) => {
      if (event.key !== "/" || event.ctrlKey || event.metaKey || /^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement.tagName)) return;
      const box = document.querySelector("#view-samples:not([hidden]) input[name=q]");
      if (box) { event.preventDefault(); box.focus(); }
    });
    await route();
  }
  start();
})();
